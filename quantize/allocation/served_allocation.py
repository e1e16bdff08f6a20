"""Bits while a model is served: codes of one width for the linears of an input, and steps that make use of them.

Served, an integer takes a code of w bits, and about 18 more (of 8 bits 32) where it lies beyond the codes' reach, which
ends some way after the last point of their grid (see `lattice.tile_waves`). An entropy code charges a weight for its
size, which is why one step serves the whole model; these codes do not, until it overflows. So rows and columns with
small weights, as the loss counts them, get finer steps than the model's s, and those with large ones coarser steps:
each the one with the least

    sum of their squared steps / 12 + price * bits,    price = 2 ln2 s^2 / 12

which is what a bit is worth to an entropy code of step s. Rows and columns take turns. At every s an input gets the
width for which the sum is least, and s is where the model meets its target. How many integers overflow is estimated
with noise in place of feedback; the layer's own search for a scale then meets its share.

Invariant: the linears of one input get one width, because they are served as one matrix, and so do the experts of a
layer; the shares of the layers average to the target, weighted by their sizes.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from typing import TypeVar

import torch
from torch import nn

from vllm_latq.errors import ConfigError, NumericalError
from vllm_latq.format.scheme import SUPPORTED_BITS
from vllm_latq.format.served_size import USUAL_OUTLIER_BITS, served_overhead, slot_words
from vllm_latq.quantize.allocation.stored_allocation import SMALLEST_SIZE, RateCurve
from vllm_latq.quantize.lattice.search import sample_rows
from vllm_latq.quantize.lattice.tile_waves import largest_target
from vllm_latq.quantize.methods.hptq import GAUSSIAN_BITS
from vllm_latq.quantize.methods.latq import OCTAVE, InputLattice, OutputLattice, Share, feedback_noise
from vllm_latq.quantize.recipe import Recipe

# The model's steps that are tried, in octaves around the one at which an entropy code would take the target.
_TRIED = range(-5, 5)
# Steps of rows and columns, in eighths of an octave around the model's.
_FINEST, _COARSEST = -6 * OCTAVE, 7 * OCTAVE
_ROUNDS = 2
_BISECTIONS = 40
# By how much a leap of the widths can leave the steps too coarse.
_OCTAVES_LEFT = 8.0
# Price of a bit, in units of s^2 / 12.
_PRICE = 2 * math.log(2)
# Weights whose steps are counted at once, so that the intermediates stay small.
_BAND_WEIGHTS = 1 << 20


@dataclass(frozen=True)
class ServedCurve:
    """Bits and loss of one linear, with codes of one width, at some of the model's steps.

    Attributes:
        bits: served bits per weight.
        loss: not bits, but log2 of the loss, in units of step^2 / 12.
        least: of these bits, all but outliers.
    """

    bits: RateCurve
    loss: RateCurve
    least: float

    def cost(self, octaves: float) -> float:
        """Total of loss and bits at a step, given by its log2; in the same units."""
        (finest, _), *_, (coarsest, _) = self.bits.points
        octaves = min(max(octaves, finest), coarsest)
        return 2.0 ** self.loss.bits(octaves) + _PRICE * self.bits.weights * self.bits.bits(octaves)


# Name of a linear -> width -> its curve; the linears of one input.
ServedCurves = Mapping[str, Mapping[int, ServedCurve]]


def served_curves(
    weights: Mapping[str, torch.Tensor],
    inputs: InputLattice,
    outputs: Mapping[str, OutputLattice],
    target_bits: float,
) -> ServedCurves:
    """Bits and losses of the linears of one input, for every width.

    Args:
        weights: name -> [r, c].
        inputs, outputs: their lattices.
        target_bits: of the model: where the steps are.
    """
    samples = {name: sample_rows(weight) for name, weight in weights.items()}
    targets = _targets(weights, inputs, outputs, samples)
    size = max(float(targets.weights.to(torch.float64).square().mean().sqrt()), SMALLEST_SIZE)
    octaves = [math.log2(size) + GAUSSIAN_BITS - target_bits + tried for tried in _TRIED]
    found: dict[str, dict[int, ServedCurve]] = {name: {} for name in weights}
    for width in SUPPORTED_BITS:
        steps = [_fit(targets, octave, width) for octave in octaves]
        start = 0
        for name, weight in weights.items():
            (rows, cols), sampled = weight.shape, samples[name]
            part = slice(start, start + (rows if sampled is None else len(sampled)))
            start = part.stop
            share = rows / (part.stop - part.start)
            least = served_overhead(rows, cols, width) / (rows * cols)
            each = share * USUAL_OUTLIER_BITS[width] / (rows * cols)
            bits = [least + each * slot_words(of_rows[part]) for *_, of_rows in steps]
            squares = [share * float(_squared(row[part]).sum() * _squared(column).sum()) for row, column, _ in steps]
            curves = (bits, [math.log2(square) for square in squares])
            of_bits, of_loss = (RateCurve(rows * cols, tuple(zip(octaves, some, strict=True))) for some in curves)
            found[name][width] = ServedCurve(of_bits, of_loss, least)
    return found


def allocate_served(inputs: Sequence[ServedCurves], stacks: Mapping[str, str], target_bits: float) -> dict[str, Share]:
    """The model's step, and the widths, with which the bits average to the target; layer name -> its share.

    Args:
        inputs: what their linears take.
        stacks: name of a linear -> what it is served as a part of; for those that are part of more than their input's.
        target_bits: served bits per weight, averaged over all weights.

    Raises:
        NumericalError: the narrowest codes take more.
    """
    units: dict[str, dict[str, Mapping[int, ServedCurve]]] = {}
    for linears in inputs:
        leader = next(iter(linears))
        units.setdefault(stacks.get(leader, leader), {}).update(linears)

    narrowest = {name: of[SUPPORTED_BITS[0]] for unit in units.values() for name, of in unit.items()}
    total = sum(curve.bits.weights for curve in narrowest.values())

    def chosen(octaves: float) -> dict[str, tuple[int, RateCurve]]:
        found = {}
        for unit in units.values():
            width = min(SUPPORTED_BITS, key=lambda width: sum(of[width].cost(octaves) for of in unit.values()))
            found.update({name: (width, of[width].bits) for name, of in unit.items()})
        return found

    def average(curves: Mapping[str, tuple[int, RateCurve]], octaves: float) -> float:
        return sum(curve.weights * curve.bits(octaves) for _, curve in curves.values()) / total

    least = sum(curve.bits.weights * curve.least for curve in narrowest.values()) / total
    if least > target_bits:
        expected = f"at least {least:.3f} bits per weight, which codes of {SUPPORTED_BITS[0]} bits take"
        raise NumericalError("target_bits, served", expected, f"{target_bits:g}", "Raise target_bits.")
    low = min(curve.bits.points[0][0] for curve in narrowest.values())
    high = max(curve.bits.points[-1][0] for curve in narrowest.values())
    if average(chosen(high), high) > target_bits:
        # As estimated, at the coarsest steps: damping will have to lower what is fed back. It goes by the step, for
        # which that of an entropy code will do.
        step, left = 2.0 ** (high - _TRIED[-1]), target_bits - least
        return {name: Share(step, curve.least + left, SUPPORTED_BITS[0]) for name, curve in narrowest.items()}
    for _ in range(_BISECTIONS):
        middle = (low + high) / 2
        low, high = (middle, high) if average(chosen(middle), middle) > target_bits else (low, middle)
    # Where the widths change the bits leap: what that leaves goes into finer steps.
    curves, finest = chosen(high), high - _OCTAVES_LEFT
    for _ in range(_BISECTIONS):
        middle = (finest + high) / 2
        finest, high = (middle, high) if average(curves, middle) > target_bits else (finest, middle)
    return {name: Share(2.0**high, curve.bits(high), width) for name, (width, curve) in curves.items()}


def served_lattices(
    weights: Mapping[str, torch.Tensor],
    inputs: InputLattice,
    outputs: Mapping[str, OutputLattice],
    share: Share,
) -> tuple[InputLattice, dict[str, OutputLattice]]:
    """The lattices of one input's linears with exponents that make use of codes of `share.width` at `share.step`."""
    assert share.width is not None
    targets = _targets(weights, inputs, outputs, dict.fromkeys(weights))
    rows, cols, _ = _fit(targets, math.log2(share.step), share.width)
    of_linears = rows.split([len(weight) for weight in weights.values()])
    fitted = {name: _moved(outputs[name], some) for name, some in zip(weights, of_linears, strict=True)}
    return _moved(inputs, cols), fitted


