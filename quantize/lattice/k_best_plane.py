"""K-best nearest plane: the recursion of `nearest_plane`, with the K best partial roundings of every row kept alive.

(The M-algorithm of sequential decoding; K = 1 is nearest plane.) Each survivor of a row may take the nearest integer,
the integer on the other side, or with `Saving` keep the weight; of these candidates the K cheapest survive.

Invariant: the cheapest survivor's nearest integer is always among the candidates, so the bound of nearest plane holds
by induction over the steps; on a bounded grid, residuals longer than half a scale are counted at their cost.

All rows are independent: they are done in bands, so that the survivors' copies of the residual stay small.

    residual [c, K, rows] --a batch of columns--> candidates [2K or 3K, rows] --the K cheapest--> parent, integer
        --after the batch--> residual of the later columns, gathered by ancestor, less the errors of the batch
"""

import math
from dataclasses import dataclass, replace
from functools import partial

import torch

from vllm_latq.errors import ConfigError
from vllm_latq.quantize.lattice.factor import Factor
from vllm_latq.quantize.lattice.nearest_plane import Plane, Rounding, StepScales, check_range, nearest_plane
from vllm_latq.quantize.lattice.outliers import (
    CLIP,
    OUTLIER_DTYPE,
    UNBOUNDED,
    Grid,
    Outliers,
    Overflow,
    Saving,
    kept_value,
)

# Elements of the survivors' residuals at once.
_BAND = 1 << 24


def plane_of(width: int, block_size: int = 128, seed: int | None = None) -> Plane:
    """Return `nearest_plane`, or for a width above 1 `k_best_plane`, with these options.

    Raises:
        ConfigError: stochastic rounding and a width above 1: integers that are drawn leave nothing to choose.
    """
    if width == 1:
        return partial(nearest_plane, block_size=block_size, seed=seed)
    if seed is not None:
        raise ConfigError("k_best_plane", "nearest rounding", "stochastic rounding")
    return partial(k_best_plane, block_size=block_size, width=width)


