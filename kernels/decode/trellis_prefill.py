"""Prefill for trellis codes: a dense chunk of W in bf16 or fp16, for the library's matmul.

Two launches per chunk. The first decodes every weight, its columns where x has them, rounded once. The second adds the
kept weights, rounded a second time. The chunk is bounded as in `prefill.py`.
"""

import torch
import triton
import triton.language as tl

from vllm_latq.kernels.configs import COMPILER
from vllm_latq.kernels.decode.prefill import CHUNK_BYTES
from vllm_latq.kernels.device.trellis import (
    factor_of,
    multiplier_of,
    octave_eighths,
    rate_count,
    rate_of,
    run_fields,
    terms_of,
)
from vllm_latq.kernels.layout.trellis import TILE_ROWS, TrellisOperands

KEPT_AT_ONCE = 128


@triton.jit
def hashed_values(doubled, two_terms):
    """Return the two values of windows, int32 each, from the windows in both halves of a word."""
    h = doubled * multiplier_of(0)
    first, second = byte_sum(h, 0), byte_sum(h, 8)
    h = doubled * multiplier_of(1)
    return first + tl.where(two_terms, byte_sum(h, 0), 0), second + tl.where(two_terms, byte_sum(h, 8), 0)


@triton.jit
def byte_sum(word, SHIFT: tl.constexpr):
    """Return the sum of the signed bytes at bits SHIFT and SHIFT + 16."""
    return (word << (24 - SHIFT) >> 24) + (word << (8 - SHIFT) >> 24)