Side = TypeVar("Side", InputLattice, OutputLattice)


def _moved(side: Side, eighths: torch.Tensor) -> Side:
    """One side of a lattice with other steps: so many eighths of an octave coarser."""
    wanted = side.exponents.to(torch.int64) + eighths.to(side.exponents.device)
    middle = int(wanted.median())
    return replace(
        side, exponents=(wanted - middle).clamp(-128, 127).to(torch.int8), level=side.level - middle / OCTAVE
    )


@dataclass(frozen=True)
class _Targets:
    """The weights to round, in units in which the squared error of each weight is a loss.

    Attributes:
        weights: float32 [all r, c].
        feedback: what others' residuals add where their mean square is 1, float32 [all r, c].
    """

    weights: torch.Tensor
    feedback: torch.Tensor

    def limits(self, width: int, residuals: float) -> torch.Tensor:
        """The step below which each overflows the codes of a width where others' residuals are so large, in eighths of
        an octave, float32 [all r, c]."""
        targets = torch.add(self.weights, self.feedback, alpha=residuals)
        return targets.abs_().div_(largest_target(width)).log2_().mul_(OCTAVE)


def _targets(
    weights: Mapping[str, torch.Tensor],
    inputs: InputLattice,
    outputs: Mapping[str, OutputLattice],
    samples: Mapping[str, torch.Tensor | None],
) -> _Targets:
    """Targets of the sampled rows of the linears of one input (None: of all rows)."""
    columns, column_spread = inputs.weights.sqrt(), inputs.factor.spread
    scaled, feedback = [], []
    for name, weight in weights.items():
        rows = slice(None) if samples[name] is None else samples[name]
        factors, spread = (of_rows[rows].to(weight.device) for of_rows in (outputs[name].weights, outputs[name].spread))
        scaled.append(weight[rows].to(torch.float32) * factors.sqrt().to(weight)[:, None] * columns.to(weight))
        feedback.append(feedback_noise(spread, column_spread))
    return _Targets(torch.cat(scaled), torch.cat(feedback))


