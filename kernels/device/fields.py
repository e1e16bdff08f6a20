"""Constants by which a kernel turns a field of a packed word (`layout.fields`) into floats.

A kernel turns a field into floats with one `lop3`: (word >> shift) & mask ^ pattern. With the pattern's exponent chosen
so that the field's lowest bit is one unit, an even column's float equals bias + code, bias = 2^(mantissa - offset),
exactly. In the odd columns the pattern also flips the code and the sign: their float is code - bias - largest code. So
the biases of neighbouring columns nearly cancel in a dot product, and its partial sums, which tensor cores truncate,
stay small. bf16 has 7 mantissa bits, fp16 has 10, so each has its own shifts; the stored words are the same.

On a mid-rise grid fields are *raised*: they begin at bit 1 or above. Then their bias is at most 64, so the bf16 number
that is subtracted holds a half, too. This costs a shift for the fields that begin at bit 0 on other grids.
"""

import triton

from vllm_latq.kernels.layout import fields

planes_of = triton.constexpr_function(fields.planes)
words_of = triton.constexpr_function(fields.words)
segment_count = triton.constexpr_function(fields.segment_count)
field_segment = triton.constexpr_function(fields.field_segment)

# (shift, offset) of each field of a word: shift right (left where negative), then the field starts at bit `offset`.
_BF16 = {
    2: ((0, 0), (0, 2), (0, 4), (6, 0), (6, 2), (6, 4), (12, 0), (12, 2)),
    4: ((0, 0), (4, 0), (8, 0), (12, 0)),
    "a": ((0, 0), (0, 4), (7, 0), (7, 3), (13, 0)),
    "b": ((0, 0), (0, 3), (6, 0), (6, 3), (11, 1)),
    "c": ((0, 0), (0, 3), (6, 0), (6, 3), (10, 2)),
    "spare": (0, 11, 10, 3),  # shifts that bring the spare bits of a, b, c to bits 3, 4 and 5
}
_FP16 = {
    2: ((-6, 6), (-6, 8), (0, 4), (0, 6), (0, 8), (6, 4), (6, 6), (6, 8)),
    4: ((-6, 6), (0, 4), (2, 6), (6, 6)),
    "a": ((-4, 4), (0, 4), (0, 7), (6, 4), (6, 7)),
    "b": ((-4, 4), (0, 3), (0, 6), (7, 2), (7, 5)),
    "c": ((-4, 4), (0, 3), (0, 6), (6, 3), (6, 6)),
    "spare": (-4, 7, 6, 7),  # the same, to bits 7, 8 and 9
}


# Raised fields; fp16's begin higher anyway.
_RAISED = {
    2: ((-1, 1), (0, 2), (0, 4), (5, 1), (5, 3), (5, 5), (11, 1), (11, 3)),
    4: ((-1, 1), (3, 1), (7, 1), (11, 1)),
    "a": ((-1, 1), (0, 4), (6, 1), (6, 4), (12, 1)),
    "b": ((-1, 1), (0, 3), (5, 1), (5, 4), (11, 1)),
    "c": ((-1, 1), (0, 3), (5, 1), (5, 4), (10, 2)),
    "spare": _BF16["spare"],
}


@triton.constexpr_function
def field_plane(bits, field, digit):
    """Return the plane that a field is read from; `digit` 1 is the high digit of 8-bit codes."""
    if bits == 8:
        return 2 * digit + field // 4
    return {2: field // 8, 3: field // 5, 4: field // 4}[bits]


@triton.constexpr_function
def field_shift(bits, field, half, raised=False):
    """Return the right shift (left where negative) before the mask. `half`: the activations are fp16."""
    table = _FP16 if half else _RAISED if raised else _BF16
    if bits == 3:
        return table["abc"[field // 5]][field % 5][0]
    return table[4][field % 4][0] if bits in (4, 8) else table[2][field % 8][0]


@triton.constexpr_function
def field_offset(bits, field, half, raised=False):
    """Return the bit of the half-word where the shifted field starts."""
    table = _FP16 if half else _RAISED if raised else _BF16
    if bits == 3:
        return table["spare"][3] if field == 15 else table["abc"[field // 5]][field % 5][1]
    return table[4][field % 4][1] if bits in (4, 8) else table[2][field % 8][1]


@triton.constexpr_function
def spare_shift(plane, half):
    """Return the right shift that brings plane `plane`'s spare bit to bit field_offset(3, 15) + plane."""
    return (_FP16 if half else _BF16)["spare"][plane]


@triton.constexpr_function
def field_mask(bits, field, half, raised=False):
    """Return the field's bits in both halves of a word, after the shift."""
    width = 4 if bits == 8 else bits
    return ((1 << width) - 1 << field_offset(bits, field, half, raised)) * 0x10001


@triton.constexpr_function
def field_exponent(bits, field, half, digit, raised=False):
    """Return the exponent bits, in both halves, that make the field's lowest bit worth 1 (16 for the high digit)."""
    mantissa, excess = (10, 15) if half else (7, 127)
    exponent = excess + mantissa - field_offset(bits, field, half, raised) + 4 * digit
    return (exponent << mantissa) * 0x10001


@triton.constexpr_function
def field_pattern(bits, field, half, digit, raised=False):
    """Return the int32 that the masked field is xor-ed with: the exponent; in odd columns sign and code bits, too.

    The sign bit makes it negative.
    """
    flips = 0x8000_0000 | field_mask(bits, field, half, raised) & 0xFFFF_0000
    return (field_exponent(bits, field, half, digit, raised) | flips) - (1 << 32)


@triton.constexpr_function
def field_bias(bits, field, half, digit, odd=False, raised=False):
    """Return by how much the float exceeds the weight's integer (if raised, plus a half) in even or odd columns.

    It is exact in both types.
    """
    unit, width = (16 if digit else 1), (4 if bits == 8 else bits)
    zero_point = 0 if bits == 8 and not digit else 2 ** (bits - 1)
    if raised and not digit:
        zero_point -= 0.5
    bias = unit * 2 ** ((10 if half else 7) - field_offset(bits, field, half, raised))
    return zero_point - bias - unit * (2**width - 1) if odd else zero_point + bias


@triton.constexpr_function
def minus_pair(even, odd, half):
    """Return -even and -odd as fp16 or bf16 in the two halves of a signed int32.

    Both are multiples of 1/2, exact in the type.
    """
    mantissa, excess = (10, 15) if half else (7, 127)
    word = 0
    for place, value in ((0, -even), (16, -odd)):
        halves = int(2 * abs(value))
        exponent = halves.bit_length() - 1
        fraction = (halves << mantissa >> exponent) & (1 << mantissa) - 1
        word |= ((0x8000 if value < 0 else 0) | exponent - 1 + excess << mantissa | fraction) << place
    return word - (1 << 32) if word >> 31 else word


@triton.constexpr_function
def minus_bias(bits, field, half, digit, raised=False):
    """Return minus the biases of a field's even and odd columns, as a pair of floats in an int32."""
    even, odd = (field_bias(bits, field, half, digit, place, raised) for place in (False, True))
    return minus_pair(even, odd, half)
