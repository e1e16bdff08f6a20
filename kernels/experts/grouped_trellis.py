"""The product of `grouped.py` for experts in a trellis code: two launches, as in `decode/trellis.py`, for all batches.

Batches are the third dimension of both grids; the programs of an empty batch end at once.
"""

import torch
import triton
import triton.language as tl

from vllm_latq.kernels.configs import TRELLIS, TRELLIS_REGIMES
from vllm_latq.kernels.decode.dispatch import trellis_parts, trellis_scratch
from vllm_latq.kernels.decode.trellis import (
    activation_arguments,
    product_arguments,
    trellis_activations,
    trellis_tensor_core,
)
from vllm_latq.kernels.device.trellis import run_fields
from vllm_latq.kernels.experts.routing import Routing
from vllm_latq.kernels.layout.trellis import TrellisOperands


@triton.jit(do_not_specialize=("M", "K"))
def trellis_grouped_activations(
    expert_ptr,  # int32 [batches]: the expert of each batch
    begin_ptr,  # int32 [batches]: first row of x
    live_ptr,  # int32 [batches]: number of rows, 0 for an empty batch
    x_ptr,  # bf16 or fp16 [pairs, K], in the order of places
    column_ptr,  # int16 [experts, K]
    exponent_ptr,  # int8 [experts, K]
    part_word_ptr,  # int32 [batches, units, 4, COLUMNS, 16]
    factor_ptr,  # float32 [batches, units, COLUMNS]
    M,  # unused, because each batch has its own number of rows
    K,  # columns
    stride_xm,  # elements from one row of x to the next
    COLUMNS: tl.constexpr,
    STEPS: tl.constexpr,
    SMALLEST: tl.constexpr,
):
    """Grid (units, COLUMNS / 2, batches). Run `trellis_activations`, which has the parameters, on one batch."""
    batch, units = tl.program_id(2).to(tl.int64), tl.num_programs(0)
    M = tl.load(live_ptr + batch)
    if M == 0:
        return
    expert, begin = tl.load(expert_ptr + batch).to(tl.int64), tl.load(begin_ptr + batch).to(tl.int64)
    trellis_activations(
        x_ptr + begin * stride_xm, column_ptr + expert * K, exponent_ptr + expert * K,
        part_word_ptr + batch * units * (64 * COLUMNS), factor_ptr + batch * units * COLUMNS, M, K, stride_xm, COLUMNS,
        STEPS, SMALLEST,
    )  # fmt: skip


@triton.jit(do_not_specialize=("ticket_stride", "M", "N", "units"))
def trellis_grouped(
    expert_ptr,  # int32 [batches]: the expert of each batch
    begin_ptr,  # int32 [batches]: first row of x and of y
    live_ptr,  # int32 [batches]: number of rows, 0 for an empty batch
    ticket_stride,  # elements from one batch to the next, in ticket_ptr
    x_ptr,  # bf16 or fp16 [pairs, K], in the order of places
    parts_ptr,  # int8 [batches, units, 256 * COLUMNS]
    factor_ptr,  # float32 [batches, units, COLUMNS]
    word_ptr,  # int32: the rings of all experts
    unit_ptr,  # int16 [experts, row tiles, units]
    run_ptr,  # int16 [experts, row tiles, RUN_FIELDS]
    tile_ptr,  # int32 [experts, row tiles + 1, 4]
    tile_scale_ptr,  # float32 [experts, row tiles]
    exponent_ptr,  # int8 [experts, row tiles * 64]
    place_ptr,  # int32: kept weights of all experts
    value_ptr,  # bf16: what is added to them
    partial_ptr,  # float32 [batches, row tiles, parts, COLUMNS / 2, 64]; None unless SPLIT
    ticket_ptr,  # int32 [batches, ticket_stride]: zeros before and after
    y_ptr,  # [pairs, N], contiguous
    M,  # unused, because each batch has its own number of rows
    N,  # rows of the weight
    stride_xm,  # elements from one row of x to the next
    units,  # units of a row tile
    COLUMNS: tl.constexpr,
    STAGES: tl.constexpr,
    SPLIT: tl.constexpr,
    RATES: tl.constexpr,
    ASM: tl.constexpr,
    UPCAST: tl.constexpr,
):
    """Grid (row tiles, parts, batches). Run `trellis_tensor_core`, which has the parameters, on one batch."""
    batch, tiles = tl.program_id(2).to(tl.int64), tl.num_programs(0)
    M = tl.load(live_ptr + batch)
    if M == 0:
        return
    expert, begin = tl.load(expert_ptr + batch).to(tl.int64), tl.load(begin_ptr + batch).to(tl.int64)
    if partial_ptr is not None:
        partial_ptr += batch * tl.num_programs(1) * tiles * (32 * COLUMNS)
    trellis_tensor_core(
        x_ptr + begin * stride_xm, parts_ptr + batch * units * (256 * COLUMNS), factor_ptr + batch * units * COLUMNS,
        word_ptr, unit_ptr + expert * tiles * units, run_ptr + expert * tiles * run_fields(),
        tile_ptr + expert * (tiles + 1) * 4, tile_scale_ptr + expert * tiles, exponent_ptr + expert * tiles * 64,
        place_ptr, value_ptr, partial_ptr, ticket_ptr + batch * ticket_stride, y_ptr + begin * N, M, N, stride_xm,
        units, COLUMNS, STAGES, SPLIT, RATES, ASM, UPCAST,
    )  # fmt: skip


def launch_grouped_trellis(x: torch.Tensor, stack: TrellisOperands, routing: Routing) -> torch.Tensor:
    """Multiply batches of rows; arguments and result as for `grouped.grouped_matmul`, which checks them."""
    batches, columns = len(routing.expert), 2 * next(n for n in TRELLIS_REGIMES if n >= routing.size)
    # The columns of an invariant weight are cut as for one token, whatever the number of tokens.
    parts = trellis_parts(stack, TRELLIS, routing.ids.shape[1] if stack.invariant else batches)
    scratch = trellis_scratch(x, stack, columns, parts, batches)
    y = torch.empty(x.shape[0], stack.rows, dtype=x.dtype, device=x.device)
    batch = {"expert_ptr": routing.expert, "begin_ptr": routing.begin, "live_ptr": routing.live}
    product = product_arguments(x, stack, y, TRELLIS.stages, scratch)
    product |= {"ticket_ptr": routing.tickets, "ticket_stride": routing.tickets.stride(0)}
    with torch.cuda.device_of(x):
        trellis_grouped_activations[(stack.column_units, columns // 2, batches)](
            **batch, **activation_arguments(x, stack, scratch)
        )
        trellis_grouped[(stack.row_tiles, parts, batches)](**batch, **product)
    return y
