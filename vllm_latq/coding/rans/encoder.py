"""Encode integer matrices by rANS: all chunks advance together, by one integer of each chunk per step.

    decoding        slot = x mod 4096 -> symbol, f, start       x = f * (x div 4096) + slot - start
                    if x < 2**16:  x = x * 2**16 + next word
    an ESCAPE       twice:  raw = x mod 2**16,  x = (x div 2**16) * 2**16 + next word;  the upper 16 bits come first
    encoding        the inverse steps from the last integer to the first, beginning with x = 2**16

Invariant: 2**16 <= x < 2**32 between steps, so that a symbol emits at most one word (an escape two more).
"""

from collections.abc import Iterator

import numpy as np
import torch

from vllm_latq.coding.packing import WORD_BITS
from vllm_latq.coding.rans.model import ESCAPE_BITS, FREQUENCY_TOTAL, PROBABILITY_BITS, Model, choose_model
from vllm_latq.coding.rans.stream import (
    STATE_LOW,
    STATE_WORDS,
    STREAM_WORD_BITS,
    STREAM_WORD_MASK,
    RansStream,
    chunks_of,
    pack_classes,
)

# Chunks handled at a time: bounds the temporaries to some hundred MB.
_SLAB_CHUNKS = 2048


def encode(integers: torch.Tensor) -> RansStream:
    """Encode int32 [rows, cols] of any values; both sizes are positive."""
    model = choose_model(integers)
    chunk_words, stream = encode_chunks(integers, model)
    ranges = [(table.first, table.escape) for table in model.tables]
    entries = torch.cat([torch.from_numpy(table.frequencies) for table in model.tables])
    return RansStream(
        row_class=pack_classes(model.row_class),
        column_class=pack_classes(model.column_class),
        table_ranges=torch.tensor(ranges, dtype=torch.int32),
        frequencies=entries.to(torch.uint16),
        chunk_words=torch.from_numpy(chunk_words),
        stream=torch.from_numpy(stream),
        shape=(integers.shape[0], integers.shape[1]),
    )


