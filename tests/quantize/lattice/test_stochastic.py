"""Stochastic rounding: unbiased, seeded per layer, bounded, and the same however the work is cut."""

import dataclasses
from pathlib import Path

import pytest
import torch

from vllm_latq.cli.main import main
from vllm_latq.format.reader import CheckpointReader
from vllm_latq.quantize.lattice.factor import factorize
from vllm_latq.quantize.lattice.nearest_plane import nearest_plane
from vllm_latq.quantize.methods.layer import quantize_layer
from vllm_latq.quantize.recipe import Recipe

STEP = torch.tensor(0.05)


def layer(rows: int = 64, cols: int = 96) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    weight = 0.05 * torch.randn(rows, cols, generator=generator)
    inputs = torch.randn(3 * cols, cols, generator=generator)
    inputs = inputs + 0.7 * inputs.roll(1, 1)
    return weight, inputs.T @ inputs


def test_it_is_unbiased_and_rounds_to_a_neighbour():
    weight = torch.linspace(-0.1, 0.1, 41).expand(4000, 41)
    rounding = nearest_plane(weight, factorize(torch.eye(41)), STEP, seed=0)
    assert bool(((rounding.z - weight / STEP).abs() < 1 + 1e-5).all())
    # 4000 draws of a coin: five standard deviations of the mean, at most 5 * 0.5 / sqrt(4000) steps.
    torch.testing.assert_close(rounding.dequantized.mean(0), weight[0], rtol=0, atol=0.04 * float(STEP))


def test_multiples_of_the_step_stay():
    integers = torch.randint(-5, 6, (30, 20)).double()
    rounding = nearest_plane(integers / 4, factorize(torch.eye(20)), torch.tensor(0.25), seed=3)
    assert torch.equal(rounding.z.double(), integers)


def test_its_error_is_a_sixth_of_its_bound_on_average():
    weight, hessian = layer()
    factor = factorize(hessian)
    rounding = nearest_plane(weight, factor, STEP, seed=0)
    assert bool((rounding.loss <= rounding.bound).all())
    assert float(rounding.loss.sum() / rounding.bound.sum()) == pytest.approx(1 / 6, rel=0.05)
    nearest = nearest_plane(weight, factor, STEP)
    assert torch.equal(rounding.bound, 4 * nearest.bound)


@pytest.mark.parametrize("block_size", [1, 50])
def test_blocks_do_not_change_the_draws(block_size):
    weight, hessian = layer()
    factor = factorize(hessian.double())
    whole = nearest_plane(weight.double(), factor, STEP, seed=5)
    cut = nearest_plane(weight.double(), factor, STEP, seed=5, block_size=block_size)
    assert torch.equal(whole.z, cut.z)


@pytest.mark.parametrize("method", ["gptq", "ssqr", "hptq"])
def test_layers_are_seeded_by_recipe_and_name(method):
    weight, hessian = layer()
    grid = {"bits": 3.5} if method == "hptq" else {"bits": 3, "group_size": 32}
    recipe = Recipe(method, rounding="stochastic", seed=1, **grid)
    result = quantize_layer(weight, hessian, recipe, "q_proj")
    sixth = result.record.bound / 6
    # The error of weights that ssqr clips counts as it is.
    most = 1.5 * sixth if method == "ssqr" else sixth
    assert sixth <= result.record.expected_error <= most
    assert result.record.bound_holds is (None if method == "gptq" else True)
    assert torch.equal(quantize_layer(weight, hessian, recipe, "q_proj").dequantized, result.dequantized)
    for other in (
        quantize_layer(weight, hessian, recipe, "k_proj"),
        quantize_layer(weight, hessian, dataclasses.replace(recipe, seed=2), "q_proj"),
    ):
        assert not torch.equal(other.dequantized, result.dequantized)


def test_from_the_command_line(mini_model: Path, calibration_text: Path, tmp_path: Path) -> None:
    options = ["--method", "gptq", "--bits", "8", "--rounding", "stochastic"]
    sizes = ["--num-samples", "4", "--seq-len", "64", "--calibration", str(calibration_text)]
    for name, seed in (("a", "7"), ("b", "7")):
        assert main(["quantize", str(mini_model), str(tmp_path / name), *options, *sizes, "--seed", seed]) == 0
    first, same = (CheckpointReader(tmp_path / name) for name in "ab")
    assert first.config.fingerprint == same.config.fingerprint
    assert first.config.recipe["rounding"] == "stochastic"
    layers = first.report()["layers"]
    assert all(record["error"] < record["bound"] for record in layers)
