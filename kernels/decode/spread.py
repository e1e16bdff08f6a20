"""Decode kernel with another way to add outliers: they are spread over dense pieces, and multiplied by tensor cores.

It does what `ssqr.py` does, with the same tiles, split-K and ranges of columns. But outliers are added between the
products of the inliers, piece by piece: entries are ordered by row tile and superblock (`layout/spread.py`), those of
the next superblock arrive while this one is multiplied, and x is where the tensor cores read it anyway. There is no
x^T, and nothing is left to do after the last superblock, except where a list has more entries than a turn.
"""

from functools import lru_cache

import torch
import triton
import triton.language as tl

from vllm_latq.kernels.configs import COMPILER, DecodeConfig
from vllm_latq.kernels.decode.launch import Scratch, Variant, variant_of, weight_arguments
from vllm_latq.kernels.device.epilogue import add_parts, output_rows, store_rows, sum_ranges
from vllm_latq.kernels.device.fields import planes_of, words_of
from vllm_latq.kernels.device.product import piece_product
from vllm_latq.kernels.device.registers import paired_columns
from vllm_latq.kernels.device.spread_tile import load_bounds, load_turn, reserve, spread_product
from vllm_latq.kernels.device.tiles import activation_places, load_planes, load_scale, tile_scale_pairs, tile_words
from vllm_latq.kernels.layout.codes import ROW_ALIGN
from vllm_latq.kernels.layout.spread import HALF, LEVELS
from vllm_latq.kernels.layout.weight import KernelWeight

WARP = 32
SPARE = 3.5  # standard deviations that a turn exceeds the average list by, if outliers are evenly likely everywhere


