"""One layer by every method: what is stored is what was measured, and the certificate is true."""

import dataclasses
import json
import math
from functools import cache

import pytest
import torch

from vllm_latq.errors import CalibrationError, ConfigError, NumericalError, UnsupportedShapeError
from vllm_latq.format.encodings.huffman import HuffmanWeight
from vllm_latq.format.encodings.packed import PackedWeight
from vllm_latq.format.validate import weight_from_tensors
from vllm_latq.quantize.lattice.factor import factorize
from vllm_latq.quantize.lattice.targets import output_energy
from vllm_latq.quantize.methods.layer import LayerResult, layer_factor, quantize_layer
from vllm_latq.quantize.recipe import METHODS as ALL_METHODS
from vllm_latq.quantize.recipe import Recipe

# latq looks at the whole model: see test_whole_model.py.
EVERYTHING = (
    "gptq, everything", "ssqr, everything", "hptq, beam", "rtn, mid-rise", "gptq, mid-rise",
    "ssqr, overflow", "ssqr, mid-rise",
)  # fmt: skip
METHODS = (*(method for method in ALL_METHODS if method != "latq"), *EVERYTHING)

FLOAT64_TOLERANCE = 1e-10
RECIPES = {
    "rtn": Recipe("rtn", bits=3, group_size=32),
    "gptq": Recipe("gptq", bits=3, group_size=32),
    "ssqr": Recipe("ssqr", bits=3, group_size=32, outlier_rate=0.02),
    "ssqr, overflow": Recipe("ssqr", bits=3, group_size=32, outlier_rate=0.02, outliers="overflow"),
    "gptq, everything": Recipe("gptq", bits=2, group_size=32, scales="signed", beam=2, sweeps=2),
    "ssqr, everything": Recipe("ssqr", bits=2, group_size=32, order="min-pivot", beam=2, sweeps=2),
    "rtn, mid-rise": Recipe("rtn", bits=3, group_size=32, grid="midrise"),
    "gptq, mid-rise": Recipe("gptq", bits=2, group_size=32, grid="midrise", scales="fitted", beam=2, sweeps=2),
    "ssqr, mid-rise": Recipe("ssqr", bits=2, group_size=32, grid="midrise", order="min-pivot", beam=2, sweeps=2),
    "hptq": Recipe("hptq", bits=3.5),
    "hptq, beam": Recipe("hptq", bits=3.5, beam=2),
    "hrtn": Recipe("hrtn", bits=3.5),
}


