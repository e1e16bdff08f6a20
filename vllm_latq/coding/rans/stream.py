"""rANS coding of integer matrices with a table per class of rows and columns. FORMAT.md section 3.4.

    16-bit words of a chunk of `chunks`, of about 4096 integers: state low, state high, then what decoding reads, in
    that order; chunks follow each other without padding

Invariant: decoding a chunk ends in the state its encoding began with, after exactly its words; anything else is
refused. Asymmetric numeral systems: Duda, arXiv 1311.2540.
"""

from dataclasses import dataclass

import torch

from vllm_latq.coding.packing import pack_codes, unpack_codes
from vllm_latq.coding.rans.decoder import decode_chunks
from vllm_latq.coding.rans.encoder import chunks_of, encode_chunks, estimate_words
from vllm_latq.coding.rans.model import CLASS_BITS, Model, Table, choose_model
from vllm_latq.errors import REPAIR, CheckpointError

STREAM_TENSORS = ("row_class", "column_class", "table_ranges", "frequencies", "chunk_words", "stream")


@dataclass(frozen=True)
class RansStream:
    """An encoded integer matrix: the tensors of FORMAT.md section 3.4, on the CPU.

    Attributes:
        row_class: int32 [packed_words(rows, 4)], 4-bit codes.
        column_class: int32 [packed_words(cols, 4)], 4-bit codes.
        table_ranges: int32 [tables, 2], first symbol and number of symbols.
        frequencies: uint16 [entries], for each table those of its symbols and of ESCAPE.
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
        """Suffix -> tensor, as stored."""
        return {name: getattr(self, name) for name in STREAM_TENSORS}

    def storage_bits(self) -> int:
        """Everything stored: words, chunk lengths, tables, classes."""
        return sum(8 * tensor.element_size() * tensor.numel() for tensor in self.tensors().values())

    def model(self) -> Model:
        """Classes and tables, unpacked; of a validated stream only."""
        counts = self.table_ranges[:, 1].to(torch.int64) + 1
        entries = self.frequencies.to(torch.int64).split(counts.tolist())
        tables = [
            Table(int(first), entry.numpy()) for first, entry in zip(self.table_ranges[:, 0], entries, strict=True)
        ]
        return Model(*self.classes(), tables)

    def classes(self) -> tuple[torch.Tensor, torch.Tensor]:
        """row_class and column_class unpacked, int64 [rows] and [cols]."""
        return _unpack(self.row_class, self.shape[0]), _unpack(self.column_class, self.shape[1])


def encode(integers: torch.Tensor) -> RansStream:
    """Encode int32 [rows, cols], any values; both sizes positive."""
    model = choose_model(integers)
    chunk_words, stream = encode_chunks(integers, model)
    ranges = [(table.first, table.escape) for table in model.tables]
    entries = torch.cat([torch.from_numpy(table.frequencies) for table in model.tables])
    return RansStream(
        row_class=_pack(model.row_class),
        column_class=_pack(model.column_class),
        table_ranges=torch.tensor(ranges, dtype=torch.int32),
        frequencies=entries.to(torch.uint16),
        chunk_words=torch.from_numpy(chunk_words),
        stream=torch.from_numpy(stream),
        shape=(integers.shape[0], integers.shape[1]),
    )


def encoded_bits(integers: torch.Tensor) -> int:
    """`encode(integers).storage_bits()` without encoding: exact up to a word in a few chunks."""
    model = choose_model(integers)
    words = int(estimate_words(integers, model).sum())
    classes = sum(32 * _pack(codes).numel() for codes in (model.row_class, model.column_class))
    tables = sum(table.stored_bits() for table in model.tables)
    rows, cols = chunks_of(integers.shape).grid
    return 32 * -(-words // 2) + 16 * rows * cols + classes + tables


def decode_stream(stream: RansStream, where: str) -> torch.Tensor:
    """The integers of a validated stream, by numpy.

    Args:
        stream: what to decode.
        where: tensor name for errors.

    Returns:
        int32 [rows, cols] on the CPU.

    Raises:
        CheckpointError: the stream contradicts its tables, its classes or its chunk lengths.
    """
    integers, wrong = decode_chunks(stream.chunk_words, stream.stream, stream.model())
    if wrong is not None:
        expected = f"chunk {wrong} to end after its own number of words in the state it began with"
        raise CheckpointError(where, expected, "another end", REPAIR)
    return integers


def _pack(codes: torch.Tensor) -> torch.Tensor:
    return pack_codes(codes.cpu().unsqueeze(0), CLASS_BITS)[0]


def _unpack(packed: torch.Tensor, count: int) -> torch.Tensor:
    return unpack_codes(packed.cpu().unsqueeze(0), CLASS_BITS, count)[0].to(torch.int64)
