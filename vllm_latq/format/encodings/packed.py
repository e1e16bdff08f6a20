"""The encoding `packed`: b-bit codes on scales, with CSR outliers. It is also the form that every operator reads.

FORMAT.md sections 3.1 and 3.2.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Self

import torch

from vllm_latq.coding.packing import WORD_BITS, codes_at, pack_codes, packed_words, unpack_codes, zero_point
from vllm_latq.errors import CheckpointError, ConfigError
from vllm_latq.format.csr import CSR, column_dtype, csr_problems
from vllm_latq.format.encodings.weight import Decoder, IntegerWeight
from vllm_latq.format.problems import mismatches, problem
from vllm_latq.format.scheme import CONFIG_KEY, SUPPORTED_BITS, WHOLE_ROW, LayerScheme, grid_name
from vllm_latq.format.served_size import best_bits, outlier_bits
from vllm_latq.format.tensors import TensorSpec

# Weights packed at a time, so that the temporaries stay small compared with the matrix.
_BAND_WEIGHTS = 1 << 18


@dataclass(frozen=True)
class PackedWeight(IntegerWeight):
    """W[i, j] = row_scales[i] * (scales[i, j // group_size] * (z[i, j] + h) + outliers[i, j]).

    h is 0, or 1/2 where the grid is `midrise`. An absent factor is 1.

    Attributes:
        qweight: int32 [rows, words], codes z + 2**(bits - 1).
        bits: 2, 3, 4 or 8.
        group_size: input channels per scale, -1 for the whole row.
        cols: input channels.
        scales: bfloat16 [rows, groups], or None.
        row_scales: float32 [rows], or None; only in memory, never stored.
        outliers: CSR [rows, cols], or None; z is 0 at the place of an outlier. Without scales the outliers are integers
            outside the range of the codes.
        midrise: whether the points of the grid lie half a step above the multiples of the scale.
    """

    full_scheme = LayerScheme("packed", 4, WHOLE_ROW, True)

    qweight: torch.Tensor
    bits: int
    group_size: int
    cols: int
    scales: torch.Tensor | None = None
    row_scales: torch.Tensor | None = None
    outliers: CSR | None = None
    midrise: bool = False

    @property
    def shape(self) -> tuple[int, int]:
        """(rows, cols)."""
        return self.qweight.shape[0], self.cols

    @property
    def scheme(self) -> LayerScheme:
        """The scheme under which the weight is stored."""
        has_outliers = self.outliers is not None
        return LayerScheme("packed", self.bits, self.group_size, has_outliers, grid_name(self.midrise))

    def integers(self) -> torch.Tensor:
        """Return z, int32 [rows, cols]; 0 at the place of an outlier."""
        return unpack_codes(self.qweight, self.bits, self.cols).to(torch.int32) - (1 << (self.bits - 1))

    def dequantize(self, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """Return W [rows, cols], computed in float32 and rounded once to `dtype`."""
        weight = unpack_codes(self.qweight, self.bits, self.cols).to(torch.float32)
        weight -= zero_point(self.bits, self.midrise)
        if self.scales is not None:
            weight.view(*self.scales.shape, -1).mul_(self.scales.to(torch.float32).unsqueeze(-1))
        if self.outliers is not None:
            self.outliers.add_to(weight)
        if self.row_scales is not None:
            weight *= self.row_scales.unsqueeze(1)
        return weight.to(dtype)

    def to(self, device: torch.device | str) -> "PackedWeight":
        """Return the same weight with its tensors on `device`."""

        def moved(tensor: torch.Tensor | None) -> torch.Tensor | None:
            return None if tensor is None else tensor.to(device)

        return replace(
            self,
            qweight=self.qweight.to(device),
            scales=moved(self.scales),
            row_scales=moved(self.row_scales),
            outliers=None if self.outliers is None else self.outliers.to(device),
        )

    def decode(self, where: str, decoder: Decoder | None = None) -> None:
        """Return None: the integers are not entropy coded."""

    def pack(self, integers: torch.Tensor | None = None, bits: int | None = None) -> "PackedWeight":
        """Return the weight itself: it is packed already."""
        return self

    def outlier_counts(self) -> torch.Tensor:
        """Return the number of outliers in each row, int64 [rows]."""
        return torch.zeros(self.shape[0], dtype=torch.int64) if self.outliers is None else self.outliers.counts

    def encoded(self) -> dict[str, torch.Tensor]:
        """Return suffix -> tensor of every stored tensor except the shape.

        Raises:
            ValueError: a weight that only exists in memory.
        """
        if self.scales is None or self.row_scales is not None:
            raise ValueError("a weight with scales of rows cannot be stored as packed")
        tensors = {"qweight": self.qweight, "scales": self.scales}
        if self.outliers is not None:
            tensors["outlier_row_ptr"] = self.outliers.row_ptr
            tensors["outlier_col_idx"] = self.outliers.col_idx
            tensors["outlier_values"] = self.outliers.values
        return tensors

    def served_bits(self) -> int:
        """Return the bits in memory while the weight is served: codes, scales, row order, words of outliers."""
        bits = 8 * (self.qweight.nbytes + (0 if self.row_scales is None else self.row_scales.nbytes))
        if self.scales is not None:
            bits += 8 * self.scales.nbytes if self.group_size != WHOLE_ROW else WORD_BITS * self.scales.numel()
        return bits if self.outliers is None else bits + outlier_bits(self.outliers)

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
    ) -> Self:
        """Pack integers on the grid.

        Args:
            integers: int [rows, cols] in [-2**(bits-1), 2**(bits-1)), ignored under outliers.
            scales: bfloat16 [rows, groups].
            bits: 2, 3, 4 or 8.
            group_size: input channels per scale, -1 for the whole row.
            outlier_mask: bool [rows, cols]; None for a scheme without outliers.
            outlier_values: [rows, cols], read where the mask is true, rounded to bfloat16.
            midrise: whether the grid is mid-rise.
        """
        outliers = None
        if outlier_mask is not None and outlier_values is not None:
            outliers = CSR.from_mask(outlier_mask, outlier_values.to(torch.bfloat16))
            integers = integers.masked_fill(outlier_mask, 0)
        qweight = pack_codes(integers + (1 << (bits - 1)), bits)
        return cls(qweight, bits, group_size, integers.shape[1], scales, None, outliers, midrise=midrise)

    @classmethod
    def from_tensors(cls, tensors: Mapping[str, torch.Tensor], scheme: LayerScheme, shape: tuple[int, int]) -> Self:
        """Wrap validated tensors (suffix -> tensor)."""
        outliers = _stored_outliers(tensors, shape) if scheme.outliers else None
        layout = (*scheme.code_layout(), shape[1])
        return cls(tensors["qweight"], *layout, tensors["scales"], outliers=outliers, midrise=scheme.midrise)

    @classmethod
    def check_scheme(cls, scheme: LayerScheme) -> None:
        """Raise ConfigError unless the scheme has bits and a group size."""
        if scheme.bits is None:
            raise ConfigError(f"{CONFIG_KEY}.bits", f"one of {SUPPORTED_BITS}", repr(None))
        if scheme.group_size is None:
            raise ConfigError(f"{CONFIG_KEY}.group_size", "-1 or a positive integer", repr(None))

    @staticmethod
    def specs(scheme: LayerScheme, rows: int, cols: int, where: str) -> dict[str, TensorSpec]:
        """Return suffix -> spec of every stored tensor except the shape."""
        bits, _ = scheme.code_layout()
        specs = {
            "qweight": TensorSpec(torch.int32, (rows, packed_words(cols, bits))),
            "scales": TensorSpec(torch.bfloat16, (rows, scheme.groups(cols, where))),
        }
        if scheme.outliers:
            specs |= {
                "outlier_row_ptr": TensorSpec(torch.int32, (rows + 1,)),
                "outlier_col_idx": TensorSpec(column_dtype(cols), (None,)),
                "outlier_values": TensorSpec(torch.bfloat16, (None,)),
            }
        return specs

    @staticmethod
    def problems(
        tensors: Mapping[str, torch.Tensor], scheme: LayerScheme, shape: tuple[int, int], where: str
    ) -> Iterator[CheckpointError]:
        """Yield one error per violated invariant of tensors whose dtypes and shapes match `specs`."""
        scales, qweight, (bits, _) = tensors["scales"], tensors["qweight"], scheme.code_layout()
        reach = 1 << (bits - 1)
        if (wrong := (scales == 0) | ~torch.isfinite(scales * reach)).any():
            expected = f"scales that are not zero, and finite also times {reach}"
            yield problem(f"{where}.scales", expected, mismatches(wrong, "row", "group"))
        used = shape[1] * bits % WORD_BITS
        if used and (wrong := (qweight[:, -1] & ~((1 << used) - 1)) != 0).any():
            yield problem(f"{where}.qweight", "zero bits after the last code of each row", mismatches(wrong, "row"))
        if scheme.outliers:
            outliers = _stored_outliers(tensors, shape)
            broken = list(csr_problems(outliers, where))
            yield from broken
            if not broken:
                yield from _outlier_problems(outliers, qweight, scales, scheme, where)


def _stored_outliers(tensors: Mapping[str, torch.Tensor], shape: tuple[int, int]) -> CSR:
    """Return the stored CSR matrix, which may be invalid."""
    return CSR(tensors["outlier_row_ptr"], tensors["outlier_col_idx"], tensors["outlier_values"], shape[1])


def _outlier_problems(
    outliers: CSR, qweight: torch.Tensor, scales: torch.Tensor, scheme: LayerScheme, where: str
) -> Iterator[CheckpointError]:
    """Check a valid CSR matrix against the codes and scales at the places of its entries."""
    bits, _ = scheme.code_layout()
    zero, width = 1 << (bits - 1), outliers.cols // scales.shape[1]
    for rows, cols, values in outliers.bands():
        codes = codes_at(qweight, bits, rows, cols)
        if (wrong := codes != zero).any():
            first = int(wrong.to(torch.uint8).argmax())
            found = f"code {int(codes[first])} at row {int(rows[first])}, column {int(cols[first])}"
            yield problem(f"{where}.qweight", f"the zero code, {zero}, under every outlier", found)
            return
        # On a mid-tread grid the values are the weights themselves, and finite.
        if scheme.midrise and (wrong := _infinite(values, scales[rows, cols // width])).any():
            first = int(wrong.to(torch.uint8).argmax())
            found = f"{float(values[first]):g} at row {int(rows[first])}, column {int(cols[first])}"
            expected = "values that are finite also with half a scale added"
            yield problem(f"{where}.outlier_values", expected, found)
            return


def _infinite(values: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Return where a value plus half a scale is infinite although the scale is not, bool [n]; all tensors are [n]."""
    weights = values.to(torch.float32) + 0.5 * scales.to(torch.float32)
    return torch.isfinite(scales) & ~torch.isfinite(weights)


def pack_integers(
    integers: torch.Tensor,
    row_scales: torch.Tensor,
    bits: int | None = None,
) -> PackedWeight:
    """Pack integers of any size as inliers and outliers, rounded to float32 as FORMAT.md says.

    Args:
        integers: int32 [rows, cols].
        row_scales: float32 [rows].
        bits: width of the codes; None takes `best_bits`.
    """
    bits = bits or best_bits([integers])
    zero = 1 << (bits - 1)
    codes, outliers = [], []
    for band in integers.split(max(1, _BAND_WEIGHTS // max(1, integers.shape[1]))):
        outside = (band < -zero) | (band >= zero)
        outliers.append(CSR.from_mask(outside, band.to(torch.float32)))
        codes.append(pack_codes(band.masked_fill(outside, 0) + zero, bits))
    row_scales = row_scales.to(torch.float32).contiguous()
    qweight, csr = torch.cat(codes), CSR.cat(outliers)
    return PackedWeight(qweight, bits, WHOLE_ROW, integers.shape[1], None, row_scales, csr)
