"""Record of one quantized linear: its error, its bound, its bits."""

from dataclasses import dataclass
from typing import Any

import torch

from vllm_latq.errors import naming
from vllm_latq.format.report import LayerReport
from vllm_latq.quantize.lattice import stochastic
from vllm_latq.quantize.lattice.grams import LayerStatistics
from vllm_latq.quantize.lattice.targets import measure_errors
from vllm_latq.quantize.methods.group_grid import GroupResult
from vllm_latq.quantize.methods.latq import LatqResult, Target
from vllm_latq.quantize.methods.lattices import InputLattice, OutputLattice

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
    result: LatqResult | GroupResult,
    inputs: InputLattice,
    outputs: OutputLattice,
    statistics: LayerStatistics,
) -> LayerRecord:
    """Measure a linear as it is stored, with the undamped grams, and return its record.

    `loss_bound` is the result's: what the trellis code enforces, or Babai's bound on groups. `bound` is twice that,
    divided by the smallest eigenvalue that the damped G can have: with E H E^T >= 0, tr(E H E^T) <= tr(G E H E^T) /
    min eig(G).
    """
    weight = target.weight
    with naming(name):
        errors = measure_errors(result.dequantized, weight, target.corrected, statistics.inputs, target.drift)
    loss = half_loss(result.dequantized.double() - target.corrected.double(), statistics)
    loss_bound = result.loss_bound
    return LayerRecord(
        name=name,
        shape=(weight.shape[0], weight.shape[1]),
        bits=result.weight.storage_bits() / weight.numel(),
        served_bits=result.weight.served_bits() / weight.numel(),
        outlier_density=result.weight.outlier_density(),
        error=errors.total * statistics.tokens,
        relative_error=errors.relative,
        rounding_error=errors.rounding * statistics.tokens,
        bound=2 * loss_bound / outputs.ridge * statistics.tokens,
        expected_error=None,
        bound_holds=bound_holds(loss, loss_bound),
        damping=inputs.factor.damping,
        seconds=0.0,
        note=statistics.note,
        loss=loss,
        loss_bound=loss_bound,
    )


def half_loss(moved: torch.Tensor, statistics: LayerStatistics) -> float:
    """Return tr(G E H E^T) / 2 of E, float64 [r, c], in nats per token."""
    parts = moved.split([len(gram) for gram in statistics.outputs])
    inputs = statistics.inputs.double()
    return sum(
        float(((gram.double() @ part @ inputs) * part).sum()) / 2
        for gram, part in zip(statistics.outputs, parts, strict=True)
    )


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
