"""Where each bit of a code is stored in a packed word.

256 consecutive codes of a row (a superblock) fill `planes` planes of `words` 32-bit words. A word is two 16-bit halves;
a *field* is one code per half of every word of a plane, so field f holds the codes

    k = f * 2 * words + 2 * word + half          (natural order: activations are never permuted)

    bits  planes  words  fields   layout of a half-word, least significant bit first
      2      2       8     16     a: f0..f7   b: f8..f15
      3      3       8     16     a: f0 s f1 f2 f3 f4   b: f5..f9 s   c: f10..f14 s   (the s bits are field 15)
      4      4       8     16     a: f0..f3   b: f4..f7   c: f8..f11   d: f12..f15
      8      4      16      8     low digits: a: f0..f3   b: f4..f7   high digits: c, d

(Eight words of a row fill all banks of shared memory by four rows, which a matrix fragment then reads at once.)
"""

from dataclasses import dataclass

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
    return {2: 2, 3: 3, 4: 4, 8: 4}[bits]


def words(bits: int) -> int:
    """32-bit words per row in one plane."""
    return 16 if bits == 8 else 8


def segment_count(bits, field):
    """Segments that a field is stored in."""
    return 3 if bits == 3 and field == 15 else 2 if bits == 8 else 1


def field_segment(bits, field, index, part):
    """Part 0 plane, 1 offset, 2 lowest code bit, 3 width, of segment `index` of a field."""
    if bits == 3:
        if field == 15:
            segment = ((0, 3, 0, 1), (1, 15, 1, 1), (2, 15, 2, 1))[index]
        else:
            offset = (0, 4, 7, 10, 13)[field] if field < 5 else 3 * (field % 5)
            segment = (field // 5, offset, 0, 3)
    elif bits == 2:
        segment = (field // 8, 2 * (field % 8), 0, 2)
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
