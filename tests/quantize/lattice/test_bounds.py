"""Bounds of Zhang et al. on random and real layers, stochastic rounding, and the inputs that are worst for GPTQ."""

import math
from pathlib import Path

import pytest
import torch

from helpers.bounds import l2_bounds, projection_constant, stochastic_bounds, trace_bounds
from vllm_latq.quantize.lattice.factor import factorize
from vllm_latq.quantize.lattice.nearest_plane import Rounding, nearest_plane

SLACK = 1 + 1e-9
FAILURE = 1e-3
STEP = 0.05


def random_layer(tokens: int, cols: int, rank: int | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """W [r, c] and X [n, c], float64."""
    generator = torch.Generator().manual_seed(tokens + cols)
    weight = 0.1 * torch.randn(12, cols, generator=generator, dtype=torch.float64)
    inputs = torch.randn(tokens, cols, generator=generator, dtype=torch.float64)
    if rank is not None:
        basis = torch.randn(rank, cols, generator=generator, dtype=torch.float64)
        inputs = torch.randn(tokens, rank, generator=generator, dtype=torch.float64) @ basis
    return weight, (inputs + 0.5 * inputs.roll(1, 1)) * torch.linspace(0.1, 2, cols, dtype=torch.float64)


@pytest.fixture(scope="module")
def real_layer(mini_model: Path, calibration_text: Path) -> tuple[torch.Tensor, torch.Tensor]:
    """down_proj of the bundled model's last block and its inputs on 100 tokens, fewer than its 768 channels."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(mini_model, dtype=torch.float32)
    tokens = AutoTokenizer.from_pretrained(mini_model)(calibration_text.read_text()[:4000])["input_ids"][:100]
    linear = model.model.layers[3].mlp.down_proj
    seen: list[torch.Tensor] = []
    linear.register_forward_pre_hook(lambda _, arguments: seen.append(arguments[0]))
    with torch.no_grad():
        model(torch.tensor([tokens]))
    return linear.weight.detach().double()[:64], seen[0][0].double()


def quantize(weight: torch.Tensor, inputs: torch.Tensor, damping: float, seed: int | None, step: float) -> tuple:
    """Rounding in act order, with the inputs in that order, lambda, and the errors of outputs and weights."""
    factor = factorize(inputs.T @ inputs, "act", damping)
    rounding = nearest_plane(weight, factor, torch.tensor(step), seed=seed)
    moved = rounding.dequantized - weight
    return rounding, inputs[:, factor.order], factor, inputs @ moved.T, moved


CASES = [(200, 40, None), (20, 40, None), (33, 33, None), (1, 20, None), (60, 40, 8)]


@pytest.mark.parametrize("damping", [1e-3, 0.01, 0.3])
@pytest.mark.parametrize("seed", [None, 0])
@pytest.mark.parametrize("case", CASES)
def test_l2_bounds_hold_and_are_ordered(case, seed, damping):
    weight, inputs = random_layer(*case)
    _check_l2(weight, inputs, damping, seed, STEP)


@pytest.mark.parametrize("seed", [None, 0])
def test_l2_bounds_hold_on_a_real_layer(real_layer, seed):
    weight, inputs = real_layer
    _check_l2(weight, inputs, 0.01, seed, float(weight.std()) / 2)


def _check_l2(weight: torch.Tensor, inputs: torch.Tensor, damping: float, seed: int | None, step: float) -> None:
    rounding, ordered, factor, output, moved = quantize(weight, inputs, damping, seed, step)
    stochastic = seed is not None
    theorem = l2_bounds(ordered, factor.ridge, step, stochastic)
    corollary = trace_bounds(inputs.T @ inputs, factor.ridge, step, stochastic)
    assert float(output.norm(dim=0).max()) <= min(theorem.output, corollary.output) * SLACK
    assert float(moved.norm(dim=1).max()) <= min(theorem.weight, corollary.weight) * SLACK
    # Theorem 5 of "GPTQ as Babai" knows the factor itself, Theorem 3.3 the conditioning, Corollary 3.6 the trace.
    assert float(rounding.bound.max()) <= theorem.output**2 * SLACK
    assert theorem.weight <= corollary.weight * SLACK
    assert float(factor.diagonal.max()) <= projection_constant(ordered, factor.ridge) * SLACK


def test_conditioning_sharpens_the_constant_where_tokens_are_few():
    _, inputs = random_layer(20, 200)
    ordered = inputs[:, factorize(inputs.T @ inputs, "act").order]
    ridge = 1e-6
    # All columns but the last 20 are spanned by those after them.
    assert projection_constant(ordered, ridge) < 0.1 * float(ordered.square().sum(0).max())
    assert l2_bounds(ordered, ridge, STEP).output < 0.5 * trace_bounds(inputs.T @ inputs, ridge, STEP).output


def test_deficient_row_rank_needs_the_zero_singular_value():
    # The first column is orthogonal to the others, which span one of two dimensions.
    inputs = torch.zeros(2, 4, dtype=torch.float64)
    inputs[0, 1:], inputs[1, 0] = 0.1, 1.0
    factor = factorize(inputs.T @ inputs, "natural", damping=1e-3)
    ridge = factor.ridge
    weight = torch.tensor([[0.49, 0.0, 0.0, 0.0]], dtype=torch.float64)
    rounding = nearest_plane(weight, factor, torch.tensor(1.0))
    assert float(rounding.loss) <= l2_bounds(inputs, ridge, 1.0).output ** 2
    # Theorem 3.3 as worded, with the smallest singular value that is not zero, would promise far less error than this.
    worded = max(ridge / (0.03 + ridge), 0.01 * ridge / (0.02 + ridge), 0.01) + ridge
    assert float(rounding.loss) > 2 * 4 / 4 * worded
    assert projection_constant(inputs, ridge) == pytest.approx(float(factor.diagonal.max()), rel=1e-9)


@pytest.mark.parametrize("case", CASES)
def test_l_infinity_bounds_hold(case):
    weight, inputs = random_layer(*case)
    for seed in range(20):
        _check_l_infinity(weight, inputs, seed, STEP)


def test_l_infinity_bounds_hold_on_a_real_layer_and_are_not_vacuous(real_layer):
    weight, inputs = real_layer
    step = float(weight.std()) / 2
    sharp = _check_l_infinity(weight, inputs, 0, step)
    # The stated bound is for every output on every token: within a factor of what happens.
    assert sharp < 12


def _check_l_infinity(weight: torch.Tensor, inputs: torch.Tensor, seed: int, step: float) -> float:
    """Returns how many times the largest output error the sharper bound is."""
    _, ordered, factor, output, moved = quantize(weight, inputs, 0.01, seed, step)
    shape = (*inputs.shape, weight.shape[0])
    general = stochastic_bounds(projection_constant(ordered, factor.ridge), factor.ridge, step, shape, FAILURE)
    sharp = stochastic_bounds(float(factor.diagonal.max()), factor.ridge, step, shape, FAILURE)
    assert float(output.abs().max()) <= sharp.output <= general.output * SLACK
    assert float(moved.abs().max()) <= sharp.weight <= general.weight * SLACK
    return sharp.output / float(output.abs().max())


def hadamard(size: int) -> torch.Tensor:
    """Columns normalised, float64; size a power of two."""
    matrix = torch.ones(1, 1, dtype=torch.float64)
    while len(matrix) < size:
        matrix = torch.cat([torch.cat([matrix, matrix], 1), torch.cat([matrix, -matrix], 1)])
    return matrix / math.sqrt(size)


def cosines(size: int) -> torch.Tensor:
    """The orthonormal discrete cosine transform (II), one basis vector a column."""
    grid = (2 * torch.arange(size, dtype=torch.float64)[:, None] + 1) * torch.arange(size)[None]
    matrix = torch.cos(math.pi * grid / (2 * size)) * math.sqrt(2 / size)
    matrix[:, 0] /= math.sqrt(2)
    return matrix


def adversary(size: int, basis: torch.Tensor, column: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, float]:
    """Appendix D: X = H^T R, the weight w with |w| < 1, the q that OPTQ rounds it to, and beta."""
    lower = torch.eye(size, dtype=torch.float64) + torch.diag(torch.ones(size - 1, dtype=torch.float64), -1)
    beta = 1 / (3 * float(basis.abs().max()))
    drift = beta * torch.linalg.solve_triangular(lower, basis[:, column : column + 1], upper=False)[:, 0]
    rounded = -drift.round()
    return basis.T @ lower, (drift + rounded)[None], rounded, beta


def nearest_or_stochastic(inputs: torch.Tensor, weight: torch.Tensor, seed: int | None) -> Rounding:
    factor = factorize(inputs.T @ inputs, "natural", damping=1e-12)
    return nearest_plane(weight, factor, torch.tensor(1.0), seed=seed)


@pytest.mark.parametrize("size", [16, 64, 256])
@pytest.mark.parametrize(("transform", "column"), [(hadamard, 1), (cosines, 3)])
def test_adversarial_inputs_concentrate_the_error_of_deterministic_rounding(size, transform, column):
    inputs, weight, expected, beta = adversary(size, transform(size), column)
    assert float(weight.abs().max()) <= 0.5
    rounding = nearest_or_stochastic(inputs, weight, None)
    assert torch.equal(rounding.z[0].double(), expected)
    output = inputs @ (weight - rounding.dequantized)[0]
    # All of the error, of order sqrt(N), sits in one output.
    assert float(output.abs().max()) == pytest.approx(beta, rel=1e-6)
    assert float(output.norm()) == pytest.approx(beta, rel=1e-6)
    assert beta > 0.2 * math.sqrt(size)


def test_adversarial_integers_grow_with_the_size_and_stochastic_ones_with_its_root():
    size = 256
    inputs, weight, _, beta = adversary(size, hadamard(size), 1)
    deterministic = nearest_or_stochastic(inputs, weight, None)
    assert int(deterministic.z.abs().max()) == round(size / 3)
    for seed in range(20):
        rounding = nearest_or_stochastic(inputs, weight, seed)
        assert int(rounding.z.abs().max()) < 3 * math.sqrt(size) < size / 3
        assert float((inputs @ (weight - rounding.dequantized)[0]).abs().max()) < beta / 2
