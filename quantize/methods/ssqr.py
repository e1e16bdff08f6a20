"""SSQR: nearest plane with adjusted scales and sparse outliers.

    ssqr            ICLR 2026 version of "GPTQ as Babai", section 5, Algorithm 9: a weight whose integer leaves the grid
                    is an outlier, nothing is clipped, and all scales grow alike until the outlier rate is met
    ssqr_by_saving  outliers are the weights whose rounding would cost the layer most, scales are chosen with them

Invariant: an outlier is stored as its current value in bfloat16, so the recursion only propagates what that rounding
leaves of its error. What the others add to the loss is bounded.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from vllm_latq.quantize.lattice.factor import Factor
from vllm_latq.quantize.lattice.k_best_plane import plane_of_width
from vllm_latq.quantize.lattice.nearest_plane import Rounding, nearest_plane
from vllm_latq.quantize.lattice.scales import SCALE_DTYPE, grid, group_scales, scaled
from vllm_latq.quantize.lattice.search import Outcome, sample_rows, search_target

# At 2 bits with strongly correlated inputs the outlier rate can stop falling as the scales grow, because their errors
# feed back through the recursion. Beyond 8 times the MSE scales nearly everything rounds to 0: a rate met
# there would be no success. Small multipliers are for rates far above 1 % on heavy tails.
SMALLEST_OCTAVES, LARGEST_OCTAVES = -10.0, 3.0
RATE_TOLERANCE = 0.02
MAX_PROBES = 20
# Where a search starts from: near 1 %, the rate fell by the power 4 (heavy tails) to 6 (Gaussian) of the multiplier.
_USUAL_SLOPE = -5.0
# `ssqr_by_saving`: how the rate falls with the price while scales follow; how far that is looked for; how near to the
# rate scales are chosen.
PRICE_SLOPE = -1.5
PRICE_OCTAVES = 24.0
_ROUGH_OCTAVES = 0.25
# By bits: the price of 1 % in squared steps of absmax scales, and how the rate falls with it where scales stay. Medians
# over the linears of two trained models.
_USUAL_PRICE = {2: 0.43, 3: 0.62, 4: 0.88, 8: 1.3}
_FIXED_SLOPE = {2: -1.25, 3: -0.75, 4: -0.4, 8: -0.3}
# Rates this many octaves below the target all count as "far below": keeps the logarithm of zero finite.
_FLOOR_OCTAVES = 10.0

Rows = torch.Tensor | slice
_ALL = slice(None)


@dataclass(frozen=True)
class SSQRResult:
    """What the search settled on.

    Attributes:
        rounding: with `outlier_values`.
        passes: quantizations of the whole matrix that the last search took.
        note: empty, or why the outlier rate is not the one asked for.
    """

    rounding: Rounding
    passes: int
    note: str


def ssqr(
    weight: torch.Tensor,
    factor: Factor,
    base_scales: torch.Tensor,
    bits: int,
    group_size: int,
    outlier_rate: float,
    *,
    block_size: int = 128,
    seed: int | None = None,
    offset: float = 0.0,
) -> SSQRResult:
    """Search for the multiplier of the base scales whose outlier rate is within 2 % of the target and not above it.

    The rate falls as the scales grow, but not always monotonically: the best feasible multiplier seen is kept. If none
    was feasible, the one with the fewest outliers is, and `note` says so.

    Args:
        weight: float32 or float64 [r, c].
        factor: of the layer's Hessian.
        base_scales: bfloat16 [r, G], as from `group_scales(how="mse")`.
        bits: of the grid.
        group_size: input channels per scale, -1 for the whole row.
        outlier_rate: target, in (0, 1).
        block_size: columns per lazy batch.
        seed: of stochastic rounding, the same draws at every probe; None rounds to nearest.
        offset: of the grid, in steps.
    """
    low, high = grid(bits)
    options: dict[str, Any] = {"block_size": block_size, "group_size": group_size, "seed": seed}

    def quantize(rows: Rows, octaves: float) -> Rounding:
        scales = scaled(base_scales[rows], 2.0**octaves)
        return nearest_plane(weight[rows], factor, scales, low, high, "exact", offset=offset, **options)

    search = partial(_search, weight, outlier_rate, quantize, lower=SMALLEST_OCTAVES, upper=LARGEST_OCTAVES)
    start, slope = 0.0, _USUAL_SLOPE
    rows = sample_rows(weight)
    if rows is not None:
        sampled = search(rows, start=start, slope=slope)
        start, slope = sampled.best.x, sampled.slope or slope
    found = search(_ALL, start=start, slope=slope)
    return _result(found, outlier_rate)


def ssqr_by_saving(
    weight: torch.Tensor,
    factor: Factor,
    bits: int,
    group_size: int,
    outlier_rate: float,
    *,
    block_size: int = 128,
    seed: int | None = None,
    offset: float = 0.0,
    beam: int = 1,
) -> SSQRResult:
    """Scales and outliers chosen together, at one price for an outlier, which is searched to meet the rate.

    In the recursion a weight is kept exactly where rounding it to the clipped grid would add more than the price to the
    loss, D_t (w' - q)^2; the others are clipped, their errors fed back. Each group takes the scale, and on a grid that
    is not symmetric the sign, that minimises what its weights cost at this price, min(D_t (w - q)^2, price): scales
    leave room for what will be kept, and outliers go where the loss is. A price of 0 makes every weight an outlier, one
    of infinity is clipped GPTQ; the bound counts what clipped weights cost.

    Rows are searched on a sample first if there are many: for the price at which all of them choose their scales, and
    then, where it has outliers enough, for the price at which these scales meet the rate.

    Arguments and result as for `ssqr`; beam: survivors per row (see beam.py).
    """
    low, high = grid(bits)
    plane = plane_of_width(beam)
    options: dict[str, Any] = {"block_size": block_size, "group_size": group_size, "seed": seed}
    how, importance = "mse" if offset else "signed", factor.importance

    def scales_at(rows: Rows, octaves: float) -> torch.Tensor:
        layout = (bits, group_size, how, importance, offset)
        return group_scales(weight[rows], *layout, price=2.0**octaves)

    def quantize(rows: Rows, octaves: float, scales: torch.Tensor) -> Rounding:
        return plane(weight[rows], factor, scales, low, high, "exact", threshold=2.0**octaves, offset=offset, **options)

    start = usual_price(weight, importance, bits, group_size, outlier_rate)
    span = {"lower": start - PRICE_OCTAVES, "upper": start + PRICE_OCTAVES}
    search = partial(_search, weight, outlier_rate)

    def following(rows: Rows, octaves: float) -> Rounding:
        return quantize(rows, octaves, scales_at(rows, octaves))

    sample = sample_rows(weight)
    rows = _ALL if sample is None else sample
    rough = search(following, rows, start=start, slope=PRICE_SLOPE, tolerance=_ROUGH_OCTAVES, **span).best
    scales = rough.payload.scales.to(SCALE_DTYPE) if sample is None else scales_at(_ALL, rough.x)

    def fixed(rows: Rows, octaves: float) -> Rounding:
        if sample is None and octaves == rough.x:
            return rough.payload
        return quantize(rows, octaves, scales[rows])

    start, slope = rough.x, _FIXED_SLOPE[bits]
    # On a sample whose outliers are enough to count the rate as finely as it must be met.
    if sample is not None and len(sample) * weight.shape[1] * outlier_rate > RATE_TOLERANCE**-2:
        sampled = search(fixed, sample, start=start, slope=slope, **span)
        start, slope = sampled.best.x, sampled.slope or slope
    return _result(search(fixed, _ALL, start=start, slope=slope, **span), outlier_rate)


def usual_price(
    weight: torch.Tensor, importance: torch.Tensor, bits: int, group_size: int, outlier_rate: float
) -> float:
    """Where a search for the price starts, in octaves; arguments as for `ssqr_by_saving` and `group_scales`."""
    steps = group_scales(weight, bits, group_size, "absmax").to(torch.float64)
    price = _USUAL_PRICE[bits] * float(steps.square().mean() * importance.mean())
    return math.log2(max(price, 1e-300)) + math.log2(outlier_rate / 0.01) / PRICE_SLOPE


def _search(
    weight: torch.Tensor,
    outlier_rate: float,
    quantize: Callable[[Rows, float], Rounding],
    rows: Rows,
    *,
    start: float,
    slope: float,
    lower: float,
    upper: float,
    tolerance: float | None = None,
) -> Outcome[Rounding]:
    """The knob of `quantize` at which the outlier rate of these rows meets the target, both in octaves."""

    def probe(octaves: float) -> tuple[float, Rounding]:
        rounding = quantize(rows, octaves)
        return math.log2(max(rounding.outlier_rate, outlier_rate * 2.0**-_FLOOR_OCTAVES)), rounding

    return search_target(
        probe,
        target=math.log2(outlier_rate),
        tolerance=tolerance or _tolerance(outlier_rate, weight[rows].numel()),
        start=start,
        slope=slope,
        lower=lower,
        upper=upper,
        max_probes=MAX_PROBES,
    )


def _result(found: Outcome[Rounding], outlier_rate: float) -> SSQRResult:
    rounding = found.best.payload
    note = "" if found.met else f"outlier rate {rounding.outlier_rate:.4%}, the nearest found to {outlier_rate:.4%}"
    return SSQRResult(rounding, found.probes, note)


def _tolerance(outlier_rate: float, weights: int) -> float:
    """How far below the target, in octaves, a rate may stay: 2 %, or what whole outliers allow in a small matrix."""
    reachable = min((1 - RATE_TOLERANCE) * outlier_rate, math.floor(outlier_rate * weights) / max(weights, 1))
    return math.log2(outlier_rate / reachable) if reachable else _FLOOR_OCTAVES
