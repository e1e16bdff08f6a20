"""The stored form of a rANS-coded matrix, and its constants. FORMAT.md section 3.4.

    16-bit words of a chunk of `chunks`, of about 4096 integers: state low, state high, then the words in the order in
    which decoding reads them; chunks follow each other without padding

Invariant: a chunk that is decoded ends in the state its encoding began with, after exactly its words; any other chunk
is refused. Asymmetric numeral systems: Duda, arXiv 1311.2540.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from vllm_latq.coding.chunks import Chunks
from vllm_latq.coding.packing import pack_codes, unpack_codes
from vllm_latq.coding.rans.model import CLASS_BITS, Model, Table

CHUNK_WEIGHTS = 4096
# The coder reads and writes words of 16 bits; an int32 of the stored stream holds two of them.
STREAM_WORD_BITS = 16
STREAM_WORD_MASK = (1 << STREAM_WORD_BITS) - 1
STATE_LOW = 1 << STREAM_WORD_BITS
STATE_WORDS = 2
STREAM_TENSORS = ("row_class", "column_class", "table_ranges", "frequencies", "chunk_words", "stream")


@dataclass(frozen=True)
class RansStream:
    """An encoded integer matrix: the stream's tensors of FORMAT.md section 3.4, on the CPU.

    Attributes:
        row_class: int32 [packed_words(rows, 4)], 4-bit codes.
        column_class: int32 [packed_words(cols, 4)], 4-bit codes.
        table_ranges: int32 [tables, 2], first symbol and number of symbols.
        frequencies: uint16 [entries], for each table the frequencies of its symbols, then that of ESCAPE.
        chunk_words: uint16 [row_blocks, col_blocks], 16-bit words of each chunk.
        stream: int32 [words].
        shape: (rows, cols) of the integers.
    """

    row_class: torch.Tensor
    column_class: torch.Tensor
    table_ranges: torch.Tensor
    frequencies: torch.Tensor
    chunk_words: torch.Tensor
    stream: torch.Tensor
    shape: tuple[int, int]

    def tensors(self) -> dict[str, torch.Tensor]:
        """Return suffix -> tensor, as stored."""
        return {name: getattr(self, name) for name in STREAM_TENSORS}

    def storage_bits(self) -> int:
        """Count all stored bits: stream words, chunk lengths, tables, classes."""
        return sum(8 * tensor.element_size() * tensor.numel() for tensor in self.tensors().values())

    def model(self) -> Model:
        """Unpack classes and tables; the stream must be validated."""
        counts = self.table_ranges[:, 1].to(torch.int64) + 1
        entries = self.frequencies.to(torch.int64).split(counts.tolist())
        tables = [
            Table(int(first), entry.numpy()) for first, entry in zip(self.table_ranges[:, 0], entries, strict=True)
        ]
        return Model(*self.classes(), tables)

    def classes(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Unpack row_class and column_class, int64 [rows] and [cols]."""
        return unpack_classes(self.row_class, self.shape[0]), unpack_classes(self.column_class, self.shape[1])


def chunks_of(shape: Sequence[int]) -> Chunks:
    """Return how a matrix [rows, cols] is cut for this code."""
    rows, cols = shape
    return Chunks(rows, cols, CHUNK_WEIGHTS)


def pack_classes(classes: torch.Tensor) -> torch.Tensor:
    """Pack classes, int64 [n], as they are stored: int32 [packed_words(n, 4)] on the CPU."""
    return pack_codes(classes.cpu().unsqueeze(0), CLASS_BITS)[0]


def unpack_classes(packed: torch.Tensor, count: int) -> torch.Tensor:
    """Undo `pack_classes`: int64 [count] on the CPU."""
    return unpack_codes(packed.cpu().unsqueeze(0), CLASS_BITS, count)[0].to(torch.int64)
