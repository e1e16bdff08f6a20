"""Where (token, expert) pairs go, and what happens to their rows before and between and after the products."""

from dataclasses import fields

import pytest
import torch

from helpers.kernel_device import DEVICE, EMULATED
from helpers.mixtures import CONSTANTS
from helpers.stacks import stack_of_experts
from helpers.trellis_weights import operands_of, random_trellis_weight
from vllm_latq.kernels.errors import KernelInputError
from vllm_latq.kernels.experts.activations import ACTIVATIONS
from vllm_latq.kernels.experts.routing import Routing, batch_size, route
from vllm_latq.kernels.experts.rows import COLUMNS, activate, combine, gather
from vllm_latq.kernels.layout.trellis import pool_trellis

pytestmark = pytest.mark.kernel


def routed(ids: torch.Tensor, size: int, experts: int) -> Routing:
    """Routed where kernels run, and brought back."""
    found = route(ids.to(DEVICE), size, [stack_of_experts(experts)])
    return Routing(size, *(getattr(found, field.name).cpu() for field in fields(Routing)[1:]))


@pytest.mark.parametrize("size", [1, 8, 64])
@pytest.mark.parametrize(("tokens", "k", "experts"), [(1, 1, 1), (5, 3, 6), (40, 8, 100), (257, 1, 2)])
def test_routing(tokens: int, k: int, experts: int, size: int) -> None:
    """Places are those of a stable sort by expert; every expert's are cut into full batches and a last one."""
    ids = torch.randint(-1, experts + 2, (tokens, k), generator=torch.Generator().manual_seed(tokens))
    ids[0, 0] = 2**40  # not 0, although its low half is
    routing = routed(ids, size, experts)
    known = (ids >= 0) & (ids < experts)
    assert (routing.place[~known] == -1).all()
    assert torch.equal(routing.place[known].argsort(), ids[known].argsort(stable=True))
    assert routing.place[known].sort().values.tolist() == list(range(int(known.sum())))
    expected, counts = [], torch.bincount(ids[known], minlength=experts)
    for expert, (end, count) in enumerate(zip(counts.cumsum(0).tolist(), counts.tolist(), strict=True)):
        expected += [(expert, at, min(size, end - at)) for at in range(end - count, end, size)]
    found = torch.stack([routing.expert, routing.begin, routing.live], 1).tolist()
    assert [tuple(batch) for batch in found[: len(expected)]] == expected
    assert not routing.live[len(expected) :].any()
    assert not routing.tickets.any()


