"""Grids, and outliers: weights that are kept as their values instead of being rounded to the grid.

Invariant: `kept_value` is what the stored outlier will dequantize to, bit for bit.
"""

import math
from dataclasses import dataclass

import torch

OUTLIER_DTYPE = torch.bfloat16
# Half a unit in the last place of bfloat16's 8 significant bits, relative.
_HALF_UNIT = 2.0**-8


@dataclass(frozen=True)
class Grid:
    """The points scale * (z + offset) for integers low <= z <= high; by default all multiples of the scale.

    Attributes:
        low, high: smallest and largest integer, both finite or both infinite.
        offset: in steps; 0 (mid-tread) or 1/2 (mid-rise).
    """

    low: float = -math.inf
    high: float = math.inf
    offset: float = 0.0

    @classmethod
    def of_bits(cls, bits: int, offset: float = 0.0) -> "Grid":
        """Return the grid of b-bit integers, -2^(b-1) .. 2^(b-1) - 1."""
        return cls(-(1 << (bits - 1)), (1 << (bits - 1)) - 1, offset)

    @property
    def bounded(self) -> bool:
        """True if the grid ends, so that a weight can lie beyond it."""
        return self.high < math.inf

    @property
    def bits(self) -> int:
        """Width of the integers of a bounded grid."""
        return (int(self.high) - int(self.low)).bit_length()


def past_an_end(codes: torch.Tensor, bits: int, scales: torch.Tensor, residuals: torch.Tensor) -> torch.Tensor:
    """Return where a weight lay on the far side of the end of the grid that it was put on, bool [r, c].

    Args:
        codes: z + 2^(bits-1), [r, c].
        bits: width of the codes.
        scales: [r, G], of groups of neighbouring columns; may be negative.
        residuals: [r, c], what was stored less what was rounded.
    """
    signs = scales.to(residuals).sign().repeat_interleave(codes.shape[1] // scales.shape[1], 1)
    outwards = -residuals * signs
    return ((codes == (1 << bits) - 1) & (outwards > 0)) | ((codes == 0) & (outwards < 0))


@dataclass(frozen=True)
class Clip:
    """Keep no outliers: clip every weight to the grid."""


@dataclass(frozen=True)
class Overflow:
    """Keep the weights whose nearest integer lies outside the grid."""


@dataclass(frozen=True)
class Saving:
    """Keep the weights whose rounding to the clipped grid would add more than the price to the loss; clip the others.

    Attributes:
        price: largest D_t (w'_t - q_t)^2 of a weight that is not kept.
    """

    price: float


UNBOUNDED = Grid()
CLIP = Clip()
Outliers = Clip | Overflow | Saving


def kept_value(weight: torch.Tensor) -> torch.Tensor:
    """Return what an outlier is stored as: the weight rounded to bfloat16, in the dtype of the weight."""
    return weight.to(OUTLIER_DTYPE).to(weight.dtype)


def kept_excess(values: torch.Tensor, scales: torch.Tensor, reach: float) -> torch.Tensor:
    """Return by how much rounding to bfloat16 may raise an outlier's squared error above (reach * scale)^2, float64.

    Args:
        values: outliers; 0 elsewhere.
        scales: broadcast to them.
        reach: largest residual of a rounded weight, in scales: 1/2, or 1 where rounding is stochastic.
    """
    shift = values.to(torch.float64).abs() * _HALF_UNIT
    step = reach * scales.to(torch.float64).abs()
    return (shift.square() - step.square()).clamp_(min=0)
