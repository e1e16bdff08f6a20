"""A budget of bits for SSQR: which width and outlier rate each input's linears get.

The price of a choice is exact (every stored tensor is counted); what it costs the model is predicted from the bound of
Theorem 5 times the effect of the layer's outputs on the loss, a third of it, for scales that meet the outlier rate:

    loss(choice) = 1/2 sum_i G_ii sum_j D_j s_ij^2 / 12

or where outliers are chosen by saving, from what rounding each weight by itself costs, but for the outliers:

    loss(choice) = 1/2 sum_i G_ii sum_j D_j (w_ij - q_ij)^2

Invariant: the linears of one input get the same choice, so that they can be served as one matrix, and so do the experts
of a layer; the total is at most the budget, and no choice could be improved for what is left of it.
"""

import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy
import torch
from torch import nn

from vllm_latq.errors import ConfigError
from vllm_latq.format.config import SUPPORTED_BITS
from vllm_latq.format.served_size import served_overhead
from vllm_latq.quantize.lattice.factor import factorize
from vllm_latq.quantize.lattice.grams import LayerStatistics
from vllm_latq.quantize.lattice.scales import grid, group_scales
from vllm_latq.quantize.methods.ssqr import usual_price
from vllm_latq.quantize.model.selection import unreached
from vllm_latq.quantize.recipe import Recipe

OUTLIER_RATES = (0.002, 0.005, 0.01, 0.02, 0.035, 0.05)
# Outliers by saving: rows that are looked at, and what rates their prices usually have.
_PRICED_ROWS = 128
_PRICED_RATES = (0.0003, 0.0012, 0.005, 0.02, 0.08, 0.3)
_NO_LOSS = 1e-300


@dataclass(frozen=True)
class Choice:
    """One width and outlier rate for the linears of an input.

    Attributes:
        width: bits of the inliers.
        outlier_rate: share of outliers.
        bits: stored bits per weight.
        loss: predicted addition to KL(original || quantized), nats per token.
    """

    width: int
    outlier_rate: float
    bits: float
    loss: float


@dataclass(frozen=True)
class Offer:
    """What the linears of one input can have: their names, their weights' number, the choices."""

    names: tuple[str, ...]
    weights: int
    choices: tuple[Choice, ...]


def price(weights: Mapping[str, torch.Tensor], statistics: Mapping[str, LayerStatistics], recipe: Recipe) -> Offer:
    """Price every choice for the linears of one input.

    Args:
        weights: name -> [r, c], all of one input.
        statistics: of the same names.
        recipe: for group size, scales, order and damping.
    """
    leader, first = next(iter(statistics.items()))
    if not first.inputs.diagonal().any():
        raise unreached(list(weights), weights, "activations")
    importance = factorize(first.inputs, recipe.order, recipe.damping, leader).importance
    total = sum(weight.numel() for weight in weights.values())
    shapes = [(weight.shape[0], weight.shape[1]) for weight in weights.values()]
    predicted = _losses_by_saving if recipe.outliers == "saving" else _losses_by_overflow
    losses = dict.fromkeys(itertools.product(SUPPORTED_BITS, OUTLIER_RATES), 0.0)
    for name, weight in weights.items():
        gradients = torch.cat([gram.diagonal() for gram in statistics[name].outputs]).to(torch.float64)
        for width in SUPPORTED_BITS:
            for rate, loss in zip(OUTLIER_RATES, predicted(weight, gradients, importance, width, recipe), strict=True):
                losses[width, rate] += loss
    choices = [Choice(*one, _bits(shapes, recipe, *one) / total, loss) for one, loss in losses.items()]
    return Offer(tuple(weights), total, tuple(choices))


def check_budget(linears: Iterable[nn.Linear], recipe: Recipe) -> None:
    """Raise ConfigError if the linears' cheapest choices cost more than the recipe's budget, or the dearest less; or if
    the narrowest codes take more than its served bits."""
    shapes = [(linear.out_features, linear.in_features) for linear in linears]
    total = sum(rows * cols for rows, cols in shapes)
    if recipe.target_bits is not None and recipe.count == "served":
        least = sum(served_overhead(rows, cols, SUPPORTED_BITS[0]) for rows, cols in shapes) / total
        if recipe.target_bits <= least:
            expected = f"more than {least:.3f} served bits per weight, which codes of 2 bits and their scales take"
            hint = "Of stored bits, fewer can do: leave out count."
            raise ConfigError("recipe.target_bits", expected, f"{recipe.target_bits:g}", hint)
    if recipe.budget is None:
        return
    prices = [_bits(shapes, recipe, width, rate) / total for width in SUPPORTED_BITS for rate in OUTLIER_RATES]
    if not min(prices) <= recipe.budget <= max(prices):
        expected = f"bits per weight from {min(prices):.3f} to {max(prices):.3f}, the cheapest and the dearest choices"
        hint = "Method latq meets lower ones." if recipe.budget < min(prices) else "More bits cannot be spent."
        raise ConfigError("recipe.budget", expected, f"{recipe.budget:g}", hint)


def together(offers: Sequence[Offer], stacks: Mapping[str, str]) -> list[Offer]:
    """One offer for the inputs whose linears must be stored alike.

    Args:
        offers: each with the same widths and outlier rates, in the same order.
        stacks: name of a linear -> what it is a part of; for those that are part of more than their input's linears.
    """
    parts: dict[str, list[Offer]] = {}
    for offer in offers:
        parts.setdefault(stacks.get(offer.names[0], offer.names[0]), []).append(offer)
    return [_joined(alike) for alike in parts.values()]


