"""The way to dense weights, on any device: a packed weight in checkpoint layout, and the product that dequantizes it.

    PackedWeight --dense_arguments, once at load--> rows of codes, padded CSR --dense_product--> y

Invariant: outlier arrays may be longer than row_ptr[-1]; what lies behind it has column 0 and value 0. The padding
makes layers of one shape share a compiled graph although their outliers differ in number.
"""

from collections.abc import Sequence
from typing import Any

import torch

from vllm_latq.coding.packing import unpack_codes, zero_point
from vllm_latq.format.csr import CSR
from vllm_latq.format.encodings.packed import PackedWeight

WEIGHT_ARGUMENTS = ("qweight", "scales", "row_scales", "row_ptr", "col_idx", "values")
SMALLEST_CAPACITY = 64
# Weights unpacked at a time: on a CPU their float32 temporaries stay in a cache, elsewhere in a hundred MB or two.
CPU_BLOCK_WEIGHTS, BLOCK_WEIGHTS = 1 << 20, 1 << 24


def outlier_capacity(nnz: int) -> int:
    """Entries to allocate for `nnz` outliers: few distinct sizes, and a sixteenth of headroom for reloaded weights.

    It is 4/4, 5/4, 6/4 or 7/4 of a power of two, so layers of one shape mostly agree; at most a quarter is unused.
    """
    wanted = max(nnz + nnz // 16, SMALLEST_CAPACITY)
    quarter = 1 << ((wanted - 1).bit_length() - 3)
    return -(-wanted // quarter) * quarter


def dense_arguments(
    weight: PackedWeight, capacity: int | None = None
) -> tuple[dict[str, torch.Tensor | None], dict[str, int]]:
    """The layout's tensors and constants by name, outliers padded to `capacity` (default: `outlier_capacity`)."""
    rows, cols = weight.shape
    constants = {"rows": rows, "cols": cols, "bits": weight.bits, "midrise": weight.midrise}
    tensors = {"qweight": weight.qweight, "scales": weight.scales, "row_scales": weight.row_scales}
    if weight.outliers is None:
        return tensors | dict.fromkeys(("row_ptr", "col_idx", "values")), constants
    outliers = pad_outliers(weight.outliers, capacity or outlier_capacity(weight.outliers.nnz))
    padded = {"row_ptr": outliers.row_ptr, "col_idx": outliers.col_idx, "values": outliers.values}
    return tensors | padded, constants


def pad_outliers(outliers: CSR, capacity: int) -> CSR:
    """Lengthen col_idx and values to `capacity` entries with column 0 and value 0; row_ptr stays as it is."""
    col_idx = outliers.col_idx.new_zeros(capacity)
    values = outliers.values.new_zeros(capacity)
    col_idx[: outliers.nnz] = outliers.col_idx
    values[: outliers.nnz] = outliers.values
    return CSR(outliers.row_ptr, col_idx, values, outliers.cols)


def dequantize(
    qweight: torch.Tensor,
    scales: torch.Tensor | None,
    row_scales: torch.Tensor | None,
    row_ptr: torch.Tensor | None,
    col_idx: torch.Tensor | None,
    values: torch.Tensor | None,
    rows: int,
    cols: int,
    bits: int,
    midrise: bool,
    dtype: torch.dtype = torch.float32,
) -> torch.Tensor:
    """The dense weight [rows, cols]: each entry computed in float32 and rounded once to `dtype`.

    Args:
        qweight: int32 [rows, words].
        scales: bfloat16 [rows, groups], or None.
        row_scales: float32 [rows], or None.
        row_ptr: int32 [rows + 1], or None for a weight without outliers.
        col_idx: uint16 or int32 [capacity], or None.
        values: bfloat16 or float32 [capacity], or None.
        rows, cols: output and input channels.
        bits: code width.
        midrise: whether the grid is.
        dtype: of the result.
    """
    weight = torch.empty((rows, cols), dtype=dtype, device=qweight.device)
    step = max(1, (CPU_BLOCK_WEIGHTS if qweight.device.type == "cpu" else BLOCK_WEIGHTS) // cols)
    for start in range(0, rows, step):
        block = slice(start, min(start + step, rows))
        inliers = unpack_codes(qweight[block], bits, cols).to(torch.float32) - zero_point(bits, midrise)
        if scales is not None:
            grouped = inliers.view(*scales[block].shape, -1)
            inliers = (grouped * scales[block].to(torch.float32).unsqueeze(-1)).view_as(inliers)
        if row_scales is not None:
            inliers *= row_scales[block].unsqueeze(1)
        weight[block] = inliers
    if row_ptr is not None and col_idx is not None and values is not None:
        _put_outliers(weight, scales, row_scales, row_ptr, col_idx, values, midrise)
    return weight


def _put_outliers(
    weight: torch.Tensor,
    scales: torch.Tensor | None,
    row_scales: torch.Tensor | None,
    row_ptr: torch.Tensor,
    col_idx: torch.Tensor,
    values: torch.Tensor,
    midrise: bool,
) -> None:
    """Put padded outliers in place. The inlier below an outlier is 0, or on a mid-rise grid half a step: that is taken
    out and put back with the outlier, so that nothing is rounded twice.

    No size here depends on row_ptr's contents: the device is not synchronised, and CUDA graphs can capture it.
    """
    rows, cols = weight.shape
    entry = torch.arange(values.numel(), dtype=row_ptr.dtype, device=row_ptr.device)
    row = torch.searchsorted(row_ptr[1:].contiguous(), entry, right=True).clamp_(max=rows - 1)
    col, flat, entries = col_idx.to(torch.int64), weight.view(-1), values.to(torch.float32)
    place = row * cols + col
    if midrise:
        real = entry < row_ptr[-1]
        flat.index_add_(0, place, torch.where(real, -flat[place], 0.0))
        entries = entries + 0.5 * real * (1.0 if scales is None else scales[row, col // (cols // scales.shape[1])])
    if row_scales is not None:
        entries = entries * row_scales[row]
    flat.index_add_(0, place, entries.to(weight.dtype))


def dense_product(
    x: torch.Tensor, tensors: Sequence[torch.Tensor | None], constants: Sequence[int], arch: str
) -> torch.Tensor:
    """x [.., cols] times the transposed weight of `dense_arguments` -> [.., rows], dtype of x."""
    arguments: list[Any] = [*tensors, *constants, x.dtype]
    return torch.nn.functional.linear(x, dequantize(*arguments))