def layer(rows: int = 96, cols: int = 160, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Weight float32 [r, c] and inputs float32 [n, c] with a dead channel and correlations."""
    generator = torch.Generator().manual_seed(seed)
    weight = 0.02 * torch.randn(rows, cols, generator=generator)
    weight *= 1 + 3 * torch.rand(rows, cols, generator=generator).pow(12)
    inputs = torch.randn(3 * cols, cols, generator=generator)
    inputs = inputs + 0.7 * inputs.roll(1, 1) + inputs[:, :1]
    inputs[:, cols // 2] = 0
    return weight, inputs


@cache
def quantize(method: str) -> tuple[torch.Tensor, torch.Tensor, LayerResult]:
    weight, inputs = layer()
    return weight, inputs, quantize_layer(weight, inputs.T @ inputs, RECIPES[method], "layers.0.q_proj")


@pytest.mark.parametrize("method", METHODS)
def test_record_is_true_of_the_stored_weight(method):
    weight, inputs, result = quantize(method)
    record, stored = result.record, result.weight
    assert (record.name, record.shape, record.note) == ("layers.0.q_proj", (96, 160), "")
    assert torch.equal(stored.dequantize(), result.dequantized)
    assert record.bits == stored.storage_bits() / weight.numel()
    assert record.outlier_density == stored.outlier_density()
    double, quantized = inputs.double(), stored.dequantize().double()
    # float32 Gram matrix: the record is exact for it, and near the error on the inputs themselves.
    assert record.error == pytest.approx(float((double @ (quantized - weight.double()).T).square().sum()), rel=1e-3)
    gram, delta = (inputs.T @ inputs).double(), quantized - weight.double()
    assert record.error == pytest.approx(float(((delta @ gram) * delta).sum()), rel=1e-6)
    energy = float((double @ weight.double().T).square().sum())
    assert record.relative_error == pytest.approx(record.error / energy, rel=1e-3)
    assert 0 < record.relative_error < 0.2
    assert record.seconds > 0


@pytest.mark.parametrize("method", METHODS)
def test_stored_tensors_validate_and_read_back(method):
    _, _, result = quantize(method)
    recipe = RECIPES[method]
    assert isinstance(result.weight, HuffmanWeight if recipe.scheme.encoding == "huffman" else PackedWeight)
    assert result.weight.scheme == recipe.scheme
    again = weight_from_tensors(result.weight.to_tensors(), recipe.scheme, (96, 160), "q_proj")
    assert torch.equal(again.dequantize(), result.dequantized)


@pytest.mark.parametrize("method", ["ssqr, overflow", "hptq"])
def test_bound_holds_where_nothing_is_clipped(method):
    _, inputs, result = quantize(method)
    record = result.record
    assert record.clipped == 0
    assert record.bound_holds is True
    assert record.error <= record.bound
    assert record.expected_error == record.bound / 3
    assert 0.5 * record.expected_error < record.error < 1.1 * record.expected_error
    # Recomputed from the stored scales alone.
    factor = factorize(inputs.T @ inputs)
    steps = result.weight.scale.expand(96, 160) if method == "hptq" else result.weight.scales.repeat_interleave(32, 1)
    bound = float((steps.double()[:, factor.order].square() @ factor.diagonal).sum()) / 4
    assert record.bound == pytest.approx(bound, rel=FLOAT64_TOLERANCE)


@pytest.mark.parametrize("method", ["ssqr", "ssqr, everything", "ssqr, mid-rise", "hptq, beam"])
def test_other_choices_keep_a_bound(method):
    _, _, result = quantize(method)
    assert result.record.clipped == 0
    assert result.record.bound_holds is True


@pytest.mark.parametrize("method", ["gptq", "ssqr"])
def test_a_mid_rise_grid_is_better_in_two_bits(method):
    weight, inputs = layer()
    recipe = Recipe(method, bits=2, group_size=32)
    plain, midrise = (
        quantize_layer(weight, inputs.T @ inputs, dataclasses.replace(recipe, grid=grid)).record
        for grid in ("midtread", "midrise")
    )
    assert midrise.bits == pytest.approx(plain.bits, rel=5e-3)
    assert midrise.error < 0.9 * plain.error


@pytest.mark.parametrize("method", ["rtn, mid-rise", "gptq, mid-rise", "ssqr, mid-rise"])
def test_zero_weights_on_a_grid_without_zero(method):
    """A zero row stays as good as zero; a zero group in another row gets no step larger than its row's others."""
    weight, inputs = layer()
    weight[3], weight[5, 32:64] = 0, 0
    result = quantize_layer(weight, inputs.T @ inputs, RECIPES[method])
    scales = result.weight.scales.float().abs()
    assert result.dequantized[3].abs().max() <= 2**-20 * scales[scales[:, 0] > scales[3, 0]].min()
    assert scales[5, 1] <= 2 * scales[5, [0, 2, 3, 4]].max()
    weight_from_tensors(result.weight.to_tensors(), RECIPES[method].scheme, (96, 160), "q_proj")


def test_clipped_gptq_reports_the_bound_without_claiming_it():
    _, _, result = quantize("gptq")
    assert result.record.clipped > 0
    assert result.record.bound > 0
    assert result.record.bound_holds is None


def test_unclipped_gptq_claims_the_bound():
    # Orthogonal inputs move no weight, and absmax scales fit all of them.
    weight, _ = layer()
    result = quantize_layer(weight, torch.eye(160), Recipe("gptq", bits=4, group_size=32, scales="absmax"))
    assert result.record.clipped == 0
    assert result.record.bound_holds is True


@pytest.mark.parametrize("method", ["rtn", "hrtn"])
def test_plain_rounding_has_no_bound_and_needs_no_hessian(method):
    weight, _, result = quantize(method)
    record = result.record
    assert (record.bound, record.expected_error, record.bound_holds, record.damping) == (None, None, None, None)
    blind = quantize_layer(weight, None, RECIPES[method])
    assert torch.equal(blind.dequantized, result.dequantized)
    assert (blind.record.error, blind.record.relative_error) == (None, None)


def test_error_ordering_at_equal_bits():
    errors = {method: quantize(method)[2].record.error for method in METHODS}
    assert errors["gptq"] < errors["rtn"]
    assert errors["hptq"] < errors["hrtn"]
    # HPTQ has 3.5 bits including everything, the others 3 and 16 / 32 for scales.
    assert errors["hptq"] < errors["gptq"]


@pytest.mark.parametrize("method", METHODS)
def test_records_are_plain_json(method):
    record = quantize(method)[2].record
    assert json.loads(json.dumps(dataclasses.asdict(record), allow_nan=False))["name"] == record.name


@pytest.mark.parametrize("method", METHODS)
def test_a_factor_stands_for_its_hessian(method):
    weight, inputs, result = quantize(method)
    recipe = RECIPES[method]
    again = quantize_layer(weight, factorize(inputs.T @ inputs, recipe.order, recipe.damping), recipe)
    assert torch.equal(again.dequantized, result.dequantized)
    assert again.record.error == result.record.error


@pytest.mark.parametrize("order", ["natural", "act", "min-pivot"])
def test_block_size_does_not_change_the_result(order):
    weight, inputs = layer()
    hessian = (inputs.T @ inputs).double()
    results = [
        quantize_layer(weight.double(), hessian, Recipe("gptq", bits=3, group_size=32, order=order, block_size=size))
        for size in (1, 50, 128)
    ]
    assert torch.equal(results[0].dequantized, results[1].dequantized)
    assert torch.equal(results[0].dequantized, results[2].dequantized)


def test_bfloat16_parameters_are_taken_and_left_alone():
    weight, inputs = layer()
    parameter = torch.nn.Parameter(weight.to(torch.bfloat16))
    before = parameter.detach().clone()
    result = quantize_layer(parameter, inputs.T @ inputs, RECIPES["ssqr"])
    assert torch.equal(parameter.detach(), before)
    assert result.dequantized.dtype == torch.float32
    assert not result.dequantized.requires_grad


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("shape", [(1, 33), (33, 1), (63, 63)])
def test_odd_shapes(method, shape):
    weight, inputs = layer(*shape)
    inputs[:, shape[1] // 2] = 1.0
    coded = RECIPES[method].method in ("hptq", "hrtn")
    recipe = dataclasses.replace(RECIPES[method], **({"bits": 12.0} if coded else {"group_size": -1}))
    result = quantize_layer(weight, inputs.T @ inputs, recipe)
    assert torch.equal(result.weight.dequantize(), result.dequantized)
    assert result.record.bound_holds in (True, None)


@pytest.mark.parametrize("method", METHODS)
def test_zero_weights_stay_zero(method):
    _, inputs = layer()
    result = quantize_layer(torch.zeros(96, 160), inputs.T @ inputs, RECIPES[method])
    # A mid-rise grid has no zero, but steps as small as bfloat16 can hold.
    assert result.dequantized.abs().max() <= (1e-38 if "mid-rise" in method else 0)
    assert result.record.error <= 1e-60
    assert result.record.bound_holds is not False
    assert result.record.outlier_density <= 0.02
    assert result.record.relative_error == 0.0


def test_escalated_damping_is_recorded():
    weight, inputs = layer()
    hessian = inputs[:3].T @ inputs[:3]
    result = quantize_layer(weight, hessian, Recipe("gptq", bits=3, group_size=32, damping=1e-17))
    assert result.record.damping > 1e-17


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_non_finite_input_names_the_layer(method, bad):
    weight, inputs = layer()
    hessian = inputs.T @ inputs
    broken = weight.clone()
    broken[3, 5] = bad
    with pytest.raises(NumericalError, match=r"up_proj: expected finite weight, found .* at \[3, 5\]"):
        quantize_layer(broken, hessian, RECIPES[method], "up_proj")
    hessian[7, 8] = bad
    with pytest.raises(NumericalError, match=r"up_proj: expected finite Hessian, found .* at \[7, 8\]"):
        quantize_layer(weight, hessian, RECIPES[method], "up_proj")


def test_misfits_are_errors():
    weight, inputs = layer()
    hessian = inputs.T @ inputs
    with pytest.raises(CalibrationError, match="v_proj: expected a Hessian for gptq, found none"):
        quantize_layer(weight, None, RECIPES["gptq"], "v_proj")
    with pytest.raises(NumericalError, match="a Hessian of 160 input channels"):
        quantize_layer(weight, hessian[:5, :5], RECIPES["rtn"])
    with pytest.raises(NumericalError, match="a matrix"):
        quantize_layer(weight[0], hessian, RECIPES["gptq"])
    with pytest.raises(UnsupportedShapeError, match="divisible by group_size=128"):
        quantize_layer(weight, hessian, Recipe("gptq"))
    with pytest.raises(NumericalError, match="all zero"):
        quantize_layer(weight, torch.zeros(160, 160), RECIPES["gptq"])


def test_output_energy_is_the_squared_norm_of_the_outputs():
    weight, inputs = layer(1500, 40)
    inputs = inputs.double()
    expected = float((inputs @ weight.double().T).square().sum())
    assert output_energy(weight, inputs.T @ inputs) == pytest.approx(expected, rel=FLOAT64_TOLERANCE)
    assert output_energy(torch.zeros(0, 40), inputs.T @ inputs) == 0.0


def test_a_method_for_whole_models_is_refused() -> None:
    with pytest.raises(ConfigError, match="quantize_checkpoint"):
        quantize_layer(torch.ones(4, 4), torch.eye(4), Recipe("latq", bits=3.0))


def test_the_bound_counts_the_rounding_of_heavy_outliers() -> None:
    """Kept weights a thousand times the step: what bfloat16 loses of them is more than half a step."""
    weight, inputs = layer(33, 16)
    weight *= torch.where(torch.rand(33, 16, generator=torch.Generator().manual_seed(1)) < 0.3, 1000.0, 1.0)
    recipe = Recipe("ssqr", bits=3, outlier_rate=0.5, group_size=-1)
    assert quantize_layer(weight, inputs.T @ inputs, recipe).record.bound_holds is True


@pytest.mark.parametrize("method", ["gptq", "ssqr", "ssqr, overflow", "ssqr, everything"])
def test_enormous_weights_are_quantized_or_refused(method: str) -> None:
    weight, inputs = layer(32, 64)
    weight /= weight.abs().max()
    result = quantize_layer(1e30 * weight, inputs.T @ inputs, RECIPES[method])
    weight_from_tensors(result.weight.to_tensors(), RECIPES[method].scheme, (32, 64), "q_proj")
    assert result.record.bound_holds in (True, None)
    assert result.record.bound is not None
    assert math.isfinite(result.record.bound)
    with pytest.raises(NumericalError, match=r"q_proj: expected scales that bfloat16 can hold"):
        quantize_layer(3.3e38 * weight, inputs.T @ inputs, RECIPES[method], "q_proj")


def test_the_name_of_a_layer_replaces_what_an_error_of_the_lattice_says():
    recipe = Recipe("gptq", ignore=())
    with pytest.raises(NumericalError, match=r"^hessian: .*leave the layer out, with --ignore LAYER$"):
        layer_factor(torch.zeros(3, 3), recipe)
    with pytest.raises(NumericalError, match=r"^mlp\.up: .*leave the layer out, with --ignore mlp\.up$"):
        layer_factor(torch.zeros(3, 3), recipe, "mlp.up")
