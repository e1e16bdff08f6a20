"""Factor and rounding orders: the algebra they promise, on every shape and on broken Hessians."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_latq.errors import ConfigError, NumericalError
from vllm_latq.quantize.lattice.choices import ORDERS
from vllm_latq.quantize.lattice.factor import MAX_DAMPING, factorize, rounding_order

FLOAT64_TOLERANCE = 1e-10
SIZES = [1, 2, 33, 63, 150]


def gram(cols: int, seed: int = 0, samples: int | None = None) -> torch.Tensor:
    """X^T X of correlated inputs of very different sizes, float64."""
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randn(samples or 2 * cols + 3, cols, generator=generator, dtype=torch.float64)
    mixed = inputs + 0.7 * inputs @ torch.randn(cols, cols, generator=generator, dtype=torch.float64) / cols**0.5
    mixed *= torch.logspace(-1, 1, cols, dtype=torch.float64)[torch.randperm(cols, generator=generator)]
    return mixed.T @ mixed


@given(cols=st.sampled_from(SIZES), name=st.sampled_from(ORDERS), seed=st.integers(0, 10**6))
@settings(max_examples=40, deadline=None)
def test_factor_inverts_the_permuted_damped_hessian(cols, name, seed):
    hessian = gram(cols, seed)
    factor = factorize(hessian, name, damping=0.02)
    assert torch.equal(factor.order.sort().values, torch.arange(cols))
    assert factor.damping == 0.02
    expected = hessian + 0.02 * hessian.diagonal().mean() * torch.eye(cols, dtype=torch.float64)
    torch.testing.assert_close(factor.hessian, expected, rtol=1e-14, atol=0)
    permuted = expected[factor.order][:, factor.order]
    identity = factor.upper @ permuted @ factor.upper.T
    torch.testing.assert_close(identity, torch.eye(cols, dtype=torch.float64), rtol=0, atol=FLOAT64_TOLERANCE)
    assert torch.equal(factor.upper, factor.upper.triu())
    assert torch.equal(factor.diagonal, factor.upper.diagonal().pow(-2))
    # D is the diagonal of the LDL decomposition in the reverse order (Theorem 5).
    reverse = torch.linalg.cholesky(permuted.flip(0, 1)).diagonal().square().flip(0)
    torch.testing.assert_close(factor.diagonal, reverse, rtol=FLOAT64_TOLERANCE, atol=0)


def test_factor_of_the_identity_is_exact():
    factor = factorize(torch.eye(5), "natural", damping=3.0)
    assert torch.equal(factor.diagonal, torch.full((5,), 4.0, dtype=torch.float64))
    assert torch.equal(factor.propagation(torch.float32), torch.eye(5))


def test_act_order_is_the_stable_descending_diagonal():
    hessian = torch.diag(torch.tensor([2.0, 5.0, 2.0, 7.0]))
    assert rounding_order(hessian, "act").tolist() == [3, 1, 0, 2]
    assert rounding_order(hessian, "natural").tolist() == [0, 1, 2, 3]


def reference_min_pivot(hessian: torch.Tensor) -> list[int]:
    """Algorithm 4 of the paper, one rank-1 update at a time."""
    schur, left, picked = hessian.clone(), list(range(len(hessian))), []
    while left:
        pivot = min(left, key=lambda j: float(schur[j, j]))
        schur = schur - torch.outer(schur[:, pivot], schur[pivot]) / schur[pivot, pivot]
        left.remove(pivot)
        picked.append(pivot)
    return picked


@given(cols=st.sampled_from(SIZES), seed=st.integers(0, 10**6))
@settings(max_examples=15, deadline=None)
def test_min_pivot_is_the_papers_algorithm_reversed(cols, seed):
    hessian = gram(cols, seed)
    assert rounding_order(hessian, "min-pivot").flip(0).tolist() == reference_min_pivot(hessian)


def test_min_pivot_has_the_smallest_trace_typically():
    traces = {name: [] for name in ORDERS}
    for seed in range(10):
        hessian = gram(100, seed)
        for name in ORDERS:
            traces[name].append(float(factorize(hessian, name).diagonal.sum()))
    below_act = [pivot <= act for pivot, act in zip(traces["min-pivot"], traces["act"], strict=True)]
    assert sum(below_act) >= 9
    assert sum(traces["min-pivot"]) < sum(traces["act"]) < sum(traces["natural"])


@pytest.mark.parametrize("name", ORDERS)
def test_orders_of_rank_deficient_and_zero_matrices_are_permutations(name):
    for hessian in (gram(70, samples=3), torch.zeros(70, 70, dtype=torch.float64), torch.zeros(0, 0)):
        order = rounding_order(hessian, name)
        assert order.dtype == torch.int64
        assert torch.equal(order.sort().values, torch.arange(len(hessian)))


@pytest.mark.parametrize("name", ORDERS)
def test_dead_inputs_rank_deficiency_and_constant_channels_factorise(name):
    hessian = gram(40, samples=5)
    hessian[7] = hessian[:, 7] = 0
    hessian[11], hessian[:, 11] = hessian[12], hessian[:, 12]
    hessian[11, 11] = hessian[12, 12]
    factor = factorize(hessian, name, damping=0.01)
    assert factor.damping == 0.01
    assert float(factor.diagonal.min()) >= factor.ridge * (1 - 1e-6)
    # A dead input is orthogonal to all others: nothing propagates from or to it.
    step = factor.order.tolist().index(7)
    assert float(factor.diagonal[step]) == pytest.approx(factor.ridge, rel=1e-12)
    assert int((factor.upper[step] != 0).sum()) == 1


def test_damping_escalates_and_is_recorded():
    hessian = gram(40, samples=5)
    factor = factorize(hessian, "act", damping=1e-17)
    assert 1e-17 < factor.damping <= MAX_DAMPING
    assert math.log10(factor.damping / 1e-17) == pytest.approx(round(math.log10(factor.damping / 1e-17)), abs=1e-6)
    assert float(factor.diagonal.min()) >= factor.ridge / 2


def test_indefinite_hessian_is_an_error_that_names_the_layer():
    hessian = torch.full((3, 3), 10.0)
    hessian.fill_diagonal_(1.0)
    with pytest.raises(NumericalError, match=r"hessian: expected a positive definite Hessian"):
        factorize(hessian, "act")


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_non_finite_hessian_names_layer_and_entry(bad):
    hessian = gram(6)
    hessian[2, 3] = bad
    with pytest.raises(NumericalError, match=r"Hessian: expected finite Hessian, found .* at \[2, 3\]"):
        factorize(hessian)


@pytest.mark.parametrize(
    ("hessian", "message"),
    [
        (torch.zeros(4, 4), "not all zero"),
        (torch.diag(torch.tensor([1.0, -1.0])), "non-negative diagonal"),
        (torch.tensor([[1.0, 0.5], [0.0, 1.0]]), "symmetric"),
        (torch.ones(3, 4), "square"),
        (torch.ones(3), "square"),
    ],
)
def test_matrix_that_is_no_gram_matrix_is_refused(hessian, message):
    with pytest.raises(NumericalError, match=message):
        factorize(hessian)


@pytest.mark.parametrize("damping", [0.0, -1.0, math.nan, math.inf])
def test_bad_damping_is_refused(damping):
    with pytest.raises(ConfigError, match="positive"):
        factorize(gram(3), damping=damping)


def test_unknown_order_is_refused():
    for call in (lambda: factorize(gram(3), "random"), lambda: rounding_order(gram(3), "random")):
        with pytest.raises(ConfigError, match="natural, act, min-pivot"):
            call()


def test_empty_hessian_factorises():
    assert factorize(torch.zeros(0, 0)).upper.shape == (0, 0)
