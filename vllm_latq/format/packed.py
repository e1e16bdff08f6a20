"""Weights as b-bit codes on scales, with CSR outliers: what the operators read, and the encoding `packed`.

Invariant: an instance made by `from_tensors` has passed `validate.check`, so nothing that reads it leaves its bounds.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal

import torch

from vllm_latq.coding.packing import pack_codes, unpack_codes, zero_point
from vllm_latq.format import validate
from vllm_latq.format.config import WHOLE_ROW, LayerScheme
from vllm_latq.format.csr import CSR
from vllm_latq.format.served_size import WORD_BITS, best_bits, order_words, outlier_words, slot_words
from vllm_latq.format.tensors import SHAPE, stored_bits

# Weights packed together, so that the intermediates stay small beside the matrix.
_BAND_WEIGHTS = 1 << 18


@dataclass(frozen=True)
class PackedWeight:
    """W[i, j] = row_scales[i] * (scales[i, j // group_size] * (z[i, j] + o) + outliers[i, j]) * column_scales[j].

    o is 0, or 1/2 where the grid is `midrise`. An absent factor is 1. `latq::linear` does not know column_scales:
    they are applied to the activation, x * column_scales.

    Attributes:
        qweight: int32 [rows, words], codes z + 2**(bits - 1).
        bits: 2, 3, 4 or 8.
        group_size: input channels per scale, -1 for the whole row.
        cols: input channels.
        scales: bfloat16 [rows, groups], or None.
        row_scales: float32 [rows], or None; only in memory, never stored.
        outliers: CSR [rows, cols], or None; z is 0 where it has an entry. Without scales they are integers beyond the
            grid of the codes.
        column_scales: float32 [cols], or None; only in memory, never stored.
        midrise: whether the points of the grid lie half a step above the multiples of the scale.
    """

    qweight: torch.Tensor
    bits: int
    group_size: int
    cols: int
    scales: torch.Tensor | None = None
    row_scales: torch.Tensor | None = None
    outliers: CSR | None = None
    column_scales: torch.Tensor | None = None
    midrise: bool = False

    @property
    def shape(self) -> tuple[int, int]:
        return self.qweight.shape[0], self.cols

    @property
    def scheme(self) -> LayerScheme:
        grid: Literal["midtread", "midrise"] = "midrise" if self.midrise else "midtread"
        return LayerScheme("packed", self.bits, self.group_size, self.outliers is not None, grid)

    def integers(self) -> torch.Tensor:
        """z of the inliers, int32 [rows, cols]."""
        return unpack_codes(self.qweight, self.bits, self.cols).to(torch.int32) - (1 << (self.bits - 1))

    def dequantize(self, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """W, computed in float32 and rounded once to `dtype`, [rows, cols]."""
        weight = unpack_codes(self.qweight, self.bits, self.cols).to(torch.float32)
        weight -= zero_point(self.bits, self.midrise)
        if self.scales is not None:
            weight.view(*self.scales.shape, -1).mul_(self.scales.to(torch.float32).unsqueeze(-1))
        if self.outliers is not None:
            self.outliers.add_to(weight)
        if self.row_scales is not None:
            weight *= self.row_scales.unsqueeze(1)
        if self.column_scales is not None:
            weight *= self.column_scales
        return weight.to(dtype)

    def to(self, device: torch.device | str) -> "PackedWeight":
        """The same weight with its tensors on `device`."""

        def moved(tensor: torch.Tensor | None) -> torch.Tensor | None:
            return None if tensor is None else tensor.to(device)

        return replace(
            self,
            qweight=self.qweight.to(device),
            scales=moved(self.scales),
            row_scales=moved(self.row_scales),
            outliers=None if self.outliers is None else self.outliers.to(device),
            column_scales=moved(self.column_scales),
        )

    def outlier_density(self) -> float:
        return 0.0 if self.outliers is None else self.outliers.nnz / (self.shape[0] * self.cols)

    def to_tensors(self) -> dict[str, torch.Tensor]:
        """Suffix -> tensor, as stored."""
        assert self.scales is not None
        assert self.row_scales is None
        assert self.column_scales is None
        tensors = {SHAPE: shape_tensor(self.shape), "qweight": self.qweight, "scales": self.scales}
        if self.outliers is not None:
            tensors["outlier_row_ptr"] = self.outliers.row_ptr
            tensors["outlier_col_idx"] = self.outliers.col_idx
            tensors["outlier_values"] = self.outliers.values
        return tensors

    def storage_bits(self) -> int:
        return stored_bits(self.to_tensors())

    def served_bits(self) -> int:
        """Bits in memory while it is served: codes, scales, the order of rows, words of outliers (`served_size`)."""
        bits = 8 * sum(part.nbytes for part in (self.qweight, self.row_scales, self.column_scales) if part is not None)
        if self.scales is not None:
            bits += 8 * self.scales.nbytes if self.group_size != WHOLE_ROW else WORD_BITS * self.scales.numel()
        if self.outliers is None:
            return bits
        words = self.outliers.counts
        if self.scales is None:
            places = self.outliers.row_indices(), self.outliers.col_idx.to(torch.int64)
            words = outlier_words(*places, self.outliers.values, self.bits, self.shape[0])
        return bits + WORD_BITS * (order_words(self.shape[0]) + int(slot_words(words)))

    @classmethod
    def from_integers(
        cls,
        integers: torch.Tensor,
        scales: torch.Tensor,
        bits: int,
        group_size: int,
        outlier_mask: torch.Tensor | None = None,
        outlier_values: torch.Tensor | None = None,
        midrise: bool = False,
    ) -> "PackedWeight":
        """Pack integers on the grid.

        Args:
            integers: int [rows, cols] in [-2**(bits-1), 2**(bits-1)), ignored under outliers.
            scales: bfloat16 [rows, groups].
            bits: 2, 3, 4 or 8.
            group_size: input channels per scale, -1 for the whole row.
            outlier_mask: bool [rows, cols]; None for a scheme without outliers.
            outlier_values: [rows, cols], read where the mask is true, rounded to bfloat16.
            midrise: whether the grid is.
        """
        outliers = None
        if outlier_mask is not None and outlier_values is not None:
            outliers = CSR.from_mask(outlier_mask, outlier_values.to(torch.bfloat16))
            integers = integers.masked_fill(outlier_mask, 0)
        qweight = pack_codes(integers + (1 << (bits - 1)), bits)
        return cls(qweight, bits, group_size, integers.shape[1], scales, None, outliers, midrise=midrise)

    @classmethod
    def from_tensors(
        cls, tensors: Mapping[str, torch.Tensor], scheme: LayerScheme, shape: tuple[int, int], where: str
    ) -> "PackedWeight":
        """Validate and wrap stored tensors (suffix -> tensor); raises CheckpointError."""
        validate.check(tensors, scheme, shape, where)
        assert scheme.bits is not None
        assert scheme.group_size is not None
        outliers = None
        if scheme.outliers:
            row_ptr, col_idx = tensors["outlier_row_ptr"], tensors["outlier_col_idx"]
            outliers = CSR(row_ptr, col_idx, tensors["outlier_values"], shape[1])
        layout = (scheme.bits, scheme.group_size, shape[1])
        midrise = scheme.grid == "midrise"
        return cls(tensors["qweight"], *layout, tensors["scales"], None, outliers, midrise=midrise)


def pack_integers(
    integers: torch.Tensor,
    row_scales: torch.Tensor,
    bits: int | None = None,
    column_scales: torch.Tensor | None = None,
    midrise: bool = False,
) -> PackedWeight:
    """Integers of any size as inliers and overflow, without loss.

    Args:
        integers: int32 [rows, cols].
        row_scales: float32 [rows].
        bits: of the inliers; None takes `best_bits`.
        column_scales: float32 [cols], or None.
        midrise: whether each is worth half a step more.
    """
    bits = bits or best_bits([integers])
    half = 1 << (bits - 1)
    codes, outliers = [], []
    for band in integers.split(max(1, _BAND_WEIGHTS // integers.shape[1])):
        overflow = (band < -half) | (band >= half)
        outliers.append(CSR.from_mask(overflow, band.to(torch.float32)))
        codes.append(pack_codes(band.masked_fill(overflow, 0) + half, bits))
    row_scales = row_scales.to(torch.float32).contiguous()
    qweight, csr = torch.cat(codes), CSR.cat(outliers)
    layout = (bits, WHOLE_ROW, integers.shape[1])
    return PackedWeight(qweight, *layout, None, row_scales, csr, column_scales, midrise=midrise)


def shape_tensor(shape: tuple[int, int]) -> torch.Tensor:
    """(rows, cols) as it is stored, int32 [2]."""
    return torch.tensor(shape, dtype=torch.int32)
