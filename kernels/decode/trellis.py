"""Decode kernel for trellis codes: y = x W^T for a few rows of x, with the code decoded in registers.

Two launches. `trellis_activations` writes each row of x, in the order and times the scales of the stored columns, as
two parts of one byte and a factor for each unit of 128 columns: x = factor * (256 high + low), to 2^-16 of the largest
of the 128. `trellis_tensor_core` multiplies: one program computes a tile of 64 output features by COLUMNS columns, the
parts of COLUMNS / 2 rows of x, over its share of the row tile's units, which are sorted by rate:

    for each rate, for each unit of it:          words and bytes of x arrive by asynchronous copies
        for each of its two groups of tiles:     bytes = hashes of windows, as `mma` takes them
            sums += bytes . x                    int32, exact
        acc += sums * (factor of x * factor of the rate)
    acc *= row scales, then += kept weights times x
    split-K partials go to a workspace; the last program of a row tile adds them in a fixed order and writes y

Index names: rc column of the product, 2 * row of x + part.
"""

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl

from vllm_latq.kernels.configs import COMPILER
from vllm_latq.kernels.device.epilogue import add_parts, store_rows
from vllm_latq.kernels.device.trellis import (
    activation_bytes,
    factor_of,
    is_served,
    octave_eighths,
    rate_count,
    rate_of,
    run_fields,
    unit_products,
)
from vllm_latq.kernels.layout.trellis import TrellisOperands

STEPS_OF_X = 32512  # 127 * 256: the largest number of two parts
SMALLEST = 2.0**-100  # the largest of 128 numbers, below which all are taken for zero
WARPS = 2  # of `trellis_tensor_core`; four would become a warp-group product on Hopper, which wants another layout