def _fit(targets: _Targets, octaves: float, width: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Steps of rows and columns with the least cost.

    Args:
        targets: [r, c].
        octaves: log2 of the model's step.
        width: of the codes.

    Returns:
        int64 [r], int64 [c]: eighths of an octave coarser than that step; int64 [r]: weights that overflow.
    """
    model = OCTAVE * octaves

    def limits(rows: torch.Tensor, cols: torch.Tensor) -> torch.Tensor:
        # Residuals are uniform in their steps.
        mean = float(_squared(rows).mean() * _squared(cols).mean()) / 12
        return targets.limits(width, 2.0**octaves * math.sqrt(mean))

    cols = torch.zeros(targets.weights.shape[1], dtype=torch.int64, device=targets.weights.device)
    # The feedback depends on the steps: first on steps of rows that suit the weights alone.
    each = USUAL_OUTLIER_BITS[width]
    rows, _ = _best(_counts_of_rows(targets.limits(width, 0.0), cols + model), cols, each)
    rows, overflow = _best(_counts_of_rows(limits(rows, cols), cols + model), cols, each)
    for _ in range(_ROUNDS):
        cols, _ = _best(_counts_of_columns(limits(rows, cols), rows + model), rows, each)
        rows, overflow = _best(_counts_of_rows(limits(rows, cols), cols + model), cols, each)
    return rows, cols, overflow


def _best(counts: torch.Tensor, others: torch.Tensor, each: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the cheapest step of each row of counts [n, steps + 1], int64 [n], and how many weights overflow there.

    An overflowing weight costs `each` bits. The steps of the other side are `others`, int64 [m].
    """
    steps = torch.arange(_FINEST, _COARSEST + 1, device=counts.device)
    overflow = len(others) - counts.cumsum(1)[:, :-1]
    cost = _squared(steps) * _squared(others).sum() + _PRICE * each * overflow
    best = cost.argmin(1)
    return steps[best], overflow.gather(1, best[:, None])[:, 0]


def _counts_of_rows(limits: torch.Tensor, cols: torch.Tensor) -> torch.Tensor:
    """How many weights of each row begin to fit at each step, and at none, int64 [r, steps + 1]."""
    return torch.cat([_counts(band - cols) for band in limits.split(_band(limits))])


def _counts_of_columns(limits: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """The same of each column, [c, steps + 1]."""
    size = _band(limits)
    bands = zip(limits.split(size), rows.split(size), strict=True)
    return reduce(torch.add, (_counts((band - of_rows[:, None]).T) for band, of_rows in bands))


def _counts(limits: torch.Tensor) -> torch.Tensor:
    steps = _COARSEST - _FINEST + 1
    index = (limits.ceil() - _FINEST).clamp_(0, steps).to(torch.int64)
    index += torch.arange(len(index), device=index.device)[:, None] * (steps + 1)
    return torch.bincount(index.flatten(), minlength=len(index) * (steps + 1)).view(len(index), -1)


def _band(limits: torch.Tensor) -> int:
    return max(1, _BAND_WEIGHTS // limits.shape[1])


def _squared(eighths: torch.Tensor) -> torch.Tensor:
    """The squares of steps, float64."""
    return torch.exp2(2 / OCTAVE * eighths.to(torch.float64))


def check_target_bits(linears: Iterable[nn.Linear], recipe: Recipe) -> None:
    """Raise ConfigError if the narrowest codes of the linears take more served bits than the recipe asks for."""
    if recipe.target_bits is None or recipe.count != "served":
        return
    shapes = [(linear.out_features, linear.in_features) for linear in linears]
    total = sum(rows * cols for rows, cols in shapes)
    least = sum(served_overhead(rows, cols, SUPPORTED_BITS[0]) for rows, cols in shapes) / total
    if recipe.target_bits <= least:
        expected = f"more than {least:.3f} served bits per weight, which codes of 2 bits and their scales take"
        hint = "Of stored bits, fewer can do: leave out count."
        raise ConfigError("recipe.target_bits", expected, f"{recipe.target_bits:g}", hint)
