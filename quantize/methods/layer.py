"""One layer, by any of the methods: weight and Hessian in, stored weight and its measured certificate out.

Invariant: the errors of the record are measured on the numbers that are stored, with the undamped Hessian, in float64;
the bound is Theorem 5's, with the damped Hessian, plus the actual cost of every weight that lies outside its cell. The
rounding error must be below the bound, unless gptq clipped weights that the bound does not count.
"""

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from vllm_latq.coding.huffman.encoder import encode
from vllm_latq.errors import CalibrationError, ConfigError, NumericalError, naming
from vllm_latq.format.encodings.huffman import HuffmanWeight
from vllm_latq.format.encodings.packed import PackedWeight, pack_integers
from vllm_latq.format.encodings.weight import Weight
from vllm_latq.quantize.lattice.coordinate_descent import refine
from vllm_latq.quantize.lattice.factor import Factor, factorize, require_finite
from vllm_latq.quantize.lattice.k_best_plane import plane_of
from vllm_latq.quantize.lattice.nearest_plane import Rounding
from vllm_latq.quantize.lattice.outliers import Grid
from vllm_latq.quantize.lattice.reduction import reduce_lattice
from vllm_latq.quantize.lattice.scales import SCALE_DTYPE, fitted_scales, group_scales
from vllm_latq.quantize.lattice.targets import Drift, LayerErrors, corrected_target, measure_errors
from vllm_latq.quantize.methods.hptq import HPTQResult, hptq, hrtn
from vllm_latq.quantize.methods.record import LayerRecord, bound_holds, expected_error
from vllm_latq.quantize.methods.ssqr import ssqr, ssqr_by_saving
from vllm_latq.quantize.recipe import Recipe

# Power of the errors that gptq's scales are chosen by. On two trained models squares have 1.05 times the KL at 4 bits,
# 1.04 and 1.22 at 3, 1.37 and 1.86 at 2; where outliers are kept instead of clipped, squares are best.
GPTQ_POWER = 3


@dataclass(frozen=True)
class LayerResult:
    """A quantized layer.

    Attributes:
        weight: as stored, on the device of the input.
        record: measurements of the layer.
        dequantized: float32 [r, c], equal to weight.dequantize() without unpacking or decoding it.
    """

    weight: Weight
    record: LayerRecord
    dequantized: torch.Tensor


@dataclass(frozen=True)
class _Quantized:
    """Result of a method.

    bound, excess are totals over the rows, None and 0 for plain rounding; clipped counts the clipped weights that the
    bound does not cover; served_bits are stated where they would otherwise take decoding the weight.
    """

    weight: Weight
    dequantized: torch.Tensor
    bound: float | None = None
    excess: float = 0.0
    served_bits: int | None = None
    clipped: int = 0
    note: str = ""


def quantize_layer(
    weight: torch.Tensor,
    hessian: torch.Tensor | Factor | None,
    recipe: Recipe,
    where: str = "",
    drift: Drift | None = None,
) -> LayerResult:
    """Quantize one linear layer.

    Args:
        weight: [r, c], any floating dtype; computed in float64 if it is float64, else in float32.
        hessian: X^T X summed over calibration tokens, not normalised, float32 or float64 [c, c]; or its Factor, so that
            layers with a shared input factorise once; None only for rtn and hrtn, whose error then stays unmeasured.
        recipe: method and options.
        where: name of the layer, for the record and for errors.
        drift: from the original model's inputs to those of the Hessian; the target is corrected for it.

    Raises:
        NumericalError: weight or Hessian are not finite, or the method cannot be carried out on them.
        CalibrationError: a Hessian is needed and missing.
    """
    if recipe.method not in METHODS:
        hint = "It looks at the whole model: use quantize_checkpoint."
        raise ConfigError("recipe.method", f"one of {', '.join(METHODS)}", recipe.method, hint)
    started = time.perf_counter()
    with naming(where):
        weight = _matrix(weight)
        factor = _required_factor(hessian, recipe) if recipe.needs_calibration else None
        gram = hessian.undamped if isinstance(hessian, Factor) else hessian
        if gram is not None and tuple(gram.shape) != (weight.shape[1], weight.shape[1]):
            expected = f"a Hessian of {weight.shape[1]} input channels"
            raise NumericalError("hessian", expected, f"shape {tuple(gram.shape)}")
        target = weight
        if factor is None:
            done = _WITHOUT_HESSIAN[recipe.method](weight, recipe)
        else:
            if drift is not None:
                require_finite(drift.energy, "drift of the activations")
                target = corrected_target(weight, factor, drift, recipe.correction)
            done = _ON_LATTICE[recipe.method](target, factor, recipe, recipe.rounding_seed(where))
        errors = None if gram is None else measure_errors(done.dequantized, weight, target, gram, drift)
        record = _record(where, done, weight, errors, factor, recipe)
    record = replace(record, seconds=time.perf_counter() - started)
    return LayerResult(done.weight, record, done.dequantized)


