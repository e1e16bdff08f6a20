"""Prefill for trellis codes: a dense chunk of W in bf16 or fp16, for the library's matmul.

One launch per chunk. A program decodes 64 rows by 128 stored columns, rounded once. Then it adds its kept weights,
rounded a second time. Columns are written in the stored order, side by side, and x is brought into this order. The
chunk is bounded as in `prefill.py`.
"""

import torch
import triton
import triton.language as tl

from vllm_latq.kernels.configs import COMPILER
from vllm_latq.kernels.decode.prefill import CHUNK_BYTES, equal_pieces
from vllm_latq.kernels.device.trellis import (
    factor_of,
    multiplier_of,
    octave_eighths,
    rate_count,
    rate_of,
    run_fields,
    shift_pair,
    terms_of,
)
from vllm_latq.kernels.layout.trellis import TILE_ROWS, TrellisOperands

KEPT_AT_ONCE = 128  # a row tile has about 80 at 4096 columns


@triton.jit
def hashed_values(doubled, two_terms, ASM: tl.constexpr):
    """Return the two values of windows, int32 each, from the windows in both halves of a word."""
    h, more = doubled * multiplier_of(0), doubled * multiplier_of(1)
    once = two_terms.to(tl.int32)
    return (
        add_bytes(h, 1, 0, add_bytes(more, once, 0, 0, ASM), ASM),
        add_bytes(h, 1, 8, add_bytes(more, once, 8, 0, ASM), ASM),
    )


@triton.jit
def add_bytes(word, times, SHIFT: tl.constexpr, total, ASM: tl.constexpr):
    """Return total + times the sum of the signed bytes of a word at bits SHIFT and SHIFT + 16; times: 0 or 1."""
    if ASM:
        return tl.inline_asm_elementwise(
            "dp4a.s32.s32 $0, $1, $2, $3;", "=r,r,r,r", [word, times * (0x10001 << SHIFT), total], dtype=tl.int32,
            is_pure=True, pack=1,
        )  # fmt: skip
    else:
        return total + times * ((word << (24 - SHIFT) >> 24) + (word << (8 - SHIFT) >> 24))


@triton.jit(do_not_specialize=("first_tile", "first_row", "units"))
def dequantize_trellis(
    word_ptr,  # int32: the rings, see layout/trellis.py
    unit_ptr,  # int16 [row tiles, units]
    run_ptr,  # int16 [row tiles, RUN_FIELDS]
    tile_ptr,  # int32 [row tiles + 1, 4]
    tile_scale_ptr,  # float32 [row tiles]
    exponent_ptr,  # int8 [row tiles * 64]: eighths of an octave
    column_exponent_ptr,  # int8 [K]
    place_ptr,  # int32: kept weights
    value_ptr,  # bf16: what is added to them
    stored_ptr,  # int32 [K]: the stored column of each column of x
    w_ptr,  # [chunk rows, K], contiguous
    first_tile,  # first row tile of the chunk
    first_row,  # first row of the chunk
    K,  # columns
    units,  # units of a row tile
    ASM: tl.constexpr,  # NVIDIA inline assembly
    AT_ONCE: tl.constexpr,  # kept weights that a program looks at once
):
    """Grid (row tiles of the chunk, units). Write 64 rows by 128 stored columns of the chunk."""
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
    window = shift_pair(high, low, (last + 1) * 32 - ends, ASM) & 0xFFFF
    first, second = hashed_values(window | (window << 16), two_terms, ASM)
    value = tl.reshape(tl.join(first, second), (64, 128)).to(tl.float32)
    stored = unit * 128 + tl.arange(0, 128)
    scale = octave_eighths(tl.load(column_exponent_ptr + stored, mask=stored < K, other=0))
    value = value * factor * row_scale[:, None] * scale[None, :]
    out = w_ptr + (row_begin - first_row + tl.arange(0, 64)).to(tl.int64)[:, None] * K
    live = ((row_begin + rn) < row_end) & (stored < K)[None, :]
    tl.store(out + stored[None, :], value.to(w_ptr.dtype.element_ty), mask=live)
    first_kept, end_kept = tl.load(tile_ptr + tile * 4 + 1), tl.load(tile_ptr + tile * 4 + 5)
    if first_kept < end_kept:
        tl.debug_barrier()  # the tile's elements are written before any of them is read again
        add_kept(place_ptr, value_ptr, stored_ptr, w_ptr, first_kept, end_kept, row_begin - first_row, unit, K, AT_ONCE)


