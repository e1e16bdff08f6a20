"""Which rows each expert of a mixture multiplies, with nothing read back: batches of one expert's rows.

    ids [tokens, k] --route--> the place of every pair, expert by expert; batches of up to `size` places of one expert

The numbers of batches and places follow from shapes alone, so a CUDA graph may capture all of it; batches that the
routing leaves empty have no rows.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from vllm_latq.kernels.configs import COMPILER, FUSED_LAUNCHES, REGIMES, max_decode_rows
from vllm_latq.kernels.layout.weight import KernelWeight

CHUNK = 32  # pairs that a program of `route_pairs` places


@triton.jit(do_not_specialize=("pairs", "experts", "batches", "tickets"))
def route_pairs(
    id_ptr, expert_ptr, begin_ptr, live_ptr, place_ptr, ticket_ptr, pairs, experts, batches, tickets,
    SIZE: tl.constexpr, PADDED_EXPERTS: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """Grid (pairs / CHUNK). Each program places CHUNK pairs and describes CHUNK batches; there are no more of these.

    Pairs keep their order within an expert. All programs count all pairs.
    """
    own = tl.program_id(0) * CHUNK
    lane = tl.arange(0, CHUNK)
    bins = tl.arange(0, PADDED_EXPERTS)
    before = count_experts(id_ptr, 0, own, pairs, experts, PADDED_EXPERTS, CHUNK)
    counts = before + count_experts(id_ptr, own, pairs, pairs, experts, PADDED_EXPERTS, CHUNK)
    starts = tl.cumsum(counts, 0) - counts

    expert = load_experts(id_ptr, own + lane, pairs, experts)
    earlier = (expert[:, None] == expert[None, :]) & (lane[None, :] < lane[:, None])
    place = tl.sum(tl.where(expert[:, None] == bins[None, :], (starts + before)[None, :], 0), 1)
    place += tl.sum(earlier.to(tl.int32), 1)
    tl.store(place_ptr + own + lane, tl.where(expert >= 0, place, -1), mask=own + lane < pairs)

    filled = (counts + (SIZE - 1)) // SIZE
    first = tl.cumsum(filled, 0) - filled
    batch = (own + lane)[:, None]
    inside = (batch >= first[None, :]) & (batch < (first + filled)[None, :])
    done = (batch - first[None, :]) * SIZE  # places of the expert's earlier batches
    rest = tl.sum(tl.where(inside, counts[None, :] - done, 0), 1)
    tl.store(expert_ptr + own + lane, tl.sum(tl.where(inside, bins[None, :], 0), 1), mask=own + lane < batches)
    tl.store(begin_ptr + own + lane, tl.sum(tl.where(inside, starts[None, :] + done, 0), 1), mask=own + lane < batches)
    tl.store(live_ptr + own + lane, tl.minimum(rest, SIZE), mask=own + lane < batches)
    for start in range(tl.program_id(0) * 1024, tickets, tl.num_programs(0) * 1024):
        at = start + tl.arange(0, 1024)
        tl.store(ticket_ptr + at, tl.zeros_like(at), mask=at < tickets)


@triton.jit
def load_experts(id_ptr, at, pairs, experts):
    """int32: the expert of each pair, -1 for none of these experts."""
    expert = tl.load(id_ptr + at, mask=at < pairs, other=-1)
    return tl.where((expert >= 0) & (expert < experts), expert, -1).to(tl.int32)


@triton.jit
def count_experts(id_ptr, begin, end, pairs, experts, PADDED_EXPERTS: tl.constexpr, CHUNK: tl.constexpr):
    """int32 [PADDED_EXPERTS]: how many of the pairs from `begin` to `end` ask for each expert. In whole chunks."""
    asked = tl.zeros((PADDED_EXPERTS, CHUNK), tl.int32)  # a lane has one pair: it loads one
    for start in range(begin, end, CHUNK):
        expert = load_experts(id_ptr, start + tl.arange(0, CHUNK), pairs, experts)
        asked += (expert[None, :] == tl.arange(0, PADDED_EXPERTS)[:, None]).to(tl.int32)
    return tl.sum(asked, 1)


@dataclass(frozen=True)
class Routing:
    """Which rows each expert multiplies: batches of up to `size` rows.

    Attributes:
        size: most rows of a batch.
        ids: integers [tokens, k], the experts that were asked for.
        place: int32 [tokens, k], the row that each pair went to; -1 for an expert that is not here.
        expert, begin, live: int32 [batches]: of each batch, its first row, its number of rows.
        tickets: int32 [batches, ...], zeros, for the products.
    """

    size: int
    ids: torch.Tensor
    place: torch.Tensor
    expert: torch.Tensor
    begin: torch.Tensor
    live: torch.Tensor
    tickets: torch.Tensor


def batch_size(tokens: int, k: int, experts: int, stacks: Sequence[KernelWeight]) -> int | None:
    """Most rows of a batch; None if there are too many pairs for the decode kernel, as for a single matrix.

    A token alone gets a batch for each expert. Else batches have room for half as much again as an expert gets on
    average: of evenly chosen experts less than a tenth need a second batch, and are read twice.

    Args:
        experts: from which the ids are chosen, those of other ranks included.
        stacks: the weights of the products that will be made.
    """
    if tokens == 1:
        return 1
    widest = min(max_decode_rows(stack.bits) for stack in stacks)
    if tokens * k > FUSED_LAUNCHES * widest * experts:
        return None
    return next((rows for rows in REGIMES if rows < widest and 2 * rows * experts >= 3 * tokens * k), widest)


def route(ids: torch.Tensor, size: int, stacks: Sequence[KernelWeight]) -> Routing:
    """Put every (token, expert) pair into a batch of its expert.

    Args:
        ids: integers [tokens, k], contiguous; any number outside [0, experts) is an expert that is not here.
        size: most rows of a batch.
        stacks: the weights of the products that will be made.
    """
    experts, pairs = len(stacks[0].words), ids.numel()
    # An expert with n > 0 pairs fills at most (n + size - 1) // size batches; these add up to most for as many experts
    # as can be.
    batches = (pairs + min(experts, pairs) * (size - 1)) // size
    width = max(stack.tickets.shape[1] for stack in stacks)
    shapes = (tuple(ids.shape), (batches,), (batches,), (batches,), (batches, width))
    place, expert, begin, live, tickets = (torch.empty(s, dtype=torch.int32, device=ids.device) for s in shapes)
    with torch.cuda.device_of(ids):
        route_pairs[(-(-pairs // CHUNK),)](
            ids, expert, begin, live, place, tickets, pairs, experts, batches, tickets.numel(),
            SIZE=size, PADDED_EXPERTS=triton.next_power_of_2(experts), CHUNK=CHUNK, num_warps=8, **COMPILER,
        )  # fmt: skip
    return Routing(size, ids, place, expert, begin, live, tickets)
