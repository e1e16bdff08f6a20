"""The computed size of a served weight equals the kernels' weight, and the best width is the smallest."""

from itertools import product

import pytest
import torch

from vllm_latq.format import served_size
from vllm_latq.format.encodings.packed import PackedWeight, pack_integers
from vllm_latq.format.scheme import SUPPORTED_BITS
from vllm_latq.format.served_size import best_bits, outlier_bits, served_bits, served_overhead
from vllm_latq.kernels.layout.outliers import OutlierCsr
from vllm_latq.kernels.layout.weight import KernelWeight, prepare


def heavy_tailed(rows: int, cols: int, size: float, seed: int = 0, spread: float = 0.0) -> torch.Tensor:
    """Return integers; `spread` is the standard deviation of the logarithm of a row's size."""
    generator = torch.Generator().manual_seed(seed)
    normal = torch.randn(2, rows, cols, generator=generator)
    sizes = size * torch.exp(spread * torch.randn(rows, 1, generator=generator))
    return (sizes * normal[0] * normal[1].abs().exp() / 2).round().to(torch.int32)


def kernel_weight(weight: PackedWeight) -> KernelWeight:
    layout = (weight.bits, weight.group_size, weight.cols, weight.scales, weight.row_scales)
    csr = weight.outliers
    outliers = OutlierCsr(csr.row_ptr, csr.col_idx, csr.values) if csr else None
    return prepare(weight.qweight, *layout, outliers)


def in_slices(integers: torch.Tensor, bits: int) -> int:
    """Return the bits of the outliers' words in the kernels' weight."""
    weight = kernel_weight(pack_integers(integers, torch.ones(len(integers)), bits))
    assert weight.slice_ptr is not None
    return 32 * 16 * int(weight.slice_ptr[-1])


@pytest.mark.parametrize("bits", SUPPORTED_BITS)
@pytest.mark.parametrize("shape", [(40, 300), (3, 9000), (1, 1), (200, 7), (70, 64)])
@pytest.mark.parametrize(("size", "spread"), [(0.6, 0.0), (2.0, 0.5), (40.0, 1.0), (3e4, 2.0)])
def test_outlier_words_match_the_kernels(
    monkeypatch: pytest.MonkeyPatch, shape: tuple[int, int], size: float, spread: float, bits: int
) -> None:
    monkeypatch.setattr(served_size, "_BAND_WEIGHTS", 2000)
    z = heavy_tailed(*shape, size, spread=spread).clamp_(-30_000, 30_000)
    assert outlier_bits([z], bits) == in_slices(z, bits)
    assert outlier_bits([z.to(torch.int16)], bits) == outlier_bits([z], bits)


def test_digits_share_a_word_up_to_255_columns_apart() -> None:
    z = torch.zeros(2, 600, dtype=torch.int32)
    z[:, 40] = z[0, 295] = z[1, 296] = 5
    assert outlier_bits([z[:1]], 3) == 16 * 32
    assert outlier_bits([z[1:]], 3) == 16 * 64


