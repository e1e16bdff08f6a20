"""Fitted scales: every row takes the multiple with the least loss, and they beat the scales they start from."""

import pytest
import torch

from vllm_latq.errors import ConfigError
from vllm_latq.quantize.lattice.factor import factorize
from vllm_latq.quantize.lattice.nearest_plane import nearest_plane
from vllm_latq.quantize.lattice.outliers import Grid
from vllm_latq.quantize.lattice.scales import MULTIPLES, fitted_scales, group_scales, scaled
from vllm_latq.quantize.methods.layer import quantize_layer
from vllm_latq.quantize.recipe import Recipe

# Rows are rounded in another batch here: float32 sums in another order.
LOSS_TOLERANCE = 1e-3


def layer(rows: int, cols: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """A heavy-tailed weight and the Hessian of correlated inputs of unequal size."""
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(rows, cols, generator=generator)
    weight *= 1 + 3 * torch.rand(rows, cols, generator=generator).pow(8)
    inputs = torch.randn(4 * cols, cols, generator=generator) @ torch.randn(cols, cols, generator=generator)
    inputs *= torch.rand(cols, generator=generator) + 0.1
    return weight, inputs.T @ inputs


@pytest.mark.parametrize(("rows", "cols", "group_size"), [(1, 33, 33), (5, 63, 21), (33, 128, 64), (7, 20, -1)])
@pytest.mark.parametrize("order", ["act", "min-pivot"])
def test_each_row_takes_the_multiple_that_loses_least(rows, cols, group_size, order):
    weight, hessian = layer(rows, cols)
    factor = factorize(hessian, order)
    found = fitted_scales(weight, factor, Grid.of_bits(3), group_size)
    importance = torch.empty(cols, dtype=torch.float64)
    importance[factor.order] = factor.diagonal
    base = group_scales(weight, Grid.of_bits(3), group_size, "signed", importance=importance)

    def loss(scales: torch.Tensor) -> torch.Tensor:
        return nearest_plane(weight, factor, scales, Grid.of_bits(3), group_size=group_size).loss

    assert found.dtype == torch.bfloat16
    assert found.shape == base.shape
    candidates = [scaled(base, multiple) for multiple in MULTIPLES]
    assert bool(torch.stack([(found == one).all(1) for one in candidates]).any(0).all())
    least = torch.stack([loss(one) for one in candidates]).amin(0)
    assert bool((loss(found) <= least * (1 + LOSS_TOLERANCE)).all())


@pytest.mark.parametrize("bits", [2, 3, 4])
def test_the_layer_error_falls(bits):
    weight, hessian = layer(96, 128)
    plain = quantize_layer(weight, hessian, Recipe("gptq", bits=bits, group_size=64)).record
    fitted = quantize_layer(weight, hessian, Recipe("gptq", bits=bits, group_size=64, scales="fitted")).record
    assert fitted.bits == plain.bits
    assert fitted.error < 0.95 * plain.error


def test_in_two_bits_rows_take_large_multiples(monkeypatch):
    weight, hessian = layer(96, 128)
    recipe = Recipe("gptq", bits=2, group_size=64, scales="fitted")
    fitted = quantize_layer(weight, hessian, recipe).record
    monkeypatch.setattr("vllm_latq.quantize.lattice.scales.MULTIPLES", tuple(one for one in MULTIPLES if one < 1.2))
    assert fitted.error < 0.98 * quantize_layer(weight, hessian, recipe).record.error


def test_rows_do_not_influence_each_other(monkeypatch):
    weight, hessian = layer(50, 64)
    factor = factorize(hessian)
    together = fitted_scales(weight, factor, Grid.of_bits(3), 32)
    monkeypatch.setattr("vllm_latq.quantize.lattice.scales._FITTED_ROWS", 7)
    apart = fitted_scales(weight, factor, Grid.of_bits(3), 32)
    # Other batches add in another order, which may decide between multiples that lose the same.
    assert (together == apart).all(1).float().mean() > 0.9


def test_plain_rounding_does_not_fit():
    with pytest.raises(ConfigError, match=r"recipe\.scales"):
        Recipe("rtn", scales="fitted")
