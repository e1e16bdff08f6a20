"""K-best nearest plane: K = 1 is nearest plane, all survivors is the closest point, and the bound holds between."""

import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from helpers.builders import heavy_tailed_layer
from vllm_latq.errors import ConfigError, NumericalError
from vllm_latq.quantize.lattice import k_best_plane as beam
from vllm_latq.quantize.lattice.choices import ORDERS
from vllm_latq.quantize.lattice.factor import Factor, factorize
from vllm_latq.quantize.lattice.k_best_plane import k_best_plane, plane_of
from vllm_latq.quantize.lattice.nearest_plane import Rounding, nearest_plane
from vllm_latq.quantize.lattice.outliers import Grid, Overflow, Saving
from vllm_latq.quantize.lattice.scales import group_scales
from vllm_latq.quantize.methods.layer import quantize_layer
from vllm_latq.quantize.recipe import Recipe

FLOAT32_TOLERANCE = 1e-3


def true_loss(weight: torch.Tensor, rounding: Rounding, factor: Factor) -> torch.Tensor:
    error = rounding.dequantized.to(torch.float64) - weight.to(torch.float64)
    return ((error @ factor.hessian) * error).sum(1)


def case(rows: int, cols: int, seed: int = 0, order: str = "act") -> tuple[torch.Tensor, Factor, torch.Tensor]:
    weight, hessian = heavy_tailed_layer(rows, cols, seed)
    return weight, factorize(hessian, order), group_scales(weight, Grid.of_bits(2), -1)


@given(
    shape=st.tuples(st.sampled_from([1, 2, 33]), st.sampled_from([1, 2, 33, 70])),
    limits=st.sampled_from([(-math.inf, math.inf), (-2, 1)]),
    order=st.sampled_from(ORDERS),
    block=st.sampled_from([1, 7, 128]),
    seed=st.integers(0, 1 << 20),
)
@settings(max_examples=40, deadline=None)
def test_one_survivor_is_nearest_plane(shape, limits, order, block, seed):
    weight, factor, scales = case(*shape, seed, order)
    expected = nearest_plane(weight.double(), factor, scales, Grid(*limits), group_size=-1)
    found = k_best_plane(weight.double(), factor, scales, Grid(*limits), block_size=block, group_size=-1, width=1)
    assert torch.equal(found.z, expected.z)
    assert torch.equal(found.outlier_mask, expected.outlier_mask)
    torch.testing.assert_close(found.loss, expected.loss)
    torch.testing.assert_close(found.bound - found.excess, expected.bound)


def test_with_every_path_alive_it_finds_the_closest_point():
    """5 columns of 2 candidates each: 32 survivors are all, and none of the 4^5 points of the grid is closer."""
    weight, factor, scales = case(20, 5)
    found = k_best_plane(weight, factor, scales, Grid(-2, 1), group_size=-1, width=32)
    points = torch.tensor(list(itertools.product(range(-2, 2), repeat=5)), dtype=torch.float64)
    errors = scales.double()[:, None] * points - weight.double()[:, None]
    least = ((errors @ factor.hessian) * errors).sum(2).amin(1)
    greedy = nearest_plane(weight, factor, scales, Grid(-2, 1), group_size=-1)
    assert bool((found.loss < greedy.loss * 0.999).any())
    # A coordinate may be farther off than the two nearest integers in the closest point, though rarely.
    assert float((found.loss <= least * 1.001).double().mean()) >= 0.9
    assert bool((found.loss >= least * 0.999).all())


@pytest.mark.parametrize("limits", [(-math.inf, math.inf), (-2, 1)])
@pytest.mark.parametrize("group_size", [-1, 16])
def test_more_survivors_lose_less(limits, group_size):
    weight, hessian = heavy_tailed_layer(64, 96)
    factor = factorize(hessian)
    scales = group_scales(weight, Grid.of_bits(2), group_size)
    losses = []
    for width in (1, 4, 16):
        found = k_best_plane(weight, factor, scales, Grid(*limits), block_size=32, group_size=group_size, width=width)
        torch.testing.assert_close(true_loss(weight, found, factor), found.loss, rtol=FLOAT32_TOLERANCE, atol=0)
        losses.append(float(found.loss.sum()))
    assert losses[0] > losses[1] > losses[2]
    if limits == (-math.inf, math.inf):
        assert bool((found.loss <= found.bound).all())


