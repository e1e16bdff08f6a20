"""What a weight that rounding does not put on the grid is kept as: its value, or its point of the lattice.

    "exact"     bfloat16 of the weight itself: any weight may be kept, and hardly an error is left
    "integer"   bfloat16 of scale * z beyond the grid: only such weights may be kept, and z takes few bits to store

Invariant: `kept_value` is what the stored weight will dequantize to, bit for bit.
"""

from typing import Literal

import torch

from vllm_latq.format.integer_outliers import outlier_values

Overflow = Literal["clip", "exact", "integer"]
KEPT = ("exact", "integer")
OUTLIER_DTYPE = torch.bfloat16
# Half a unit in the last place of bfloat16's 8 significant bits, relative.
_HALF_UNIT = 2.0**-8


def kept_value(keep: Overflow, weight: torch.Tensor, integer: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """What an outlier is stored as, in the dtype of the weight.

    Args:
        keep: "exact" or "integer".
        weight: as it is when its turn comes.
        integer: what it rounds to, off the grid or on it.
        scale: of the same shape, or broadcast to it.
    """
    return (weight.to(OUTLIER_DTYPE) if keep == "exact" else outlier_values(integer, scale)).to(weight.dtype)


def kept_excess(keep: Overflow, values: torch.Tensor, scales: torch.Tensor, reach: float) -> torch.Tensor:
    """By how much rounding to bfloat16 may raise the squared error of a kept weight above (reach * scale)^2, float64.

    Args:
        keep: "exact", which has no other error, or "integer", which has both.
        values: of the outliers; 0 elsewhere.
        scales: broadcast to them.
        reach: largest distance from the point that was rounded to, in steps: 1/2, or 1 where rounding is stochastic.
    """
    shift = values.to(torch.float64).abs() * _HALF_UNIT
    step = reach * scales.to(torch.float64).abs()
    return shift * (2 * step + shift) if keep == "integer" else (shift.square() - step.square()).clamp_(min=0)
