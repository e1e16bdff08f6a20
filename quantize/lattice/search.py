"""Search for the argument at which a falling, not quite monotone function just meets a target.

SSQR looks for the scale multiplier that meets an outlier rate, HPTQ for the scale that meets an average of bits. Rate
and bits fall as the scale grows, nearly monotonically, and a probe costs a pass over the matrix.

Invariant: the result is the best feasible probe (largest value <= target) among all probes made, not the last probe.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Generic, TypeVar

import torch

T = TypeVar("T")
Point = tuple[float, float]

# Regula falsi can creep along one side of a bracket: every third probe halves it.
_HALVE_EVERY = 3
# Below this width of the bracket, in log2 units, all probes give the same integers: 2^-20 is less than float32's step.
_NARROW = 2.0**-20
_FIRST_STEP = 0.5
# A sample has an eighth of the rows, and at least this many: 1 % of outliers in 256 x 1024 weights is counted to 2 %.
_SAMPLE_ROWS = 256


@dataclass(frozen=True)
class Probe(Generic[T]):
    """One evaluation: position x (log2 of the scale), the value there, and the object whose value it is."""

    x: float
    value: float
    payload: T


@dataclass(frozen=True)
class Outcome(Generic[T]):
    """Result of a search.

    Attributes:
        best: the feasible probe with the largest value; if none is feasible, the probe with the smallest.
        feasible: True if best.value <= target.
        met: True if best.value is also within the tolerance.
        probes: number of evaluations.
        slope: d value / d x near the target; None if unknown.
    """

    best: Probe[T]
    feasible: bool
    met: bool
    probes: int
    slope: float | None


@dataclass(frozen=True)
class Guess:
    """Start and range of a search.

    Attributes:
        x: first position to probe.
        slope: expected d value / d x, negative, to step from one side before there is a bracket.
        lower, upper: range of x.
    """

    x: float
    slope: float
    lower: float
    upper: float

    def after(self, found: Outcome[Any]) -> "Guess":
        """Return the guess for a similar search, from the outcome of this search."""
        return replace(self, x=found.best.x, slope=found.slope or self.slope)

    def clipped(self, x: float) -> float:
        """Return the position in the range that is nearest to x."""
        return min(max(x, self.lower), self.upper)


def search_target(
    evaluate: Callable[[float], tuple[float, T]],
    *,
    target: float,
    tolerance: float,
    guess: Guess,
    max_probes: int,
    first: Probe[T] | None = None,
) -> Outcome[T]:
    """Probe until a value lies in [target - tolerance, target], the bracket closes, or the probes are used up.

    Args:
        evaluate: x -> (value, payload); falls, nearly monotonically, as x grows.
        target: largest feasible value.
        tolerance: largest distance below the target that meets it.
        guess: where to start.
        max_probes: at least 1.
        first: the probe at guess.x, if it was made before; it counts as a probe.
    """
    # Aim at the middle of the window: aiming at its edge would miss it half the time.
    aim = target - tolerance / 2
    best: Probe[T] | None = None
    above: Point | None = None
    below: Point | None = None
    x = guess.clipped(guess.x)
    probe = first or Probe(x, *evaluate(x))
    slope, step, probes, previous = guess.slope, _FIRST_STEP, 1, None
    while True:
        x, value = probe.x, probe.value
        slope, previous = _slope(previous, (x, value)) or slope, (x, value)
        best = _better(best, probe, target)
        if value > target:
            # A probe past the other side contradicts it: the function is not monotone there. Trust the newer probe.
            above, below = (x, value), below if below and below[0] > x else None
        else:
            below, above = (x, value), above if above and above[0] < x else None
        if target - tolerance <= best.value <= target or probes >= max_probes:
            break
        following = guess.clipped(_next(previous, above, below, aim, slope, step, probes % _HALVE_EVERY == 0))
        if abs(following - x) < _NARROW:
            break
        step = step if above and below else 2 * step
        probe = Probe(following, *evaluate(following))
        probes += 1
    feasible = best.value <= target
    return Outcome(best, feasible, feasible and best.value >= target - tolerance, probes, _slope(above, below))


def sample_rows(weight: torch.Tensor) -> torch.Tensor | None:
    """Return rows to search on first, int64, sorted, the same at every call; None if a sample would save little."""
    rows = weight.shape[0]
    size = max(_SAMPLE_ROWS, rows // 8)
    if rows < 3 * size:
        return None
    # Not every eighth row: heads and rotary pairs repeat with powers of two.
    chosen = torch.randperm(rows, generator=torch.Generator().manual_seed(0))[:size]
    return chosen.sort().values.to(weight.device)


def _better(best: Probe[T] | None, probe: Probe[T], target: float) -> Probe[T]:
    if best is None:
        return probe
    if (best.value <= target) != (probe.value <= target):
        return best if best.value <= target else probe
    closer = probe.value > best.value if probe.value <= target else probe.value < best.value
    return probe if closer else best


def _next(
    latest: Point,
    above: Point | None,
    below: Point | None,
    aim: float,
    slope: float,
    step: float,
    halve: bool,
) -> float:
    """Return where to probe: inside the bracket, or without one at most `step` past the side that is known."""
    if above and below:
        width = below[0] - above[0]
        drop = above[1] - below[1]
        share = (above[1] - aim) / drop if drop > 0 and math.isfinite(drop) and not halve else 0.5
        # Never onto an end of the bracket, where nothing new is learned.
        return above[0] + width * min(max(share, 0.02), 0.98)
    # Without a bracket the only side known is the latest probe.
    newton = (aim - latest[1]) / slope
    if above:
        return latest[0] + min(max(newton, 0.01 * step), step)
    return latest[0] + max(min(newton, -0.01 * step), -step)


def _slope(one: Point | None, other: Point | None) -> float | None:
    """Return the slope of the secant through two points, if it falls."""
    if one is None or other is None or one[0] == other[0]:
        return None
    secant = (other[1] - one[1]) / (other[0] - one[0])
    return secant if -math.inf < secant < 0 else None
