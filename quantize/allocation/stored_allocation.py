"""One step size for the whole model: how many bits each layer gets.

Every weight of every layer adds step^2 / 12 to the model's loss (see `latq`), so the best allocation of a total of bits
is the one that a common step leads to. How many bits a layer takes at a step is estimated by rounding its weights, with
noise in place of feedback, at a few steps around the expected one; the layer's own search then meets its share exactly.

Invariant: the shares of the layers average to the target, weighted by their sizes.
"""

import math
from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from vllm_latq.quantize.lattice.search import sample_rows
from vllm_latq.quantize.methods.hptq import GAUSSIAN_BITS
from vllm_latq.quantize.methods.latq import InputLattice, OutputLattice, Share, feedback_noise, rounded_bits

_OCTAVES = (-3.0, -2.0, -1.25, -0.5, 0.25, 1.0, 2.0, 3.0)
_BISECTIONS = 60
# Root mean square of weights in units of the loss, for those that are all zero: float32 still divides by such a step.
SMALLEST_SIZE = 1e-30


@dataclass(frozen=True)
class RateCurve:
    """Bits per weight of one layer at some steps.

    Attributes:
        weights: number of weights.
        points: (log2 of the step, bits per weight), steps rising, bits falling.
    """

    weights: int
    points: tuple[tuple[float, float], ...]

    def bits(self, octaves: float) -> float:
        """Interpolated; beyond the ends a bit per octave on the fine side, flat on the coarse one."""
        first, last = self.points[0], self.points[-1]
        if octaves <= first[0]:
            return first[1] + first[0] - octaves
        if octaves >= last[0]:
            return last[1]
        index = bisect_left(self.points, (octaves,))
        left, right = self.points[index - 1], self.points[index]
        share = (octaves - left[0]) / (right[0] - left[0])
        return left[1] + share * (right[1] - left[1])


def rate_curve(weight: torch.Tensor, inputs: InputLattice, outputs: OutputLattice, target_bits: float) -> RateCurve:
    """Bits of a layer [r, c] at steps around the one at which Gaussian weights take `target_bits`."""
    energy = outputs.weights @ weight.to(torch.float64).square() @ inputs.weights / weight.numel()
    middle = 0.5 * math.log2(max(float(energy), SMALLEST_SIZE**2)) + GAUSSIAN_BITS - target_bits
    count, chosen, spread = weight.numel(), sample_rows(weight), outputs.spread
    if chosen is not None:
        weight, spread = weight[chosen], spread[chosen]
        outputs = OutputLattice([], outputs.exponents[chosen], outputs.level)
    feedback = feedback_noise(spread, inputs.factor.spread)
    octaves = [middle + octave for octave in _OCTAVES]
    points = [(octave, rounded_bits(weight, inputs, outputs, 2.0**octave, feedback)) for octave in octaves]
    return RateCurve(count, tuple(points))


def allocate(curves: Mapping[str, RateCurve], target_bits: float, shared_step: bool = True) -> dict[str, Share]:
    """Find the step at which the layers' bits average to the target; layer name -> its share.

    Args:
        curves: layer name -> its curve.
        target_bits: stored bits per weight, averaged over all weights.
        shared_step: False gives every layer the target itself; the step is then only where searches start.
    """
    total = sum(curve.weights for curve in curves.values())

    def average(octaves: float) -> float:
        return sum(curve.weights * curve.bits(octaves) for curve in curves.values()) / total

    low = min(curve.points[0][0] for curve in curves.values()) - 16
    high = max(curve.points[-1][0] for curve in curves.values())
    for _ in range(_BISECTIONS):
        middle = (low + high) / 2
        low, high = (middle, high) if average(middle) > target_bits else (low, middle)
    if not shared_step:
        return dict.fromkeys(curves, Share(2.0**high, target_bits))
    # Where curves are flat the bisection cannot meet the target; spread what is left.
    slack = target_bits - average(high)
    return {name: Share(2.0**high, curve.bits(high) + slack) for name, curve in curves.items()}