def _joined(offers: Sequence[Offer]) -> Offer:
    weights = sum(offer.weights for offer in offers)
    choices = tuple(
        replace(
            alike[0],
            bits=sum(choice.bits * offer.weights for choice, offer in zip(alike, offers, strict=True)) / weights,
            loss=sum(choice.loss for choice in alike),
        )
        for alike in zip(*(offer.choices for offer in offers), strict=True)
    )
    return Offer(tuple(name for offer in offers for name in offer.names), weights, choices)


def choose(offers: Sequence[Offer], budget: float) -> dict[str, Choice]:
    """The choices with the least predicted loss whose bits average to at most the budget; layer name -> choice.

    The budget pays at least for the cheapest choice of every offer: `check_budget`.
    """
    total = sum(offer.weights for offer in offers)

    def at(price_of_a_bit: float) -> list[Choice]:
        return [min(o.choices, key=lambda c: c.loss + price_of_a_bit * c.bits * o.weights) for o in offers]

    def average(chosen: Sequence[Choice]) -> float:
        return sum(choice.bits * offer.weights for choice, offer in zip(chosen, offers, strict=True)) / total

    low, high = -100.0, 100.0  # log2 of the price
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if average(at(2.0**middle)) > budget else (low, middle)
    chosen = at(2.0**high)
    if average(chosen) > budget:
        chosen = [min(offer.choices, key=lambda choice: choice.bits) for offer in offers]
    _spend_rest(offers, chosen, budget * total)
    return {name: choice for offer, choice in zip(offers, chosen, strict=True) for name in offer.names}


def _spend_rest(offers: Sequence[Offer], chosen: list[Choice], bits: float) -> None:
    """Upgrade one input after the other, the most useful upgrade first, while it fits."""
    spent = sum(choice.bits * offer.weights for choice, offer in zip(chosen, offers, strict=True))
    while True:
        best: tuple[float, int, Choice] | None = None
        for index, offer in enumerate(offers):
            for choice in offer.choices:
                gain = chosen[index].loss - choice.loss
                extra = (choice.bits - chosen[index].bits) * offer.weights
                if gain > 0 and spent + extra <= bits:
                    worth = gain / extra if extra > 0 else math.inf
                    best = max(best or (0.0, 0, choice), (worth, index, choice), key=lambda one: one[0])
        if best is None:
            return
        _, index, choice = best
        spent += (choice.bits - chosen[index].bits) * offers[index].weights
        chosen[index] = choice


def _bits(shapes: Sequence[tuple[int, int]], recipe: Recipe, width: int, rate: float) -> float:
    """Stored bits of linears of these shapes."""
    stored = replace(recipe, budget=None, bits=width, outlier_rate=rate)
    return sum(stored.planned_bits(rows, cols) for rows, cols in shapes)


def _losses_by_overflow(
    weight: torch.Tensor, gradients: torch.Tensor, importance: torch.Tensor, width: int, recipe: Recipe
) -> Iterator[float]:
    """Of each of OUTLIER_RATES, with G_ii [r] and D_j [c] in float64."""
    assert recipe.scales is not None
    base = group_scales(weight, width, recipe.group_size, recipe.scales, offset=recipe.offset).to(torch.float32)
    base = base.repeat_interleave(weight.shape[1] // base.shape[1], 1)
    for rate in OUTLIER_RATES:
        scales = base * _multiplier(weight, base, width, rate, recipe.offset)
        yield float(gradients @ (scales.to(torch.float64).square() @ importance)) / 24


def _losses_by_saving(
    weight: torch.Tensor, gradients: torch.Tensor, importance: torch.Tensor, width: int, recipe: Recipe
) -> Iterator[float]:
    """The same, between those at a few prices of an outlier, from a sample of the rows if there are many."""
    if len(weight) > _PRICED_ROWS:
        rows = torch.randperm(len(weight), generator=torch.Generator().manual_seed(0))[:_PRICED_ROWS].to(weight.device)
        sampled = gradients[rows].sum()
        gradients = gradients[rows] * (gradients.sum() / sampled if sampled > 0 else 0)
        weight = weight[rows]
    how, amplitudes = "mse" if recipe.offset else "signed", importance.sqrt().to(weight)
    lattice = recipe.outlier_coding == "integer"
    shares, losses = [], []
    for rate in _PRICED_RATES:
        price = 2.0 ** usual_price(weight, importance, width, recipe.group_size, rate)
        options = (importance, recipe.offset)
        scales = group_scales(weight, width, recipe.group_size, how, "", *options, price=price, lattice=lattice)
        steps = scales.to(weight.dtype).repeat_interleave(weight.shape[1] // scales.shape[1], 1)
        nearest = (weight / steps - recipe.offset).round_().clamp_(*grid(width)).add_(recipe.offset).mul_(steps)
        costs = nearest.sub_(weight).mul_(amplitudes).square_()
        kept = costs > price
        loss = float(gradients @ costs.masked_fill_(kept, 0).sum(1, dtype=torch.float64)) / 2
        shares.append(math.log2(max(int(kept.sum()), 0.5) / weight.numel()))
        losses.append(math.log2(max(loss, _NO_LOSS)))
    order = numpy.argsort(shares)
    between = numpy.interp(numpy.log2(OUTLIER_RATES), numpy.take(shares, order), numpy.take(losses, order))
    for loss in between:
        yield 2.0 ** float(loss)


def _multiplier(weight: torch.Tensor, scales: torch.Tensor, width: int, rate: float, offset: float) -> float:
    """What the scales must grow by until only a share `rate` of the weights rounds out of the grid."""
    low, high = grid(width)
    exact = weight / scales
    reach = torch.where(exact < 0, exact / (low - 0.5 + offset), exact / (high + 0.5 + offset))
    rank = max(1, math.ceil(rate * weight.numel()))
    return float(reach.flatten().topk(rank).values[-1])