@triton.jit
def add_kept(place_ptr, value_ptr, stored_ptr, w_ptr, first_kept, end_kept, first_row, unit, K, AT_ONCE: tl.constexpr):
    """Add the kept weights of a row tile that a unit has, of which no two have one place.

    Args:
        place_ptr, value_ptr, stored_ptr, w_ptr, K, AT_ONCE: as for `dequantize_trellis`.
        first_kept, end_kept: the kept weights of the row tile.
        first_row: the first chunk row of the row tile.
        unit: number of the unit, as stored.
    """
    for start in range(first_kept, end_kept, AT_ONCE):
        e = start + tl.arange(0, AT_ONCE)
        place = tl.load(place_ptr + e, mask=e < end_kept, other=0)
        stored = tl.load(stored_ptr + (place & 0x3FFFFFF), mask=e < end_kept, other=-1)
        here = stored >> 7 == unit
        value = tl.load(value_ptr + e, mask=here, other=0.0).to(tl.float32)
        at = w_ptr + (first_row + (place >> 26 & 63)).to(tl.int64) * K + stored
        total = tl.load(at, mask=here, other=0.0).to(tl.float32) + value
        tl.store(at, total.to(w_ptr.dtype.element_ty), mask=here)


def stored_order(weight: TrellisOperands) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the column of x of each stored column, and the stored column of each column of x, int32 [cols] each."""
    columns = weight.columns.to(torch.int32) & 0xFFFF
    stored = torch.empty_like(columns)
    stored[columns] = torch.arange(weight.cols, dtype=torch.int32, device=columns.device)
    return columns, stored


def launch_dequantize_trellis(
    weight: TrellisOperands, stored: torch.Tensor, w: torch.Tensor, first_tile: int, tiles: int
) -> None:
    """Write the dense rows of some row tiles, columns as stored. Allocates nothing.

    Args:
        weight: see `TrellisOperands`.
        stored: int32 [cols], the stored column of each column of x.
        w: [rows, cols] or more rows, contiguous: from the first row of the first row tile on.
        first_tile: first row tile.
        tiles: row tiles.
    """
    dequantize_trellis[(tiles, weight.column_units)](
        weight.words, weight.units, weight.runs, weight.tiles, weight.tile_scales, weight.row_exponents,
        weight.column_exponents, weight.kept_places, weight.kept_values, stored, w, first_tile,
        weight.first_rows[first_tile], weight.cols, weight.column_units,
        ASM=w.is_cuda and torch.version.hip is None, AT_ONCE=KEPT_AT_ONCE, num_warps=4, **COMPILER,
    )  # fmt: skip


def dequantize(weight: TrellisOperands, dtype: torch.dtype) -> torch.Tensor:
    """Return the whole dense weight [rows, cols], rounded once to `dtype`, kept weights twice."""
    w = torch.empty(weight.rows, weight.cols, dtype=dtype, device=weight.words.device)
    _, stored = stored_order(weight)
    with torch.cuda.device_of(w):
        launch_dequantize_trellis(weight, stored, w, 0, weight.row_tiles)
    return w[:, stored]


def prefill_trellis(x: torch.Tensor, weight: TrellisOperands) -> torch.Tensor:
    """Return y [m, rows] = x [m, cols] W^T, by dense chunks and the library's matmul."""
    columns, stored = stored_order(weight)
    x = x[:, columns]
    y = torch.empty(x.shape[0], weight.rows, dtype=x.dtype, device=x.device)
    step = equal_pieces(weight.row_tiles, CHUNK_BYTES // (TILE_ROWS * weight.cols * x.dtype.itemsize))
    scratch = torch.empty(min(step * TILE_ROWS, weight.rows), weight.cols, dtype=x.dtype, device=x.device)
    for first in range(0, weight.row_tiles, step):
        tiles = min(step, weight.row_tiles - first)
        begin, end = weight.first_rows[first], weight.first_rows[first + tiles]
        launch_dequantize_trellis(weight, stored, scratch, first, tiles)
        torch.mm(x, scratch[: end - begin].t(), out=y[:, begin:end])
    return y
