"""Nearest plane on both sides of a weight: the lattice of a layer as the loss of the whole model sees it.

To second order, moving a layer's weight by E = W - Q costs (1/2) tr(G E H E^T) nats per token, where H = E[x x^T] is
the mean over tokens of its inputs and G = E[g g^T] that of the gradients of the model's log-likelihood with respect to
its outputs (the Kronecker-factored Fisher matrix; Martens and Grosse, 2015; for quantization, Tseng, Sun, De Sa,
"Model-Preserving Adaptive Rounding", 2025). GPTQ is nearest plane on the lattice of I (x) H. This is nearest plane on
the lattice of G (x) H, whose triangular factor is the Kronecker product of both. With V unit upper triangular from H =
V D V^T in rounding order, of both matrices,

    target = W + E (V_H - I) + (V_G - I)^T E V_H      needs the errors to the left of an entry and above it only
    q_ij   = s_ij round(target_ij / s_ij)
    tr(G E H E^T) == sum_ij DG_i DH_j (target_ij - q_ij)^2 <= 1/4 sum_ij DG_i DH_j s_ij^2    (GPTQ's identity)

so steps s_ij = s / sqrt(DG_i DH_j) make every weight contribute alike.

Where integers become codes of some width while they are served, integers that do not fit take far more bits. The grid
is then mid-rise, (z + 1/2) s_ij, and a target at most CLIPPED steps past its last point is clipped to that point: it is
no outlier, and its error, like any other, is fed back. The error is at most 3/4 of a step instead of 1/2, so the bound
is 9/4 times as large.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, partial

import torch

from vllm_latq.errors import NumericalError
from vllm_latq.quantize.lattice.factor import Factor
from vllm_latq.quantize.lattice.tile_waves import CLIPPED, round_in_waves

# Sums of larger multiples of a step would err by a visible part of it in float32.
FLOAT32_INTEGERS = 1 << 16


@dataclass(frozen=True)
class TwoSided:
    """Result of a pass.

    Attributes:
        z: int32 [r, c], integers in the original order; the weight is z * row_steps[:, None] * col_steps, with z + 1/2
            for z on the grid of served codes.
        loss: sum_ij DG_i DH_j (target - q)^2, the damped tr(G E H E^T).
        bound: its worst case, sum_ij DG_i DH_j (furthest s_ij)^2.
    """

    z: torch.Tensor
    loss: float
    bound: float


def furthest(served: bool) -> float:
    """Return the largest residual in steps: 1/2, or CLIPPED on the grid of served codes."""
    return CLIPPED if served else 0.5


def two_sided_plane(
    weight: torch.Tensor,
    inputs: Factor,
    outputs: Sequence[Factor],
    row_steps: torch.Tensor,
    col_steps: torch.Tensor,
    feedback: bool = True,
    width: int | None = None,
) -> TwoSided:
    """Round by nearest plane on the lattice of G (x) H.

    Args:
        weight: [r, c]; the recursion runs in float32, or in float64 where integers need it.
        inputs: factor of H, [c, c].
        outputs: factors of the diagonal blocks of G that cover the r rows; blocks do not see each other.
        row_steps, col_steps: positive, [r] and [c]; the step of weight (i, j) is their product.
        feedback: False rounds each row on its own, as GPTQ does; G then only weighs the rows by its diagonal, which
            `outputs` must be factors of for loss and bound to hold.
        width: of served codes in bits: the grid is mid-rise, and clips targets at most CLIPPED steps past its end;
            None for all multiples of the steps.

    Raises:
        NumericalError: integers that float32 does not hold exactly, or values that are not finite.
    """
    right = cache(partial(_triangle, inputs))
    z = torch.empty(weight.shape, dtype=torch.int32, device=weight.device)
    loss = bound = 0.0
    start = 0
    for factor in outputs:
        rows = start + factor.order
        for dtype in (torch.float32, torch.float64):
            left = _triangle(factor, dtype) if feedback else torch.eye(len(rows), dtype=dtype, device=weight.device)
            steps = (row_steps[rows].to(dtype), col_steps[inputs.order].to(dtype))
            permuted = weight[rows][:, inputs.order].to(dtype)
            integers, residual = round_in_waves(permuted, left, right(dtype), steps, width)
            largest = float(integers.abs().max()) if integers.numel() else 0.0
            if largest < FLOAT32_INTEGERS:
                break
        loss += float(factor.diagonal @ (residual.to(torch.float64).square() @ inputs.diagonal))
        bound += _squares(factor, inputs, steps) * furthest(width is not None) ** 2
        _check(largest, loss)
        back = torch.empty_like(integers)
        back[:, inputs.order] = integers
        z[rows] = back.to(torch.int32)
        start += len(rows)
    return TwoSided(z, loss, bound)


def _triangle(factor: Factor, dtype: torch.dtype) -> torch.Tensor:
    return factor.unit_triangle32 if dtype == torch.float32 else factor.unit_triangle()


def _squares(outputs: Factor, inputs: Factor, steps: tuple[torch.Tensor, torch.Tensor]) -> float:
    """Return sum_ij DG_i DH_j s_ij^2."""
    rows, cols = (step.to(torch.float64).square() for step in steps)
    return float((outputs.diagonal @ rows) * (inputs.diagonal @ cols))


def _check(largest: float, loss: float) -> None:
    if largest < 1 << 24 and loss < float("inf"):
        return
    raise NumericalError(
        "two_sided_plane",
        "finite weights and integers below 2^24",
        f"integers up to {largest:g} and a loss of {loss:g}",
        "The steps are far too small for this layer: raise the damping, or lower the target bits.",
    )
