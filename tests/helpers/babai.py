"""Babai's nearest plane algorithm as published, last column first: the oracle of `lattice.nearest_plane`."""

import torch


def babai(
    weight: torch.Tensor,
    hessian: torch.Tensor,
    scales: torch.Tensor,
    order: torch.Tensor,
    low: int | None = None,
    high: int | None = None,
) -> torch.Tensor:
    """Round by Babai's nearest plane algorithm, last column first ("GPTQ as Babai", Algorithm 3).

    A upper triangular with A^T A = H in the reversed rounding order; y = A w; for j = c .. 1 round y_j / (A_jj s_j)
    and take A[:, j] q_j off y. By Theorem 4 the integers are those of `nearest_plane` with the same rounding order.

    Args:
        weight: float64 [r, c].
        hessian: float64 [c, c], damped, original column order.
        scales: float64, broadcastable to [r, c].
        order: int64 [c], the rounding order (as in Factor); Babai runs on its reverse, last column first.
        low, high: the integer grid; None for no clipping.

    Returns:
        int32 [r, c] in the original column order.
    """
    columns = order.flip(0)
    basis = torch.linalg.cholesky(hessian[columns][:, columns], upper=True)
    steps = scales.expand_as(weight)[:, columns]
    target = weight[:, columns] @ basis.T
    integers = torch.zeros_like(weight)
    for j in reversed(range(weight.shape[1])):
        nearest = (target[:, j] / (basis[j, j] * steps[:, j])).round()
        if low is not None or high is not None:
            nearest = nearest.clamp(low, high)
        integers[:, columns[j]] = nearest
        target -= torch.outer(nearest * steps[:, j], basis[:, j])
    return integers.to(torch.int32)
