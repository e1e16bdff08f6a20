"""Outlier storage for the kernels that spread outliers over a dense piece: entries by row tile and superblock.

A list holds the entries of 16 tile rows and half a superblock, 128 columns. The lists of ROW_ALIGN rows and half a
superblock are neighbours, so a kernel's tile, of 16 to 128 rows, has its entries of each half in one run:

    list_ptr int32 [padded rows / 128, superblocks, levels, 2 halves, 8, and one more]: the first entry of each list
    entries  int32 [entries, padded]: bits 31..16 a bf16 value, bits 15..0 its place

A place is made of the bits of the tile row r among 128 and of the column c in its superblock, lowest first: c0, r3,
c1 c2 c3, r0 r1 r2, r4 r5 r6, c4 c5 c6 c7. In this order of a dense tile a thread finds the four registers of a tensor
core's operand side by side, and the threads of a warp lie one after another.
No two entries of a list have one place: the second and the third part of a wide value are in lists of their own
(levels), which only float32 outliers have.
"""

from dataclasses import dataclass

import torch

from vllm_latq.kernels.layout.codes import ROW_ALIGN, superblocks, tile_rows
from vllm_latq.kernels.layout.entries import Coordinates
from vllm_latq.kernels.layout.fields import SUPERBLOCK
from vllm_latq.kernels.layout.outliers import SLICE_ROWS, bucket

HALF = SUPERBLOCK // 2
LEVELS = 3  # parts of a wide value, at most
_BITS = (
    "c0",
    "r3",
    "c1",
    "c2",
    "c3",
    "r0",
    "r1",
    "r2",
    "r4",
    "r5",
    "r6",
    "c4",
    "c5",
    "c6",
    "c7",
)  # of a place, the lowest first


@dataclass(frozen=True)
class SpreadEntries:
    """entries: int32 [entries, padded with zeros]; list_ptr: int32 [lists + 1]; see the module docstring."""

    entries: torch.Tensor
    list_ptr: torch.Tensor


def places(row: torch.Tensor, col: torch.Tensor) -> torch.Tensor:
    """Return the place of each tile row and column, int64, in its 128 rows and superblock."""
    place = torch.zeros_like(row)
    for at, bit in enumerate(_BITS):
        place |= ((row if bit.startswith("r") else col) >> int(bit[1]) & 1) << at
    return place


def spread_entries(
    points: Coordinates, order: torch.Tensor, cols: int, levels: int, room: int | None = None
) -> SpreadEntries:
    """Lay outliers out by row tile and superblock.

    Args:
        points: sorted by row, then column; up to `levels` of one place.
        order: int64 [padded rows], checkpoint row of each tile row.
        cols: of the weight.
        levels: 1, or LEVELS where values may be wide.
        room: entries to allocate, at least as many as there are points; None for a bucket.
    """
    row, count = tile_rows(order)[points.row], points.row.numel()
    # How many outliers of its place come before each: places that repeat are neighbours.
    level = torch.zeros_like(row)
    for back in range(1, levels):
        same = torch.zeros_like(row, dtype=torch.bool)
        if count > back:
            same[back:] = (row[back:] == row[:-back]) & (points.col[back:] == points.col[:-back])
        level += same
    blocks, halves, slices = order.numel() // ROW_ALIGN, SUPERBLOCK // HALF, ROW_ALIGN // SLICE_ROWS
    shape = (blocks, superblocks(cols), levels, halves, slices)
    number = row // ROW_ALIGN
    for size, at in zip(shape[1:], (points.col // SUPERBLOCK, level, points.col // HALF % halves,
                                    row % ROW_ALIGN // SLICE_ROWS), strict=True):  # fmt: skip
        number = number * size + at
    place = places(row, points.col)
    sort = torch.argsort(number << 16 | place)
    word = points.value.view(torch.int16).to(torch.int32) << 16 | place.to(torch.int32)
    entries = torch.zeros(bucket(count) if room is None else room, dtype=torch.int32, device=order.device)
    entries[:count] = word[sort]
    lists = blocks * shape[1] * levels * halves * slices
    list_ptr = torch.zeros(lists + 1, dtype=torch.int64, device=order.device)
    list_ptr[1:] = torch.bincount(number, minlength=lists).cumsum(0)
    return SpreadEntries(entries, list_ptr.to(torch.int32))
