"""Nearest plane: the papers' theorems as tests, and the behaviour at the edges."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from helpers.babai import babai
from vllm_latq.errors import ConfigError, NumericalError
from vllm_latq.quantize.lattice.choices import ORDERS
from vllm_latq.quantize.lattice.factor import Factor, factorize
from vllm_latq.quantize.lattice.nearest_plane import Rounding, nearest_plane
from vllm_latq.quantize.lattice.outliers import UNBOUNDED, Clip, Grid, Overflow, Saving

FLOAT64_TOLERANCE = 1e-10
FLOAT32_TOLERANCE = 1e-3
SHAPES = st.tuples(st.sampled_from([1, 2, 33, 63]), st.sampled_from([1, 2, 33, 63, 130]))
BLOCKS = st.sampled_from([1, 7, 32, 128])
LIMITS = st.sampled_from([(-math.inf, math.inf), (-2, 1), (-8, 7)])


def case(rows: int, cols: int, seed: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Heavy-tailed weight [r, c], Gram matrix [c, c] and element-wise scales [r, c], all float64."""
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(rows, cols, generator=generator, dtype=torch.float64)
    weight *= 1 + torch.rand(rows, cols, generator=generator, dtype=torch.float64).pow(8) * 5
    inputs = torch.randn(cols + 5, cols, generator=generator, dtype=torch.float64)
    inputs = inputs + 1.5 * inputs[:, :1] + inputs.roll(1, 1)
    scales = 0.2 + torch.rand(rows, cols, generator=generator, dtype=torch.float64)
    return weight, inputs.T @ inputs, scales


def textbook_gptq(weight, factor: Factor, scales, low, high) -> torch.Tensor:
    """GPTQ's unblocked loop on whole rows (Algorithm 1), sharing nothing with the blocked one."""
    permuted, steps = weight[:, factor.order].clone(), scales.expand_as(weight)[:, factor.order]
    integers = torch.zeros_like(weight)
    upper = torch.linalg.cholesky(torch.linalg.inv(factor.hessian[factor.order][:, factor.order]), upper=True)
    for t in range(weight.shape[1]):
        nearest = torch.round(permuted[:, t] / steps[:, t])
        nearest = nearest.clamp(low, high)
        error = (permuted[:, t] - steps[:, t] * nearest) / upper[t, t]
        permuted[:, t + 1 :] -= torch.outer(error, upper[t, t + 1 :])
        integers[:, factor.order[t]] = nearest
    return integers.to(torch.int32)


def true_loss(weight: torch.Tensor, rounding: Rounding, factor: Factor) -> torch.Tensor:
    """(q - w)^T H (q - w) of each row, float64."""
    error = rounding.dequantized.to(torch.float64) - weight.to(torch.float64)
    return ((error @ factor.hessian) * error).sum(1)


@given(
    shape=SHAPES,
    limits=LIMITS,
    name=st.sampled_from(ORDERS),
    block=st.sampled_from([1, 7, 32, 128]),
    seed=st.integers(),
)
@settings(max_examples=80, deadline=None)
def test_blocked_gptq_equals_the_unblocked_loop_and_babai(shape, limits, name, block, seed):
    weight, hessian, scales = case(*shape, seed % 2**31)
    factor = factorize(hessian, name)
    rounding = nearest_plane(weight, factor, scales, Grid(*limits), block_size=block)
    assert torch.equal(rounding.z, textbook_gptq(weight, factor, scales, *limits))
    # Theorem 4: Babai's algorithm in the opposite order finds the same integers, clipped or not.
    assert torch.equal(rounding.z, babai(weight, factor.hessian, scales, factor.order, *limits))
    assert torch.equal(rounding.dequantized, rounding.z * scales)


@given(
    shape=SHAPES,
    limits=LIMITS,
    name=st.sampled_from(ORDERS),
    outliers=st.sampled_from([Clip(), Overflow(), Saving(0.1)]),
    seed=st.integers(),
)
@settings(max_examples=80, deadline=None)
def test_error_identity_holds_for_every_choice_of_outliers(shape, limits, name, outliers, seed):
    weight, hessian, scales = case(*shape, seed % 2**31)
    factor = factorize(hessian, name)
    rounding = nearest_plane(weight, factor, scales, Grid(*limits), outliers)
    expected = true_loss(weight, rounding, factor)
    torch.testing.assert_close(rounding.loss, expected, rtol=FLOAT64_TOLERANCE, atol=FLOAT64_TOLERANCE)


