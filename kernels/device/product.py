"""The product of one piece of unpacked weights with activations, for the tensor-core kernel.

A piece is one group of a superblock, or half a superblock without groups: SIZE columns.
"""

import triton
import triton.language as tl

from vllm_latq.kernels.device.registers import below, opaque_copy, upper_rows
from vllm_latq.kernels.device.unpack import bias_piece, floats_piece


@triton.jit
def multiply(a, b, acc, UPCAST: tl.constexpr):
    """Return acc + a . b in float32. The interpreter multiplies raw bits of bf16, so it gets float32 operands."""
    if UPCAST:
        return tl.dot(a.to(tl.float32), b.to(tl.float32), acc, input_precision="ieee")
    else:
        return tl.dot(a, b, acc)


@triton.jit
def constant_dot(
    words,  # int32 [BLOCK_N, words]: plane 0 of the tile
    x,  # bf16 or fp16 [SIZE, BLOCK_M]
    P: tl.constexpr,
    SIZE: tl.constexpr,
    BITS: tl.constexpr,
    HALF: tl.constexpr,
    BIAS_ROWS: tl.constexpr,
    MIDRISE: tl.constexpr,
    PAIRED: tl.constexpr,
    UPCAST: tl.constexpr,
):
    """Return minus the bias times x, float32 [BLOCK_N, BLOCK_M]: the same in every row, computed on BIAS_ROWS rows.

    The constant operand is built from the loaded words (their bits cancel), so that the compiler gives both dots one
    operand layout: otherwise x would be read from shared memory twice and no longer copied asynchronously.
    """
    rows: tl.constexpr = words.shape[0]
    top = words
    if rows > BIAS_ROWS:
        top = upper_rows(top)
    if rows > 2 * BIAS_ROWS:
        top = upper_rows(top)
    if rows > 4 * BIAS_ROWS:
        top = upper_rows(top)
    zero = (top.to(tl.uint32, bitcast=True) >> 16 >> 16).to(tl.int32, bitcast=True)
    p = tl.zeros((BIAS_ROWS, x.shape[1]), tl.float32)
    bias = opaque_copy(bias_piece(zero, P, SIZE, BITS, 0, HALF, MIDRISE, PAIRED), P, PAIRED)
    p = multiply(bias, opaque_copy(x, 5, PAIRED), p, UPCAST)
    if BITS == 8:
        bias = opaque_copy(bias_piece(zero, P, SIZE, BITS, 1, HALF, MIDRISE, PAIRED), P, PAIRED)
        p = multiply(bias, opaque_copy(x, 1, PAIRED), p, UPCAST)
    if rows > BIAS_ROWS:
        p = below(p, p)
    if rows > 2 * BIAS_ROWS:
        p = below(p, p)
    if rows > 4 * BIAS_ROWS:
        p = below(p, p)
    return p


@triton.jit
def piece_product(
    a,  # int32 [BLOCK_N, words]: the planes of the tile, from `load_planes`
    b,
    c,
    d,
    x,  # bf16 or fp16 [SIZE, BLOCK_M]
    P: tl.constexpr,  # number of the piece in its superblock
    SIZE: tl.constexpr,
    BITS: tl.constexpr,
    HALF: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BIAS_DOT: tl.constexpr,
    BIAS_ROWS: tl.constexpr,
    MIDRISE: tl.constexpr,
    PAIRED: tl.constexpr,
    ASM: tl.constexpr,
    UPCAST: tl.constexpr,
):
    """Return the piece's integers, plus 1/2 if MIDRISE, times x: float32 [BLOCK_N, BLOCK_M]."""
    EXACT: tl.constexpr = not BIAS_DOT
    p = tl.zeros((BLOCK_N, x.shape[1]), tl.float32)
    w = floats_piece(a, b, c, d, P, SIZE, BITS, 0, HALF, MIDRISE, EXACT, PAIRED, ASM, UPCAST)
    p = multiply(w, opaque_copy(x, 3, PAIRED), p, UPCAST)
    if BITS == 8:
        w = floats_piece(a, b, c, d, P, SIZE, BITS, 1, HALF, MIDRISE, EXACT, PAIRED, ASM, UPCAST)
        p = multiply(w, opaque_copy(x, 4, PAIRED), p, UPCAST)
    if BIAS_DOT:
        # In a sum of its own, because in one sum each product waits for the one before it. Triton would make one sum of
        # `p + product`, and sees no product here; the last compiler stage makes it an addition.
        p -= constant_dot(a, x, P, SIZE, BITS, HALF, BIAS_ROWS, MIDRISE, PAIRED, UPCAST) * -1.0
    return p
