"""Entries, the int32 words that hold outliers, in one of two forms.

    value    bits 31..16 bf16 value     15..0 column
    beyond   bits 31..16 column     15..12 second digit     11..8 first digit     7..0 columns from first to second
             or, with 0 columns from first to second, 15..12 exponent of 4 that the first digit is multiplied by

Where codes have scales, an outlier is a value. Where they are integers (coded weights), the code below it is an end of
the grid, and entries say how far beyond that its integer lies, in digits from -8 to 7. Most outliers are one digit, and
two share an entry if they are at most 255 columns apart; what is further beyond takes entries of its own, each digit as
many times a power of 4 as fits, and then the digit that is left. So an integer of 32 bits takes at most 16 entries.

    CSR --coordinates--> Coordinates --value_entries--> Entries
    CSR --integers--> Integers --beyond_entries--> Entries
"""

from dataclasses import dataclass

import torch

from vllm_latq.kernels.errors import require

MAX_COLUMNS = 1 << 16
BEYOND_BITS = (2, 3, 4)  # widths of integer codes with entries of that form: those of 8 bits have few, far outliers
_LEAST_DIGIT, _LARGEST_DIGIT, _LARGEST_GAP, _LARGEST_EXPONENT = -8, 7, 255, 15


@dataclass(frozen=True)
class Coordinates:
    """Outliers sorted by row, then column. row, col: int64 [n]; value: bfloat16 [n]."""

    row: torch.Tensor
    col: torch.Tensor
    value: torch.Tensor


@dataclass(frozen=True)
class Integers:
    """Outliers as integers z, sorted by row, then column, each place once. row, col, z: int64 [n]."""

    row: torch.Tensor
    col: torch.Tensor
    z: torch.Tensor


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


def integers(row_ptr: torch.Tensor, col_idx: torch.Tensor, values: torch.Tensor, cols: int, bits: int) -> Integers:
    """CSR -> integers, where all are beyond the grid of `bits`; entries of one place are summed first.

    Raises:
        KernelInputError: a value inside the grid, a fraction, or an integer of more than 32 bits.
    """
    place, total = _summed(row_ptr, col_idx, values, cols)
    half, limit = 1 << (bits - 1), 1 << 31
    inside = (total >= -half) & (total < half)
    outside = (total == total.round()) & (total.abs() <= limit) & ~inside
    others = total[~outside][:1].tolist()
    require(not others, "outlier values", f"integers of at most 32 bits, none in {-half} .. {half - 1}", others,
            "Codes without scales have integers for outliers.")  # fmt: skip
    z = total.to(torch.int64)
    return Integers(place // cols, place % cols, z)


def _summed(
    row_ptr: torch.Tensor, col_idx: torch.Tensor, values: torch.Tensor, cols: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """row * cols + column of every place, rising, int64 [n], and the sum of its entries, float64 [n]."""
    rows = torch.arange(row_ptr.numel() - 1, device=row_ptr.device)
    row = torch.repeat_interleave(rows, row_ptr.diff().to(torch.int64), output_size=col_idx.numel())
    place, inverse = torch.unique(row * cols + col_idx.to(torch.int64), return_inverse=True)
    total = torch.zeros(place.numel(), dtype=torch.float64, device=values.device)
    return place, total.index_add_(0, inverse, values.to(torch.float64))


def _distance_from_grid(z: torch.Tensor, bits: int) -> torch.Tensor:
    """Return how far integers lie beyond the grid, negative below it."""
    half = 1 << (bits - 1)
    return torch.where(z < 0, z + half, z - half + 1)


def value_entries(points: Coordinates) -> Entries:
    """Return one entry for each outlier."""
    return Entries(points.row, points.value.view(torch.int16).to(torch.int32) << 16 | points.col.to(torch.int32))


def beyond_entries(points: Integers, bits: int) -> Entries:
    """Return entries of digits: a digit with an exponent alone, near neighbours two to an entry, in column order."""
    owner, digit, exponent = _digits(_distance_from_grid(points.z, bits))
    row, col, alone = points.row[owner], points.col[owner], exponent > 0
    index = torch.arange(row.numel(), device=row.device)
    # Runs of digits near each other are cut into pairs.
    apart = torch.ones_like(alone)
    apart[1:] = (row.diff() != 0) | (col.diff() > _LARGEST_GAP) | alone[1:] | alone[:-1]
    start = torch.where(apart, index, 0).cummax(0).values if index.numel() else index
    first = ((index - start) % 2 == 0).nonzero()[:, 0]
    second = (first + 1).clamp_(max=max(index.numel() - 1, 0))
    paired = (second != first) & ~apart[second]
    gap = torch.where(paired, col[second] - col[first], 0)
    upper = torch.where(paired, digit[second] & 15, exponent[first])
    entry = col[first] << 16 | upper << 12 | (digit[first] & 15) << 8 | gap
    return Entries(row[first], (entry - ((entry >> 31) << 32)).to(torch.int32))


def _digits(distance: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Split numbers other than 0, int64 [n], into digit * 4^exponent that add up to them, largest exponent first.

    Returns:
        Index of the number, digit, exponent: int64 [m] each, sorted by the first.
    """
    powers = 4 ** torch.arange(_LARGEST_EXPONENT + 1, device=distance.device)
    owner, rest = torch.arange(distance.numel(), device=distance.device), distance
    found = []
    while owner.numel():
        near = (rest >= _LEAST_DIGIT) & (rest <= _LARGEST_DIGIT)
        # The least exponent with which the nearest digit exists, as twice 7.5 times its power shows.
        exponent = torch.where(near, 0, torch.bucketize(2 * rest.abs(), 15 * powers[1:-1]) + 1)
        power = powers[exponent]
        digit = torch.where(near, rest, ((2 * rest + power) // (2 * power)).clamp_(max=_LARGEST_DIGIT))
        found.append(torch.stack((owner, digit, exponent)))
        rest = rest - digit * power
        owner, rest = owner[rest != 0], rest[rest != 0]
    owner, digit, exponent = (
        torch.cat(found, 1) if found else torch.zeros((3, 0), dtype=torch.int64, device=distance.device)
    )
    by_owner = torch.argsort(owner, stable=True)
    return owner[by_owner], digit[by_owner], exponent[by_owner]
