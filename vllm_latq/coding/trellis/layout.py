"""How a matrix is cut for the trellis code: tiles, units of tiles of one rate, and the order of columns.

    tiles     of 16 x 16 weights, row by row; the last ones of a row and of a column are padded
    units     of UNIT_ROWS x UNIT_COLUMNS weights, whose tiles have one rate; the last ones may be smaller
    columns   within each of `parts(columns)` equal parts by falling importance, ties by index

A tensor-parallel process takes whole tiles: those of some rows, or those of the columns of some parts. FORMAT.md
section 3.4.
"""

import torch

from vllm_latq.coding.trellis.code import TILE, tile_words

UNIT_ROWS, UNIT_COLUMNS = 64, 128
# A part has at least so many columns, so that sorting within parts costs little.
LEAST_PART, MOST_PARTS = 256, 8


def tiles(rows: int, columns: int) -> tuple[int, int]:
    """Return how many tiles cover a matrix, along rows and columns."""
    return -(-rows // TILE), -(-columns // TILE)


def units(rows: int, columns: int) -> tuple[int, int]:
    """Return how many units cover a matrix, along rows and columns."""
    return -(-rows // UNIT_ROWS), -(-columns // UNIT_COLUMNS)


def tile_rates(rates: torch.Tensor, rows: int, columns: int) -> torch.Tensor:
    """Return the rate of every tile, int64 [row tiles, column tiles], from those of the units of a matrix."""
    row_tiles, column_tiles = tiles(rows, columns)
    spread = rates.to(torch.int64).repeat_interleave(UNIT_ROWS // TILE, 0).repeat_interleave(UNIT_COLUMNS // TILE, 1)
    return spread[:row_tiles, :column_tiles]


def trellis_words(rates: torch.Tensor, rows: int, columns: int) -> int:
    """Return the words of all tiles of a matrix from the rates of its units; takes no memory for each tile."""
    row_tiles, column_tiles = tiles(rows, columns)
    high, wide = _unit_tiles(row_tiles, UNIT_ROWS), _unit_tiles(column_tiles, UNIT_COLUMNS)
    return int(high @ rates.cpu().to(torch.int64) @ wide) * tile_words(1)


def _unit_tiles(count: int, unit: int) -> torch.Tensor:
    """Return how many of `count` tiles in a row each unit has, int64 [units]."""
    each = unit // TILE
    return (count - each * torch.arange(-(-count // each), device="cpu")).clamp(max=each)


def parts(columns: int) -> int:
    """Return the parts that columns are sorted within: the most, a power of two, that are whole units."""
    count = MOST_PARTS
    while count > 1 and (columns % (count * UNIT_COLUMNS) or columns // count < LEAST_PART):
        count //= 2
    return count


def column_order(importance: torch.Tensor) -> torch.Tensor:
    """Return the columns in the order in which they are stored, int64 [columns]; importance int8 [columns]."""
    by_part = importance.to(torch.int16).view(parts(len(importance)), -1)
    order = torch.argsort(by_part, dim=1, descending=True, stable=True)
    return (order + torch.arange(len(by_part), device=order.device)[:, None] * by_part.shape[1]).flatten()
