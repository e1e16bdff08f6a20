"""Matrices of 4-bit floats (E2M1), a scale for every 32 in a row. OCP Microscaling Formats 1.0, sections 5.3 and 6.3.

Two 4-bit floats share a byte, the first in the low half: one bit of sign, two of exponent, one of mantissa.
"""

from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from vllm_latq.quantize.model.originals.published import finite_scales

# Numbers that share a scale.
BLOCK = 32
MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


@dataclass(frozen=True)
class Float4:
    """A matrix or a stack of matrices of 4-bit floats.

    Attributes:
        where: the scales, for errors.
        names: codes, one byte for two columns, and scales [rows, columns / 32].
        shape: see `Packed`.
        transposed: whether the model's matrix is the transpose of the stored one.
    """

    where: str
    names: tuple[str, str]
    shape: tuple[int, ...]
    transposed: bool = False

    def dequantize(self, stored: list[Tensor]) -> Tensor:
        """Return one matrix, as `Packed`, in bfloat16: the products are exact there."""
        codes, scales = stored
        factors = finite_scales(scales, self.where)
        values = _pairs()[codes.view(torch.uint8).int()].reshape(*factors.shape, BLOCK)
        matrix = (values * factors[..., None]).bfloat16().flatten(-2)
        return matrix.T.contiguous() if self.transposed else matrix


@cache
def _pairs() -> Tensor:
    """Return the two numbers of every byte, float32 [256, 2]."""
    values = torch.tensor([*MAGNITUDES, *(-magnitude for magnitude in MAGNITUDES)])
    byte = torch.arange(256)
    return torch.stack([values[byte % 16], values[byte // 16]], -1)
