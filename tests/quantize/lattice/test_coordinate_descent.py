"""Coordinate descent: the loss falls, all weights stay on the grid, and the bound counts residuals outside cells."""

import pytest
import torch

from helpers.builders import heavy_tailed_layer
from vllm_latq.quantize.lattice.coordinate_descent import refine
from vllm_latq.quantize.lattice.factor import Factor, factorize
from vllm_latq.quantize.lattice.nearest_plane import Rounding, nearest_plane
from vllm_latq.quantize.lattice.outliers import OUTLIER_DTYPE, Grid
from vllm_latq.quantize.lattice.scales import SCALE_DTYPE, group_scales
from vllm_latq.quantize.methods.ssqr import ssqr, ssqr_by_saving

FLOAT32_TOLERANCE = 1e-3
GRID, GROUP = Grid.of_bits(2), 32


def true_loss(weight: torch.Tensor, rounding: Rounding, factor: Factor) -> torch.Tensor:
    error = rounding.dequantized.to(torch.float64) - weight.to(torch.float64)
    return ((error @ factor.hessian) * error).sum(1)


def bound_by_definition(weight: torch.Tensor, rounding: Rounding, factor: Factor) -> torch.Tensor:
    """Residuals step by step, from the errors before each, with the triangle V of H = V diag(D) V^T."""
    moved = (weight.double() - rounding.dequantized.double())[:, factor.order]
    residuals = moved @ factor.unit_triangle()
    halves = rounding.scales.double().repeat_interleave(GROUP, 1)[:, factor.order] / 2
    return (residuals.square().maximum(halves.square()) * factor.diagonal).sum(1)


def start(method: str) -> tuple[torch.Tensor, Factor, Rounding]:
    weight, hessian = heavy_tailed_layer(80, 96)
    factor = factorize(hessian)
    scales = group_scales(weight, GRID, GROUP, "signed")
    if method == "gptq":
        return weight, factor, nearest_plane(weight, factor, scales, GRID, group_size=GROUP)
    if method == "saving":
        return weight, factor, ssqr_by_saving(weight, factor, GRID, GROUP, 0.02).rounding
    return weight, factor, ssqr(weight, factor, scales, GRID, GROUP, 0.02).rounding


@pytest.mark.parametrize("method", ["gptq", "overflow", "saving"])
def test_sweeps_lower_the_loss_and_keep_the_invariants(method):
    weight, factor, before = start(method)
    rate = 0.02 if method == "saving" else None
    after = refine(weight, factor, before, 3, rate)
    torch.testing.assert_close(true_loss(weight, after, factor), after.loss, rtol=FLOAT32_TOLERANCE, atol=0)
    assert after.loss.sum() < 0.95 * before.loss.sum()
    torch.testing.assert_close(after.bound, bound_by_definition(weight, after, factor), rtol=FLOAT32_TOLERANCE, atol=0)
    assert bool((after.loss <= after.bound).all())
    assert int(after.z.min()) >= GRID.low
    assert int(after.z.max()) <= GRID.high
    assert torch.equal(after.scales, after.scales.to(SCALE_DTYPE).to(after.scales))
    if method == "gptq":
        assert after.outlier_values is None
        return
    assert after.outlier_values is not None
    assert after.outlier_values.dtype == OUTLIER_DTYPE
    assert not after.z[after.outlier_mask].any()
    assert not after.outlier_values[~after.outlier_mask].any()
    assert torch.equal(after.outlier_mask, before.outlier_mask) == (method == "overflow")
    assert after.outlier_rate <= 0.02


def test_at_its_fixed_point_no_single_integer_can_move():
    """After enough sweeps every weight sits at the grid point nearest to its optimum, all others held."""
    weight, factor, before = start("gptq")
    after = refine(weight.double(), factor, before, 100)
    again = refine(weight.double(), factor, after, 1)
    assert float(again.loss.sum()) == pytest.approx(float(after.loss.sum()), rel=1e-3)
    gradient = (after.dequantized.double() - weight.double()) @ factor.hessian
    curvature = factor.hessian.diagonal()
    steps = after.scales.double().repeat_interleave(GROUP, 1)
    optimum = after.dequantized.double() - gradient / curvature
    best = (optimum / steps).round().clamp(GRID.low, GRID.high)
    assert float((best == after.z).double().mean()) > 0.995


def test_a_perfect_rounding_is_left_alone():
    generator = torch.Generator().manual_seed(0)
    _, hessian = heavy_tailed_layer(8, 32)
    factor = factorize(hessian)
    integers = torch.randint(-2, 2, (8, 32), generator=generator)
    scales = torch.full((8, 1), 0.25, dtype=SCALE_DTYPE)
    before = nearest_plane(0.25 * integers.float(), factor, scales, GRID, group_size=-1)
    after = refine(0.25 * integers.float(), factor, before, 2)
    assert torch.equal(after.z, integers.to(torch.int32))
    assert torch.equal(after.scales, before.scales.expand_as(after.scales))


def test_no_sweeps_and_empty_weights_change_nothing():
    weight, factor, before = start("gptq")
    assert refine(weight, factor, before, 0) is before
    empty = nearest_plane(weight[:0], factor, torch.ones(0, 3), GRID, group_size=GROUP)
    assert refine(weight[:0], factor, empty, 2) is empty
