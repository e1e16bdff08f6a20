"""Bits in memory: the words of outliers are those that the kernels get, and the best width has the fewest."""

import pytest
import torch

from vllm_latq import served_size
from vllm_latq.config import SUPPORTED_BITS
from vllm_latq.csr import CSR
from vllm_latq.kernels.entries import beyond_entries, integers
from vllm_latq.served_size import PAIRED, best_bits, outlier_bits, served_bits, served_overhead


def heavy_tailed(rows: int, cols: int, size: float, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    normal = torch.randn(2, rows, cols, generator=generator)
    return (size * normal[0] * normal[1].abs().exp() / 2).round().to(torch.int32)


@pytest.mark.parametrize("bits", PAIRED)
@pytest.mark.parametrize(("rows", "cols", "size"), [(40, 300, 2.0), (3, 9000, 0.6), (1, 1, 99.0), (200, 7, 1.0)])
def test_words_are_those_of_the_kernels(
    monkeypatch: pytest.MonkeyPatch, rows: int, cols: int, size: float, bits: int
) -> None:
    monkeypatch.setattr(served_size, "_BAND_WEIGHTS", 2000)
    z, half = heavy_tailed(rows, cols, size), 1 << (bits - 1)
    outliers = CSR.from_mask((z < -half) | (z >= half), z.float())
    points = integers(outliers.row_ptr, outliers.col_idx, outliers.values, cols, bits)
    assert outlier_bits(z, bits) == 32 * len(beyond_entries(points, bits).entry)
    assert outlier_bits(z.to(torch.int16), bits) == outlier_bits(z, bits)


def test_digits_share_a_word_up_to_255_columns_apart() -> None:
    z = torch.zeros(2, 600, dtype=torch.int32)
    z[:, 40] = z[0, 295] = z[1, 296] = 5
    assert outlier_bits(z[:1], 3) == 32
    assert outlier_bits(z, 3) == 96


@pytest.mark.parametrize("dtype", [torch.int16, torch.int32])
def test_words_of_far_integers_are_those_of_the_kernels(dtype: torch.dtype) -> None:
    """Around each number at which they take another power of 4, a row each."""
    beyond = torch.tensor([15 * 4**e // 2 + k for e in range(6) for k in (-1, 0, 1)])
    z = torch.cat((beyond + 3, -4 - beyond))[:, None]
    z = torch.nn.functional.pad(z[(z > 3) | (z < -4)][:, None], (0, 1))
    points = integers(torch.arange(len(z) + 1), torch.zeros(len(z)), z[:, 0].double(), 2, 3)
    words = torch.bincount(beyond_entries(points, 3).row)
    assert [outlier_bits(row[None], 3) for row in z.to(dtype)] == (32 * words).tolist()


@pytest.mark.parametrize("size", [0.3, 0.7, 1.2, 2.0, 4.0, 9.0, 50.0, 1e4])
def test_the_best_width_takes_the_fewest_bits(size: float) -> None:
    matrices = [heavy_tailed(30, 200, size, seed) for seed in range(2)]
    taken = {bits: sum(bits * z.numel() + outlier_bits(z, bits) for z in matrices) for bits in SUPPORTED_BITS}
    assert taken[best_bits(*matrices)] == min(taken.values())
    z = matrices[0]
    assert served_bits(z) == served_overhead(30, 200, best_bits(z)) + outlier_bits(z, best_bits(z))
