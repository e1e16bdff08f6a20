"""Products of routed experts: every (token, expert) pair of a layer in one launch, with nothing read back.

    ids [tokens, k] --route--> the place of every pair, expert by expert; batches of up to `size` places of one expert
    x --gather--> rows in the order of places --grouped_matmul--> y, each batch by its expert's weight
    y --combine--> for each token the weighted sum over its pairs

The numbers of batches and places follow from shapes alone, so a CUDA graph may capture all of it; a batch that the
routing left empty ends at once. The product is the decode kernel of `ssqr.py` with batches as the third dimension.
"""

from dataclasses import dataclass, replace

import torch
import triton
import triton.language as tl

from vllm_latq.kernels.configs import COMPILER, FUSED_LAUNCHES, REGIMES, decode_config, max_decode_rows
from vllm_latq.kernels.dispatch import check_activations, scratch
from vllm_latq.kernels.errors import require
from vllm_latq.kernels.ssqr import launch_arguments, ssqr_tensor_core
from vllm_latq.kernels.weight import KernelWeight

CHUNK = 32  # pairs that a program of `route_pairs` places
COLUMNS = 1024  # of a row, that a program of `gather_rows` or `combine_pairs` handles


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


@triton.jit(do_not_specialize=("k",))
def gather_rows(
    x_ptr, id_ptr, place_ptr, scale_ptr, out_ptr, K, stride_xm, k, PLACED: tl.constexpr, COLUMNS: tl.constexpr
):
    """Grid (pairs, columns / COLUMNS): the row of x of each pair to its place, times its expert's column scales."""
    pair = tl.program_id(0)
    place = tl.load(place_ptr + pair)
    if place >= 0:
        col = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
        row = place if PLACED else pair // k
        x = tl.load(x_ptr + row.to(tl.int64) * stride_xm + col, mask=col < K)
        if scale_ptr is not None:
            scale = tl.load(scale_ptr + tl.load(id_ptr + pair).to(tl.int64) * K + col, mask=col < K)
            x = (x.to(tl.float32) * scale).to(x.dtype)
        tl.store(out_ptr + place.to(tl.int64) * K + col, x, mask=col < K)


@triton.jit(do_not_specialize=("k",))
def combine_pairs(y_ptr, weight_ptr, place_ptr, out_ptr, N, k, COLUMNS: tl.constexpr):
    """Grid (tokens, columns / COLUMNS): weighted sums of rows of y [pairs, N], in float32, rounded once."""
    token = tl.program_id(0)
    col = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    acc = tl.zeros((COLUMNS,), tl.float32)
    for pair in range(token * k, (token + 1) * k):
        place = tl.load(place_ptr + pair)
        if place >= 0:
            weight = tl.load(weight_ptr + pair).to(tl.float32)
            acc += weight * tl.load(y_ptr + place.to(tl.int64) * N + col, mask=col < N, other=0.0).to(tl.float32)
    tl.store(out_ptr + token.to(tl.int64) * N + col, acc.to(out_ptr.dtype.element_ty), mask=col < N)


