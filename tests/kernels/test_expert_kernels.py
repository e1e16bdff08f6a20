"""Experts through the kernels: grouped, and expert by expert, the sum is the dense experts'."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from helpers.kernel_device import ARCH, DEVICE
from helpers.mixtures import EXPERTS, HIDDEN, Mixture, routing
from helpers.recorded import RecordedKernel, RecordedOperators
from helpers.stacks import stack_of_experts
from helpers.trellis_weights import operands_of, random_trellis_weight
from vllm_latq.format.scheme import LayerScheme
from vllm_latq.kernels.decode import dispatch
from vllm_latq.kernels.decode.prefill import prefill_matmul
from vllm_latq.kernels.dev.emulation.launch import KERNELS
from vllm_latq.kernels.errors import KernelInputError
from vllm_latq.kernels.experts import grouped, grouped_trellis, rows
from vllm_latq.kernels.experts import routing as kernel_routing
from vllm_latq.kernels.experts.grouped import grouped_matmul
from vllm_latq.kernels.experts.routing import route
from vllm_latq.kernels.layout.trellis import pool_trellis
from vllm_latq.serving import experts as expert_op
from vllm_latq.serving.experts import by_all, by_expert

pytestmark = pytest.mark.kernel

# Relative to the largest output: x, the gated product and the output are each rounded to float16 (2^-11).
TOLERANCE = 2**-8
TRELLISES = (((2, 6), 0.0), ((5,), 0.01), ((7, 12), 0.002))  # rates and share of kept weights of three experts
SCHEMES = {
    "packed3": LayerScheme("packed", 3, 32, True, grid="midrise"),
    "packed4-row": LayerScheme("packed", 4, -1, False),
    "huffman": LayerScheme("huffman"),
    "trellis": LayerScheme("trellis"),
}


def strided(tensor: torch.Tensor) -> torch.Tensor:
    """The same values, every other one in memory."""
    return torch.stack([tensor, torch.full_like(tensor, -1)], -1)[..., 0]


def assert_equals_dense_experts(
    scheme: str, tokens: int, k: int, dtype: torch.dtype = torch.int32, activation: str = "silu", biased: bool = False
) -> None:
    mixture = Mixture(SCHEMES[scheme], torch.float16, activation, DEVICE, biased)
    layout = "trellis" if scheme == "trellis" else "tiled"
    assert (mixture.constants.layouts, mixture.constants.arch) == ([layout, layout], ARCH)
    x, weights, ids = routing(tokens, k, dtype)
    x *= 0.01  # float16 overflows at 65504
    expected = mixture.reference(x, weights, ids)
    got = mixture(*(strided(part.to(DEVICE)) for part in (x.half(), weights, ids)))
    assert (got.cpu().float() - expected).abs().max() <= TOLERANCE * expected.abs().max()
    if scheme in ("packed3", "trellis"):
        for stacks in mixture.stacks:  # the last one holds the kernels' tickets, which count within a launch
            assert stacks[-1].shape[0] == EXPERTS
            assert not stacks[-1].any()


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize(("tokens", "k", "dtype"), [(1, 3, torch.int32), (3, 2, torch.int64), (33, 2, torch.int32)])
def test_grouped(scheme: str, tokens: int, k: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """One token, a few, and so many that an expert has several batches; no expert multiplies alone."""
    for way in ("by_expert", "by_all"):
        monkeypatch.delattr(expert_op, way)
    assert_equals_dense_experts(scheme, tokens, k, dtype)


@pytest.mark.parametrize(("scheme", "activation"), [("packed4-row", "gelu_tanh"), ("huffman", "relu2_no_mul")])
def test_activations_reach_the_kernels(scheme: str, activation: str) -> None:
    assert_equals_dense_experts(scheme, 3, 2, activation=activation)


@pytest.mark.parametrize(
    ("scheme", "tokens", "activation"),
    [("packed3", 3, "swiglu"), ("huffman", 1, "swiglustep"), ("trellis", 2, "swiglu"), ("huffman", 2, "relu2_no_mul")],
)
def test_clamps_and_biases_reach_the_kernels(
    scheme: str, tokens: int, activation: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for way in ("by_expert", "by_all"):
        monkeypatch.delattr(expert_op, way)
    assert_equals_dense_experts(scheme, tokens, 2, torch.int64, activation, biased=True)


@pytest.mark.parametrize(
    ("scheme", "tokens", "count"),
    [("packed4-row", 1, 5), ("packed4-row", 2, 6), ("huffman", 1, 5), ("trellis", 1, 7), ("trellis", 2, 8)],
)
def test_launches(scheme: str, tokens: int, count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """All launches are of this package's kernels; torch makes only views and memory."""
    mixture, kernel = Mixture(SCHEMES[scheme], torch.float16, device=DEVICE), RecordedKernel()
    for module, name in KERNELS:
        if module in (grouped, grouped_trellis, rows, kernel_routing):
            monkeypatch.setattr(module, name, kernel)
    x, weights, ids = (part.to(DEVICE) for part in routing(tokens, 2))
    x = x.half()
    with RecordedOperators() as operators:
        mixture(x, weights, ids)
    assert len(kernel.launches) == count
    views = {f"aten::{name}" for name in ("empty", "view", "expand", "split", "select", "slice")}
    assert {name for name in operators.called if not name.startswith("latq::")} <= views


