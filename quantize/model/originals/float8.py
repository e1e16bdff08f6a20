"""8-bit floats with a scale for each block of a matrix (`quant_method: fp8`), beside experts in 4-bit floats.

    proj.weight [m, n] float8, proj.weight_scale_inv [ceil(m / rows), ceil(n / columns)]  ->  proj.weight [m, n]
    w1.weight [m, n] float8, w1.scale [ceil(m / rows), ceil(n / columns)]                 ->  w1.weight [m, n]
    w1.weight [m, n / 2] int8, w1.scale [m, n / 32]                                       ->  w1.weight [m, n]

So DeepSeek-V3 is published (Technical Report, section 3.3), and others since; some have one scale for a whole matrix.
DeepSeek-V4 has the other names, scales that are powers of two (`scale_fmt: ue8m0`), and experts in 4-bit floats. The
products are bfloat16, as the conversions of the makers give them.
"""

from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor

from vllm_latq.errors import UnsupportedModelError
from vllm_latq.format.tensors import Header
from vllm_latq.quantize.model.originals.float4 import BLOCK, Float4
from vllm_latq.quantize.model.originals.published import FLOATS, Found, Published, finite_scales

SCALES = "_scale_inv"
# How the names of scales end, and instead those of what they belong to: scales of weights, and of inputs.
SCALE_NAMES = {SCALES: "", "_activation_scale": "", ".activation_scale": ".weight"}
FLOAT8, BYTES = ("F8_E4M3", "F8_E5M2"), (torch.int8, torch.uint8)
# Rows that are multiplied at a time, or a multiple of the rows of a block.
BAND = 128
SCALE_FORMATS = (None, "float", "ue8m0")


@dataclass(frozen=True)
class Float8:
    """A matrix or a stack of matrices of 8-bit floats.

    Attributes:
        where: the scales, for errors.
        names: codes and scales.
        shape: see `Packed`.
        block: rows and columns that have one scale.
    """

    where: str
    names: tuple[str, str]
    shape: tuple[int, ...]
    block: tuple[int, int]

    def dequantize(self, stored: list[Tensor]) -> Tensor:
        """Return one matrix, as `Packed`, in bfloat16."""
        codes, scales = stored
        (height, width), (rows, columns) = self.block, codes.shape
        grid = finite_scales(scales, self.where).reshape(_grid((rows, columns), self.block))
        count = max(1, BAND // height)
        bands = zip(codes.split(height * count), grid.split(count), strict=True)
        spread = ((band, blocks.repeat_interleave(width, 1)[:, None, :columns]) for band, blocks in bands)
        # One row of blocks is not copied for each of its rows.
        factors = ((band, wide.expand(-1, height, -1).flatten(0, 1)[: len(band)]) for band, wide in spread)
        return torch.cat([(band.float() * factor).bfloat16() for band, factor in factors])


def find(published: Published) -> Found:
    """Find the matrices in 8-bit and in 4-bit floats.

    Raises:
        UnsupportedModelError: such floats that are no matrix, scales that are missing or are not one for each block, or
            a `quantization_config` that is not understood.
    """
    block = _block(published)
    found = Found()
    for name, header in published.headers.items():
        stem = name.removesuffix("weight")
        endings = (ending for ending in SCALE_NAMES if name.endswith(ending))
        if any(name.removesuffix(ending) + SCALE_NAMES[ending] in published.headers for ending in endings):
            found.hidden.add(name)
        elif header.dtype in FLOAT8 or (header.dtype in BYTES and name.endswith(".weight")):
            own = f"{stem}scale" if stem != name and f"{stem}scale" in published.headers else f"{name}{SCALES}"
            found.packed[name] = packed(published, name, own, block)
    return found


def packed(published: Published, name: str, scales: str, block: tuple[int | None, int | None]) -> Float8 | Float4:
    """Return how a tensor is stored, after a check of its shape and scales.

    Args:
        name, scales: stored tensors.
        block: rows and columns that have one scale; None stands for all of them.

    Raises:
        UnsupportedModelError: floats that are no matrix, scales that are missing or are not one for each block.
    """
    dtype, shape = published.headers[name]
    if len(shape) not in (2, 3):
        raise UnsupportedModelError(published.where(name), "8-bit floats in matrices alone", f"shape {shape}")
    where, names = published.where(scales), (name, scales)
    if dtype in BYTES:
        shape = *shape[:-1], 2 * shape[-1]
        expected = *shape[:-1], shape[-1] // BLOCK
        published.require(
            scales,
            name,
            f"a scale for each {BLOCK} 4-bit floats in a row, shape {expected}",
            lambda it: it.shape == expected and shape[-1] % BLOCK == 0 and _are_scales(published, it),
        )
        return Float4(where, names, shape)
    if not prod(shape):
        return Float8(where, names, shape, (1, 1))
    height, width = (min(edge or size, size) for edge, size in zip(block, shape[-2:], strict=True))
    expected = *shape[:-2], *_grid(shape[-2:], (height, width))

    def fits(scale: Header) -> bool:
        # One scale of a matrix has any shape.
        single = block == (None, None) and prod(scale.shape) == prod(expected)
        one_each = single and scale.shape[: len(shape) - 2] == shape[:-2]
        return (scale.shape == expected or one_each) and _are_scales(published, scale)

    published.require(scales, name, f"scales, shape {expected}, as floats", fits)
    return Float8(where, names, shape, (height, width))


def _are_scales(published: Published, header: Header) -> bool:
    """Return whether a dtype is one of scales; bytes are exponents only where the configuration says so."""
    return header.dtype in FLOATS or (
        header.dtype == torch.uint8 and published.quantization.get("scale_fmt") == "ue8m0"
    )


def _grid(shape: tuple[int, ...], block: tuple[int, int]) -> tuple[int, int]:
    """Return the number of blocks above and beside each other in a matrix."""
    rows, columns = (-(-size // edge) for size, edge in zip(shape, block, strict=True))
    return rows, columns


def _block(published: Published) -> tuple[int | None, int | None]:
    """Return rows and columns of a block that has one scale; None twice if all of a matrix has one."""
    if published.quantization.get("scale_fmt") not in SCALE_FORMATS:
        raise published.refuse("scale_fmt", "float, ue8m0 or none")
    blocks = published.quantization.get("weight_block_size")
    if blocks is None:
        return None, None
    if not (isinstance(blocks, list) and len(blocks) == 2 and all(type(size) is int and size > 0 for size in blocks)):
        raise published.refuse("weight_block_size", "rows and columns of a block, or null")
    return blocks[0], blocks[1]
