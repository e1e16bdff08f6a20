"""The CSR matrix of outliers. FORMAT.md section 3.2.

Invariant (checked by `csr_problems`, assumed by all methods): row_ptr starts at 0, never falls, and ends at nnz; column
indices are in [0, cols) and rise strictly within a row.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from vllm_latq.errors import CheckpointError
from vllm_latq.format.problems import mismatches, problem

# Entries expanded at a time: their int64 coordinates must not take more memory than the matrix itself.
BAND_ENTRIES = 1 << 18


def column_dtype(cols: int) -> torch.dtype:
    """Return the dtype of stored column indices: 16 bits if every column fits."""
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
        """Number of rows."""
        return self.row_ptr.numel() - 1

    @property
    def nnz(self) -> int:
        """Number of entries."""
        return self.col_idx.numel()

    @property
    def counts(self) -> torch.Tensor:
        """Entries per row, int64 [rows]."""
        return self.row_ptr.diff().to(torch.int64)

    def to(self, device: torch.device | str) -> "CSR":
        """Return the same matrix with its arrays on `device`."""
        return CSR(self.row_ptr.to(device), self.col_idx.to(device), self.values.to(device), self.cols)

    def row_indices(self) -> torch.Tensor:
        """Return the row of each entry, int64 [nnz]."""
        rows = torch.arange(self.rows, device=self.row_ptr.device)
        return torch.repeat_interleave(rows, self.counts, output_size=self.nnz)

    def bands(self) -> Iterator[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
        """Yield rows (int64), columns (int64) and values of the entries, a limited number at a time."""
        row_ptr = self.row_ptr.to(torch.int64)
        for low in range(0, self.nnz, BAND_ENTRIES):
            entries = torch.arange(low, min(low + BAND_ENTRIES, self.nnz), device=row_ptr.device)
            band = slice(low, low + BAND_ENTRIES)
            rows = torch.searchsorted(row_ptr, entries, right=True) - 1
            yield rows, self.col_idx[band].to(torch.int64), self.values[band]

    @classmethod
    def from_mask(cls, mask: torch.Tensor, values: torch.Tensor) -> "CSR":
        """Return the matrix with the `values` [rows, cols] at the places where `mask` is true."""
        rows, cols = mask.nonzero(as_tuple=True)
        return cls.from_sorted(rows, cols, values[rows, cols], mask.shape)

    @classmethod
    def from_sorted(cls, rows: torch.Tensor, cols: torch.Tensor, values: torch.Tensor, shape: Sequence[int]) -> "CSR":
        """Return the matrix with values [nnz] at coordinates, int64 [nnz], that are sorted by row, then column."""
        row_ptr = torch.zeros(shape[0] + 1, dtype=torch.int64, device=rows.device)
        torch.cumsum(torch.bincount(rows, minlength=shape[0]), 0, out=row_ptr[1:])
        return cls(row_ptr.to(torch.int32), cols.to(column_dtype(shape[1])), values, shape[1])

    def select_rows(self, rows: torch.Tensor) -> "CSR":
        """Return the given rows (int64 [n]) in the given order; -1 stands for an empty row."""
        counts = torch.where(rows >= 0, self.counts[rows.clamp(min=0)], 0) if self.rows else torch.zeros_like(rows)
        row_ptr = torch.nn.functional.pad(counts.cumsum(0), (1, 0))
        start = self.row_ptr.to(torch.int64)[rows.clamp(min=0)] if self.rows else counts
        total = int(row_ptr[-1])
        offset = torch.repeat_interleave(start - row_ptr[:-1], counts, output_size=total)
        entry = offset + torch.arange(total, device=offset.device)
        col_idx = self.col_idx.to(torch.int32)[entry].to(self.col_idx.dtype)
        return CSR(row_ptr.to(torch.int32), col_idx, self.values[entry], self.cols)

    def select_columns(self, low: int, high: int) -> "CSR":
        """Return columns [low, high), renumbered from 0."""
        cols = self.col_idx.to(torch.int64)
        keep = (cols >= low) & (cols < high)
        rows = self.row_indices()[keep]
        return CSR.from_sorted(rows, cols[keep] - low, self.values[keep], (self.rows, high - low))

    @staticmethod
    def cat(matrices: Sequence["CSR"]) -> "CSR":
        """Stack matrices of equal width on top of each other."""
        row_ptr = torch.cat([matrix.counts for matrix in matrices]).cumsum(0)
        return CSR(
            torch.nn.functional.pad(row_ptr, (1, 0)).to(torch.int32),
            torch.cat([matrix.col_idx for matrix in matrices]),
            torch.cat([matrix.values for matrix in matrices]),
            matrices[0].cols,
        )

    def add_to(self, dense: torch.Tensor) -> torch.Tensor:
        """Add the entries to a dense [rows, cols] matrix in place."""
        for rows, cols, values in self.bands():
            dense.index_put_((rows, cols), values.to(dense.dtype), accumulate=True)
        return dense


def csr_problems(matrix: CSR, where: str) -> Iterator[CheckpointError]:
    """Yield one error per violated invariant of the outliers of the linear `where`; dtypes must be right."""
    row_ptr, col_idx, values = matrix.row_ptr, matrix.col_idx.to(torch.int32), matrix.values
    if col_idx.numel() != values.numel():
        found = f"{values.numel()} values for {col_idx.numel()} columns"
        yield problem(f"{where}.outlier_values", "as many values as column indices", found)
        return
    first, last = int(row_ptr[0]), int(row_ptr[-1])
    if first != 0 or last != col_idx.numel():
        found = f"{first} and {last}"
        yield problem(f"{where}.outlier_row_ptr", f"0 first and {col_idx.numel()} last", found)
        return
    # Compared, not subtracted: a difference of hostile values may overflow.
    falls = row_ptr[1:] < row_ptr[:-1]
    if falls.any():
        row = int(falls.nonzero()[0])
        yield problem(f"{where}.outlier_row_ptr", "offsets that never fall", f"a fall after row {row}")
        return
    if col_idx.numel() and not (int(col_idx.min()) >= 0 and int(col_idx.max()) < matrix.cols):
        found = f"{int(col_idx.min())} to {int(col_idx.max())}"
        yield problem(f"{where}.outlier_col_idx", f"columns in [0, {matrix.cols})", found)
        return
    starts = torch.zeros(col_idx.numel() + 1, dtype=torch.bool, device=row_ptr.device)
    starts[row_ptr.to(torch.int64)] = True
    wrong = torch.nn.functional.pad((col_idx[1:] <= col_idx[:-1]) & ~starts[1:-1], (1, 0))
    if wrong.any():
        expected = "columns that rise strictly within a row"
        yield problem(f"{where}.outlier_col_idx", expected, mismatches(wrong, "entry"))
    if (wrong := ~torch.isfinite(values)).any():
        yield problem(f"{where}.outlier_values", "values that are finite", mismatches(wrong, "entry"))
