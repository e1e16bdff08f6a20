"""Nearest plane on both sides of a weight: against plain loops, and against nearest plane on one side."""

import pytest
import torch

from vllm_latq.quantize.lattice.factor import Factor, factorize
from vllm_latq.quantize.lattice.group_plane import group_plane
from vllm_latq.quantize.lattice.nearest_plane import nearest_plane
from vllm_latq.quantize.lattice.outliers import Grid

SIZES = [(1, 1), (16, 32), (33, 17), (20, 63)]


def lattice(rows: int, columns: int) -> tuple[torch.Tensor, Factor, Factor, torch.Tensor]:
    """Return a weight, the factors of two correlated grams, and scales."""
    generator = torch.Generator().manual_seed(7)
    mixing = [torch.randn(2 * size, size, generator=generator) for size in (rows, columns)]
    left, right = (
        factorize(part.T @ part + 0.2 * part.T.sum(1).outer(part.sum(0)), "natural", 0.05) for part in mixing
    )
    weight = torch.randn(rows, columns, generator=generator)
    return weight, left, right, 0.3 + torch.rand(rows, columns, generator=generator) / 4


def plain(
    weight: torch.Tensor, left: Factor, right: Factor, scales: torch.Tensor, grid: Grid
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return integers and targets, one weight after the other in float64."""
    weight, scales = weight.double(), scales.double()
    down, across = left.unit_triangle(), right.unit_triangle()
    error, integers, targets = (torch.zeros_like(weight) for _ in range(3))
    for i in range(weight.shape[0]):
        for j in range(weight.shape[1]):
            over = down[:, i] @ (error @ across[:, j])  # errors of what is not rounded yet are zero
            targets[i, j] = weight[i, j] + over
            integers[i, j] = (targets[i, j] / scales[i, j]).round().clamp(grid.low, grid.high)
            error[i, j] = weight[i, j] - integers[i, j] * scales[i, j]
    return integers, targets


@pytest.mark.parametrize(("rows", "columns"), SIZES)
def test_equals_plain_loops(rows: int, columns: int) -> None:
    weight, left, right, scales = lattice(rows, columns)
    grid = Grid.of_bits(3)
    found = group_plane(weight, left, right, scales, grid)
    integers, targets = plain(weight, left, right, scales, grid)
    assert torch.equal(found.integers, integers.to(torch.int32))
    torch.testing.assert_close(found.targets, targets.float(), rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize(("rows", "columns"), SIZES)
def test_loss_is_the_sum_of_weighted_residuals(rows: int, columns: int) -> None:
    weight, left, right, scales = lattice(rows, columns)
    found = group_plane(weight, left, right, scales, Grid.of_bits(8))
    quantized = found.integers * scales
    residuals = (found.targets - quantized).double()
    assert (residuals.abs() <= scales / 2 + 1e-5).all()
    error = (weight - quantized).double()
    loss = (left.hessian @ error @ right.hessian * error).sum()
    assert float(left.diagonal @ residuals.square() @ right.diagonal) == pytest.approx(float(loss), rel=1e-3)


def test_without_correlated_outputs_it_is_nearest_plane() -> None:
    weight, _, right, scales = lattice(20, 63)
    apart = factorize(torch.eye(20), "natural", 0.01)
    found = group_plane(weight, apart, right, scales, Grid.of_bits(3))
    assert torch.equal(found.integers, nearest_plane(weight, right, scales, Grid.of_bits(3), group_size=1).z)


def test_both_sides_lose_less_than_one() -> None:
    weight, left, right, scales = lattice(33, 63)
    grid = Grid.of_bits(4)

    def loss(integers: torch.Tensor) -> float:
        error = (weight - integers * scales).double()
        return float((left.hessian @ error @ right.hessian * error).sum())

    both = loss(group_plane(weight, left, right, scales, grid).integers)
    one = loss(nearest_plane(weight, right, scales, grid, group_size=1).z)
    assert both < 0.8 * one < 0.8 * loss((weight / scales).round().clamp(grid.low, grid.high))
