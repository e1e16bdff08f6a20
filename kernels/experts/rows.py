"""Rows of (token, expert) pairs around the products of routed experts: gathered, activated, and combined.

Each kernel skips pairs without a place: their expert is on another rank.
"""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from vllm_latq.kernels.configs import COMPILER
from vllm_latq.kernels.errors import require
from vllm_latq.kernels.experts.activations import ACTIVATIONS, CONSTANTS, UNGATED
from vllm_latq.kernels.experts.routing import Routing

COLUMNS = 1024  # columns of a row that a program gathers, activates or combines


@triton.jit(do_not_specialize=("k",))
def gather_rows(
    x_ptr,  # bf16 or fp16 [tokens, K]
    place_ptr,  # int32 [pairs]: the row of out, or -1
    out_ptr,  # dtype of x [pairs, K]
    K,
    stride_xm,  # elements from one row of x to the next
    k,  # experts of a token
    COLUMNS: tl.constexpr,
):
    """Grid (pairs, columns / COLUMNS). Write each pair's row of x at its place."""
    pair = tl.program_id(0)
    place = tl.load(place_ptr + pair)
    if place >= 0:
        col = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
        x = tl.load(x_ptr + (pair // k).to(tl.int64) * stride_xm + col, mask=col < K)
        tl.store(out_ptr + place.to(tl.int64) * K + col, x, mask=col < K)


@triton.jit
def activate_rows(
    y_ptr,  # bf16 or fp16 [pairs, 2 * K], gate before up; without a gate [pairs, K]
    place_ptr,  # int32 [pairs]: the row of y and of out, or -1
    out_ptr,  # dtype of y [pairs, K]
    id_ptr,  # integers [pairs]: the expert of each pair; None without biases
    bias_ptr,  # dtype of y [experts, columns of y]: is added to y; None without biases
    K,
    ACTIVATION: tl.constexpr,  # a name of ACTIVATIONS, without UNGATED
    LIMIT: tl.constexpr,  # constants of the activation, see CONSTANTS
    ALPHA: tl.constexpr,
    BETA: tl.constexpr,
    GATED: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Grid (pairs, columns / COLUMNS). Write act(gate) * up, or act(up)."""
    pair = tl.program_id(0)
    place = tl.load(place_ptr + pair).to(tl.int64)
    if place >= 0:
        col = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
        gate_ptr = y_ptr + place * (2 * K if GATED else K) + col
        gate = tl.load(gate_ptr, mask=col < K, other=0.0).to(tl.float32)
        if bias_ptr is not None:
            own_ptr = bias_ptr + tl.load(id_ptr + pair).to(tl.int64) * (2 * K if GATED else K) + col
            gate += tl.load(own_ptr, mask=col < K, other=0.0).to(tl.float32)
        if ACTIVATION == "swiglu":
            gate = tl.minimum(gate, LIMIT, propagate_nan=tl.PropagateNan.ALL)
            hidden = gate / (1.0 + tl.exp(-ALPHA * gate))
        elif ACTIVATION == "gelu":
            hidden = gate * (0.5 + 0.5 * tl.erf(gate * 0.7071067811865476))
        elif ACTIVATION == "relu2":
            hidden = tl.maximum(gate, 0.0, propagate_nan=tl.PropagateNan.ALL)
            hidden *= hidden
        else:  # tanh(z) is 2 * sigmoid(2 * z) - 1
            inner = (
                gate if ACTIVATION != "gelu_tanh" else gate * (1.5957691216057308 + 0.07135481627159706 * gate * gate)
            )
            hidden = gate / (1.0 + tl.exp(-inner))
        if ACTIVATION == "swiglustep":
            hidden = tl.minimum(hidden, LIMIT, propagate_nan=tl.PropagateNan.ALL)
        if GATED:
            up = tl.load(gate_ptr + K, mask=col < K, other=0.0).to(tl.float32)
            if bias_ptr is not None:
                up += tl.load(own_ptr + K, mask=col < K, other=0.0).to(tl.float32)
            if ACTIVATION == "swiglu" or ACTIVATION == "swiglustep":
                up = tl.clamp(up, -LIMIT, LIMIT, propagate_nan=tl.PropagateNan.ALL)
            if ACTIVATION == "swiglu":
                up += BETA
            hidden *= up
        tl.store(out_ptr + place * K + col, hidden.to(out_ptr.dtype.element_ty), mask=col < K)


@triton.jit(do_not_specialize=("k",))
def combine_pairs(
    y_ptr,  # bf16 or fp16 [pairs, N]
    weight_ptr,  # floats [tokens, k]
    place_ptr,  # int32 [tokens, k]: the row of y, or -1
    out_ptr,  # dtype of y [tokens, N]
    id_ptr,  # integers [tokens, k]: the expert of each pair; None without biases
    bias_ptr,  # dtype of y [experts, N]: is added to y; None without biases
    N,
    k,  # experts of a token
    COLUMNS: tl.constexpr,
):
    """Grid (tokens, columns / COLUMNS). Write weighted sums of rows of y, in float32, rounded once."""
    token = tl.program_id(0)
    col = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    acc = tl.zeros((COLUMNS,), tl.float32)
    for pair in range(token * k, (token + 1) * k):
        place = tl.load(place_ptr + pair)
        if place >= 0:
            weight = tl.load(weight_ptr + pair).to(tl.float32)
            y = tl.load(y_ptr + place.to(tl.int64) * N + col, mask=col < N, other=0.0).to(tl.float32)
            if bias_ptr is not None:
                expert = tl.load(id_ptr + pair).to(tl.int64)
                y += tl.load(bias_ptr + expert * N + col, mask=col < N, other=0.0).to(tl.float32)
            acc += weight * y
    tl.store(out_ptr + token.to(tl.int64) * N + col, acc.to(out_ptr.dtype.element_ty), mask=col < N)


def gather(x: torch.Tensor, routing: Routing) -> torch.Tensor:
    """Return rows of x in the order of places.

    Args:
        x: [tokens, cols].

    Returns:
        [pairs, cols], dtype of x; undefined after the last place. A view of x if x has one row.
    """
    pairs, cols = routing.ids.numel(), x.shape[1]
    if x.stride(1) != 1:
        x = x.contiguous()
    if len(x) == 1:
        return x.expand(pairs, cols)
    out = torch.empty(pairs, cols, dtype=x.dtype, device=x.device)
    with torch.cuda.device_of(x):
        gather_rows[(pairs, -(-cols // COLUMNS))](
            x, routing.place, out, cols, x.stride(0), routing.ids.shape[1], COLUMNS=COLUMNS, **COMPILER
        )
    return out


def activate(
    y: torch.Tensor,
    activation: str,
    routing: Routing,
    constants: Sequence[float] = (),
    bias: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return act(gate) * up, or act(up), in float32, rounded once.

    Args:
        y: [pairs, 2 * cols], gate before up, or [pairs, cols] without a gate; contiguous, in the order of places.
        activation: one of ACTIVATIONS.
        constants: of the activation, see CONSTANTS.
        bias: [experts, columns of y], is added to y; contiguous.

    Returns:
        [pairs, cols], dtype of y; undefined after the last place.
    """
    require(activation in ACTIVATIONS, "activation", f"one of {', '.join(ACTIVATIONS)}", activation)
    names = CONSTANTS.get(activation, ())
    require(len(constants) == len(names), "constants", f"{', '.join(names) or 'none'} of {activation}", str(constants))
    gated = not activation.endswith(UNGATED)
    pairs, cols = y.shape[0], y.shape[1] // (2 if gated else 1)
    out = torch.empty(pairs, cols, dtype=y.dtype, device=y.device)
    given = dict(zip(names, constants, strict=True))
    with torch.cuda.device_of(y):
        activate_rows[(pairs, -(-cols // COLUMNS))](
            y, routing.place, out, None if bias is None else routing.ids, bias, cols,
            ACTIVATION=activation.removesuffix(UNGATED), LIMIT=given.get("limit"), ALPHA=given.get("alpha"),
            BETA=given.get("beta"), GATED=gated, COLUMNS=COLUMNS, **COMPILER,
        )  # fmt: skip
    return out


def combine(y: torch.Tensor, weights: torch.Tensor, routing: Routing, bias: torch.Tensor | None = None) -> torch.Tensor:
    """Return the sum of each token's rows of y [pairs, rows] times weights [tokens, k]: [tokens, rows].

    Sums are in float32, rounded once to the dtype of y; pairs without a place add nothing. `bias` [experts, rows],
    contiguous, is added to y.
    """
    tokens, k = routing.place.shape
    out = torch.empty(tokens, y.shape[1], dtype=y.dtype, device=y.device)
    with torch.cuda.device_of(y):
        combine_pairs[(tokens, -(-y.shape[1] // COLUMNS))](
            y, weights, routing.place, out, None if bias is None else routing.ids, bias, y.shape[1], k,
            COLUMNS=COLUMNS, **COMPILER,
        )  # fmt: skip
    return out
