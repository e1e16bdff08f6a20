"""Bits of weights in a GPU's memory while they are served: codes, scales, the order of rows, and words of outliers.

A word holds one outlier, as a column and a value, or of integer codes of 2, 3 or 4 bits two, as how far they lie beyond
the grid: digits from -8 to 7. A digit shares a word with the next one in its row if that is at most 255 columns away.
What is further beyond is a sum of digits times powers of 4, each a word, and a digit that is left. A value of more than
bfloat16's 8 bits takes a word for each 8.

Rows are sorted by their words, 128 at a time, and of each 16 in that order, the missing ones of the last among them,
all take as many as the longest does. What else is added to fill tiles, and as room for a reload, is not counted.

Invariant: these are the bytes of `kernels/layout/weight.py`, which is not imported (a test holds both together).
"""

from collections.abc import Sequence

import torch

from vllm_latq.coding.packing import WORD_BITS, packed_words
from vllm_latq.format.scheme import SUPPORTED_BITS

PAIRED = (2, 3, 4)
# Of an outlier, about: not every digit has a near one, and some outliers are far.
USUAL_OUTLIER_BITS = {2: 18, 3: 18, 4: 18, 8: 32}
_LEAST_DIGIT, _LARGEST_DIGIT, _LARGEST_GAP, _LARGEST_EXPONENT = -8, 7, 255, 15
# Weights whose outliers are counted at once, so that their coordinates stay small.
_BAND_WEIGHTS = 1 << 22
_SORTED_ROWS, _SLICE_ROWS = 128, 16


def served_bits(integers: torch.Tensor, bits: int | None = None, column_scales: bool = True) -> int:
    """`PackedWeight.served_bits` of what `pack_integers` makes of integers [rows, cols], with column scales or not."""
    rows, cols = integers.shape
    bits = bits or best_bits([integers])
    return served_overhead(rows, cols, bits, column_scales) + outlier_bits([integers], bits)


def served_overhead(rows: int, cols: int, bits: int, column_scales: bool = True) -> int:
    """Of those, all but the outliers: codes in whole words, scales of rows and of columns, and `order_words`."""
    return WORD_BITS * (rows * packed_words(cols, bits) + order_words(rows) + rows + (cols if column_scales else 0))


def order_words(rows: int) -> int:
    """Of a weight that may have outliers: which row is which, and where the outliers of each 16 begin."""
    return rows + -(-rows // _SLICE_ROWS) + 1


def slot_words(words: torch.Tensor) -> float:
    """Words in memory, of rows that need `words` of them, [rows]: 16 rows, sorted 128 at a time, have room for equally
    many."""
    padded = torch.nn.functional.pad(words, (0, -len(words) % _SORTED_ROWS)).view(-1, _SORTED_ROWS)
    longest = padded.sort(dim=1, descending=True).values[:, ::_SLICE_ROWS]
    return _SLICE_ROWS * longest.sum().item()


def best_bits(
    *matrices: Sequence[torch.Tensor], widths: tuple[int, ...] = SUPPORTED_BITS, each: int | None = None
) -> int:
    """The width of codes in `widths` that takes the fewest bits, outliers included.

    Args:
        matrices: their integers, in parts [rows, cols] that are stacked.
        each: bits of an outlier; None: as `outlier_bits` has them.
    """
    parts = [part for matrix in matrices for part in matrix]
    weights = sum(part.numel() for part in parts)

    def least(bits: int) -> int:
        fewest = each or (WORD_BITS // 2 if bits in PAIRED else WORD_BITS)
        return bits * weights + fewest * sum(_overflow(part, bits) for part in parts)

    def taken(bits: int) -> int:
        return bits * weights + sum(outlier_bits(matrix, bits) for matrix in matrices)

    bounds = {bits: least(bits) for bits in widths}
    best, *others = sorted(widths, key=bounds.__getitem__)
    if each is None:  # words are counted only where numbers alone do not say that a width is no better
        found = taken(best)
        for bits in (bits for bits in others if bounds[bits] < found):
            best, found = min((best, found), (bits, taken(bits)), key=lambda choice: choice[1])
    return best


def outlier_bits(parts: Sequence[torch.Tensor], bits: int) -> int:
    """Bits of the words of outliers of integers beyond codes of a width, of parts [rows, cols] that are stacked."""
    half, words = 1 << (bits - 1), []
    for band in (band for part in parts for band in part.split(max(1, _BAND_WEIGHTS // max(part.shape[1], 1)))):
        rows, cols = ((band < -half) | (band >= half)).nonzero(as_tuple=True)
        values = band[rows, cols].to(torch.float32)  # which a CSR matrix has
        words.append(outlier_words(rows, cols, values, bits, len(band)))
    return WORD_BITS * int(slot_words(torch.cat(words)))


def outlier_words(
    rows: torch.Tensor, cols: torch.Tensor, integers: torch.Tensor, bits: int, of_rows: int
) -> torch.Tensor:
    """Words of each row's integers beyond codes of a width, int64 [of_rows].

    Args:
        rows, cols: int64 [n], sorted by row, then column.
        integers: [n], beyond the grid.
        bits: of the codes.
        of_rows: of the matrix.
    """
    words = torch.zeros(of_rows, dtype=torch.int64, device=rows.device)
    if bits not in PAIRED:
        return words.index_add_(0, rows, _value_words(integers))
    z, half = integers.to(torch.int64), 1 << (bits - 1)
    beyond = torch.where(z < 0, z + half, z - half + 1)
    alone, left = _far_words(beyond)
    # Digits that are near each other, without a word between them, are paired from the first on.
    starts = torch.ones_like(left)
    starts[1:] = (rows.diff() != 0) | (cols.diff() > _LARGEST_GAP) | (alone[1:] > 0)
    digits = left.cumsum(0)
    before = (digits - left.to(torch.int64))[starts][starts.cumsum(0) - 1]
    begins = left & ((digits - before) % 2 == 1)
    return words.index_add_(0, rows, alone + begins)


def _value_words(values: torch.Tensor) -> torch.Tensor:
    """How many values of bfloat16 each is the sum of, int64 [n]."""
    words, rest = torch.ones(len(values), dtype=torch.int64, device=values.device), values.to(torch.float64)
    for _ in range(2):
        rest = rest - rest.to(torch.bfloat16).to(torch.float64)
        words += rest != 0
    return words


def _far_words(beyond: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """How many words each takes alone, int64 [n], and whether a digit is left, bool [n]."""
    powers = 4 ** torch.arange(1, _LARGEST_EXPONENT + 1, device=beyond.device)
    words, rest = torch.zeros_like(beyond), beyond.clone()
    far = ((beyond < _LEAST_DIGIT) | (beyond > _LARGEST_DIGIT)).nonzero()[:, 0]
    while far.numel():
        some = rest[far]
        power = powers[torch.bucketize(2 * some.abs(), 15 * powers[:-1])]
        some -= power * ((2 * some + power) // (2 * power)).clamp_(max=_LARGEST_DIGIT)
        words[far] += 1
        rest[far] = some
        far = far[(some < _LEAST_DIGIT) | (some > _LARGEST_DIGIT)]
    return words, rest != 0


def _overflow(integers: torch.Tensor, bits: int) -> int:
    half = 1 << (bits - 1)
    return int(torch.count_nonzero((integers < -half) | (integers >= half)))