def layer_factor(hessian: torch.Tensor, recipe: Recipe, where: str = "") -> Factor:
    """Factorise a Hessian [c, c] as the recipe says; `where` names the layer in errors, which are `factorize`'s."""
    with naming(where):
        return factorize(hessian, recipe.order, recipe.damping)


def _matrix(weight: torch.Tensor) -> torch.Tensor:
    weight = weight.detach().to(torch.float64 if weight.dtype == torch.float64 else torch.float32)
    if weight.dim() != 2:
        raise NumericalError("weight", "a matrix [out, in]", f"shape {tuple(weight.shape)}")
    require_finite(weight, "weight")
    return weight


def _required_factor(hessian: torch.Tensor | Factor | None, recipe: Recipe) -> Factor:
    if hessian is None:
        hint = "Was the layer called at all while the calibration text ran?"
        raise CalibrationError("hessian", f"a Hessian for {recipe.method}", "none", hint)
    return hessian if isinstance(hessian, Factor) else layer_factor(hessian, recipe)


def _record(
    name: str,
    done: _Quantized,
    weight: torch.Tensor,
    errors: LayerErrors | None,
    factor: Factor | None,
    recipe: Recipe,
) -> LayerRecord:
    if done.bound is not None and not math.isfinite(done.bound):
        hint = "The weights are too large for float32: is the model damaged?"
        raise NumericalError("weight", "a finite error bound", f"{done.bound:g}", hint)
    rounding_error = None if errors is None else errors.rounding
    rows, cols = weight.shape
    return LayerRecord(
        name=name,
        shape=(rows, cols),
        bits=done.weight.storage_bits() / max(weight.numel(), 1),
        served_bits=(done.served_bits or done.weight.served_bits()) / max(weight.numel(), 1),
        outlier_density=done.weight.outlier_density() if weight.numel() else 0.0,
        error=None if errors is None else errors.total,
        relative_error=None if errors is None else errors.relative,
        rounding_error=rounding_error,
        bound=done.bound,
        expected_error=None if done.bound is None else expected_error(done.bound, done.excess, recipe.rounding),
        bound_holds=None if done.clipped else bound_holds(rounding_error, done.bound),
        damping=None if factor is None else factor.damping,
        seconds=0.0,
        clipped=done.clipped,
        note=done.note,
    )


def _grid(recipe: Recipe) -> Grid:
    return Grid.of_bits(recipe.width, recipe.offset)


