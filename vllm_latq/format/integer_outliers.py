"""Outliers as integers: how many weights lie between two of them, and how far beyond the grid each is. FORMAT.md 3.2.

    z of two rows, 3 bits       1 -2 [9] 0 | 3 [-5] 0 0      the grid is -4 .. 3, outliers in brackets
    stored as codes of          1 -2  3  0 | 3  -4  0 0      the end of the grid says on which side
    outlier_gaps                2, 2                         weights between them, from row to row
    outlier_overflow            5, 0                         how far beyond the end, less 1

A byte of 255 says that the outlier has another entry, which is added to it: both numbers are as large as they must be.

Invariant: `entries(encode(outliers))` are those outliers again; each has one shortest form, which `encode` writes.
"""

from collections.abc import Iterator, Mapping

import torch

from vllm_latq.coding.packing import codes_at, put_codes
from vllm_latq.format.config import WHOLE_ROW
from vllm_latq.format.csr import BAND_ENTRIES, CSR, column_dtype

CONTINUED = 255
# Integers that float32 holds exactly.
MAX_OVERFLOW = 1 << 24


def outlier_values(integers: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """What outliers on the lattice are worth: scale * z in float32, rounded to bfloat16; shapes broadcast."""
    return (integers.to(torch.float32) * scales.to(torch.float32)).to(torch.bfloat16)


def values_on_lattice(beyond: CSR, scales: torch.Tensor, group_size: int) -> torch.Tensor:
    """`outlier_values` of a CSR matrix of integers, [nnz], with scales [rows, groups]."""
    width = beyond.cols if group_size == WHOLE_ROW else group_size
    values = [outlier_values(z, scales[rows, cols // width]) for rows, cols, z in beyond.bands()]
    return torch.cat([scales.new_empty(0, dtype=torch.bfloat16), *values])


def stored_overflow(qweight: torch.Tensor, bits: int, beyond: CSR) -> dict[str, torch.Tensor]:
    """The tensors of outliers as integers: `qweight`, with an end of the grid under each, gaps and overflow.

    Args:
        qweight: int32 [rows, words], with any codes under the outliers.
        bits: of a code.
        beyond: CSR [rows, cols] of integers outside of the grid.
    """
    qweight = qweight.clone(memory_format=torch.contiguous_format)
    for rows, cols, integers in beyond.bands():
        put_codes(qweight, bits, rows, cols, (integers > 0) * ((1 << bits) - 1))
    gaps, overflow = encode(beyond, 1 << (bits - 1))
    return {"qweight": qweight, "outlier_gaps": gaps, "outlier_overflow": overflow}


def read_overflow(tensors: Mapping[str, torch.Tensor], bits: int, shape: tuple[int, int]) -> tuple[torch.Tensor, CSR]:
    """Inverse of `stored_overflow`, of validated tensors: the codes, with 0's under each outlier, and the integers."""
    qweight, half = tensors["qweight"].clone(memory_format=torch.contiguous_format), 1 << (bits - 1)
    counts = torch.zeros(shape[0], dtype=torch.int64, device=qweight.device)
    columns = [torch.empty(0, dtype=column_dtype(shape[1]), device=qweight.device)]
    integers = [torch.empty(0, dtype=torch.int32, device=qweight.device)]
    for rows, cols, overflow in entries(tensors["outlier_gaps"], tensors["outlier_overflow"], shape[1]):
        codes = codes_at(qweight, bits, rows, cols)
        integers.append(beyond_grid(codes, overflow, half).to(torch.int32))
        put_codes(qweight, bits, rows, cols, torch.full_like(codes, half))
        columns.append(cols.to(columns[0].dtype))
        counts.index_add_(0, rows, torch.ones_like(rows))
    row_ptr = torch.nn.functional.pad(counts.cumsum(0), (1, 0)).to(torch.int32)
    return qweight, CSR(row_ptr, torch.cat(columns), torch.cat(integers), shape[1])


def beyond_grid(codes: torch.Tensor, overflow: torch.Tensor, half: int) -> torch.Tensor:
    """z of outliers: `overflow` below the grid where the code is its first, else above it."""
    return torch.where(codes == 0, -half - overflow, half - 1 + overflow)


def encode(outliers: CSR, half: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The gaps and the overflow of outliers, uint8 [n] each.

    Args:
        outliers: CSR [rows, cols] of integers z < -half or z >= half.
        half: 2^(bits - 1).
    """
    parts, before = [torch.empty((2, 0), dtype=torch.uint8, device=outliers.col_idx.device)], -1
    for rows, cols, integers in outliers.bands():
        place = rows * outliers.cols + cols
        gaps = place.diff(prepend=place.new_tensor([before])) - 1
        z = integers.to(torch.int64)
        numbers = torch.stack((gaps, torch.where(z < 0, -half - z, z - half + 1) - 1))
        lengths = 1 + numbers.amax(0) // CONTINUED
        first = torch.repeat_interleave(lengths.cumsum(0) - lengths, lengths)
        index = torch.arange(len(first), device=first.device) - first
        rest = torch.repeat_interleave(numbers, lengths, 1) - CONTINUED * index
        parts.append(rest.clamp_(0, CONTINUED).to(torch.uint8))
        before = int(place[-1])
    gaps, overflow = torch.cat(parts, 1)
    return gaps.contiguous(), overflow.contiguous()


def entries(gaps: torch.Tensor, overflow: torch.Tensor, cols: int) -> Iterator[tuple[torch.Tensor, ...]]:
    """(rows, columns, overflow >= 1) of outliers in a matrix of `cols` columns, int64, a limited number at a time."""
    carried, before = torch.zeros((2, 1), dtype=torch.int64, device=gaps.device), -1
    for low in range(0, len(gaps), BAND_ENTRIES):
        band = slice(low, low + BAND_ENTRIES)
        numbers = torch.stack((gaps[band], overflow[band])).to(torch.int64)
        ends = (numbers != CONTINUED).all(0)
        sums = numbers.cumsum(1) + carried
        found = sums[:, ends].diff(dim=1, prepend=torch.zeros_like(carried))
        carried = sums[:, -1:] - found.sum(1, keepdim=True)
        if found.shape[1]:
            place = (found[0] + 1).cumsum(0) + before
            yield place // cols, place % cols, found[1] + 1
            before = int(place[-1])


def entries_per_outlier(rate: float) -> float:
    """Mean number of entries where each weight is an outlier with this probability, in (0, 1), none far beyond."""
    return 1 / (1 - (1 - rate) ** CONTINUED)


def flaw(gaps: torch.Tensor, overflow: torch.Tensor) -> str:
    """What is wrong with the entries themselves, wherever they lead; empty if nothing is."""
    numbers = torch.stack((gaps, overflow))
    goes_on = (numbers == CONTINUED).any(0)
    if goes_on[-1:].any():
        return "an outlier without its last entry"
    longer = goes_on[:-1] & ((numbers[:, :-1] != CONTINUED) & (numbers[:, 1:] != 0)).any(0)
    if not longer.any():
        return ""
    return f"{int(longer.sum())} others, the first in entry {int(longer.to(torch.uint8).argmax())}"
