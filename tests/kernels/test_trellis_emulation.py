"""The trellis kernels as the compiler makes them, run by the real launchers in the PTX emulator."""

from dataclasses import replace
from random import Random

import pytest
import torch

from helpers.builders import poisoned
from helpers.slow import slow
from helpers.trellis_weights import operands_of, random_trellis_weight
from vllm_latq.kernels.configs import TRELLIS_REGIMES
from vllm_latq.kernels.decode.dispatch import trellis_parts, trellis_scratch
from vllm_latq.kernels.decode.trellis import launch_trellis
from vllm_latq.kernels.decode.trellis_prefill import dequantize
from vllm_latq.kernels.dev.emulation.launch import emulation
from vllm_latq.kernels.experts.grouped import grouped_matmul
from vllm_latq.kernels.experts.routing import batch_size, route
from vllm_latq.kernels.experts.rows import combine, gather
from vllm_latq.kernels.layout.trellis import pool_trellis

pytestmark = pytest.mark.compiler

ROUNDING = 2**-11  # to float16
TOLERANCE = 5e-4  # of the standard deviation of an output, as in test_trellis_kernel.py


@pytest.mark.parametrize(
    ("arch", "rates", "m", "parts", "dtype"),
    [
        ("sm_80", (2, 3, 4, 5), 3, 1, torch.bfloat16),
        *slow([("sm_86", (6, 7, 8, 9), 7, 2, torch.float16), ("sm_90", (10, 11, 12), 9, 1, torch.bfloat16)]),
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


def test_compiled_experts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Expert 1 is never asked for, a pair is for an expert that is not here, programs run in a random order."""
    layers = [random_trellis_weight(70, 640, (3, 6), kept, seed) for seed, kept in enumerate((0.01, 0.0, 0.003))]
    stack = replace(pool_trellis([operands_of([layer]) for layer in layers]), arch="sm_86", processors=108)
    ids = torch.tensor([[2, 0], [3, 2]], dtype=torch.int32)
    x, weights = torch.randn(2, 640, generator=torch.Generator().manual_seed(0)).half(), torch.rand(2, 2)
    products = [x.double() @ layer.dequantize().double().T for layer in layers]
    monkeypatch.setattr(torch, "empty", poisoned)
    with emulation("sm_86", order=lambda programs: Random(0).sample(range(programs), programs)):
        routing = route(ids, batch_size(2, 2, 3, [stack]), [stack])
        y = combine(grouped_matmul(gather(x, routing), stack, routing), weights, routing)
    assert routing.size == 4
    assert trellis_parts(stack, batches=len(routing.expert)) > 1
    assert not routing.tickets.any()
    expected = torch.stack(
        [
            weights[0, 0].double() * products[2][0] + weights[0, 1].double() * products[0][0],
            weights[1, 1].double() * products[2][1],
        ]
    )
    assert (y - expected).abs().max() <= 2 * ROUNDING * expected.abs().max()


def test_compiled_dequantization() -> None:
    layer = random_trellis_weight(70, 320, kept=0.005)
    with emulation("sm_80"):
        assert torch.equal(dequantize(operands_of([layer]), torch.float32), layer.dequantize())
