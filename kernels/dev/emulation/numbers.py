"""Number formats that numpy lacks: bf16, and pairs of 16-bit floats in a word."""

import numpy as np


def from_bf16(values: np.ndarray) -> np.ndarray:
    """bf16 bits -> float32."""
    return (values.astype(np.uint32) << 16).view(np.float32)


def to_bf16(values: np.ndarray) -> np.ndarray:
    """float32 -> bf16 bits, to nearest even; NaN stays NaN."""
    bits = values.view(np.uint32)
    rounded = ((bits + (((bits >> 16) & 1) + 0x7FFF)) >> 16).astype(np.uint16)
    return np.where(np.isnan(values), np.uint16(0x7FFF), rounded)


def from_pairs(words: np.ndarray, kind: str) -> np.ndarray:
    """uint32 [...] -> float32 [..., 2], the low half first."""
    pairs = np.ascontiguousarray(words).view(np.uint16).reshape(*words.shape, 2)
    return from_bf16(pairs) if kind.startswith("bf16") else pairs.view(np.float16).astype(np.float32)


def to_pairs(pairs: np.ndarray, kind: str) -> np.ndarray:
    """float32 [..., 2] -> uint32 [...]."""
    halves = to_bf16(pairs) if kind.startswith("bf16") else pairs.astype(np.float16).view(np.uint16)
    return np.ascontiguousarray(halves).view(np.uint32)[..., 0]