def encoded_bits(integers: torch.Tensor) -> int:
    """Return the stored bits of `encode(integers)` without encoding: exact up to one word in a few chunks."""
    model = choose_model(integers)
    words = int(estimate_words(integers, model).sum())
    classes = sum(WORD_BITS * pack_classes(codes).numel() for codes in (model.row_class, model.column_class))
    tables = sum(table.stored_bits() for table in model.tables)
    rows, cols = chunks_of(integers.shape).grid
    return WORD_BITS * -(-words // 2) + STREAM_WORD_BITS * rows * cols + classes + tables


class _Lookup:
    """Frequency, first slot and escape flag of each (table, integer) of one model, flat.

    The integers covered are those of any table and one more at either end, which stands for all integers further out.
    The last entry has the whole frequency: it codes nothing, and is used where a short chunk has no integer.
    """

    def __init__(self, model: Model) -> None:
        self.low = min(table.first for table in model.tables) - 1
        high = max(table.first + table.escape for table in model.tables)
        self.size = high - self.low + 1
        integers = self.low + np.arange(self.size)
        symbols = [table.symbols(integers) for table in model.tables]
        pairs = list(zip(model.tables, symbols, strict=True))
        self.frequency = np.concatenate([table.frequencies[symbol] for table, symbol in pairs] + [[FREQUENCY_TOTAL]])
        self.start = np.concatenate([table.starts()[symbol] for table, symbol in pairs] + [[0]])
        self.escaped = np.concatenate([symbol == table.escape for table, symbol in pairs] + [[False]])

    def indices(self, integers: torch.Tensor, row_class: torch.Tensor, column_class: torch.Tensor) -> torch.Tensor:
        """Return the entry of each weight, int64, arranged as by `Chunks.split`."""
        table = row_class.unsqueeze(1) + column_class
        entry = (integers.to(torch.int64) - self.low).clamp_(0, self.size - 1).add_(table * self.size)
        return chunks_of(integers.shape).split(entry, len(self.frequency) - 1)

    def bits(self) -> np.ndarray:
        """Return the information in each entry, float64 bits; 0 for an entry that cannot be used."""
        bits = PROBABILITY_BITS - np.log2(np.maximum(self.frequency, 1))
        return np.where(self.frequency > 0, bits + ESCAPE_BITS * self.escaped, 0)


def estimate_words(integers: torch.Tensor, model: Model) -> torch.Tensor:
    """Estimate the 16-bit words of each chunk, int64 [row_blocks, col_blocks], from the information in it.

    The state always holds at least 16 bits of information, so a word is emitted for every 16 bits. The coder loses far
    less than a bit per chunk: the estimate is one word off where the information is that close to a multiple of 16.
    """
    lookup = _Lookup(model)
    bits = torch.from_numpy(lookup.bits()).to(integers.device)
    rounding = 1e-6
    sums = [bits[lookup.indices(slab, rows, model.column_class)].sum(0) for slab, rows in _slabs(integers, model)]
    return STATE_WORDS + ((torch.cat(sums) + rounding) / STREAM_WORD_BITS).floor().to(torch.int64)


def encode_chunks(integers: torch.Tensor, model: Model) -> tuple[np.ndarray, np.ndarray]:
    """Encode int32 [rows, cols]: return the words of each chunk, uint16 [row_blocks, col_blocks], and the stream.

    The stream is int32 [words].
    """
    lookup = _Lookup(model)
    words, counts = [], []
    for slab, rows in _slabs(integers.cpu(), Model(model.row_class.cpu(), model.column_class.cpu(), model.tables)):
        index = lookup.indices(slab, rows, model.column_class.cpu()).numpy()
        values = chunks_of(slab.shape).split(slab, 0).numpy()
        steps = len(index)
        slab_words, slab_counts = _encode(values.reshape(steps, -1), index.reshape(steps, -1), lookup)
        words.append(slab_words)
        counts.append(slab_counts.reshape(index.shape[1:]))
    stream = np.concatenate(words)
    stream = np.append(stream, np.zeros(len(stream) % 2, dtype=np.uint16))
    return np.concatenate(counts).astype(np.uint16), stream.view(np.int32)


def _slabs(integers: torch.Tensor, model: Model) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Cut the matrix into slabs of whole chunks: yield rows of the matrix with their classes."""
    chunks = chunks_of(integers.shape)
    rows = max(1, _SLAB_CHUNKS // chunks.grid[1]) * chunks.shape[0]
    yield from zip(integers.split(rows), model.row_class.split(rows), strict=True)


def _encode(values: np.ndarray, index: np.ndarray, lookup: _Lookup) -> tuple[np.ndarray, np.ndarray]:
    """Encode chunks: return the words of all chunks, uint16, one chunk after the other, and the words of each.

    Args:
        values: int32 [steps, chunks], the integers.
        index: int64 [steps, chunks], their entries in `lookup`.
        lookup: frequencies and slots.
    """
    steps, chunks = index.shape
    escaped = lookup.escaped[index]
    room = STATE_WORDS + steps + ESCAPE_BITS // STREAM_WORD_BITS * int(escaped.sum(0).max())
    # Encoding emits the last word first: each chunk fills its row of the buffer from the end.
    buffer = np.zeros((chunks, room), dtype=np.uint16)
    position = np.full(chunks, room)

    def emit(state: np.ndarray, where: np.ndarray) -> None:
        chunk = np.nonzero(where)[0]
        position[chunk] -= 1
        buffer[chunk, position[chunk]] = state[chunk] & STREAM_WORD_MASK

    state = np.full(chunks, STATE_LOW, dtype=np.int64)
    escapes = escaped.any(1)
    for step in reversed(range(steps)):
        if escapes[step]:
            raw = values[step].astype(np.int64)
            for part in (raw, raw >> STREAM_WORD_BITS):
                emit(state, escaped[step])
                state = np.where(escaped[step], (state & ~STREAM_WORD_MASK) | (part & STREAM_WORD_MASK), state)
        frequency = lookup.frequency[index[step]]
        full = state >= frequency << (2 * STREAM_WORD_BITS - PROBABILITY_BITS)
        emit(state, full)
        quotient, rest = np.divmod(state >> (STREAM_WORD_BITS * full), frequency)
        state = (quotient << PROBABILITY_BITS) + rest + lookup.start[index[step]]
    for word in (state >> STREAM_WORD_BITS, state):
        emit(word, np.ones(chunks, dtype=bool))
    return buffer[np.arange(room) >= position[:, None]], room - position
