"""LATQ on group scales: nearest plane on the lattice of G (x) H, on integers of 2, 3, 4 or 8 bits.

Scales are fitted in PASSES. The first pass has the scales that minimise the cubes of the errors of the weights
themselves. Each further pass has those that minimise the squares of the errors of the targets that the pass before met,
which spread wider than the weights: errors are fed back to them. The pass with the smallest loss is kept.

The width of a linear follows from the loss: `width_costs` estimates what each width costs, and
`allocation.widths` chooses with one price of a bit for the model.

The bound of the loss is Babai's, a quarter of the squared scales weighted by D_G and D_H, half of it, for every weight
inside its grid. A weight that was clipped counts with its actual cost.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch

from vllm_latq.coding.packing import WORD_BITS, unpack_codes
from vllm_latq.errors import naming
from vllm_latq.format.encodings.packed import PackedWeight
from vllm_latq.format.encodings.registry import tensor_specs
from vllm_latq.format.scheme import SUPPORTED_BITS, WHOLE_ROW, LayerScheme
from vllm_latq.quantize.lattice.group_plane import group_plane
from vllm_latq.quantize.lattice.outliers import Grid, past_an_end
from vllm_latq.quantize.lattice.scales import group_scales
from vllm_latq.quantize.methods.lattices import InputLattice, OutputLattice

# On the bundled model at 3.1 bits the KL is 1.45e-3 after one pass, 1.22e-3 after two, 1.18e-3 after three.
PASSES = 2
# Power of the errors that the scales of the first pass minimise: with 2 the KL of one pass is 1.82e-3.
FIRST_POWER = 3


@dataclass(frozen=True)
class WidthCosts:
    """Costs of a linear by the width of its codes.

    Attributes:
        losses: width -> expected loss, nats per token.
        bits: width -> bits, see `linear_bits`.
        weights: number of weights.
    """

    losses: Mapping[int, float]
    bits: Mapping[int, float]
    weights: int


@dataclass(frozen=True)
class GroupResult:
    """Quantized linear.

    Attributes:
        weight: as it is stored.
        dequantized: float32 [r, c].
        loss_bound: limit of the loss, nats per token.
    """

    weight: PackedWeight
    dequantized: torch.Tensor
    loss_bound: float


def width_costs(
    weights: Mapping[str, torch.Tensor], inputs: InputLattice, outputs: Mapping[str, OutputLattice], group_size: int
) -> dict[str, WidthCosts]:
    """Return the costs of the linears of one input, name -> [r, c].

    The expected loss is that of rounding each weight to nearest, if H and G were the diagonals of their decompositions.
    """
    costs = {}
    for name, weight in weights.items():
        rows, columns = outputs[name].weights, inputs.factor.importance
        losses, bits = {}, {}
        for width in SUPPORTED_BITS:
            grid = Grid.of_bits(width)
            scales = group_scales(weight, grid, group_size, "signed", importance=columns)
            steps = _per_weight(scales, weight)
            errors = (weight / steps).round_().clamp_(grid.low, grid.high).mul_(steps).sub_(weight).square_()
            losses[width] = float(rows @ (errors.double() @ columns)) / 2
            bits[width] = linear_bits(LayerScheme("packed", width, group_size), *weight.shape)
        costs[name] = WidthCosts(losses, bits, weight.numel())
    return costs


def linear_bits(scheme: LayerScheme, rows: int, cols: int) -> float:
    """Return the bits of a linear [rows, cols], in files or in memory while it is served, whichever are more.

    The scales of whole rows are served in 32 bits.
    """
    bits = {suffix: spec.bits() for suffix, spec in tensor_specs(scheme, rows, cols).items()}
    scales = WORD_BITS * rows if scheme.group_size == WHOLE_ROW else bits["scales"]
    return max(sum(bits.values()), bits["qweight"] + scales)


def latq_on_groups(
    targets: Mapping[str, torch.Tensor],
    inputs: InputLattice,
    outputs: Mapping[str, OutputLattice],
    schemes: Mapping[str, LayerScheme],
) -> Iterator[tuple[str, GroupResult]]:
    """Round the linears of one input; yields name and result.

    Args:
        targets: name -> float32 [r, c].
        inputs, outputs: their lattices.
        schemes: name -> width and group size.
    """
    for name, target in targets.items():
        with naming(name):
            yield name, _round(target, inputs, outputs[name], schemes[name])


def _round(target: torch.Tensor, inputs: InputLattice, outputs: OutputLattice, scheme: LayerScheme) -> GroupResult:
    """Round one linear in PASSES, and return the best."""
    bits, group_size = scheme.code_layout()
    grid, columns = Grid.of_bits(bits), inputs.factor
    scales = group_scales(target, grid, group_size, power=FIRST_POWER)
    best: tuple[float, torch.Tensor, torch.Tensor] | None = None
    for done in range(PASSES):
        integers, met = _pass(target, inputs, outputs, scales, grid)
        squares = (met - integers * _per_weight(scales, target)).double().square_()
        loss = float(outputs.weights @ (squares @ columns.importance))
        if best is None or loss < best[0]:
            best = loss, integers, scales
        if done + 1 < PASSES:
            scales = group_scales(met, grid, group_size, "signed", importance=columns.importance)
    assert best is not None
    weight = PackedWeight.from_integers(best[1], best[2], bits, group_size)
    dequantized = best[1] * _per_weight(best[2], target)
    return GroupResult(weight, dequantized, loss_bound(weight, dequantized - target, inputs, outputs))


def _pass(
    target: torch.Tensor, inputs: InputLattice, outputs: OutputLattice, scales: torch.Tensor, grid: Grid
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the integers of a pass, int32 [r, c], and the targets that were rounded, float32 [r, c]."""
    steps, order = _per_weight(scales, target), inputs.factor.order
    integers, met = torch.empty_like(target, dtype=torch.int32), torch.empty_like(target)
    start = 0
    for factor in outputs.factors:
        rows = slice(start, start + len(factor.order))
        found = group_plane(target[rows][:, order], factor, inputs.factor, steps[rows][:, order], grid)
        integers[rows, order], met[rows, order] = found.integers, found.targets
        start = rows.stop
    return integers, met


