"""The allocation of widths: one price of a bit, never more bits than the recipe's, one width for what is merged."""

from collections.abc import Mapping

import pytest
import torch
from torch import nn

from vllm_latq.errors import ConfigError
from vllm_latq.format.encodings.packed import PackedWeight
from vllm_latq.format.scheme import LayerScheme
from vllm_latq.quantize.allocation.widths import WidthAllocation, require_bits
from vllm_latq.quantize.methods.group_grid import WidthCosts, linear_bits
from vllm_latq.quantize.recipe import Recipe

WIDTHS = (2, 3, 4, 8)
SIZES = {"q": 4000, "k": 1000, "o": 4000, "up": 12000, "down": 12000}
WORTH = {"q": 3.0, "k": 1.0, "o": 40.0, "up": 0.2, "down": 9.0}
SETS = {"q": "q", "k": "q", "o": "o", "up": "up", "down": "down"}
WEIGHTS = sum(SIZES.values())


def costs(name: str) -> WidthCosts:
    """Return the costs of a linear whose loss falls by 4 with each bit, with scales of an eighth of a bit."""
    losses = {width: WORTH[name] * 4.0**-width for width in WIDTHS}
    return WidthCosts(losses, {width: (width + 0.125) * SIZES[name] for width in WIDTHS}, SIZES[name])


def allocated(bits: float) -> tuple[dict[str, int], float]:
    """Return the widths, and the stored bits per weight."""
    allocation = WidthAllocation({name: costs(name) for name in SIZES}, SETS, bits * WEIGHTS, 128)
    widths = {name: scheme.code_layout()[0] for name, scheme in allocation.schemes.items()}
    taken = sum(allocation.planned()[name] * SIZES[name] for name in SIZES)
    assert allocation.shares(["q"], {}) == {"q": allocation.schemes["q"]}
    return widths, taken / WEIGHTS


def loss(widths: Mapping[str, int]) -> float:
    return sum(costs(name).losses[width] for name, width in widths.items())


@pytest.mark.parametrize("bits", [2.13, 2.5, 3.1, 4.0, 5.5, 8.2])
def test_bits_are_not_exceeded_and_no_set_could_take_more(bits: float) -> None:
    widths, taken = allocated(bits)
    assert taken <= bits + 1e-9
    assert widths["q"] == widths["k"]
    for members in (("q", "k"), ("o",), ("up",), ("down",)):
        size = sum(SIZES[name] for name in members)
        for more in WIDTHS[WIDTHS.index(widths[members[0]]) + 1 :]:
            assert taken * WEIGHTS + (more - widths[members[0]]) * size > bits * WEIGHTS


def test_bits_go_where_the_loss_is() -> None:
    widths, _ = allocated(3.1)
    assert widths["o"] > widths["up"]
    assert widths["o"] >= widths["down"] >= widths["up"]
    assert loss(widths) < loss(dict.fromkeys(SIZES, 3))


def test_more_bits_never_lose_more() -> None:
    losses = [loss(allocated(2.2 + step / 5)[0]) for step in range(30)]
    assert losses == sorted(losses, reverse=True)


def test_bits_that_no_widths_take_are_refused() -> None:
    linears = {"a": nn.Linear(256, 64, bias=False)}
    require_bits(linears, Recipe("latq", 2.2, grid="group"))
    with pytest.raises(ConfigError, match=r"recipe\.bits: expected at least 2\.129 bits per weight.*Raise bits"):
        require_bits(linears, Recipe("latq", 2.1, grid="group"))
    with pytest.raises(ConfigError, match=r"at most 8\.129 bits"):
        require_bits(linears, Recipe("latq", 8.2, grid="group"))
    with pytest.raises(ConfigError, match=r"at least 2\.125 bits"):
        require_bits(linears, Recipe("latq", 2.1, grid="group", group_size=-1))


@pytest.mark.parametrize("group_size", [32, -1])
def test_bits_are_those_in_files_or_in_memory(group_size: int) -> None:
    scales = torch.ones(24, 2 if group_size > 0 else 1, dtype=torch.bfloat16)
    for width in WIDTHS:
        weight = PackedWeight.from_integers(torch.zeros(24, 64, dtype=torch.int32), scales, width, group_size)
        expected = max(weight.storage_bits(), weight.served_bits())
        assert linear_bits(LayerScheme("packed", width, group_size), 24, 64) == expected
