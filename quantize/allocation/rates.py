"""One price of a bit for the whole model: the rate of every unit of every linear.

How many weights are kept exactly is known only when a linear is rounded. So the price is found again before each part
of the model, for the linears and the bits that are left.

Invariant: the stored bits of all linears, everything counted, are at most the recipe's. They are less by no more than
what is reserved for the kept weights of the last part, and one step of the rate of one unit for each of its linears.
They could be more only if linears kept more weights at the lowest rates than the linears after them can pay for. Such a
run is refused at its end.
"""

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from functools import cached_property

import torch

from vllm_latq.errors import ConfigError
from vllm_latq.quantize.methods.latq import Share, UnitLosses
from vllm_latq.quantize.recipe import Recipe

# A price at which every unit gets the highest rate, and how many bits per weight more than those may be asked for.
_ALMOST_FREE, _MORE = 2.0**-200, 0.1
# Part of what is left that is shared out: a linear at the lowest rates may keep more weights than was reserved.
_SHARED_OUT = 0.9997


@dataclass(frozen=True)
class Allocation:
    """The bits of a model, shared out over its linears.

    Attributes:
        losses: linear -> what its units cost, in the order of the model.
        bits: stored bits of all linears that must not be exceeded.
    """

    losses: Mapping[str, UnitLosses]
    bits: float

    @property
    def weights(self) -> int:
        """Number of weights of all linears."""
        return sum(layer.weights for layer in self.losses.values())

    @cached_property
    def price(self) -> float:
        """Price of a bit at which the whole model takes its bits."""
        return _together(self.losses.values()).price(self.bits)

    @property
    def step(self) -> float:
        """Step of an entropy code at this price, in sqrt(nats) per token.

        A bit of an entropy code of step s is worth 2 ln2 s^2 / 12.
        """
        return math.sqrt(12 * self.price / (2 * math.log(2)))

    def require_possible(self) -> None:
        """Raise ConfigError if the lowest rates take more bits, or the highest ones less."""
        if not math.isfinite(self.price):
            least = math.ceil(1000 * sum(layer.bits(math.inf) for layer in self.losses.values()) / self.weights) / 1000
            expected = f"at least {least:.3f} bits per weight, which the lowest rates take"
            raise ConfigError("recipe.bits", expected, f"{self.bits / self.weights:g}", "Raise bits.")
        most = sum(layer.bits(_ALMOST_FREE) for layer in self.losses.values()) / self.weights
        if self.bits / self.weights > most + _MORE:
            expected = f"at most {math.floor(1000 * most) / 1000:.3f} bits per weight, which the highest rates take"
            raise ConfigError("recipe.bits", expected, f"{self.bits / self.weights:g}", "Lower bits.")

    def planned(self) -> dict[str, float]:
        """Return linear -> stored bits per weight at this price."""
        return {name: layer.bits(self.price) / layer.weights for name, layer in self.losses.items()}

    def shares(self, names: Collection[str], spent: Mapping[str, float]) -> dict[str, Share]:
        """Return linear -> its share of the bits that are left.

        Args:
            names: linears of the next part.
            spent: linear -> stored bits, of all that are rounded.
        """
        left = [layer for name, layer in self.losses.items() if name not in spent]
        price = _together(left).price((self.bits - sum(spent.values())) * _SHARED_OUT)
        return {name: Share(self.losses[name], self.losses[name].bits(price)) for name in names}


def require_bits_kept(stored: float, recipe: Recipe) -> None:
    """Raise ConfigError if a model stores more bits per weight than the recipe's."""
    if stored > recipe.bits:
        found = f"{stored:.4f} stored, as some linears keep too many weights exactly"
        expected = f"at most {recipe.bits:g} bits per weight"
        raise ConfigError("recipe.bits", expected, found, "Remove the unfinished output, and raise bits.")


def _together(layers: Collection[UnitLosses]) -> UnitLosses:
    """Return the losses of linears as those of one."""
    return UnitLosses(
        torch.cat([layer.worth.flatten() for layer in layers]),
        torch.cat([layer.sizes.flatten() for layer in layers]),
        sum(layer.weights for layer in layers),
        sum(layer.fixed_bits for layer in layers),
        sum(layer.outlying for layer in layers),
    )