def loss_bound(weight: PackedWeight, moved: torch.Tensor, inputs: InputLattice, outputs: OutputLattice) -> float:
    """Return the limit of the loss of a stored weight, nats per token.

    Args:
        weight: as stored.
        moved: [r, c], the weight less its target.
        inputs, outputs: its lattice.
    """
    assert weight.scales is not None
    cells = (_per_weight(weight.scales, moved).double() / 2).square_()
    residuals = _residuals(moved, inputs, outputs)
    codes = unpack_codes(weight.qweight, weight.bits, weight.cols).to(moved.device)
    clipped = past_an_end(codes, weight.bits, weight.scales, residuals)
    squares = torch.where(clipped, torch.maximum(residuals.square_(), cells), cells)
    return float(outputs.weights @ (squares @ inputs.factor.importance)) / 2


def _residuals(moved: torch.Tensor, inputs: InputLattice, outputs: OutputLattice) -> torch.Tensor:
    """Return V_G^T (Q - W) V_H, the rounded weights less their targets, float64 [r, c]."""
    order, start = inputs.factor.order, 0
    residuals = torch.empty(moved.shape, dtype=torch.float64, device=moved.device)
    right = inputs.factor.unit_triangle()
    for factor in outputs.factors:
        rows = slice(start, start + len(factor.order))
        residuals[rows, order] = factor.unit_triangle().T @ moved[rows][:, order].double() @ right
        start = rows.stop
    return residuals


def _per_weight(scales: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Return the scale of each weight [r, c], float32, from those of groups [r, G]."""
    return scales.to(weight.device, torch.float32).repeat_interleave(weight.shape[1] // scales.shape[1], 1)
