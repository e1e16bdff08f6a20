"""Recompute a report on stored weights from the original model, the calibration text and the recipe alone.

    layer_by_layer  the text passes through the blocks as in a run, with the stored weights in place of a quantizer:
                    the Hessian of each input, its factor, and from them the errors and the worst case
    whole_model     for latq: statistics of the original model as in runs/whole_model.py; from them the price of a bit,
                    by allocating the bits anew, the damping that this price asks for, both lattices, and from them the
                    loss, the errors, and the term of every tile beside its plan

Invariant: of the checkpoint only weights and recipe are read, and nothing of its report.
"""

import math
import tempfile
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import torch
from torch import nn

from vllm_latq.coding.packing import unpack_codes
from vllm_latq.errors import CheckpointError, naming
from vllm_latq.format.encodings.huffman import HuffmanWeight
from vllm_latq.format.encodings.packed import PackedWeight
from vllm_latq.format.encodings.trellis import TrellisWeight
from vllm_latq.format.encodings.weight import Weight
from vllm_latq.format.reader import CheckpointReader
from vllm_latq.format.report import LayerReport
from vllm_latq.quantize.allocation.model_lattice import ALLOCATION, ModelLattice, after_prefix, full_weight
from vllm_latq.quantize.allocation.widths import WidthAllocation, allocate_widths
from vllm_latq.quantize.calibration.fisher import Stages
from vllm_latq.quantize.calibration.hessian import InputHessian
from vllm_latq.quantize.calibration.stream import Stream, hessians_of, walk
from vllm_latq.quantize.calibration.windows import Samples
from vllm_latq.quantize.lattice import stochastic
from vllm_latq.quantize.lattice.coordinate_descent import ROWS
from vllm_latq.quantize.lattice.factor import Factor
from vllm_latq.quantize.lattice.grams import LayerStatistics
from vllm_latq.quantize.lattice.outliers import kept_excess, past_an_end
from vllm_latq.quantize.lattice.reduction import reduce_lattice
from vllm_latq.quantize.lattice.targets import corrected_target, measure_errors
from vllm_latq.quantize.lattice.trellis_plane import LIMIT
from vllm_latq.quantize.machine.offload import placer
from vllm_latq.quantize.methods.group_grid import loss_bound
from vllm_latq.quantize.methods.latq import Target, stored_terms, targeted
from vllm_latq.quantize.methods.lattices import InputLattice, OutputLattice
from vllm_latq.quantize.methods.layer import layer_factor
from vllm_latq.quantize.methods.record import bound_holds, expected_error, half_loss
from vllm_latq.quantize.model.decoder import Decoder
from vllm_latq.quantize.model.parts import model_parts
from vllm_latq.quantize.model.selection import quantized_linears
from vllm_latq.quantize.recipe import GROUP, Recipe

# The recursion adds up targets in float32, the certificate in float64.
TERM_SLACK = 1e-3


