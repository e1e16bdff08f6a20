"""Nearest plane: GPTQ's recursion, in blocks.

Invariant: with w' the value a weight has when its turn comes and q what it is rounded to,

    sum_t D_t (w'_t - q_t)^2 == (q - w)^T H (q - w)        (H damped)

Everything is stored transposed and permuted, so that one step touches contiguous rows of all output channels:

              output channels r
            +-------------------+
    order[0]| e_0   (done)      |   finished rows hold the error e = w' - q
    order[1]| e_1               |
      ...   | - - - - - - - - - |   a batch receives the errors of all rows above it in one matmul,
    order[t]| w'_t  (now)       |   w'[batch] -= P[:start, batch]^T @ e[:start],  P = U / diag(U),
      ...   | w    (untouched)  |   then is done in batches of INNER_BATCH columns, and those one by one
            +-------------------+
"""

from dataclasses import dataclass
from typing import Protocol

import torch

from vllm_latq.errors import ConfigError, NumericalError
from vllm_latq.format.scheme import WHOLE_ROW
from vllm_latq.quantize.lattice.factor import Factor
from vllm_latq.quantize.lattice.outliers import (
    CLIP,
    OUTLIER_DTYPE,
    UNBOUNDED,
    Clip,
    Grid,
    Outliers,
    Saving,
    kept_excess,
    kept_value,
)
from vllm_latq.quantize.lattice.stochastic import REACH, Dither


@dataclass(frozen=True)
class Rounding:
    """Result of a rounding pass, in the original column order.

    Attributes:
        z: int32 [r, c], integers; 0 where a weight was kept exactly. A weight is scale * (z + grid.offset).
        outlier_mask: bool [r, c], the weights that were kept, or with `Clip` clipped.
        outlier_values: bfloat16 [r, c], the weights that were kept, less scale * grid.offset; 0 elsewhere; None with
            `Clip`.
        scales: [r or 1, G], in the dtype of the recursion.
        group_width: columns per scale.
        loss: float64 [r], sum_t D_t (w'_t - q_t)^2.
        bound: float64 [r], 1/4 sum_t D_t s_t^2 (Theorem 5), or without the 1/4 if rounding was stochastic, plus what
            rounding outliers to bfloat16 may add, plus `excess`. The loss is below it, unless nearest plane clipped
            weights with `Clip` or `Overflow`: it does not count them.
        excess: float64 [r], the loss of residuals longer than half a scale, less what half a scale would cost. Counted
            by nearest plane with `Saving`, by k-best plane on a bounded grid and by coordinate descent; else 0.
        grid: the grid of the integers.
    """

    z: torch.Tensor
    outlier_mask: torch.Tensor
    outlier_values: torch.Tensor | None
    scales: torch.Tensor
    group_width: int
    loss: torch.Tensor
    bound: torch.Tensor
    excess: torch.Tensor
    grid: Grid

    @property
    def dequantized(self) -> torch.Tensor:
        """Weights as stored, scale * (z + offset) or the outlier: [r, c] in the dtype of the recursion."""
        steps = self.scales.repeat_interleave(self.group_width, 1)[:, : self.z.shape[1]]
        values = (self.z + self.grid.offset) * steps
        if self.outlier_values is None:
            return values
        return torch.where(self.outlier_mask, self.outlier_values + self.grid.offset * steps, values)

    @property
    def outlier_rate(self) -> float:
        """Share of weights in `outlier_mask`."""
        return float(self.outlier_mask.sum()) / max(1, self.outlier_mask.numel())


class Plane(Protocol):
    """Signature that `nearest_plane` and `k_best_plane` share, once their other options are bound."""

    def __call__(
        self,
        weight: torch.Tensor,
        factor: Factor,
        scales: torch.Tensor,
        grid: Grid = UNBOUNDED,
        outliers: Outliers = CLIP,
        *,
        group_size: int | None = None,
    ) -> Rounding:
        """Round a weight; arguments and errors as for `nearest_plane`."""


