"""Coordinate descent after nearest plane: each number moves to its optimum while all others are held.

One sweep fits every scale to its group by least squares, then takes every weight once, in rounding order: an inlier
goes to the grid point nearest to its optimum, an outlier to the optimum itself. (QuantEase, Behdin et al. 2023, with
scales, and with outliers that may change places.)
Nearest plane counts on later columns to repair an error; coordinate descent corrects earlier columns, too.

Invariant: a sweep that does not lower the loss is dropped, so the loss stays below the bound it started with. That
bound used the old scales. The returned bound uses the new scales, and residuals longer than half a scale enter it at
their actual cost.
"""

import math
from dataclasses import dataclass, replace

import torch

from vllm_latq.quantize.lattice.factor import Factor
from vllm_latq.quantize.lattice.nearest_plane import Rounding
from vllm_latq.quantize.lattice.outliers import OUTLIER_DTYPE, Grid, kept_value
from vllm_latq.quantize.lattice.scales import SCALE_DTYPE

BATCH = 128  # columns
ROWS = 1024


def refine(
    weight: torch.Tensor,
    factor: Factor,
    rounding: Rounding,
    sweeps: int,
    outlier_rate: float | None = None,
) -> Rounding:
    """Lower (q - w)^T H (q - w), H damped, starting from a rounding.

    Args:
        weight: float32 or float64 [r, c], the weight that was rounded.
        factor: of its Hessian, that it was rounded with.
        rounding: to start from, with a scale per group; kept weights stay kept, the others on its grid.
        sweeps: largest number of sweeps.
        outlier_rate: if given, outliers may change places: each sweep keeps the weights whose rounding to the grid
            would cost more than a price, which this share of the weights exceeds before the sweep.

    Returns:
        The rounding reached; its bound counts everything, so it is above the loss.
    """
    if not sweeps or not weight.numel():
        return rounding
    state = _State.of(weight, factor, rounding)
    best = state.measure()
    for _ in range(sweeps):
        tried = state.copy()
        tried.sweep(outlier_rate)
        reached = tried.measure()
        allowed = int(state.kept.sum() if outlier_rate is None else outlier_rate * weight.numel())
        if not reached.sum() < best.sum() or int(tried.kept.sum()) > allowed:
            break
        state, best = tried, reached
    steps = state.scales[state.group_of]
    base = state.grid.offset * steps
    cells, excess = state.bound(factor)
    z, kept, values = state.integers(state.values, steps), state.kept, state.values - base
    z.masked_fill_(kept, 0)
    has_outliers = rounding.outlier_values is not None
    return replace(
        rounding,
        z=z.to(torch.int32).T.contiguous(),
        outlier_mask=kept.T.contiguous() if has_outliers else rounding.outlier_mask,
        outlier_values=values.masked_fill(~kept, 0).to(OUTLIER_DTYPE).T.contiguous() if has_outliers else None,
        scales=state.scales.T.contiguous(),
        loss=best,
        bound=cells + excess,
        excess=excess,
    )