@pytest.mark.parametrize("dtype", [torch.int16, torch.int32])
def test_words_of_distant_integers_match_the_kernels(dtype: torch.dtype) -> None:
    """Numbers around each power of 4, where another digit is needed."""
    beyond = torch.tensor([15 * 4**e // 2 + k for e in range(6) for k in (-1, 0, 1)])
    z = torch.cat((beyond + 3, -4 - beyond))
    for one in z[(z > 3) | (z < -4)]:
        row = torch.tensor([[int(one), 0]], dtype=dtype)
        assert outlier_bits([row], 3) == in_slices(row, 3)


def test_values_of_more_than_16_bits_take_three_words_and_integers_are_those_of_float32() -> None:
    row = torch.zeros(1, 300, dtype=torch.int32)
    row[0, 7] = (1 << 23) + (1 << 10) + 1
    assert outlier_bits([row], 8) == in_slices(row, 8) == 3 * 16 * 32
    for far in ((1 << 24) + 1, (1 << 30) + 12345, -(1 << 31)):
        row[0, 7] = far
        for bits in SUPPORTED_BITS:
            assert outlier_bits([row], bits) == in_slices(row, bits)


def test_words_of_a_weight_smaller_than_a_tile() -> None:
    for bits, columns in product(SUPPORTED_BITS, (0, 101)):
        z = heavy_tailed(37, 101, 3.0, seed=bits)
        packed = pack_integers(z, torch.ones(37), bits, torch.ones(101) if columns else None)
        codes, order = 37 * -(-101 * bits // 32), 37 + 3 + 1
        assert packed.served_bits() == 32 * (codes + order + 37 + columns) + in_slices(z, bits)
        assert served_bits(z, bits, columns > 0) == packed.served_bits()
        assert packed.dequantize().equal(z.float())


@pytest.mark.parametrize("rows", [8, 32, 96, 200])
def test_rows_of_a_matrix_are_sorted_together(rows: int) -> None:
    for seed in range(8):
        shards = [heavy_tailed(rows, 256, size, seed, 0.7) for size in (1.5, 3.0, 0.8)]
        merged = torch.cat(shards)
        taken = {bits: bits * merged.numel() + in_slices(merged, bits) for bits in SUPPORTED_BITS}
        assert taken[best_bits(shards)] == min(taken.values())


@pytest.mark.parametrize("rows", [8, 32, 96])
def test_experts_share_no_slice_of_rows(rows: int) -> None:
    for seed in range(4):
        experts = [[heavy_tailed(rows, 256, size, 10 * seed + n, 0.7) for size in (1.5, 0.8)] for n in range(4)]
        merged = [torch.cat(shards) for shards in experts]
        taken = {bits: sum(bits * z.numel() + in_slices(z, bits) for z in merged) for bits in SUPPORTED_BITS}
        assert taken[best_bits(*experts)] == min(taken.values())


@pytest.mark.parametrize("spread", [0.0, 0.3, 1.0])
@pytest.mark.parametrize("size", [0.3, 0.7, 1.2, 2.0, 4.0, 9.0, 50.0, 1e4])
def test_the_best_width_takes_the_fewest_bits(size: float, spread: float) -> None:
    z = heavy_tailed(128, 256, size, spread=spread)
    held = {bits: kernel_weight(pack_integers(z, torch.ones(128), bits)).storage_bytes() for bits in SUPPORTED_BITS}
    assert held[best_bits([z])] == min(held.values())
    assert served_bits(z) == served_overhead(128, 256, best_bits([z])) + outlier_bits([z], best_bits([z]))


@pytest.mark.parametrize("bits", [*SUPPORTED_BITS, None])
@pytest.mark.parametrize("columns", [True, False])
def test_size_of_coded_weights_matches_the_kernels(bits: int | None, columns: bool) -> None:
    z = heavy_tailed(256, 512, 2.5, spread=0.4)
    packed = pack_integers(z, torch.ones(256), bits, torch.ones(512) if columns else None)
    held = 8 * kernel_weight(packed).storage_bytes() + (32 * 512 if columns else 0)
    assert packed.served_bits() == held
    assert served_bits(z, bits, columns) == held


@pytest.mark.parametrize("bits", SUPPORTED_BITS)
@pytest.mark.parametrize("group_size", [32, 64, 128, -1])
@pytest.mark.parametrize("rate", [None, 0.0, 0.02])
def test_size_of_packed_weights_matches_the_kernels(bits: int, group_size: int, rate: float | None) -> None:
    generator = torch.Generator().manual_seed(bits)
    scales = torch.ones(128, 1 if group_size == -1 else 512 // group_size, dtype=torch.bfloat16)
    mask = None if rate is None else torch.rand(128, 512, generator=generator) < rate
    zeros = torch.zeros(128, 512, dtype=torch.int32)
    packed = PackedWeight.from_integers(zeros, scales, bits, group_size, mask, zeros.float() + 3.5)
    assert packed.served_bits() == 8 * kernel_weight(packed).storage_bytes()
