"""Batches of rows for each expert of a mixture, made on the device, with nothing read back.

    ids [tokens, k] --route--> the place of every pair, expert by expert; batches of up to `size` places of one expert

The numbers of batches and places follow from shapes alone, so a CUDA graph may capture the routing; batches that it
leaves empty have no rows.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from vllm_latq.kernels.configs import (
    COMPILER,
    FUSED_LAUNCHES,
    INVARIANT_ROWS,
    REGIMES,
    TRELLIS_LAUNCHES,
    TRELLIS_REGIMES,
    max_decode_rows,
)
from vllm_latq.kernels.layout.trellis import TrellisOperands
from vllm_latq.kernels.layout.weight import KernelWeight

Stack = KernelWeight | TrellisOperands

CHUNK = 32  # pairs that a program of `route_pairs` places


@triton.jit(do_not_specialize=("pairs", "experts", "batches", "tickets"))
def route_pairs(
    id_ptr,  # integers [pairs]: the expert of each pair
    expert_ptr,  # int32 [batches]: gets the expert of each batch
    begin_ptr,  # int32 [batches]: gets its first place
    live_ptr,  # int32 [batches]: gets its number of rows
    place_ptr,  # int32 [pairs]: gets the place of each pair, or -1
    ticket_ptr,  # int32 [tickets]: gets zeros
    pairs,
    experts,
    batches,  # at most as many as pairs
    tickets,
    SIZE: tl.constexpr,  # most rows of a batch
    PADDED_EXPERTS: tl.constexpr,  # a power of two
    CHUNK: tl.constexpr,
):
    """Grid (pairs / CHUNK). Each program places CHUNK pairs and describes CHUNK batches.

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
    """Load the expert of each pair, int32; -1 for an expert of another rank."""
    expert = tl.load(id_ptr + at, mask=at < pairs, other=-1)
    return tl.where((expert >= 0) & (expert < experts), expert, -1).to(tl.int32)


@triton.jit
def count_experts(id_ptr, begin, end, pairs, experts, PADDED_EXPERTS: tl.constexpr, CHUNK: tl.constexpr):
    """Count how many pairs from `begin` to `end`, in whole chunks, ask for each expert: int32 [PADDED_EXPERTS]."""
    asked = tl.zeros((PADDED_EXPERTS, CHUNK), tl.int32)  # a lane has one pair: it loads one
    for start in range(begin, end, CHUNK):
        expert = load_experts(id_ptr, start + tl.arange(0, CHUNK), pairs, experts)
        asked += (expert[None, :] == tl.arange(0, PADDED_EXPERTS)[:, None]).to(tl.int32)
    return tl.sum(asked, 1)


@dataclass(frozen=True)
class Routing:
    """Batches of up to `size` rows, each multiplied by one expert.

    Attributes:
        size: most rows of a batch.
        ids: integers [tokens, k], the expert of each pair.
        place: int32 [tokens, k], the row that each pair went to; -1 for an expert of another rank.
        expert, begin, live: int32 [batches]: the expert of each batch, its first row and its number of rows.
        tickets: int32 [batches, ...], zeros, for the products.
    """

    size: int
    ids: torch.Tensor
    place: torch.Tensor
    expert: torch.Tensor
    begin: torch.Tensor
    live: torch.Tensor
    tickets: torch.Tensor


def batch_size(tokens: int, k: int, experts: int, stacks: Sequence[Stack]) -> int | None:
    """Return the most rows of a batch; None if there are too many pairs for the decode kernel, as for a single matrix.

    A single token gets a batch for each of its experts. For more tokens a batch has room for 1.5 times the rows that an
    expert gets on average: if experts are chosen evenly, less than a tenth of them need a second batch, and are read
    twice. Invariant weights get batches of one size for any number of tokens.

    Args:
        tokens: rows of x.
        k: experts of a token.
        experts: number of experts on all ranks, from which the ids are chosen.
        stacks: the weights of the products that will be made.
    """
    if any(stack.invariant for stack in stacks):
        return INVARIANT_ROWS
    if tokens == 1:
        return 1
    served = [regimes(stack) for stack in stacks]
    widest = min(rows[-1] for rows in served)
    if tokens * k > min(launches(stack) for stack in stacks) * widest * experts:
        return None
    return next((rows for rows in served[0] if rows < widest and 2 * rows * experts >= 3 * tokens * k), widest)


def regimes(stack: Stack) -> tuple[int, ...]:
    """Return the numbers of rows for which there are decode kernels of a weight."""
    if isinstance(stack, TrellisOperands):
        return TRELLIS_REGIMES
    return tuple(rows for rows in REGIMES if rows <= max_decode_rows(stack.bits))


def launches(stack: Stack) -> int:
    """Return how many launches of the widest decode kernel a product takes at most."""
    return TRELLIS_LAUNCHES if isinstance(stack, TrellisOperands) else FUSED_LAUNCHES


def route(ids: torch.Tensor, size: int, stacks: Sequence[Stack]) -> Routing:
    """Put every (token, expert) pair into a batch of its expert.

    Args:
        ids: integers [tokens, k], contiguous; a number outside [0, experts) is an expert of another rank.
        size: most rows of a batch.
        stacks: the weights of the products that will be made.
    """
    experts, pairs = len(stacks[0].tickets), ids.numel()
    # An expert with n > 0 pairs fills at most (n + size - 1) // size batches; the sum is largest if as many experts as
    # possible have pairs.
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