def layer_by_layer(
    reader: CheckpointReader, decoder: Decoder, recipe: Recipe, samples: torch.Tensor
) -> Iterator[LayerReport]:
    """The records of every linear, in the order of the model; `samples` int64 [n, tokens]."""
    stream = Stream(decoder, samples, recipe.target)
    for part, module, _ in walk(model_parts(decoder, reader.linears), stream):
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
                codes = unpack_codes(weight.qweight[rows], weight.bits, weight.cols).to(residuals.device)
                excess.masked_fill_(~past_an_end(codes, weight.bits, weight.scales[rows], residuals), 0)
            beyond += float(excess.clamp_(min=0).sum())
    if weight.outliers is not None and not recipe.may_exceed_half_step:
        for at, cols, values in weight.outliers.bands():
            excess = kept_excess(values, weight.scales[at, cols // width], math.sqrt(share))
            bound += float(per_column[cols.to(per_column.device)] @ excess.to(per_column.device))
    return bound + beyond, beyond


def whole_model(
    reader: CheckpointReader,
    decoder: Decoder,
    recipe: Recipe,
    samples: Samples,
    stages: Stages,
    tolerance: float,
) -> Iterator[LayerReport]:
    """The records of every linear of a latq checkpoint, in the order of the model.

    The statistics wait in the system's folder for temporary files, as large as `OUT.partial/scratch` was.

    Args:
        reader, decoder, recipe: the checkpoint, the model it was made from, and how.
        samples: the calibration windows.
        stages: gives the progress of each stage.
        tolerance: relative, between the expected loss of the stored widths and that of the widths allocated anew.

    Raises:
        CheckpointError: another encoding, or other widths, than the recipe leads to.
    """
    with tempfile.TemporaryDirectory(prefix="latq-certificate-") as folder:
        quantized = quantized_linears(decoder, recipe)
        model = ModelLattice(decoder, quantized, recipe, Path(folder), counted=samples.counted)
        model.collect(samples.tokens, placer("disk", Path(folder)), stages)
        on_groups = recipe.grid == GROUP
        allocate = partial(allocate_widths, model) if on_groups else model.allocation
        allocation = allocate(stages(ALLOCATION))
        if isinstance(allocation, WidthAllocation):
            _require_widths(reader, allocation, tolerance)
        stream = Stream(decoder, None if recipe.target == "quantized" else samples.tokens, recipe.target)
        for part, module, _ in walk(model_parts(decoder, reader.linears), stream):
            if module is None:
                continue
            groups = model.groups(part, module)
            seen = hessians_of(stream, part, module)
            for group in groups:
                weights = {name: full_weight(part.linears[name]) for name in group}
                members, drift = after_prefix(model.on_device(group), seen.get(next(iter(group))))
                inputs, outputs = model.lattices(weights, members, allocation.step)
                for name, weight in weights.items():
                    stored = reader.weight(name)
                    if not isinstance(stored, PackedWeight if on_groups else TrellisWeight):
                        expected = f"encoding {recipe.scheme.encoding}"
                        raise CheckpointError(f"{reader.directory}: {name}", expected, stored.scheme.encoding)
                    target = targeted(weight, inputs, drift, recipe)
                    yield _measured_on_loss(name, target, stored, members[name], inputs, outputs[name])
                    if stream:
                        part.linears[name].weight.copy_(stored.dequantize())


def _require_widths(reader: CheckpointReader, allocation: WidthAllocation, tolerance: float) -> None:
    """Raise CheckpointError if the stored widths take more bits than the recipe's, or lose more than those allocated.

    On another device single widths may differ, where two cost the same up to rounding.
    """
    hint = "Was its recipe changed, or are model or calibration text not the ones of this checkpoint?"
    where, costs = str(reader.directory), allocation.costs
    schemes = {name: reader.config.scheme_for(name) or reader.config.scheme for name in costs}
    stored = {name: scheme.code_layout()[0] for name, scheme in schemes.items()}
    weights = sum(cost.weights for cost in costs.values())
    bits = sum(cost.bits[stored[name]] for name, cost in costs.items())
    if bits > allocation.bits:
        expected = f"at most {allocation.bits / weights:g} bits per weight, which its recipe states"
        raise CheckpointError(where, expected, f"{bits / weights:.3f}", hint)
    wanted = {name: scheme.code_layout()[0] for name, scheme in allocation.schemes.items()}
    most = (1 + tolerance) * sum(cost.losses[wanted[name]] for name, cost in costs.items())
    if sum(cost.losses[stored[name]] for name, cost in costs.items()) > most:
        name = next(name for name in costs if stored[name] != wanted[name])
        expected = f"codes of {wanted[name]} bits, to which the recipe and the loss lead"
        raise CheckpointError(f"{where}: {name}", expected, f"{stored[name]} bits", hint)


def _measured_on_loss(
    name: str,
    target: Target,
    stored: Weight,
    statistics: LayerStatistics,
    inputs: InputLattice,
    outputs: OutputLattice,
) -> LayerReport:
    """As `methods.record.layer_record` states it, from what is stored; the bound of a trellis holds if it does in every
    tile."""
    weight = target.weight
    quantized = stored.dequantize().to(weight.device)
    with naming(name):
        errors = measure_errors(quantized, weight, target.corrected, statistics.inputs, target.drift)
    moved = quantized - target.corrected
    loss = half_loss(moved.double(), statistics)
    if isinstance(stored, TrellisWeight):
        terms, plans = stored_terms(stored, quantized, target.corrected, inputs, outputs)
        limit = LIMIT / 2 * float(plans.sum())
        holds: bool | None = bool((terms <= LIMIT * plans * (1 + TERM_SLACK)).all())
    else:
        assert isinstance(stored, PackedWeight)
        limit = loss_bound(stored, moved, inputs, outputs)
        holds = bound_holds(loss, limit)
    return LayerReport(
        name,
        bits=stored.storage_bits() / weight.numel(),
        served_bits=stored.served_bits() / weight.numel(),
        outlier_density=stored.outlier_density(),
        error=errors.total * statistics.tokens,
        relative_error=errors.relative,
        rounding_error=errors.rounding * statistics.tokens,
        bound=2 * limit / outputs.ridge * statistics.tokens,
        damping=inputs.factor.damping,
        bound_holds=holds,
        loss=loss,
        loss_bound=limit,
    )
