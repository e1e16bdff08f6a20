"""Decode kernel: y = x W^T for a few rows of x, with the weights kept packed until they reach tensor-core registers.

One program computes a tile of BLOCK_N output features (the M side of `tl.dot`) by BLOCK_M activation rows (the N side,
8 for the smallest batches) over its share of the superblocks:

    for each superblock of 256 columns:          words, scales and activations arrive by asynchronous copies
        for each group:                          floats = bias + integer, one lop3 per pair of weights
            p = floats . x - bias . x            the bias leaves through one small extra dot, or by FMA on the floats
            acc += scale * p
    acc += outliers                              every lane walks the slots of its own row
    split-K partials go to a workspace; the last program of a row tile adds them in a fixed order and writes y

For few rows of x a program can instead multiply RANGES ranges of columns side by side, without split-K. The tile
repeats its BLOCK_N / RANGES features RANGES times, once per range, and likewise BLOCK_M / RANGES rows of x. The
products of a range's weights with the same range's activations lie on the diagonal, and `sum_ranges` adds them.

Index names: rn tile row, rm activation row, sb superblock, part the split-K share.
"""

from functools import lru_cache
from typing import Any

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from vllm_latq.kernels.configs import COMPILER, DecodeConfig
from vllm_latq.kernels.decode.launch import Scratch, Variant, variant_of, weight_arguments
from vllm_latq.kernels.device.epilogue import add_parts, output_rows, store_rows, sum_ranges
from vllm_latq.kernels.device.fields import planes_of, words_of
from vllm_latq.kernels.device.outlier_tile import (
    MOST_WRITERS,
    begin_transposed,
    entry_lines,
    finish_transposed,
    load_slots,
    longest_slice,
    outlier_places,
    outlier_tile,
    prefetch_lines,
)
from vllm_latq.kernels.device.product import piece_product
from vllm_latq.kernels.device.registers import paired_columns
from vllm_latq.kernels.device.tiles import (
    activation_places,
    load_planes,
    load_scale,
    prefetch_tile,
    tile_scale_pairs,
    tile_words,
)
from vllm_latq.kernels.layout.weight import KernelWeight

# Programmatic dependent launch: the driver starts the kernel when programs of the kernel before it end or allow it.
DEPENDENT_LAUNCH = {"DEPENDENT": True, "launch_pdl": True}


