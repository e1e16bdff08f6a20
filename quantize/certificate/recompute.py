"""Recompute a report on stored weights from the original model, the calibration text and the recipe alone.

    layer_by_layer  the text passes through the blocks as in a run, with the stored weights in place of a quantizer:
                    the Hessian of each input, its factor, and from them the errors and the worst case
    whole_model     for latq: statistics of the original model as in runs/whole_model.py; from them the model's step, by
                    allocating the bits anew, the damping that this step asks for, both lattices, and from them the
                    loss, the errors and their worst cases

Invariant: of the checkpoint only weights and recipe are read. Of its report one thing counts: how often the damping of
an input was quadrupled for its share of served bits. A worst case holds whatever the answer, but is larger for more.
"""

import math
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from torch import nn

from vllm_latq.coding.packing import unpack_codes
from vllm_latq.errors import naming
from vllm_latq.format.encodings.huffman import HuffmanWeight
from vllm_latq.format.encodings.packed import PackedWeight
from vllm_latq.format.encodings.rans import RansWeight
from vllm_latq.format.encodings.weight import Weight
from vllm_latq.format.reader import CheckpointReader
from vllm_latq.format.report import LayerReport
from vllm_latq.quantize.allocation.model_lattice import DAMPED_AT_MOST, ModelLattice, after_prefix, full_weight
from vllm_latq.quantize.calibration.hessian import InputHessian
from vllm_latq.quantize.calibration.stream import Stream, hessians_of, walk
from vllm_latq.quantize.lattice import stochastic
from vllm_latq.quantize.lattice.coordinate_descent import ROWS
from vllm_latq.quantize.lattice.factor import Factor
from vllm_latq.quantize.lattice.grams import LayerStatistics
from vllm_latq.quantize.lattice.outliers import kept_excess
from vllm_latq.quantize.lattice.reduction import reduce_lattice
from vllm_latq.quantize.lattice.targets import corrected_target, measure_errors
from vllm_latq.quantize.lattice.two_sided_plane import furthest
from vllm_latq.quantize.machine.offload import placer
from vllm_latq.quantize.methods.latq import InputLattice, OutputLattice, Target, targeted
from vllm_latq.quantize.methods.layer import layer_factor
from vllm_latq.quantize.methods.record import bound_holds, expected_by_both, expected_error
from vllm_latq.quantize.model.decoder import Decoder
from vllm_latq.quantize.model.parts import model_parts
from vllm_latq.quantize.model.selection import quantized_linears
from vllm_latq.quantize.recipe import Recipe


def layer_by_layer(
    reader: CheckpointReader, decoder: Decoder, recipe: Recipe, samples: torch.Tensor
) -> Iterator[LayerReport]:
    """The records of every linear, in the order of the model; `samples` int64 [n, tokens]."""
    stream = Stream(decoder, samples, recipe.target)
    for part, module, _ in walk(model_parts(decoder, reader.shapes), stream):
        if module is None:
            continue
        for hessian in stream.inputs(part, module):
            factor = None
            if recipe.needs_calibration:
                factor = layer_factor(hessian.matrix, recipe, hessian.shared.leader)
            for name in hessian.shared.names:
                stored, linear = reader.weight(name), part.linears[name]
                yield _measured(name, linear, stored, hessian, factor, recipe)
                linear.weight.copy_(stored.dequantize())


def _measured(
    name: str, linear: nn.Linear, stored: Weight, hessian: InputHessian, factor: Factor | None, recipe: Recipe
) -> LayerReport:
    weight = target = linear.weight.float()
    if hessian.drift is not None and factor is not None:
        target = corrected_target(weight, factor, hessian.drift, recipe.correction)
    gram = hessian.matrix if factor is None else factor.undamped
    quantized = stored.dequantize().to(weight.device)
    with naming(hessian.shared.leader):
        errors = measure_errors(quantized, weight, target, gram, hessian.drift)
    bound = expected = None
    if factor is not None:
        bound, beyond = worst_case(stored, factor, recipe, quantized - target)
        expected = expected_error(bound, beyond, recipe.rounding)
    return LayerReport(
        name,
        bits=stored.storage_bits() / weight.numel(),
        served_bits=stored.served_bits() / weight.numel(),
        outlier_density=stored.outlier_density(),
        error=errors.total,
        relative_error=errors.relative,
        rounding_error=errors.rounding,
        bound=bound,
        expected_error=expected,
        damping=None if factor is None else factor.damping,
        bound_holds=bound_holds(errors.rounding, bound),
    )