def test_the_worst_routing_fills_all_batches() -> None:
    for pairs, experts, size in ((7, 3, 4), (3, 5, 8), (40, 4, 16)):
        spread = min(experts, pairs)
        counts = [size * ((pairs - spread) // size) + 1] + [1] * (spread - 1)
        ids = torch.cat([torch.full((count,), expert) for expert, count in enumerate(counts)])
        ids = torch.nn.functional.pad(ids, (0, pairs - len(ids)), value=spread - 1)
        routing = routed(ids[:, None], size, experts)
        assert (routing.live > 0).all()


def test_rows_of_many_columns() -> None:
    """More than a program handles, gathered from x with other columns between, and combined."""
    cols, ids = COLUMNS + 3, torch.tensor([[1, 0], [5, 1]], dtype=torch.int32)
    x, weights = torch.randn(2, 2 * cols)[:, :cols].half(), torch.rand(2, 2)
    routing = route(ids.to(DEVICE), 8, [stack_of_experts(2)])
    assert routing.place.tolist() == [[1, 0], [-1, 2]]
    there = gather(x.to(DEVICE), routing)
    rows = there.cpu()
    assert torch.equal(rows[:3], x[[0, 0, 1]])
    one, two, three = rows[:3].float()
    sums = [weights[0, 0] * two + weights[0, 1] * one, weights[1, 1] * three]
    assert torch.equal(combine(there, weights.to(DEVICE), routing).cpu(), torch.stack(sums).half())


def test_sizes_of_batches() -> None:
    """Room for 1.5 times what an expert gets on average, as far as the kernel goes; then experts multiply alone."""
    stack, tokens = stack_of_experts(16), (1, 2, 42, 43, 170, 171, 1024, 1025)
    assert [batch_size(count, 2, 16, [stack] * 2) for count in tokens] == [1, 8, 8, 16, 32, 64, 64, None]
    assert [batch_size(count, 2, 16, [stack_of_experts(16, 8), stack]) for count in (256, 512, 513)] == [32, 32, None]
    assert batch_size(170, 2, 64, [stack]) == 8  # three quarters of the experts are on other ranks
    trellis = pool_trellis([operands_of([random_trellis_weight(16, 16)], DEVICE)] * 16)
    tokens = (1, 2, 21, 22, 42, 43, 512, 513)
    assert [batch_size(count, 2, 16, [trellis] * 2) for count in tokens] == [1, 4, 4, 8, 8, 16, 16, None]


def test_one_token_is_not_copied() -> None:
    x = torch.randn(1, 64, device=DEVICE).half()
    rows = gather(x, route(torch.tensor([[1, 0, 2]], device=DEVICE), 1, [stack_of_experts(3)]))
    assert rows.data_ptr() == x.data_ptr()
    assert torch.equal(rows.cpu(), x.cpu().expand(3, 64))


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_activation(activation: str) -> None:
    """Rounded once; gates so large that a product of what is not yet small would overflow."""
    if EMULATED and activation in ("gelu", "gelu_no_mul"):
        pytest.skip("the threads of CUDA's erf take different branches, which the emulator refuses")
    cols, ids = COLUMNS + 3, torch.tensor([[1, 0], [5, 1]], dtype=torch.int32)
    gate, up = (3 * torch.randn(4, cols)).bfloat16(), torch.randn(4, cols).bfloat16()
    gate[:, 0], up[:, 0] = -1e30, 1e30
    gate[:, 1], up[:, 1] = 1e30, 1e-30
    gate[:, 2] = torch.nan
    routing = route(ids.to(DEVICE), 8, [stack_of_experts(2)])
    first = gate if activation.endswith("_no_mul") else torch.cat([gate, up], 1)
    constants = CONSTANTS.get(activation, ())
    found = activate(first.to(DEVICE), activation, routing, constants)
    # A result beyond float32 is infinite.
    expected = ACTIVATIONS[activation](first.double(), *constants).float().double()
    tolerance = 2**-7  # the interpreter truncates
    torch.testing.assert_close(found.cpu()[:3].double(), expected[:3], rtol=tolerance, atol=1e-6, equal_nan=True)


def test_biases_of_each_expert() -> None:
    """In float32, before the activation, and before the weighted sum; a pair of another rank has none."""
    ids = torch.tensor([[1, 0], [5, 1]])
    routing = route(ids.to(DEVICE), 8, [stack_of_experts(2)])
    first, bias = torch.randn(4, 2 * COLUMNS + 6).bfloat16(), torch.randn(2, 2 * COLUMNS + 6).bfloat16()
    constants = CONSTANTS["swiglu"]
    found = activate(first.to(DEVICE), "swiglu", routing, constants, bias.to(DEVICE)).cpu().double()
    for place, expert in enumerate((0, 1, 1)):
        expected = ACTIVATIONS["swiglu"](first[place].double() + bias[expert].double(), *constants)
        torch.testing.assert_close(found[place], expected, rtol=2**-7, atol=1e-6)
    weights = torch.rand(2, 2)
    got = combine(first.to(DEVICE), weights.to(DEVICE), routing, bias.to(DEVICE)).cpu().double()
    rows, own, weights = first.double(), bias.double(), weights.double()
    sums = weights[0, 0] * (rows[1] + own[1]) + weights[0, 1] * (rows[0] + own[0]), weights[1, 1] * (rows[2] + own[1])
    torch.testing.assert_close(got, torch.stack(sums), rtol=2**-7, atol=2**-7)


def test_constants_that_do_not_fit_are_refused() -> None:
    routing = route(torch.tensor([[0]], device=DEVICE), 1, [stack_of_experts(1)])
    for activation, constants in (("swiglu", (7.0,)), ("silu", (7.0,))):
        with pytest.raises(KernelInputError, match=rf"constants: expected .* of {activation}, found \(7\.0,\)"):
            activate(torch.zeros(1, 8, device=DEVICE).half(), activation, routing, constants)


def test_an_activation_that_no_kernel_has_is_refused() -> None:
    routing = route(torch.tensor([[0]], device=DEVICE), 1, [stack_of_experts(1)])
    with pytest.raises(KernelInputError, match=r"activation: expected one of .*gelu_tanh.*found relu"):
        activate(torch.zeros(1, 8, device=DEVICE).half(), "relu", routing)
