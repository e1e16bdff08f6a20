"""Search for a target, as SSQR and HPTQ use it: it meets the window, or else keeps the best probe."""

import math

import pytest
import torch

from vllm_latq.quantize.lattice.search import Guess, Outcome, sample_rows, search_target


def run(function, target=3.0, tolerance=0.005, start=0.0, slope=-1.0, bounds=(-20.0, 20.0), max_probes=20) -> Outcome:
    seen = []

    def evaluate(x: float) -> tuple[float, int]:
        seen.append(x)
        return function(x), len(seen)

    lower, upper = bounds
    outcome = search_target(
        evaluate,
        target=target,
        tolerance=tolerance,
        guess=Guess(start, slope, lower, upper),
        max_probes=max_probes,
    )
    assert outcome.probes == len(seen) <= max_probes
    assert all(lower <= x <= upper for x in seen)
    assert outcome.best.value == function(outcome.best.x)
    assert seen[outcome.best.payload - 1] == outcome.best.x
    return outcome


@pytest.mark.parametrize("start", [-15.0, -3.0, 0.0, 3.0, 15.0])
@pytest.mark.parametrize(
    "function",
    [
        lambda x: 5 - x,
        lambda x: 3 - 0.3 * x**3 - 0.01 * x,
        lambda x: 10 / (1 + math.exp(x)),
        lambda x: 4 - math.atan(x),
    ],
)
def test_monotone_functions_are_met_within_the_tolerance(function, start):
    outcome = run(function, start=start)
    assert outcome.met
    assert outcome.feasible
    assert 3.0 - 0.005 <= outcome.best.value <= 3.0


def test_a_line_of_known_slope_takes_two_probes():
    assert run(lambda x: 3.4 - x).probes == 2


def test_a_step_function_gives_the_best_feasible_step():
    outcome = run(lambda x: float(round(5.3 - x)) + 0.4)
    assert outcome.best.value == 2.4
    assert outcome.feasible
    assert not outcome.met


def test_a_bump_does_not_lose_the_best_feasible_probe():
    # Falls, rises again above the target around 1.2, falls for good: not monotone.
    outcome = run(lambda x: 4 - x + 1.5 * math.exp(-((x - 2) ** 2)), start=3.0)
    assert outcome.feasible
    assert 2.9 < outcome.best.value <= 3.0


def test_infeasible_functions_give_the_smallest_value():
    outcome = run(lambda x: 5 + (x - 1) ** 2, bounds=(-4.0, 4.0))
    assert not outcome.feasible
    assert not outcome.met
    assert outcome.best.value <= 5 + 3**2


def test_everything_feasible_ends_at_the_lower_bound():
    outcome = run(lambda x: 1.0 - 0.01 * x, bounds=(-2.0, 2.0))
    assert outcome.best.x == -2.0
    assert outcome.feasible
    assert not outcome.met


def test_infinite_values_are_stepped_over():
    assert run(lambda x: math.inf if x < 1 else 5 - x).met


def test_a_single_probe_is_enough():
    outcome = run(lambda x: 7.0, max_probes=1)
    assert (outcome.probes, outcome.feasible) == (1, False)


def test_row_samples_are_fixed_sorted_and_distinct():
    rows = sample_rows(torch.empty(4096, 1))
    assert rows is not None
    assert len(rows) == 512
    assert torch.equal(rows, rows.unique())
    assert torch.equal(rows, sample_rows(torch.empty(4096, 7)))
    assert sample_rows(torch.empty(767, 1)) is None
