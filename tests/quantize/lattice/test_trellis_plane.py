"""Nearest plane on both sides with the trellis code: the identity, the enforced limit, and what is kept."""

import pytest
import torch

from vllm_latq.coding.trellis.code import FACTORS, RATES, TILE, decode_rings
from vllm_latq.quantize.lattice import trellis_plane as module
from vllm_latq.quantize.lattice.factor import factorize
from vllm_latq.quantize.lattice.trellis_plane import (
    LIMIT,
    BlockFactor,
    Plan,
    TrellisPass,
    block_factor,
    noisy_targets,
    tile_terms,
    trellis_plane,
)

ROWS, COLUMNS = 48, 64
Planned = tuple[torch.Tensor, torch.Tensor, torch.Tensor, Plan]


def gram(size: int, seed: int) -> torch.Tensor:
    samples = torch.randn(4 * size, size, generator=torch.Generator().manual_seed(seed))
    return samples.T @ samples / len(samples) + 0.3 * torch.ones(size, size)


def side(size: int, seed: int, padded: int) -> tuple[torch.Tensor, BlockFactor]:
    factor = factorize(gram(size, seed), "natural", 0.01)
    return factor.hessian, block_factor(factor, padded)


@pytest.fixture(scope="module")
def planned() -> Planned:
    """G, H, both damped, a weight [30, 50] padded to [32, 64], and a plan of rates 4 and 6."""
    g, rows = side(30, 1, 32)
    h, columns = side(50, 2, 64)
    weight = torch.zeros(32, 64)
    weight[:30, :50] = torch.randn(30, 50, generator=torch.Generator().manual_seed(3))
    weight[2, 3] = 40.0
    scales = [torch.nn.functional.pad(torch.ones(size), (0, padding)) for size, padding in ((30, 2), (50, 14))]
    return g, h, weight, Plan(rows, columns, torch.tensor([[4, 4, 6, 6]] * 2), *scales)


def test_block_factor_is_a_block_ldl_decomposition() -> None:
    g, rows = side(40, 4, 48)
    unit, inside = rows.triangle.double(), torch.block_diag(*rows.blocks)
    assert torch.equal(unit, unit.triu())
    for tile in range(3):
        span = slice(tile * TILE, (tile + 1) * TILE)
        torch.testing.assert_close(unit[span, span], torch.eye(TILE, dtype=torch.float64), atol=1e-6, rtol=0)
    torch.testing.assert_close((unit @ inside @ unit.T)[:40, :40], g, rtol=1e-5, atol=1e-6)
    assert not inside[40:].any()


def test_terms_add_up_to_the_loss(planned: Planned) -> None:
    g, h, weight, plan = planned
    done = trellis_plane(weight, plan)
    error = (weight - done.quantized)[:30, :50].double()
    loss = float(((g @ error @ h) * error).sum())
    assert float(done.losses.sum()) == pytest.approx(loss, rel=1e-5)
    terms, plans = tile_terms(done.quantized, weight - done.quantized, plan)
    torch.testing.assert_close(terms, done.losses, rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(plans, done.planned, rtol=1e-4, atol=1e-6)


def test_no_tile_costs_more_than_its_limit(planned: Planned) -> None:
    _, _, weight, plan = planned
    done = trellis_plane(weight, plan)
    assert (done.losses <= LIMIT * done.planned).all()
    assert (done.planned >= plan.distortion * plan.energies).all()
    assert 0.3 < float(done.losses.sum() / done.planned.sum()) < 1.2
    # The weight far beyond the others is kept, and few others are.
    assert done.kept[2, 3] != 0
    assert abs(float(done.quantized[2, 3]) - float(done.targets[2, 3])) < 0.2
    assert int((done.kept != 0).sum()) < 30


def test_higher_rates_cost_less(planned: Planned) -> None:
    _, _, weight, plan = planned
    losses = []
    for rate in (RATES[0], 5, RATES[-1]):
        rates = torch.full((2, 4), rate)
        one = Plan(plan.rows, plan.columns, rates, plan.row_scales, plan.column_scales)
        losses.append(float(trellis_plane(weight, one).losses.sum()))
    assert losses[0] > 4 * losses[1] > 16 * losses[2]


def test_noise_stands_for_the_errors_of_the_code(planned: Planned) -> None:
    _, _, weight, plan = planned
    met, guessed = trellis_plane(weight, plan).targets[:30, :50], noisy_targets(weight, plan)[:30, :50]
    assert float(guessed.var() / met.var()) == pytest.approx(1, abs=0.2)


def rounded() -> tuple[torch.Tensor, Plan, TrellisPass, float]:
    """Round a small weight; return it, its plan, the pass and tr(G E H E^T)."""
    generator = torch.Generator().manual_seed(0)
    mixings = [torch.randn(size, size, generator=generator, dtype=torch.float64) for size in (ROWS, COLUMNS)]
    factors = [factorize(mixing.T @ mixing / len(mixing), "natural", 0.05) for mixing in mixings]
    rows, columns = (block_factor(factor, len(factor.order)) for factor in factors)
    rates = torch.randint(4, 9, (ROWS // TILE, COLUMNS // TILE), generator=generator)
    scales = (torch.rand(size, generator=generator) + 0.5 for size in (ROWS, COLUMNS))
    plan = Plan(rows, columns, rates, *scales)
    weight = torch.randn(ROWS, COLUMNS, generator=generator) * plan.row_scales[:, None] * plan.column_scales
    done = trellis_plane(weight, plan)
    error = (weight - done.quantized).double()
    loss = (factors[0].hessian @ error @ factors[1].hessian * error).sum()
    return weight, plan, done, float(loss)


def test_rings_decode_to_the_weights() -> None:
    _, plan, done, loss = rounded()
    assert float(done.losses.sum()) == pytest.approx(loss, rel=1e-4)
    rates = plan.rates.flatten().tolist()
    tiles = [decode_rings(ring[None], rate)[0] * FACTORS[rate] for ring, rate in zip(done.rings, rates, strict=True)]
    grid = torch.stack(tiles).view(ROWS // TILE, COLUMNS // TILE, TILE, TILE).transpose(1, 2).reshape(ROWS, COLUMNS)
    decoded = grid * plan.row_scales[:, None] * plan.column_scales
    assert torch.equal(done.quantized, decoded + done.kept)


def test_feedback_in_two_launches_is_the_feedback_tile_by_tile(monkeypatch: pytest.MonkeyPatch) -> None:
    """The feedback of a GPU runs on any device; only the order of its sums is another."""
    by_tile, waves = module.feed_back, []

    def both(*arguments: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        expected = by_tile(*arguments)
        torch.testing.assert_close(module._feed_back_at_once(*arguments), expected, rtol=1e-4, atol=1e-5)
        waves.append(arguments)
        return expected

    monkeypatch.setattr(module, "feed_back", both)
    rounded()
    assert len(waves) == ROWS // TILE + COLUMNS // TILE - 1
