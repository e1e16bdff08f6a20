"""The rANS encoder: all chunks advance together, one integer of each a step.

    decoding        slot = x mod 4096 -> symbol, f, start       x = f * (x div 4096) + slot - start
                    if x < 2**16:  x = x * 2**16 + next word
    an ESCAPE       twice:  half = x mod 2**16,  x = (x div 2**16) * 2**16 + next word;  the upper half comes first
    encoding        the inverse steps from the last integer to the first, beginning with x = 2**16

Invariant: 2**16 <= x < 2**32 between steps, so that a symbol emits at most one word (an escape two more).
"""

from collections.abc import Iterator, Sequence

import numpy as np
import torch

from vllm_latq.coding.chunks import Chunks
from vllm_latq.coding.rans.model import ESCAPE_BITS, FREQUENCY_TOTAL, PROBABILITY_BITS, Model

CHUNK_WEIGHTS = 4096
WORD_BITS = 16
WORD_MASK = (1 << WORD_BITS) - 1
STATE_LOW = 1 << WORD_BITS
STATE_WORDS = 2
# Chunks handled at a time: bounds the temporaries to some hundred MB.
_SLAB_CHUNKS = 2048


def chunks_of(shape: Sequence[int]) -> Chunks:
    """How a matrix [rows, cols] is cut for this code."""
    rows, cols = shape
    return Chunks(rows, cols, CHUNK_WEIGHTS)


class _Lookup:
    """Frequency, first slot and escape flag of each (table, integer), flat, for one model.

    The integers covered are those of any table and one more at either end, which stand for all others. The last entry
    has the whole frequency: it codes nothing, and is used where a chunk has no integer.
    """

    def __init__(self, model: Model) -> None:
        self.low = min(table.first for table in model.tables) - 1
        high = max(table.first + table.escape for table in model.tables)
        self.size = high - self.low + 1
        integers = self.low + np.arange(self.size)
        symbols = [table.symbols(integers) for table in model.tables]
        parts = list(zip(model.tables, symbols, strict=True))
        self.frequency = np.concatenate([table.frequencies[symbol] for table, symbol in parts] + [[FREQUENCY_TOTAL]])
        self.start = np.concatenate([table.starts()[symbol] for table, symbol in parts] + [[0]])
        self.escaped = np.concatenate([symbol == table.escape for table, symbol in parts] + [[False]])

    def indices(self, integers: torch.Tensor, row_class: torch.Tensor, column_class: torch.Tensor) -> torch.Tensor:
        """Entry of each weight int64, as `Chunks.split` arranges them."""
        table = row_class.unsqueeze(1) + column_class
        entry = (integers.to(torch.int64) - self.low).clamp_(0, self.size - 1).add_(table * self.size)
        return chunks_of(integers.shape).split(entry, len(self.frequency) - 1)

    def bits(self) -> np.ndarray:
        """Information in each entry, float64; 0 where it cannot be used."""
        bits = PROBABILITY_BITS - np.log2(np.maximum(self.frequency, 1))
        return np.where(self.frequency > 0, bits + ESCAPE_BITS * self.escaped, 0)


def estimate_words(integers: torch.Tensor, model: Model) -> torch.Tensor:
    """16-bit words of each chunk, int64 [row_blocks, col_blocks], from the information in it.

    The state holds 16 bits of it at the least, so a word is emitted for every 16 bits. The coder's own loss is far
    below a bit per chunk: the estimate is one word off where the information is that close to a multiple of 16.
    """
    lookup = _Lookup(model)
    bits = torch.from_numpy(lookup.bits()).to(integers.device)
    rounding = 1e-6
    sums = [bits[lookup.indices(part, rows, model.column_class)].sum(0) for part, rows in _slabs(integers, model)]
    return STATE_WORDS + ((torch.cat(sums) + rounding) / WORD_BITS).floor().to(torch.int64)


def encode_chunks(integers: torch.Tensor, model: Model) -> tuple[np.ndarray, np.ndarray]:
    """Words of each chunk, uint16 [row_blocks, col_blocks], and the stream, int32 [words], of int32 [rows, cols]."""
    lookup = _Lookup(model)
    words, counts = [], []
    for part, rows in _slabs(integers.cpu(), Model(model.row_class.cpu(), model.column_class.cpu(), model.tables)):
        index = lookup.indices(part, rows, model.column_class.cpu()).numpy()
        values = chunks_of(part.shape).split(part, 0).numpy()
        steps = len(index)
        part_words, part_counts = _encode(values.reshape(steps, -1), index.reshape(steps, -1), lookup)
        words.append(part_words)
        counts.append(part_counts.reshape(index.shape[1:]))
    halves = np.concatenate(words)
    halves = np.append(halves, np.zeros(len(halves) % 2, dtype=np.uint16))
    return np.concatenate(counts).astype(np.uint16), halves.view(np.int32)


def _slabs(integers: torch.Tensor, model: Model) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Whole chunks at a time: rows of the matrix with their classes."""
    chunks = chunks_of(integers.shape)
    rows = max(1, _SLAB_CHUNKS // chunks.grid[1]) * chunks.shape[0]
    yield from zip(integers.split(rows), model.row_class.split(rows), strict=True)


def _encode(values: np.ndarray, index: np.ndarray, lookup: _Lookup) -> tuple[np.ndarray, np.ndarray]:
    """Encode columns of integers: the words of all chunks, uint16, one chunk after the other, and their numbers.

    Args:
        values: int32 [steps, chunks].
        index: int64 [steps, chunks], entries of `lookup`.
    """
    steps, chunks = index.shape
    escaped = lookup.escaped[index]
    room = STATE_WORDS + steps + ESCAPE_BITS // WORD_BITS * int(escaped.sum(0).max())
    # Words are found from the last to the first: each chunk fills its row from the end.
    buffer = np.zeros((chunks, room), dtype=np.uint16)
    position = np.full(chunks, room)

    def emit(state: np.ndarray, where: np.ndarray) -> None:
        chunk = np.nonzero(where)[0]
        position[chunk] -= 1
        buffer[chunk, position[chunk]] = state[chunk] & WORD_MASK

    state = np.full(chunks, STATE_LOW, dtype=np.int64)
    escapes = escaped.any(1)
    for step in reversed(range(steps)):
        if escapes[step]:
            raw = values[step].astype(np.int64)
            for half in (raw, raw >> WORD_BITS):
                emit(state, escaped[step])
                state = np.where(escaped[step], (state & ~WORD_MASK) | (half & WORD_MASK), state)
        frequency = lookup.frequency[index[step]]
        full = state >= frequency << (2 * WORD_BITS - PROBABILITY_BITS)
        emit(state, full)
        quotient, rest = np.divmod(state >> (WORD_BITS * full), frequency)
        state = (quotient << PROBABILITY_BITS) + rest + lookup.start[index[step]]
    for half in (state >> WORD_BITS, state):
        emit(half, np.ones(chunks, dtype=bool))
    return buffer[np.arange(room) >= position[:, None]], room - position