# Numbers of rows change while serving, and no new number may compile another kernel.
@triton.jit(do_not_specialize=("M", "supers", "supers_per_part"))
def ssqr_spread(
    x_ptr,  # bf16 [M, K]
    word_ptr,  # int32 [row blocks, superblocks, planes, 64, words]: packed codes
    scale_ptr,  # int32 [row blocks, superblocks, 128 / GROUP, 64]: pairs of bf16 group scales; None without groups
    flat_scale_ptr,  # float32 [padded rows]: the scale of a whole row; None unless HAS_FLAT_SCALES
    row_scale_ptr,  # float32 [padded rows]; None unless HAS_ROW_SCALES
    order_ptr,  # int32 [padded rows]: the row of y that each tile row computes
    entry_ptr,  # int32 [entries]: outliers by row tile and superblock
    list_ptr,  # int32 [padded rows / 128, superblocks, LEVELS, 2, 8, and one more]: first entry of each list
    partial_ptr,  # float32 [tiles, parts, BLOCK_M, BLOCK_N]; None unless SPLIT
    ticket_ptr,  # int32 [row blocks + 1]: zeros before and after
    y_ptr,  # [M, N], contiguous
    M,  # rows of x
    N,  # rows of the weight
    K,  # columns
    stride_xm,  # elements from one row of x to the next
    supers,  # superblocks
    supers_per_part,  # superblocks of a part of split-K, or of a range of columns
    BITS: tl.constexpr,  # 2, 3, 4 or 8
    GROUP: tl.constexpr,  # 32, 64 or 128; -1 without group scales
    MIDRISE: tl.constexpr,  # the grid lies half a step above the multiples of the scale
    BLOCK_N: tl.constexpr,  # weight rows of a tile, 64 or 128
    BLOCK_M: tl.constexpr,  # activation rows of a tile, 8 to 64
    STAGES: tl.constexpr,  # superblocks that are copied ahead
    BIAS_DOT: tl.constexpr,  # the bias leaves by an extra dot, instead of on the floats
    BIAS_ROWS: tl.constexpr,  # rows of the constant operand of this dot
    PAIRED: tl.constexpr,  # columns are taken in the order of `registers.paired_words`
    LANES: tl.constexpr,  # threads
    SLOTS: tl.constexpr,  # entries of a thread in a turn
    LEVELS: tl.constexpr,  # parts of a wide value
    SPLIT: tl.constexpr,  # several parts share a tile
    RANGES: tl.constexpr,  # ranges of columns side by side in a tile
    EVEN_K: tl.constexpr,  # K is a multiple of 256
    HAS_FLAT_SCALES: tl.constexpr,
    HAS_ROW_SCALES: tl.constexpr,
    ASM: tl.constexpr,  # NVIDIA inline assembly
    UPCAST: tl.constexpr,  # products take float32 operands
):
    """Grid (padded rows / BLOCK_N * RANGES, parts). See the module docstring."""
    tile, part, parts = tl.program_id(0), tl.program_id(1), tl.num_programs(1)
    TILE_ROWS: tl.constexpr = BLOCK_N // RANGES
    TILE_M: tl.constexpr = BLOCK_M // RANGES
    SIZE: tl.constexpr = 128 if GROUP == -1 else GROUP
    LISTED: tl.constexpr = TILE_ROWS // 16  # lists of the tile in a half
    LISTS: tl.constexpr = 16 * LEVELS  # of a superblock
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
    first_row = tile * TILE_ROWS
    lists = list_ptr + ((first_row // 128).to(tl.int64) * supers + begin) * LISTS + first_row % 128 // 16
    if RANGES > 1:
        lists += tl.arange(0, LANES) // (LANES // RANGES) * supers_per_part * LISTS
    base = reserve(BLOCK_N, SIZE) if ASM else 0
    unscaled = tl.zeros((1,), tl.float32)
    scale = tl.load(flat_scale_ptr + tile * TILE_ROWS + rn % TILE_ROWS) if HAS_FLAT_SCALES else unscaled
    # Entries are loaded a superblock ahead, and where they lie two.
    low = load_bounds(lists, 0, end - begin, LISTS, LISTED)
    high = load_bounds(lists + 8, 0, end - begin, LISTS, LISTED)
    entries = (
        load_turn(entry_ptr, low[0], low[1], LANES, SLOTS, RANGES),
        load_turn(entry_ptr, high[0], high[1], LANES, SLOTS, RANGES),
    )
    longest = tl.maximum(low[1] - low[0], high[1] - high[0])
    low = load_bounds(lists, 1, end - begin, LISTS, LISTED)
    high = load_bounds(lists + 8, 1, end - begin, LISTS, LISTED)
    acc = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    for sb in tl.range(begin, end, num_stages=STAGES):
        a, b, c, d = load_planes(words, BITS)
        ahead = (
            load_turn(entry_ptr, low[0], low[1], LANES, SLOTS, RANGES),
            load_turn(entry_ptr, high[0], high[1], LANES, SLOTS, RANGES),
        )
        longest = tl.maximum(longest, tl.maximum(low[1] - low[0], high[1] - high[0]))
        low = load_bounds(lists, 2 + sb - begin, end - begin, LISTS, LISTED)
        high = load_bounds(lists + 8, 2 + sb - begin, end - begin, LISTS, LISTED)
        for i in tl.static_range(256 // SIZE):
            if EVEN_K:
                x = tl.load(xs + i * SIZE, mask=live, other=0.0)
            else:
                x = tl.load(xs + i * SIZE, mask=live & (sb * 256 + i * SIZE + col < K), other=0.0)
            if PAIRED:
                x = paired_columns(x, BLOCK_M)
            p = piece_product(
                a, b, c, d, x, i, SIZE, BITS, False, BLOCK_N, BIAS_DOT, BIAS_ROWS, MIDRISE, PAIRED, ASM, UPCAST
            )
            if GROUP != -1 or HAS_FLAT_SCALES:
                acc += p * (load_scale(pairs, i) if GROUP != -1 else scale)[:, None]
            else:
                acc += p
            acc = spread_product(
                acc, x, entries[i * SIZE // 128], i * SIZE % 128 // SIZE, base, SIZE, RANGES, PAIRED, ASM, UPCAST
            )
        entries = ahead
        words += planes_of(BITS) * 64 * words_of(BITS)
        if GROUP != -1:
            pairs += 64 * (128 // GROUP)
        xs += 256
    if RANGES > 1:
        longest = tl.max(longest, 0)
    if longest > LANES // RANGES * SLOTS or LEVELS > 1:
        acc = add_rest(
            acc, x_ptr + begin * 256 + row * stride_xm + col, live, begin, end, K, col, lists, entry_ptr, base,
            SIZE, LANES, SLOTS, LEVELS, LISTED, RANGES, PAIRED, ASM, UPCAST,
        )  # fmt: skip
    if RANGES > 1:
        acc = sum_ranges(acc, 0.0, RANGES)
    rows, factor = output_rows(order_ptr, row_scale_ptr, tile, TILE_ROWS, HAS_ROW_SCALES, True)
    if SPLIT:
        acc, last = add_parts(acc, partial_ptr, ticket_ptr, tile, part, parts, M)
        if last:
            store_rows(acc, rows, factor, y_ptr, N, M, HAS_ROW_SCALES)
    else:
        store_rows(acc, rows, factor, y_ptr, N, M, HAS_ROW_SCALES)


@triton.jit
def add_rest(
    acc,
    xs,
    live,
    begin,
    end,
    K,
    col,
    lists,
    entry_ptr,
    base,
    SIZE: tl.constexpr,
    LANES: tl.constexpr,
    SLOTS: tl.constexpr,
    LEVELS: tl.constexpr,
    LISTED: tl.constexpr,
    RANGES: tl.constexpr,
    PAIRED: tl.constexpr,
    ASM: tl.constexpr,
    UPCAST: tl.constexpr,
):
    """Return acc plus what the loop over superblocks left: all but the first turn of each list, and wide values."""
    SHARE: tl.constexpr = LANES // RANGES * SLOTS
    for number in tl.range(0, (end - begin) * (2 * LEVELS), num_stages=1):  # the lists, in order of their addresses
        low, high = load_bounds(lists + number * 8, 0, 1, 0, LISTED)
        first = SHARE if LEVELS == 1 or number % (2 * LEVELS) < 2 else 0
        longest = tl.max(high - low, 0) if RANGES > 1 else high - low
        half = number // (2 * LEVELS) * 2 + number % 2
        for done in tl.range(first, longest, SHARE, num_stages=1):
            entries = load_turn(entry_ptr, low + done, high, LANES, SLOTS, RANGES)
            for sub in tl.range(0, 128 // SIZE, num_stages=1):
                at = half * 128 + sub * SIZE
                x = tl.load(xs + at, mask=live & (begin * 256 + at + col < K), other=0.0)
                if PAIRED:
                    x = paired_columns(x, acc.shape[1])
                acc = spread_product(acc, x, entries, sub, base, SIZE, RANGES, PAIRED, ASM, UPCAST)
    return acc


def is_spread(x: torch.Tensor, weight: KernelWeight, config: DecodeConfig) -> bool:
    """Return whether the product takes this kernel. Values are bf16, which tensor cores multiply by bf16 only."""
    return config.spread and weight.spread is not None and x.dtype == torch.bfloat16


def launch_spread(
    x: torch.Tensor,
    weight: KernelWeight,
    y: torch.Tensor,
    config: DecodeConfig,
    scratch: Scratch,
    m: int | None = None,
) -> None:
    """Run the kernel. Allocates nothing, checks nothing: see `dispatch.ssqr_matmul`.

    Args:
        x: [n, cols], bfloat16, last dimension contiguous, n <= m.
        weight: with spread entries.
        y: [n, rows], contiguous, dtype of x.
        config: serves m rows.
        scratch: for m rows of x.
        m: number of rows for which the kernel is chosen (default: n).
    """
    parts, ranges = scratch.parts, scratch.ranges
    assert weight.spread is not None, "from `with_spread`"
    assert weight.list_ptr is not None, "from `with_spread`"
    arguments = weight_arguments(weight)
    del arguments["slice_ptr"]
    arguments |= {
        "x_ptr": x,
        "entry_ptr": weight.spread,
        "list_ptr": weight.list_ptr,
        "partial_ptr": scratch.partials,
        "y_ptr": y,
        "M": x.shape[0],
        "K": weight.cols,
        "stride_xm": x.stride(0),
        "supers_per_part": -(-weight.superblocks // (parts * ranges)),
        "num_warps": config.num_warps,
    }
    levels = (weight.list_ptr.numel() - 1) // (weight.padded_rows // ROW_ALIGN * weight.superblocks * 16)
    rate = weight.spread.numel() / (weight.padded_rows * weight.superblocks * 2 * HALF)
    arguments |= spread_constants(config, variant_of(x, weight, m or x.shape[0], parts, ranges), rate, levels)
    ssqr_spread[weight.padded_rows // config.block_n * ranges, parts](**arguments, **COMPILER)


@lru_cache(maxsize=1024)
def spread_constants(config: DecodeConfig, variant: Variant, rate: float, levels: int = 1) -> dict[str, int | bool]:
    """Return the compile-time arguments of `ssqr_spread`, by name.

    Args:
        config: of the launch.
        variant: of the product.
        rate: outliers for which there is room, as a part of the weights; more than there are.
        levels: of the lists, 1 or LEVELS.
    """
    assert levels in (1, LEVELS)
    lanes = WARP * config.num_warps
    usual = rate * (config.block_n // variant.ranges) * HALF
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
        "LANES": lanes,
        "SLOTS": max(1, -int(-(usual + SPARE * usual**0.5) * variant.ranges // lanes)),
        "LEVELS": levels,
        "SPLIT": variant.split,
        "RANGES": variant.ranges,
        "EVEN_K": variant.whole_superblocks,
        "HAS_FLAT_SCALES": variant.flat_scales,
        "HAS_ROW_SCALES": variant.row_scales,
        "ASM": variant.asm,
        "UPCAST": variant.upcast,
    }
