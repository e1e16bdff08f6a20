"""A canonical Huffman table and a stream encoded with it. FORMAT.md section 3.3."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from vllm_latq.coding.chunks import Chunks

MAX_LENGTH = 15
CHUNK_WEIGHTS = 1024
ESCAPE_BITS = 32
MAX_SYMBOLS = 4096


@dataclass(frozen=True)
class HuffmanTable:
    """A canonical code for first_symbol .. first_symbol + n - 1 and ESCAPE.

    Attributes:
        first_symbol: smallest integer with a place in the table.
        lengths: uint8 [n + 1], code length per symbol, ESCAPE last; 0 means unused.
    """

    first_symbol: int
    lengths: np.ndarray

    @property
    def escape(self) -> int:
        """Index of ESCAPE."""
        return len(self.lengths) - 1

    def codes(self) -> np.ndarray:
        """Return the canonical code words, uint32 [n + 1], right-aligned: shorter first, then by index."""
        codes = np.zeros(len(self.lengths), dtype=np.uint32)
        next_code, previous = 0, 0
        for index in _canonical_order(self.lengths):
            next_code <<= int(self.lengths[index]) - previous
            codes[index] = next_code
            next_code, previous = next_code + 1, int(self.lengths[index])
        return codes

    def lookup(self) -> tuple[np.ndarray, np.ndarray]:
        """Return, for each value of the next MAX_LENGTH bits, the symbol's index and the length of its code.

        Both are [2**15], int32 and int64. Bits that no code begins with have length 0.
        """
        order = _canonical_order(self.lengths)
        spans = 1 << (MAX_LENGTH - self.lengths[order].astype(np.int64))
        index = np.zeros(1 << MAX_LENGTH, dtype=np.int32)
        length = np.zeros(1 << MAX_LENGTH, dtype=np.int64)
        filled = int(spans.sum())
        index[:filled] = np.repeat(order, spans)
        length[:filled] = np.repeat(self.lengths[order].astype(np.int64), spans)
        return index, length


@dataclass(frozen=True)
class HuffmanStream:
    """An encoded integer matrix.

    Attributes:
        table: the code of the integers.
        chunk_bits: uint16 [row_blocks, col_blocks], encoded bits of each chunk.
        stream: int32 [words].
        shape: (rows, cols) of the integers.
    """

    table: HuffmanTable
    chunk_bits: torch.Tensor
    stream: torch.Tensor
    shape: tuple[int, int]

    def storage_bits(self) -> int:
        """Count all stored bits: stream words, table with its first symbol, chunk lengths."""
        return 32 * self.stream.numel() + table_bits(len(self.table.lengths)) + 16 * self.chunk_bits.numel()


def chunks_of(shape: Sequence[int]) -> Chunks:
    """Return how a matrix [rows, cols] is cut for this code."""
    rows, cols = shape
    return Chunks(rows, cols, CHUNK_WEIGHTS)


def table_bits(entries: int) -> int:
    """Return the stored bits of a table: one byte per length and the 32-bit first symbol."""
    return 8 * entries + 32


def _canonical_order(lengths: np.ndarray) -> np.ndarray:
    """Return the indices of the used symbols, shorter codes first, then by index."""
    used = np.nonzero(lengths)[0]
    return used[np.argsort(lengths[used], kind="stable")]
