"""Decode kernel: y = x W^T for a few rows of x, with the weights kept packed until they reach tensor-core registers.

One program computes a tile of BLOCK_N output features (the M side of `tl.dot`) by BLOCK_M activation rows (the N side,
8 for the smallest batches) over its share of the superblocks:

    for each superblock of 256 columns:          words, scales and activations arrive by asynchronous copies
        for each group:                          floats = bias + integer, one lop3 per pair of weights
            p = floats . x - bias . x            the bias leaves through one small extra dot, or by FMA on the floats
            acc += scale * p
    acc += outliers                              every lane walks the slots of its own row
    split-K partials go to a workspace; the last program of a row tile adds them in a fixed order and writes y

For few rows of x it can do so for RANGES ranges of columns side by side, instead of split-K: the tile has
BLOCK_N / RANGES features over and over, and BLOCK_M / RANGES rows of x over and over, each time of another range. Of
the products, those of one range with itself lie on the diagonal, and `sum_ranges` adds them.

Index names: rn tile row, rm activation row, sb superblock, part the split-K share.
"""

from typing import Any

import torch
import triton
import triton.language as tl

from vllm_latq.kernels.configs import COMPILER, DecodeConfig, slots_of
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
from vllm_latq.kernels.device.tiles import activation_places, load_planes, load_scale, tile_scale_pairs, tile_words
from vllm_latq.kernels.device.unpack import anew, below, bias_piece, floats_piece, paired_columns, upper_rows
from vllm_latq.kernels.layout.weight import KernelWeight


@triton.jit
def multiply(a, b, acc, UPCAST: tl.constexpr):
    """acc + a . b in float32. The interpreter multiplies raw bits of bf16, so it gets float32 operands."""
    if UPCAST:
        return tl.dot(a.to(tl.float32), b.to(tl.float32), acc, input_precision="ieee")
    else:
        return tl.dot(a, b, acc)


