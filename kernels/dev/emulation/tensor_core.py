"""Arithmetic of the tensor cores, as measured on them and published; for checking kernels where there is no GPU.

An instruction adds its products to the accumulator in blocks. The terms of a block, accumulator included, are aligned
to the largest exponent among them and truncated a bit or two below float32's last place; their sum is truncated to
float32 (Fasi et al., "Numerical behavior of NVIDIA tensor cores", 2021; Khattak and Mikaitis, "Accurate models of
NVIDIA tensor cores", 2025). So small terms beside large ones are lost, always towards zero.
"""

from dataclasses import dataclass

import numpy as np

_TINY = -10_000  # the exponent of zero


@dataclass(frozen=True)
class TensorCore:
    """width: products per block; fraction_bits: kept below the largest exponent of a block."""

    width: int
    fraction_bits: int


AMPERE = TensorCore(8, 24)
HOPPER = TensorCore(16, 25)
# Blackwell is taken to add as Hopper does.
GENERATIONS = {
    "sm_80": AMPERE, "sm_86": AMPERE, "sm_89": AMPERE, "sm_90": HOPPER, "sm_100": HOPPER, "sm_120": HOPPER,
}  # fmt: skip


def _exponent(values: np.ndarray) -> np.ndarray:
    """Exponent of each value's leading bit; for zero, far below all others."""
    return np.where(values == 0, _TINY, np.frexp(values)[1] - 1)


def _towards_zero(values: np.ndarray) -> np.ndarray:
    """float64 -> float32, truncated."""
    rounded = values.astype(np.float32)
    too_large = np.abs(rounded.astype(np.float64)) > np.abs(values)
    return np.where(too_large, np.nextafter(rounded, np.float32(0)), rounded)


def multiply_add(a: np.ndarray, b: np.ndarray, c: np.ndarray, core: TensorCore) -> np.ndarray:
    """a b + c as `core` computes it.

    Args:
        a: float32 [..., m, k] and b: float32 [..., k, n], values of fp16 or bf16.
        c: float32 [..., m, n].

    Returns:
        float32 [..., m, n].
    """
    for start in range(0, a.shape[-1], core.width):
        left = a[..., start : start + core.width].astype(np.float64)[..., :, :, None]
        right = b[..., start : start + core.width, :].astype(np.float64)[..., None, :, :]
        products = left * right
        # The exponent of a product is the sum of its factors', whatever the product's leading bit.
        exponents = _exponent(left) + _exponent(right)
        largest = np.maximum(exponents.max(-2), _exponent(c))
        unit = np.ldexp(1.0, np.maximum(largest, -126) - core.fraction_bits)
        kept = np.trunc(products / unit[..., None, :]).sum(-2) + np.trunc(c / unit)
        c = _towards_zero(kept * unit)
    return c
