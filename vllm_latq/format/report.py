"""Parse the records of a checkpoint's report. FORMAT.md section 6.

Invariant: names and notes are strings, numbers are finite numbers or None, whatever the file contains.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from vllm_latq.errors import CheckpointError

# The numbers in a record.
NUMBERS = (
    "bits",
    "served_bits",
    "outlier_density",
    "error",
    "relative_error",
    "rounding_error",
    "bound",
    "expected_error",
    "damping",
    "seconds",
    "loss",
    "loss_bound",
)
_HINT = "Copy the checkpoint again; the weights do not depend on its report."


@dataclass(frozen=True)
class LayerReport:
    """The measurements of one linear with weight W [r, c], stored as Q; None where nothing was measured.

    A weight *enters with its actual cost* if SSQR by saving clips it, or if sweeps, or a beam of gptq or of SSQR by
    saving, move it by more than half a step.

    Attributes:
        name: the linear's name.
        bits: stored bits per weight, everything counted.
        served_bits: bits per weight in memory while the linear is served by itself. Fused linears share a width of
            codes, and may take more.
        outlier_density: share of weights that are outliers or kept.
        error: ||Y Q^T - X W^T||^2 summed over outputs and calibration tokens. Y are the inputs after the quantized
            blocks; X equals Y, or with corrected targets the original model's inputs (FORMAT.md says how `target`
            changes X for the last linear of a block).
        relative_error: error / ||X W^T||^2.
        rounding_error: ||Y (Q - W')^T||^2 for the weights W' that were rounded: the part of the error that the bound
            covers; all of it unless targets are corrected.
        bound: worst case of the rounding error (Theorem 5) for this order, damping and these scales; None for plain
            rounding, which the theorem does not cover.
        expected_error: mean of the rounding error for uniformly distributed residuals: a third of the bound, or a sixth
            for stochastic rounding; weights that enter with their actual cost count fully. None for latq.
        damping: relative damping of the Hessian; None for plain rounding.
        seconds: wall time, without the factorisation if the factor was given.
        bound_holds: rounding_error <= bound, or loss <= loss_bound; None where there is no bound, or gptq's
            clipping voids it.
        loss: the amount that rounding the layer adds to KL(original || quantized), in nats per token, to second order;
            only measured by latq.
        loss_bound: limit of the loss, which latq enforces tile by tile.
        note: what did not go as requested, in words: a missed target, too few calibration tokens.
    """

    name: str
    bits: float | None = None
    served_bits: float | None = None
    outlier_density: float | None = None
    error: float | None = None
    relative_error: float | None = None
    rounding_error: float | None = None
    bound: float | None = None
    expected_error: float | None = None
    damping: float | None = None
    seconds: float | None = None
    bound_holds: bool | None = None
    loss: float | None = None
    loss_bound: float | None = None
    note: str = ""

    @classmethod
    def from_dict(cls, value: Any, where: str) -> "LayerReport":
        """Parse one record and ignore unknown keys; raise CheckpointError for wrong types."""
        if not isinstance(value, Mapping) or not isinstance(value.get("name"), str):
            raise CheckpointError(where, "an object with a string `name`", type(value).__name__, _HINT)
        holds = value.get("bound_holds")
        if holds is not None and type(holds) is not bool:
            raise CheckpointError(f"{where}.bound_holds", "true, false or null", repr(holds), _HINT)
        note = value.get("note") or ""
        if not isinstance(note, str):
            raise CheckpointError(f"{where}.note", "text", repr(note), _HINT)
        numbers = {key: finite_number(value.get(key), f"{where}.{key}") for key in NUMBERS}
        return cls(value["name"], bound_holds=holds, note=note, **numbers)


def layer_reports(report: Mapping[str, Any], where: str) -> list[LayerReport]:
    """Parse the records of a report (a JSON object), one per linear; raise CheckpointError for wrong types."""
    layers = report.get("layers")
    if not isinstance(layers, list):
        raise CheckpointError(f"{where}: layers", "a list of objects", type(layers).__name__, _HINT)
    return [LayerReport.from_dict(layer, f"{where}: layers[{index}]") for index, layer in enumerate(layers)]


def summed(layers: Sequence[LayerReport], key: str, sizes: Sequence[int] | None = None) -> float | None:
    """Return the sum of one of `NUMBERS` over layers; None if there are no layers or one of them lacks the number.

    Args:
        layers: the records.
        key: name of the number.
        sizes: weights in each layer, for a number per weight; None for a number per layer.
    """
    values = [getattr(layer, key) for layer in layers]
    if not values or None in values:
        return None
    return sum(value * size for value, size in zip(values, sizes or [1] * len(values), strict=True))


def finite_number(value: Any, where: str, hint: str = _HINT) -> float | None:
    """Return a JSON number as a float and null as None; raise CheckpointError for anything else, with the hint."""
    try:
        if value is None or (type(value) in (int, float) and math.isfinite(value)):
            return None if value is None else float(value)
    except OverflowError:
        pass
    raise CheckpointError(where, "a finite number or null", repr(value), hint)
