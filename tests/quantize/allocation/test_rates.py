"""The allocation: one price of a bit, everything counted."""

import pytest
import torch

from vllm_latq.errors import ConfigError
from vllm_latq.quantize.allocation.rates import Allocation, require_bits_kept
from vllm_latq.quantize.lattice.trellis_plane import DISTORTION
from vllm_latq.quantize.methods.latq import UnitLosses
from vllm_latq.quantize.recipe import Recipe


def layer(rows: int, columns: int, seed: int, scale: float = 1.0) -> UnitLosses:
    """Losses of a layer of whole units that vary by orders of magnitude."""
    generator = torch.Generator().manual_seed(seed)
    losses = [torch.randn(size, generator=generator, dtype=torch.float64).exp() for size in (rows, columns)]
    size = 64.0 * 128
    worth = scale * torch.outer(*losses) / size
    return UnitLosses(worth, torch.full_like(worth, size), int(worth.numel() * size), 0.02 * worth.numel() * size, 100)


LAYERS = {"a": layer(40, 30, 1), "b": layer(20, 50, 2, 100.0), "c": layer(10, 10, 3, 0.01)}
WEIGHTS = sum(one.weights for one in LAYERS.values())


def allocation(bits: float) -> Allocation:
    return Allocation(LAYERS, bits * WEIGHTS)


@pytest.mark.parametrize("bits", [1.2, 2.0, 3.6, 5.0])
def test_the_bits_are_met_and_not_exceeded(bits: float) -> None:
    """Linears that keep more or fewer weights than was reserved leave fewer or more bits to those after them."""
    spent: dict[str, float] = {}
    for name, kept in (("a", 1500), ("b", 100), ("c", 50)):
        share = allocation(bits).shares([name], spent)[name]
        rates = share.rates(kept)
        assert rates.min() >= 2
        assert rates.max() <= 12
        spent[name] = LAYERS[name].fixed_bits + 64 * 128 / 2 * float(rates.double().sum()) + 48 * kept
        assert name == "a" or spent[name] <= share.bits
    assert bits - 0.002 < sum(spent.values()) / WEIGHTS <= bits
    assert spent["b"] / LAYERS["b"].weights > spent["c"] / LAYERS["c"].weights


def test_no_exchange_of_bits_between_units_lowers_the_loss() -> None:
    shares = allocation(3.0).shares(LAYERS, {})
    saved, spent = [], []
    for name, share in shares.items():
        for loss, rate in zip(LAYERS[name].worth.flatten().tolist(), share.rates().flatten().tolist(), strict=True):
            if rate < 12:
                saved.append(loss * (DISTORTION[rate] - DISTORTION[rate + 1]))
            if rate > 2:
                spent.append(loss * (DISTORTION[rate - 1] - DISTORTION[rate]))
    assert max(saved) <= min(spent) * (1 + 1e-9)


def test_rates_of_a_row_of_units_fall_with_the_importance_of_columns() -> None:
    """So a kernel can go through the units of one rate after those of another."""
    order = LAYERS["a"].worth.sum(0).argsort(descending=True)
    assert (allocation(3.0).shares(["a"], {})["a"].rates()[:, order].int().diff(dim=1) <= 0).all()


def test_too_many_bits_are_refused() -> None:
    """The code has no more than 6 bits per weight."""
    allocation(6.0).require_possible()
    with pytest.raises(ConfigError, match=r"recipe.bits: expected at most 6.02\d bits per weight, which the highest"):
        allocation(8.0).require_possible()


def test_too_few_bits_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"recipe.bits: expected at least 1.050 bits per weight, which the lowest"):
        allocation(1.01).require_possible()


def test_a_model_that_stores_more_than_its_bits_is_refused() -> None:
    require_bits_kept(2.5, Recipe("latq", bits=2.5))
    with pytest.raises(ConfigError, match=r"at most 2\.5 bits per weight, found 2\.5003 stored"):
        require_bits_kept(2.5003, Recipe("latq", bits=2.5))
