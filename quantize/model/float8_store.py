"""The files of a model, with matrices of 8-bit floats seen as what they are times their scales, in bfloat16.

    proj.weight [m, n] float8, proj.weight_scale_inv [ceil(m / rows), ceil(n / columns)]  ->  proj.weight [m, n]

So DeepSeek-V3 is published (Technical Report, section 3.3), and others since; some have one scale for a whole matrix.
bfloat16 is what their makers' own conversions give. Invariant: scales are not seen as tensors of the model.
"""

from collections.abc import Iterable
from functools import cached_property
from math import prod
from typing import Any

import torch
from torch import Tensor

from vllm_latq.errors import UnsupportedModelError
from vllm_latq.format.files import TensorStore, read_json

SCALES = "_scale_inv"
# How the names of scales end, and instead those of what they belong to: scales of weights, and of inputs.
SCALE_NAMES = {SCALES: "", "_activation_scale": "", ".activation_scale": ".weight"}


def is_float8(quantization: Any) -> bool:
    """Return whether a `quantization_config` is that of a model in 8-bit floats."""
    return isinstance(quantization, dict) and quantization.get("quant_method") == "fp8"


class Float8Store(TensorStore):
    """The safetensors files of a Hugging Face model directory, with 8-bit floats times their scales.

    Args:
        directory: of the model. Only if its config.json says that it is one in 8-bit floats, they are multiplied.
    """

    def __contains__(self, name: str) -> bool:
        return name not in self._scales and super().__contains__(name)

    def names(self) -> Iterable[str]:
        """Names of all tensors but the scales."""
        return [name for name in super().names() if name not in self._scales]

    def get(self, name: str) -> Tensor:
        """One tensor on the CPU; CheckpointError if it is missing or damaged, UnsupportedModelError as `_product`."""
        return self._product(name, super().get(name))

    def part(self, name: str, index: tuple[int | slice, ...]) -> Tensor:
        """Part of one tensor; for 8-bit floats a whole matrix of it is read. Errors as of `get`."""
        if self._config is None:
            return super().part(name, index)
        return self._product(name, super().part(name, index[:1]), index[:1])[index[1:]]

    @property
    def multiplies(self) -> bool:
        """Return whether the model is one in 8-bit floats."""
        return self._config is not None

    @cached_property
    def _config(self) -> dict[str, Any] | None:
        """The `quantization_config` of a model in 8-bit floats; of others none."""
        config = read_json(self.directory / "config.json")
        found = (
            part.get("quantization_config") for part in (config, config.get("text_config")) if isinstance(part, dict)
        )
        return next(filter(is_float8, found), None)

    @cached_property
    def _scales(self) -> frozenset[str]:
        """Names of the tensors that are scales."""
        if self._config is None:
            return frozenset()
        return frozenset(
            name
            for name in self.files
            for ending, other in SCALE_NAMES.items()
            if name.endswith(ending) and name.removesuffix(ending) + other in self.files
        )

    def _product(self, name: str, matrix: Tensor, index: tuple[int | slice, ...] = ()) -> Tensor:
        """Stored matrices, the part `index` of their tensor, times their scales; anything else as it is.

        Raises:
            UnsupportedModelError: 8-bit floats that are no matrix, or scales that are not one for each of its blocks.
        """
        if self._config is None or not matrix.is_floating_point() or matrix.element_size() > 1:
            return matrix
        if not matrix.numel():
            return matrix.bfloat16()
        if matrix.dim() > 2:
            return torch.stack([self._product(name, one, (*index, at)) for at, one in enumerate(matrix)])
        where = f"{self.directory}: {name}"
        if matrix.dim() < 2:
            raise UnsupportedModelError(where, "8-bit floats in matrices alone", f"shape {tuple(matrix.shape)}")
        if f"{name}{SCALES}" not in self.files:
            hint = "It is incomplete, or in another format: then quantize the original model."
            raise UnsupportedModelError(where, f"a tensor {name}{SCALES} beside 8-bit floats", "none", hint)
        height, width = map(min, self._blocks or matrix.shape, matrix.shape)
        scales = super().get(f"{name}{SCALES}")
        grid = (-(-size // block) for size, block in zip(matrix.shape, (height, width), strict=True))
        expected = (*super().shape(name)[: len(index)], *grid)
        if self._blocks is None and scales.numel() == prod(expected):
            scales = scales.reshape(expected)
        if scales.shape != expected or not scales.is_floating_point():
            found = f"shape {tuple(scales.shape)} in {scales.dtype}"
            raise UnsupportedModelError(f"{where}{SCALES}", f"scales, shape {expected}, as floats", found)
        bands = zip(matrix.split(height), scales[index].float(), strict=True)
        factors = ((band, row.repeat_interleave(width)[: matrix.shape[1]]) for band, row in bands)
        return torch.cat([(band.float() * factor).bfloat16() for band, factor in factors])

    @property
    def _blocks(self) -> tuple[int, int] | None:
        """Rows and columns of a block that has one scale; None if all of a matrix has one."""
        assert self._config is not None
        blocks = self._config.get("weight_block_size")
        if blocks is None:
            return None
        if not (
            isinstance(blocks, list) and len(blocks) == 2 and all(type(size) is int and size > 0 for size in blocks)
        ):
            where = f"{self.directory}/config.json: quantization_config.weight_block_size"
            raise UnsupportedModelError(where, "rows and columns of a block, or null", repr(blocks))
        return blocks[0], blocks[1]
