"""The interface of a stored form: from the headers of a published model to the tensors that it dequantizes.

A form is one file of this folder with a function `find`, and a line in `store.FORMS`.

    Published -> find -> Found: name of a tensor of the model -> Packed -> dequantize -> matrix in 16 or 32 bits

Invariant: shapes, dtypes and missing tensors are checked by `find`, before any weight is read.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from vllm_latq.errors import NumericalError, UnsupportedModelError
from vllm_latq.format.tensors import Header

# safetensors' dtypes of scales. E8M0 is an exponent alone: a power of two.
FLOATS = (torch.float32, torch.bfloat16, "F16", "F8_E8M0")
INCOMPLETE = "The model is incomplete, or stored in another format: then quantize the original model."


@dataclass(frozen=True)
class Published:
    """The files of a published model, as they are stored.

    Attributes:
        directory: of the model, for errors.
        quantization: `quantization_config` of its config.json.
        headers: name of each stored tensor -> its dtype and shape.
        read: returns a stored tensor by its name.
    """

    directory: Path
    quantization: Mapping[str, Any]
    headers: Mapping[str, Header]
    read: Callable[[str], Tensor]

    def where(self, name: str) -> str:
        """Return the place of a stored tensor, for errors."""
        return f"{self.directory}: {name}"

    def refuse(self, key: str, expected: str) -> UnsupportedModelError:
        """Return the error for a value of the `quantization_config` that is not understood."""
        where = f"{self.directory}/config.json: quantization_config.{key}"
        value: Any = self.quantization
        for part in key.split("."):
            value = value.get(part) if isinstance(value, Mapping) else None
        return UnsupportedModelError(where, expected, repr(value))

    def require(self, name: str, beside: str, expected: str, fits: Callable[[Header], bool]) -> None:
        """Raise UnsupportedModelError unless a tensor is stored beside another one, and its header fits."""
        if name not in self.headers:
            raise UnsupportedModelError(self.where(beside), f"a tensor {name} beside it", "none", INCOMPLETE)
        header = self.headers[name]
        if not fits(header):
            found = f"shape {header.shape} in {header.dtype}"
            raise UnsupportedModelError(self.where(name), expected, found, INCOMPLETE)


class Packed(Protocol):
    """How the files hold one tensor of the model: a matrix, or a stack of matrices."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the model's tensor: [rows, columns] or [matrices, rows, columns]."""

    @property
    def names(self) -> tuple[str, ...]:
        """Stored tensors that the tensor is made from. Those of a stack hold one part per matrix, in the same order."""

    def dequantize(self, stored: list[Tensor]) -> Tensor:
        """Return one matrix from the stored tensors of `names`, or from its parts of them.

        Raises:
            NumericalError: scales that are not finite.
            UnsupportedModelError: stored values that contradict each other.
        """


@dataclass(frozen=True)
class Found:
    """The tensors that a form finds in the files.

    Attributes:
        packed: name of a tensor of the model -> how it is stored.
        hidden: stored tensors that are no tensors of the model, besides those that `packed` is made from.
    """

    packed: dict[str, Packed] = field(default_factory=dict)
    hidden: set[str] = field(default_factory=set)


def finite_scales(scales: Tensor, where: str) -> Tensor:
    """Return scales as float32; bytes are exponents (E8M0).

    Raises:
        NumericalError: a scale that is NaN, as the exponent 255 is, or infinite.
    """
    floats = (scales.view(torch.float8_e8m0fnu) if scales.dtype == torch.uint8 else scales).float()
    if wrong := int((~floats.isfinite()).sum()):
        found = f"{wrong} NaN or infinite values"
        raise NumericalError(where, "finite scales", found, "The model is damaged: download it again.")
    return floats
