"""The files of a published model, seen as the tensors of its model in 16 bits or more.

Invariant: one matrix is dequantized at a time. Scales, and the tensors that others are made from, are not seen.
"""

from collections.abc import Callable, Iterable, Mapping
from functools import cached_property
from math import prod
from typing import Any

import torch
from torch import Tensor

from vllm_latq.errors import UnsupportedModelError
from vllm_latq.format.files import TensorStore, read_json
from vllm_latq.quantize.model.originals import compressed_tensors, float8, mxfp4
from vllm_latq.quantize.model.originals.published import Found, Packed, Published

# Stored forms by `form_of` their `quantization_config`.
FORMS: Mapping[str, Callable[[Published], Found]] = {
    "fp8": float8.find,
    "mxfp4": mxfp4.find,
    "compressed-tensors pack-quantized": compressed_tensors.find,
    "compressed-tensors float-quantized": compressed_tensors.find,
    "compressed-tensors mixed-precision": compressed_tensors.find,
}


def form_of(quantization: Any) -> str:
    """Return the name of a form, by a `quantization_config`: its method, and the format where a method has several."""
    if not isinstance(quantization, dict):
        return repr(quantization)
    method = str(quantization.get("quant_method"))
    return f"{method} {quantization.get('format')}" if method == "compressed-tensors" else method


class OriginalStore(TensorStore):
    """The safetensors files of a Hugging Face model directory, dequantized where its config.json names one of FORMS.

    Args:
        directory: of the model.
    """

    def __contains__(self, name: str) -> bool:
        return name in self._found.packed or (name not in self._found.hidden and super().__contains__(name))

    def names(self) -> Iterable[str]:
        """Names of all tensors of the model."""
        found = self._found
        stored = [name for name in super().names() if name not in found.hidden]
        return [*stored, *(name for name in found.packed if name not in self.files)]

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of one tensor; CheckpointError if it is missing, UnsupportedModelError as `find` of its form."""
        packed = self._found.packed.get(name)
        return super().shape(name) if packed is None else packed.shape

    def get(self, name: str) -> Tensor:
        """One tensor on the CPU; CheckpointError if it is missing or damaged, and the errors of its form."""
        packed = self._found.packed.get(name)
        if packed is None:
            return super().get(name)
        if not prod(packed.shape):
            return torch.empty(packed.shape, dtype=torch.bfloat16)
        if len(packed.shape) == 2:
            return packed.dequantize([super(OriginalStore, self).get(part) for part in packed.names])
        return torch.stack([self._matrix(packed, index) for index in range(packed.shape[0])])

    def part(self, name: str, index: tuple[int | slice, ...]) -> Tensor:
        """Part of one tensor; of one that is dequantized, a whole matrix is read. Errors as of `get`."""
        packed = self._found.packed.get(name)
        if packed is None:
            return super().part(name, index)
        if len(packed.shape) == 3 and isinstance(index[0], int):
            return self._matrix(packed, index[0])[index[1:]]
        return self.get(name)[index]

    @property
    def dequantizes(self) -> bool:
        """Return whether the model is published in one of FORMS."""
        return self._quantization is not None

    def _matrix(self, packed: Packed, index: int) -> Tensor:
        """Return one matrix of a stack."""
        return packed.dequantize([super(OriginalStore, self).part(part, (index,)) for part in packed.names])

    @cached_property
    def _quantization(self) -> dict[str, Any] | None:
        """The `quantization_config` that names one of FORMS; None if there is none."""
        config = read_json(self.directory / "config.json")
        # In a multimodal model the language model's configuration may say so.
        parts = (part for part in (config, config.get("text_config")) if isinstance(part, dict))
        found = (part.get("quantization_config") for part in parts)
        return next((quantization for quantization in found if form_of(quantization) in FORMS), None)

    @cached_property
    def _found(self) -> Found:
        """Tensors that are dequantized."""
        if self._quantization is None:
            return Found()
        headers = {name: self.header(name) for name in self.files}
        published = Published(self.directory, self._quantization, headers, super().get)
        found = FORMS[form_of(self._quantization)](published)
        for name, packed in found.packed.items():
            if name in self.files and name not in packed.names:
                expected, hint = "each tensor stored once", "Remove one of them from the model."
                raise UnsupportedModelError(published.where(name), expected, f"also {packed.names[0]}", hint)
            found.hidden.update(part for part in packed.names if part != name)
        return found
