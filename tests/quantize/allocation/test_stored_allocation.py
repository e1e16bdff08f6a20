"""One step for the whole model, and the bits that follow from it."""

import pytest
import torch

from vllm_latq.quantize.allocation.stored_allocation import RateCurve, allocate, rate_curve
from vllm_latq.quantize.lattice.factor import factorize
from vllm_latq.quantize.methods.latq import InputLattice, OutputLattice, feedback_noise, rounded_bits


def curve(weights: int, shift: float) -> RateCurve:
    """Bits that fall by one per octave: a layer whose loss is 4^shift times as sensitive."""
    return RateCurve(weights, tuple((float(x), shift - x) for x in range(-10, 1)))


def test_sensitive_layers_get_more_bits_and_the_average_is_met() -> None:
    found = allocate({"a": curve(100, 0.0), "b": curve(300, 1.0)}, 3.0)
    assert found["b"].bits == pytest.approx(found["a"].bits + 1)
    assert (100 * found["a"].bits + 300 * found["b"].bits) / 400 == pytest.approx(3.0)
    assert found["a"].step == found["b"].step == pytest.approx(2.0**-2.25)


def test_without_a_shared_step_all_get_the_same() -> None:
    found = allocate({"a": curve(1, 0.0), "b": curve(1, 1.0)}, 3.0, shared_step=False)
    assert [share.bits for share in found.values()] == [3.0, 3.0]


def test_beyond_its_points_a_curve_goes_on() -> None:
    line = curve(1, 0.0)
    assert line.bits(-12.5) == 12.5
    assert line.bits(-3.25) == 3.25
    assert line.bits(4.0) == 0.0


def side(size: int, seed: int) -> InputLattice:
    """A strongly correlated one, with flat steps."""
    mixing = torch.randn(size, size, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return InputLattice(factorize(mixing.T @ mixing / size, damping=0.05), torch.zeros(size, dtype=torch.int8), 0.0)


def test_a_sample_of_rows_with_their_own_spread_stands_for_all() -> None:
    """Half of the rows are fed back to each other, half are not: which are sampled matters."""
    alone = factorize(torch.eye(1152, dtype=torch.float64), "natural")
    outputs = OutputLattice([alone, *[side(64, 1).factor] * 18], torch.zeros(2304, dtype=torch.int8), 0.0)
    inputs = side(48, 2)
    weight = torch.randn(2304, 48, generator=torch.Generator().manual_seed(0))
    weight[1152:] *= 0.2
    octave, bits = rate_curve(weight, inputs, outputs, 2.0).points[4]
    feedback = feedback_noise(outputs.spread, inputs.factor.spread)
    whole = rounded_bits(weight, inputs, outputs, 2.0**octave, feedback)
    assert bits == pytest.approx(whole, abs=0.12)
    feedback[1152:] = feedback_noise(torch.ones(1152), inputs.factor.spread)
    assert rounded_bits(weight, inputs, outputs, 2.0**octave, feedback) < whole - 0.25


def test_where_steps_are_coarser_than_weights_little_is_fed_back() -> None:
    inputs, outputs = side(256, 1), side(256, 2)
    rows = OutputLattice([outputs.factor], torch.zeros(256, dtype=torch.int8), 0.0)
    weight = torch.randn(256, 256, generator=torch.Generator().manual_seed(0))
    curve = rate_curve(weight, inputs, rows, 1.0)
    # Zeros take a tenth of a bit with all that is beside them; noise of half a step would take one and more.
    assert curve.bits(curve.points[-1][0]) < 0.3