# Numbers of rows change while serving, and no new number may compile another kernel.
@triton.jit(do_not_specialize=("M", "supers", "supers_per_part", "writers"))
def ssqr_tensor_core(
    x_ptr,  # bf16 or fp16 [M, K]
    word_ptr,  # int32 [row blocks, superblocks, planes, 64, words]: packed codes
    scale_ptr,  # int32 [row blocks, superblocks, 128 / GROUP, 64]: pairs of bf16 group scales; None without groups
    flat_scale_ptr,  # float32 [padded rows]: the scale of a whole row; None unless HAS_FLAT_SCALES
    row_scale_ptr,  # float32 [padded rows]; None unless HAS_ROW_SCALES
    order_ptr,  # int32 [padded rows]: the row of y that each tile row computes
    entry_ptr,  # int32 [slots, 16]: outliers; None without
    slice_ptr,  # int32 [padded rows / 16 + 1]: first slot of each slice; None without outliers
    xt_ptr,  # dtype of x [K, OUTLIER_ROWS]: x^T, which the kernel writes; None unless TRANSPOSED
    xt_as_int64_ptr,  # int64 [K, OUTLIER_ROWS / 4]: the same memory, four rows of x at a time; None unless TRANSPOSED
    partial_ptr,  # float32 [tiles, parts, BLOCK_M, BLOCK_N]; None unless SPLIT
    ticket_ptr,  # int32 [row blocks + 1]: zeros before and after; the last counts the writers of x^T
    y_ptr,  # [M, N], contiguous
    M,  # rows of x
    N,  # rows of the weight
    K,  # columns
    stride_xm,  # elements from one row of x to the next
    supers,  # superblocks
    supers_per_part,  # superblocks of a part of split-K, or of a range of columns
    writers,  # programs that write x^T
    BITS: tl.constexpr,  # 2, 3, 4 or 8
    GROUP: tl.constexpr,  # 32, 64 or 128; -1 without group scales
    MIDRISE: tl.constexpr,  # the grid lies half a step above the multiples of the scale
    BLOCK_N: tl.constexpr,  # weight rows of a tile, 64 or 128
    BLOCK_M: tl.constexpr,  # activation rows of a tile, 8 to 64
    STAGES: tl.constexpr,  # superblocks that are copied ahead
    BIAS_DOT: tl.constexpr,  # the bias leaves by an extra dot, instead of on the floats
    BIAS_ROWS: tl.constexpr,  # rows of the constant operand of this dot
    PAIRED: tl.constexpr,  # columns are taken in the order of `registers.paired_words`
    OUTLIER_ROWS: tl.constexpr,  # rows of x for which outliers are added; 0 without outliers
    SLOTS: tl.constexpr,  # slots of a row that are read at once
    TRANSPOSED: tl.constexpr,  # outliers read x^T, instead of gathering x
    PIECE: tl.constexpr,  # columns of x^T that are written at once
    SPLIT: tl.constexpr,  # several parts share a tile
    RANGES: tl.constexpr,  # ranges of columns side by side in a tile
    EVEN_K: tl.constexpr,  # K is a multiple of 256
    HAS_FLAT_SCALES: tl.constexpr,
    HAS_ROW_SCALES: tl.constexpr,
    ASM: tl.constexpr,  # NVIDIA inline assembly
    UPCAST: tl.constexpr,  # products take float32 operands
    DEPENDENT: tl.constexpr = False,  # begins before the kernel before it ends
):
    """Grid (padded rows / BLOCK_N * RANGES, parts). See the module docstring."""
    tile, part, parts = tl.program_id(0), tl.program_id(1), tl.num_programs(1)
    TILE_ROWS: tl.constexpr = BLOCK_N // RANGES
    TILE_M: tl.constexpr = BLOCK_M // RANGES
    HALF: tl.constexpr = x_ptr.dtype.element_ty == tl.float16
    SIZE: tl.constexpr = 128 if GROUP == -1 else GROUP
    # When outliers are asked for depends on the registers that the loop leaves. At 8 rows the first turn's entries are
    # loaded before the loop, which hides the time that memory takes. At more rows they are loaded after it, and lines
    # are brought into L2 ahead: in the loop, at 64 rows before it, and not at all in groups of 32 below 64 rows.
    LOAD_FIRST: tl.constexpr = OUTLIER_ROWS > 0 and BLOCK_M == 8
    PREFETCH_FIRST: tl.constexpr = OUTLIER_ROWS > 0 and ASM and BLOCK_M == 64
    PREFETCH_IN_LOOP: tl.constexpr = OUTLIER_ROWS > 0 and ASM and BLOCK_M > 8 and BLOCK_M < 64 and GROUP != 32
    rn = tl.arange(0, BLOCK_N)
    begin = part * supers_per_part
    end = min(begin + supers_per_part, supers)
    words = tile_words(word_ptr, tile, supers, begin, supers_per_part, BITS, BLOCK_N, RANGES)
    if GROUP != -1:
        pairs = tile_scale_pairs(scale_ptr, tile, supers, begin, supers_per_part, GROUP, BLOCK_N, RANGES)
    row, col = activation_places(SIZE, BLOCK_M, PAIRED)
    if RANGES > 1:
        col += row // TILE_M * supers_per_part * 256
        row = row % TILE_M
    xs = x_ptr + begin * 256 + row * stride_xm + col
    live = (row < M) & (col >= 0)
    counter_ptr = ticket_ptr + tl.num_programs(0) * TILE_ROWS // 64  # after the tickets of all row blocks
    if DEPENDENT:  # the weight was there long ago, but everything else waits for the kernel before
        gdc_launch_dependents()
        for i in tl.static_range(STAGES):
            if begin + i < end:
                prefetch_tile(word_ptr, tile, supers, begin + i, supers_per_part, BITS, BLOCK_N, RANGES)
        gdc_wait()
    if TRANSPOSED:
        begin_transposed(x_ptr, stride_xm, xt_ptr, counter_ptr, M, K, writers, OUTLIER_ROWS, PIECE)
    if OUTLIER_ROWS > 0:
        longest = longest_slice(slice_ptr, tile, TILE_ROWS)
    if PREFETCH_FIRST or PREFETCH_IN_LOOP:
        lines, last, step, turns = entry_lines(entry_ptr, slice_ptr, tile, part, parts, TILE_ROWS)
    if PREFETCH_FIRST:
        for _ in range(turns):
            prefetch_lines(lines, last)
            lines += step
    if LOAD_FIRST:
        at, count = outlier_places(slice_ptr, tile, M, BLOCK_N, OUTLIER_ROWS, SLOTS, TRANSPOSED, RANGES)
        entries = load_slots(entry_ptr, at, count, part * SLOTS, SLOTS)
    acc = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    for sb in tl.range(begin, end, num_stages=STAGES):
        if PREFETCH_IN_LOOP:  # noqa: SIM102 (the compiler knows it)
            if sb > begin:  # after the first superblock, which everything waits for
                prefetch_lines(lines, last)
                lines += step
        a, b, c, d = load_planes(words, BITS)
        for i in tl.static_range(256 // SIZE):
            if EVEN_K:
                x = tl.load(xs + i * SIZE, mask=live, other=0.0)
            else:
                x = tl.load(xs + i * SIZE, mask=live & (sb * 256 + i * SIZE + col < K), other=0.0)
            if PAIRED:
                x = paired_columns(x, BLOCK_M)
            p = piece_product(
                a, b, c, d, x, i, SIZE, BITS, HALF, BLOCK_N, BIAS_DOT, BIAS_ROWS, MIDRISE, PAIRED, ASM, UPCAST
            )
            if GROUP == -1:
                acc += p
            else:
                acc += p * load_scale(pairs, i)[:, None]
        words += planes_of(BITS) * 64 * words_of(BITS)
        if GROUP != -1:
            pairs += 64 * (128 // GROUP)
        xs += 256
    if HAS_FLAT_SCALES:
        acc *= tl.load(flat_scale_ptr + tile * TILE_ROWS + rn % TILE_ROWS)[:, None]
    if OUTLIER_ROWS > 0:
        if not LOAD_FIRST:
            at, count = outlier_places(slice_ptr, tile, M, BLOCK_N, OUTLIER_ROWS, SLOTS, TRANSPOSED, RANGES)
            entries = load_slots(entry_ptr, at, count, part * SLOTS, SLOTS)
        if TRANSPOSED:
            finish_transposed(x_ptr, stride_xm, xt_ptr, counter_ptr, M, K, writers, OUTLIER_ROWS, PIECE)
        extra = outlier_tile(
            xt_as_int64_ptr if TRANSPOSED else x_ptr, stride_xm, entry_ptr, entries, at, count, longest, part * RANGES,
            parts * RANGES, M, BLOCK_N, OUTLIER_ROWS, SLOTS, TRANSPOSED, HALF,
        )  # fmt: skip
        if OUTLIER_ROWS < TILE_M:
            extra = tl.where((tl.arange(0, TILE_M) == 0)[None, :], extra, 0.0)
        if RANGES == 1:
            acc += extra
    if RANGES > 1:
        acc = sum_ranges(acc, extra if OUTLIER_ROWS > 0 else 0.0, RANGES)
    rows, factor = output_rows(order_ptr, row_scale_ptr, tile, TILE_ROWS, HAS_ROW_SCALES, OUTLIER_ROWS > 0)
    if SPLIT:
        acc, last = add_parts(acc, partial_ptr, ticket_ptr, tile, part, parts, M)
        if last:
            store_rows(acc, rows, factor, y_ptr, N, M, HAS_ROW_SCALES)
    else:
        store_rows(acc, rows, factor, y_ptr, N, M, HAS_ROW_SCALES)


def launch_ssqr(
    x: torch.Tensor,
    weight: KernelWeight,
    y: torch.Tensor,
    config: DecodeConfig,
    scratch: Scratch,
    m: int | None = None,
) -> None:
    """Run the tensor-core kernel. Allocates nothing, checks nothing: see `dispatch.ssqr_matmul`.

    Args:
        x: [n, cols], bfloat16 or float16, last dimension contiguous, n <= m.
        weight: see `KernelWeight`.
        y: [n, rows], contiguous, dtype of x.
        config: serves m rows.
        scratch: for m rows of x.
        m: number of rows for which the kernel is chosen (default: n).
    """
    grid, arguments = launch_arguments(x, weight, y, config, scratch, m or x.shape[0])
    if config.dependent and x.is_cuda and torch.version.hip is None:
        arguments |= DEPENDENT_LAUNCH
    ssqr_tensor_core[grid](**arguments)


def launch_arguments(
    x: torch.Tensor, weight: KernelWeight, y: torch.Tensor, config: DecodeConfig, scratch: Scratch, m: int
) -> tuple[tuple[int, int], dict[str, Any]]:
    """Return the grid and the arguments, by name, of `ssqr_tensor_core` for the rows of x, or fewer, and m at most."""
    parts, ranges, xt = scratch.parts, scratch.ranges, scratch.transposed
    assert parts == 1 or ranges == 1, "the kernel has either"
    assert ranges <= config.block_n // 16, "slices of outliers have 16 rows"
    grid = (weight.padded_rows // config.block_n * ranges, parts)
    writers = 0
    if xt is not None:  # the programs that write it should all run at once
        together = weight.processors * config.programs(weight.bits, weight.group_size)
        writers = min(grid[0] * grid[1], together, -(-weight.cols // config.piece), MOST_WRITERS)
    arguments = weight_arguments(weight)
    arguments |= {
        "x_ptr": x,
        "xt_ptr": xt,
        "xt_as_int64_ptr": None if xt is None else xt.view(torch.int64),
        "partial_ptr": scratch.partials,
        "y_ptr": y,
        "M": x.shape[0],
        "K": weight.cols,
        "stride_xm": x.stride(0),
        "supers_per_part": -(-weight.superblocks // (parts * ranges)),
        "writers": writers,
        "num_warps": config.num_warps,
    }
    arguments |= ssqr_constants(config, variant_of(x, weight, m, parts, ranges))
    arguments |= COMPILER
    return grid, arguments


@lru_cache(maxsize=1024)
def ssqr_constants(config: DecodeConfig, variant: Variant) -> dict[str, int | bool]:
    """Return the compile-time arguments of `ssqr_tensor_core`, by name."""
    outlier_rows = config.outlier_rows(variant.m, variant.ranges) if variant.outliers else 0
    slots = config.slots_for(outlier_rows, variant.transposed, variant.ranges)
    return {
        "BITS": variant.bits,
        "GROUP": variant.group_size,
        "MIDRISE": variant.midrise,
        "BLOCK_N": config.block_n,
        "BLOCK_M": config.max_rows,
        "STAGES": config.stages_for(variant.bits),
        "BIAS_DOT": config.bias_dot,
        "BIAS_ROWS": config.bias_rows,
        "PAIRED": config.paired,
        "OUTLIER_ROWS": outlier_rows,
        "SLOTS": slots,
        "TRANSPOSED": variant.transposed,
        "PIECE": config.piece,
        "SPLIT": variant.split,
        "RANGES": variant.ranges,
        "EVEN_K": variant.whole_superblocks,
        "HAS_FLAT_SCALES": variant.flat_scales,
        "HAS_ROW_SCALES": variant.row_scales,
        "ASM": variant.asm,
        "UPCAST": variant.upcast,
    }
