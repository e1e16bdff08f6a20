"""Packed words -> floats in registers, for the kernels. The bit positions are those of `fields.py`.

The floats exceed the weights' integers, on a MIDRISE grid with a half, by a bias that depends only on the field and on
whether the column is even. Parameters that many functions share:

    a, b, c, d  int32 [R, words]: the planes of a tile's superblock, from `load_planes`
    F           number of a field of the superblock
    P, SIZE     number of a piece of the superblock, and its columns: 32, 64 or 128
    BITS        of a code: 2, 3, 4 or 8
    DIGIT       of 8-bit codes, 1 for the high digit and 0 for the low one; else 0
    HALF        fp16 floats instead of bf16
    MIDRISE     the grid lies half a step above the integers
    EXACT       subtract the bias from the floats
    PAIRED      take the columns in the order of `registers.paired_words`
    ASM         use NVIDIA inline assembly, which keeps the two halves of a word together (with plain operators the
                compiler splits them and doubles the work)
    UPCAST      return float32, for Triton's interpreter
"""

import triton
import triton.language as tl

from vllm_latq.kernels.device.fields import (
    field_mask,
    field_offset,
    field_pattern,
    field_plane,
    field_shift,
    minus_bias,
    spare_shift,
    words_of,
)
from vllm_latq.kernels.device.registers import beside, halves
from vllm_latq.kernels.device.tiles import plane


@triton.jit
def mask_xor(v, mask: tl.constexpr, pattern, ASM: tl.constexpr):
    """Return (v & mask) ^ pattern, by one instruction."""
    if ASM:
        return tl.inline_asm_elementwise(
            "lop3.b32 $0, $1, $2, $3, 0x6a;", "=r,r,r,r", [v, mask, pattern], dtype=tl.int32, is_pure=True, pack=1
        )
    else:
        return (v & mask) ^ pattern


@triton.jit
def shifted(v, shift: tl.constexpr):
    """Return v >> shift, or v << -shift. The sign bits that a right shift brings in are masked off later."""
    if shift > 0:
        return v >> shift
    elif shift < 0:
        return v << (-shift)
    else:
        return v


@triton.jit
def add_pair(v, addend: tl.constexpr, HALF: tl.constexpr):
    """Return v + addend in both halves. bf16 has no packed sum before sm_90: a fused multiply-add is exact, too.

    It computes -1 * -addend + v: with v as a factor, the machine code would load the 1 again for every word.
    """
    if HALF:
        return tl.inline_asm_elementwise(
            "add.rn.f16x2 $0, $1, $2;", "=r,r,r", [v, addend], dtype=tl.int32, is_pure=True, pack=1
        )
    else:
        signs: tl.constexpr = -2147450880  # 0x80008000
        return tl.inline_asm_elementwise(
            "{ .reg .b32 minus; mov.b32 minus, 0xBF80BF80; fma.rn.bf16x2 $0, minus, $2, $1; }",
            "=r,r,r", [v, addend ^ signs], dtype=tl.int32, is_pure=True, pack=1,
        )  # fmt: skip


@triton.jit
def spare_field(a, b, c, HALF: tl.constexpr, ASM: tl.constexpr):
    """Return field 15 of 3-bit codes: one bit from each plane."""
    first: tl.constexpr = 0x10001 << field_offset(3, 15, HALF)
    v = mask_xor(shifted(a, spare_shift(0, HALF)), first, field_pattern(3, 15, HALF, 0), ASM)
    v = mask_xor(shifted(b, spare_shift(1, HALF)), 2 * first, v, ASM)
    return mask_xor(shifted(c, spare_shift(2, HALF)), 4 * first, v, ASM)


@triton.jit
def field(
    a,
    b,
    c,
    d,
    F: tl.constexpr,
    BITS: tl.constexpr,
    DIGIT: tl.constexpr,
    HALF: tl.constexpr,
    MIDRISE: tl.constexpr,
    EXACT: tl.constexpr,
    ASM: tl.constexpr,
):
    """Return field F as pairs of floats, int32 [R, words]: bias + integer; with EXACT the integer (needs ASM)."""
    if BITS == 3 and F == 15:
        v = spare_field(a, b, c, HALF, ASM)
    else:
        v = shifted(plane(a, b, c, d, field_plane(BITS, F, DIGIT)), field_shift(BITS, F, HALF, MIDRISE))
        v = mask_xor(v, field_mask(BITS, F, HALF, MIDRISE), field_pattern(BITS, F, HALF, DIGIT, MIDRISE), ASM)
    if EXACT:
        v = add_pair(v, minus_bias(BITS, F, HALF, DIGIT, MIDRISE), HALF)
    return v


@triton.jit
def bias_field(
    zero, F: tl.constexpr, BITS: tl.constexpr, DIGIT: tl.constexpr, HALF: tl.constexpr, MIDRISE: tl.constexpr
):
    """Return minus the bias of field F, as pairs of floats: int32 [R, words]. zero: int32 zeros [R, words]."""
    return zero | minus_bias(BITS, F, HALF, DIGIT, MIDRISE)