@triton.jit
def constant_dot(
    words, x, P: tl.constexpr, SIZE: tl.constexpr, BITS: tl.constexpr, HALF: tl.constexpr, BIAS_ROWS: tl.constexpr,
    MIDRISE: tl.constexpr, PAIRED: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    """float32 [rows of words, BLOCK_M], equal rows: what is the same for all weights of a piece, by BIAS_ROWS rows.

    That is minus the bias times x.

    The constant operand is built from the loaded words (their bits cancel), so that the compiler gives both dots one
    operand layout: otherwise x would be read from shared memory twice and no longer copied asynchronously.
    """
    rows: tl.constexpr = words.shape[0]
    top = words
    if rows > BIAS_ROWS:
        top = upper_rows(top)
    if rows > 2 * BIAS_ROWS:
        top = upper_rows(top)
    if rows > 4 * BIAS_ROWS:
        top = upper_rows(top)
    zero = (top.to(tl.uint32, bitcast=True) >> 16 >> 16).to(tl.int32, bitcast=True)
    p = tl.zeros((BIAS_ROWS, x.shape[1]), tl.float32)
    bias = anew(bias_piece(zero, P, SIZE, BITS, 0, HALF, MIDRISE, PAIRED), P, PAIRED)
    p = multiply(bias, anew(x, 5, PAIRED), p, UPCAST)
    if BITS == 8:
        bias = anew(bias_piece(zero, P, SIZE, BITS, 1, HALF, MIDRISE, PAIRED), P, PAIRED)
        p = multiply(bias, anew(x, 1, PAIRED), p, UPCAST)
    if rows > BIAS_ROWS:
        p = below(p, p)
    if rows > 2 * BIAS_ROWS:
        p = below(p, p)
    if rows > 4 * BIAS_ROWS:
        p = below(p, p)
    return p


@triton.jit
def piece_product(
    a, b, c, d, x, P: tl.constexpr, SIZE: tl.constexpr, BITS: tl.constexpr, HALF: tl.constexpr, BLOCK_N: tl.constexpr,
    BIAS_DOT: tl.constexpr, BIAS_ROWS: tl.constexpr, MIDRISE: tl.constexpr, PAIRED: tl.constexpr, ASM: tl.constexpr,
    UPCAST: tl.constexpr,
):  # fmt: skip
    """float32 [BLOCK_N, BLOCK_M]: the integers of one piece, plus 1/2 if MIDRISE, times x [SIZE, BLOCK_M]."""
    EXACT: tl.constexpr = not BIAS_DOT
    p = tl.zeros((BLOCK_N, x.shape[1]), tl.float32)
    w = floats_piece(a, b, c, d, P, SIZE, BITS, 0, HALF, MIDRISE, EXACT, PAIRED, ASM, UPCAST)
    p = multiply(w, anew(x, 3, PAIRED), p, UPCAST)
    if BITS == 8:
        w = floats_piece(a, b, c, d, P, SIZE, BITS, 1, HALF, MIDRISE, EXACT, PAIRED, ASM, UPCAST)
        p = multiply(w, anew(x, 4, PAIRED), p, UPCAST)
    if BIAS_DOT:
        # In a sum of its own, because in one sum each product waits for the one before it. Triton would make one sum of
        # `p + product`, and sees no product here; the last compiler stage makes it an addition.
        p -= constant_dot(a, x, P, SIZE, BITS, HALF, BIAS_ROWS, MIDRISE, PAIRED, UPCAST) * -1.0
    return p


@triton.jit
def sum_ranges(acc, extra, RANGES: tl.constexpr):
    """float32 [TILE_ROWS, ROWS], TILE_ROWS = BLOCK_N / RANGES: sums over the ranges of columns.

    acc: [BLOCK_N, RANGES * ROWS], weight rows of each range times x of each; what belongs together is on the diagonal.
    extra: [BLOCK_N, ROWS], added.
    """
    TILE_ROWS: tl.constexpr = acc.shape[0] // RANGES
    ROWS: tl.constexpr = acc.shape[1] // RANGES
    weight_range = tl.arange(0, acc.shape[0])[:, None] // TILE_ROWS
    acc = tl.where(weight_range == tl.arange(0, acc.shape[1])[None, :] // ROWS, acc, 0.0)
    acc = tl.sum(tl.reshape(acc, (acc.shape[0], RANGES, ROWS)), 1) + extra
    return tl.sum(tl.reshape(acc, (RANGES, TILE_ROWS, ROWS)), 0)


@triton.jit
def output_rows(
    order_ptr, row_scale_ptr, tile, TILE_ROWS: tl.constexpr, HAS_ROW_SCALES: tl.constexpr, PERMUTED: tl.constexpr
):
    """Row of y of each row of a tile, int32 [TILE_ROWS], and its factor; asked for before the ticket is taken."""
    rn = tile * TILE_ROWS + tl.arange(0, TILE_ROWS)
    factor = tl.load(row_scale_ptr + rn) if HAS_ROW_SCALES else 1.0
    return tl.load(order_ptr + rn) if PERMUTED else rn, factor


@triton.jit
def store_rows(acc, rows, factor, y_ptr, N, M, HAS_ROW_SCALES: tl.constexpr):
    """Scale the tile's rows, round once and write y [M, N]. rows, factor: from `output_rows`."""
    rm = tl.arange(0, acc.shape[1])
    if HAS_ROW_SCALES:
        acc = acc * factor[:, None]
    at = y_ptr + rm[None, :].to(tl.int64) * N + rows[:, None]
    tl.store(at, acc.to(y_ptr.dtype.element_ty), mask=(rm < M)[None, :] & (rows < N)[:, None])


@triton.jit
def add_parts(acc, partial_ptr, ticket_ptr, tile, part, parts, M):
    """Write this part; the tile's last program gets the sum over parts, in order, and True. Rows from M up: zero."""
    BLOCK_N: tl.constexpr = acc.shape[0]
    BLOCK_M: tl.constexpr = acc.shape[1]
    rn = tl.arange(0, BLOCK_N)
    rm = tl.arange(0, BLOCK_M)
    size: tl.constexpr = BLOCK_N * BLOCK_M
    # Features side by side: what M rows write and read are whole sectors, however few they are.
    at = partial_ptr + tile.to(tl.int64) * parts * size + rm[None, :] * BLOCK_N + rn[:, None]
    live = (rm < M)[None, :] & (rn >= 0)[:, None]
    tl.store(at + part * size, acc, mask=live)
    # All of this program's stores come before its ticket, and the other programs' stores before the loads below.
    tl.debug_barrier()
    last = tl.atomic_add(ticket_ptr + tile, 1, sem="acq_rel", scope="gpu") == parts - 1
    tl.debug_barrier()
    if last:
        AT_ONCE: tl.constexpr = max(1, min(4, 64 // BLOCK_M))  # in memory's time; more would need registers
        acc = tl.zeros(acc.shape, tl.float32)
        for first in range(0, parts, AT_ONCE):
            loaded = ()
            for u in tl.static_range(AT_ONCE):
                there = live & (tl.full((1, 1), first + u, tl.int32) < parts)
                loaded = loaded + (tl.load(at + (first + u) * size, mask=there, other=0.0, cache_modifier=".cg"),)
            for u in tl.static_range(AT_ONCE):
                acc += loaded[u]
        tl.store(ticket_ptr + tile, 0)  # ready for the next launch: no memset
    return acc, last


# Numbers of rows change while serving: none may compile a kernel of its own.
@triton.jit(do_not_specialize=("M", "supers", "supers_per_part", "writers"))
def ssqr_tensor_core(
    x_ptr, word_ptr, scale_ptr, flat_scale_ptr, row_scale_ptr, order_ptr, entry_ptr, slice_ptr, xt_ptr, fours_ptr,
    partial_ptr, ticket_ptr, y_ptr, M, N, K, stride_xm, supers, supers_per_part, writers,
    BITS: tl.constexpr, GROUP: tl.constexpr, MIDRISE: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_M: tl.constexpr,
    STAGES: tl.constexpr, BIAS_DOT: tl.constexpr, BIAS_ROWS: tl.constexpr, PAIRED: tl.constexpr,
    OUTLIER_ROWS: tl.constexpr, SLOTS: tl.constexpr, TRANSPOSED: tl.constexpr, BEYOND: tl.constexpr,
    PIECE: tl.constexpr, SPLIT: tl.constexpr, RANGES: tl.constexpr, EVEN_K: tl.constexpr, HAS_FLAT_SCALES: tl.constexpr,
    HAS_ROW_SCALES: tl.constexpr, ASM: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    """Grid (padded rows / BLOCK_N * RANGES, parts). See the module docstring, and the launcher for arguments."""
    tile, part, parts = tl.program_id(0), tl.program_id(1), tl.num_programs(1)
    TILE_ROWS: tl.constexpr = BLOCK_N // RANGES
    TILE_M: tl.constexpr = BLOCK_M // RANGES
    HALF: tl.constexpr = x_ptr.dtype.element_ty == tl.float16
    SIZE: tl.constexpr = 128 if GROUP == -1 else GROUP
    # Brings outliers into L2; in small groups the loop of 16 and 32 rows has no registers for it.
    PREFETCH: tl.constexpr = OUTLIER_ROWS > 0 and ASM and (BLOCK_M == 64 or (BLOCK_M > 8 and GROUP != 32))
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
    counter_ptr = ticket_ptr + tl.num_programs(0) * TILE_ROWS // 64  # behind the tickets of all row blocks
    if TRANSPOSED:
        begin_transposed(x_ptr, stride_xm, xt_ptr, counter_ptr, M, K, writers, OUTLIER_ROWS, PIECE)
    if OUTLIER_ROWS > 0:
        longest = longest_slice(slice_ptr, tile, TILE_ROWS)
        if PREFETCH:
            lines, last, step, turns = entry_lines(entry_ptr, slice_ptr, tile, part, parts, TILE_ROWS)
            if BLOCK_M == 64:  # the loop has no registers for it
                for _ in range(turns):
                    prefetch_lines(lines, last)
                    lines += step
        elif BLOCK_M == 8:  # hides the time that memory takes; the sums of more rows leave no registers for it
            at, count = outlier_places(slice_ptr, tile, M, BLOCK_N, OUTLIER_ROWS, SLOTS, TRANSPOSED, RANGES)
            entries = load_slots(entry_ptr, at, count, part * SLOTS, SLOTS)
    acc = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    for sb in tl.range(begin, end, num_stages=STAGES):
        if PREFETCH and BLOCK_M < 64:  # noqa: SIM102 (the first is known to the compiler)
            if sb > begin:  # behind the first superblock, which everything waits for
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
        if BLOCK_M > 8:
            at, count = outlier_places(slice_ptr, tile, M, BLOCK_N, OUTLIER_ROWS, SLOTS, TRANSPOSED, RANGES)
            entries = load_slots(entry_ptr, at, count, part * SLOTS, SLOTS)
        if TRANSPOSED:
            finish_transposed(x_ptr, stride_xm, xt_ptr, counter_ptr, M, K, writers, OUTLIER_ROWS, PIECE)
        extra = outlier_tile(
            fours_ptr if TRANSPOSED else x_ptr, stride_xm, entry_ptr, entries, at, count, longest, part * RANGES,
            parts * RANGES, M, BLOCK_N, OUTLIER_ROWS, SLOTS, TRANSPOSED, BEYOND, HALF,
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
    partials: torch.Tensor | None,
    transposed: torch.Tensor | None,
    config: DecodeConfig,
    parts: int,
    ranges: int = 1,
) -> None:
    """Run the tensor-core kernel. Allocates nothing, checks nothing: see `dispatch.ssqr_matmul`.

    Args:
        x: [m, cols], bfloat16 or float16, last dimension contiguous, m <= config.max_rows.
        y: [m, rows], contiguous, dtype of x.
        partials: float32, at least parts * padded rows * config.max_rows elements; None when parts is 1.
        transposed: [cols, config.outlier_rows(m, ranges)], dtype of x, in which x^T is written for the outliers; None
            for no more than GATHER_ROWS rows, or without outliers.
        parts: split-K factor.
        ranges: of columns, that are multiplied side by side in a tile; 1 unless parts is, divides the superblocks, and
            leaves 16 weight rows of the tile at least.
    """
    grid, arguments, named = launch_arguments(x, weight, y, partials, transposed, config, parts, ranges, x.shape[0])
    ssqr_tensor_core[grid](*arguments, **named)


def launch_arguments(
    x: torch.Tensor,
    weight: KernelWeight,
    y: torch.Tensor,
    partials: torch.Tensor | None,
    transposed: torch.Tensor | None,
    config: DecodeConfig,
    parts: int,
    ranges: int,
    m: int,
) -> tuple[tuple[int, int], tuple[Any, ...], dict[str, Any]]:
    """Grid, run-time and compile-time arguments of `launch_ssqr` for m rows."""
    assert parts == 1 or ranges == 1, "the kernel has either"
    assert ranges <= config.block_n // 16, "slices of outliers have 16 rows"
    fours = None if transposed is None else transposed.view(torch.int64)
    outlier_rows = 0 if weight.entries is None else config.outlier_rows(m, ranges)
    grid = (weight.padded_rows // config.block_n * ranges, parts)
    writers = 0
    if transposed is not None:  # the programs that write it should all run at once
        together = weight.processors * config.programs(weight.bits, weight.group_size)
        writers = min(grid[0] * grid[1], together, -(-weight.cols // config.piece), MOST_WRITERS)
    arguments = (
        x, weight.words, weight.scale_pairs, weight.flat_scales, weight.row_scales, weight.order, weight.entries,
        weight.slice_ptr, transposed, fours, partials, weight.tickets, y, m, weight.rows, weight.cols, x.stride(0),
        weight.superblocks, -(-weight.superblocks // (parts * ranges)), writers,
    )  # fmt: skip
    outliers = (outlier_rows, transposed is not None, weight.beyond)
    named = constants(weight.bits, weight.group_size, config, *outliers, parts > 1, ranges) | {
        "MIDRISE": weight.midrise, "EVEN_K": weight.cols % 256 == 0, "num_warps": config.num_warps,
        "HAS_FLAT_SCALES": weight.flat_scales is not None, "HAS_ROW_SCALES": weight.row_scales is not None,
        "ASM": x.is_cuda and torch.version.hip is None, "UPCAST": not x.is_cuda, **COMPILER,
    }  # fmt: skip
    return grid, arguments, named


def constants(
    bits: int, group_size: int, config: DecodeConfig, outlier_rows: int, transposed: bool, beyond: bool, split: bool,
    ranges: int,
) -> dict[str, int | bool]:  # fmt: skip
    """The compile-time arguments that follow from a configuration; `audit` compiles with the same."""
    return {
        "BITS": bits,
        "GROUP": group_size,
        "BLOCK_N": config.block_n,
        "BLOCK_M": config.max_rows,
        "STAGES": config.stages_for(bits),
        "BIAS_DOT": config.bias_dot,
        "BIAS_ROWS": config.bias_rows,
        "PAIRED": config.paired,
        "OUTLIER_ROWS": outlier_rows,
        "SLOTS": slots_of(config.slots_for(outlier_rows, transposed, ranges), beyond),
        "TRANSPOSED": transposed,
        "BEYOND": beyond,
        "PIECE": config.piece,
        "SPLIT": split,
        "RANGES": ranges,
    }