@given(shape=SHAPES, name=st.sampled_from(ORDERS), kept=st.booleans(), seed=st.integers())
@settings(max_examples=60, deadline=None)
def test_unclipped_loss_is_below_theorem_4(shape, name, kept, seed):
    weight, hessian, scales = case(*shape, seed % 2**31)
    factor = factorize(hessian, name)
    grid = Grid(-4, 3) if kept else UNBOUNDED
    rounding = nearest_plane(weight, factor, scales, grid, Overflow())
    bound = (scales[:, factor.order].square() @ factor.diagonal) / 4
    torch.testing.assert_close(rounding.bound, bound, rtol=FLOAT64_TOLERANCE, atol=0)
    assert bool((rounding.loss <= rounding.bound).all())


def test_loss_is_a_third_of_the_bound_on_average():
    weight, hessian, scales = case(400, 63, 1)
    rounding = nearest_plane(weight, factorize(hessian), scales)
    assert float(rounding.loss.sum() / rounding.bound.sum()) == pytest.approx(1 / 3, rel=0.03)


def test_orthogonal_inputs_make_nearest_plane_plain_rounding():
    weight, _, scales = case(33, 63, 2)
    factor = factorize(torch.diag(torch.arange(1.0, 64.0, dtype=torch.float64)))
    rounding = nearest_plane(weight, factor, scales)
    assert torch.equal(rounding.z, torch.round(weight / scales).to(torch.int32))


@pytest.mark.parametrize("outliers", [Clip(), Overflow()])
def test_overflow_is_clipped_or_kept(outliers):
    weight, hessian, scales = case(33, 63, 3)
    factor = factorize(hessian)
    rounding = nearest_plane(weight, factor, scales, Grid(-2, 1), outliers)
    outside = rounding.outlier_mask
    assert 0 < int(outside.sum()) < outside.numel()
    assert rounding.outlier_rate == int(outside.sum()) / outside.numel()
    assert set(rounding.z[~outside].tolist()) == {-2, -1, 0, 1}
    if outliers == Clip():
        assert set(rounding.z[outside].tolist()) <= {-2, 1}
    else:
        assert not rounding.z[outside].any()
        assert rounding.outlier_values is not None
        assert rounding.outlier_values.dtype == torch.bfloat16
        assert not rounding.outlier_values[~outside].any()
        assert torch.equal(rounding.dequantized[outside], rounding.outlier_values[outside].to(torch.float64))


def test_exact_outliers_leave_only_the_rounding_to_bfloat16():
    # On one column everything is an outlier: what is stored is the weight itself in 16 bits.
    weight = torch.tensor([[100.3], [-77.7]], dtype=torch.float64)
    rounding = nearest_plane(weight, factorize(torch.ones(1, 1)), torch.tensor(1.0), Grid(-2, 1), Overflow())
    assert torch.equal(rounding.dequantized, weight.to(torch.bfloat16).to(torch.float64))


def test_saving_keeps_costly_weights_inside_and_outside_the_grid():
    weight, _, scales = case(20, 33, 0)
    factor = factorize(torch.eye(33, dtype=torch.float64), damping=1.0)  # D = 2 everywhere
    cost = 2 * (weight - (weight / scales).round().clamp(-2, 1) * scales).square()
    outside = (weight / scales).round() != (weight / scales).round().clamp(-2, 1)
    grid = Grid(-2, 1)
    kept = nearest_plane(weight, factor, scales, grid, Saving(0.05), group_size=1).outlier_mask
    assert torch.equal(kept, cost > 0.05)
    assert (kept & ~outside).any()
    assert (~kept & outside).any()


