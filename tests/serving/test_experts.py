"""`latq::experts` against dense experts, by each of its loops, and as one operator of a graph."""

from collections.abc import Callable
from functools import cache

import pytest
import torch
import torch._dynamo.testing
from torch.nn import functional

from helpers.builders import random_weight
from helpers.mixtures import CONSTANTS, EXPERTS, HIDDEN, Mixture, routing
from helpers.trellis import TRELLIS
from vllm_latq.format.scheme import LayerScheme
from vllm_latq.serving import experts as expert_op
from vllm_latq.serving.experts import by_all, by_expert
from vllm_latq.serving.operands import make_operands, stack_operands

SCHEMES = {
    "packed3": LayerScheme("packed", 3, 32, True, grid="midrise"),
    "packed4-plain": LayerScheme("packed", 4, -1, False),
    "huffman": LayerScheme("huffman"),
    "trellis": TRELLIS,
}
# Relative to the largest output: float32 sums in another order.
TOLERANCE = 1e-5
WAYS = [by_expert, by_all]


@cache
def mixture_of(scheme: str) -> Mixture:
    return Mixture(SCHEMES[scheme])


def assert_near(got: torch.Tensor, expected: torch.Tensor) -> None:
    assert got.shape == expected.shape
    assert (got - expected).abs().max() <= TOLERANCE * expected.abs().max()


@pytest.mark.parametrize("tokens", [1, 2, 33])
@pytest.mark.parametrize("scheme", SCHEMES)
def test_equals_dense_experts(scheme: str, tokens: int) -> None:
    mixture, arguments = mixture_of(scheme), routing(tokens, 2)
    assert_near(mixture(*arguments), mixture.reference(*arguments))


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(("tokens", "k", "dtype"), [(1, 1, torch.int64), (4, 3, torch.int32)])
def test_both_loops_over_experts_give_the_same_sum(
    way: Callable[..., torch.Tensor], tokens: int, k: int, dtype: torch.dtype
) -> None:
    mixture, arguments = mixture_of("packed3"), routing(tokens, k, dtype)
    assert_near(way(*arguments, EXPERTS, mixture.run), mixture.reference(*arguments))


