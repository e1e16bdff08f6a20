"""A budget: met, spent where it saves most, and refused when nothing fits."""

from dataclasses import replace
from pathlib import Path
from typing import Literal

import pytest
import torch

from vllm_latq.errors import ConfigError
from vllm_latq.format.config import SUPPORTED_BITS
from vllm_latq.quantize.allocation.budget import OUTLIER_RATES, Choice, Offer, check_budget, choose, price
from vllm_latq.quantize.lattice.factor import factorize
from vllm_latq.quantize.lattice.grams import LayerStatistics
from vllm_latq.quantize.methods.ssqr import ssqr_by_saving
from vllm_latq.quantize.pipeline import quantize_checkpoint
from vllm_latq.quantize.plan import plan
from vllm_latq.quantize.recipe import Recipe

RECIPE = Recipe("ssqr", budget=3.0, group_size=32)


def offer(sensitivity: float, seed: int, rows: int = 48, cols: int = 64, recipe: Recipe = RECIPE) -> Offer:
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randn(300, cols, generator=generator)
    gradients = sensitivity * torch.randn(300, rows, generator=generator)
    statistics = LayerStatistics(inputs.T @ inputs / 300, [gradients.T @ gradients / 300], 300, "a")
    name = f"layer{seed}"
    return price({name: torch.randn(rows, cols, generator=generator)}, {name: statistics}, recipe)


def average(offers: list[Offer], chosen: dict[str, Choice]) -> float:
    bits = sum(chosen[name].bits * one.weights for one in offers for name in one.names)
    return bits / sum(one.weights for one in offers)


@pytest.mark.parametrize("outliers", ["saving", "overflow"])
@pytest.mark.parametrize("rows", [48, 800])
def test_prices_rise_and_losses_fall_with_width_and_rate(outliers: str, rows: int) -> None:
    choices = offer(1.0, 0, rows, recipe=Recipe("ssqr", budget=3.0, group_size=32, outliers=outliers)).choices
    assert len(choices) == len(SUPPORTED_BITS) * len(OUTLIER_RATES)
    at_one_percent = [choice for choice in choices if choice.outlier_rate == 0.01]
    assert [choice.width for choice in sorted(at_one_percent, key=lambda c: c.bits)] == list(SUPPORTED_BITS)
    assert [choice.width for choice in sorted(at_one_percent, key=lambda c: -c.loss)] == list(SUPPORTED_BITS)
    at_three_bits = [choice for choice in choices if choice.width == 3]
    assert [choice.outlier_rate for choice in sorted(at_three_bits, key=lambda c: -c.loss)] == list(OUTLIER_RATES)


@pytest.mark.parametrize("grid", ["midtread", "midrise"])
def test_a_loss_by_saving_is_what_rounding_costs(grid: Literal["midtread", "midrise"]) -> None:
    """Inputs without correlation feed nothing back: the prediction is what ssqr then loses."""
    generator = torch.Generator().manual_seed(0)
    weight, statistics = torch.randn(800, 64, generator=generator), torch.rand(64, generator=generator).diag()
    seen = LayerStatistics(statistics, [torch.eye(800)], 300, "a")
    recipe = Recipe("ssqr", budget=3.0, group_size=32, damping=1e-6, grid=grid)
    (predicted,) = [
        choice.loss
        for choice in price({"a": weight}, {"a": seen}, recipe).choices
        if (choice.width, choice.outlier_rate) == (3, 0.02)
    ]
    factor = factorize(statistics, damping=1e-6)
    found = ssqr_by_saving(weight, factor, 3, 32, 0.02, offset=recipe.offset).rounding
    assert predicted == pytest.approx(float(found.loss.sum()) / 2, rel=0.05)


@pytest.mark.parametrize("outliers", ["saving", "overflow"])
def test_a_linear_that_the_loss_does_not_see_costs_nothing(outliers: str) -> None:
    weight = torch.randn(800, 64, generator=torch.Generator().manual_seed(0))
    unseen = LayerStatistics(torch.eye(64), [torch.zeros(800, 800)], 300, "a")
    offered = price({"a": weight}, {"a": unseen}, Recipe("ssqr", budget=3.0, group_size=32, outliers=outliers))
    assert max(choice.loss for choice in offered.choices) < 1e-100


@pytest.mark.parametrize("budget", [3.4, 4.1, 5.0, 20.0])
def test_the_budget_is_met_and_sensitive_layers_get_more(budget: float) -> None:
    offers = [offer(0.1, 0), offer(1.0, 1), offer(10.0, 2)]
    chosen = choose(offers, budget)
    assert average(offers, chosen) <= budget
    bits = [chosen[f"layer{index}"].bits for index in range(3)]
    assert bits == sorted(bits)
    dearest = max(choice.bits for choice in offers[0].choices)
    assert average(offers, chosen) > min(budget, dearest) - 0.5


def test_no_single_upgrade_is_left_that_fits() -> None:
    offers = [offer(0.1, 0), offer(1.0, 1), offer(10.0, 2)]
    chosen = choose(offers, 4.1)
    room = (4.1 - average(offers, chosen)) * sum(one.weights for one in offers)
    for one in offers:
        now = chosen[one.names[0]]
        better = [c for c in one.choices if c.loss < now.loss and (c.bits - now.bits) * one.weights <= room]
        assert better == []


@pytest.mark.parametrize(("budget", "hint"), [(1.5, "Method latq meets lower"), (12.0, "More bits cannot be spent")])
def test_a_budget_that_cannot_be_met_or_spent_is_refused_at_once(
    mini_model: Path, tmp_path: Path, budget: float, hint: str
) -> None:
    """Before the calibration data are read, here from a file that is missing."""
    recipe, found = Recipe("ssqr", budget=budget), rf"bits per weight from 2\.\d+ to \d+\.\d+, .* found {budget:g}"
    with pytest.raises(ConfigError, match=f"{found}.*{hint}"):
        quantize_checkpoint(recipe, mini_model, tmp_path / "out", calibration=str(tmp_path / "missing"))
    with pytest.raises(ConfigError, match=f"{found}.*{hint}"):
        plan(recipe, mini_model)
    assert list(tmp_path.iterdir()) == []


def test_the_limits_of_a_budget_can_be_met() -> None:
    offers = [offer(1.0, 0), offer(1.0, 1)]
    bits = [choice.bits for choice in offers[0].choices]
    for budget in (min(bits), max(bits)):
        check_budget([torch.nn.Linear(64, 48, device="meta")] * 2, replace(RECIPE, budget=budget))
        assert average(offers, choose(offers, budget)) == budget


@pytest.mark.parametrize("options", [{"bits": 3}, {"outlier_rate": 0.02}])
def test_a_budget_excludes_what_it_chooses(options: dict[str, float]) -> None:
    with pytest.raises(ConfigError, match="A budget chooses it"):
        Recipe("ssqr", budget=3.0, **options)