@triton.jit
def words32(
    a,
    b,
    c,
    d,
    P: tl.constexpr,
    BITS: tl.constexpr,
    DIGIT: tl.constexpr,
    HALF: tl.constexpr,
    MIDRISE: tl.constexpr,
    EXACT: tl.constexpr,
    ASM: tl.constexpr,
):
    """Return codes 32 P .. 32 P + 31 of a superblock as pairs of floats, int32 [R, 16]."""
    if words_of(BITS) == 8:
        left = field(a, b, c, d, 2 * P, BITS, DIGIT, HALF, MIDRISE, EXACT, ASM)
        right = field(a, b, c, d, 2 * P + 1, BITS, DIGIT, HALF, MIDRISE, EXACT, ASM)
        return beside(left, right)
    else:
        return field(a, b, c, d, P, BITS, DIGIT, HALF, MIDRISE, EXACT, ASM)


@triton.jit
def words64(
    a,
    b,
    c,
    d,
    P: tl.constexpr,
    BITS: tl.constexpr,
    DIGIT: tl.constexpr,
    HALF: tl.constexpr,
    MIDRISE: tl.constexpr,
    EXACT: tl.constexpr,
    ASM: tl.constexpr,
):
    """Return codes 64 P .. 64 P + 63 of a superblock as pairs of floats, int32 [R, 32]."""
    left = words32(a, b, c, d, 2 * P, BITS, DIGIT, HALF, MIDRISE, EXACT, ASM)
    right = words32(a, b, c, d, 2 * P + 1, BITS, DIGIT, HALF, MIDRISE, EXACT, ASM)
    return beside(left, right)


@triton.jit
def words_piece(
    a,
    b,
    c,
    d,
    P: tl.constexpr,
    SIZE: tl.constexpr,
    BITS: tl.constexpr,
    DIGIT: tl.constexpr,
    HALF: tl.constexpr,
    MIDRISE: tl.constexpr,
    EXACT: tl.constexpr,
    ASM: tl.constexpr,
):
    """Return codes SIZE * P .. SIZE * (P + 1) - 1 of a superblock as pairs of floats, int32 [R, SIZE / 2]."""
    if SIZE == 32:
        return words32(a, b, c, d, P, BITS, DIGIT, HALF, MIDRISE, EXACT, ASM)
    elif SIZE == 64:
        return words64(a, b, c, d, P, BITS, DIGIT, HALF, MIDRISE, EXACT, ASM)
    else:
        left = words64(a, b, c, d, 2 * P, BITS, DIGIT, HALF, MIDRISE, EXACT, ASM)
        right = words64(a, b, c, d, 2 * P + 1, BITS, DIGIT, HALF, MIDRISE, EXACT, ASM)
        return beside(left, right)


@triton.jit
def bias32(zero, P: tl.constexpr, BITS: tl.constexpr, DIGIT: tl.constexpr, HALF: tl.constexpr, MIDRISE: tl.constexpr):
    """Return minus the bias of `words32`, as pairs of floats, int32 [R, 16]."""
    if words_of(BITS) == 8:
        left = bias_field(zero, 2 * P, BITS, DIGIT, HALF, MIDRISE)
        return beside(left, bias_field(zero, 2 * P + 1, BITS, DIGIT, HALF, MIDRISE))
    else:
        return bias_field(zero, P, BITS, DIGIT, HALF, MIDRISE)


@triton.jit
def bias64(zero, P: tl.constexpr, BITS: tl.constexpr, DIGIT: tl.constexpr, HALF: tl.constexpr, MIDRISE: tl.constexpr):
    """Return minus the bias of `words64`, as pairs of floats, int32 [R, 32]."""
    left = bias32(zero, 2 * P, BITS, DIGIT, HALF, MIDRISE)
    return beside(left, bias32(zero, 2 * P + 1, BITS, DIGIT, HALF, MIDRISE))


@triton.jit
def bias_piece(
    zero,
    P: tl.constexpr,
    SIZE: tl.constexpr,
    BITS: tl.constexpr,
    DIGIT: tl.constexpr,
    HALF: tl.constexpr,
    MIDRISE: tl.constexpr,
    PAIRED: tl.constexpr,
):
    """Return minus the bias of `floats_piece`, bf16 or fp16 [R, SIZE], the same in every row."""
    if SIZE == 32:
        v = bias32(zero, P, BITS, DIGIT, HALF, MIDRISE)
    elif SIZE == 64:
        v = bias64(zero, P, BITS, DIGIT, HALF, MIDRISE)
    else:
        left = bias64(zero, 2 * P, BITS, DIGIT, HALF, MIDRISE)
        v = beside(left, bias64(zero, 2 * P + 1, BITS, DIGIT, HALF, MIDRISE))
    return halves(v, HALF, PAIRED)


@triton.jit
def floats_piece(
    a,
    b,
    c,
    d,
    P: tl.constexpr,
    SIZE: tl.constexpr,
    BITS: tl.constexpr,
    DIGIT: tl.constexpr,
    HALF: tl.constexpr,
    MIDRISE: tl.constexpr,
    EXACT: tl.constexpr,
    PAIRED: tl.constexpr,
    ASM: tl.constexpr,
    UPCAST: tl.constexpr,
):
    """Return bias + integer of a piece, or with EXACT the integers: bf16 or fp16 [R, SIZE], float32 with UPCAST."""
    v = halves(words_piece(a, b, c, d, P, SIZE, BITS, DIGIT, HALF, MIDRISE, EXACT and ASM, ASM), HALF, PAIRED)
    if UPCAST:
        v = v.to(tl.float32)
    if EXACT and not ASM:
        zero = tl.zeros((v.shape[0], words_of(BITS)), tl.int32)
        bias = bias_piece(zero, P, SIZE, BITS, DIGIT, HALF, MIDRISE, PAIRED)
        v = (v.to(tl.float32) + bias.to(tl.float32)).to(v.dtype)
    return v
