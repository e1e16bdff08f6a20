"""One step for the whole model, and the bits that follow from it."""

import pytest

from vllm_latq.quantize.allocation import RateCurve, allocate


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