def worst_case(weight: Weight, factor: Factor, recipe: Recipe, moved: torch.Tensor) -> tuple[float, float]:
    """The bound of a weight, and what of it lies beyond the cells, as in `Rounding`; totals over all rows.

    Theorem 5 from the stored scales, 1/4 sum_t D_t s_t^2, or without the 1/4; what rounding to bfloat16 adds to
    outliers that are integers; and what steps cost more than their cells allow, where the recipe lets them.

    Args:
        weight: as stored.
        factor: of the damped Hessian; a weight that was rounded on a reduced basis is bounded there.
        recipe: its rounding, and what it clips or moves.
        moved: [r, c], the weight less what it was rounded from.
    """
    share = 0.25 if recipe.rounding == "nearest" else stochastic.REACH**2
    if isinstance(weight, HuffmanWeight):
        reduction = reduce_lattice(factor) if recipe.reduction == "lll" else None
        lattice = factor if reduction is None else reduction.factor
        return share * weight.shape[0] * float(weight.scale.double().square() * lattice.diagonal.sum().cpu()), 0.0
    assert isinstance(weight, PackedWeight)
    assert weight.scales is not None
    per_column = factor.importance
    cells = weight.scales.to(per_column).square() * share
    width = weight.cols // cells.shape[1]
    bound, beyond = float((cells @ per_column.reshape(cells.shape[1], -1).sum(1)).sum()), 0.0
    if recipe.may_exceed_half_step or recipe.clips_by_price:
        for start in range(0, len(moved), ROWS):
            rows = slice(start, start + ROWS)
            residuals = factor.residuals(moved[rows])
            excess = residuals.square() - cells[rows].repeat_interleave(width, 1) * per_column
            if not recipe.may_exceed_half_step:
                excess.masked_fill_(~_past_an_end(weight, rows, residuals), 0)
            beyond += float(excess.clamp_(min=0).sum())
    if weight.outliers is not None and not recipe.may_exceed_half_step:
        for at, cols, values in weight.outliers.bands():
            excess = kept_excess(values, weight.scales[at, cols // width], math.sqrt(share))
            bound += float(per_column[cols.to(per_column.device)] @ excess.to(per_column.device))
    return bound + beyond, beyond


def _past_an_end(weight: PackedWeight, rows: slice, residuals: torch.Tensor) -> torch.Tensor:
    """Where a weight lay on the far side of the end of the grid that it was put on: bool [rows, c]."""
    codes = unpack_codes(weight.qweight[rows], weight.bits, weight.cols).to(residuals.device)
    assert weight.scales is not None
    signs = weight.scales[rows].to(residuals).sign()
    outwards = -residuals * signs.repeat_interleave(weight.cols // signs.shape[1], 1)
    return ((codes == (1 << weight.bits) - 1) & (outwards > 0)) | ((codes == 0) & (outwards < 0))


def whole_model(
    reader: CheckpointReader,
    decoder: Decoder,
    recipe: Recipe,
    samples: torch.Tensor,
    claimed_damping: Callable[[str], float | None],
) -> Iterator[LayerReport]:
    """The records of every linear of a latq checkpoint, in the order of the model.

    The statistics wait in the system's folder for temporary files, as large as `OUT.partial/scratch` was.

    Args:
        reader, decoder, recipe: the checkpoint, the model it was made from, and how.
        samples: int64 [n, tokens].
        claimed_damping: of a linear, by name; None where there is no claim.
    """
    with tempfile.TemporaryDirectory(prefix="latq-certificate-") as folder:
        model = ModelLattice(decoder, quantized_linears(decoder, recipe), recipe, Path(folder))
        model.collect(samples, placer("disk", Path(folder)))
        shares = model.allocation()
        stream = Stream(decoder, None if recipe.target == "quantized" else samples, recipe.target)
        for part, module, _ in walk(model_parts(decoder, reader.shapes), stream):
            if module is None:
                continue
            seen = hessians_of(stream, part, module)
            for group in model.groups(part):
                weights = {name: full_weight(part.linears[name]) for name in group}
                leader = next(iter(group))
                members, drift = after_prefix(model.on_device(group), seen.get(leader))
                inputs, outputs = model.lattices(weights, members, shares[leader].step)
                if recipe.count == "served" and (times := _quadrupled(inputs.factor.damping, claimed_damping(leader))):
                    inputs = model.damped(inputs, members, times)
                for name, weight in weights.items():
                    stored, target, width = (
                        reader.weight(name),
                        targeted(weight, inputs, drift, recipe),
                        shares[name].width,
                    )
                    assert isinstance(stored, RansWeight)
                    yield _measured_on_loss(name, target, stored, members[name], inputs, outputs[name], recipe, width)
                    if stream:
                        part.linears[name].weight.copy_(stored.dequantize())


def _quadrupled(damping: float, claimed: float | None) -> int:
    """How many times a damping may have been quadrupled if so much is claimed."""
    if not claimed or claimed <= damping:
        return 0
    return min(round(math.log(claimed / damping, 4)), DAMPED_AT_MOST)


def _measured_on_loss(
    name: str,
    target: Target,
    stored: RansWeight,
    statistics: LayerStatistics,
    inputs: InputLattice,
    outputs: OutputLattice,
    recipe: Recipe,
    width: int | None,
) -> LayerReport:
    """As `whole_model.layer_record` states it, with H and G in float64 and every step as it is stored."""
    weight = target.weight
    rows, cols = stored.row_scales.to(weight.device), stored.column_scales.to(weight.device)
    # The same numbers as the stored weight's own, decoded once.
    packed = stored.pack(stored.integers(), width)
    quantized = packed.dequantize().to(weight.device)
    with naming(name):
        errors = measure_errors(quantized, weight, target.corrected, statistics.inputs, target.drift)
    error = errors.rounding * statistics.tokens
    moved = quantized.double() - target.corrected.double()
    seen = (moved @ statistics.inputs.double()).split([len(gram) for gram in statistics.outputs])
    parts = moved.split([len(gram) for gram in statistics.outputs])
    loss = sum(
        float(((gram.double() @ part) * product).sum()) / 2
        for gram, part, product in zip(statistics.outputs, parts, seen, strict=True)
    )
    worst = _worst_loss(rows.double().square(), cols.double().square(), inputs, outputs, furthest(stored.midrise))
    bound = 2 * worst / outputs.ridge * statistics.tokens
    bounded = "feedback" not in recipe.without
    return LayerReport(
        name,
        bits=stored.storage_bits() / weight.numel(),
        served_bits=packed.served_bits() / weight.numel(),
        outlier_density=0.0,
        error=errors.total * statistics.tokens,
        relative_error=errors.relative,
        rounding_error=error,
        bound=bound,
        expected_error=expected_by_both(rows, cols, inputs, outputs) * statistics.tokens,
        damping=inputs.factor.damping,
        bound_holds=bound_holds(loss, worst) if bounded else bound_holds(error, bound),
        loss=loss,
        loss_bound=worst if bounded else None,
    )


def _worst_loss(
    rows: torch.Tensor, cols: torch.Tensor, inputs: InputLattice, outputs: OutputLattice, steps: float
) -> float:
    """1/2 sum_ij DG_i DH_j (steps s_ij)^2 from squared s of rows [r] and columns [c]: with all residuals so long."""
    total, start = 0.0, 0
    for factor in outputs.factors:
        total += float(factor.diagonal @ rows[start + factor.order])
        start += len(factor.order)
    return total * float(inputs.factor.diagonal @ cols[inputs.factor.order]) * steps**2 / 2
