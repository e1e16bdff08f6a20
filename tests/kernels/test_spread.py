"""The decode kernel that spreads outliers over dense pieces, against float64: in the interpreter or on a GPU."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from helpers.builders import poisoned
from helpers.kernel_device import DEVICE, INTERPRETED
from vllm_latq.kernels.configs import DecodeConfig, decode_config
from vllm_latq.kernels.decode import spread
from vllm_latq.kernels.decode.dispatch import ssqr_matmul
from vllm_latq.kernels.decode.launch import Scratch
from vllm_latq.kernels.decode.spread import launch_spread, spread_constants
from vllm_latq.kernels.dev.reference import matmul_reference
from vllm_latq.kernels.layout.outliers import OutlierCsr
from vllm_latq.kernels.layout.weight import KernelWeight, with_spread

pytestmark = pytest.mark.kernel

TOLERANCE = 4e-6 if INTERPRETED else 2e-5  # as of the other kernel: rounded sums, and truncated ones


def prepared(layer: Any) -> KernelWeight:
    return with_spread(
        layer.weight, OutlierCsr(*(layer.tensors[name].to(DEVICE) for name in ("row_ptr", "col_idx", "values")))
    )


def run(layer: Any, m: int, parts: int = 1, ranges: int = 1, config: DecodeConfig | None = None) -> None:
    """Launch with every output and scratch tensor poisoned and float32 results, and compare."""
    weight = prepared(layer)
    config = config or decode_config(m, weight.bits, weight.arch, weight.group_size)
    x = torch.randn(m, weight.cols, generator=torch.Generator().manual_seed(m)).bfloat16()
    y = poisoned(m, weight.rows, device=DEVICE)
    partials = poisoned(parts * weight.padded_rows * config.max_rows, device=DEVICE) if parts > 1 else None
    launch_spread(x.to(DEVICE), weight, y, config, Scratch(parts, ranges, partials))
    expected = matmul_reference(x, layer.dense)
    deviation = matmul_reference(x.double().square(), layer.dense.square()).sqrt().max()
    assert (y.cpu() - expected).abs().max() <= TOLERANCE * 3 * deviation
    assert not weight.tickets.any()


@pytest.mark.parametrize(("bits", "group_size"), [(2, 128), (3, 64), (4, 32), (8, -1), (3, -1)])
def test_every_width_and_group_size(make_layer, bits: int, group_size: int) -> None:
    run(make_layer(bits, 70, 512, group_size=group_size, midrise=bits == 4), 5)


@pytest.mark.parametrize("m", [1, 8, 9, 17, 64])
def test_every_kernel(make_layer, m: int) -> None:
    run(make_layer(3, 130, 512, outliers=0.03), m)


@pytest.mark.parametrize("paired", [False, True])
def test_both_orders_of_columns(make_layer, paired: bool) -> None:
    config = replace(decode_config(16, 4), paired=paired, block_n=64, num_warps=4)
    run(make_layer(4, 130, 384), 12, config=config)


@pytest.mark.parametrize(("ranges", "m"), [(8, 1), (4, 2), (2, 3)])
def test_ranges_of_columns_side_by_side(make_layer, ranges: int, m: int) -> None:
    run(make_layer(2, 200, 2048), m, ranges=ranges)


@pytest.mark.parametrize(("cols", "group_size", "parts"), [(96, 32, 1), (640, 128, 3), (1100, -1, 2)])
def test_odd_columns_and_parts(make_layer, cols: int, group_size: int, parts: int) -> None:
    run(make_layer(3, 129, cols, group_size=group_size), 6, parts)


@pytest.mark.parametrize(("ranges", "m", "group_size"), [(1, 4, 128), (4, 1, 128), (1, 12, 64)])
def test_lists_longer_than_a_turn(make_layer, monkeypatch, ranges: int, m: int, group_size: int) -> None:
    monkeypatch.setattr(spread, "spread_constants", lambda *a: spread_constants(*a) | {"SLOTS": 1})
    run(make_layer(4, 100, 1024, outliers=0.05, group_size=group_size, full_rows=(3, 50)), m, ranges=ranges)


@pytest.mark.parametrize("m", [1, 20])
def test_wide_values_take_several_entries(make_layer, m: int) -> None:
    run(make_layer(4, 70, 512, -1, outliers=0.03, scales=False, row_scales=True, full_rows=(7,)), m)


def test_without_any_outlier(make_layer) -> None:
    run(make_layer(3, 70, 512, outliers=0.0, empty_outliers=True), 3)


def test_configuration_chooses_the_kernel(make_layer, monkeypatch: pytest.MonkeyPatch) -> None:
    """bf16 takes it if the configuration says so, and its result is that of the other kernel but for rounding."""
    layer = make_layer(3, 70, 512)
    weight, config = prepared(layer), replace(decode_config(8, 3), spread=True)
    launched = []
    monkeypatch.setattr(
        "vllm_latq.kernels.decode.dispatch.launch_spread", lambda *a: launched.append(launch_spread(*a))
    )
    for dtype, weight_of, count in (
        (torch.bfloat16, weight, 1),
        (torch.float16, weight, 1),
        (torch.bfloat16, layer.weight, 1),
    ):
        x = torch.randn(8, 512, generator=torch.Generator().manual_seed(1)).to(DEVICE, dtype)
        y = ssqr_matmul(x, weight_of, config).double().cpu()
        expected = matmul_reference(x.cpu(), layer.dense)
        assert (y - expected).abs().max() <= 2**-7 * expected.abs().max()
        assert len(launched) == count