def test_chunks_of_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grouped, "MOST_PAIRS", 5)  # two tokens with two experts each, and one
    test_grouped("huffman", 3, 2, torch.int32, monkeypatch)


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("way", [by_expert, by_all])
def test_expert_by_expert(scheme: str, way: Callable[..., torch.Tensor], monkeypatch: pytest.MonkeyPatch) -> None:
    """Where there are too many tokens for the grouped kernel; all experts inside a CUDA graph."""
    monkeypatch.setattr(expert_op, "grouped_experts", lambda *arguments: None)
    monkeypatch.setattr(expert_op, "by_expert", way)
    assert_equals_dense_experts(scheme, 3, 2)


@pytest.mark.parametrize(("dtype", "rounding"), [(torch.bfloat16, 2**-7), (torch.float16, 2**-9)])
def test_trellis_of_several_parts(dtype: torch.dtype, rounding: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Experts of different rates, and of numbers of kept weights from none on, whose products are cut in split-K."""
    monkeypatch.setattr("vllm_latq.kernels.experts.grouped_trellis.trellis_parts", lambda *arguments: 2)
    experts = [random_trellis_weight(100, 320, rates, kept, rates[0]) for rates, kept in TRELLISES]
    stack = replace(pool_trellis([operands_of([expert], DEVICE) for expert in experts]), processors=4)
    routing = route(torch.tensor([[0, 2], [2, -1], [2, 1]], device=DEVICE), 4, [stack])
    x = torch.randn(6, 320, generator=torch.Generator().manual_seed(0)).to(dtype)
    y = grouped_matmul(x.to(DEVICE), stack, routing).cpu().double()
    for first, last, expert in ((0, 1, 0), (1, 2, 1), (2, 5, 2)):
        expected = x[first:last].double() @ experts[expert].dequantize().double().t()
        assert (y[first:last] - expected).abs().max() <= rounding * expected.abs().max()
    assert not routing.tickets.any()


@pytest.mark.parametrize("scheme", ["packed3", "huffman"])
def test_experts_of_many_tokens_are_made_dense(scheme: str, monkeypatch: pytest.MonkeyPatch) -> None:
    multiplied: list[int] = []

    def counted(x: torch.Tensor, weight: Any) -> torch.Tensor:
        multiplied.append(len(x))
        return prefill_matmul(x, weight)

    monkeypatch.setattr(dispatch, "prefill_matmul", counted)
    assert_equals_dense_experts(scheme, 700, 2)
    assert len(multiplied) >= 2
    assert min(multiplied) > 128


def test_rows_that_do_not_fit_the_routing_are_refused() -> None:
    stack = stack_of_experts(2)
    routing = route(torch.tensor([[0], [1]], device=DEVICE), 8, [stack])
    for x in (torch.zeros(3, 64).half(), torch.zeros(64, 2).half().T, torch.zeros(2, HIDDEN).half()):
        with pytest.raises(KernelInputError):
            grouped_matmul(x.to(DEVICE), stack, routing)
