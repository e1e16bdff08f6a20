"""The tensors of a quantized linear: names, dtypes and shapes. FORMAT.md section 3 is the same table in prose.

The specs of each encoding drive the writer, the validator, the loaders and the tests: a tensor without a spec does not
exist.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch

SHAPE = "weight_shape"


class Header(NamedTuple):
    """A tensor as the header of its file describes it."""

    dtype: torch.dtype | str  # safetensors' name of a dtype that no tensor of a quantized linear has
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of the tensor; a dtype that torch lacks is one of 8 bits."""
        return (self.dtype.itemsize if isinstance(self.dtype, torch.dtype) else 1) * math.prod(self.shape)


@dataclass(frozen=True)
class TensorSpec:
    """dtype and shape of a stored tensor; None stands for a size that depends on the data."""

    dtype: torch.dtype
    shape: tuple[int | None, ...]

    def mismatch(self, tensor: torch.Tensor | Header) -> str | None:
        """Return the dtype and shape of a tensor that does not match; None if it matches."""
        same = len(tensor.shape) == len(self.shape) and all(
            want is None or want == got for want, got in zip(self.shape, tensor.shape, strict=True)
        )
        return None if same and tensor.dtype == self.dtype else f"{tensor.dtype} {tuple(tensor.shape)}"

    def bits(self, data: float = 0.0) -> float:
        """Return the bits that the tensor takes on disk, with `data` for a size that depends on the data."""
        return 8.0 * self.dtype.itemsize * math.prod(data if size is None else size for size in self.shape)

    def __str__(self) -> str:
        return f"{self.dtype} ({', '.join('*' if size is None else str(size) for size in self.shape)})"


def shape_tensor(shape: tuple[int, int]) -> torch.Tensor:
    """Return (rows, cols) as stored, int32 [2]."""
    return torch.tensor(shape, dtype=torch.int32)


def stored_bits(tensors: Mapping[str, torch.Tensor]) -> int:
    """Return the bits that a linear's tensors take on disk, all of them counted."""
    return sum(8 * tensor.element_size() * tensor.numel() for tensor in tensors.values())
