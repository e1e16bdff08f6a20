"""One price of a bit for the whole model: the width of the codes of every linear, 2, 3, 4 or 8 bits.

Linears that read one input have one width, and so have the experts of a layer: vLLM makes one matrix of them.

Invariant: the bits of all linears, in files and in memory, scales counted, are at most the recipe's, and no set of
linears could take a larger width without exceeding them.
"""

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from functools import cached_property, partial

import torch
from torch import nn

from vllm_latq.errors import ConfigError
from vllm_latq.events import Progress, ignore_progress
from vllm_latq.format.scheme import SUPPORTED_BITS, LayerScheme
from vllm_latq.models.experts import EXPERT
from vllm_latq.quantize.allocation.kept_losses import KeptLosses
from vllm_latq.quantize.allocation.model_lattice import ModelLattice
from vllm_latq.quantize.lattice.grams import LayerStatistics
from vllm_latq.quantize.methods.group_grid import WidthCosts, linear_bits, width_costs
from vllm_latq.quantize.model.selection import unreached
from vllm_latq.quantize.recipe import GROUP, Recipe

# Prices are searched between these powers of 2.
_OCTAVES = 200.0
_BISECTIONS = 60


@dataclass(frozen=True)
class WidthAllocation:
    """The bits of a model, shared out over its linears.

    Attributes:
        costs: linear -> its costs by width, in the order of the model.
        sets: linear -> name of the set of linears that has one width.
        bits: bits of all linears that must not be exceeded, counted as in `costs`.
        group_size: input channels per scale.
        step: None, as the damping does not depend on the price of a bit.
    """

    costs: Mapping[str, WidthCosts]
    sets: Mapping[str, str]
    bits: float
    group_size: int
    step: None = None

    @cached_property
    def schemes(self) -> dict[str, LayerScheme]:
        """Linear -> its scheme."""
        widths = self._widths()
        return {name: LayerScheme("packed", widths[self.sets[name]], self.group_size) for name in self.costs}

    def planned(self) -> dict[str, float]:
        """Return linear -> bits per weight, counted as in `costs`."""
        return {
            name: cost.bits[self.schemes[name].code_layout()[0]] / cost.weights for name, cost in self.costs.items()
        }

    def shares(self, names: Collection[str], _spent: Mapping[str, float]) -> dict[str, LayerScheme]:
        """Return linear -> its scheme. No linear takes more or fewer bits than planned, so what is spent is known."""
        return {name: self.schemes[name] for name in names}

    def _widths(self) -> dict[str, int]:
        """Return set -> its width, at the lowest price of a bit that the bits allow; then what is left is spent."""
        losses = {name: dict.fromkeys(SUPPORTED_BITS, 0.0) for name in dict.fromkeys(self.sets.values())}
        bits = {name: dict.fromkeys(SUPPORTED_BITS, 0.0) for name in losses}
        for linear, cost in self.costs.items():
            for width in SUPPORTED_BITS:
                losses[self.sets[linear]][width] += cost.losses[width]
                bits[self.sets[linear]][width] += cost.bits[width]

        def at(price: float) -> dict[str, int]:
            return {
                name: min(SUPPORTED_BITS, key=lambda width: own[width] + price * bits[name][width])
                for name, own in losses.items()
            }

        def taken(widths: Mapping[str, int]) -> float:
            return sum(bits[name][width] for name, width in widths.items())

        low, high = -_OCTAVES, _OCTAVES
        for _ in range(_BISECTIONS):
            middle = (low + high) / 2
            low, high = (middle, high) if taken(at(2.0**middle)) > self.bits else (low, middle)
        widths = at(2.0**high)
        spent = taken(widths)
        while wider := [
            ((losses[name][width] - losses[name][more]) / (bits[name][more] - bits[name][width]), name, more)
            for name, width in widths.items()
            for more in SUPPORTED_BITS
            if more > width and spent + bits[name][more] - bits[name][width] <= self.bits
        ]:
            _, name, more = max(wider)
            spent += bits[name][more] - bits[name][widths[name]]
            widths[name] = more
        return widths