def k_best_plane(
    weight: torch.Tensor,
    factor: Factor,
    scales: torch.Tensor,
    grid: Grid = UNBOUNDED,
    outliers: Outliers = CLIP,
    *,
    group_size: int | None = None,
    block_size: int = 128,
    width: int = 4,
) -> Rounding:
    """Round by nearest plane with K survivors per row; arguments and result as for `nearest_plane`, except:

    Args:
        outliers: `Clip` or `Saving`. With `Overflow` an outlier has no cost, so the survivors would be the paths that
            leave the grid.
        width: K, survivors per row.
    """
    if isinstance(outliers, Overflow):
        raise ConfigError("k_best_plane", "outliers that cost something", "outliers that overflow the grid")
    rows, cols = weight.shape
    steps = StepScales.of(scales, weight, group_size, factor.order)
    # Costs are compared in squares, which float32 holds of weights near 1: a power of two makes them so, exactly.
    unit = _unit(weight, steps.by_group)
    scaled = replace(steps, by_group=steps.by_group / unit)
    price = outliers.price / unit**2 if isinstance(outliers, Saving) else None
    search = _Search(factor, scaled, grid, block_size, price, width)
    band = max(1, _BAND // max(1, cols * width))
    paths = [search.run(weight[start : start + band] / unit, start) for start in range(0, rows, band)]
    integers, errors, kept, clipped = (torch.cat(parts, -1) for parts in zip(*paths, strict=True))
    loss = factor.diagonal @ errors.to(torch.float64).square() * unit**2
    check_range(integers, loss)
    bound = scaled.weighted_squares(factor.diagonal, rows) / 4
    excess = torch.zeros_like(loss)
    if grid.bounded:
        for start in range(0, cols, block_size):
            part = slice(start, start + block_size)
            excess += factor.diagonal[part] @ scaled.excess(start, errors[part], reach=0.5)
    inverse = torch.argsort(factor.order)
    values = None
    if price is not None:
        values = torch.where(torch.isfinite(kept), kept * unit, 0.0).to(OUTLIER_DTYPE)[inverse].T.contiguous()
        clipped = torch.isfinite(kept)
    return Rounding(
        z=integers.to(torch.int32)[inverse].T.contiguous(),
        outlier_mask=clipped[inverse].T.contiguous(),
        outlier_values=values,
        scales=steps.by_group.T,
        group_width=steps.width,
        loss=loss,
        bound=(bound + excess) * unit**2,
        excess=excess * unit**2,
        grid=grid,
    )


def _unit(weight: torch.Tensor, scales: torch.Tensor) -> float:
    """Return the power of two below the largest magnitude; 1 if that is zero, or infinite and refused later."""
    largest = max(float(values.abs().max()) if values.numel() else 0.0 for values in (weight, scales))
    # Its reciprocal must be finite in float32 too.
    return 2.0 ** max(-100, math.frexp(largest)[1] - 1) if 0 < largest < math.inf else 1.0


@dataclass(frozen=True)
class _Search:
    factor: Factor
    scales: StepScales
    grid: Grid
    block_size: int
    price: float | None
    width: int

    def run(self, weight: torch.Tensor, first: int) -> tuple[torch.Tensor, ...]:
        """Return each row's cheapest path: integers, errors, kept values (else NaN), clipped, all [c, rows]."""
        order = self.factor.order
        residual = weight.T[order].unsqueeze(1).repeat(1, self.width, 1)
        shape = residual.shape
        cost = torch.full(shape[1:], math.inf, dtype=weight.dtype, device=weight.device)
        cost[0] = 0
        trail = _Trail(
            integers=torch.empty_like(residual),
            errors=torch.empty_like(residual),
            kept=torch.full_like(residual, math.nan) if self.price is not None else residual.new_empty(0),
            clipped=torch.zeros(shape, dtype=torch.bool, device=weight.device),
            parents=torch.empty(shape, dtype=torch.int64, device=weight.device),
        )
        propagation = self.factor.propagation(weight.dtype)
        for start in range(0, len(order), self.block_size):
            stop = min(start + self.block_size, len(order))
            scales = self.scales.take(start, stop)
            if scales.shape[1] > 1:
                scales = scales[:, first : first + shape[2]]
            if self.grid.offset:
                residual[start:stop].sub_(scales.unsqueeze(1), alpha=self.grid.offset)
            cost, ancestors, errors = self._batch(residual[start:stop], scales, propagation, cost, trail, start)
            if stop < len(order):
                later = residual[stop:].gather(1, ancestors.expand(len(order) - stop, -1, -1))
                later.flatten(1).addmm_(propagation[start:stop, stop:].T, errors.flatten(1), alpha=-1)
                residual[stop:] = later
        return trail.back(cost.argmin(0))

    def _batch(
        self,
        residual: torch.Tensor,
        scales: torch.Tensor,
        propagation: torch.Tensor,
        cost: torch.Tensor,
        trail: "_Trail",
        start: int,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Take steps start .. start + len(residual) - 1.

        Return the survivors' costs, their ancestors before the batch, and their errors [batch, K, rows].
        """
        errors = torch.empty_like(residual)
        ancestors = torch.arange(self.width, device=cost.device)[:, None].expand_as(cost)
        for i in range(len(residual)):
            current = residual[i].gather(0, ancestors)
            if i:
                moves = propagation[start : start + i, start + i]
                current -= (moves @ errors[:i].flatten(1)).view_as(current)
            cost, parents, errors[i] = self._step(start + i, current, scales[i], cost, trail)
            if i:
                errors[:i] = errors[:i].gather(1, parents.expand(i, -1, -1))
            ancestors = ancestors.gather(0, parents)
        return cost, ancestors, errors

    def _step(
        self, t: int, current: torch.Tensor, scale: torch.Tensor, cost: torch.Tensor, trail: "_Trail"
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Take step t from the survivors, whose weights are `current` [K, rows], in the K cheapest ways."""
        low, high = self.grid.low, self.grid.high
        exact = current / scale
        nearest = exact.round()
        first = nearest.clamp(low, high)
        second = (first + torch.where(exact < first, -1.0, 1.0)).clamp(low, high)
        integers = torch.cat((first, second))
        errors = current.repeat(2, 1).addcmul_(integers, scale.expand_as(current).repeat(2, 1), value=-1)
        weight = float(self.factor.diagonal[t])
        costs = cost.repeat(2, 1) + weight * errors.square()
        costs[len(first) :].masked_fill_(first == second, math.inf)
        clipped = torch.cat((first != nearest, first != nearest))
        if self.price is not None:
            kept = kept_value(current)
            integers = torch.cat((integers, torch.zeros_like(kept)))
            errors = torch.cat((errors, current - kept))
            costs = torch.cat((costs, cost + self.price + weight * errors[-len(kept) :].square()))
            clipped = torch.cat((clipped, torch.zeros_like(clipped[: len(kept)])))
            values = torch.cat((torch.full_like(integers[: -len(kept)], math.nan), kept))
        cost, chosen = costs.topk(self.width, dim=0, largest=False)
        parents, error = chosen % self.width, errors.gather(0, chosen)
        trail.integers[t], trail.errors[t], trail.parents[t] = integers.gather(0, chosen), error, parents
        trail.clipped[t] = clipped.gather(0, chosen)
        if self.price is not None:
            trail.kept[t] = values.gather(0, chosen)
        return cost, parents, error


@dataclass
class _Trail:
    """Choices of every survivor at every step, and its parent: all [c, K, rows]."""

    integers: torch.Tensor
    errors: torch.Tensor
    kept: torch.Tensor
    clipped: torch.Tensor
    parents: torch.Tensor

    def back(self, survivor: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return the path that leads to a survivor [rows] of the last step."""
        path = torch.empty_like(self.parents[:, 0])
        for t in reversed(range(len(path))):
            path[t] = survivor
            survivor = self.parents[t].gather(0, survivor[None])[0]

        def along(values: torch.Tensor) -> torch.Tensor:
            return values.gather(1, path.unsqueeze(1)).squeeze(1)

        integers = along(self.integers)
        kept = along(self.kept) if self.kept.numel() else torch.full_like(integers, math.nan)
        return integers, along(self.errors), kept, along(self.clipped)
