"""The model of the tensor cores' arithmetic, on inputs that tell the generations apart."""

import numpy as np
import pytest

from vllm_latq.kernels.dev.emulation.tensor_core import AMPERE, HOPPER, TensorCore, multiply_add


def dot(products: list[float], c: float, core: TensorCore) -> float:
    """Products (each a power of two, possibly negative, or 0) plus c."""
    a = np.array([[np.float32(abs(p)) for p in products]])
    b = np.array([[np.float32(np.sign(p))] for p in products], np.float32)
    return float(multiply_add(a, b, np.array([[np.float32(c)]]), core)[0, 0])


@pytest.mark.parametrize("core", [AMPERE, HOPPER])
def test_small_integers_are_exact(core: TensorCore) -> None:
    generator = np.random.default_rng(0)
    a, b = (generator.integers(-100, 100, shape).astype(np.float32) for shape in ((16, 64), (64, 8)))
    c = generator.integers(-100, 100, (16, 8)).astype(np.float32)
    assert np.array_equal(multiply_add(a, b, c, core), a @ b + c)


def test_bits_that_are_kept() -> None:
    """Beside 1, Ampere keeps terms down to 2^-24 and Hopper to 2^-25; the sum is truncated to 2^-23."""
    last = 2.0**-23
    assert dot([2.0**-24] * 2, 1.0, AMPERE) == dot([2.0**-24] * 2, 1.0, HOPPER) == 1 + last
    assert dot([2.0**-25] * 4, 1.0, AMPERE) == 1
    assert dot([2.0**-25] * 4, 1.0, HOPPER) == 1 + last
    assert dot([2.0**-26] * 8, 1.0, HOPPER) == 1
    assert dot([2.0**-24], 1.0, HOPPER) == 1  # truncated, where to nearest even would be a tie
    assert dot([last, 2.0**-24], 1.0, HOPPER) == 1 + last  # towards zero, where nearest even is up


def test_blocks() -> None:
    """Ampere adds eight products at a time: a later block no longer sees what an earlier one cancelled."""
    products = [1.0, *[0.0] * 7, -1.0, *[0.0] * 6, 2.0**-30]
    assert dot(products, 0.0, AMPERE) == 0  # in the second block beside -1 and the sum 1: lost
    assert dot([1.0, -1.0, *[0.0] * 6, 2.0**-30], 0.0, AMPERE) == 2.0**-30  # in a block of its own: kept
    assert dot([1.0, -1.0, *[0.0] * 6, 2.0**-30], 0.0, HOPPER) == 0


def test_zeros_and_negative_numbers() -> None:
    assert dot([0.0] * 8, 0.0, AMPERE) == 0
    assert dot([-(2.0**-24)], -1.0, AMPERE) == -1  # towards zero
    assert dot([2.0**-24], -1.0, AMPERE) == -(1 - 2.0**-24)
