"""Record of one quantized linear: its error, its bound, its bits."""

from dataclasses import dataclass
from typing import Any

import torch

from vllm_latq.errors import naming
from vllm_latq.format.report import LayerReport
from vllm_latq.format.served_size import served_bits
from vllm_latq.quantize.lattice import stochastic
from vllm_latq.quantize.lattice.grams import LayerStatistics
from vllm_latq.quantize.lattice.targets import measure_errors
from vllm_latq.quantize.methods.latq import InputLattice, LatqResult, OutputLattice, Target
from vllm_latq.quantize.recipe import Recipe

# The recursion runs in float32: a bound met with equality may be missed by its rounding.
BOUND_SLACK = 1e-6
# Ratio of the bound (s/2)^2 on a squared residual to its mean s^2/12; stochastic rounding has its own.
BOUND_TO_MEAN = {"nearest": 3, "stochastic": stochastic.BOUND_TO_MEAN}


@dataclass(frozen=True, kw_only=True)
class LayerRecord(LayerReport):
    """Report of a run on a layer that it quantized.

    Attributes:
        shape: (r, c).
        clipped: number of weights that gptq clipped and the bound does not count; 0 for other methods.
    """

    shape: tuple[int, int]
    clipped: int = 0


def bound_holds(found: float | None, bound: float | None) -> bool | None:
    """Return True if what was found is within its bound, up to BOUND_SLACK; None if either is missing."""
    return None if found is None or bound is None else found <= bound * (1 + BOUND_SLACK)


def expected_error(bound: float, excess: float, rounding: str) -> float:
    """Return the mean rounding error over weights that are uniform in their cells; excess loss counts as it is."""
    return (bound - excess) / BOUND_TO_MEAN[rounding] + excess


def layer_record(
    name: str,
    target: Target,
    result: LatqResult,
    inputs: InputLattice,
    outputs: OutputLattice,
    statistics: LayerStatistics,
    recipe: Recipe,
    width: int | None,
) -> LayerRecord:
    """Measure a linear as it is stored, with the undamped grams, and return its record.

    `bound` is twice the bound of the loss, divided by the smallest eigenvalue that the damped G can have: with
    E H E^T >= 0, tr(E H E^T) <= tr(G E H E^T) / min eig(G). `expected_error` is exact for uniform residuals.
    """
    weight, quantized = target.weight, result.dequantized
    rows, cols = result.weight.row_scales.to(weight.device), result.weight.column_scales.to(weight.device)
    with naming(name):
        errors = measure_errors(quantized, weight, target.corrected, statistics.inputs, target.drift)
    error = errors.rounding * statistics.tokens
    delta = quantized - target.corrected
    loss, start = 0.0, 0
    for gram in statistics.outputs:
        part = delta[start : start + len(gram)].to(torch.float64)
        loss += float(((gram.to(torch.float64) @ part @ statistics.inputs.to(torch.float64)) * part).sum()) / 2
        start += len(gram)
    bound = result.rounding.bound / outputs.ridge * statistics.tokens
    # Without feedback between outputs the lattice is that of G's diagonal: it bounds the error, but not the loss.
    loss_bound = None if "feedback" in recipe.without else result.rounding.bound / 2
    measured, limit = (error, bound) if loss_bound is None else (loss, loss_bound)
    return LayerRecord(
        name=name,
        shape=(weight.shape[0], weight.shape[1]),
        bits=result.bits,
        served_bits=served_bits(result.rounding.z, width) / weight.numel(),
        outlier_density=0.0,
        error=errors.total * statistics.tokens,
        relative_error=errors.relative,
        rounding_error=error,
        bound=bound,
        expected_error=expected_by_both(rows, cols, inputs, outputs) * statistics.tokens,
        bound_holds=bound_holds(measured, limit),
        damping=inputs.factor.damping,
        seconds=0.0,
        note="; ".join(filter(None, (result.note, statistics.note))),
        loss=loss,
        loss_bound=loss_bound,
    )


def expected_by_both(rows: torch.Tensor, cols: torch.Tensor, inputs: InputLattice, outputs: OutputLattice) -> float:
    """Return the mean of tr(E H E^T) over residuals uniform in their cells: V_G^-1 spreads each over the outputs."""
    columns = float(inputs.factor.diagonal @ cols[inputs.factor.order].to(torch.float64).square())
    spread, start = 0.0, 0
    for factor in outputs.factors:
        norms = factor.propagation(torch.float64).square().sum(1)
        spread += float(norms @ rows[start + factor.order].to(torch.float64).square())
        start += len(factor.order)
    return columns * spread / 12


def totals(layers: list[dict[str, Any]]) -> dict[str, Any]:
    """Sum over the quantized linears: weights, stored and served bits per weight, bytes, error, loss and bounds.

    A sum is None where a layer lacks a number.
    """
    sizes = [layer["shape"][0] * layer["shape"][1] for layer in layers]
    weights = sum(sizes)
    bits = sum(layer["bits"] * size for layer, size in zip(layers, sizes, strict=True))

    def total(key: str, factors: list[int] | None = None) -> float | None:
        values = [layer[key] for layer in layers if layer.get(key) is not None]
        if len(values) < len(layers):
            return None
        return sum(value * factor for value, factor in zip(values, factors or [1] * len(layers), strict=True))

    served = total("served_bits", sizes)

    return {
        "weights": weights,
        "bits_per_weight": bits / weights,
        "served_bits_per_weight": None if served is None else served / weights,
        "bytes": round(bits / 8),
        "error": total("error"),
        "bound": total("bound"),
        "loss": total("loss"),
        "loss_bound": total("loss_bound"),
    }
