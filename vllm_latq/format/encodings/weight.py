"""The interface of every encoding of a weight matrix.

Invariant: an instance made by `validate.weight_from_tensors` satisfies every invariant that `problems` checks, so no
reader of its tensors leaves their bounds.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Self

import torch

from vllm_latq.errors import CheckpointError
from vllm_latq.format.scheme import LayerScheme
from vllm_latq.format.tensors import SHAPE, TensorSpec, shape_tensor, stored_bits

if TYPE_CHECKING:
    from vllm_latq.format.encodings.packed import PackedWeight

# Takes a stream and its name for errors; returns the integers, int32 [rows, cols].
Decoder = Callable[[Any, str], torch.Tensor]


@dataclass(frozen=True)
class Description:
    """The facts about a stored weight that reports show.

    Attributes:
        encoding: name of its encoding.
        stored_bits: bits on disk.
    """

    encoding: str
    stored_bits: int


class Weight(ABC):
    """A quantized weight matrix W [rows, cols] in memory.

    Attributes:
        coded: whether the integers are entropy coded; a coded weight is decoded before it is served.
        full_scheme: a scheme of the encoding under which a linear has every tensor that it can have.
    """

    coded: ClassVar[bool] = False
    full_scheme: ClassVar[LayerScheme]

    @classmethod
    @abstractmethod
    def check_scheme(cls, scheme: LayerScheme) -> None:
        """Raise ConfigError if the encoding does not allow the scheme's values."""

    @staticmethod
    @abstractmethod
    def specs(scheme: LayerScheme, rows: int, cols: int, where: str) -> dict[str, TensorSpec]:
        """Return suffix -> spec of every stored tensor except the shape."""

    @staticmethod
    @abstractmethod
    def problems(
        tensors: Mapping[str, torch.Tensor], scheme: LayerScheme, shape: tuple[int, int], where: str
    ) -> Iterator[CheckpointError]:
        """Yield one error per violated invariant of tensors whose dtypes and shapes match `specs`."""

    @classmethod
    @abstractmethod
    def from_tensors(cls, tensors: Mapping[str, torch.Tensor], scheme: LayerScheme, shape: tuple[int, int]) -> Self:
        """Wrap validated tensors (suffix -> tensor) without decoding them."""

    @property
    @abstractmethod
    def shape(self) -> tuple[int, int]:
        """(rows, cols)."""

    @property
    @abstractmethod
    def scheme(self) -> LayerScheme:
        """The scheme under which the weight is stored."""

    @abstractmethod
    def encoded(self) -> dict[str, torch.Tensor]:
        """Return suffix -> tensor of every stored tensor except the shape."""

    @abstractmethod
    def dequantize(self, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """Return W [rows, cols], computed in float32 and rounded once to `dtype`."""

    def check_decoding(self, where: str) -> None:  # noqa: B027  most encodings have nothing to check
        """Raise errors that only decoding finds, with memory in proportion to the stored weight, not to its shape."""

    @abstractmethod
    def served_bits(self) -> int:
        """Return the bits in memory while the weight is served by itself; decodes a coded weight."""

    @abstractmethod
    def outlier_counts(self) -> torch.Tensor:
        """Return the number of outliers in each row, int64 [rows]."""

    def outlier_density(self) -> float:
        """Return the share of weights that are outliers."""
        rows, cols = self.shape
        return int(self.outlier_counts().sum()) / (rows * cols)

    def to_tensors(self) -> dict[str, torch.Tensor]:
        """Return suffix -> tensor, as stored."""
        return {SHAPE: shape_tensor(self.shape), **self.encoded()}

    def storage_bits(self) -> int:
        """Return the bits that the weight takes on disk, everything counted."""
        return stored_bits(self.to_tensors())

    def describe(self) -> Description:
        """Return what reports show of the weight."""
        return Description(self.scheme.encoding, self.storage_bits())


class IntegerWeight(Weight):
    """A weight of integers on scales, which is served as codes and outliers."""

    @abstractmethod
    def integers(self) -> torch.Tensor:
        """Return the integers of the grid, int32 [rows, cols]."""

    @abstractmethod
    def decode(self, where: str, decoder: Decoder | None = None) -> torch.Tensor | None:
        """Decode an entropy-coded weight.

        Args:
            where: name of the linear for errors.
            decoder: decodes the stream; None for the encoding's decoder on the CPU.

        Returns:
            The integers, int32 [rows, cols]; None if the weight is not entropy coded.

        Raises:
            CheckpointError: the stream is damaged, or the weights it leads to may be infinite.
        """

    @abstractmethod
    def pack(self, integers: torch.Tensor | None = None, bits: int | None = None) -> "PackedWeight":
        """Return the weight as codes and outliers without loss, on the device of its integers.

        Args:
            integers: result of `decode`; None decodes on the CPU if needed.
            bits: width of the codes of a decoded weight; None for the width that takes the fewest bytes.
        """
