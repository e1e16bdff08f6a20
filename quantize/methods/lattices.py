"""Lattices of the linears of one input: block factors of G for the outputs, and of H for the input that they share.

Both grids of latq, trellis and group, round on them.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch

from vllm_latq.coding.trellis.code import TILE
from vllm_latq.coding.trellis.layout import column_order, tiles
from vllm_latq.errors import LAYER, NumericalError, naming
from vllm_latq.quantize.lattice.factor import Factor, factorize
from vllm_latq.quantize.lattice.grams import LayerStatistics
from vllm_latq.quantize.lattice.trellis_plane import BlockFactor, block_factor

# G is estimated from one sampled label per token and only holds near the original weights: damped more than H is.
# KL on the models measured is flat from 0.03 to 0.3.
OUTPUT_DAMPING = 0.1
# Mean squared gradient of a block of outputs, relative to the layer's largest, below which it is raised to that.
SMALLEST_GRADIENT = 1e-4
# Rate-aware damping replaces the usual 1 %, but never falls below this, which keeps float32 safe.
LEAST_DAMPING = 1e-4
# With more damping hardly any error is fed back; weights that are all zero would ask for an infinite damping.
MOST_DAMPING = 1e6
# Importance counts quarters of an octave of the diagonal of H.
_IMPORTANCE_STEPS = 4
# Least number that a logarithm is taken of.
SMALLEST = 1e-30


@dataclass(frozen=True)
class OutputLattice:
    """Lattice of the rows of a linear, in their own order.

    Attributes:
        factors: of the diagonal blocks of G.
    """

    factors: list[Factor]

    @property
    def weights(self) -> torch.Tensor:
        """Diagonal of D_G, float64 [r]."""
        return torch.cat([factor.diagonal for factor in self.factors])

    @cached_property
    def blocks(self) -> list[BlockFactor]:
        """Block form of the factors, each padded to whole tiles."""
        return [block_factor(factor, TILE * tiles(len(factor.order), 1)[0]) for factor in self.factors]

    @property
    def ridge(self) -> float:
        """Lower bound of the smallest eigenvalue of the damped G."""
        return min(factor.ridge for factor in self.factors)


@dataclass(frozen=True)
class InputLattice:
    """Lattice of the columns, shared by the linears that read one input.

    Attributes:
        factor: of H, in the order of `importance`.
        importance: int8 [c].
    """

    factor: Factor
    importance: torch.Tensor

    @cached_property
    def blocks(self) -> BlockFactor:
        """Block form of the factor, padded to whole tiles."""
        return block_factor(self.factor, TILE * tiles(1, len(self.importance))[1])


def output_lattice(statistics: LayerStatistics, where: str) -> OutputLattice:
    """Factorise G, block by block; `where` names the linear in errors.

    Raises:
        NumericalError: the loss does not depend on the layer at all.
    """
    with naming(where):
        grams = [gram.clone() for gram in statistics.outputs]
        if not any(float(gram.diagonal().max()) > 0 for gram in grams):
            hint = f"The loss does not depend on this layer: leave it out, with --ignore {LAYER}"
            raise NumericalError("gradients", "gradients of the loss", "none but zeros", hint)
        # A block of outputs that the loss hardly depends on still gets finite scales.
        floor = SMALLEST_GRADIENT * max(float(gram.diagonal().mean()) for gram in grams)
        for gram in grams:
            gram.diagonal().add_(max(0.0, floor - float(gram.diagonal().mean())))
        return OutputLattice([factorize(gram, "natural", OUTPUT_DAMPING) for gram in grams])


def input_lattice(statistics: LayerStatistics, damping: float, where: str) -> InputLattice:
    """Factorise H with a relative damping, columns by falling diagonal; arguments as for `output_lattice`."""
    with naming(where):
        octaves = statistics.inputs.diagonal().double().clamp(min=SMALLEST).log2()
        steps = _IMPORTANCE_STEPS * (octaves - octaves.median())
        importance = steps.round().clamp(-128, 127).to(torch.int8)
        return InputLattice(factorize(statistics.inputs, column_order(importance), damping), importance)


def rate_aware_damping(
    step: float, weights: Sequence[torch.Tensor], gram: torch.Tensor, outputs: Sequence[OutputLattice]
) -> float:
    """Return a relative damping of H that charges for bits: the coding cost of a weight grows with its square.

    A Gaussian-coded weight takes q^2 / (2 ln2 var) bits and a bit is worth 2 ln2 step^2 / 12 of distortion, so the
    price of q is (step^2 / 12) q^2 / var, which is a ridge on H once the rows are scaled by sqrt(DG). One value for all
    linears of the input.

    Args:
        step: the model's s.
        weights: of the linears, [r, c].
        gram: H, [c, c], to relate the ridge to it.
        outputs: of the linears.
    """
    energy, count = 0.0, 0
    for weight, output in zip(weights, outputs, strict=True):
        energy += float(output.weights @ weight.to(torch.float64).square().sum(1))
        count += weight.numel()
    ridge = step**2 / 12 * count / max(energy, 1e-300)
    return min(max(ridge / float(gram.diagonal().to(torch.float64).mean()), LEAST_DAMPING), MOST_DAMPING)
