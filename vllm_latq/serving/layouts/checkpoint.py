"""The layout `checkpoint`, on any device: rows of codes as `packed` stores them; products dequantize, then multiply.

    PackedWeight --pack, once at load--> rows of codes, padded CSR --product--> y

Invariant: outlier arrays may be longer than row_ptr[-1]; entries after row_ptr[-1] have column 0 and value 0. Layers of
one shape then share a compiled graph, although they have different numbers of outliers.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch.nn import functional

from vllm_latq.coding.packing import unpack_codes, zero_point
from vllm_latq.format.csr import CSR
from vllm_latq.format.encodings.packed import PackedWeight
from vllm_latq.kernels.layout.outliers import with_headroom
from vllm_latq.serving.layouts.listed import ListedOperands

# Weights unpacked at a time: on a CPU their float32 temporaries fit a cache, on a GPU they take 100 to 200 MB.
CPU_BLOCK_WEIGHTS, BLOCK_WEIGHTS = 1 << 20, 1 << 24
# Rows of every product of an invariant weight. BLAS libraries choose the order of a sum by the shapes and by alignment
# to 64 bytes: so many rows of 16-bit numbers are aligned, whatever the number of columns.
TILE_ROWS = 32


def outlier_capacity(nnz: int) -> int:
    """Entries to allocate for `nnz` outliers: few distinct sizes, and a sixteenth of headroom for reloaded weights.

    The capacity is 4/4, 5/4, 6/4 or 7/4 of a power of two, so layers of one shape mostly agree; at most a quarter is
    unused.
    """
    wanted = with_headroom(nnz)
    quarter = 1 << ((wanted - 1).bit_length() - 3)
    return -(-wanted // quarter) * quarter


def pad_outliers(outliers: CSR, capacity: int) -> CSR:
    """Lengthen col_idx and values to `capacity` entries with column 0 and value 0; row_ptr stays as it is."""
    col_idx = outliers.col_idx.new_zeros(capacity)
    values = outliers.values.new_zeros(capacity)
    col_idx[: outliers.nnz] = outliers.col_idx
    values[: outliers.nnz] = outliers.values
    return CSR(outliers.row_ptr, col_idx, values, outliers.cols)


def multiply_rows(x: torch.Tensor, weight: torch.Tensor, invariant: bool) -> torch.Tensor:
    """Return x [.., cols] times the transposed weight [rows, cols], [.., rows].

    With `invariant` the result of a row of x does not depend on the other rows.
    """
    if not invariant:
        return functional.linear(x, weight)
    rows = x.reshape(-1, weight.shape[1])
    padded = functional.pad(rows, (0, 0, 0, -len(rows) % TILE_ROWS)).contiguous()
    y = torch.cat([functional.linear(tile, weight) for tile in padded.split(TILE_ROWS)])
    return y[: len(rows)].view(*x.shape[:-1], weight.shape[0])


@dataclass(frozen=True)
class CheckpointOperands(ListedOperands):
    """A weight [rows, cols] in the layout `checkpoint`; or, to be registered, the weights of several experts.

    The weights of several experts are one object, whose tensors have a leading dimension; `product` takes one weight.

    Attributes:
        qweight: int32 [rows, words].
        scales: bfloat16 [rows, groups], or None.
        row_scales: float32 [rows], or None.
        row_ptr: int32 [rows + 1], or None for a weight without outliers.
        col_idx: uint16 or int32 [capacity], or None.
        values: bfloat16 or float32 [capacity], or None.
        rows, cols: output and input channels.
        bits: code width.
        midrise: whether the grid is.
        invariant: whether the product of a row must not depend on the other rows.
    """

    TENSORS = ("qweight", "scales", "row_scales", "row_ptr", "col_idx", "values")
    CONSTANTS = ("rows", "cols", "bits", "midrise", "invariant")
    layout: ClassVar[str] = "checkpoint"
    arch: ClassVar[str] = ""

    qweight: torch.Tensor
    scales: torch.Tensor | None
    row_scales: torch.Tensor | None
    row_ptr: torch.Tensor | None
    col_idx: torch.Tensor | None
    values: torch.Tensor | None
    rows: int
    cols: int
    bits: int
    midrise: bool
    invariant: bool

    @classmethod
    def pack(cls, weight: PackedWeight, capacity: int | None = None, invariant: bool = False) -> "CheckpointOperands":
        """Take a weight's tensors, with room for `capacity` outliers (default: `outlier_capacity`)."""
        padded = None
        if weight.outliers is not None:
            padded = pad_outliers(weight.outliers, capacity or outlier_capacity(weight.outliers.nnz))
        return cls(
            qweight=weight.qweight,
            scales=weight.scales,
            row_scales=weight.row_scales,
            row_ptr=None if padded is None else padded.row_ptr,
            col_idx=None if padded is None else padded.col_idx,
            values=None if padded is None else padded.values,
            rows=weight.shape[0],
            cols=weight.cols,
            bits=weight.bits,
            midrise=weight.midrise,
            invariant=invariant,
        )

    @property
    def capacity(self) -> int | None:
        """Outliers that the tensors have room for; None for a weight without outliers."""
        return None if self.values is None else self.values.shape[-1]

    def dense(self, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """Return the dense weight [rows, cols]: each entry computed in float32 and rounded once to `dtype`."""
        device = self.qweight.device
        weight = torch.empty((self.rows, self.cols), dtype=dtype, device=device)
        step = max(1, (CPU_BLOCK_WEIGHTS if device.type == "cpu" else BLOCK_WEIGHTS) // self.cols)
        for start in range(0, self.rows, step):
            block = slice(start, min(start + step, self.rows))
            inliers = unpack_codes(self.qweight[block], self.bits, self.cols).to(torch.float32)
            inliers = inliers - zero_point(self.bits, self.midrise)
            if self.scales is not None:
                scales = self.scales[block]
                grouped = inliers.view(*scales.shape, -1)
                inliers = (grouped * scales.to(torch.float32).unsqueeze(-1)).view_as(inliers)
            if self.row_scales is not None:
                inliers *= self.row_scales[block].unsqueeze(1)
            weight[block] = inliers
        if self.row_ptr is not None and self.col_idx is not None and self.values is not None:
            self._put_outliers(weight, self.row_ptr, self.col_idx, self.values)
        return weight

    def _put_outliers(
        self, weight: torch.Tensor, row_ptr: torch.Tensor, col_idx: torch.Tensor, values: torch.Tensor
    ) -> None:
        """Put padded outliers in place.

        The inlier below an outlier is 0, or on a mid-rise grid half a step: that is taken out and put back with the
        outlier, so that nothing is rounded twice. No size here depends on row_ptr's contents: the device is not
        synchronised, and CUDA graphs can capture it.
        """
        entry = torch.arange(values.numel(), dtype=row_ptr.dtype, device=row_ptr.device)
        row = torch.searchsorted(row_ptr[1:].contiguous(), entry, right=True).clamp_(max=self.rows - 1)
        col, flat, entries = col_idx.to(torch.int64), weight.view(-1), values.to(torch.float32)
        place = row * self.cols + col
        if self.midrise and self.scales is not None:
            real = entry < row_ptr[-1]
            flat.index_add_(0, place, torch.where(real, -flat[place], 0.0))
            step = self.scales[row, col // (self.cols // self.scales.shape[1])]
            entries = entries + 0.5 * real * step
        if self.row_scales is not None:
            entries = entries * self.row_scales[row]
        flat.index_add_(0, place, entries.to(weight.dtype))

    def product(self, x: torch.Tensor) -> torch.Tensor:
        """Return x [.., cols] times the transposed weight, [.., rows], dtype of x."""
        return multiply_rows(x, self.dense(x.dtype), self.invariant)
