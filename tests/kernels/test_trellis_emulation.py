"""The trellis kernels as the compiler makes them, run by the real launchers in the PTX emulator."""

from dataclasses import replace

import pytest
import torch

from helpers.trellis_weights import operands_of, random_trellis_weight
from vllm_latq.kernels.configs import TRELLIS_REGIMES
from vllm_latq.kernels.decode.dispatch import trellis_scratch
from vllm_latq.kernels.decode.trellis import launch_trellis
from vllm_latq.kernels.decode.trellis_prefill import dequantize
from vllm_latq.kernels.dev.emulation.launch import emulation

pytestmark = pytest.mark.compiler

TOLERANCE = 5e-4  # of the standard deviation of an output, as in test_trellis_kernel.py


@pytest.mark.parametrize(
    ("arch", "rates", "m", "parts", "dtype"),
    [
        ("sm_80", (2, 3, 4, 5), 3, 1, torch.bfloat16),
        ("sm_86", (6, 7, 8, 9), 7, 2, torch.float16),
        ("sm_90", (10, 11, 12), 9, 1, torch.bfloat16),
    ],
)
def test_compiled_products(arch: str, rates: tuple[int, ...], m: int, parts: int, dtype: torch.dtype) -> None:
    layer = random_trellis_weight(70, 1088, rates, kept=0.005)
    weight = replace(operands_of([layer]), arch=arch, processors=4)
    x, y = torch.randn(m, 1088, generator=torch.Generator().manual_seed(m)).to(dtype), torch.full((m, 70), torch.nan)
    with emulation(arch):
        launch_trellis(
            x, weight, y, 3, trellis_scratch(x, weight, 2 * next(n for n in TRELLIS_REGIMES if n >= m), parts)
        )
    expected = x.double() @ layer.dequantize().double().T
    assert (y.double() - expected).abs().max() <= TOLERANCE * expected.std()
    assert not weight.tickets.any()


def test_compiled_dequantization() -> None:
    layer = random_trellis_weight(70, 320, kept=0.005)
    with emulation("sm_80"):
        assert torch.equal(dequantize(operands_of([layer]), torch.float32), layer.dequantize())
