"""The Viterbi search: equal to its plain form, rings that close, and the distortion that plans count with."""

import pytest
import torch

from helpers.plain_viterbi import plain_rings
from vllm_latq.coding.trellis.code import FACTORS, RATES, STEPS, decode_rings, pack_rings, step_places
from vllm_latq.quantize.lattice.trellis_plane import DISTORTION
from vllm_latq.quantize.lattice.viterbi.search import nearest_rings


def gaussian_tiles(count: int, rate: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Draw targets of variance 1, in units of a value, and prices."""
    generator = torch.Generator().manual_seed(rate)
    targets = torch.randn(count, STEPS, 2, generator=generator) / FACTORS[rate]
    return targets, torch.rand(count, STEPS, 2, generator=generator)


def decoded_steps(symbols: torch.Tensor, rate: int) -> torch.Tensor:
    """Decode the packed symbols, and return the values by step, float32 [tiles, STEPS, 2]."""
    tiles = decode_rings(pack_rings(symbols, rate), rate)
    row, column = step_places()
    return torch.stack((tiles[:, row, column], tiles[:, row, column + 1]), -1).to(torch.float32)


@pytest.mark.parametrize("rate", RATES)
def test_it_finds_the_ring_that_the_plain_form_finds(rate: int) -> None:
    targets, prices = gaussian_tiles(2, rate)
    prices[1, :, 1] = 0
    assert nearest_rings(targets, prices, rate).equal(plain_rings(targets, prices, rate))


@pytest.mark.parametrize("rate", [2, 12])
def test_it_chooses_as_the_plain_form_does_among_equal_costs(rate: int) -> None:
    """Whole targets and prices of 1 have costs that are whole numbers, many of them equal; so have prices of 0."""
    targets = (gaussian_tiles(2, rate)[0] / 64).round() * 64
    prices = torch.ones_like(targets)
    prices[1] = 0
    assert nearest_rings(targets, prices, rate).equal(plain_rings(targets, prices, rate))


@pytest.mark.parametrize("rate", RATES)
def test_a_ring_of_the_code_is_found_exactly(rate: int) -> None:
    """The packed symbols decode to the values of the path, across the seam, too."""
    ring = torch.randint(1 << rate, (1, STEPS), generator=torch.Generator().manual_seed(rate))
    targets = decoded_steps(ring, rate)
    found = nearest_rings(targets, torch.ones_like(targets), rate)
    assert decoded_steps(found, rate).equal(targets)


@pytest.mark.parametrize("rate", [3, 8])
def test_distortion_of_a_gaussian_is_what_plans_count_with(rate: int) -> None:
    targets, prices = gaussian_tiles(40, rate)
    errors = targets - decoded_steps(nearest_rings(targets, torch.ones_like(prices), rate), rate)
    assert float(errors.square().mean()) * FACTORS[rate] ** 2 == pytest.approx(DISTORTION[rate], rel=0.03)


def test_many_threads_find_what_one_thread_finds(monkeypatch: pytest.MonkeyPatch) -> None:
    targets, prices = gaussian_tiles(5, 4)
    alone = nearest_rings(targets, prices, 4)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)
    assert nearest_rings(targets, prices, 4).equal(alone)
