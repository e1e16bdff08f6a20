"""LATQ: nearest plane on the lattice of G (x) H, one step for the whole model, rANS-coded integers.

    W[i, j] = s * 2^(row_exponents[i] / 8) * 2^(column_exponents[j] / 8) * z[i, j]

(z[i, j] + 1/2 where bits are counted while the model is served).

The exponents are those of 1 / sqrt(DG_i) and 1 / sqrt(DH_j) (water-filling; the column scales of WaterSIC, 2026), so
every weight of every layer adds the same s^2 / 12 to the loss of the model, in units where s is the one number that the
whole model shares. That is the optimum at a given sum of entropies: equal slope everywhere (reverse water-filling).

Linears that read one input (q/k/v, gate/up) share their column exponents: when they are served as one matrix, its input
is scaled once.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch

from vllm_latq.coding.rans.encoder import encoded_bits
from vllm_latq.errors import LAYER, NumericalError, naming
from vllm_latq.format.encodings.rans import RansWeight, octave_eighths
from vllm_latq.format.encodings.registry import tensor_specs
from vllm_latq.format.scheme import LayerScheme
from vllm_latq.format.served_size import served_bits
from vllm_latq.format.tensors import SHAPE
from vllm_latq.quantize.lattice.factor import Factor, factorize
from vllm_latq.quantize.lattice.grams import LayerStatistics
from vllm_latq.quantize.lattice.search import Guess, Outcome, search_target
from vllm_latq.quantize.lattice.targets import Drift, corrected_target
from vllm_latq.quantize.lattice.two_sided_plane import TwoSided, two_sided_plane
from vllm_latq.quantize.methods.hptq import USUAL_SLOPE
from vllm_latq.quantize.recipe import Recipe

# G is estimated from one sampled label per token and only holds near the original weights: damped more than H is.
# KL on the models measured is flat from 0.03 to 0.3.
OUTPUT_DAMPING = 0.1
# Mean squared gradient of a block of outputs, relative to the layer's largest, below which it is raised to that.
SMALLEST_GRADIENT = 1e-4
# Rate-aware damping replaces the usual 1 %, but never falls below this, which keeps float32 safe.
LEAST_DAMPING = 1e-4
# With more damping hardly any error is fed back; weights that are all zero would ask for an infinite damping.
MOST_DAMPING = 1e6
OCTAVE = 8  # exponents count eighths of an octave: rounding them costs 0.001 bits
BITS_TOLERANCE = 0.005
MAX_PROBES = 12
_OCTAVES_AROUND = 8.0
# Range of the search towards coarser steps for served bits: coarser steps lose more than damping does.
_OCTAVES_COARSER = 4.0
_NOISE_SEED = 271828


@dataclass(frozen=True)
class OutputLattice:
    """Lattice of the rows of a linear.

    Attributes:
        factors: of the diagonal blocks of G.
        exponents: int8 [r].
        level: log2 of the geometric mean of sqrt(DG_i), which s is divided by.
    """

    factors: list[Factor]
    exponents: torch.Tensor
    level: float

    @property
    def weights(self) -> torch.Tensor:
        """DG_i that the rounded exponents stand for, float64 [r], unless they were fitted to served codes."""
        return _squared_weights(self.exponents, self.level)

    @property
    def spread(self) -> torch.Tensor:
        """`Factor.spread` of the rows, float64 [r]."""
        return torch.cat([factor.spread for factor in self.factors])

    @property
    def ridge(self) -> float:
        """Lower bound of the smallest eigenvalue of the damped G."""
        return min(factor.ridge for factor in self.factors)


@dataclass(frozen=True)
class InputLattice:
    """Lattice of the columns, shared by the linears that read one input.

    Attributes:
        factor: of H.
        exponents: int8 [c].
        level: log2 of the geometric mean of sqrt(DH_j), which s is divided by.
    """

    factor: Factor
    exponents: torch.Tensor
    level: float

    @property
    def weights(self) -> torch.Tensor:
        """DH_j that the rounded exponents stand for, float64 [c], unless they were fitted to served codes."""
        return _squared_weights(self.exponents, self.level)


@dataclass(frozen=True)
class Share:
    """Share of the model's bits that a layer gets.

    Attributes:
        step: of its lattice, in sqrt(nats) per token; sets the damping, and starts the search for a scale.
        bits: per weight, to be met: stored bits, or with a width served bits.
        width: of the served codes; None where stored bits are counted.
    """

    step: float
    bits: float
    width: int | None = None

    def spent(self, integers: torch.Tensor) -> float:
        """Return the bits per weight of int32 [r, c], everything counted."""
        if self.width is None:
            return stored_bits(integers)
        return served_bits(integers, self.width) / integers.numel()


@dataclass(frozen=True)
class LatqResult:
    """Quantized layer.

    Attributes:
        weight: as it is stored.
        rounding: its integers, loss and bound.
        bits: stored bits per weight, everything counted.
        spent: bits per weight, as the share counts them; more than the share where no scale meets it.
        note: empty, or the bits spent if they do not meet the share.
    """

    weight: RansWeight
    rounding: TwoSided
    bits: float
    spent: float
    note: str

    @property
    def dequantized(self) -> torch.Tensor:
        """Decoded weight, bit for bit, float32 [r, c] on the device it was rounded on; nothing is decoded for it."""
        z = self.rounding.z
        rows, cols = self.weight.row_scales.to(z.device), self.weight.column_scales.to(z.device)
        return (z.to(torch.float32) + 0.5 * self.weight.midrise) * rows[:, None] * cols


def output_lattice(statistics: LayerStatistics, order: str, without: Sequence[str], where: str) -> OutputLattice:
    """Factorise G, block by block, and derive the row exponents.

    Args:
        statistics: of the linear.
        order: one of ORDERS.
        without: parts that are switched off.
        where: name of the linear, for errors.

    Raises:
        NumericalError: the loss does not depend on the layer at all.
    """
    with naming(where):
        return _output_lattice(statistics, order, without)


def _output_lattice(statistics: LayerStatistics, order: str, without: Sequence[str]) -> OutputLattice:
    grams = [gram.diagonal().diag() if "feedback" in without else gram.clone() for gram in statistics.outputs]
    if not any(float(gram.diagonal().max()) > 0 for gram in grams):
        hint = f"The loss does not depend on this layer: leave it out, with --ignore {LAYER}"
        raise NumericalError("gradients", "gradients of the loss", "none but zeros", hint)
    # A block of outputs that the loss hardly depends on still gets finite steps.
    floor = SMALLEST_GRADIENT * max(float(gram.diagonal().mean()) for gram in grams)
    for gram in grams:
        gram.diagonal().add_(max(0.0, floor - float(gram.diagonal().mean())))
    factors = [factorize(gram, order, OUTPUT_DAMPING) for gram in grams]
    diagonal = torch.cat([factor.importance for factor in factors])
    exponents, level = _exponents(diagonal, "rows" in without)
    return OutputLattice(factors, exponents, level)


def input_lattice(
    statistics: LayerStatistics, order: str, damping: float, without: Sequence[str], where: str
) -> InputLattice:
    """Factorise H with a relative damping, and derive the column exponents; arguments as for `output_lattice`."""
    with naming(where):
        factor = factorize(statistics.inputs, order, damping)
    exponents, level = _exponents(factor.importance, "columns" in without)
    return InputLattice(factor, exponents, level)


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


def latq(
    weight: torch.Tensor,
    inputs: InputLattice,
    outputs: OutputLattice,
    share: Share,
    without: Sequence[str] = (),
    where: str = "",
) -> LatqResult:
    """Round with the finest scale whose bits lie in [share.bits - 0.005, share.bits], or else the nearest found.

    Args:
        weight: [r, c].
        inputs, outputs: its lattice.
        share: its share of the model's bits.
        without: parts that are switched off.
        where: name of the layer, for errors.

    Raises:
        NumericalError: not even the coarsest scale meets a share of stored bits.
    """
    # The factors that are stored, so that the steps rounded with are the steps read back.
    rows, cols = (octave_eighths(side.exponents).to(weight.device) for side in (outputs, inputs))
    plane = partial(
        two_sided_plane,
        weight,
        inputs.factor,
        outputs.factors,
        col_steps=cols,
        feedback="feedback" not in without,
        width=share.width,
    )
    start = math.log2(share.step) - inputs.level - outputs.level
    with naming(where):
        found = _search(lambda scale: plane(row_steps=rows * scale.to(rows.device)), start, share)
    scale, rounding = found.best.payload
    # A copy: a file cannot hold one tensor under the names of several linears.
    exponents = (outputs.exponents, inputs.exponents.clone())
    stored = RansWeight.from_integers(rounding.z, scale, *exponents, midrise=share.width is not None)
    bits = stored.storage_bits() / weight.numel()
    note = "" if found.met else f"{found.best.value:.4f} bits per weight, the nearest found to {share.bits:g}"
    return LatqResult(stored, rounding, bits, found.best.value, note)


def _search(
    plane: Callable[[torch.Tensor], TwoSided], start: float, share: Share
) -> Outcome[tuple[torch.Tensor, TwoSided]]:
    """Search for the scale, float32 [1], at which the rounding of `plane` spends the share.

    Where served bits are counted no scale may be feasible: on a mid-rise grid errors, even of zeros, grow with the
    steps, and so do the errors fed back. On an ill-conditioned lattice some targets then overflow at any scale.

    Raises:
        NumericalError: not even the coarsest scale meets a share of stored bits.
    """

    def probe(octaves: float) -> tuple[float, tuple[torch.Tensor, TwoSided]]:
        scale = torch.tensor([2.0**octaves], dtype=torch.float32)
        rounding = plane(scale)
        return share.spent(rounding.z), (scale, rounding)

    coarser = _OCTAVES_AROUND if share.width is None else _OCTAVES_COARSER
    found: Outcome[tuple[torch.Tensor, TwoSided]] = search_target(
        probe,
        target=share.bits,
        tolerance=BITS_TOLERANCE,
        guess=Guess(start, USUAL_SLOPE, lower=start - _OCTAVES_AROUND, upper=start + coarser),
        max_probes=MAX_PROBES,
    )
    if not found.feasible and share.width is None:
        raise NumericalError(
            "target_bits",
            f"at most {share.bits:g} bits per weight",
            f"{found.best.value:.4f}, the fewest found",
            "What is stored beside the integers weighs on small layers: raise target_bits, or ignore this layer.",
        )
    return found


def feedback_noise(rows: torch.Tensor, cols: torch.Tensor) -> torch.Tensor:
    """Draw noise in place of the errors that are fed back, float32 [r, c], for estimates before anything is rounded.

    Normal, as large as residuals of mean square 1 would make the errors, in steps that make all residuals cost alike.

    Args:
        rows, cols: `Factor.spread` of G and H, [r] and [c].
    """
    # Drawn on the CPU, where every machine draws the same, by a seed that no random weight is likely to share.
    generator = torch.Generator().manual_seed(_NOISE_SEED)
    noise = torch.randn((len(rows), len(cols)), generator=generator).to(rows.device)
    # The spread of both sides is their product; an entry's own residual is not fed back to it.
    deviation = torch.outer(rows.to(torch.float32), cols.to(torch.float32)).sub_(1).clamp_(min=0).sqrt_()
    return noise.mul_(deviation)


def rounded_bits(
    weight: torch.Tensor, inputs: InputLattice, outputs: OutputLattice, step: float, feedback: torch.Tensor
) -> float:
    """Estimate the stored bits per weight of a linear rounded with these steps, with noise in place of feedback.

    Args:
        weight: [r, c].
        inputs, outputs: its lattice.
        step: of the model.
        feedback: `feedback_noise`, [r, c].
    """
    scale = 2.0 ** (math.log2(step) - inputs.level - outputs.level)
    rows, cols = (octave_eighths(side.exponents).to(weight.device) for side in (outputs, inputs))
    steps = weight.to(torch.float32) / (scale * rows)[:, None] / cols
    # Residuals are nearly uniform, except where steps are coarser than weights.
    residuals = (steps - steps.round()).square_().mean().sqrt()
    return stored_bits(steps.addcmul_(feedback, residuals).round_().to(torch.int32))


def stored_bits(integers: torch.Tensor) -> float:
    """Return the stored bits per weight of int32 [r, c]: stream, exponents, scale and shape."""
    specs = tensor_specs(LayerScheme("rans"), *integers.shape)
    beside = sum(specs[name].bits() for name in (SHAPE, "scale", "row_exponents", "column_exponents"))
    return (encoded_bits(integers) + beside) / integers.numel()


def _squared_weights(exponents: torch.Tensor, level: float) -> torch.Tensor:
    return torch.exp2(2 * (level - exponents.to(torch.float64) / OCTAVE))


def _exponents(diagonal: torch.Tensor, flat: bool) -> tuple[torch.Tensor, float]:
    """Return log2 of 1 / sqrt(D) in eighths of an octave, centred, int8; and log2 of sqrt(D)'s mean.

    level is chosen so that the geometric mean of 2^(exponents / 8 - level) * sqrt(D) is 1; without exponents, so that
    the root mean square is 1, with which a single step minimises the bound.
    """
    if flat:
        return torch.zeros_like(diagonal, dtype=torch.int8), 0.5 * math.log2(float(diagonal.mean()))
    wanted = -0.5 * torch.log2(diagonal)
    centred = OCTAVE * (wanted - wanted.median())
    exponents = centred.round().clamp(-128, 127).to(torch.int8)
    return exponents, float((exponents.to(torch.float64) / OCTAVE - wanted).mean())


@dataclass(frozen=True)
class Target:
    """Target of the rounding of a linear.

    Attributes:
        weight: of the linear, float32 [r, c].
        corrected: the matrix that is rounded, float32 [r, c]; the weight itself unless targets are corrected.
        drift: that the matrix is corrected for, means over tokens.
    """

    weight: torch.Tensor
    corrected: torch.Tensor
    drift: Drift | None = None


def targeted(weight: torch.Tensor, inputs: InputLattice, drift: Drift | None, recipe: Recipe) -> Target:
    """Return the target of a linear, float32 [r, c], given the lattice and the drift of its input."""
    corrected = weight if drift is None else corrected_target(weight, inputs.factor, drift, recipe.correction)
    return Target(weight, corrected, drift)
