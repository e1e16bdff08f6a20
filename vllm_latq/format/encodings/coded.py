"""The part that all entropy-coded encodings share: W[i, j] = row_scales[i] * (z[i, j] + h) * column_scales[j].

Invariant: no product of scales and an integer that `decode` returns overflows float32 or bfloat16.
"""

from abc import abstractmethod
from typing import Any, ClassVar

import torch

from vllm_latq.errors import ConfigError
from vllm_latq.format.encodings.packed import PackedWeight, pack_integers
from vllm_latq.format.encodings.weight import Decoder, Weight
from vllm_latq.format.problems import problem
from vllm_latq.format.scheme import CONFIG_KEY, GRIDS, LayerScheme
from vllm_latq.format.served_size import served_bits

# A weight of an entropy-coded linear stays below this limit.
WEIGHT_LIMIT = 2.0**127


class CodedWeight(Weight):
    """A weight whose integers z are entropy coded.

    Attributes:
        scale: float32 [1].
        stream: the encoded integers.
        midrise: whether h is 1/2 instead of 0.
    """

    coded = True
    grids: ClassVar[tuple[str, ...]] = GRIDS

    scale: torch.Tensor
    stream: Any
    midrise: bool = False

    @classmethod
    def check_scheme(cls, scheme: LayerScheme) -> None:
        """Raise ConfigError for bits, a group size, outliers, or a grid that the encoding does not have."""
        if (scheme.bits, scheme.group_size, scheme.outliers) != (None, None, False):
            found = f"bits={scheme.bits!r}, group_size={scheme.group_size!r}, outliers={scheme.outliers!r}"
            raise ConfigError(CONFIG_KEY, f"no bits, group_size or outliers with encoding {scheme.encoding!r}", found)
        if scheme.grid not in cls.grids:
            expected = f"{' or '.join(cls.grids)} with encoding {scheme.encoding!r}"
            raise ConfigError(f"{CONFIG_KEY}.grid", expected, repr(scheme.grid))

    @property
    def shape(self) -> tuple[int, int]:
        """(rows, cols)."""
        rows, cols = self.stream.shape
        return rows, cols

    @property
    @abstractmethod
    def row_scales(self) -> torch.Tensor:
        """The scale of each row, float32 [rows] on the CPU."""

    @abstractmethod
    def decode_stream(self, where: str) -> torch.Tensor:
        """Decode the stream on the CPU: int32 [rows, cols]; `where` names it in errors."""

    def integers(self) -> torch.Tensor:
        """Return z, int32 [rows, cols] on the CPU; raise CheckpointError if the stream is damaged."""
        return self.decode_stream("stream")

    def decode(self, where: str, decoder: Decoder | None = None) -> torch.Tensor:
        """Decode the integers and check that no weight is infinite; see `Weight.decode`."""
        name = f"{where}.stream"
        integers = self.decode_stream(name) if decoder is None else decoder(self.stream, name)
        self._check_reach(int(integers.min()), int(integers.max()), where)
        return integers

    def check_decoding(self, where: str) -> None:
        """Decode a part of the weight at a time and check that no weight is infinite; see `Weight.check_decoding`."""
        self._check_reach(*self.value_range(f"{where}.stream"), where)

    def value_range(self, where: str) -> tuple[int, int]:
        """Return the smallest and the largest integer of the stream, which `where` names in errors."""
        integers = self.decode_stream(where)
        return int(integers.min()), int(integers.max())

    def _check_reach(self, lowest: int, highest: int, where: str) -> None:
        """Raise CheckpointError if integers of this range make a weight infinite."""
        columns = 1.0 if self.column_scales is None else max(1.0, float(self.column_scales.max()))
        reach = max(-lowest, highest + self.midrise)
        largest = float(self.row_scales.max()) * columns * reach
        if largest >= WEIGHT_LIMIT:
            expected = f"a scale whose largest multiple stays below {WEIGHT_LIMIT:g}"
            raise problem(f"{where}.scale", expected, f"{largest:g}")

    def dequantize(self, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """Return W, ((z + h) * row_scales) * column_scales in float32, rounded once more to `dtype`, [rows, cols]."""
        weight = self.integers().to(torch.float32).add_(0.5 * self.midrise).mul_(self.row_scales.unsqueeze(1))
        return (weight if self.column_scales is None else weight.mul_(self.column_scales)).to(dtype)

    def pack(self, integers: torch.Tensor | None = None, bits: int | None = None) -> PackedWeight:
        """Return the decoded integers as b-bit inliers and CSR outliers, without loss; see `Weight.pack`."""
        z = self.integers() if integers is None else integers
        columns = None if self.column_scales is None else self.column_scales.to(z.device)
        return pack_integers(z, self.row_scales.to(z.device), bits, columns, self.midrise)

    def served_bits(self) -> int:
        """Return the bits in memory while the weight is served by itself; decodes it."""
        return served_bits(self.integers(), column_scales=self.column_scaled)

    def outlier_counts(self) -> torch.Tensor:
        """Return zeros, int64 [rows]: no outliers are stored."""
        return torch.zeros(self.shape[0], dtype=torch.int64)

    def stored_scales(self) -> torch.Tensor:
        """Return the scale, float32 [1]."""
        return self.scale
