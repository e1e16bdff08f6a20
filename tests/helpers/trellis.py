"""Random weights of the encoding `trellis`, and a greedy encoder for tests that need a weight close to a given one."""

from collections.abc import Sequence

import torch

from vllm_latq.coding.trellis.code import (
    FACTORS,
    RATES,
    STEPS,
    TILE,
    WINDOW,
    WINDOWS,
    pack_rings,
    step_places,
    tile_words,
    window_values,
)
from vllm_latq.coding.trellis.layout import column_order, tile_rates, tiles, units
from vllm_latq.format.encodings.octaves import octave_eighths
from vllm_latq.format.encodings.trellis import TrellisWeight
from vllm_latq.format.scheme import LayerScheme

TRELLIS = LayerScheme("trellis")
# The rate of `greedy_trellis`, and the error relative to the scales from which a weight is kept.
_RATE, _FURTHEST = 8, 0.5


def octaves(size: int) -> torch.Tensor:
    """Return exponents of the scales of so many rows or columns, int8, over two octaves; equal for equal sizes."""
    return (torch.arange(size) * 7 % 17 - 8).to(torch.int8)


def importance(cols: int) -> torch.Tensor:
    """Return the importance of so many columns, int8, with ties; equal for equal sizes, as for fused linears."""
    return (torch.arange(cols) * 37 % 101 - 50).to(torch.int8)


def random_trellis(
    rows: int, cols: int, seed: int = 0, rates: Sequence[int] = RATES, kept: float = 0.01
) -> TrellisWeight:
    """Return a weight of random windows: each ring is valid.

    Args:
        rows: of the weight.
        cols: of the weight.
        seed: of all random numbers except exponents and importance of columns, which depend on `cols` alone.
        rates: those that units have.
        kept: share of weights to which something is added; the first and the last weight are among them unless it is 0.
    """
    generator = torch.Generator().manual_seed(seed)
    choice = torch.randint(len(rates), units(rows, cols), generator=generator)
    of_units = torch.tensor(rates, dtype=torch.uint8)[choice]
    words = int(tile_rates(of_units, rows, cols).sum()) * tile_words(1)
    mask = torch.rand(rows * cols, generator=generator) < kept
    mask[[0, -1]] = kept > 0
    positions = mask.nonzero()[:, 0]
    return TrellisWeight(
        0.1 + torch.rand(1, generator=generator),
        octaves(rows),
        octaves(cols),
        importance(cols),
        of_units,
        torch.randint(-(2**31), 2**31, (words,), generator=generator).to(torch.int32),
        positions.to(torch.int32),
        torch.randn(len(positions), generator=generator).to(torch.bfloat16),
    )


def greedy_trellis(weight: torch.Tensor) -> TrellisWeight:
    """Return a weight close to a given one, float32 [rows, cols]: each step takes the best window that can follow.

    The seams of rings, where a greedy choice fails, are corrected by kept weights.
    """
    rows, cols = weight.shape
    scale = 2 * weight.std().clamp(min=1e-6).reshape(1)  # most targets stay within reach of the code
    row_exponents, column_exponents = octaves(rows), octaves(cols)
    steps = scale * octave_eighths(row_exponents)[:, None] * octave_eighths(column_exponents)
    row_tiles, column_tiles = tiles(rows, cols)
    stored = torch.zeros(row_tiles * TILE, column_tiles * TILE)
    stored[:rows, :cols] = (weight / steps)[:, column_order(importance(cols))] / FACTORS[_RATE]
    blocks = stored.view(row_tiles, TILE, column_tiles, TILE).transpose(1, 2).reshape(-1, TILE, TILE)
    trellis = pack_rings(_greedy_symbols(blocks), _RATE).flatten()
    rates = torch.full(units(rows, cols), _RATE, dtype=torch.uint8)
    nothing = torch.zeros(0, dtype=torch.int32), torch.zeros(0, dtype=torch.bfloat16)
    parts = scale, row_exponents, column_exponents, importance(cols), rates, trellis
    missing = weight - TrellisWeight(*parts, *nothing).dequantize()
    positions = (missing.abs() > _FURTHEST * steps).flatten().nonzero()[:, 0]
    return TrellisWeight(*parts, positions.to(torch.int32), missing.flatten()[positions].to(torch.bfloat16))


def _greedy_symbols(blocks: torch.Tensor) -> torch.Tensor:
    """Return the symbols of tiles of values [tiles, TILE, TILE], int64 [tiles, STEPS]."""
    values, (row, column) = window_values(_RATE).to(torch.float32), step_places()
    window, symbols = torch.zeros(len(blocks), 1, dtype=torch.int64), []
    for step in range(STEPS):
        pair = blocks[:, row[step], column[step] :][:, None, :2]
        following = (window << _RATE | torch.arange(1 << _RATE)) & (WINDOWS - 1)
        best = (values[following] - pair).square().sum(-1).argmin(1, keepdim=True)
        window = following.gather(1, best)
        symbols.append(best)
    assert WINDOW % _RATE == 0
    return torch.cat(symbols, 1)
