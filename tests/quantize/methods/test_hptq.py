"""HPTQ and HRTN: the encoded bits meet the target, counted as they are stored."""

import pytest
import torch

from helpers.builders import heavy_tailed_layer
from vllm_latq.coding.huffman.encoder import encode
from vllm_latq.errors import NumericalError
from vllm_latq.format.encodings.huffman import HuffmanWeight
from vllm_latq.format.validate import weight_from_tensors
from vllm_latq.quantize.lattice.factor import factorize
from vllm_latq.quantize.methods.hptq import BITS_TOLERANCE, hptq, hrtn
from vllm_latq.quantize.methods.layer import quantize_layer
from vllm_latq.quantize.recipe import Recipe

FLOAT32_TOLERANCE = 1e-3
EXTREME = [
    Recipe("hrtn", bits=2.0),
    Recipe("hptq", bits=2.0),
    Recipe("hptq", bits=2.0, reduction="lll"),
]


def search(method: str, weight: torch.Tensor, hessian: torch.Tensor, target: float):
    return hptq(weight, factorize(hessian), target) if method == "hptq" else hrtn(weight, target)


@pytest.mark.parametrize("method", ["hptq", "hrtn"])
@pytest.mark.parametrize("target", [1.5, 2.0, 3.125, 6.0])
def test_bits_are_met_and_are_those_of_the_stored_tensors(method, target):
    weight, hessian = heavy_tailed_layer(300, 192)
    found = search(method, weight, hessian, target)
    assert found.note == ""
    assert target - BITS_TOLERANCE <= found.bits <= target
    stored = HuffmanWeight(found.scale.reshape(1), encode(found.integers))
    assert stored.storage_bits() / weight.numel() == found.bits
    assert torch.equal(stored.integers(), found.integers)


def test_many_rows_are_searched_on_a_sample_first():
    weight, hessian = heavy_tailed_layer(1500, 64)
    found = search("hptq", weight, hessian, 3.0)
    assert 3.0 - BITS_TOLERANCE <= found.bits <= 3.0
    assert found.passes <= 4


def test_hptq_loss_is_measured_exactly_bounded_and_below_hrtn():
    weight, hessian = heavy_tailed_layer(256, 192)
    factor = factorize(hessian)
    found, plain = hptq(weight, factor, 3.0), hrtn(weight, 3.0)

    def loss(integers, scale):
        error = (integers.float() * scale - weight).double()
        return ((error @ factor.hessian) * error).sum(1)

    assert found.rounding is not None
    measured = loss(found.integers, found.scale)
    torch.testing.assert_close(measured, found.rounding.loss, rtol=FLOAT32_TOLERANCE, atol=0)
    assert bool((measured <= found.rounding.bound).all())
    assert float(measured.sum()) < 0.7 * float(loss(plain.integers, plain.scale).sum())
    assert plain.rounding is None


def test_hrtn_is_plain_rounding_on_its_scale():
    weight, _ = heavy_tailed_layer(64, 96)
    found = hrtn(weight, 4.0)
    assert found.scale.dtype == torch.float32
    assert torch.equal(found.integers, (weight / found.scale).round().to(torch.int32))


@pytest.mark.parametrize("method", ["hptq", "hrtn"])
def test_too_few_bits_is_an_error_that_says_what_was_possible(method):
    weight, hessian = heavy_tailed_layer(64, 96)
    with pytest.raises(
        NumericalError, match=r"^bits: expected a Huffman code of at most 1\.01 bits per weight, found 1\.\d+"
    ):
        search(method, weight, hessian, 1.01)


def test_too_many_bits_stop_at_the_finest_scale_and_say_so():
    weight = torch.ones(64, 96)
    found = hrtn(weight, 8.0)
    assert found.bits < 2
    assert "the nearest found to 8" in found.note


@pytest.mark.parametrize("method", ["hptq", "hrtn"])
def test_zero_weights_take_one_pass(method):
    _, hessian = heavy_tailed_layer(2, 128)
    found = search(method, torch.zeros(64, 128), hessian, 3.0)
    assert found.passes == 1
    assert not found.integers.any()
    assert float(found.scale) > 0


def extreme(size, single):
    """A layer whose largest weight is `size`, and its only one other than zero if it is to be single."""
    weight, hessian = heavy_tailed_layer(24, 32)
    weight = weight.double() / weight.abs().max()
    if single:
        weight[weight.abs() < 1] = 0
    weight = weight * size
    return (weight.float() if 1e-44 <= size < 3.4e38 else weight), hessian


@pytest.mark.parametrize("recipe", EXTREME, ids=lambda recipe: f"{recipe.method}-{recipe.reduction}")
@pytest.mark.parametrize("single", [False, True], ids=["all", "one"])
@pytest.mark.parametrize("size", [1e-200, 1e-44, 1e-38, 1e30])
def test_scales_of_tiny_and_large_weights_are_valid(recipe, size, single):
    weight, hessian = extreme(size, single)
    found = quantize_layer(weight, hessian, recipe, "layer")
    weight_from_tensors(found.weight.to_tensors(), recipe.scheme, tuple(weight.shape), "layer")
    assert bool(torch.isfinite(found.dequantized).all())


@pytest.mark.parametrize("recipe", EXTREME, ids=lambda recipe: f"{recipe.method}-{recipe.reduction}")
@pytest.mark.parametrize("single", [False, True], ids=["all", "one"])
@pytest.mark.parametrize("size", [3e38, 1e300])
def test_weights_beyond_the_scales_are_refused(recipe, size, single):
    weight, hessian = extreme(size, single)
    with pytest.raises(NumericalError, match=r"^layer: expected weights below 2\^127, found weights up to "):
        quantize_layer(weight, hessian, recipe, "layer")


@pytest.mark.parametrize(("rows", "cols"), [(33, 63), (1, 500), (500, 1)])
def test_odd_shapes_stay_at_or_below_the_target(rows, cols):
    weight, hessian = heavy_tailed_layer(rows, cols)
    found = search("hptq", weight, hessian, 4.0)
    assert found.bits <= 4.0
    assert found.integers.shape == (rows, cols)
    assert bool(found.note) == (found.bits < 4.0 - BITS_TOLERANCE)