def nearest_plane(
    weight: torch.Tensor,
    factor: Factor,
    scales: torch.Tensor,
    grid: Grid = UNBOUNDED,
    outliers: Outliers = CLIP,
    *,
    group_size: int | None = None,
    block_size: int = 128,
    seed: int | None = None,
) -> Rounding:
    """GPTQ with lazy batch updates ("GPTQ as Babai", Algorithm 1).

    Args:
        weight: float32 or float64 [r, c]; its dtype is that of the recursion.
        factor: of the layer's Hessian.
        scales: not zero; a scalar, [r, c], or [r, c / group_size] with `group_size` (-1: whole row) in the original
            column order. Cast to the dtype of the weight.
        grid: to round to. With an offset it is a coset of the lattice, which has the same cells and the same bound.
        outliers: which weights are kept at their current value, in bfloat16, instead of being rounded to the grid.
        group_size: input channels per scale, where scales are grouped.
        block_size: columns per lazy batch; does not change the result beyond floating-point rounding.
        seed: of stochastic rounding (see stochastic.py); None rounds to nearest.

    Raises:
        NumericalError: the recursion left the finite numbers or the integers that fit.
    """
    rows, cols = weight.shape
    state = _State(
        residual=weight.T[factor.order].contiguous(),
        integers=weight.new_empty(cols, rows),
        propagation=factor.propagation(weight.dtype),
        scales=StepScales.of(scales, weight, group_size, factor.order),
        grid=grid,
        kept=None if isinstance(outliers, Clip) else _Kept.none_of(weight, factor, outliers),
        dither=None if seed is None else Dither(seed, weight.device),
    )
    for start in range(0, cols, block_size):
        state.round_batch(start, min(start + block_size, cols))
    return state.finish(factor)


