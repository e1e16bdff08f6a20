"""The records of a checkpoint's report, parsed. FORMAT.md section 6.

Invariant: names and notes are strings, numbers are finite numbers or None, whatever the file says.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from vllm_latq.errors import CheckpointError

# What the report says of a layer in numbers.
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
    """What was measured of one linear, Q [r, c] for W; None where there was nothing to measure it with.

    Attributes:
        name: of the linear.
        bits: stored bits per weight, everything counted.
        served_bits: per weight, in memory while it is served by itself, or by latq with `--count served` with codes of
            the width it shares (at most: merged, a width that takes less is found at load); other linears that are
            served as one matrix share a width, too, and may take more.
        outlier_density: share of weights in the CSR part.
        error: ||Y Q^T - X W^T||^2 summed over outputs and calibration tokens; Y are the inputs after the quantized
            prefix, X is the same, or with corrected targets the original model's inputs (`target` says what it is of
            the last linear of a block).
        relative_error: error / ||X W^T||^2.
        rounding_error: ||Y (Q - W')^T||^2, W' being what was rounded: the part of the error that the bound covers;
            all of it unless targets are corrected.
        bound: worst case of the rounding error (Theorem 5) for this order, damping and these scales; what ssqr clips,
            and what sweeps, or a beam of gptq or ssqr by saving, move by more than half a step, counts as much as it
            costs; None for plain rounding, which it does not cover.
        expected_error: the mean of the rounding error for uniformly distributed residuals: a third of the bound, a
            sixth if rounding is stochastic, and all of what counts as much as it costs; of latq a formula
            of its own, a lower limit where served bits are counted.
        damping: relative damping that was used; None for plain rounding.
        seconds: wall time, the factorisation excluded if it was given.
        bound_holds: rounding_error <= bound, or loss <= loss_bound; None where there is no bound, or gptq's
            clipping voids it.
        loss: what rounding the layer adds to KL(original || quantized), nats per token, to second order (`kronecker`);
            only measured by latq.
        loss_bound: its worst case.
        note: what did not go as asked, in words: a target that was not met, too few calibration tokens.
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
        """Parse one record; unknown keys are left out, raises CheckpointError on wrong types."""
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
    """The records of a report (a JSON object), one per quantized linear; raises CheckpointError on wrong types."""
    layers = report.get("layers")
    if not isinstance(layers, list):
        raise CheckpointError(f"{where}: layers", "a list of objects", type(layers).__name__, _HINT)
    return [LayerReport.from_dict(layer, f"{where}: layers[{index}]") for index, layer in enumerate(layers)]


def summed(layers: Sequence[LayerReport], key: str, sizes: Sequence[int] | None = None) -> float | None:
    """The sum of one of `NUMBERS` over layers, of so many weights each where it is one per weight; None if one of them
    lacks it or there are none."""
    values = [getattr(layer, key) for layer in layers]
    if not values or None in values:
        return None
    return sum(value * size for value, size in zip(values, sizes or [1] * len(values), strict=True))


def finite_number(value: Any, where: str) -> float | None:
    """A JSON number as a float, None for null; raises CheckpointError on anything else."""
    try:
        if value is None or (type(value) in (int, float) and math.isfinite(value)):
            return None if value is None else float(value)
    except OverflowError:
        pass
    raise CheckpointError(where, "a finite number or null", repr(value), _HINT)
