"""The CSR matrix of outliers. FORMAT.md section 3.2.

Invariant (checked by `validate`, assumed here): row_ptr starts at 0, never falls, ends at nnz; column indices are in
[0, cols) and rise strictly within a row.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

# Entries expanded together: their int64 coordinates must not outgrow the matrix itself.
BAND_ENTRIES = 1 << 18


def column_dtype(cols: int) -> torch.dtype:
    """dtype of stored column indices: 16 bits wherever they fit."""
    return torch.uint16 if cols <= 1 << 16 else torch.int32


@dataclass(frozen=True)
class CSR:
    """Sparse [rows, cols] matrix.

    Attributes:
        row_ptr: int32 [rows + 1].
        col_idx: uint16 or int32 [nnz].
        values: floating point [nnz].
        cols: number of columns.
    """

    row_ptr: torch.Tensor
    col_idx: torch.Tensor
    values: torch.Tensor
    cols: int

    @property
    def rows(self) -> int:
        return self.row_ptr.numel() - 1

    @property
    def nnz(self) -> int:
        return self.col_idx.numel()

    @property
    def counts(self) -> torch.Tensor:
        """Entries per row, int64 [rows]."""
        return self.row_ptr.diff().to(torch.int64)

    def to(self, device: torch.device | str) -> "CSR":
        """The same matrix with its arrays on `device`."""
        return CSR(self.row_ptr.to(device), self.col_idx.to(device), self.values.to(device), self.cols)

    def row_indices(self) -> torch.Tensor:
        """Row of each entry, int64 [nnz]."""
        rows = torch.arange(self.rows, device=self.row_ptr.device)
        return torch.repeat_interleave(rows, self.counts, output_size=self.nnz)

    def bands(self) -> Iterator[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
        """(rows int64, columns int64, values) of the entries, a limited number at a time."""
        row_ptr = self.row_ptr.to(torch.int64)
        for low in range(0, self.nnz, BAND_ENTRIES):
            entries = torch.arange(low, min(low + BAND_ENTRIES, self.nnz), device=row_ptr.device)
            band = slice(low, low + BAND_ENTRIES)
            rows = torch.searchsorted(row_ptr, entries, right=True) - 1
            yield rows, self.col_idx[band].to(torch.int64), self.values[band]

    @classmethod
    def from_mask(cls, mask: torch.Tensor, values: torch.Tensor) -> "CSR":
        """Keep `values` [rows, cols] where `mask` is true."""
        rows, cols = mask.nonzero(as_tuple=True)
        return cls.from_sorted(rows, cols, values[rows, cols], mask.shape)

    @classmethod
    def from_sorted(cls, rows: torch.Tensor, cols: torch.Tensor, values: torch.Tensor, shape: Sequence[int]) -> "CSR":
        """From coordinates int64 [nnz] already sorted by row."""
        row_ptr = torch.zeros(shape[0] + 1, dtype=torch.int64, device=rows.device)
        torch.cumsum(torch.bincount(rows, minlength=shape[0]), 0, out=row_ptr[1:])
        return cls(row_ptr.to(torch.int32), cols.to(column_dtype(shape[1])), values, shape[1])

    def select_rows(self, rows: torch.Tensor) -> "CSR":
        """The given rows (int64 [n]) in the given order; -1 stands for an empty row."""
        counts = torch.where(rows >= 0, self.counts[rows.clamp(min=0)], 0) if self.rows else torch.zeros_like(rows)
        row_ptr = torch.nn.functional.pad(counts.cumsum(0), (1, 0))
        start = self.row_ptr.to(torch.int64)[rows.clamp(min=0)] if self.rows else counts
        total = int(row_ptr[-1])
        offset = torch.repeat_interleave(start - row_ptr[:-1], counts, output_size=total)
        entry = offset + torch.arange(total, device=offset.device)
        col_idx = self.col_idx.to(torch.int32)[entry].to(self.col_idx.dtype)
        return CSR(row_ptr.to(torch.int32), col_idx, self.values[entry], self.cols)

    def select_columns(self, low: int, high: int) -> "CSR":
        """Columns [low, high), re-based to start at 0."""
        cols = self.col_idx.to(torch.int64)
        keep = (cols >= low) & (cols < high)
        rows = self.row_indices()[keep]
        return CSR.from_sorted(rows, cols[keep] - low, self.values[keep], (self.rows, high - low))

    @staticmethod
    def cat(parts: Sequence["CSR"]) -> "CSR":
        """Stack matrices of equal width on top of each other."""
        row_ptr = torch.cat([part.counts for part in parts]).cumsum(0)
        return CSR(
            torch.nn.functional.pad(row_ptr, (1, 0)).to(torch.int32),
            torch.cat([part.col_idx for part in parts]),
            torch.cat([part.values for part in parts]),
            parts[0].cols,
        )

    def add_to(self, dense: torch.Tensor) -> torch.Tensor:
        """Add the entries to a dense [rows, cols] matrix in place."""
        for rows, cols, values in self.bands():
            dense.index_put_((rows, cols), values.to(dense.dtype), accumulate=True)
        return dense

    def to_dense(self, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return self.add_to(torch.zeros((self.rows, self.cols), dtype=dtype, device=self.values.device))
