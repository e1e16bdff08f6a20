"""The compiled kernel that spreads outliers, in the PTX emulator: results, races, bank conflicts, instructions."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from helpers.slow import slow
from vllm_latq.kernels.configs import decode_config
from vllm_latq.kernels.decode import spread
from vllm_latq.kernels.decode.dispatch import ssqr_matmul
from vllm_latq.kernels.decode.launch import Scratch
from vllm_latq.kernels.decode.spread import launch_spread, spread_constants
from vllm_latq.kernels.dev.emulation.launch import emulation
from vllm_latq.kernels.dev.emulation.ptx import parse
from vllm_latq.kernels.dev.reference import matmul_reference
from vllm_latq.kernels.layout.outliers import OutlierCsr
from vllm_latq.kernels.layout.weight import KernelWeight, with_spread

pytestmark = pytest.mark.compiler


def prepared(layer: Any, arch: str) -> KernelWeight:
    csr = OutlierCsr(*(layer.tensors[name] for name in ("row_ptr", "col_idx", "values")))
    return with_spread(replace(layer.weight, arch=arch), csr)


@pytest.mark.parametrize(
    ("arch", "bits", "m", "group_size", "parts", "ranges"),
    [
        ("sm_80", 3, 8, 128, 1, 1),
        ("sm_90", 3, 1, 128, 1, 4),
        *slow(
            [
                ("sm_80", 4, 1, 64, 1, 2),
                ("sm_86", 2, 30, -1, 2, 1),
                ("sm_90", 2, 16, 64, 2, 1),
                ("sm_90", 3, 64, 128, 1, 1),
            ]
        ),
    ],
)
def test_products(make_layer, arch: str, bits: int, m: int, group_size: int, parts: int, ranges: int) -> None:
    cols = 1024 if ranges > 1 else 400 if group_size == -1 else 512
    layer = make_layer(bits, 131, cols, group_size=group_size, outliers=0.02, full_rows=(7,))
    weight, config = prepared(layer, arch), decode_config(m, bits, arch, group_size)
    x = torch.randn(m, cols, generator=torch.Generator().manual_seed(m)).bfloat16()
    y = torch.full((m, weight.rows), float("nan"))
    partials = torch.full((parts * weight.padded_rows * config.max_rows,), float("nan"))
    with emulation(arch):
        launch_spread(x, weight, y, config, Scratch(parts, ranges, partials))
    expected = matmul_reference(x, layer.dense)
    assert (y - expected).abs().max() <= 2e-5 * expected.abs().max()
    assert not weight.tickets.any()


def test_lists_longer_than_a_turn_and_wide_values(make_layer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spread, "spread_constants", lambda *a: spread_constants(*a) | {"SLOTS": 1})
    layer = make_layer(3, 100, 1024, -1, outliers=0.03, scales=False, row_scales=True, full_rows=(7,))
    x = torch.randn(8, 1024, generator=torch.Generator().manual_seed(8)).bfloat16()
    config = replace(decode_config(8, 3, "sm_80"), spread=True, min_superblocks=4)
    with emulation("sm_80"):
        y = ssqr_matmul(x, prepared(layer, "sm_80"), config)
    expected = matmul_reference(x, layer.dense)
    assert (y - expected).abs().max() <= 2**-8 * expected.abs().max()


def test_rows_do_not_depend_on_their_batch(make_layer) -> None:
    layer = make_layer(3, 128, 1024, outliers=0.02)
    weight = replace(prepared(layer, "sm_80"), invariant=True)
    config = replace(decode_config(16, 3, "sm_80"), spread=True)
    x = torch.randn(9, 1024, generator=torch.Generator().manual_seed(9)).bfloat16()
    with emulation("sm_80"):
        together, alone = ssqr_matmul(x, weight, config), ssqr_matmul(x[4:5], weight, config)
    assert torch.equal(together[4:5], alone)


def test_places_of_inline_assembly_in_shared_memory() -> None:
    """The emulator reserves what assembly declares, behind the compiler's own."""
    kernel = parse(
        ".visible .entry k(.param .u64 k_p) { .reg .b32 %r<3>; "
        "{ .shared .align 128 .b8 spread[4096]; mov.u32 %r1, spread; } { .shared .align 16 .b8 more[64]; } ret; }"
    )
    assert kernel.reserved == {"spread": (4096, 128), "more": (64, 16)}