def test_bands_and_blocks_do_not_change_the_result(monkeypatch):
    weight, factor, scales = case(50, 40)
    whole = k_best_plane(weight.double(), factor, scales, Grid(-2, 1), group_size=-1)
    monkeypatch.setattr(beam, "_BAND", 40 * 4 * 7)
    banded = k_best_plane(weight.double(), factor, scales, Grid(-2, 1), block_size=9, group_size=-1)
    assert torch.equal(whole.z, banded.z)


def test_saving_keeps_weights_that_would_cost_more():
    weight, factor, scales = case(64, 96)
    price = 0.5 * float(factor.diagonal.mean() * scales.float().square().mean())
    greedy = nearest_plane(weight, factor, scales, Grid.of_bits(2), Saving(price), group_size=-1)
    found = k_best_plane(weight, factor, scales, Grid.of_bits(2), Saving(price), group_size=-1)
    assert found.outlier_values is not None
    assert not found.z[found.outlier_mask].any()
    assert not found.outlier_values[~found.outlier_mask].any()
    assert 0 < found.outlier_rate < 0.2
    torch.testing.assert_close(true_loss(weight, found, factor), found.loss, rtol=FLOAT32_TOLERANCE, atol=0)
    assert bool((found.loss <= found.bound).all())

    def charged(rounding: Rounding) -> float:
        return float(rounding.loss.sum()) + price * int(rounding.outlier_mask.sum())

    assert charged(found) < charged(greedy)


@pytest.mark.parametrize("octaves", [-90, 100])
@pytest.mark.parametrize("limits", [(-math.inf, math.inf), (-2, 1)])
def test_costs_neither_overflow_nor_vanish(octaves, limits):
    """Squares of weights of 2^100, or 2^-90, are no float32 numbers; the integers are the same, the loss is exact."""
    weight, factor, scales = case(33, 40)
    factor_of_two = 2.0**octaves
    found = k_best_plane(weight, factor, scales, Grid(*limits), group_size=-1)
    again = k_best_plane(weight * factor_of_two, factor, scales * factor_of_two, Grid(*limits), group_size=-1)
    assert torch.equal(again.z, found.z)
    assert torch.equal(again.loss, found.loss * factor_of_two**2)
    assert torch.equal(again.bound, found.bound * factor_of_two**2)


def test_saving_of_enormous_weights():
    weight, factor, scales = case(33, 40)
    price = 0.5 * float(factor.diagonal.mean() * scales.float().square().mean())
    found = k_best_plane(weight, factor, scales, Grid.of_bits(2), Saving(price), group_size=-1)
    moved = (weight * 2.0**100, factor, scales * 2.0**100)
    again = k_best_plane(*moved, Grid.of_bits(2), Saving(price * 2.0**200), group_size=-1)
    assert found.outlier_mask.any()
    assert torch.equal(again.outlier_mask, found.outlier_mask)
    assert again.outlier_values is not None
    assert found.outlier_values is not None
    assert torch.equal(again.outlier_values, found.outlier_values * 2.0**100)


def test_unsupported_arguments_are_refused():
    weight, factor, scales = case(4, 6)
    with pytest.raises(ConfigError, match="outliers that cost"):
        k_best_plane(weight, factor, scales, Grid(-2, 1), Overflow(), group_size=-1)
    with pytest.raises(ConfigError, match="nearest rounding"):
        plane_of(2, seed=1)
    with pytest.raises(NumericalError, match="integers below"):
        k_best_plane(weight, factor, torch.tensor(1e-12))


def test_bound_of_a_beam_counts_residuals_longer_than_half_a_scale() -> None:
    """A survivor that rounds up, outside its cell, so that a later column is not clipped, ends with the least loss."""
    hessian = torch.eye(32, dtype=torch.float64) * 1e-4
    hessian[:2, :2] = torch.tensor([[3.025, 0.45], [0.45, 0.1]])
    weight = torch.zeros(1, 32)
    weight[0, :2] = torch.tensor([0.4, 7.0])
    recipe = Recipe("gptq", 4, group_size=32, beam=2, scales="absmax", order="natural", damping=1e-6)
    record = quantize_layer(weight, hessian, recipe).record
    assert record.bound_holds
    half_steps = float(factorize(hessian, "natural", 1e-6).diagonal.sum()) / 4
    assert record.rounding_error > 1.3 * half_steps
