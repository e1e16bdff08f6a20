"""Static scales: what is returned is what is stored, and nothing shrinks better."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_latq.errors import ConfigError, NumericalError, UnsupportedShapeError
from vllm_latq.quantize.lattice import scales
from vllm_latq.quantize.lattice.choices import SCALE_METHODS
from vllm_latq.quantize.lattice.outliers import Grid
from vllm_latq.quantize.lattice.scales import SHRINK_STEPS, SMALLEST_SHRINK, group_scales

FLOAT32_TOLERANCE = 1e-6


def weights(rows: int, cols: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(rows, cols, generator=generator)
    return weight * (1 + 4 * torch.rand(rows, cols, generator=generator).pow(10))


def summed_error(weight: torch.Tensor, scales: torch.Tensor, bits: int, power: int = 2) -> torch.Tensor:
    """Error of each group, float64 [r, G]."""
    grouped = weight.double().view(*scales.shape, -1)
    steps = scales.double().unsqueeze(-1)
    return (
        ((grouped / steps).round().clamp(Grid.of_bits(bits).low, Grid.of_bits(bits).high) * steps - grouped)
        .abs()
        .pow(power)
        .sum(-1)
    )


def test_grid_is_twos_complement():
    assert [Grid.of_bits(bits) for bits in (2, 3, 4, 8)] == [Grid(-2, 1), Grid(-4, 3), Grid(-8, 7), Grid(-128, 127)]
    assert [Grid.of_bits(bits).bits for bits in (2, 3, 4, 8)] == [2, 3, 4, 8]


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
@pytest.mark.parametrize(
    ("rows", "cols", "group_size"), [(1, 1, 1), (33, 63, 21), (33, 63, -1), (7, 500, 125), (5, 32, 32)]
)
def test_absmax_is_the_rounded_largest_weight(bits, rows, cols, group_size):
    weight = weights(rows, cols)
    scales = group_scales(weight, Grid.of_bits(bits), group_size, "absmax")
    groups = 1 if group_size == -1 else cols // group_size
    largest = torch.stack([part.abs().amax(1) for part in weight.split(cols // groups, 1)], 1)
    assert scales.dtype == torch.bfloat16
    assert torch.equal(scales, (largest / Grid.of_bits(bits).high).to(torch.bfloat16))


@pytest.mark.parametrize("how", ["mse", "signed"])
@pytest.mark.parametrize("offset", [0.0, 0.5])
def test_factors_tried_together_or_one_by_one(how, offset, monkeypatch):
    # Rounded weights: many factors have the same error.
    weight = torch.cat([weights(9, 64), weights(9, 64).round(), torch.zeros(1, 64)])
    together = group_scales(weight, Grid.of_bits(3, offset), 16, how, importance=torch.arange(64.0))
    monkeypatch.setattr(scales, "_CPU_CHUNK", 2 * weight.numel())
    two = group_scales(weight, Grid.of_bits(3, offset), 16, how, importance=torch.arange(64.0))
    monkeypatch.setattr(scales, "_CPU_CHUNK", 1)
    one = group_scales(weight, Grid.of_bits(3, offset), 16, how, importance=torch.arange(64.0))
    assert torch.equal(together, one)
    assert torch.equal(two, one)


@given(
    bits=st.sampled_from([2, 3, 4, 8]),
    rows=st.sampled_from([1, 33]),
    groups=st.sampled_from([1, 3]),
    group_size=st.sampled_from([1, 21, 64]),
    seed=st.integers(0, 10**6),
    power=st.sampled_from([2, 3]),
)
@settings(max_examples=25, deadline=None)
def test_mse_is_the_best_of_all_candidates(bits, rows, groups, group_size, seed, power):
    weight = weights(rows, groups * group_size, seed)
    found = summed_error(weight, group_scales(weight, Grid.of_bits(bits), group_size, power=power), bits, power)
    largest = weight.view(rows, groups, -1).abs().amax(-1) / Grid.of_bits(bits).high
    for step in range(1, SHRINK_STEPS + 1):
        candidate = (largest * (SMALLEST_SHRINK + (1 - SMALLEST_SHRINK) * step / SHRINK_STEPS)).to(torch.bfloat16)
        error = summed_error(weight, candidate, bits, power)
        assert bool((found <= error * (1 + FLOAT32_TOLERANCE) + 1e-12).all())


@given(
    bits=st.sampled_from([2, 3, 4]),
    offset=st.sampled_from([0.0, 0.5]),
    seed=st.integers(0, 10**6),
    octaves=st.integers(-12, 0),
)
@settings(max_examples=25, deadline=None)
def test_a_priced_scale_is_the_best_of_all_candidates(bits, offset, seed, octaves):
    weight, importance, price = weights(9, 64, seed), torch.arange(1.0, 65.0).double() / 64, 2.0**octaves

    def cost(scales: torch.Tensor) -> torch.Tensor:
        steps = scales.double()[..., None]
        grouped = weight.double().view(9, 2, 32)
        integers = (grouped / steps - offset).round()
        points = integers.clamp(Grid.of_bits(bits).low, Grid.of_bits(bits).high)
        squares = ((points + offset) * steps - grouped).square() * importance.view(2, 32)
        return squares.clamp(max=price).sum(-1)

    signs = (1,) if offset else (1, -1)
    how = "mse" if offset else "signed"
    options = {"importance": importance, "price": price}
    found = cost(group_scales(weight, Grid.of_bits(bits, offset), 32, how, **options))
    largest = weight.view(9, 2, 32).abs().amax(-1) / (Grid.of_bits(bits).high + offset)
    for step in range(1, SHRINK_STEPS + 1):
        for sign in signs:
            factor = SMALLEST_SHRINK + (1 - SMALLEST_SHRINK) * step / SHRINK_STEPS
            assert bool((found <= cost(sign * (largest * factor).to(torch.bfloat16)) * (1 + 1e-5) + 1e-12).all())


@pytest.mark.parametrize("octaves", [-90, 90])
def test_cubes_of_small_and_large_errors_are_numbers(octaves: int) -> None:
    scales = group_scales(weights(9, 64) * 2.0**octaves, Grid.of_bits(3), 16, "signed", power=3)
    assert torch.equal(
        scales.float() * 2.0**-octaves, group_scales(weights(9, 64), Grid.of_bits(3), 16, "signed", power=3).float()
    )


@pytest.mark.parametrize("bits", [2, 4])
def test_importance_weighs_the_squared_errors(bits):
    weight = weights(9, 60)
    importance = torch.rand(60, generator=torch.Generator().manual_seed(1)).pow(4) * 100
    found = group_scales(weight, Grid.of_bits(bits), 20, importance=importance)
    largest = weight.view(9, 3, 20).abs().amax(-1) / Grid.of_bits(bits).high

    def error(scales: torch.Tensor) -> torch.Tensor:
        steps = scales.double().unsqueeze(-1)
        grouped = weight.double().view(9, 3, 20)
        wrong = (grouped / steps).round().clamp(Grid.of_bits(bits).low, Grid.of_bits(bits).high) * steps - grouped
        return (wrong.square() * importance.double().view(3, 20)).sum(-1)

    for step in range(1, SHRINK_STEPS + 1):
        candidate = (largest * (SMALLEST_SHRINK + (1 - SMALLEST_SHRINK) * step / SHRINK_STEPS)).to(torch.bfloat16)
        assert bool((error(found) <= error(candidate) * (1 + FLOAT32_TOLERANCE)).all())
    assert torch.equal(
        group_scales(weight, Grid.of_bits(bits), 20, importance=torch.full((60,), 4.0)),
        group_scales(weight, Grid.of_bits(bits), 20),
    )


def test_rows_do_not_influence_each_other():
    # More rows than one chunk of the search holds.
    weight = weights(600, 512)
    together = group_scales(weight, Grid.of_bits(3), 64)
    assert torch.equal(together, torch.cat([group_scales(part, Grid.of_bits(3), 64) for part in weight.split(123)]))


@pytest.mark.parametrize("how", SCALE_METHODS)
def test_zero_and_vanishing_groups_have_scale_one(how):
    weight = weights(3, 8)
    weight[1, 4:] = 0
    weight[2, :4] = 1e-41
    scales = group_scales(weight, Grid.of_bits(4), 4, how)
    assert scales[1, 1] == 1
    assert scales[2, 0] == 1
    assert bool((scales > 0).all()) or how == "signed"
    rounded = (weight / scales.float().repeat_interleave(4, 1)).round()
    assert not rounded[1, 4:].any()
    assert not rounded[2, :4].any()


@pytest.mark.parametrize("how", SCALE_METHODS)
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_non_finite_weights_are_named(how, bad):
    weight = weights(4, 8)
    weight[2, 5] = bad
    with pytest.raises(NumericalError, match=r"weight: expected finite weight, found .* at \[2, 5\] and 1"):
        group_scales(weight, Grid.of_bits(4), 4, how)


def test_weights_beyond_bfloat16_are_refused():
    with pytest.raises(NumericalError, match="bfloat16 can hold"):
        group_scales(torch.tensor([[3.4e38]]), Grid.of_bits(2), 1, "absmax")


def test_groups_must_divide_the_columns():
    with pytest.raises(UnsupportedShapeError, match=r"layer: expected input channels divisible by group_size=5"):
        group_scales(weights(2, 8), Grid.of_bits(4), 5)


def test_unknown_method_is_refused():
    with pytest.raises(ConfigError, match="mse, absmax"):
        group_scales(weights(2, 8), Grid.of_bits(4), 4, "max")


@pytest.mark.parametrize("shape", [(0, 8), (3, 0)])
def test_empty_weights(shape):
    scales = group_scales(torch.zeros(shape), Grid.of_bits(4), -1)
    assert scales.shape == (shape[0], 1)


def test_a_sign_puts_the_extra_integer_on_the_longer_side():
    """A group skewed to positive values takes the mirrored grid -1, 0, 1, 2, and its mirror image the plain one."""
    group = torch.tensor([[-1.0, 0.0, 1.0, 2.0, 2.0, 2.0, 0.0, 1.0]])
    signed = group_scales(torch.cat((group, -group)), Grid.of_bits(2), -1, "signed")
    assert signed.flatten().tolist() == pytest.approx([-1.0, 1.0], rel=0.02)
    weight = weights(64, 32)

    def error(how: str) -> torch.Tensor:
        steps = group_scales(weight, Grid.of_bits(2), 16, how).float().repeat_interleave(16, 1)
        return ((weight / steps).round().clamp(-2, 1) * steps - weight).square().sum()

    assert error("signed") < 0.95 * error("mse")
