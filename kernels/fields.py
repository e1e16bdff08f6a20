"""Where each bit of a code lives in a packed word, and how a kernel gets it out.

256 consecutive codes of a row (a superblock) fill `planes` planes of `words` 32-bit words. A word is two 16-bit halves;
a *field* is one code per half of every word of a plane, so field f holds the codes

    k = f * 2 * words + 2 * word + half          (natural order: activations are never permuted)

    bits  planes  words  fields   layout of a half-word, least significant bit first
      2      1      16      8     f0 f1 f2 f3 f4 f5 f6 f7
      3      3       8     16     a: f0 s f1 f2 f3 f4   b: f5..f9 s   c: f10..f14 s   (the s bits are field 15)
      4      2      16      8     f0 f1 f2 f3 | f4 f5 f6 f7
      8      4      16      8     as 4 bits, low digits in planes 0-1, high digits in planes 2-3

A kernel turns a field into floats with one `lop3`: (word >> shift) & mask | exponent. With the exponent chosen so that
the field's lowest bit is one unit, the float equals bias + code, bias = 2^(mantissa - offset), exactly. bf16 has 7
mantissa bits, fp16 has 10, so each has its own shifts; the stored words are the same.
"""

from dataclasses import dataclass

import triton

SUPERBLOCK = 256
SUPPORTED_BITS = (2, 3, 4, 8)
SUPPORTED_GROUPS = (32, 64, 128, -1)


@dataclass(frozen=True)
class Segment:
    """`width` bits of a code, from bit `low` up, at bit `offset` of the half-words of plane `plane`."""

    plane: int
    offset: int
    low: int
    width: int


def planes(bits: int) -> int:
    """Planes of 32-bit words per superblock."""
    return {2: 1, 3: 3, 4: 2, 8: 4}[bits]


def words(bits: int) -> int:
    """32-bit words per row in one plane."""
    return 8 if bits == 3 else 16


@triton.constexpr_function
def segment_count(bits, field):
    """Segments that a field is stored in."""
    return 3 if bits == 3 and field == 15 else 2 if bits == 8 else 1


@triton.constexpr_function
def field_segment(bits, field, index, part):
    """Part 0 plane, 1 offset, 2 lowest code bit, 3 width, of segment `index` of a field."""
    if bits == 3:
        if field == 15:
            segment = ((0, 3, 0, 1), (1, 15, 1, 1), (2, 15, 2, 1))[index]
        else:
            offset = (0, 4, 7, 10, 13)[field] if field < 5 else 3 * (field % 5)
            segment = (field // 5, offset, 0, 3)
    elif bits == 2:
        segment = (0, 2 * field, 0, 2)
    else:
        segment = (field // 4 + 2 * index, 4 * (field % 4), 4 * index, 4)
    return segment[part]


def storage(bits: int) -> list[list[Segment]]:
    """For each field, the segments that its code is stored in."""
    return [
        [
            Segment(*(field_segment(bits, field, index, part) for part in range(4)))
            for index in range(segment_count(bits, field))
        ]
        for field in range(SUPERBLOCK // (2 * words(bits)))
    ]


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
    "spare": (-4, 7, 6, 7),  # ... to bits 7, 8 and 9
}


@triton.constexpr_function
def field_plane(bits, field, digit):
    """Plane that a field is read from; `digit` 1 is the high digit of 8-bit codes."""
    if bits == 8:
        return 2 * digit + field // 4
    return {2: 0, 3: field // 5, 4: field // 4}[bits]


@triton.constexpr_function
def field_shift(bits, field, half):
    """Right shift (left where negative) before the mask. `half`: the activations are fp16."""
    table = _FP16 if half else _BF16
    if bits == 3:
        return table["abc"[field // 5]][field % 5][0]
    return table[4][field % 4][0] if bits in (4, 8) else table[2][field][0]


@triton.constexpr_function
def field_offset(bits, field, half):
    """Bit of the half-word where the shifted field starts."""
    table = _FP16 if half else _BF16
    if bits == 3:
        return table["spare"][3] if field == 15 else table["abc"[field // 5]][field % 5][1]
    return table[4][field % 4][1] if bits in (4, 8) else table[2][field][1]


@triton.constexpr_function
def spare_shift(plane, half):
    """Right shift that brings plane `plane`'s spare bit to bit field_offset(3, 15) + plane."""
    return (_FP16 if half else _BF16)["spare"][plane]


@triton.constexpr_function
def field_mask(bits, field, half):
    """The field's bits in both halves of a word, after the shift."""
    width = 4 if bits == 8 else bits
    return ((1 << width) - 1 << field_offset(bits, field, half)) * 0x10001


@triton.constexpr_function
def field_exponent(bits, field, half, digit):
    """Exponent bits, in both halves, that make the field's lowest bit worth 1 (16 for the high digit of 8 bits)."""
    mantissa, excess = (10, 15) if half else (7, 127)
    exponent = excess + mantissa - field_offset(bits, field, half) + 4 * digit
    return (exponent << mantissa) * 0x10001


@triton.constexpr_function
def field_bias(bits, field, half, digit):
    """What the float exceeds the weight's integer by: 2^(mantissa - offset) + zero point; exact in both types."""
    bias = 2 ** ((10 if half else 7) - field_offset(bits, field, half))
    if bits == 8:
        return 16 * bias + 128 if digit else bias
    return bias + 2 ** (bits - 1)


@triton.constexpr_function
def minus_pair(value, half):
    """Bits of -value (an integer, exact in the type) as fp16 or bf16, in both halves of a word, as a signed int32."""
    mantissa, excess = (10, 15) if half else (7, 127)
    exponent = value.bit_length() - 1
    bits = (exponent + excess << mantissa) | ((value << mantissa >> exponent) & (1 << mantissa) - 1)
    return ((bits | 0x8000) * 0x10001) - (1 << 32)


planes_of = triton.constexpr_function(planes)
words_of = triton.constexpr_function(words)
