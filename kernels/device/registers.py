"""Values rearranged in registers, in forms that Triton compiles to no exchange between lanes.

HALF: fp16 floats instead of bf16. PAIRED: take the columns in the order of `paired_words`.
"""

import triton
import triton.language as tl


@triton.jit
def opaque_copy(v, N: tl.constexpr, PAIRED: tl.constexpr):
    """Return a copy of v, bf16 or fp16, that Triton cannot recognise as v; copies of different N differ, too.

    Two dots with one operand would share it through shared memory (triton-lang/triton#11526, from Triton 3.8 on). A
    copy costs nothing, because the last compiler stage removes it. Without PAIRED v is returned itself: x stays in
    shared memory then, and a copy would be read from there and written back.
    """
    if PAIRED:
        bits = v.to(tl.uint16, bitcast=True)
        for _ in tl.static_range(N):
            bits = bits | (bits >> 8 >> 8)
        v = bits.to(v.dtype, bitcast=True)
    return v


@triton.jit
def beside(a, b):
    """Concatenate [R, C] and [R, C] along columns; in registers, because the new column bit is the highest."""
    return tl.reshape(tl.permute(tl.join(a, b), (0, 2, 1)), (a.shape[0], 2 * a.shape[1]))


@triton.jit
def below(a, b):
    """Concatenate [R, C] and [R, C] along rows, in registers."""
    return tl.reshape(tl.permute(tl.join(a, b), (2, 0, 1)), (2 * a.shape[0], a.shape[1]))


@triton.jit
def upper_rows(v):
    """Return the first half of the rows of [R, C], in registers."""
    top, _ = tl.split(tl.permute(tl.reshape(v, (2, v.shape[0] // 2, v.shape[1])), (1, 2, 0)))
    return top


@triton.jit
def paired_words(v):
    """Sort the words int32 [R, C] of each 32 columns (field half j, place t, word h) by h, t, j.

    A tensor core takes columns 2 t and 2 t + 8 of 16 in two neighbouring registers. The compiler, which sees `join`,
    would fill them from two vector loads, and every product would begin with moves. A dot product may take its columns
    in any order: in this order both registers come from one load, here and in `paired_columns`.
    """
    R: tl.constexpr = v.shape[0]
    C: tl.constexpr = v.shape[1]
    return tl.reshape(tl.permute(tl.reshape(v, (R, C // 16, 2, 4, 2)), (0, 1, 4, 3, 2)), (R, C))


@triton.jit
def paired_columns(x, M: tl.constexpr):
    """Arrange activations [columns / 16 * M, 16] as [columns, M], the columns in the order of `paired_words`."""
    columns: tl.constexpr = 16 * x.shape[0] // M
    v = tl.reshape(x, (columns // 32, 2, M, 4, 2, 2))  # 32 columns, half j, row, place t, word h, half-word
    return tl.reshape(tl.permute(v, (0, 4, 3, 1, 5, 2)), (columns, M))


@triton.jit
def halves(v, HALF: tl.constexpr, PAIRED: tl.constexpr):
    """Split words int32 [R, C] into floats [R, 2C]: low half, high half, low half, ..."""
    dtype: tl.constexpr = tl.float16 if HALF else tl.bfloat16
    if PAIRED:
        v = paired_words(v)
    low = v.to(tl.int16).to(dtype, bitcast=True)
    high = (v >> 16).to(tl.int16).to(dtype, bitcast=True)
    return tl.reshape(tl.join(low, high), (v.shape[0], 2 * v.shape[1]))