def test_an_offset_moves_the_grid():
    weight, _, scales = case(20, 33, 0)
    factor = factorize(torch.eye(33, dtype=torch.float64))
    rounding = nearest_plane(weight, factor, scales, Grid(-4, 3, 0.5), group_size=1)
    expected = (weight / scales - 0.5).round().clamp(-4, 3)
    assert torch.equal(rounding.z, expected.to(torch.int32))
    torch.testing.assert_close(rounding.dequantized, scales * (expected + 0.5))
    torch.testing.assert_close(rounding.loss, true_loss(weight, rounding, factor))


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize(("group_size", "groups"), [(1, 60), (20, 3), (60, 1), (-1, 1)])
def test_group_scales_follow_the_original_columns(order, group_size, groups):
    weight, hessian, scales = case(5, 60, 4)
    grouped = scales[:, :groups].contiguous()
    factor = factorize(hessian, order)
    expanded = nearest_plane(weight, factor, grouped.repeat_interleave(60 // groups, 1), Grid(-4, 3))
    rounding = nearest_plane(weight, factor, grouped, Grid(-4, 3), group_size=group_size)
    assert torch.equal(rounding.z, expanded.z)
    assert torch.equal(rounding.dequantized, expanded.dequantized)
    torch.testing.assert_close(rounding.bound, expanded.bound, rtol=FLOAT64_TOLERANCE, atol=0)


def test_scalar_scale_equals_the_same_scale_everywhere():
    weight, hessian, _ = case(7, 33, 5)
    factor = factorize(hessian)
    scalar = nearest_plane(weight, factor, torch.tensor(0.25, dtype=torch.float64))
    full = nearest_plane(weight, factor, torch.full((7, 33), 0.25, dtype=torch.float64))
    assert torch.equal(scalar.z, full.z)
    assert torch.equal(scalar.dequantized, full.dequantized)
    torch.testing.assert_close(scalar.bound, full.bound, rtol=FLOAT64_TOLERANCE, atol=0)


def test_float32_recursion_keeps_identity_and_bound():
    weight, hessian, scales = case(64, 130, 6)
    factor = factorize(hessian)
    rounding = nearest_plane(weight.float(), factor, scales.float())
    assert rounding.dequantized.dtype == torch.float32
    torch.testing.assert_close(
        rounding.loss, true_loss(weight.float(), rounding, factor), rtol=FLOAT32_TOLERANCE, atol=0
    )
    assert bool((rounding.loss <= rounding.bound).all())


def test_gptq_beats_plain_rounding_on_the_same_scales():
    weight, hessian, scales = case(64, 130, 7)
    factor = factorize(hessian)
    rounding = nearest_plane(weight, factor, scales, Grid(-4, 3))
    plain = (weight / scales).round().clamp(-4, 3) * scales - weight
    assert float(rounding.loss.sum()) < 0.5 * float(((plain @ factor.hessian) * plain).sum())


@pytest.mark.parametrize("shape", [(0, 5), (5, 0)])
def test_empty_weights(shape):
    factor = factorize(torch.eye(shape[1]))
    rounding = nearest_plane(torch.zeros(shape), factor, torch.tensor(1.0), Grid(-2, 1))
    assert rounding.z.shape == rounding.dequantized.shape == shape
    assert rounding.outlier_rate == 0.0


def test_inputs_are_left_alone():
    weight, hessian, scales = case(5, 33, 8)
    before = weight.clone(), hessian.clone(), scales.clone()
    nearest_plane(weight, factorize(hessian), scales, Grid(-2, 1), Overflow())
    assert all(torch.equal(a, b) for a, b in zip(before, (weight, hessian, scales), strict=True))


def test_non_finite_weights_and_huge_integers_are_errors():
    weight, hessian, _ = case(3, 4, 9)
    factor = factorize(hessian)
    broken = weight.clone()
    broken[1, 2] = math.nan
    for bad, scale in ((broken, 1.0), (weight.float(), 1e-9)):
        with pytest.raises(NumericalError, match="nearest_plane: expected finite weights and integers below"):
            nearest_plane(bad, factor, torch.tensor(scale))


def test_mismatched_arguments_are_errors():
    weight, hessian, scales = case(3, 6, 10)
    factor = factorize(hessian)
    for wrong, group_size in ((scales[:, :2], 2), (scales[:2], None), (scales[:, :1], 3), (scales[0], 1)):
        with pytest.raises(ConfigError, match="scales of shape"):
            nearest_plane(weight, factor, wrong, group_size=group_size)
