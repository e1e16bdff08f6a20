"""Bits of weights in a GPU's memory while they are served. FORMAT.md, "Bits in memory", has the rules.

A word holds one outlier, as a column and a bfloat16 value. Rows are sorted by their words, 128 at a time. The rows of
each 16 in that order all take as many words as the longest of them. Padding of tiles and room for a reload are not
counted.

Invariant: these are the bytes of `kernels/layout/weight.py`, which is not imported (a test compares both).
"""

from collections.abc import Sequence

import torch

from vllm_latq.coding.packing import WORD_BITS
from vllm_latq.format.csr import CSR
from vllm_latq.format.scheme import SUPPORTED_BITS

_SORTED_ROWS, _SLICE_ROWS = 128, 16


def outlier_bits(outliers: CSR) -> int:
    """Return the bits that outliers take: the order of the rows, the offsets of slices, and the words of slices."""
    words, rest = outliers.counts, outliers.values.to(torch.float64)
    rows = outliers.row_indices()
    for _ in range(2):  # a float32 is the sum of three bfloat16 numbers at most
        rest = rest - rest.to(torch.bfloat16).to(torch.float64)
        words = words.index_add(0, rows, (rest != 0).to(torch.int64))
    slices = -(-outliers.rows // _SLICE_ROWS)
    return WORD_BITS * (outliers.rows + slices + 1 + _slot_words(words))


def _slot_words(words: torch.Tensor) -> int:
    """Return the words that outliers take in slices if row i needs words[i], int64 [rows]."""
    padded = torch.nn.functional.pad(words, (0, -len(words) % _SORTED_ROWS)).view(-1, _SORTED_ROWS)
    longest = padded.sort(dim=1, descending=True).values[:, ::_SLICE_ROWS]
    return _SLICE_ROWS * int(longest.sum())


def best_bits(
    matrices: Sequence[torch.Tensor], widths: tuple[int, ...] = SUPPORTED_BITS, each: int | None = None
) -> int:
    """Return the width of codes in `widths` with which integers take the fewest bits.

    Args:
        matrices: integers [rows, cols] that share the width.
        widths: the widths to choose from.
        each: bits of an outlier, an integer outside the range of the codes; None for one word each, in slices.
    """

    def taken(bits: int) -> int:
        zero = 1 << (bits - 1)
        outside = torch.cat([((z < -zero) | (z >= zero)).sum(1) for z in matrices])
        outliers = WORD_BITS * _slot_words(outside) if each is None else each * int(outside.sum())
        return bits * sum(z.numel() for z in matrices) + outliers

    return min(widths, key=taken)
