"""Bits of weights in a GPU's memory while they are served: codes, scales, row order and words of outliers.

FORMAT.md, "Bits in memory", has the rules. A word holds one outlier as a column and a value. For integers with codes of
2, 3 or 4 bits, a word holds one or two digits from -8 to 7, the distances of two integers from the range of the codes,
at most 255 columns apart. A distance that is no digit is a sum of digits times powers of 4, one word each, and at most
one digit more. With codes of 8 bits, a word holds 8 significant bits of an integer.

Rows are sorted by their words, 128 at a time. The rows of each 16 in that order all take as many words as the longest
of them. Padding of tiles and room for a reload are not counted.

Invariant: these are the bytes of `kernels/layout/weight.py`, which is not imported (a test compares both).
"""

from collections.abc import Sequence

import torch

from vllm_latq.coding.packing import WORD_BITS, packed_words
from vllm_latq.format.scheme import SUPPORTED_BITS

PAIRED = (2, 3, 4)
# Typical bits of an outlier, by width: not every digit has a neighbour, and some outliers are far.
USUAL_OUTLIER_BITS = {2: 18, 3: 18, 4: 18, 8: 32}
_LEAST_DIGIT, _LARGEST_DIGIT, _LARGEST_GAP, _LARGEST_EXPONENT = -8, 7, 255, 15
# Weights whose outliers are counted at a time, so that their coordinates take little memory.
_BAND_WEIGHTS = 1 << 22
_SORTED_ROWS, _SLICE_ROWS = 128, 16


def served_bits(integers: torch.Tensor, bits: int | None = None, column_scales: bool = True) -> int:
    """Return `pack_integers(integers).served_bits()` for integers [rows, cols] without packing them."""
    rows, cols = integers.shape
    bits = bits or best_bits([integers])
    return served_overhead(rows, cols, bits, column_scales) + outlier_bits([integers], bits)


def served_overhead(rows: int, cols: int, bits: int, column_scales: bool = True) -> int:
    """Return all served bits except outliers: codes in whole words, scales of rows and columns, and `order_words`."""
    return WORD_BITS * (rows * packed_words(cols, bits) + order_words(rows) + rows + (cols if column_scales else 0))


def order_words(rows: int) -> int:
    """Return the words for the row permutation and the slice offsets of a weight that may have outliers."""
    return rows + -(-rows // _SLICE_ROWS) + 1


def slot_words(words: torch.Tensor) -> float:
    """Return the words that outliers take in memory if row i needs words[i], [rows].

    Rows are sorted, 128 at a time; 16 rows in that order have room for equally many words.
    """
    padded = torch.nn.functional.pad(words, (0, -len(words) % _SORTED_ROWS)).view(-1, _SORTED_ROWS)
    longest = padded.sort(dim=1, descending=True).values[:, ::_SLICE_ROWS]
    return _SLICE_ROWS * longest.sum().item()


def best_bits(
    *matrices: Sequence[torch.Tensor], widths: tuple[int, ...] = SUPPORTED_BITS, each: int | None = None
) -> int:
    """Return the width of codes in `widths` that takes the fewest bits, outliers included.

    Args:
        matrices: integers of each matrix, in blocks [rows, cols] that are stacked.
        widths: the widths to choose from.
        each: bits of an outlier; None counts them by `outlier_bits`.
    """
    blocks = [block for matrix in matrices for block in matrix]
    weights = sum(block.numel() for block in blocks)

    def least(bits: int) -> int:
        fewest = each or (WORD_BITS // 2 if bits in PAIRED else WORD_BITS)
        return bits * weights + fewest * sum(_count_outside(block, bits) for block in blocks)

    def taken(bits: int) -> int:
        return bits * weights + sum(outlier_bits(matrix, bits) for matrix in matrices)

    bounds = {bits: least(bits) for bits in widths}
    best, *others = sorted(widths, key=bounds.__getitem__)
    if each is None:  # words are counted only for widths whose lower limit is below the best width found
        found = taken(best)
        for bits in (bits for bits in others if bounds[bits] < found):
            best, found = min((best, found), (bits, taken(bits)), key=lambda choice: choice[1])
    return best


def outlier_bits(blocks: Sequence[torch.Tensor], bits: int) -> int:
    """Return the bits that outliers take with codes of `bits` bits, for integers in stacked blocks [rows, cols]."""
    words = []
    for band in (band for block in blocks for band in block.split(max(1, _BAND_WEIGHTS // max(block.shape[1], 1)))):
        rows, cols = _outside(band, bits).nonzero(as_tuple=True)
        values = band[rows, cols].to(torch.float32)  # the dtype of outliers in a CSR matrix
        words.append(outlier_words(rows, cols, values, bits, len(band)))
    return WORD_BITS * int(slot_words(torch.cat(words)))


def outlier_words(
    rows: torch.Tensor, cols: torch.Tensor, integers: torch.Tensor, bits: int, row_count: int
) -> torch.Tensor:
    """Return the words that the outliers of each row take, int64 [row_count].

    Args:
        rows, cols: int64 [n], places of the outliers, sorted by row, then column.
        integers: [n], the outliers, outside the range of the codes.
        bits: width of the codes.
        row_count: rows of the matrix.
    """
    words = torch.zeros(row_count, dtype=torch.int64, device=rows.device)
    if bits not in PAIRED:
        return words.index_add_(0, rows, _value_words(integers))
    z, zero = integers.to(torch.int64), 1 << (bits - 1)
    alone, left = _far_words(torch.where(z < 0, z + zero, z - zero + 1))
    # Neighbouring digits, without a word between them, are paired from the first one on.
    starts = torch.ones_like(left)
    starts[1:] = (rows.diff() != 0) | (cols.diff() > _LARGEST_GAP) | (alone[1:] > 0)
    digits = left.cumsum(0)
    before = (digits - left.to(torch.int64))[starts][starts.cumsum(0) - 1]
    begins = left & ((digits - before) % 2 == 1)
    return words.index_add_(0, rows, alone + begins)


def _value_words(values: torch.Tensor) -> torch.Tensor:
    """Return the number of bfloat16 values whose sum is each value, int64 [n]."""
    words, rest = torch.ones(len(values), dtype=torch.int64, device=values.device), values.to(torch.float64)
    for _ in range(2):
        rest = rest - rest.to(torch.bfloat16).to(torch.float64)
        words += rest != 0
    return words


def _far_words(distances: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the words that each distance takes alone, int64 [n], and whether a digit is left, bool [n]."""
    powers = 4 ** torch.arange(1, _LARGEST_EXPONENT + 1, device=distances.device)
    words, rest = torch.zeros_like(distances), distances.clone()
    far = ((distances < _LEAST_DIGIT) | (distances > _LARGEST_DIGIT)).nonzero()[:, 0]
    while far.numel():
        some = rest[far]
        power = powers[torch.bucketize(2 * some.abs(), 15 * powers[:-1])]
        some -= power * ((2 * some + power) // (2 * power)).clamp_(max=_LARGEST_DIGIT)
        words[far] += 1
        rest[far] = some
        far = far[(some < _LEAST_DIGIT) | (some > _LARGEST_DIGIT)]
    return words, rest != 0


def _outside(integers: torch.Tensor, bits: int) -> torch.Tensor:
    """Return a mask of the integers outside the range of codes of `bits` bits."""
    zero = 1 << (bits - 1)
    return (integers < -zero) | (integers >= zero)


def _count_outside(integers: torch.Tensor, bits: int) -> int:
    """Return the number of integers outside the range of codes of `bits` bits."""
    return int(torch.count_nonzero(_outside(integers, bits)))
