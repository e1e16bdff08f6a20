"""The decode kernels against float64."""

from dataclasses import replace
from typing import Any

import pytest
import torch
import triton
import triton.language as tl

from helpers.builders import poisoned
from helpers.kernel_device import DEVICE, EMULATED, INTERPRETED
from helpers.slow import slow
from vllm_latq.kernels.configs import GATHER_ROWS, SIMT, DecodeConfig, decode_config
from vllm_latq.kernels.decode.dispatch import padded_columns, ssqr_matmul
from vllm_latq.kernels.decode.launch import Scratch
from vllm_latq.kernels.decode.simt import launch_simt
from vllm_latq.kernels.decode.ssqr import launch_ssqr
from vllm_latq.kernels.dev.reference import matmul_reference
from vllm_latq.kernels.device.outlier_tile import begin_transposed

pytestmark = pytest.mark.kernel

# Both tolerances are relative to three standard deviations of an output. The sums are in float32, and a bias of at most
# 143 units per group is taken off them. The interpreter rounds every sum to nearest.
ROUNDED_SUMS_TOLERANCE = 4e-6
# Tensor cores, and their emulation, truncate the terms of a sum to a common exponent before they add them.
TRUNCATED_SUMS_TOLERANCE = 2e-5
TOLERANCE = ROUNDED_SUMS_TOLERANCE if INTERPRETED else TRUNCATED_SUMS_TOLERANCE


def run(
    layer: Any, m: int, dtype: torch.dtype, parts: int = 1, config: DecodeConfig | None = None, ranges: int = 1
) -> None:
    """Launch with every output and scratch tensor poisoned and float32 results, and compare."""
    weight = layer.weight
    config = config or decode_config(m, weight.bits, weight.arch, weight.group_size)
    x = torch.randn(m, weight.cols, generator=torch.Generator().manual_seed(m)).to(dtype)
    y = poisoned(m, weight.rows, device=DEVICE)
    partials = poisoned(parts * weight.padded_rows * config.max_rows, device=DEVICE) if parts > 1 else None
    transposed = None
    if weight.entries is not None and m > GATHER_ROWS:
        transposed = poisoned(weight.cols, config.outlier_rows(m, ranges), dtype=dtype, device=DEVICE)
    scratch = Scratch(parts, ranges, partials, transposed)
    for _ in range(2 if parts > 1 else 1):  # the second launch finds the tickets as the first one left them
        y.fill_(float("nan"))
        if config.kernel == "simt":
            launch_simt(padded_columns(x.to(DEVICE), weight), weight, y, config, scratch)
        else:
            launch_ssqr(x.to(DEVICE), weight, y, config, scratch)
        expected = matmul_reference(x, layer.dense)
        # Over random signs of x: one output, which may happen to be small, is no measure of what it is a sum of.
        deviation = matmul_reference(x.double().square(), layer.dense.square()).sqrt().max()
        assert (y.cpu() - expected).abs().max() <= TOLERANCE * 3 * deviation
    assert not weight.tickets.any()


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
@pytest.mark.parametrize(("m", "group_size", "parts"), [(1, 128, 2), (3, 32, 1), (8, -1, 2)])
def test_simt(make_layer, bits: int, m: int, group_size: int, parts: int) -> None:
    run(make_layer(bits, 70, 512, group_size=group_size, midrise=m == 3), m, torch.bfloat16, parts, SIMT)


def test_simt_odd_shape_and_type(make_layer) -> None:
    run(make_layer(3, 33, 500, group_size=-1, row_scales=True), 2, torch.float16, 1, SIMT)
    run(make_layer(4, 129, 320, group_size=64, outliers=0.0), 1, torch.float16, 1, SIMT)
    run(make_layer(2, 70, 600, outliers=0.03, midrise=True, **CODED), 5, torch.bfloat16, 2, SIMT)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("bits", [2, 3, 4, 8])
def test_every_width_and_type(make_layer, bits: int, dtype: torch.dtype) -> None:
    run(make_layer(bits, 130, 512), 3, dtype)


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
@pytest.mark.parametrize("group_size", [32, 64, -1])
def test_every_group_size(make_layer, bits: int, group_size: int) -> None:
    run(make_layer(bits, 65, 256, group_size=group_size), 2, torch.bfloat16)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("m", [2, 40])
