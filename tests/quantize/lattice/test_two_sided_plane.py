"""Nearest plane on the lattice of G (x) H: the identity, the bound, and what it reduces to."""

import pytest
import torch

from vllm_latq.errors import NumericalError
from vllm_latq.quantize.lattice.factor import Factor, factorize
from vllm_latq.quantize.lattice.grams import LayerStatistics
from vllm_latq.quantize.lattice.nearest_plane import nearest_plane
from vllm_latq.quantize.lattice.two_sided_plane import two_sided_plane
from vllm_latq.quantize.methods.latq import feedback_noise, output_lattice
from vllm_latq.quantize.methods.record import BOUND_SLACK


def gram(size: int, seed: int) -> torch.Tensor:
    """A strongly correlated one, float64 [size, size]."""
    generator = torch.Generator().manual_seed(seed)
    mixing = torch.randn(size, size, generator=generator, dtype=torch.float64)
    return mixing.T @ mixing / size


def problem(rows: int, cols: int, seed: int = 0) -> tuple[torch.Tensor, Factor, Factor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    inputs, outputs = factorize(gram(cols, seed + 1)), factorize(gram(rows, seed + 2), damping=0.1)
    weight = torch.randn(rows, cols, generator=generator)
    steps = (torch.rand(size, generator=generator) + 0.2 for size in (rows, cols))
    return weight, inputs, outputs, *steps


def kronecker_loss(moved: torch.Tensor, inputs: Factor, outputs: Factor) -> float:
    moved = moved.to(torch.float64)
    return float(((outputs.hessian @ moved @ inputs.hessian) * moved).sum())


SHAPES = [(1, 1), (1, 200), (63, 65), (130, 64), (200, 33)]


@pytest.mark.parametrize("shape", SHAPES)
def test_loss_is_the_quadratic_form_and_below_its_bound(shape: tuple[int, int]) -> None:
    weight, inputs, outputs, rows, cols = problem(*shape)
    found = two_sided_plane(weight, inputs, [outputs], rows, cols)
    moved = weight - found.z * rows[:, None] * cols
    assert found.loss == pytest.approx(kronecker_loss(moved, inputs, outputs), rel=1e-4)
    assert found.loss <= found.bound


@pytest.mark.parametrize("octaves", [12, 15, 18])
def test_loss_of_huge_integers_too(octaves: int) -> None:
    weight, inputs, outputs, rows, cols = problem(64, 70)
    cols *= 2.0**-octaves
    found = two_sided_plane(weight, inputs, [outputs], rows, cols)
    moved = weight.double() - found.z * torch.outer(rows.double(), cols.double())
    assert found.z.abs().max() > 2**octaves
    assert found.loss == pytest.approx(kronecker_loss(moved, inputs, outputs), rel=1e-3)
    assert found.loss <= found.bound


def test_errors_spread_and_are_fed_back_as_predicted() -> None:
    """In steps that make all residuals cost alike; 300 weights, so that a mean square is known to some percent."""
    inputs, outputs = factorize(gram(24, 1), damping=0.05), factorize(gram(20, 2), damping=0.1)
    at_rest = [torch.empty_like(factor.diagonal) for factor in (outputs, inputs)]
    for side, factor in zip(at_rest, (outputs, inputs), strict=True):
        side[factor.order] = factor.diagonal
    rows, cols = (side.rsqrt() for side in at_rest)
    left, right = outputs.unit_triangle(), inputs.unit_triangle()
    errors, fed_back = torch.zeros(20, 24).double(), torch.zeros(20, 24).double()
    for seed in range(300):
        weight = torch.randn(20, 24, generator=torch.Generator().manual_seed(seed)) * 20
        found = two_sided_plane(weight, inputs, [outputs], rows.float(), cols.float())
        missed = weight.double() - found.z * torch.outer(rows, cols)
        residual = torch.empty_like(missed)
        residual[outputs.order[:, None], inputs.order] = left.T @ missed[outputs.order][:, inputs.order] @ right
        errors += (missed / torch.outer(rows, cols)).square() / 300
        fed_back += ((residual - missed) / torch.outer(rows, cols)).square() / 300
    spread = torch.outer(outputs.spread, inputs.spread)
    assert spread.min() == pytest.approx(1.0)
    assert spread.max() > 10
    torch.testing.assert_close(errors * 12, spread, rtol=0.5, atol=0.0)
    assert float((errors * 12 / spread).mean()) == pytest.approx(1, rel=0.02)
    assert float(fed_back.mean() * 12) == pytest.approx(float((spread - 1).mean()), rel=0.02)
    noise = feedback_noise(outputs.spread.repeat(30), inputs.spread.repeat(30))
    assert noise.shape == (600, 720)
    assert float(noise.square().mean()) == pytest.approx(float(fed_back.mean() * 12), rel=0.02)
    # Tile by tile: each entry as much as is fed back to it.
    of_entries = noise.reshape(30, 20, 30, 24).square().mean((0, 2))
    torch.testing.assert_close(of_entries.double(), spread - 1, rtol=0.3, atol=0.02)


@pytest.mark.parametrize("width", [2, 3, 8])
@pytest.mark.parametrize("shape", SHAPES)
def test_targets_slightly_past_the_codes_are_clipped_to_them(shape: tuple[int, int], width: int) -> None:
    weight, inputs, outputs, rows, cols = problem(*shape)
    weight = weight * 2.0 ** (width - 2)  # so that some targets are within the codes' reach, and some are not
    found = two_sided_plane(weight, inputs, [outputs], rows, cols, width=width)
    steps = torch.outer(rows.double(), cols.double())
    missed = weight.double() - (found.z + 0.5) * steps
    assert found.loss == pytest.approx(kronecker_loss(missed, inputs, outputs), rel=1e-4)
    assert found.loss <= found.bound
    assert found.bound == pytest.approx(9 / 4 * two_sided_plane(weight, inputs, [outputs], rows, cols).bound)
    # The targets, from the errors, by the recursion as it is written.
    right, left = inputs.unit_triangle(), outputs.unit_triangle()
    permuted = missed[outputs.order][:, inputs.order]
    moved = permuted @ right
    target = weight.double()[outputs.order][:, inputs.order] + moved - permuted + left.T @ moved - moved
    relative = target / steps[outputs.order][:, inputs.order]
    z, half = found.z[outputs.order][:, inputs.order], 2 ** (width - 1)
    clear = (relative.abs() - half - 0.25).abs() > 1e-3  # of what float32 rounds to either side
    near, far = clear & (relative.abs() < half + 0.25), clear & (relative.abs() > half + 0.25)
    assert ((z[near] >= -half) & (z[near] < half)).all()
    assert ((z[far] < -half) | (z[far] >= half)).all()
    away = (relative - z - 0.5).abs()
    assert (away[near & (relative.abs() > half)] > 0.5 - 1e-3).all()
    assert (away[near | far] <= 0.75 + 1e-3).all()
    assert (away[far | (relative.abs() < half)] <= 0.5 + 1e-3).all()
    if shape[0] > 1:
        assert far.any()
        assert (near & (relative.abs() > half)).any()


@pytest.mark.parametrize("width", [2, 3, 4, 8])
def test_targets_at_the_largest_distance_are_within_the_bound(width: int) -> None:
    identity = factorize(torch.ones(1, 1, dtype=torch.float64), "natural", 1e-6)
    for seed in range(50):
        rows, cols = torch.rand(2, 1, generator=torch.Generator().manual_seed(seed)) + 0.1
        weight = torch.outer(rows, cols) * (2.0 ** (width - 1) + 0.25)
        found = two_sided_plane(weight, identity, [identity], rows, cols, width=width)
        assert found.loss <= found.bound * (1 + BOUND_SLACK)


def test_bound_equals_the_bound_of_the_product_lattice() -> None:
    weight, inputs, outputs, rows, cols = problem(5, 7)
    lattice = torch.kron(outputs.diagonal, inputs.diagonal)
    steps = torch.outer(rows[outputs.order], cols[inputs.order]).double().flatten()
    found = two_sided_plane(weight, inputs, [outputs], rows, cols)
    assert found.bound == pytest.approx(float(lattice @ steps.square()) / 4)


def test_it_is_nearest_plane_on_the_explicit_kronecker_product() -> None:
    """Babai on the dense 35 x 35 lattice of G (x) H, rounded in the same sequence, gives the same integers."""
    weight, inputs, outputs, rows, cols = problem(5, 7)
    triangle = torch.kron(outputs.unit_triangle(), inputs.unit_triangle())
    permuted = weight[outputs.order][:, inputs.order].double()
    steps = torch.outer(rows[outputs.order], cols[inputs.order]).double()
    flat, step = permuted.flatten(), steps.flatten()
    integers, error = torch.zeros_like(flat), torch.zeros_like(flat)
    for t in range(len(flat)):
        integers[t] = torch.round((flat[t] + error[:t] @ triangle[:t, t]) / step[t])
        error[t] = flat[t] - integers[t] * step[t]
    found = two_sided_plane(weight, inputs, [outputs], rows, cols).z[outputs.order][:, inputs.order]
    assert torch.equal(found.double().flatten(), integers)


@pytest.mark.parametrize("shape", SHAPES)
def test_identity_outputs_make_it_gptq(shape: tuple[int, int]) -> None:
    weight, inputs, _, rows, cols = problem(*shape)
    identity = factorize(torch.eye(shape[0]), "natural")
    expected = nearest_plane(weight, inputs, torch.outer(rows, cols), group_size=1).z
    assert torch.equal(two_sided_plane(weight, inputs, [identity], rows, cols).z, expected)
    correlated = factorize(gram(shape[0], 3), "natural")
    assert torch.equal(two_sided_plane(weight, inputs, [correlated], rows, cols, feedback=False).z, expected)


def test_blocks_of_outputs_do_not_see_each_other() -> None:
    weight, inputs, _, rows, cols = problem(100, 70)
    blocks = [factorize(gram(size, size), damping=0.1) for size in (64, 36)]
    whole = two_sided_plane(weight, inputs, blocks, rows, cols)
    upper = two_sided_plane(weight[:64], inputs, blocks[:1], rows[:64], cols)
    lower = two_sided_plane(weight[64:], inputs, blocks[1:], rows[64:], cols)
    assert torch.equal(whole.z, torch.cat([upper.z, lower.z]))
    assert whole.loss == pytest.approx(upper.loss + lower.loss)


def test_feedback_between_outputs_lowers_the_loss() -> None:
    weight, inputs, outputs, rows, cols = problem(96, 96)
    moved = [
        weight - two_sided_plane(weight, inputs, [outputs], rows, cols, feedback=feedback).z * rows[:, None] * cols
        for feedback in (True, False)
    ]
    losses = [kronecker_loss(one, inputs, outputs) for one in moved]
    assert losses[0] < 0.7 * losses[1]


def test_steps_far_too_small_are_refused() -> None:
    weight, inputs, outputs, rows, cols = problem(8, 8)
    with pytest.raises(NumericalError, match="steps are far too small"):
        two_sided_plane(weight, inputs, [outputs], rows * 1e-9, cols)


def test_a_layer_that_the_loss_does_not_see_is_named() -> None:
    statistics = LayerStatistics(torch.eye(4), [torch.zeros(3, 3)], 8, "layers.0.up")
    with pytest.raises(NumericalError, match=r"layers\.0\.up: .*none but zeros.*--ignore layers\.0\.up"):
        output_lattice(statistics, "act", (), "layers.0.up")
