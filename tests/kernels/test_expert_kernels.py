"""Experts through the kernels: grouped, and expert by expert, the sum is the dense experts'."""

from collections.abc import Callable
from dataclasses import fields

import pytest
import torch
from kernel_device import DEVICE
from mixtures import EXPERTS, HIDDEN, Mixture, routing
from random_weights import RANS

from vllm_latq import expert_op, kernel_path
from vllm_latq.config import LayerScheme
from vllm_latq.expert_op import by_all, by_expert
from vllm_latq.kernels.errors import KernelInputError
from vllm_latq.kernels.grouped import COLUMNS, Routing, batch_size, combine, gather, grouped_matmul, route
from vllm_latq.kernels.weight import KernelWeight, prepare

pytestmark = pytest.mark.kernel

# Of the largest output: x, the gated product and the output are each rounded to float16 (2^-11), one after the other.
TOLERANCE = 2**-8
SCHEMES = {
    "packed3": LayerScheme("packed", 3, 32, True, grid="midrise"),
    "packed4-row": LayerScheme("packed", 4, -1, False),
    "rans": RANS,
}


def strided(tensor: torch.Tensor) -> torch.Tensor:
    """The same values, every other one in memory."""
    return torch.stack([tensor, torch.full_like(tensor, -1)], -1)[..., 0]


def assert_equals_dense_experts(scheme: str, tokens: int, k: int, dtype: torch.dtype = torch.int32) -> None:
    mixture = Mixture(SCHEMES[scheme], torch.float16, device=DEVICE)
    assert mixture.constants[3] == ["ssqr_tiled", "ssqr_tiled"]
    x, weights, ids = routing(tokens, k, dtype)
    x *= 0.01  # float16 overflows at 65504
    expected = mixture.reference(x, weights, ids)
    got = mixture(*(strided(part.to(DEVICE)) for part in (x.half(), weights, ids)))
    assert (got.cpu().float() - expected).abs().max() <= TOLERANCE * expected.abs().max()
    if scheme == "packed3":
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


def test_chunks_of_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel_path, "MOST_PAIRS", 9)  # four tokens with two experts each, and three
    test_grouped("rans", 7, 2, torch.int32, monkeypatch)


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("way", [by_expert, by_all])
def test_expert_by_expert(scheme: str, way: Callable[..., torch.Tensor], monkeypatch: pytest.MonkeyPatch) -> None:
    """For so many tokens that experts are multiplied as dense matrices; all of them inside a CUDA graph."""
    monkeypatch.setattr(expert_op, "grouped_experts", lambda *arguments: None)
    monkeypatch.setattr(expert_op, "by_expert", way)
    assert_equals_dense_experts(scheme, 3, 2)


def stack_of(experts: int, bits: int = 3, midrise: bool = False) -> KernelWeight:
    """Shapes only: the first expert's tensors stand for all."""
    codes = torch.zeros(64, 64 * bits // 32, dtype=torch.int32, device=DEVICE)
    weight = prepare(codes, bits, -1, 64, midrise=midrise)
    parts = {name: part for name, part in vars(weight).items() if isinstance(part, torch.Tensor)}
    stacks = {name: part.expand(experts, *part.shape) for name, part in parts.items()}
    return KernelWeight(**vars(weight) | stacks)


def routed(ids: torch.Tensor, size: int, experts: int) -> Routing:
    """Routed where kernels run, and brought back."""
    found = route(ids.to(DEVICE), size, [stack_of(experts)])
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
    """More than a program handles, gathered from x with other columns between, scaled, and combined."""
    cols, ids = COLUMNS + 3, torch.tensor([[1, 0], [5, 1]], dtype=torch.int32)
    x, scales, weights = torch.randn(2, 2 * cols)[:, :cols], 2.0 ** torch.randint(-3, 3, (2, cols)), torch.rand(2, 2)
    routing = route(ids.to(DEVICE), 8, [stack_of(2)])
    assert routing.place.tolist() == [[1, 0], [-1, 2]]
    there = gather(x.half().to(DEVICE), scales.to(DEVICE), routing)
    rows = there.cpu()
    expected = torch.stack([x.half()[0] * scales[0], x.half()[0] * scales[1], x.half()[1] * scales[1]]).half()
    assert torch.equal(rows[:3], expected)
    again = gather(there, scales.to(DEVICE), routing, placed=True).cpu()
    assert torch.equal(again[:3], (expected * scales[[0, 1, 1]]).half())
    one, two, three = expected.float()
    sums = [weights[0, 0] * two + weights[0, 1] * one, weights[1, 1] * three]
    assert torch.equal(combine(there, weights.to(DEVICE), routing).cpu(), torch.stack(sums).half())


def test_sizes_of_batches() -> None:
    """Room for 1.5 times what an expert gets on average, as far as the kernel goes; then experts multiply alone."""
    stack, tokens = stack_of(16), (1, 2, 42, 43, 170, 171, 1024, 1025)
    assert [batch_size(count, 2, 16, [stack] * 2) for count in tokens] == [1, 8, 8, 16, 32, 64, 64, None]
    assert [batch_size(count, 2, 16, [stack_of(16, 8), stack]) for count in (256, 512, 513)] == [32, 32, None]
    assert batch_size(256, 2, 16, [stack_of(16, midrise=True)]) == 32
    assert batch_size(170, 2, 64, [stack]) == 8  # three quarters of the experts are on other ranks


def test_rows_that_do_not_fit_the_routing_are_refused() -> None:
    stack = stack_of(2)
    routing = route(torch.tensor([[0], [1]], device=DEVICE), 8, [stack])
    for x in (torch.zeros(3, 64).half(), torch.zeros(64, 2).half().T, torch.zeros(2, HIDDEN).half()):
        with pytest.raises(KernelInputError):
            grouped_matmul(x.to(DEVICE), stack, routing)
