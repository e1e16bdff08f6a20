"""The computed size of a served weight equals the kernels' weight, and the best width takes the fewest bits."""

import pytest
import torch

from vllm_latq.format.encodings.packed import PackedWeight, pack_integers
from vllm_latq.format.scheme import SUPPORTED_BITS
from vllm_latq.format.served_size import best_bits
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


@pytest.mark.parametrize("bits", SUPPORTED_BITS)
@pytest.mark.parametrize("shape", [(128, 32), (3, 9000), (200, 64)])
@pytest.mark.parametrize(("size", "spread"), [(0.6, 0.0), (2.0, 0.5), (40.0, 1.0), (3e4, 2.0)])
def test_size_of_coded_weights_matches_the_kernels(
    shape: tuple[int, int], size: float, spread: float, bits: int
) -> None:
    """Integers of more than 8 significant bits, and of more than 16, take two and three words."""
    z = heavy_tailed(*shape, size, spread=spread)
    z[0, :3] = torch.tensor([(1 << 23) + (1 << 10) + 1, (1 << 30) + 12345, -(1 << 31)])
    packed = pack_integers(z, torch.ones(shape[0]), bits)
    made, (rows, cols) = kernel_weight(packed), shape
    assert made.slice_ptr is not None
    codes, order = rows * -(-cols * bits // 32), rows + -(-rows // 16) + 1
    assert packed.served_bits() == 32 * (codes + order + rows + 16 * int(made.slice_ptr[-1]))
    assert packed.dequantize().equal(z.float())


@pytest.mark.parametrize("spread", [0.0, 0.3, 1.0])
@pytest.mark.parametrize("size", [0.3, 0.7, 1.2, 2.0, 4.0, 9.0, 50.0, 1e4])
def test_the_best_width_takes_about_the_fewest_bits(size: float, spread: float) -> None:
    """The further words of large integers are not counted."""
    z = heavy_tailed(128, 256, size, spread=spread)
    held = {bits: kernel_weight(pack_integers(z, torch.ones(128), bits)).storage_bytes() for bits in SUPPORTED_BITS}
    assert held[best_bits([z])] <= 1.05 * min(held.values())


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
