"""Entries, the int32 words that hold outliers: bits 31..16 a bf16 value, bits 15..0 its column.

CSR --coordinates--> Coordinates --value_entries--> Entries
"""

from dataclasses import dataclass

import torch

from vllm_latq.kernels.errors import require

MAX_COLUMNS = 1 << 16


@dataclass(frozen=True)
class Coordinates:
    """Outliers sorted by row, then column. row, col: int64 [n]; value: bfloat16 [n]."""

    row: torch.Tensor
    col: torch.Tensor
    value: torch.Tensor


@dataclass(frozen=True)
class Entries:
    """Entries sorted by row. row: int64 [n]; entry: int32 [n]."""

    row: torch.Tensor
    entry: torch.Tensor


def coordinates(row_ptr: torch.Tensor, col_idx: torch.Tensor, values: torch.Tensor, cols: int) -> Coordinates:
    """CSR -> sorted coordinates with bf16 values, exactly.

    Entries of one (row, column) are summed in float64 first. A value with more than the 8 significant bits of bf16 (an
    overflowing HPTQ integer above 256) becomes two or three entries that add up to it.
    """
    place, rest = _summed(row_ptr, col_idx, values, cols)
    places, parts = [], []
    for _ in range(3):
        part = rest.to(torch.bfloat16)
        places.append(place)
        parts.append(part)
        keep = rest != part.to(torch.float64)
        place, rest = place[keep], (rest - part.to(torch.float64))[keep]
        if not place.numel():
            break
    require(not place.numel(), "outlier values", "at most 24 significant bits", "a value with more",
            "Store outliers as bfloat16, or as float32 integers.")  # fmt: skip
    at, value = torch.cat(places), torch.cat(parts)
    by_place = torch.argsort(at, stable=True)
    at = at[by_place]
    return Coordinates(at // cols, at % cols, value[by_place])


def _summed(
    row_ptr: torch.Tensor, col_idx: torch.Tensor, values: torch.Tensor, cols: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """row * cols + column of every place, rising, int64 [n], and the sum of its entries, float64 [n]."""
    rows = torch.arange(row_ptr.numel() - 1, device=row_ptr.device)
    row = torch.repeat_interleave(rows, row_ptr.diff().to(torch.int64), output_size=col_idx.numel())
    place, inverse = torch.unique(row * cols + col_idx.to(torch.int64), return_inverse=True)
    total = torch.zeros(place.numel(), dtype=torch.float64, device=values.device)
    return place, total.index_add_(0, inverse, values.to(torch.float64))


def value_entries(points: Coordinates) -> Entries:
    """Return one entry for each outlier."""
    return Entries(points.row, points.value.view(torch.int16).to(torch.int32) << 16 | points.col.to(torch.int32))
