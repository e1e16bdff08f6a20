"""Products of routed experts: every (token, expert) pair of a layer in one launch, with nothing read back.

    x --gather--> rows in the order of places --grouped_matmul--> gate and up, each batch by its expert's weight
    --activate--> act(gate) * up --grouped_matmul--> y --combine--> for each token the weighted sum over its pairs

Experts without a gate have act(up).

Places and batches are those of `routing.py`. The product is the decode kernel of `ssqr.py` with batches as the third
dimension; a batch that the routing left empty ends at once.
"""

from dataclasses import replace

import torch
import triton
import triton.language as tl

from vllm_latq.kernels.configs import COMPILER, decode_config
from vllm_latq.kernels.decode.dispatch import check_activations, scratch
from vllm_latq.kernels.decode.ssqr import launch_arguments, ssqr_tensor_core
from vllm_latq.kernels.errors import require
from vllm_latq.kernels.experts.activations import ACTIVATIONS, UNGATED
from vllm_latq.kernels.experts.routing import Routing, batch_size, route
from vllm_latq.kernels.layout.weight import KernelWeight

COLUMNS = 1024  # of a row, that a program handles which is no product
MOST_PAIRS = 4096  # that are multiplied at once: bounds the scratch memory of a layer


@triton.jit(do_not_specialize=("k",))
def gather_rows(x_ptr, id_ptr, place_ptr, scale_ptr, out_ptr, K, stride_xm, k, COLUMNS: tl.constexpr):
    """Grid (pairs, columns / COLUMNS): the row of x of each pair to its place, times its expert's column scales."""
    pair = tl.program_id(0)
    place = tl.load(place_ptr + pair)
    if place >= 0:
        col = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
        x = tl.load(x_ptr + (pair // k).to(tl.int64) * stride_xm + col, mask=col < K)
        if scale_ptr is not None:
            x = (x.to(tl.float32) * load_scales(scale_ptr, id_ptr, pair, col, K)).to(x.dtype)
        tl.store(out_ptr + place.to(tl.int64) * K + col, x, mask=col < K)


@triton.jit
def load_scales(scale_ptr, id_ptr, pair, col, K):
    """float32: the column scales of a pair's expert, which is one of those here."""
    return tl.load(scale_ptr + tl.load(id_ptr + pair).to(tl.int64) * K + col, mask=col < K)


@triton.jit
def activate_rows(
    y_ptr, id_ptr, place_ptr, scale_ptr, out_ptr, K,
    ACTIVATION: tl.constexpr, GATED: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Grid (pairs, columns / COLUMNS): act(gate) * up, times the column scales of the pair's expert, at its place."""
    pair = tl.program_id(0)
    place = tl.load(place_ptr + pair).to(tl.int64)
    if place >= 0:
        col = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
        gate_ptr = y_ptr + place * (2 * K if GATED else K) + col
        gate = tl.load(gate_ptr, mask=col < K, other=0.0).to(tl.float32)
        if ACTIVATION == "gelu":
            hidden = gate * (0.5 + 0.5 * tl.erf(gate * 0.7071067811865476))
        elif ACTIVATION == "relu2":
            hidden = tl.maximum(gate, 0.0, propagate_nan=tl.PropagateNan.ALL)
            hidden *= hidden
        else:  # tanh(z) is 2 * sigmoid(2 * z) - 1
            inner = gate if ACTIVATION == "silu" else gate * (1.5957691216057308 + 0.07135481627159706 * gate * gate)
            hidden = gate / (1.0 + tl.exp(-inner))
        if GATED:
            hidden *= tl.load(gate_ptr + K, mask=col < K, other=0.0).to(tl.float32)
        if scale_ptr is not None:
            hidden *= load_scales(scale_ptr, id_ptr, pair, col, K)
        tl.store(out_ptr + place * K + col, hidden.to(out_ptr.dtype.element_ty), mask=col < K)


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
    expert_ptr, begin_ptr, live_ptr, word_stride, pair_stride, slice_stride, ticket_stride,
    x_ptr, word_ptr, scale_ptr, flat_scale_ptr, row_scale_ptr, order_ptr, entry_ptr, slice_ptr, xt_ptr, fours_ptr,
    partial_ptr, ticket_ptr, y_ptr, M, N, K, stride_xm, supers, supers_per_part, writers,
    BITS: tl.constexpr, GROUP: tl.constexpr, MIDRISE: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_M: tl.constexpr,
    STAGES: tl.constexpr, BIAS_DOT: tl.constexpr, BIAS_ROWS: tl.constexpr, PAIRED: tl.constexpr,
    OUTLIER_ROWS: tl.constexpr, SLOTS: tl.constexpr, TRANSPOSED: tl.constexpr, BEYOND: tl.constexpr,
    PIECE: tl.constexpr, SPLIT: tl.constexpr, RANGES: tl.constexpr, EVEN_K: tl.constexpr,
    HAS_FLAT_SCALES: tl.constexpr, HAS_ROW_SCALES: tl.constexpr, ASM: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    """Grid (padded rows / BLOCK_N * RANGES, parts, batches): `ssqr_tensor_core` on one batch, its own M rows."""
    M = tl.load(live_ptr + tl.program_id(2))
    if M == 0:
        return
    expert = tl.load(expert_ptr + tl.program_id(2)).to(tl.int64)
    begin = tl.load(begin_ptr + tl.program_id(2)).to(tl.int64)
    batch = tl.program_id(2).to(tl.int64)
    padded = tl.num_programs(0) * (BLOCK_N // RANGES)
    if scale_ptr is not None:
        scale_ptr += expert * pair_stride
    if flat_scale_ptr is not None:
        flat_scale_ptr += expert * padded
    if row_scale_ptr is not None:
        row_scale_ptr += expert * padded
    if entry_ptr is not None:
        slice_ptr += expert * slice_stride
    if xt_ptr is not None:
        xt_ptr += batch * K * OUTLIER_ROWS
        fours_ptr += batch * K * (OUTLIER_ROWS // 4)
    if partial_ptr is not None:
        partial_ptr += batch * tl.num_programs(1) * padded * BLOCK_M
    ssqr_tensor_core(
        x_ptr + begin * stride_xm, word_ptr + expert * word_stride, scale_ptr, flat_scale_ptr, row_scale_ptr,
        order_ptr + expert * padded, entry_ptr, slice_ptr, xt_ptr, fours_ptr, partial_ptr,
        ticket_ptr + batch * ticket_stride, y_ptr + begin * N, M, N, K, stride_xm, supers, supers_per_part,
        writers, BITS, GROUP, MIDRISE, BLOCK_N, BLOCK_M, STAGES, BIAS_DOT, BIAS_ROWS, PAIRED, OUTLIER_ROWS, SLOTS,
        TRANSPOSED, BEYOND, PIECE, SPLIT, RANGES, EVEN_K, HAS_FLAT_SCALES, HAS_ROW_SCALES, ASM, UPCAST,
    )  # fmt: skip


def gather(x: torch.Tensor, scales: torch.Tensor | None, routing: Routing) -> torch.Tensor:
    """Rows of x in the order of places, times their expert's column scales, rounded once.

    Args:
        x: [tokens, cols].
        scales: float32 [experts, cols], contiguous, or None.

    Returns:
        [pairs, cols], dtype of x; undefined behind the last place. A view of x where all rows are one.
    """
    pairs, cols = routing.ids.numel(), x.shape[1]
    if x.stride(1) != 1:
        x = x.contiguous()
    if len(x) == 1 and scales is None:
        return x.expand(pairs, cols)
    out = torch.empty(pairs, cols, dtype=x.dtype, device=x.device)
    with torch.cuda.device_of(x):
        gather_rows[(pairs, -(-cols // COLUMNS))](
            x, routing.ids, routing.place, scales, out, cols, x.stride(0), routing.ids.shape[1],
            COLUMNS=COLUMNS, **COMPILER,
        )  # fmt: skip
    return out


def activate(y: torch.Tensor, activation: str, scales: torch.Tensor | None, routing: Routing) -> torch.Tensor:
    """act(gate) * up, or act(up), times their expert's column scales, in float32, rounded once.

    Args:
        y: [pairs, 2 * cols], gate before up, or [pairs, cols] without a gate; contiguous, in the order of places.
        activation: one of ACTIVATIONS.
        scales: float32 [experts, cols], contiguous, or None.

    Returns:
        [pairs, cols], dtype of y; undefined behind the last place.
    """
    require(activation in ACTIVATIONS, "activation", f"one of {', '.join(ACTIVATIONS)}", activation)
    gated = not activation.endswith(UNGATED)
    pairs, cols = y.shape[0], y.shape[1] // (2 if gated else 1)
    out = torch.empty(pairs, cols, dtype=y.dtype, device=y.device)
    with torch.cuda.device_of(y):
        activate_rows[(pairs, -(-cols // COLUMNS))](
            y, routing.ids, routing.place, scales, out, cols,
            ACTIVATION=activation.removesuffix(UNGATED), GATED=gated, COLUMNS=COLUMNS, **COMPILER,
        )  # fmt: skip
    return out


def grouped_matmul(x: torch.Tensor, stack: KernelWeight, routing: Routing) -> torch.Tensor:
    """Each batch of rows times the transposed weight of its expert, in one launch.

    Args:
        x: [pairs, cols], bfloat16 or float16, in the order of places, columns contiguous; anything behind the last one.
        stack: the experts' weights, see KernelWeight.
        routing: of the rows of x; its tickets are zero before and after.

    Returns:
        [pairs, rows], dtype of x; undefined behind the last place.

    Raises:
        KernelInputError: x does not fit the weights.
    """
    weight, size, batches = replace(stack, tickets=routing.tickets), routing.size, len(routing.expert)
    check_activations(x, weight)
    pairs = routing.ids.numel()
    dense = x.stride(1) == 1 or x.shape[1] == 1
    require(dense and len(x) == pairs, "x", f"{pairs} rows without gaps between columns",
            f"{tuple(x.shape)} of strides {x.stride()}")  # fmt: skip
    config = decode_config(size, weight.bits, weight.arch, weight.group_size)
    parts, ranges, partials, transposed = scratch(x, weight, config, size, batches)
    y = torch.empty(pairs, weight.rows, dtype=x.dtype, device=x.device)
    parted = (weight.words, weight.scale_pairs, weight.slice_ptr, weight.tickets)
    strides = (0 if part is None else part.stride(0) for part in parted)
    with torch.cuda.device_of(x):
        grid, arguments, named = launch_arguments(x, weight, y, partials, transposed, config, parts, ranges, size)
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


def routed_experts(
    x: torch.Tensor,
    weights: torch.Tensor,
    ids: torch.Tensor,
    stacks: tuple[KernelWeight, KernelWeight],
    scales: tuple[torch.Tensor | None, torch.Tensor | None],
    experts: int,
    activation: str,
) -> torch.Tensor | None:
    """For each token the weighted sum of its experts' outputs; None for more tokens than the decode kernel is for.

    Args:
        x: [tokens, hidden], bfloat16 or float16.
        weights: [tokens, k], of the outputs.
        ids: integers [tokens, k]; any number outside the stacks is an expert that is not here, and adds nothing.
        stacks: experts' weights of gate above up, [2 * intermediate, hidden], or without a gate of up, and of down,
            [hidden, intermediate].
        scales: of their columns, float32 [experts here, columns], contiguous, or None.
        experts: from which the ids are chosen, those of other ranks included.
        activation: one of ACTIVATIONS.

    Returns:
        [tokens, hidden], dtype of x.
    """
    k = ids.shape[1]
    if not ids.numel() or batch_size(len(x), k, experts, stacks) is None:
        return None

    def chunk(x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        size = batch_size(len(x), k, experts, stacks)
        assert size is not None, "it was not for more tokens"
        routing = route(ids.contiguous(), size, stacks)
        gate_up = grouped_matmul(gather(x, scales[0], routing), stacks[0], routing)
        hidden = activate(gate_up, activation, scales[1], routing)
        return combine(grouped_matmul(hidden, stacks[1], routing), weights.contiguous(), routing)

    chunks = zip(*(part.split(max(1, MOST_PAIRS // k)) for part in (x, weights, ids)), strict=True)
    outputs = [chunk(*parts) for parts in chunks]
    return outputs[0] if len(outputs) == 1 else torch.cat(outputs)
