"""Lattice reduction: the same lattice, exact integers on the old basis, and a bound that only falls."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_latq.quantize.lattice.factor import Factor, factorize
from vllm_latq.quantize.lattice.k_best_plane import plane_of
from vllm_latq.quantize.lattice.reduction import DELTA, SIZE, Reduction, lll, reduce_lattice
from vllm_latq.quantize.methods.layer import quantize_layer
from vllm_latq.quantize.recipe import Recipe

FLOAT64_TOLERANCE = 1e-9
SIZES = [1, 2, 33]


def gram(cols: int, rank: int | None = None, seed: int = 0) -> torch.Tensor:
    """X^T X of correlated inputs, float64; nearly of low rank if `rank` is given."""
    generator = torch.Generator().manual_seed(seed)
    rank = rank or cols
    inputs = torch.randn(4 * cols, rank, generator=generator, dtype=torch.float64)
    inputs = inputs @ torch.randn(rank, cols, generator=generator, dtype=torch.float64)
    inputs += 0.02 * torch.randn(inputs.shape, generator=generator, dtype=torch.float64)
    return inputs.T @ inputs


def reduced(hessian: torch.Tensor) -> tuple[Factor, Reduction]:
    """The factor in act order, and the reduced basis that LLL finds for it."""
    factor = factorize(hessian, "act", 1e-4)
    reduction = reduce_lattice(factor)
    assert reduction is not None
    return factor, reduction


@given(cols=st.sampled_from(SIZES), seed=st.integers(0, 10**6))
@settings(max_examples=6, deadline=None)
def test_lll_is_unimodular_and_meets_its_conditions(cols, seed):
    basis = torch.linalg.cholesky(gram(cols, seed=seed), upper=True).numpy()
    transform, _ = lll(basis)
    assert np.array_equal(transform, transform.round())
    assert abs(abs(np.linalg.det(transform)) - 1) < 1e-6
    triangle = np.linalg.qr(basis @ transform)[1]
    diagonal = np.abs(np.diag(triangle))
    off = triangle / np.diag(triangle)[:, None]
    assert np.abs(np.triu(off, 1)).max(initial=0) <= SIZE + 1e-6
    lengths = triangle[np.arange(cols - 1), np.arange(1, cols)] ** 2 + diagonal[1:] ** 2
    assert bool((lengths >= (DELTA - 1e-6) * diagonal[:-1] ** 2).all())


def test_reduced_basis_is_left_alone():
    transform, exchanges = lll(np.diag([1.0, 2.0, 3.0]))
    assert exchanges == 0
    assert np.array_equal(transform, np.eye(3))
    factor = factorize(torch.eye(5))
    assert reduce_lattice(factor) is None


@given(cols=st.sampled_from([20, 33]), seed=st.integers(0, 10**6))
@settings(max_examples=6, deadline=None)
def test_mapped_back_integers_have_the_loss_and_the_bound_of_the_reduced_basis(cols, seed):
    factor, reduction = reduced(gram(cols, rank=cols // 3, seed=seed))
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(7, cols, generator=generator, dtype=torch.float64)
    assert torch.equal(reduction.transform @ reduction.inverse, torch.eye(cols, dtype=torch.float64))
    for seed_of_rounding in (None, 1):
        rounding = reduction.nearest_plane(weight, torch.tensor(0.25), plane_of(1, 16, seed_of_rounding))
        delta = rounding.z * 0.25 - weight
        loss = (delta @ factor.hessian * delta).sum(1)
        torch.testing.assert_close(rounding.loss, loss, rtol=1e-6, atol=FLOAT64_TOLERANCE)
        assert bool((loss <= rounding.bound * (1 + FLOAT64_TOLERANCE)).all())
    trace = float(reduction.factor.diagonal.sum())
    assert trace < float(factor.diagonal.sum())
    # The volume of the lattice is its own.
    volume = float(reduction.factor.diagonal.log().sum())
    assert volume == pytest.approx(float(factor.diagonal.log().sum()), abs=1e-6 * cols)


def test_lattice_points_are_found_exactly():
    _, reduction = reduced(gram(40, rank=5))
    integers = torch.randint(-9, 10, (6, 40), generator=torch.Generator().manual_seed(0))
    assert torch.equal(reduction.nearest_plane(0.25 * integers.double(), torch.tensor(0.25)).z, integers)


def test_it_gains_on_a_nearly_low_rank_hessian_at_equal_bits():
    hessian = gram(64, rank=6)
    weight = torch.randn(64, 64, generator=torch.Generator().manual_seed(1))
    errors, bounds = {}, {}
    for order, reduction in (("act", "none"), ("min-pivot", "none"), ("act", "lll")):
        recipe = Recipe("hptq", bits=4.0, order=order, reduction=reduction, damping=1e-6)
        record = quantize_layer(weight, hessian, recipe, "down_proj").record
        assert record.bound_holds is True
        assert 3.9 < record.bits <= 4.0
        errors[order, reduction], bounds[order, reduction] = record.error, record.bound
    assert errors["act", "lll"] < 0.5 * min(errors["act", "none"], errors["min-pivot", "none"])