@dataclass
class _State:
    """Weights of the descent, transposed, so that one step touches contiguous rows of all output channels.

    In the original column order: target, values [c, r] are w and q; scales [G, r]; kept [c, r] marks outliers;
    gradient [c, r] is half the gradient of the loss, H (q - w), after `measure`.
    """

    target: torch.Tensor
    values: torch.Tensor
    scales: torch.Tensor
    kept: torch.Tensor
    hessian: torch.Tensor
    order: torch.Tensor
    group_of: torch.Tensor
    grid: Grid
    gradient: torch.Tensor

    @classmethod
    def of(cls, weight: torch.Tensor, factor: Factor, rounding: Rounding) -> "_State":
        """Return the state that a rounding stands for."""
        kept = rounding.outlier_mask
        return cls(
            target=weight.T.contiguous(),
            values=rounding.dequantized.to(weight.dtype).T.contiguous(),
            scales=rounding.scales.to(weight.dtype).T.expand(-1, len(weight)).clone(),
            kept=(kept if rounding.outlier_values is not None else torch.zeros_like(kept)).T.contiguous(),
            hessian=factor.hessian.to(weight.dtype),
            order=factor.order,
            group_of=torch.arange(weight.shape[1], device=weight.device) // rounding.group_width,
            grid=rounding.grid,
            gradient=weight.new_empty(0),
        )

    def copy(self) -> "_State":
        """Return a state whose values, scales and outliers can change on their own."""
        return replace(self, values=self.values.clone(), scales=self.scales.clone(), kept=self.kept.clone())

    def measure(self) -> torch.Tensor:
        """Return the loss of each row, float64 [r], and keep its gradient for the next sweep."""
        error = self.values - self.target
        self.gradient = self.hessian @ error
        return (error * self.gradient).sum(0, dtype=torch.float64)

    def bound(self, factor: Factor) -> torch.Tensor:
        """Return 1/4 sum_t D_t s_t^2 of each row, and the excess of residuals that cost more: float64 [2, r]."""
        found = []
        parts = (part.split(ROWS, 1) for part in (self.values, self.target, self.scales))
        for values, target, scales in zip(*parts, strict=True):
            cells = scales[self.group_of].T.to(torch.float64).square() * (factor.importance / 4)
            excess = factor.residuals((values - target).T).square_().sub_(cells).clamp_(min=0)
            found.append(torch.stack([cells.sum(1), excess.sum(1)]))
        return torch.cat(found, 1)

    def integers(self, values: torch.Tensor, steps: torch.Tensor) -> torch.Tensor:
        """Return the integers of the lattice's points nearest to some values."""
        return (values / steps).sub_(self.grid.offset).round_()

    def kept_value(self, values: torch.Tensor, steps: torch.Tensor) -> torch.Tensor:
        """Return outliers as they are stored: by their distance from scale * offset."""
        base = self.grid.offset * steps
        return kept_value(values - base) + base

    def sweep(self, outlier_rate: float | None) -> None:
        """Fit the scales, then move the weights; uses up the gradient that `measure` has kept."""
        gradient = self.gradient
        for group in range(len(self.scales)):
            self._fit(group, gradient)
        price = None if outlier_rate is None else self._price(gradient, outlier_rate)
        for columns in self.order.split(BATCH):
            self._move(columns, gradient, price)

    def _fit(self, group: int, gradient: torch.Tensor) -> None:
        """Fit the scale of each row's group by least squares, rounded as stored, where that lowers the loss."""
        columns = (self.group_of == group).nonzero()[:, 0]
        old, values, kept = self.scales[group].clone(), self.values[columns], self.kept[columns]
        integers = self.integers(values, old)
        points = integers + self.grid.offset
        points.masked_fill_(kept, self.grid.offset)
        slope = (points * gradient[columns]).sum(0)
        curvature = (points * (self.hessian[columns][:, columns] @ points)).sum(0)
        fitted = (old - slope / curvature).to(SCALE_DTYPE).to(old)
        change = fitted - old
        better = change * (change * curvature + 2 * slope) < 0  # false for NaN: every point of the group is 0
        better &= fitted * old > 0
        change.masked_fill_(~better, 0)
        self.scales[group] += change
        moves = points * change
        self.values[columns] += moves
        gradient.addmm_(self.hessian[:, columns], moves)

    def _price(self, gradient: torch.Tensor, outlier_rate: float) -> float:
        """Return the price that `outlier_rate` of the weights exceed, if each alone is put on the grid."""
        curvature = self.hessian.diagonal()[:, None]
        optimum = self.values - gradient / curvature
        steps = self.scales[self.group_of]
        integers = self.integers(optimum, steps)
        nearest = integers.clamp(self.grid.low, self.grid.high).add_(self.grid.offset).mul_(steps)
        costs = optimum.sub_(nearest).square_() * curvature
        costs = costs.flatten()
        rank = math.floor(outlier_rate * costs.numel())
        return float(costs.kthvalue(costs.numel() - rank).values)

    def _move(self, columns: torch.Tensor, gradient: torch.Tensor, price: float | None) -> None:
        """Move every weight of a batch of columns to its optimum; other columns are updated once, at the end."""
        local, inner = gradient[columns], self.hessian[columns][:, columns]
        moves = torch.zeros_like(local)
        for i, t in enumerate(columns.tolist()):
            if i:
                local[i] += inner[i, :i] @ moves[:i]
            curvature, scale = inner[i, i], self.scales[self.group_of[t]]
            optimum = self.values[t] - local[i] / curvature
            integer = self.integers(optimum, scale)
            nearest = integer.clamp(self.grid.low, self.grid.high).add_(self.grid.offset).mul_(scale)
            if price is not None:
                self.kept[t] = (optimum - nearest).square_().mul_(curvature) > price
            value = torch.where(self.kept[t], self.kept_value(optimum, scale), nearest)
            moves[i] = value - self.values[t]
            self.values[t] = value
        gradient.addmm_(self.hessian[:, columns], moves)
