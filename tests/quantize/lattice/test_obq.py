"""OBQ as the oracle: GPTQ in a fixed order, the cheapest pick in its own, and nothing left to gain by composing."""

import math

import pytest
import torch

from helpers.babai import babai
from helpers.obq import best_free_weights, obq
from vllm_latq.quantize.lattice.choices import ORDERS
from vllm_latq.quantize.lattice.factor import factorize
from vllm_latq.quantize.lattice.nearest_plane import nearest_plane
from vllm_latq.quantize.lattice.outliers import Grid

FLOAT64_TOLERANCE = 1e-9
STEP = torch.tensor(0.03, dtype=torch.float64)


def layer(rows: int = 6, cols: int = 33) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(cols)
    weight = 0.05 * torch.randn(rows, cols, generator=generator, dtype=torch.float64)
    inputs = torch.randn(2 * cols, cols, generator=generator, dtype=torch.float64)
    inputs = inputs + 0.7 * inputs.roll(1, 1) + inputs[:, :1]
    return weight, inputs.T @ inputs


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("limits", [(-math.inf, math.inf), (-2, 1)])
def test_in_a_fixed_order_it_is_gptq(order, limits):
    weight, hessian = layer()
    factor = factorize(hessian, order)
    integers, orders = obq(weight, factor.hessian, STEP, *limits, order=factor.order)
    assert torch.equal(integers, nearest_plane(weight, factor, STEP, Grid(*limits)).z)
    assert torch.equal(orders, factor.order.expand_as(orders))


def test_its_picks_add_up_to_the_loss_and_are_the_cheapest():
    weight, gram = layer()
    hessian = factorize(gram).hessian
    integers, orders = obq(weight, hessian, STEP)
    for row in range(len(weight)):
        order = orders[row]
        assert torch.equal(order.sort().values, torch.arange(33))
        # Its own order, as a fixed one for this row alone, gives the same integers.
        assert torch.equal(obq(weight[row : row + 1], hessian, STEP, order=order)[0][0], integers[row])
        # The distances to the nearest hyperplanes (Corollary 3) at the first step.
        costs = (weight[row] - STEP * (weight[row] / STEP).round()).square() / torch.linalg.inv(hessian).diagonal()
        assert int(order[0]) == int(costs.argmin())


def test_further_propagation_changes_nothing():
    # Appendix B.4, as an optimality: after any number of steps the free weights are already the best ones.
    weight, gram = layer()
    factor = factorize(gram, "act")
    hessian = factor.hessian
    current, fixed = weight.clone(), torch.zeros(33, dtype=torch.bool)
    for pick in factor.order.tolist():
        error = current[:, pick] - STEP * (current[:, pick] / STEP).round()
        free_inverse = torch.linalg.inv(hessian[~fixed][:, ~fixed])
        place = int((~fixed)[:pick].sum())
        current[:, ~fixed] -= torch.outer(error, free_inverse[place]) / free_inverse[place, place]
        fixed[pick] = True
        refined = best_free_weights(weight, current, hessian, fixed)
        torch.testing.assert_close(refined, current, rtol=0, atol=FLOAT64_TOLERANCE)
    assert torch.equal((current / STEP).round().to(torch.int32), nearest_plane(weight, factor, STEP).z)


def test_babai_with_a_gptq_update_in_every_step_is_babai():
    weight, gram = layer()
    factor = factorize(gram, "act")
    hessian, columns = factor.hessian, factor.order.flip(0)
    basis = torch.linalg.cholesky(hessian[columns][:, columns], upper=True)
    # The residual of Babai, in the coordinates of the weights, before and after the extra update of what is free.
    rest, fixed, integers = weight[:, columns].clone(), torch.zeros(33, dtype=torch.bool), torch.zeros_like(weight)
    for j in reversed(range(33)):
        nearest = ((rest @ basis.T)[:, j] / (basis[j, j] * STEP)).round()
        integers[:, columns[j]] = nearest
        rest[:, j] -= STEP * nearest
        fixed[j] = True
        held = integers[:, columns] * STEP
        updated = best_free_weights(weight[:, columns], held, hessian[columns][:, columns], fixed)
        # Replacing the free part by its update moves the residual only along hyperplanes still to be chosen from.
        rest[:, ~fixed] = updated[:, ~fixed]
        rest[:, fixed] = 0
    assert torch.equal(integers.to(torch.int32), babai(weight, hessian, STEP, factor.order))


def test_running_gptq_on_its_own_result_returns_it():
    weight, gram = layer()
    factor = factorize(gram, "min-pivot")
    first = nearest_plane(weight, factor, STEP)
    again = nearest_plane(first.dequantized, factor, STEP)
    assert torch.equal(first.z, again.z)
    assert float(again.loss.max()) < FLOAT64_TOLERANCE