@triton.jit(do_not_specialize=("M", "K"))
def trellis_activations(
    x_ptr,  # bf16 or fp16 [M, K]
    column_ptr,  # int16 [K]: column of x, unsigned, of each stored column
    exponent_ptr,  # int8 [K]: eighths of an octave, of each stored column
    part_word_ptr,  # int32 [units, 4, COLUMNS, 16]: the bytes of `activation_bytes`
    factor_ptr,  # float32 [units, COLUMNS]
    M,  # rows of x
    K,  # columns
    stride_xm,  # elements from one row of x to the next
    COLUMNS: tl.constexpr,  # columns of the product, twice the rows of x or more
    STEPS: tl.constexpr,  # the largest number of two parts
    SMALLEST: tl.constexpr,
):
    """Grid (units, COLUMNS / 2). See the module docstring. Rows of x from M up are zero."""
    unit, m = tl.program_id(0), tl.program_id(1)
    pair = tl.arange(0, 64)
    cols = tl.where(m < M, K, 0)
    first = load_activations(x_ptr + m * stride_xm, column_ptr, exponent_ptr, unit * 128 + 2 * pair, cols)
    second = load_activations(x_ptr + m * stride_xm, column_ptr, exponent_ptr, unit * 128 + 2 * pair + 1, cols)
    largest = tl.max(tl.maximum(tl.abs(first), tl.abs(second)), 0)
    invalid = tl.sum(first * 0.0 + second * 0.0, 0)  # NaN where there is a NaN or an infinity, which maxima leave out
    inverse = tl.where(largest > SMALLEST, STEPS / tl.maximum(largest, SMALLEST), 0.0)
    low0, high0 = two_parts(first * inverse)
    low1, high1 = two_parts(second * inverse)
    # Word: tile pair, column of the product, place, pair of the place, tile of the pair.
    tile = pair // 8
    at = ((unit * 4 + tile // 2) * COLUMNS + 2 * m) * 16 + pair % 8 * 2 + tile % 2
    tl.store(part_word_ptr + at, ((high0 & 255) | (high1 & 255) << 8) * 0x10001)
    tl.store(part_word_ptr + at + 16, ((low0 & 255) | (low1 & 255) << 8) * 0x10001)
    factor = tl.where(largest > SMALLEST, largest / STEPS, 0.0) + invalid
    place = tl.arange(0, 2)
    tl.store(factor_ptr + unit * COLUMNS + 2 * m + place, tl.where(place == 0, factor * 256, factor))


@triton.jit
def load_activations(x_ptr, column_ptr, exponent_ptr, stored, K):
    """Return x times the scale of its column, float32, for columns as stored; zero beyond the last."""
    live = stored < K
    column = tl.load(column_ptr + stored, mask=live, other=0).to(tl.int32) & 0xFFFF
    scale = octave_eighths(tl.load(exponent_ptr + stored, mask=live, other=0))
    return tl.load(x_ptr + column, mask=live, other=0.0).to(tl.float32) * scale


@triton.jit
def two_parts(x):
    """Return low and high of round(x) = 256 high + low, -128 <= low < 128."""
    number = tl.floor(x + 0.5).to(tl.int32)
    high = (number + 128) >> 8
    return number - high * 256, high


@triton.jit
def run_products(
    acc, parts_ptr, factor_ptr, unit_ptr, word_ptr, count, begin, end, RATE: tl.constexpr,
    FACTOR: tl.constexpr, STAGES: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """Add to acc the products of one run: of those of its `count` units that begin at pieces `begin` to `end` - 1."""
    COLUMNS: tl.constexpr = acc.shape[1]
    SIZE: tl.constexpr = 2 * RATE  # pieces of a unit
    low = tl.minimum(tl.maximum(begin + SIZE - 1, 0) // SIZE, count)
    high = tl.minimum(tl.maximum(end + SIZE - 1, 0) // SIZE, count)
    rc = tl.arange(0, COLUMNS)
    place = tl.arange(0, 4 * COLUMNS)[:, None] * 64 + tl.arange(0, 64)[None, :]
    for k in tl.range(low, high, num_stages=STAGES):
        unit = tl.load(unit_ptr + k).to(tl.int32)
        x = activation_bytes(tl.load(parts_ptr + unit * (256 * COLUMNS) + place), COLUMNS)
        sums = unit_products(word_ptr + k * (128 * RATE), x, RATE, ASM)
        acc += sums.to(tl.float32) * (tl.load(factor_ptr + unit * COLUMNS + rc) * FACTOR)[None, :]
    return acc


@triton.jit
def kept_products(
    x_ptr, stride_xm, place_ptr, value_ptr, first, end, step, M, COLUMNS: tl.constexpr, UPCAST: tl.constexpr
):
    """Return the products of a row tile's kept weights with x, float32 [64, COLUMNS], in the columns of even number."""
    acc = tl.zeros((64, COLUMNS), tl.float32)
    e = tl.arange(0, 16)
    rc = tl.arange(0, COLUMNS)
    rn = tl.arange(0, 64)
    live_rows = (rc % 2 == 0) & (rc // 2 < M)
    for start in range(first, end, step):
        live = start + e < end
        place = tl.load(place_ptr + start + e, mask=live, other=0)
        value = tl.load(value_ptr + start + e, mask=live, other=0.0)
        x = tl.load(
            x_ptr + (rc // 2 * stride_xm)[None, :] + (place & 0x3FFFFFF)[:, None],
            mask=live[:, None] & live_rows[None, :],
            other=0.0,
        )
        weight = tl.where((place >> 26 & 63)[None, :] == rn[:, None], value[None, :], 0.0)
        if UPCAST:
            acc = tl.dot(weight.to(tl.float32), x.to(tl.float32), acc)
        else:
            high = x.to(tl.bfloat16)
            acc = tl.dot(weight.to(tl.bfloat16), high, acc)
            if x.dtype == tl.float16:  # two bf16 hold it
                rest = (x.to(tl.float32) - high.to(tl.float32)).to(tl.bfloat16)
                acc = tl.dot(weight.to(tl.bfloat16), rest, acc)
    return acc


# Numbers of rows change while serving, and no new number may compile another kernel. The others are those of layers.
@triton.jit(do_not_specialize=("M", "N", "units"))
def trellis_tensor_core(
    x_ptr,  # bf16 or fp16 [M, K], for the kept weights
    parts_ptr,  # int8 [units, 256 * COLUMNS]: x as `trellis_activations` writes it
    factor_ptr,  # float32 [units, COLUMNS]
    word_ptr,  # int32: the rings, see layout/trellis.py
    unit_ptr,  # int16 [row tiles, units]
    run_ptr,  # int16 [row tiles, RUN_FIELDS]
    tile_ptr,  # int32 [row tiles + 1, 4]
    tile_scale_ptr,  # float32 [row tiles]
    exponent_ptr,  # int8 [row tiles * 64]: eighths of an octave
    place_ptr,  # int32: kept weights
    value_ptr,  # bf16: what is added to them
    partial_ptr,  # float32 [row tiles, parts, COLUMNS / 2, 64]; None unless SPLIT
    ticket_ptr,  # int32 [row tiles]: zeros before and after
    y_ptr,  # [M, N], contiguous
    M,  # rows of x
    N,  # rows of the weight
    stride_xm,  # elements from one row of x to the next
    units,  # units of a row tile
    COLUMNS: tl.constexpr,  # columns of the product: 8, or twice the rows of x
    STAGES: tl.constexpr,  # units that are copied ahead
    SPLIT: tl.constexpr,  # several parts share a tile
    RATES: tl.constexpr,  # rates that the loops serve: bit i is set for rate i
    ASM: tl.constexpr,  # NVIDIA inline assembly
    UPCAST: tl.constexpr,  # products of kept weights take float32 operands
):
    """Grid (row tiles, parts). See the module docstring."""
    tile, part, parts = tl.program_id(0), tl.program_id(1), tl.num_programs(1)
    run_ptr += tile * run_fields()
    unit_ptr += tile.to(tl.int64) * units
    first_row = tl.load(tile_ptr + tile * 4 + 2)
    pieces = tl.load(run_ptr + run_fields() - 1).to(tl.int32)
    # A part has the units that begin in its share of the bytes.
    begin, end = part * pieces // parts, (part + 1) * pieces // parts
    word_ptr += tl.load(tile_ptr + tile * 4).to(tl.int64) * 64
    acc = tl.zeros((64, COLUMNS), tl.float32)
    for i in tl.static_range(rate_count()):
        if is_served(RATES, i):
            first = tl.load(run_ptr + i).to(tl.int32)
            count = tl.load(run_ptr + i + 1).to(tl.int32) - first
            at = tl.load(run_ptr + i + rate_count() + 1).to(tl.int32)
            acc = run_products(
                acc, parts_ptr, factor_ptr, unit_ptr + first, word_ptr + at.to(tl.int64) * 64, count, begin - at,
                end - at, rate_of(i), factor_of(i), STAGES, ASM,
            )  # fmt: skip
    rn = tl.arange(0, 64)
    octaves = octave_eighths(tl.load(exponent_ptr + tile * 64 + rn))
    acc *= (tl.load(tile_scale_ptr + tile) * octaves)[:, None]
    first_kept, end_kept = tl.load(tile_ptr + tile * 4 + 1) + part * 16, tl.load(tile_ptr + tile * 4 + 5)
    acc += kept_products(x_ptr, stride_xm, place_ptr, value_ptr, first_kept, end_kept, parts * 16, M, COLUMNS, UPCAST)
    acc = tl.sum(tl.reshape(acc, (64, COLUMNS // 2, 2)), 2)
    rows = first_row + rn
    rows = tl.where(rows < tl.load(tile_ptr + tile * 4 + 3), rows, N)
    if SPLIT:
        acc, last = add_parts(acc, partial_ptr, ticket_ptr, tile, part, parts, M)
        if last:
            store_rows(acc, rows, 1.0, y_ptr, N, M, False)
    else:
        store_rows(acc, rows, 1.0, y_ptr, N, M, False)


@dataclass(frozen=True)
class TrellisScratch:
    """The memory of a product.

    Attributes:
        parts: split-K factor.
        activations: int32 [units, 4, columns, 16], the bytes of x.
        factors: float32 [units, columns].
        partials: float32, parts * row tiles * 64 * columns / 2; None when `parts` is 1.
    """

    parts: int
    activations: torch.Tensor
    factors: torch.Tensor
    partials: torch.Tensor | None


def launch_trellis(
    x: torch.Tensor, weight: TrellisOperands, y: torch.Tensor, stages: int, scratch: TrellisScratch
) -> None:
    """Run both kernels. Allocates nothing, checks nothing: see `dispatch.trellis_matmul`.

    Args:
        x: [n, cols], bfloat16 or float16, last dimension contiguous; n at most half the columns of the scratch.
        weight: see `TrellisOperands`.
        y: [n, rows], contiguous.
        stages: units that are copied ahead.
        scratch: for n rows of x or more.
    """
    columns = scratch.factors.shape[1]
    trellis_activations[(weight.column_units, columns // 2)](**activation_arguments(x, weight, scratch))
    trellis_tensor_core[(weight.row_tiles, scratch.parts)](**product_arguments(x, weight, y, stages, scratch))


def activation_arguments(x: torch.Tensor, weight: TrellisOperands, scratch: TrellisScratch) -> dict[str, Any]:
    """Return the arguments of `trellis_activations`, by name."""
    return {
        "x_ptr": x,
        "column_ptr": weight.columns,
        "exponent_ptr": weight.column_exponents,
        "part_word_ptr": scratch.activations,
        "factor_ptr": scratch.factors,
        "M": x.shape[0],
        "K": weight.cols,
        "stride_xm": x.stride(0),
        "COLUMNS": scratch.factors.shape[1],
        "STEPS": STEPS_OF_X,
        "SMALLEST": SMALLEST,
        "num_warps": 1,
        **COMPILER,
    }


def product_arguments(
    x: torch.Tensor, weight: TrellisOperands, y: torch.Tensor, stages: int, scratch: TrellisScratch
) -> dict[str, Any]:
    """Return the arguments of `trellis_tensor_core`, by name."""
    columns, nvidia = scratch.factors.shape[1], x.is_cuda and torch.version.hip is None
    return {
        "x_ptr": x,
        "parts_ptr": scratch.activations.view(torch.int8),
        "factor_ptr": scratch.factors,
        "word_ptr": weight.words,
        "unit_ptr": weight.units,
        "run_ptr": weight.runs,
        "tile_ptr": weight.tiles,
        "tile_scale_ptr": weight.tile_scales,
        "exponent_ptr": weight.row_exponents,
        "place_ptr": weight.kept_places,
        "value_ptr": weight.kept_values,
        "partial_ptr": scratch.partials,
        "ticket_ptr": weight.tickets,
        "y_ptr": y,
        "M": x.shape[0],
        "N": weight.rows,
        "stride_xm": x.stride(0),
        "units": weight.column_units,
        **trellis_constants(columns, stages, scratch.parts > 1, weight.rate_mask, nvidia, not x.is_cuda),
        "num_warps": WARPS,
        **COMPILER,
    }


def trellis_constants(
    columns: int, stages: int, split: bool, rate_mask: int, asm: bool, upcast: bool
) -> dict[str, int | bool]:
    """Return the compile-time arguments of `trellis_tensor_core`, by name."""
    return {
        "COLUMNS": columns,
        "STAGES": stages,
        "SPLIT": split,
        "RATES": rate_mask,
        "ASM": asm,
        "UPCAST": upcast,
    }
