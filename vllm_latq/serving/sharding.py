"""Cut and stack packed weights, as tensor parallelism and merged layers need it.

Invariant: `take(w, rows, columns).dequantize() == w.dequantize()[rows, low:high]`, bit for bit.
"""

from collections.abc import Sequence
from dataclasses import replace

import torch

from vllm_latq.coding.packing import WORD_BITS, pack_codes, packed_words, unpack_codes
from vllm_latq.errors import UnsupportedShapeError
from vllm_latq.format.csr import CSR
from vllm_latq.format.encodings.packed import PackedWeight
from vllm_latq.format.scheme import WHOLE_ROW

ZERO_ROW = -1


def cat_rows(weights: Sequence[PackedWeight]) -> PackedWeight:
    """Stack weights of equal bits, group size, grid and columns on top of each other."""
    first = weights[0]
    assert len({(weight.bits, weight.group_size, weight.midrise, weight.cols) for weight in weights}) == 1
    if len(weights) == 1:
        return first
    outliers = None
    if first.outliers is not None:
        outliers = CSR.cat([weight.outliers for weight in weights if weight.outliers is not None])
    return replace(
        first,
        qweight=torch.cat([weight.qweight for weight in weights]),
        scales=_cat([weight.scales for weight in weights]),
        row_scales=_cat([weight.row_scales for weight in weights]),
        outliers=outliers,
    )


def take(weight: PackedWeight, rows: torch.Tensor, columns: tuple[int, int], where: str = "layer") -> PackedWeight:
    """Take the given rows and a range of columns of a weight, as new tensors.

    Args:
        weight: to cut from.
        rows: int64 [n], row numbers in the order of the result; ZERO_ROW gives a row of zeros.
        columns: (low, high).
        where: layer name for errors.

    Raises:
        UnsupportedShapeError: the range cuts a scale group.
    """
    low, high = columns
    cut = weight.qweight[rows.clamp(min=0)]
    if (low, high) != (0, weight.cols):
        cut = _take_columns(cut, weight.bits, weight.cols, low, high)
    zero = torch.full((1, high - low), 1 << (weight.bits - 1), dtype=torch.uint8, device=cut.device)
    cut[rows < 0] = pack_codes(zero, weight.bits)
    outliers = weight.outliers
    if outliers is not None:
        outliers = outliers.select_rows(rows)
        if (low, high) != (0, weight.cols):
            outliers = outliers.select_columns(low, high)
    return replace(
        weight,
        qweight=cut,
        cols=high - low,
        scales=_take_scales(weight, rows, low, high, where),
        row_scales=None if weight.row_scales is None else weight.row_scales[rows.clamp(min=0)],
        outliers=outliers,
    )


def _cat(tensors: Sequence[torch.Tensor | None]) -> torch.Tensor | None:
    present = [tensor for tensor in tensors if tensor is not None]
    return torch.cat(present) if present else None


def _take_columns(qweight: torch.Tensor, bits: int, cols: int, low: int, high: int) -> torch.Tensor:
    """Return codes [low, high) of packed rows."""
    if low * bits % WORD_BITS == 0 and high * bits % WORD_BITS == 0:
        start = low * bits // WORD_BITS
        return qweight[:, start : start + packed_words(high - low, bits)].contiguous()
    return pack_codes(unpack_codes(qweight, bits, cols)[:, low:high], bits)


def _take_scales(weight: PackedWeight, rows: torch.Tensor, low: int, high: int, where: str) -> torch.Tensor | None:
    if weight.scales is None:
        return None
    scales = weight.scales[rows.clamp(min=0)]
    scales[rows < 0] = 0
    if weight.group_size == WHOLE_ROW:
        return scales
    check_groups(weight.group_size, low, high, where)
    return scales[:, low // weight.group_size : high // weight.group_size].contiguous()


def check_groups(group_size: int, low: int, high: int, where: str) -> None:
    """Raise UnsupportedShapeError if the columns [low, high) cut a scale group."""
    if group_size != WHOLE_ROW and (low % group_size or high % group_size):
        raise UnsupportedShapeError(
            where,
            f"input channels per rank in whole groups of {group_size}",
            f"channels {low} to {high} on one rank",
            "Use a smaller tensor parallel size, or quantize with a group size that divides its shards "
            "(or -1: one scale per row).",
        )