@pytest.mark.parametrize("scheme", SCHEMES)
def test_loop_for_cuda_graphs_on_packed_experts(scheme: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A graph capture chooses this loop; here it runs without a capture."""
    mixture, arguments = mixture_of(scheme), routing(3, 2)
    monkeypatch.setattr(expert_op, "by_expert", by_all)
    assert_near(mixture(*arguments), mixture.reference(*arguments))


@pytest.mark.parametrize("way", WAYS)
def test_infinite_output_of_an_unselected_expert_is_ignored(way: Callable[..., torch.Tensor]) -> None:
    x, weights, ids = routing(6, 2)

    def run(tokens: torch.Tensor, expert: int) -> torch.Tensor:
        return torch.full_like(tokens, float("inf")) if expert == 3 else tokens

    expected = x * (weights * (ids >= 0)).sum(1, keepdim=True)
    torch.testing.assert_close(way(x, weights, ids, EXPERTS, run), expected)


def test_empty_batch_of_tokens() -> None:
    mixture = mixture_of("packed3")
    empty = torch.zeros(0, 2)
    assert mixture(torch.zeros(0, HIDDEN), empty, empty.int()).shape == (0, HIDDEN)


def test_sums_are_rounded_once() -> None:
    """bfloat16 activations: an output is the float32 sum of what the experts gave, rounded."""
    mixture = Mixture(SCHEMES["packed3"], torch.bfloat16)
    x, weights, ids = routing(7, 2)
    one = [mixture(x.bfloat16(), torch.ones(7, 1), ids[:, slot : slot + 1]).float() for slot in range(2)]
    expected = one[0] * weights[:, :1] + one[1] * weights[:, 1:]
    torch.testing.assert_close(mixture(x.bfloat16(), weights, ids), expected.bfloat16(), rtol=0, atol=0)


@pytest.mark.parametrize(("name", "function"), [("gelu", "none"), ("gelu_tanh", "tanh")])
def test_activations(name: str, function: str) -> None:
    mixture = Mixture(SCHEMES["packed4-plain"], activation=name)
    x = routing(1, 1)[0]
    gate, up = functional.linear(x, mixture.dense[0][2]).chunk(2, -1)
    expected = functional.linear(functional.gelu(gate, approximate=function) * up, mixture.dense[1][2])
    assert_near(mixture(x, torch.ones(1, 1), torch.tensor([[2]])), expected)


@pytest.mark.parametrize("scheme", ["packed3", "trellis"])
def test_experts_without_a_gate(scheme: str) -> None:
    mixture = Mixture(SCHEMES[scheme], activation="relu2_no_mul")
    x = routing(1, 1)[0]
    expected = functional.linear(functional.relu(functional.linear(x, mixture.dense[0][2])) ** 2, mixture.dense[1][2])
    assert_near(mixture(x, torch.ones(1, 1), torch.tensor([[2]])), expected)
    arguments = routing(5, 2)
    assert_near(mixture(*arguments), mixture.reference(*arguments))


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("activation", CONSTANTS)
def test_clamped_experts_with_biases(
    activation: str, way: Callable[..., torch.Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    mixture, arguments = Mixture(SCHEMES["packed4-plain"], activation=activation, biased=True), routing(5, 2)
    monkeypatch.setattr(expert_op, "by_expert", way)
    expected = torch.zeros(5, HIDDEN)
    limit, alpha, beta = (*CONSTANTS[activation], 1.0, 0.0)[:3]
    x, weights, ids = arguments
    for token, slot in (ids >= 0).nonzero().tolist():
        expert = int(ids[token, slot])
        gate, up = functional.linear(x[token], mixture.dense[0][expert], mixture.biases[0][expert]).chunk(2)
        if activation == "swiglu":
            gate = torch.minimum(gate, torch.tensor(limit))
            gate = gate / (1 + torch.exp(-alpha * gate))
        else:
            gate = torch.minimum(gate / (1 + torch.exp(-gate)), torch.tensor(limit))
        hidden = gate * (torch.maximum(torch.minimum(up, torch.tensor(limit)), torch.tensor(-limit)) + beta)
        down = functional.linear(hidden, mixture.dense[1][expert], mixture.biases[1][expert])
        expected[token] += weights[token, slot] * down
    assert_near(mixture(*arguments), expected)


@pytest.mark.parametrize(("scheme", "biased"), [("packed3", False), ("packed3", True), ("trellis", False)])
def test_expert_operator_registration(scheme: str, biased: bool) -> None:
    """Schema, fake implementation and dispatch agree (torch's own checks)."""
    mixture = Mixture(SCHEMES[scheme], activation="swiglu", biased=True) if biased else mixture_of(scheme)
    torch.library.opcheck(
        torch.ops.latq.experts.default,
        (*routing(3, 2), *mixture.stacks, mixture.biases, *mixture.constants),
        test_utils=("test_schema", "test_faketensor", "test_aot_dispatch_dynamic"),
    )


def test_one_compiled_graph_for_all_numbers_of_tokens() -> None:
    torch._dynamo.reset()
    mixture, counter = mixture_of("packed3"), torch._dynamo.testing.CompileCounter()
    compiled = torch.compile(lambda *inputs: mixture(*inputs) + 1, backend=counter, fullgraph=True)
    for tokens in (4, 7, 9):
        arguments = routing(tokens, 2)
        for tensor in arguments:
            torch._dynamo.mark_dynamic(tensor, 0)
        torch.testing.assert_close(compiled(*arguments), mixture(*arguments) + 1, rtol=0, atol=0)
    assert counter.frame_count == 1


def test_a_stack_of_unlike_weights_is_refused() -> None:
    """One weight has outliers and the other has none."""
    unlike = [random_weight(LayerScheme("packed", 3, 32, outliers), 64, HIDDEN, 0) for outliers in (True, False)]
    with pytest.raises(AssertionError, match="all weights of a stack have the tensor, or none has"):
        stack_operands([make_operands(weight, torch.float32, "experts") for weight in unlike], "experts")
