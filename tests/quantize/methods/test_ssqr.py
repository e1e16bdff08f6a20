"""SSQR: the outlier rate is met, and the certificate holds for what is stored."""

import math

import pytest
import torch

from helpers.builders import heavy_tailed_layer
from vllm_latq.quantize.lattice.factor import factorize
from vllm_latq.quantize.lattice.nearest_plane import nearest_plane
from vllm_latq.quantize.lattice.outliers import Grid, Saving
from vllm_latq.quantize.lattice.scales import group_scales
from vllm_latq.quantize.methods.ssqr import LARGEST_OCTAVES, RATE_TOLERANCE, ssqr, ssqr_by_saving

FLOAT32_TOLERANCE = 1e-3


def run(weight, hessian, bits=3, group_size=-1, outlier_rate=0.01):
    factor = factorize(hessian)
    base = group_scales(weight, Grid.of_bits(bits), group_size)
    return factor, base, ssqr(weight, factor, base, Grid.of_bits(bits), group_size, outlier_rate)


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
@pytest.mark.parametrize("outlier_rate", [0.01, 0.05])
def test_outlier_rate_is_met(bits, outlier_rate):
    weight, hessian = heavy_tailed_layer(256, 192)
    _, base, found = run(weight, hessian, bits, 64, outlier_rate)
    multiplier = float(found.rounding.scales[0, 0] / base[0, 0])
    assert found.note == ""
    assert (1 - RATE_TOLERANCE) * outlier_rate <= found.rounding.outlier_rate <= outlier_rate
    torch.testing.assert_close(found.rounding.scales.float(), base.float() * multiplier, rtol=2.0**-7, atol=0)
    outliers = found.rounding.outlier_mask
    assert int(found.rounding.z.min()) >= -(1 << (bits - 1))
    assert int(found.rounding.z.max()) < 1 << (bits - 1)
    assert not found.rounding.z[outliers].any()


def test_error_is_below_the_bound_and_identity_holds():
    weight, hessian = heavy_tailed_layer(256, 192)
    factor, _, found = run(weight, hessian, 3, 64)
    error = (found.rounding.dequantized - weight).double()
    loss = ((error @ factor.hessian) * error).sum(1)
    torch.testing.assert_close(loss, found.rounding.loss, rtol=FLOAT32_TOLERANCE, atol=0)
    assert bool((loss <= found.rounding.bound).all())


def test_many_rows_are_searched_on_a_sample_first():
    weight, hessian = heavy_tailed_layer(1024, 48)
    _, _, found = run(weight, hessian, 4, 16)
    assert found.note == ""
    assert (1 - RATE_TOLERANCE) * 0.01 <= found.rounding.outlier_rate <= 0.01
    assert found.passes <= 6


@pytest.mark.parametrize(("rows", "cols"), [(1, 1), (1, 33), (33, 1), (33, 63)])
def test_small_matrices_keep_as_many_outliers_as_fit(rows, cols):
    weight, hessian = heavy_tailed_layer(rows, cols)
    _, _, found = run(weight, hessian, 4, -1, 0.05)
    assert int(found.rounding.outlier_mask.sum()) <= math.floor(0.05 * rows * cols)
    assert torch.isfinite(found.rounding.dequantized).all()


def test_zero_weights_have_no_outliers():
    _, hessian = heavy_tailed_layer(8, 32)
    _, _, found = run(torch.zeros(8, 32), hessian, 4, 16)
    assert found.rounding.outlier_rate == 0
    assert not found.rounding.dequantized.any()
    assert "outlier rate 0.0000%" in found.note


def test_unreachable_rate_is_recorded_with_the_fewest_outliers(monkeypatch):
    # With the largest multiplier below what the rate needs, no probe is feasible.
    monkeypatch.setattr("vllm_latq.quantize.methods.ssqr.LARGEST_OCTAVES", -1.0)
    assert LARGEST_OCTAVES > 0
    weight, hessian = heavy_tailed_layer(64, 96)
    _, _, found = run(weight, hessian, 3, 32, 0.01)
    assert torch.equal(
        found.rounding.scales.to(torch.bfloat16),
        (group_scales(weight, Grid.of_bits(3), 32).float() / 2).to(torch.bfloat16),
    )
    assert found.rounding.outlier_rate > 0.01
    assert found.note == f"outlier rate {found.rounding.outlier_rate:.4%}, the nearest found to 1.0000%"