@triton.jit(do_not_specialize=("M", "supers", "supers_per_part", "writers"))
def ssqr_grouped(
    expert_ptr, begin_ptr, live_ptr, word_stride, pair_stride, entry_stride, slice_stride, ticket_stride,
    x_ptr, word_ptr, scale_ptr, flat_scale_ptr, row_scale_ptr, order_ptr, entry_ptr, slice_ptr, xt_ptr, fours_ptr,
    partial_ptr, ticket_ptr, y_ptr, M, N, K, stride_xm, supers, supers_per_part, writers,
    BITS: tl.constexpr, GROUP: tl.constexpr, MIDRISE: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_M: tl.constexpr,
    STAGES: tl.constexpr, BIAS_DOT: tl.constexpr, BIAS_ROWS: tl.constexpr, PAIRED: tl.constexpr,
    OUTLIER_ROWS: tl.constexpr, SLOTS: tl.constexpr, TRANSPOSED: tl.constexpr, PIECE: tl.constexpr, SPLIT: tl.constexpr,
    EVEN_K: tl.constexpr, HAS_FLAT_SCALES: tl.constexpr, HAS_ROW_SCALES: tl.constexpr, ASM: tl.constexpr,
    UPCAST: tl.constexpr,
):  # fmt: skip
    """Grid (padded rows / BLOCK_N, parts, batches): `ssqr_tensor_core` on the rows of one batch, its own M of them."""
    M = tl.load(live_ptr + tl.program_id(2))
    if M == 0:
        return
    expert = tl.load(expert_ptr + tl.program_id(2)).to(tl.int64)
    begin = tl.load(begin_ptr + tl.program_id(2)).to(tl.int64)
    batch = tl.program_id(2).to(tl.int64)
    padded = tl.num_programs(0) * BLOCK_N
    if scale_ptr is not None:
        scale_ptr += expert * pair_stride
    if flat_scale_ptr is not None:
        flat_scale_ptr += expert * padded
    if row_scale_ptr is not None:
        row_scale_ptr += expert * padded
    if entry_ptr is not None:
        entry_ptr += expert * entry_stride
        slice_ptr += expert * slice_stride
    if xt_ptr is not None:
        xt_ptr += batch * K * BLOCK_M
        fours_ptr += batch * K * (BLOCK_M // 4)
    if partial_ptr is not None:
        partial_ptr += batch * tl.num_programs(1) * padded * BLOCK_M
    ssqr_tensor_core(
        x_ptr + begin * stride_xm, word_ptr + expert * word_stride, scale_ptr, flat_scale_ptr, row_scale_ptr,
        order_ptr + expert * padded, entry_ptr, slice_ptr, xt_ptr, fours_ptr, partial_ptr,
        ticket_ptr + batch * ticket_stride, y_ptr + begin * N, M, N, K, stride_xm, supers, supers_per_part,
        writers, BITS, GROUP, MIDRISE, BLOCK_N, BLOCK_M, STAGES, BIAS_DOT, BIAS_ROWS, PAIRED, OUTLIER_ROWS, SLOTS,
        TRANSPOSED, PIECE, SPLIT, EVEN_K, HAS_FLAT_SCALES, HAS_ROW_SCALES, ASM, UPCAST,
    )  # fmt: skip


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


def batch_size(tokens: int, k: int, experts: int, stacks: list[KernelWeight]) -> int | None:
    """Most rows of a batch; None if there are too many pairs for the decode kernel, as for a single matrix.

    A token alone gets a batch for each expert. Else batches have room for half as much again as an expert gets on
    average: of evenly chosen experts less than a tenth need a second batch, and are read twice.

    Args:
        experts: from which the ids are chosen, those of other ranks included.
        stacks: the weights of the products that will be made.
    """
    if tokens == 1:
        return 1
    widest = min(max_decode_rows(stack.bits, stack.midrise) for stack in stacks)
    if tokens * k > FUSED_LAUNCHES * widest * experts:
        return None
    return next((rows for rows in REGIMES if rows < widest and 2 * rows * experts >= 3 * tokens * k), widest)


def route(ids: torch.Tensor, size: int, stacks: list[KernelWeight]) -> Routing:
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


def gather(x: torch.Tensor, scales: torch.Tensor | None, routing: Routing, placed: bool = False) -> torch.Tensor:
    """Rows of x in the order of places, times their expert's column scales, rounded once.

    Args:
        x: [tokens, cols]; or, if `placed`, [pairs, cols], in the order of places already.
        scales: float32 [experts, cols], contiguous, or None.

    Returns:
        [pairs, cols], dtype of x; undefined behind the last place.
    """
    pairs, cols = routing.ids.numel(), x.shape[1]
    if x.stride(1) != 1:
        x = x.contiguous()
    out = torch.empty(pairs, cols, dtype=x.dtype, device=x.device)
    with torch.cuda.device_of(x):
        gather_rows[(pairs, -(-cols // COLUMNS))](
            x, routing.ids, routing.place, scales, out, cols, x.stride(0), routing.ids.shape[1],
            PLACED=placed, COLUMNS=COLUMNS, **COMPILER,
        )  # fmt: skip
    return out


def grouped_matmul(x: torch.Tensor, stack: KernelWeight, routing: Routing) -> torch.Tensor:
    """Each batch of rows times the transposed weight of its expert, in one launch.

    Args:
        x: [pairs, cols], bfloat16 or float16, contiguous, in the order of places; anything behind the last one.
        stack: the experts' weights, each tensor with a leading dimension [experts].
        routing: of the rows of x; its tickets are zero before and after.

    Returns:
        [pairs, rows], dtype of x; undefined behind the last place.

    Raises:
        KernelInputError: x does not fit the weights.
    """
    weight, size, batches = replace(stack, tickets=routing.tickets), routing.size, len(routing.expert)
    check_activations(x, weight)
    pairs = routing.ids.numel()
    require(x.is_contiguous() and len(x) == pairs, "x", f"{pairs} contiguous rows", tuple(x.shape))
    config = decode_config(size, weight.bits, weight.arch, weight.group_size)
    parts, partials, transposed = scratch(x, weight, config, size, batches)
    y = torch.empty(pairs, weight.rows, dtype=x.dtype, device=x.device)
    parted = (weight.words, weight.scale_pairs, weight.entries, weight.slice_ptr, weight.tickets)
    strides = (0 if part is None else part.stride(0) for part in parted)
    with torch.cuda.device_of(x):
        grid, arguments, named = launch_arguments(x, weight, y, partials, transposed, config, parts, size)
        batch = (routing.expert, routing.begin, routing.live)
        ssqr_grouped[(*grid, batches)](*batch, *strides, *arguments, **named)
    return y


def combine(y: torch.Tensor, weights: torch.Tensor, routing: Routing) -> torch.Tensor:
    """For each token the sum of its pairs' rows of y [pairs, rows] times weights [tokens, k]: [tokens, rows].

    In float32, rounded once to the dtype of y; pairs without a place add nothing.
    """
    tokens, k = routing.place.shape
    out = torch.empty(tokens, y.shape[1], dtype=y.dtype, device=y.device)
    with torch.cuda.device_of(y):
        combine_pairs[(tokens, -(-y.shape[1] // COLUMNS))](
            y, weights, routing.place, out, y.shape[1], k, COLUMNS=COLUMNS, **COMPILER
        )
    return out
