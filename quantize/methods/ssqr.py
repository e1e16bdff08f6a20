"""SSQR: nearest plane with adjusted scales and sparse outliers.

    ssqr            ICLR 2026 version of "GPTQ as Babai", section 5, Algorithm 9: a weight whose integer leaves the grid
                    is an outlier, nothing is clipped, and all scales grow alike until the outlier rate is met
    ssqr_by_saving  outliers are the weights whose rounding would cost the layer most, scales are chosen with them

Invariant: an outlier is stored as its current value in bfloat16, so the recursion propagates only the error of rounding
to bfloat16. The loss of all other weights is bounded.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import torch

from vllm_latq.quantize.lattice.factor import Factor
from vllm_latq.quantize.lattice.nearest_plane import Plane, Rounding, nearest_plane
from vllm_latq.quantize.lattice.outliers import Grid, Overflow, Saving
from vllm_latq.quantize.lattice.scales import SCALE_DTYPE, group_scales, scaled
from vllm_latq.quantize.lattice.search import Guess, Outcome, Probe, sample_rows, search_target

# At 2 bits with strongly correlated inputs the outlier rate can stop falling as the scales grow, because their errors
# feed back through the recursion. Beyond 8 times the MSE scales nearly everything rounds to 0: a rate met
# there would be no success. Small multipliers are for rates far above 1 % on heavy tails.
SMALLEST_OCTAVES, LARGEST_OCTAVES = -10.0, 3.0
RATE_TOLERANCE = 0.02
MAX_PROBES = 20
# Where a search starts from: near 1 %, the rate fell by the power 4 (heavy tails) to 6 (Gaussian) of the multiplier.
_USUAL_SLOPE = -5.0
# `ssqr_by_saving`: slope of the rate over the price while scales follow the price; range of prices that is searched;
# tolerance of the rate when scales are chosen.
PRICE_SLOPE = -1.5
PRICE_OCTAVES = 24.0
_ROUGH_OCTAVES = 0.25
# By bits: the price at which 1 % are outliers, in squared absmax scales, and the slope of the rate over the price while
# scales stay. Medians over the linears of two trained models.
_USUAL_PRICE = {2: 0.43, 3: 0.62, 4: 0.88, 8: 1.3}
_FIXED_SLOPE = {2: -1.25, 3: -0.75, 4: -0.4, 8: -0.3}
# Rates further below the target count as this many octaves below: keeps the logarithm of zero finite.
_FLOOR_OCTAVES = 10.0

Rows = torch.Tensor | slice
_ALL = slice(None)


@dataclass(frozen=True)
class SSQRResult:
    """Result of a search for an outlier rate.

    Attributes:
        rounding: with `outlier_values`.
        passes: quantizations of the whole matrix that the last search took.
        note: empty, or the outlier rate if it is not met.
    """

    rounding: Rounding
    passes: int
    note: str


def ssqr(
    weight: torch.Tensor,
    factor: Factor,
    base_scales: torch.Tensor,
    grid: Grid,
    group_size: int,
    outlier_rate: float,
    plane: Plane = nearest_plane,
) -> SSQRResult:
    """Search for the multiplier of the base scales whose outlier rate is within 2 % of the target and not above it.

    The rate falls as the scales grow, but not always monotonically: the best feasible multiplier seen is kept. If none
    was feasible, the multiplier with the fewest outliers is kept, and `note` says so.

    Args:
        weight: float32 or float64 [r, c].
        factor: of the layer's Hessian.
        base_scales: bfloat16 [r, G], as from `group_scales(how="mse")`.
        grid: bounded.
        group_size: input channels per scale, -1 for the whole row.
        outlier_rate: target, in (0, 1).
        plane: to round with; stochastic rounding draws the same at every probe.
    """

    def quantize(rows: Rows, octaves: float) -> Rounding:
        scales = scaled(base_scales[rows], 2.0**octaves)
        return plane(weight[rows], factor, scales, grid, Overflow(), group_size=group_size)

    guess = Guess(0.0, _USUAL_SLOPE, SMALLEST_OCTAVES, LARGEST_OCTAVES)
    sample = sample_rows(weight)
    if sample is not None:
        tolerance = _tolerance(outlier_rate, weight[sample].numel())
        guess = guess.after(_search(partial(quantize, sample), outlier_rate, tolerance, guess))
    tolerance = _tolerance(outlier_rate, weight.numel())
    return _result(_search(partial(quantize, _ALL), outlier_rate, tolerance, guess), outlier_rate)


def ssqr_by_saving(
    weight: torch.Tensor,
    factor: Factor,
    grid: Grid,
    group_size: int,
    outlier_rate: float,
    plane: Plane = nearest_plane,
) -> SSQRResult:
    """Choose scales and outliers together, at one price for an outlier, which is searched to meet the rate.

    In the recursion a weight is kept exactly where rounding it to the clipped grid would add more than the price to the
    loss, D_t (w' - q)^2; the others are clipped, their errors fed back. Each group takes the scale, and on a grid that
    is not symmetric the sign, that minimises what its weights cost at this price, min(D_t (w - q)^2, price): scales
    leave room for what will be kept, and outliers go where the loss is. A price of 0 makes every weight an outlier, one
    of infinity is clipped GPTQ; the bound counts what clipped weights cost.

    Rows are searched on a sample first if there are many: for the price at which all of them choose their scales, and
    then, where it has outliers enough, for the price at which these scales meet the rate.

    Arguments and result as for `ssqr`.
    """
    layer = _Layer(weight, factor, grid, group_size, outlier_rate, plane)
    sample = sample_rows(weight)
    start = usual_price(weight, factor.importance, grid, group_size, outlier_rate)
    guess = Guess(start, PRICE_SLOPE, start - PRICE_OCTAVES, start + PRICE_OCTAVES)
    rough = layer.search_scales(_ALL if sample is None else sample, guess)
    guess = replace(guess, x=rough.x, slope=_FIXED_SLOPE[grid.bits])
    if sample is None:
        # The first pass with these scales at this price was made when they were chosen.
        found = layer.meet_rate(rough.payload.scales.to(SCALE_DTYPE), _ALL, guess, rough)
    else:
        scales = layer.scales(_ALL, rough.x)
        # If the sample has enough outliers to count the rate as finely as it must be met.
        if len(sample) * weight.shape[1] * outlier_rate > RATE_TOLERANCE**-2:
            guess = guess.after(layer.meet_rate(scales, sample, guess))
        found = layer.meet_rate(scales, _ALL, guess)
    return _result(found, outlier_rate)


@dataclass(frozen=True)
class _Layer:
    """A weight to be rounded by saving; prices are in octaves, log2 of the price."""

    weight: torch.Tensor
    factor: Factor
    grid: Grid
    group_size: int
    outlier_rate: float
    plane: Plane

    def scales(self, rows: Rows, price: float) -> torch.Tensor:
        """Choose the scales of some rows at a price."""
        how = "mse" if self.grid.offset else "signed"
        options = {"importance": self.factor.importance, "price": 2.0**price}
        return group_scales(self.weight[rows], self.grid, self.group_size, how, **options)

    def quantize(self, rows: Rows, scales: torch.Tensor, price: float) -> Rounding:
        """Round some rows with their scales, keeping outliers at a price."""
        outliers = Saving(2.0**price)
        return self.plane(self.weight[rows], self.factor, scales, self.grid, outliers, group_size=self.group_size)

    def search_scales(self, rows: Rows, guess: Guess) -> Probe[Rounding]:
        """Search for the price at which some rows, with the scales they choose at it, roughly meet the rate."""

        def quantize(price: float) -> Rounding:
            return self.quantize(rows, self.scales(rows, price), price)

        return _search(quantize, self.outlier_rate, _ROUGH_OCTAVES, guess).best

    def meet_rate(
        self, scales: torch.Tensor, rows: Rows, guess: Guess, first: Probe[Rounding] | None = None
    ) -> Outcome[Rounding]:
        """Search for the price at which some rows meet the rate with given scales, which are those of all rows."""
        tolerance = _tolerance(self.outlier_rate, self.weight[rows].numel())
        return _search(partial(self.quantize, rows, scales[rows]), self.outlier_rate, tolerance, guess, first)


def usual_price(
    weight: torch.Tensor, importance: torch.Tensor, grid: Grid, group_size: int, outlier_rate: float
) -> float:
    """Return the price, in octaves, where a search starts; arguments as for `ssqr_by_saving` and `group_scales`."""
    # _USUAL_PRICE was measured with these scales, whatever the offset of the grid.
    scales = group_scales(weight, replace(grid, offset=0.0), group_size, "absmax").to(torch.float64)
    price = _USUAL_PRICE[grid.bits] * float(scales.square().mean() * importance.mean())
    return math.log2(max(price, 1e-300)) + math.log2(outlier_rate / 0.01) / PRICE_SLOPE


def _search(
    quantize: Callable[[float], Rounding],
    outlier_rate: float,
    tolerance: float,
    guess: Guess,
    first: Probe[Rounding] | None = None,
) -> Outcome[Rounding]:
    """Search for the argument of `quantize` at which its outlier rate meets the target; all but the rate in octaves."""

    def probe(octaves: float) -> tuple[float, Rounding]:
        rounding = quantize(octaves)
        return math.log2(max(rounding.outlier_rate, outlier_rate * 2.0**-_FLOOR_OCTAVES)), rounding

    return search_target(
        probe,
        target=math.log2(outlier_rate),
        tolerance=tolerance,
        guess=guess,
        max_probes=MAX_PROBES,
        first=first,
    )


def _result(found: Outcome[Rounding], outlier_rate: float) -> SSQRResult:
    rounding = found.best.payload
    note = "" if found.met else f"outlier rate {rounding.outlier_rate:.4%}, the nearest found to {outlier_rate:.4%}"
    return SSQRResult(rounding, found.probes, note)


def _tolerance(outlier_rate: float, weights: int) -> float:
    """Return how far below the target, in octaves, a rate may be: 2 %, or one whole outlier in a small matrix."""
    reachable = min((1 - RATE_TOLERANCE) * outlier_rate, math.floor(outlier_rate * weights) / max(weights, 1))
    return math.log2(outlier_rate / reachable) if reachable else _FLOOR_OCTAVES
