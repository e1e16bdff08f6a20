"""Products of routed experts: every (token, expert) pair of a layer in one launch, with nothing read back.

    x --gather--> rows in the order of places --grouped_matmul--> gate and up, each batch by its expert's weight
    --activate--> act(gate) * up --grouped_matmul--> y --combine--> for each token the weighted sum over its pairs

Experts without a gate have act(up). Where experts have biases, `activate` and `combine` add them.

Gathering, activating and combining are in `rows.py`; places and batches come from `routing.py`. The product is the
decode kernel of `ssqr.py` with batches as the third dimension of its grid; the programs of an empty batch end at once.
`grouped_trellis.py` has the product for trellis codes.
"""

from collections.abc import Sequence
from dataclasses import replace

import torch
import triton
import triton.language as tl

from vllm_latq.kernels.configs import decode_config
from vllm_latq.kernels.decode.dispatch import allocate_scratch, check_activations
from vllm_latq.kernels.decode.ssqr import launch_arguments, ssqr_tensor_core
from vllm_latq.kernels.errors import require
from vllm_latq.kernels.experts.grouped_trellis import launch_grouped_trellis
from vllm_latq.kernels.experts.routing import Routing, Stack, batch_size, route
from vllm_latq.kernels.experts.rows import activate, combine, gather
from vllm_latq.kernels.layout.trellis import TrellisOperands

MOST_PAIRS = 4096  # pairs that are multiplied at once: bounds the scratch memory of a layer