def _rtn(weight: torch.Tensor, recipe: Recipe) -> _Quantized:
    grid = _grid(recipe)
    scales = group_scales(weight, grid, recipe.group_size, recipe.scale_method)
    steps = scales.to(weight.dtype).repeat_interleave(weight.shape[1] // scales.shape[1], 1)
    integers = (weight / steps - grid.offset).round().clamp(grid.low, grid.high)
    stored = _packed(integers.to(torch.int32), scales, recipe)
    return _Quantized(stored, ((integers + grid.offset) * steps).to(torch.float32))


def _gptq(weight: torch.Tensor, factor: Factor, recipe: Recipe, seed: int | None) -> _Quantized:
    grid, group_size = _grid(recipe), recipe.group_size
    if recipe.scales == "fitted":
        scales = fitted_scales(weight, factor, grid, group_size, recipe.block_size)
    else:
        scales = group_scales(weight, grid, group_size, recipe.scale_method, power=GPTQ_POWER)
    plane = plane_of(recipe.beam, recipe.block_size, seed)
    rounding = plane(weight, factor, scales, grid, group_size=group_size)
    rounding = refine(weight, factor, rounding, recipe.sweeps)
    stored = _packed(rounding.z, rounding.scales, recipe)
    dequantized = rounding.dequantized.to(torch.float32)
    clipped = int(rounding.outlier_mask.sum()) if recipe.bound_ignores_clipping else 0
    return _Quantized(stored, dequantized, *_bound(rounding), clipped=clipped)


def _ssqr(weight: torch.Tensor, factor: Factor, recipe: Recipe, seed: int | None) -> _Quantized:
    grid, rate = _grid(recipe), recipe.outlier_rate
    plane = plane_of(recipe.beam, recipe.block_size, seed)
    if recipe.outliers == "saving":
        found, movable = ssqr_by_saving(weight, factor, grid, recipe.group_size, rate, plane), rate
    else:
        base = group_scales(weight, grid, recipe.group_size, recipe.scale_method)
        found, movable = ssqr(weight, factor, base, grid, recipe.group_size, rate, plane), None
    rounding = refine(weight, factor, found.rounding, recipe.sweeps, movable)
    stored = _packed(rounding.z, rounding.scales, recipe, rounding.outlier_mask, rounding.outlier_values)
    dequantized = rounding.dequantized.to(torch.float32)
    return _Quantized(stored, dequantized, *_bound(rounding), note=found.note)


def _bound(rounding: Rounding) -> tuple[float, float]:
    return float(rounding.bound.sum()), float(rounding.excess.sum())


def _packed(
    integers: torch.Tensor,
    scales: torch.Tensor,
    recipe: Recipe,
    outlier_mask: torch.Tensor | None = None,
    outlier_values: torch.Tensor | None = None,
) -> PackedWeight:
    """Return the stored weight; arguments as for `PackedWeight.from_integers`."""
    layout = (scales.to(SCALE_DTYPE), recipe.width, recipe.group_size)
    return PackedWeight.from_integers(integers, *layout, outlier_mask, outlier_values, recipe.grid == "midrise")


def _hptq(weight: torch.Tensor, factor: Factor, recipe: Recipe, seed: int | None) -> _Quantized:
    plane = plane_of(recipe.beam, recipe.block_size, seed)
    reduction = reduce_lattice(factor) if recipe.reduction == "lll" else None
    return _huffman(hptq(weight, factor, recipe.bits, plane, reduction))


def _hrtn(weight: torch.Tensor, recipe: Recipe) -> _Quantized:
    return _huffman(hrtn(weight, recipe.bits))


def _huffman(found: HPTQResult) -> _Quantized:
    stored = HuffmanWeight(found.scale.reshape(1), encode(found.integers))
    bound = None if found.rounding is None else float(found.rounding.bound.sum())
    served = pack_integers(found.integers, found.scale.expand(len(found.integers))).served_bits()
    dequantized = found.integers.to(torch.float32) * found.scale
    if not bool(torch.isfinite(dequantized).all()):
        beyond = f"multiples of {found.scale:g} beyond float32"
        raise NumericalError("weight", "a finite dequantized weight", beyond, "Is the model damaged?")
    return _Quantized(stored, dequantized, bound, served_bits=served, note=found.note)


_WITHOUT_HESSIAN: dict[str, Callable[[torch.Tensor, Recipe], _Quantized]] = {"rtn": _rtn, "hrtn": _hrtn}
# The last argument is the seed of stochastic rounding.
_ON_LATTICE: dict[str, Callable[[torch.Tensor, Factor, Recipe, int | None], _Quantized]] = {
    "gptq": _gptq,
    "ssqr": _ssqr,
    "hptq": _hptq,
}
METHODS = (*_WITHOUT_HESSIAN, *_ON_LATTICE)