@dataclass(frozen=True)
class StepScales:
    """Scales of the steps of a recursion.

    Attributes:
        by_group: [G, r or 1], in the dtype of the recursion.
        group_of: int64 [c]; the group of the column rounded at step t.
        width: columns per group.
    """

    by_group: torch.Tensor
    group_of: torch.Tensor
    width: int

    @classmethod
    def of(
        cls,
        scales: torch.Tensor,
        weight: torch.Tensor,
        group_size: int | None,
        order: torch.Tensor,
    ) -> "StepScales":
        """Lay out scales for a rounding order; arguments as for `nearest_plane`."""
        rows, cols = weight.shape
        scales = scales.to(weight)
        if scales.dim() == 0:
            return cls(scales.reshape(1, 1), torch.zeros_like(order), max(cols, 1))
        width = max(cols, 1) if group_size == WHOLE_ROW else group_size or 1
        expected = (rows, max(1, -(-cols // width)))
        if tuple(scales.shape) != expected:
            hint = f"Groups of {width} columns in a weight of {rows} x {cols}."
            raise ConfigError("scales", f"scales of shape {expected}", f"{tuple(scales.shape)}", hint)
        by_group = scales.T.contiguous()
        return cls(by_group, order // width, width)

    def take(self, start: int, stop: int) -> torch.Tensor:
        """Return the scales of steps start .. stop - 1, [stop - start, r or 1]."""
        return self.by_group[self.group_of[start:stop]]

    def weighted_squares(self, diagonal: torch.Tensor, rows: int) -> torch.Tensor:
        """Return sum_t D_t s_t^2 of each row, float64 [rows]."""
        per_group = torch.zeros(len(self.by_group), dtype=torch.float64, device=diagonal.device)
        per_group.index_add_(0, self.group_of, diagonal)
        return (per_group @ self.by_group.to(torch.float64).square()).expand(rows)

    def excess(self, start: int, residual: torch.Tensor, reach: float) -> torch.Tensor:
        """Return by how much squared residuals of steps start, ... [n, r] exceed (reach s_t)^2, or 0; float64."""
        cells = self.take(start, start + len(residual)).to(torch.float64).square() * reach**2
        return (residual.to(torch.float64).square() - cells).clamp_(min=0)


@dataclass(frozen=True)
class _Kept:
    """Outliers found so far, transposed and permuted: mask and values [c, r], values 0 where nothing is kept.

    limit [c] is the largest error of a weight that is not kept; None keeps the weights that overflow the grid.
    """

    mask: torch.Tensor
    values: torch.Tensor
    limit: torch.Tensor | None

    @classmethod
    def none_of(cls, weight: torch.Tensor, factor: Factor, outliers: Outliers) -> "_Kept":
        """Return a record of no outliers yet."""
        rows, cols = weight.shape
        limit = None
        if isinstance(outliers, Saving):
            limit = (outliers.price / factor.diagonal).sqrt().to(weight.dtype)
        mask = torch.zeros(cols, rows, dtype=torch.bool, device=weight.device)
        return cls(mask, weight.new_zeros(cols, rows), limit)


@dataclass
class _State:
    """Working set of one pass, transposed and permuted: see the module's picture.

    residual [c, r] turns from w', less offset * scale, into the error e row by row; integers [c, r] are not yet
    clipped.
    """

    residual: torch.Tensor
    integers: torch.Tensor
    propagation: torch.Tensor
    scales: StepScales
    grid: Grid
    kept: _Kept | None
    dither: Dither | None

    def round_batch(self, start: int, stop: int) -> None:
        """Take steps start .. stop - 1."""
        batch, scales = self.residual[start:stop], self.scales.take(start, stop)
        if start:
            batch.addmm_(self.propagation[:start, start:stop].T, self.residual[:start], alpha=-1)
        if self.grid.offset:
            batch.sub_(scales, alpha=self.grid.offset)
        # The factors of each step lie in one row. All views are made at once, because on narrow layers making them
        # takes as long as the arithmetic.
        moves = self.propagation[start:stop, start:stop].T.contiguous()
        views = (batch.split(1), moves.split(1), self.integers[start:stop].unbind(), scales.unbind())
        for done, (current, move, integer, scale) in enumerate(zip(*views, strict=True)):
            if done:
                current.addmm_(move[:, :done], batch[:done], alpha=-1)
            self._round_one(start + done, current[0], integer, scale)

    def _round_one(self, t: int, current: torch.Tensor, integer: torch.Tensor, scale: torch.Tensor) -> None:
        torch.div(current, scale, out=integer)
        if self.dither is None:
            integer.round_()
        else:
            self.dither.round_(integer)
        if self.kept is not None:
            kept, outlier = self.kept.mask[t], self.kept.values[t]
            nearest = integer.clamp(self.grid.low, self.grid.high)
            if self.kept.limit is None:
                torch.ne(nearest, integer, out=kept)
            else:
                torch.gt((current - nearest * scale).abs_(), self.kept.limit[t], out=kept)
            torch.where(kept, kept_value(current), outlier, out=outlier)
            nearest.masked_fill_(kept, 0)
            current.sub_(outlier)
        else:
            nearest = integer.clamp(self.grid.low, self.grid.high) if self.grid.bounded else integer
        current.addcmul_(nearest, scale, value=-1)

    def finish(self, factor: Factor) -> Rounding:
        """Return to the original layout, with loss and bound."""
        cols, rows = self.residual.shape
        reach = 0.5 if self.dither is None else REACH
        loss, excess = torch.zeros(2, rows, dtype=torch.float64, device=self.residual.device)
        bound = self.scales.weighted_squares(factor.diagonal, rows) * reach**2
        outside = (self.integers < self.grid.low) | (self.integers > self.grid.high)
        # In slices, so that no float64 copy of the whole matrix is made.
        for lo in range(0, cols, 128):
            part = slice(lo, lo + 128)
            loss += factor.diagonal[part] @ self.residual[part].to(torch.float64).square()
            if self.kept is not None:
                scales = self.scales.take(lo, lo + 128)
                bound = bound + factor.diagonal[part] @ kept_excess(self.kept.values[part], scales, reach)
                if self.kept.limit is not None:
                    longer = self.scales.excess(lo, self.residual[part], reach)
                    excess += factor.diagonal[part] @ longer.masked_fill_(~outside[part] | self.kept.mask[part], 0)
        check_range(self.integers, loss)
        integers, mask, values = self.integers, outside, None
        inverse = torch.argsort(factor.order)
        if self.grid.bounded:
            integers = integers.clamp_(self.grid.low, self.grid.high)
        if self.kept is not None:
            mask = self.kept.mask
            integers = integers.masked_fill_(mask, 0)
            values = self.kept.values.to(OUTLIER_DTYPE)[inverse].T.contiguous()
        return Rounding(
            z=integers.to(torch.int32)[inverse].T.contiguous(),
            outlier_mask=mask[inverse].T.contiguous(),
            outlier_values=values,
            scales=self.scales.by_group.T,
            group_width=self.scales.width,
            loss=loss,
            bound=bound + excess,
            excess=excess,
            grid=self.grid,
        )


def check_range(integers: torch.Tensor, loss: torch.Tensor) -> None:
    """Refuse NaN and infinities, and integers that their floating dtype does not hold exactly."""
    bits = 24 if integers.dtype == torch.float32 else 31
    largest = max(abs(float(end)) for end in integers.aminmax()) if integers.numel() else 0.0
    if torch.isfinite(loss).all() and largest < 1 << bits:
        return
    raise NumericalError(
        "nearest_plane",
        f"finite weights and integers below 2^{bits}",
        f"integers up to {largest:g} and a loss of {float(loss.sum()):g}",
        "The scales are far too small for this Hessian: raise the damping, or lower bits if they are an average.",
    )