@pytest.mark.parametrize(("bits", "group_size"), [(2, 128), (3, 64), (4, -1), (8, 32)])
def test_mid_rise_grid(make_layer, bits: int, group_size: int, m: int, dtype: torch.dtype) -> None:
    """By the dot that removes the bias, and on the floats themselves: odd multiples of half a scale."""
    m = min(m, 32) if bits == 8 else m
    run(make_layer(bits, 70, 512, group_size=group_size, midrise=True), m, dtype)


CODED = {"group_size": -1, "scales": False, "row_scales": True}


@pytest.mark.parametrize(("bits", "m"), [(2, 1), (3, 3), (4, 8), (8, 2), (4, 12), (2, 20), (3, 64)])
def test_coded_weights(make_layer, bits: int, m: int) -> None:
    """Their outliers are integers beyond the grid; a row of them, and rows without any."""
    layer = make_layer(bits, 70, 600, outliers=0.02, full_rows=(3,) if m < 9 else (), **CODED)
    run(layer, m, torch.float16 if m == 3 else torch.bfloat16, parts=1 + m % 2)


def test_coded_weights_of_many_columns(make_layer) -> None:
    run(make_layer(2, 3, 40_000, outliers=0.002, **CODED), 2, torch.bfloat16)


@pytest.mark.parametrize("rate", [0.0, 0.0005])
def test_coded_weights_with_few_outliers(make_layer, rate: float) -> None:
    run(make_layer(3, 140, 1024, outliers=rate, empty_outliers=True, **CODED), 4, torch.bfloat16)


@pytest.mark.parametrize("m", [1, 2, 7, 8, 9, 16, 17, 33, 64])
def test_every_number_of_rows(make_layer, m: int) -> None:
    run(make_layer(3, 100, 512), m, torch.bfloat16, parts=2)


@pytest.mark.parametrize(
    ("cols", "group_size"), [(128, 128), (384, 128), (96, 32), (320, 64), (500, -1), (1, -1), (33, -1)]
)
def test_odd_columns(make_layer, cols: int, group_size: int) -> None:
    run(make_layer(4, 63, cols, group_size=group_size, outliers=0.05), 2, torch.bfloat16)


@pytest.mark.parametrize("rows", [1, 33, 127, 129, 500])
def test_odd_rows(make_layer, rows: int) -> None:
    run(make_layer(3, rows, 256), 1, torch.float16)


@pytest.mark.parametrize("parts", [2, 3, 5])
def test_split_k(make_layer, parts: int) -> None:
    run(make_layer(2, 70, 1280, outliers=0.02), 4, torch.bfloat16, parts=parts)


RANGES = [(8, 1, torch.bfloat16), (4, 2, torch.float16), (2, 3, torch.bfloat16), (2, 4, torch.float16)]
MORE_RANGES = [
    (ranges, m, dtype)
    for ranges, m in ((8, 1), (4, 1), (4, 2), (2, 1), (2, 2), (2, 3), (2, 4))
    for dtype in (torch.bfloat16, torch.float16)
    if (ranges, m, dtype) not in RANGES
]


@pytest.mark.parametrize(("ranges", "m", "dtype"), [*RANGES, *slow(MORE_RANGES)])
def test_ranges_of_columns_side_by_side(make_layer, ranges: int, m: int, dtype: torch.dtype) -> None:
    """Every scheme of scales, tiles of 16 to 64 weight rows, and columns missing from the last range."""
    for layer in (
        make_layer(3, 150, 2048, outliers=0.02, full_rows=(17,), midrise=m == 2),
        make_layer(4, 40, 2000, outliers=0.02, group_size=-1),
        make_layer(2, 70, 2048, outliers=0.0, group_size=32, row_scales=True),
        make_layer(3, 33, 1990, outliers=0.03, **CODED),
    ):
        weight = layer.weight
        config = decode_config(m, weight.bits, weight.arch, weight.group_size)
        wide = replace(config, block_n=max(config.block_n, 16 * ranges))  # some tables have tiles of 64 features
        run(layer, m, dtype, config=wide, ranges=ranges)


