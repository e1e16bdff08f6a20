"""Rounding orders compared by the trace of D, which the error bound is proportional to at one scale per matrix.

Table 2 of the ICLR 2026 version of "GPTQ as Babai", with lattice reduction as a further column.
"""

from collections.abc import Iterable

import torch

from vllm_latq.quantize.lattice import ORDERS, factorize, inverse_factor
from vllm_latq.quantize.reduction import reduce_lattice


def trace_table(
    hessians: Iterable[tuple[str, torch.Tensor]], damping: float = 0.01, random_orders: int = 20, lll: bool = True
) -> list[dict[str, float | str]]:
    """One row per Hessian: its name and the trace of D by order.

    Args:
        hessians: name and X^T X [c, c].
        damping: relative, the same for all orders.
        random_orders: how many permutations the column `random` is the mean of.
        lll: whether to add the column `lll`: the reduced basis, or act-order where that is no better.

    Returns:
        Rows with `name`, each of ORDERS, `reversed` (the natural order back to front), `random`, and `lll`.

    Raises:
        NumericalError: as `factorize`.
    """
    generator = torch.Generator().manual_seed(0)
    rows: list[dict[str, float | str]] = []
    for name, hessian in hessians:
        row: dict[str, float | str] = {"name": name}
        factors = {order: factorize(hessian, order, damping, name) for order in ORDERS}
        row |= {order: float(factor.diagonal.sum()) for order, factor in factors.items()}
        damped = factors["natural"].hessian
        size = len(damped)
        row["reversed"] = _trace(damped.flip(0, 1))
        drawn = [torch.randperm(size, generator=generator).to(damped.device) for _ in range(random_orders)]
        if drawn:
            row["random"] = sum(_trace(damped[order][:, order]) for order in drawn) / len(drawn)
        if lll:
            reduced = reduce_lattice(factors["act"]).reduction
            row["lll"] = row["act"] if reduced is None else float(reduced.factor.diagonal.sum())
        rows.append(row)
    return rows


def _trace(permuted: torch.Tensor) -> float:
    upper = inverse_factor(permuted, 0.0)
    return float("nan") if upper is None else float(upper.diagonal().pow(-2).sum())