@triton.jit(do_not_specialize=("first_tile", "first_row", "K", "units"))
def dequantize_trellis(
    word_ptr,  # int32: the rings, see layout/trellis.py
    unit_ptr,  # int16 [row tiles, units]
    run_ptr,  # int16 [row tiles, RUN_FIELDS]
    tile_ptr,  # int32 [row tiles + 1, 4]
    tile_scale_ptr,  # float32 [row tiles]
    exponent_ptr,  # int8 [row tiles * 64]: eighths of an octave
    column_ptr,  # int16 [K]: column of x, unsigned, of each stored column
    column_exponent_ptr,  # int8 [K]
    w_ptr,  # [chunk rows, K], contiguous
    first_tile,  # first row tile of the chunk
    first_row,  # first row of the chunk
    K,  # columns
    units,  # units of a row tile
):
    """Grid (row tiles of the chunk, units). Write 64 rows by 128 columns of the chunk, without kept weights."""
    tile, k = first_tile + tl.program_id(0), tl.program_id(1)
    run_ptr += tile * run_fields()
    rate = 0
    factor = 0.0
    two_terms = False
    piece = 0
    for i in tl.static_range(rate_count()):
        begin, end = tl.load(run_ptr + i).to(tl.int32), tl.load(run_ptr + i + 1).to(tl.int32)
        here = (k >= begin) & (k < end)
        at = tl.load(run_ptr + i + rate_count() + 1).to(tl.int32) + 2 * rate_of(i) * (k - begin)
        piece = tl.where(here, at, piece)
        rate = tl.where(here, rate_of(i), rate)
        factor = tl.where(here, factor_of(i), factor)
        two_terms = here & (terms_of(rate_of(i)) == 2) | two_terms
    words = word_ptr + (tl.load(tile_ptr + tile * 4) + piece).to(tl.int64) * 64
    unit = tl.load(unit_ptr + tile.to(tl.int64) * units + k).to(tl.int32)
    row_scale = tl.load(tile_scale_ptr + tile) * octave_eighths(tl.load(exponent_ptr + tile * 64 + tl.arange(0, 64)))
    row_begin, row_end = tl.load(tile_ptr + tile * 4 + 2), tl.load(tile_ptr + tile * 4 + 3)
    rn = tl.arange(0, 64)[:, None]
    pair = tl.arange(0, 64)[None, :]
    # Row and pair of columns to step of the ring: `step_places` of the code, the other way round.
    step = 4 * (rn % 8 * 4 + pair % 8 // 2) + 2 * (pair % 2) + rn % 16 // 8
    count = 4 * rate
    ends = (step + 1) * rate
    last = (ends - 1) // 32
    group, within = pair // 32, pair // 8 % 4
    at = words + (group * 4 + rn // 16) * (count * 4) + within
    low, high = tl.load(at + last * 4), tl.load(at + tl.where(last == 0, count - 1, last - 1) * 4)
    both = (high.to(tl.int64) << 32) | (low.to(tl.int64) & 0xFFFFFFFF)
    window = (both >> ((last + 1) * 32 - ends).to(tl.int64)).to(tl.int32) & 0xFFFF
    first, second = hashed_values(window | (window << 16), two_terms)
    stored = unit * 128 + 2 * tl.arange(0, 64)
    w_ptr += (row_begin - first_row + tl.arange(0, 64)).to(tl.int64)[:, None] * K
    live = (row_begin + rn) < row_end
    store_column(w_ptr, first, factor, row_scale, stored, column_ptr, column_exponent_ptr, K, live)
    store_column(w_ptr, second, factor, row_scale, stored + 1, column_ptr, column_exponent_ptr, K, live)


@triton.jit
def store_column(w_ptr, value, factor, row_scale, stored, column_ptr, exponent_ptr, K, live):
    """Write value * factor times the scales of row and column to where x has each stored column."""
    inside = stored < K
    column = tl.load(column_ptr + stored, mask=inside, other=0).to(tl.int32) & 0xFFFF
    scale = octave_eighths(tl.load(exponent_ptr + stored, mask=inside, other=0))
    value = value.to(tl.float32) * factor * row_scale[:, None] * scale[None, :]
    tl.store(w_ptr + column[None, :], value.to(w_ptr.dtype.element_ty), mask=live & inside[None, :])


@triton.jit(do_not_specialize=("first_tile", "first_row", "K"))
def add_kept(
    place_ptr,  # int32: kept weights
    value_ptr,  # bf16: what is added to them
    tile_ptr,  # int32 [row tiles + 1, 4]
    w_ptr,  # [chunk rows, K], contiguous
    first_tile,  # first row tile of the chunk
    first_row,  # first row of the chunk
    K,  # columns
    AT_ONCE: tl.constexpr,
):
    """Grid (row tiles of the chunk). Add the kept weights, of which no two have one place."""
    tile = first_tile + tl.program_id(0)
    row_begin = tl.load(tile_ptr + tile * 4 + 2) - first_row
    end = tl.load(tile_ptr + tile * 4 + 5)
    for start in range(tl.load(tile_ptr + tile * 4 + 1), end, AT_ONCE):
        e = start + tl.arange(0, AT_ONCE)
        place = tl.load(place_ptr + e, mask=e < end, other=0)
        value = tl.load(value_ptr + e, mask=e < end, other=0.0).to(tl.float32)
        at = w_ptr + (row_begin + (place >> 26 & 63)).to(tl.int64) * K + (place & 0x3FFFFFF)
        sum_ = tl.load(at, mask=e < end, other=0.0).to(tl.float32) + value
        tl.store(at, sum_.to(w_ptr.dtype.element_ty), mask=e < end)


def launch_dequantize_trellis(weight: TrellisOperands, w: torch.Tensor, first_tile: int, tiles: int) -> None:
    """Write the dense rows of some row tiles. Allocates nothing.

    Args:
        weight: see `TrellisOperands`.
        w: [rows, cols] or more rows, contiguous: from the first row of the first row tile on.
        first_tile: first row tile.
        tiles: row tiles.
    """
    first_row = weight.first_rows[first_tile]
    dequantize_trellis[(tiles, weight.column_units)](
        weight.words, weight.units, weight.runs, weight.tiles, weight.tile_scales, weight.row_exponents, weight.columns,
        weight.column_exponents, w, first_tile, first_row, weight.cols, weight.column_units, num_warps=4, **COMPILER,
    )  # fmt: skip
    if weight.kept_values.numel():
        add_kept[(tiles,)](
            weight.kept_places, weight.kept_values, weight.tiles, w, first_tile, first_row, weight.cols,
            AT_ONCE=KEPT_AT_ONCE, num_warps=4, **COMPILER,
        )  # fmt: skip


def dequantize(weight: TrellisOperands, dtype: torch.dtype) -> torch.Tensor:
    """Return the whole dense weight [rows, cols], rounded once to `dtype`, kept weights twice."""
    w = torch.empty(weight.rows, weight.cols, dtype=dtype, device=weight.words.device)
    with torch.cuda.device_of(w):
        launch_dequantize_trellis(weight, w, 0, weight.row_tiles)
    return w


def prefill_trellis(x: torch.Tensor, weight: TrellisOperands) -> torch.Tensor:
    """Return y [m, rows] = x [m, cols] W^T, by dense chunks and the library's matmul."""
    y = torch.empty(x.shape[0], weight.rows, dtype=x.dtype, device=x.device)
    step = max(1, CHUNK_BYTES // (TILE_ROWS * weight.cols * x.dtype.itemsize))
    scratch = torch.empty(min(step * TILE_ROWS, weight.rows), weight.cols, dtype=x.dtype, device=x.device)
    for first in range(0, weight.row_tiles, step):
        tiles = min(step, weight.row_tiles - first)
        begin, end = weight.first_rows[first], weight.first_rows[first + tiles]
        launch_dequantize_trellis(weight, scratch, first, tiles)
        torch.mm(x, scratch[: end - begin].t(), out=y[:, begin:end])
    return y