@pytest.mark.parametrize("m", [1, 5, 12])
def test_without_outliers(make_layer, m: int) -> None:
    run(make_layer(3, 70, 512, outliers=0.0), m, torch.bfloat16, parts=2)


@pytest.mark.parametrize("m", [1, 4, 20])
def test_rows_full_of_outliers(make_layer, m: int) -> None:
    run(make_layer(3, 70, 256, outliers=0.0, full_rows=(0, 69)), m, torch.bfloat16)


@pytest.mark.parametrize(("scales", "group_size"), [(False, -1), (True, -1), (True, 64)])
def test_row_scales(make_layer, scales: bool, group_size: int) -> None:
    run(make_layer(4, 70, 256, group_size, scales=scales, row_scales=True, outliers=0.03), 2, torch.float16, parts=1)


@pytest.mark.parametrize("block_n", [64, 128])
@pytest.mark.parametrize("bias_dot", [False, True])
def test_tile_shapes(make_layer, block_n: int, bias_dot: bool) -> None:
    config = DecodeConfig(8, 1, block_n=block_n, num_warps=2, stages=2, bias_dot=bias_dot)
    run(make_layer(3, 200, 256), 2, torch.bfloat16, config=config)
    for bits in (2, 8):
        run(make_layer(bits, 200, 256), 2, torch.float16, config=config)


@triton.jit
def write_shares(
    x_ptr, stride_xm, xt_ptr, counter_ptr, M, K, writers, ROWS: tl.constexpr, PIECE: tl.constexpr
):  # fmt: skip
    begin_transposed(x_ptr, stride_xm, xt_ptr, counter_ptr, M, K, writers, ROWS, PIECE)


@pytest.mark.skipif(EMULATED is not None, reason="the emulator stands in for the kernels of the package")
@pytest.mark.parametrize(("writers", "parts"), [(1, 1), (3, 2), (5, 1), (8, 2)])
def test_shares_of_transposed_activations_are_all_of_them(writers: int, parts: int) -> None:
    """The writers leave the whole x^T, before a program looks for a missing share and writes all of it again."""
    m, rows, cols = 5, 8, 1000
    x = torch.randn(m, cols).bfloat16()
    transposed = poisoned(cols + 1, rows, dtype=torch.bfloat16, device=DEVICE)
    counter = torch.zeros(1, dtype=torch.int32, device=DEVICE)
    with torch.cuda.device_of(transposed):
        write_shares[(5, parts)](x.to(DEVICE), cols, transposed, counter, m, cols, writers, ROWS=rows, PIECE=32)
    assert torch.equal(transposed[:cols].cpu(), torch.nn.functional.pad(x.T, (0, rows - m)))
    assert transposed[cols:].isnan().all()
    assert counter.item() == writers


def test_large_activations_do_not_lose_the_weights(make_layer) -> None:
    """All-positive activations make the bias term large; it leaves group by group, before it can swamp the sum."""
    layer = make_layer(2, 64, 1024, outliers=0.0)
    x = torch.full((1, 1024), 100.0, dtype=torch.bfloat16)
    y = poisoned(1, 64, device=DEVICE)
    launch_ssqr(x.to(DEVICE), layer.weight, y, decode_config(1, 2, layer.weight.arch), Scratch())
    expected = matmul_reference(x, layer.dense)
    assert (y.cpu() - expected).abs().max() <= 2e-5 * expected.abs().max()


@pytest.mark.parametrize("m", [1, 11])
def test_the_entry_point(make_layer, m: int) -> None:
    layer = make_layer(3, 70, 512)
    x = torch.randn(1, m, 512).half()
    y = ssqr_matmul(x.to(DEVICE), layer.weight).cpu()
    expected = matmul_reference(x[0], layer.dense)
    assert y.shape == (1, m, 70)
    assert (y[0] - expected).abs().max() <= 2**-10 * expected.abs().max()  # one rounding to float16
