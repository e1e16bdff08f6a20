"""Bits of weights in a GPU's memory while they are served: codes, scales, row pointers, and words of outliers.

A word holds one outlier, as a column and a value, or of integer codes of 2, 3 or 4 bits two, as how far they lie beyond
the grid: digits from -8 to 7. A digit shares a word with the next one in its row if that is at most 255 columns away.
What is further beyond is a sum of digits times powers of 4, each a word, and a digit that is left. Padding of the
kernels' layout is not counted.

Invariant: these are the words that `kernels/entries.py` makes, which is not imported (a test holds both together).
"""

import torch

from vllm_latq.config import SUPPORTED_BITS
from vllm_latq.packing import packed_words

WORD_BITS = 32
PAIRED = (2, 3, 4)
# Of an outlier, about: not every digit has a near one, and some outliers are far.
USUAL_OUTLIER_BITS = {2: 18, 3: 18, 4: 18, 8: 32}
_LEAST_DIGIT, _LARGEST_DIGIT, _LARGEST_GAP, _LARGEST_EXPONENT = -8, 7, 255, 15
# Weights whose outliers are counted at once, so that their coordinates stay small.
_BAND_WEIGHTS = 1 << 22


def served_bits(integers: torch.Tensor, bits: int | None = None, column_scales: bool = True) -> int:
    """`PackedWeight.served_bits` of what `pack_integers` makes of integers [rows, cols], with column scales or not."""
    rows, cols = integers.shape
    bits = bits or best_bits(integers)
    return served_overhead(rows, cols, bits, column_scales) + outlier_bits(integers, bits)


def served_overhead(rows: int, cols: int, bits: int, column_scales: bool = True) -> int:
    """Of those, all but the outliers: codes in whole words, row pointers, scales of rows and of columns."""
    return WORD_BITS * (rows * packed_words(cols, bits) + (rows + 1) + rows + (cols if column_scales else 0))


def best_bits(*matrices: torch.Tensor, widths: tuple[int, ...] = SUPPORTED_BITS, each: int | None = None) -> int:
    """The width of codes in `widths` that takes the fewest bits, outliers included, over integers [rows, cols].

    Args:
        each: bits of an outlier; None: as `outlier_bits` has them.
    """

    def least(bits: int) -> int:
        fewest = each or (WORD_BITS // 2 if bits in PAIRED else WORD_BITS)
        return sum(bits * z.numel() + fewest * _overflow(z, bits) for z in matrices)

    def taken(bits: int) -> int:
        return sum(bits * z.numel() + outlier_bits(z, bits) for z in matrices)

    bounds = {bits: least(bits) for bits in widths}
    best, *others = sorted(widths, key=bounds.__getitem__)
    if each is None:  # words are counted only where numbers alone do not say that a width is no better
        found = taken(best)
        for bits in (bits for bits in others if bounds[bits] < found):
            best, found = min((best, found), (bits, taken(bits)), key=lambda choice: choice[1])
    return best


def outlier_bits(integers: torch.Tensor, bits: int) -> int:
    """Bits of the words of outliers of integers [rows, cols] beyond codes of a width."""
    if bits not in PAIRED:
        return WORD_BITS * _overflow(integers, bits)
    half, words = 1 << (bits - 1), 0
    for band in integers.split(max(1, _BAND_WEIGHTS // max(integers.shape[1], 1))):
        rows, cols = ((band < -half) | (band >= half)).nonzero(as_tuple=True)
        words += outlier_words(rows, cols, band[rows, cols], bits)
    return WORD_BITS * words


def outlier_words(rows: torch.Tensor, cols: torch.Tensor, integers: torch.Tensor, bits: int) -> int:
    """Words of integers beyond codes of 2, 3 or 4 bits.

    Args:
        rows, cols: int64 [n], sorted by row, then column.
        integers: [n], beyond the grid.
        bits: of the codes.
    """
    z, half = integers.to(torch.int64), 1 << (bits - 1)
    beyond = torch.where(z < 0, z + half, z - half + 1)
    alone, left = _far_words(beyond)
    # Digits that are near each other, without a word between them, are paired from the first on.
    apart = (rows.diff() != 0) | (cols.diff() > _LARGEST_GAP) | (alone[1:] > 0) | ~left[:-1]
    runs = torch.nn.functional.pad(apart.cumsum(0), (1, 0))[: len(rows)]
    digits = torch.zeros(len(rows), dtype=torch.int64, device=rows.device).index_add_(0, runs, left.to(torch.int64))
    return int(alone.sum() + ((digits + 1) // 2).sum())


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