def allocate_widths(lattice: ModelLattice, progress: Progress = ignore_progress) -> WidthAllocation:
    """Return the allocation of a model's bits to the widths of its linears, from the statistics that it collected, or
    from what an interrupted run kept of them.

    Raises:
        NumericalError: nothing but zeros reaches some linears.
    """
    recipe, kept = lattice.recipe, lattice.kept()
    if kept:
        costs = {name: _kept_costs(kept, name) for name in kept.layers}
        sets = {name: own for name, (own, _) in kept.layers.items()}
    else:
        costs, sets = _collected(lattice, progress)
        tensors = {f"{name}.losses": _tensor(one.losses) for name, one in costs.items()}
        tensors |= {f"{name}.bits": _tensor(one.bits) for name, one in costs.items()}
        lattice.keep({name: (sets[name], one.weights) for name, one in costs.items()}, tensors)
    weights = sum(cost.weights for cost in costs.values())
    return WidthAllocation(costs, sets, recipe.bits * weights, recipe.group_size)


def _tensor(by_width: Mapping[int, float]) -> torch.Tensor:
    return torch.tensor([by_width[width] for width in SUPPORTED_BITS], dtype=torch.float64)


def _kept_costs(kept: KeptLosses, name: str) -> WidthCosts:
    losses, bits = (
        dict(zip(SUPPORTED_BITS, kept.tensors[f"{name}.{key}"].tolist(), strict=True)) for key in ("losses", "bits")
    )
    return WidthCosts(losses, bits, kept.layers[name][1])


def _collected(lattice: ModelLattice, progress: Progress) -> tuple[dict[str, WidthCosts], dict[str, str]]:
    """Return the costs of all linears, and the set of each, from the statistics."""
    found = lattice.of_inputs(partial(_costs, lattice), progress)
    if names := [name for one in found if isinstance(one, tuple) for name in one]:
        raise unreached(names, lattice.quantized, "activations and gradients of the loss")
    costs, sets = {}, {}
    for one in found:
        assert isinstance(one, dict)
        leader = next(iter(one))
        for name, cost in one.items():
            expert = EXPERT.match(name)
            costs[name], sets[name] = cost, expert[1] if expert else leader
    return costs, sets


def _costs(
    lattice: ModelLattice, weights: Mapping[str, torch.Tensor], members: Mapping[str, LayerStatistics]
) -> dict[str, WidthCosts] | tuple[str, ...]:
    """Return the costs of the linears of one input, or the names of the linears that nothing reaches."""
    if names := tuple(name for name, layer in members.items() if not layer.reached):
        return names
    return width_costs(weights, *lattice.lattices(weights, members, None), lattice.recipe.group_size)


def require_bits(linears: Mapping[str, nn.Linear], recipe: Recipe) -> None:
    """Raise ConfigError if, on grid "group", the least widths take more bits than the recipe's, or the most fewer."""
    if recipe.grid != GROUP:
        return
    weights = sum(linear.out_features * linear.in_features for linear in linears.values())

    def per_weight(width: int) -> float:
        scheme = LayerScheme("packed", width, recipe.group_size)
        shapes = [(linear.out_features, linear.in_features) for linear in linears.values()]
        return sum(linear_bits(scheme, *shape) for shape in shapes) / weights

    least, most = per_weight(SUPPORTED_BITS[0]), per_weight(SUPPORTED_BITS[-1])
    if recipe.bits < least:
        expected = f"at least {math.ceil(1000 * least) / 1000:.3f} bits per weight, which codes of 2 bits take"
        raise ConfigError("recipe.bits", expected, f"{recipe.bits:g}", "Raise bits, or raise group_size.")
    if recipe.bits > most + 0.01:
        expected = f"at most {most:.3f} bits per weight, which codes of 8 bits take"
        raise ConfigError("recipe.bits", expected, f"{recipe.bits:g}", "Lower bits.")
