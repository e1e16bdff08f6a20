"""Optimal Brain Quantizer: GPTQ's predecessor, which picks the next weight of every row by its cost. A slow oracle.

Frantar and Alistarh, "Optimal Brain Compression", 2022; "GPTQ as Babai", ICLR 2026 version, equations 1 and 2.

Invariant: after every step the free weights are the optimal ones for those already rounded, so no further propagation
can improve them (Appendix B.4: composing the algorithms adds nothing).
"""

import torch


def obq(
    weight: torch.Tensor,
    hessian: torch.Tensor,
    scales: torch.Tensor,
    low: int | None = None,
    high: int | None = None,
    order: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Round each row in the order of least cost (w - q)^2 / [H_F^-1]_jj over the free columns F; O(r c^3).

    Args:
        weight: float64 [r, c].
        hessian: float64 [c, c], damped.
        scales: float64, broadcastable to [r, c].
        low, high: the integer grid; None for no clipping.
        order: int64 [c], one fixed order for all rows instead, with which this is GPTQ.

    Returns:
        integers int32 [r, c], and the order of each row, int64 [r, c].
    """
    steps = scales.expand_as(weight)
    inverse = torch.linalg.inv(hessian)
    integers = torch.zeros_like(weight)
    orders = torch.zeros(weight.shape, dtype=torch.int64, device=weight.device)
    for row in range(weight.shape[0]):
        current, left = weight[row].clone(), inverse.clone()
        free = torch.ones_like(current, dtype=torch.bool)
        for t in range(weight.shape[1]):
            nearest = (current / steps[row]).round()
            if low is not None or high is not None:
                nearest = nearest.clamp(low, high)
            cost = (current - steps[row] * nearest).square() / left.diagonal()
            pick = int(cost.masked_fill(~free, torch.inf).argmin() if order is None else order[t])
            integers[row, pick], orders[row, t] = nearest[pick], pick
            error = (current[pick] - steps[row, pick] * nearest[pick]) / left[pick, pick]
            current -= error * left[pick]
            left -= torch.outer(left[:, pick], left[pick]) / left[pick, pick]
            free[pick] = False
            # The column is eliminated: keep 0 / 0 out of the costs.
            left[pick, pick] = 1.0
    return integers.to(torch.int32), orders


def best_free_weights(
    weight: torch.Tensor, current: torch.Tensor, hessian: torch.Tensor, fixed: torch.Tensor
) -> torch.Tensor:
    """Return the weights nearest to `weight` in the norm of the Hessian that equal `current` where `fixed`.

    Args:
        weight, current: float64 [r, c].
        hessian: float64 [c, c], damped.
        fixed: bool [c].
    """
    free = ~fixed
    pull = hessian[free][:, fixed] @ (current - weight)[:, fixed].T
    best = current.clone()
    best[:, free] = weight[:, free] - torch.linalg.solve(hessian[free][:, free], pull).T
    return best
