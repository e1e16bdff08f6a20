"""The kernels of trellis codes against the decoder of the format."""

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch

from helpers.builders import poisoned
from helpers.kernel_device import DEVICE
from helpers.slow import slow
from helpers.trellis_weights import operands_of, random_trellis_weight
from vllm_latq.coding.trellis import code
from vllm_latq.format.encodings.trellis import TrellisWeight
from vllm_latq.kernels.configs import TRELLIS_REGIMES
from vllm_latq.kernels.decode.dispatch import trellis_matmul, trellis_scratch
from vllm_latq.kernels.decode.trellis import launch_trellis
from vllm_latq.kernels.decode.trellis_prefill import dequantize
from vllm_latq.kernels.layout import trellis as layout

# Relative to the standard deviation of an output: x is rounded to 2^-16 of the largest of 128.
TOLERANCE = 5e-4
ROUNDING = {torch.bfloat16: 2**-8, torch.float16: 2**-11}


def activations(m: int, cols: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(m, cols, generator=torch.Generator().manual_seed(m)).to(dtype)


def run(weights: Sequence[TrellisWeight], m: int, dtype: torch.dtype = torch.bfloat16, parts: int = 1) -> None:
    """Launch with every output and scratch tensor poisoned and float32 results, and compare."""
    weight = operands_of(weights, DEVICE)
    x, y = activations(m, weight.cols, dtype).to(DEVICE), poisoned(m, weight.rows, device=DEVICE)
    dense = torch.cat([part.dequantize() for part in weights]).double()
    expected = x.cpu().double() @ dense.T
    scratch = trellis_scratch(x, weight, 2 * next(n for n in TRELLIS_REGIMES if n >= m), parts)
    scratch.factors.fill_(float("nan"))
    for _ in range(2 if parts > 1 else 1):  # the second launch finds the tickets as the first one left them
        if scratch.partials is not None:
            scratch.partials.fill_(float("nan"))
        y.fill_(float("nan"))
        launch_trellis(x, weight, y, 3, scratch)
        assert (y.cpu().double() - expected).abs().max() <= TOLERANCE * expected.std()
    assert not weight.tickets.any()


def test_constants_are_those_of_the_code() -> None:
    assert layout.RATES == code.RATES
    assert layout.FACTORS == code.FACTORS
    assert layout.MULTIPLIERS == code.MULTIPLIERS
    assert layout.TWO_TERMS_FROM == code.TWO_TERMS_FROM


@pytest.mark.kernel
@pytest.mark.parametrize("rate", code.RATES)
def test_every_rate(rate: int) -> None:
    weight = random_trellis_weight(64, 192, (rate,), kept=0.0, seed=rate)
    assert torch.equal(dequantize(operands_of([weight], DEVICE), torch.float32).cpu(), weight.dequantize())
    run([weight], 1 + rate % 4)


@pytest.mark.kernel
@pytest.mark.parametrize(
    ("m", "parts", "dtype"),
    [
        (1, 2, torch.float16),
        (3, 1, torch.bfloat16),
        (8, 3, torch.float16),
        (16, 1, torch.bfloat16),
        *slow([(1, 2, torch.bfloat16), (3, 1, torch.float16), (8, 3, torch.bfloat16), (16, 1, torch.float16)]),
    ],
)
def test_every_number_of_rows(m: int, parts: int, dtype: torch.dtype) -> None:
    run([random_trellis_weight(64, 1280, (3, 4, 6, 7, 12), kept=0.01, seed=m)], m, dtype, parts)


@pytest.mark.kernel
@pytest.mark.parametrize("shape", [(1, 16), (33, 500), (130, 63), (100, 576)])
def test_odd_shapes(shape: tuple[int, int]) -> None:
    weight = random_trellis_weight(*shape, kept=0.02)
    assert torch.equal(dequantize(operands_of([weight], DEVICE), torch.float32).cpu(), weight.dequantize())
    run([weight], 3, parts=2 if shape[1] > 500 else 1)


@pytest.mark.kernel
def test_linears_of_one_input_are_one_weight() -> None:
    first = random_trellis_weight(100, 320, (4, 6), kept=0.01, seed=1)
    shared = {name: getattr(first, name) for name in ("column_exponents", "column_importance")}
    others = [replace(random_trellis_weight(rows, 320, seed=rows), **shared) for rows in (64, 17)]
    run([first, *others], 2)
    dense = torch.cat([part.dequantize() for part in (first, *others)])
    assert torch.equal(dequantize(operands_of([first, *others], DEVICE), torch.float32).cpu(), dense)


@pytest.mark.kernel
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("m", [2, 70])
def test_operator_rounds_once(monkeypatch: pytest.MonkeyPatch, m: int, dtype: torch.dtype) -> None:
    monkeypatch.setattr("vllm_latq.kernels.decode.trellis_prefill.CHUNK_BYTES", 1 << 16)
    weights = [random_trellis_weight(rows, 192, (2, 6, 7), seed=rows) for rows in (40, 130)]
    weights[1] = replace(
        weights[1], column_exponents=weights[0].column_exponents, column_importance=weights[0].column_importance
    )
    x = activations(m, 192, dtype)
    y = trellis_matmul(x.to(DEVICE)[:, None], operands_of(weights, DEVICE)).cpu()
    expected = x.double() @ torch.cat([part.dequantize() for part in weights]).double().T
    assert y.shape == (m, 1, 170)
    assert (y[:, 0].double() - expected).abs().max() <= 2 * ROUNDING[dtype] * expected.abs().max()


@pytest.mark.kernel
def test_invariant_weight_gives_a_row_the_same_result_in_any_batch() -> None:
    weight = replace(operands_of([random_trellis_weight(64, 512, (4, 6))], DEVICE), invariant=True)
    x = activations(17, 512, torch.bfloat16).to(DEVICE)
    together = trellis_matmul(x, weight)
    assert torch.equal(torch.cat([trellis_matmul(x[:3], weight), trellis_matmul(x[3:17], weight)]), together)


@pytest.mark.kernel
def test_no_rows_zeros_and_what_is_not_finite() -> None:
    weight = operands_of([random_trellis_weight(64, 128, (4,), kept=0.0)], DEVICE)
    assert trellis_matmul(torch.zeros(0, 128, dtype=torch.bfloat16, device=DEVICE), weight).shape == (0, 64)
    x = activations(3, 128, torch.bfloat16).to(DEVICE)
    x[0], x[1, 5] = 0.0, float("nan")
    y = trellis_matmul(x, weight)
    assert not y[0].any()
    assert y[1].isnan().all()
    assert y[2].isfinite().all()


def test_bytes_in_memory_are_the_stored_ones() -> None:
    weight = random_trellis_weight(512, 1024, (4, 6, 7), kept=1e-4)
    read = operands_of([weight]).storage_bytes() - 4 * 768  # room after the last unit
    assert abs(8 * read - weight.storage_bits()) < 0.03 * 512 * 1024