@triton.jit(do_not_specialize=("M", "supers", "supers_per_part", "writers"))
def ssqr_grouped(
    expert_ptr,  # int32 [batches]: the expert of each batch
    begin_ptr,  # int32 [batches]: first row of x and of y
    live_ptr,  # int32 [batches]: number of rows, 0 for an empty batch
    word_stride,  # elements from one expert to the next, in word_ptr
    pair_stride,  # in scale_ptr
    slice_stride,  # in slice_ptr
    ticket_stride,  # elements from one batch to the next, in ticket_ptr
    x_ptr,  # bf16 or fp16 [pairs, K], in the order of places
    word_ptr,  # int32 [experts, row blocks, superblocks, planes, 64, words]: packed codes
    scale_ptr,  # int32 [experts, row blocks, superblocks, 128 / GROUP, 64]: pairs of bf16 group scales, or None
    flat_scale_ptr,  # float32 [experts, padded rows]: the scale of a whole row; None unless HAS_FLAT_SCALES
    row_scale_ptr,  # float32 [experts, padded rows]; None unless HAS_ROW_SCALES
    order_ptr,  # int32 [experts, padded rows]: the row of y that each tile row computes
    entry_ptr,  # int32 [slots, 16]: outliers of all experts; None without
    slice_ptr,  # int32 [experts, padded rows / 16 + 1]: first slot of each slice; None without outliers
    xt_ptr,  # dtype of x [batches, K, OUTLIER_ROWS]: x^T, which the kernel writes; None unless TRANSPOSED
    xt_as_int64_ptr,  # int64 [batches, K, OUTLIER_ROWS / 4]: the same memory; None unless TRANSPOSED
    partial_ptr,  # float32 [batches, tiles, parts, BLOCK_M, BLOCK_N]; None unless SPLIT
    ticket_ptr,  # int32 [batches, ticket_stride]: zeros before and after
    y_ptr,  # [pairs, N], contiguous
    M,  # most rows of a batch; unused, because each batch has its own number
    N,  # rows of the weight
    K,  # columns
    stride_xm,  # elements from one row of x to the next
    supers,  # superblocks
    supers_per_part,  # superblocks of a part of split-K, or of a range of columns
    writers,  # programs that write x^T
    BITS: tl.constexpr,
    GROUP: tl.constexpr,
    MIDRISE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_M: tl.constexpr,
    STAGES: tl.constexpr,
    BIAS_DOT: tl.constexpr,
    BIAS_ROWS: tl.constexpr,
    PAIRED: tl.constexpr,
    OUTLIER_ROWS: tl.constexpr,
    SLOTS: tl.constexpr,
    TRANSPOSED: tl.constexpr,
    PIECE: tl.constexpr,
    SPLIT: tl.constexpr,
    RANGES: tl.constexpr,
    EVEN_K: tl.constexpr,
    HAS_FLAT_SCALES: tl.constexpr,
    HAS_ROW_SCALES: tl.constexpr,
    ASM: tl.constexpr,
    UPCAST: tl.constexpr,
):
    """Grid (padded rows / BLOCK_N * RANGES, parts, batches). Run `ssqr_tensor_core` on one batch and its M rows.

    The compile-time parameters are those of `ssqr_tensor_core`.
    """
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
        xt_as_int64_ptr += batch * K * (OUTLIER_ROWS // 4)
    if partial_ptr is not None:
        partial_ptr += batch * tl.num_programs(1) * padded * BLOCK_M
    ssqr_tensor_core(
        x_ptr=x_ptr + begin * stride_xm,
        word_ptr=word_ptr + expert * word_stride,
        scale_ptr=scale_ptr,
        flat_scale_ptr=flat_scale_ptr,
        row_scale_ptr=row_scale_ptr,
        order_ptr=order_ptr + expert * padded,
        entry_ptr=entry_ptr,
        slice_ptr=slice_ptr,
        xt_ptr=xt_ptr,
        xt_as_int64_ptr=xt_as_int64_ptr,
        partial_ptr=partial_ptr,
        ticket_ptr=ticket_ptr + batch * ticket_stride,
        y_ptr=y_ptr + begin * N,
        M=M,
        N=N,
        K=K,
        stride_xm=stride_xm,
        supers=supers,
        supers_per_part=supers_per_part,
        writers=writers,
        BITS=BITS,
        GROUP=GROUP,
        MIDRISE=MIDRISE,
        BLOCK_N=BLOCK_N,
        BLOCK_M=BLOCK_M,
        STAGES=STAGES,
        BIAS_DOT=BIAS_DOT,
        BIAS_ROWS=BIAS_ROWS,
        PAIRED=PAIRED,
        OUTLIER_ROWS=OUTLIER_ROWS,
        SLOTS=SLOTS,
        TRANSPOSED=TRANSPOSED,
        PIECE=PIECE,
        SPLIT=SPLIT,
        RANGES=RANGES,
        EVEN_K=EVEN_K,
        HAS_FLAT_SCALES=HAS_FLAT_SCALES,
        HAS_ROW_SCALES=HAS_ROW_SCALES,
        ASM=ASM,
        UPCAST=UPCAST,
    )


def grouped_matmul(x: torch.Tensor, stack: Stack, routing: Routing) -> torch.Tensor:
    """Multiply each batch of rows by the transposed weight of its expert, in one launch (a trellis: in two).

    Args:
        x: [pairs, cols], bfloat16 or float16, in the order of places, columns contiguous; of any value after the last
            place.
        stack: the experts' weights, see `KernelWeight` and `TrellisOperands`.
        routing: places the rows of x; its tickets are zero before and after.

    Returns:
        [pairs, rows], dtype of x; undefined after the last place.

    Raises:
        KernelInputError: x does not fit the weights.
    """
    check_activations(x, stack)
    pairs = routing.ids.numel()
    dense = x.stride(1) == 1 or x.shape[1] == 1
    require(dense and len(x) == pairs, "x", f"{pairs} rows without gaps between columns",
            f"{tuple(x.shape)} of strides {x.stride()}")  # fmt: skip
    if isinstance(stack, TrellisOperands):
        return launch_grouped_trellis(x, stack, routing)
    weight, size, batches = replace(stack, tickets=routing.tickets), routing.size, len(routing.expert)
    config = decode_config(size, weight.bits, weight.arch, weight.group_size, tensor_core=True)
    # The columns of an invariant weight are cut as for one token, whatever the number of tokens.
    usual = routing.ids.shape[1] if weight.invariant else batches
    scratch = allocate_scratch(x, weight, config, size, batches, usual)
    y = torch.empty(pairs, weight.rows, dtype=x.dtype, device=x.device)
    batch = {
        "expert_ptr": routing.expert,
        "begin_ptr": routing.begin,
        "live_ptr": routing.live,
        "word_stride": weight.words.stride(0),
        "pair_stride": 0 if weight.scale_pairs is None else weight.scale_pairs.stride(0),
        "slice_stride": 0 if weight.slice_ptr is None else weight.slice_ptr.stride(0),
        "ticket_stride": weight.tickets.stride(0),
    }
    with torch.cuda.device_of(x):
        grid, arguments = launch_arguments(x, weight, y, config, scratch, size)
        ssqr_grouped[(*grid, batches)](**batch, **arguments)
    return y


def routed_experts(
    x: torch.Tensor,
    weights: torch.Tensor,
    ids: torch.Tensor,
    stacks: tuple[Stack, Stack],
    experts: int,
    activation: tuple[str, Sequence[float]],
    biases: Sequence[torch.Tensor] = (),
) -> torch.Tensor | None:
    """Return the weighted sum of each token's experts; None for more tokens than the decode kernel serves.

    Args:
        x: [tokens, hidden], bfloat16 or float16.
        weights: [tokens, k], factors of the experts' outputs.
        ids: integers [tokens, k]; a number outside the stacks is an expert of another rank, and adds nothing.
        stacks: the experts' weights of gate above up [2 * intermediate, hidden], or of up without a gate, and of down
            [hidden, intermediate].
        experts: number of experts on all ranks, from which the ids are chosen.
        activation: one of ACTIVATIONS, and its constants.
        biases: [experts, rows] of each of the stacks, dtype of x, contiguous; () for none.

    Returns:
        [tokens, hidden], dtype of x.
    """
    first, second = biases or (None, None)
    k = ids.shape[1]
    if not ids.numel() or batch_size(len(x), k, experts, stacks) is None:
        return None

    def chunk(x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        size = batch_size(len(x), k, experts, stacks)
        assert size is not None, "it was not for more tokens"
        routing = route(ids.contiguous(), size, stacks)
        gate_up = grouped_matmul(gather(x, routing), stacks[0], routing)
        name, constants = activation
        hidden = activate(gate_up, name, routing, constants, first)
        return combine(grouped_matmul(hidden, stacks[1], routing), weights.contiguous(), routing, second)

    chunks = zip(*(part.split(max(1, MOST_PAIRS // k)) for part in (x, weights, ids)), strict=True)
    outputs = [chunk(*parts) for parts in chunks]
    return outputs[0] if len(outputs) == 1 else torch.cat(outputs)