def test_more_outliers_make_less_error():
    weight, hessian = heavy_tailed_layer(256, 192)
    losses = [float(run(weight, hessian, 3, 64, rate)[2].rounding.loss.sum()) for rate in (0.005, 0.02, 0.08)]
    assert losses[0] > losses[1] > losses[2]


@pytest.mark.parametrize("bits", [2, 3, 4])
def test_outliers_by_saving_lower_loss_and_bound_at_the_same_rate(bits: int) -> None:
    weight, hessian = heavy_tailed_layer(256, 192)
    factor = factorize(hessian)
    paper = ssqr(weight, factor, group_scales(weight, Grid.of_bits(bits), 64), Grid.of_bits(bits), 64, 0.01).rounding
    found = ssqr_by_saving(weight, factor, Grid.of_bits(bits), 64, 0.01)
    assert found.note == ""
    assert (1 - RATE_TOLERANCE) * 0.01 <= found.rounding.outlier_rate <= 0.01
    assert float(found.rounding.loss.sum()) < 0.55 * float(paper.loss.sum())
    assert float(found.rounding.bound.sum()) < 0.55 * float(paper.bound.sum())


def test_inputs_that_weigh_far_more_keep_their_weights() -> None:
    """If few tokens drive two channels, the loss lies in their weights, inside the grid or not."""
    weight, hessian = heavy_tailed_layer(256, 192)
    loud = torch.tensor([17, 101])
    hessian[loud, loud] += 3e4 * hessian.diagonal().mean()
    factor = factorize(hessian, damping=1e-6)
    paper = ssqr(weight, factor, group_scales(weight, Grid.of_bits(3), 64), Grid.of_bits(3), 64, 0.015).rounding
    found = ssqr_by_saving(weight, factor, Grid.of_bits(3), 64, 0.015).rounding
    assert float(found.outlier_mask[:, loud].float().mean()) > 0.4
    assert float(paper.outlier_mask[:, loud].float().mean()) < 0.1
    assert float(found.loss.sum()) < 0.02 * float(paper.loss.sum())


def test_many_rows_by_saving_are_searched_on_a_sample_first() -> None:
    weight, hessian = heavy_tailed_layer(1024, 1024)
    found = ssqr_by_saving(weight, factorize(hessian), Grid.of_bits(3), 64, 0.01)
    assert found.note == ""
    assert (1 - RATE_TOLERANCE) * 0.01 <= found.rounding.outlier_rate <= 0.01
    assert found.passes <= 2


def test_clipped_weights_count_their_cost_in_the_bound() -> None:
    weight = torch.tensor([[5.0, 0.1, 0.1, 0.1]])
    factor = factorize(torch.eye(4), damping=1e-9)
    found = nearest_plane(weight, factor, torch.ones(1, 1), Grid(-2, 1), Saving(20.0), group_size=-1)
    assert float(found.loss) == pytest.approx(16.03)
    assert float(found.bound) == pytest.approx(0.75 + 16)


def test_outliers_by_saving_keep_identity_and_bound() -> None:
    weight, hessian = heavy_tailed_layer(256, 192)
    factor = factorize(hessian)
    found = ssqr_by_saving(weight, factor, Grid.of_bits(2), 64, 0.02)
    error = (found.rounding.dequantized - weight).double()
    loss = ((error @ factor.hessian) * error).sum(1)
    torch.testing.assert_close(loss, found.rounding.loss, rtol=FLOAT32_TOLERANCE, atol=0)
    assert bool((loss <= found.rounding.bound * (1 + FLOAT32_TOLERANCE)).all())
    inside = found.rounding.z[~found.rounding.outlier_mask]
    assert int(inside.min()) == -2
    assert int(inside.max()) == 1
