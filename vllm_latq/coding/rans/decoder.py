"""Decode rANS streams on the CPU: all chunks advance together, by one integer of each chunk per step.

The step is drawn in `encoder`. The arrays of a step stay in the cache: a few thousand chunks are decoded at a time, and
a step allocates nothing.

Invariant: nothing is read outside the stream, whatever it contains.
"""

import math

import numpy as np
import torch

from vllm_latq.coding.chunks import Chunks
from vllm_latq.coding.rans.model import ESCAPE_BITS, FREQUENCY_TOTAL, PROBABILITY_BITS, Model
from vllm_latq.coding.rans.stream import (
    STATE_LOW,
    STATE_WORDS,
    STREAM_WORD_BITS,
    STREAM_WORD_MASK,
    RansStream,
    chunks_of,
)
from vllm_latq.errors import REPAIR, CheckpointError

# A table entry: integer << 32 | whether it is ESCAPE << 25 | frequency << 12 | slot - first slot of the symbol.
VALUE_SHIFT = 32
ESCAPE_SHIFT = 2 * PROBABILITY_BITS + 1
_SLAB_CHUNKS = 4096


def decode_stream(stream: RansStream, where: str) -> torch.Tensor:
    """Decode a validated stream with numpy.

    Args:
        stream: the encoded integers.
        where: tensor name for errors.

    Returns:
        int32 [rows, cols] on the CPU.

    Raises:
        CheckpointError: the stream contradicts its tables, its classes or its chunk lengths.
    """
    integers, wrong = decode_chunks(stream.chunk_words, stream.stream, stream.model())
    if wrong is not None:
        raise _other_end(wrong, where)
    return integers


def value_range(stream: RansStream, where: str) -> tuple[int, int]:
    """Decode a validated stream a slab at a time; return its smallest and its largest integer.

    The matrix may take 2700 times the bytes of its stream; this function takes memory in proportion to the stream.

    Raises:
        CheckpointError: the stream contradicts its tables, its classes or its chunk lengths.
    """
    slabs = _Slabs(stream.chunk_words, stream.stream, stream.model())
    counts, lowest, highest, done = slabs.chunks.counts(), math.inf, -math.inf, 0
    for slab in slabs.slices():
        symbols = np.zeros((math.prod(slabs.chunks.shape), *counts[slab].shape), dtype=np.int32)
        if (wrong := slabs.decode(slab, symbols)).any():
            raise _other_end(done + int(np.flatnonzero(wrong)[0]), where)
        for count in np.unique(counts[slab]).tolist():
            own = counts[slab] == count
            lowest = min(lowest, symbols[:count].min(0)[own].min())
            highest = max(highest, symbols[:count].max(0)[own].max())
        done += wrong.size
    return int(lowest), int(highest)


def decode_chunks(chunk_words: torch.Tensor, stream: torch.Tensor, model: Model) -> tuple[torch.Tensor, int | None]:
    """Decode a whole matrix; all tensors are on the CPU.

    Args:
        chunk_words: uint16 [row_blocks, col_blocks].
        stream: int32 [words], at least as many words as the chunks have.
        model: classes and tables.

    Returns:
        Integers int32 [rows, cols], and the first chunk that does not end as it must; None if every chunk does.
    """
    slabs = _Slabs(chunk_words, stream, model)
    symbols = np.zeros((math.prod(slabs.chunks.shape), *slabs.chunks.grid), dtype=np.int32)
    wrong = np.concatenate([slabs.decode(slab, symbols[:, slab]) for slab in slabs.slices()])
    first_wrong = int(np.flatnonzero(wrong)[0]) if wrong.any() else None
    return slabs.chunks.join(torch.from_numpy(symbols)), first_wrong


class _Slabs:
    """A matrix that is decoded a few rows of chunks at a time; arguments as for `decode_chunks`."""

    def __init__(self, chunk_words: torch.Tensor, stream: torch.Tensor, model: Model) -> None:
        self.chunks = chunks_of((len(model.row_class), len(model.column_class)))
        self.used = chunk_words.to(torch.int64).numpy()
        self.ends = self.used.cumsum().reshape(self.used.shape)
        # A chunk of a damaged stream that runs past the end reads this 0 again and again.
        self.words = np.append(stream.contiguous().numpy().view(np.uint16), [0]).astype(np.int64)
        self.row_offsets, self.column_offsets = _table_offsets(model, self.chunks)
        table = decoding_table(model)
        self.tables = (table >> VALUE_SHIFT).astype(np.int32), table & ((1 << VALUE_SHIFT) - 1)

    def slices(self) -> list[slice]:
        """Return the rows of chunks that are decoded together."""
        total, columns = self.chunks.grid
        rows = max(1, _SLAB_CHUNKS // columns)
        return [slice(start, start + rows) for start in range(0, total, rows)]

    def decode(self, slab: slice, symbols: np.ndarray) -> np.ndarray:
        """Decode some rows of chunks into `symbols`; return which chunks do not end as they must, bool [..]."""
        offsets = self.row_offsets[:, slab], self.column_offsets
        start = (self.ends - self.used)[slab]
        state, position = _run(self.words, start, offsets, self.tables, self.chunks.counts()[slab], symbols)
        wrong: np.ndarray = (state != STATE_LOW) | (position != self.ends[slab])
        return wrong


def _other_end(chunk: int, where: str) -> CheckpointError:
    """Return the error for a chunk that does not end as it must."""
    expected = f"chunk {chunk} to end after its own number of words, in the state an encoder begins with"
    return CheckpointError(where, expected, "a different end", REPAIR)


def decoding_table(model: Model) -> np.ndarray:
    """Return the entry of each table and slot, int64 [tables * 4096]; the integer of ESCAPE is 0."""
    entries = np.zeros((len(model.tables), FREQUENCY_TOTAL), dtype=np.int64)
    for row, table in zip(entries, model.tables, strict=True):
        symbol = np.repeat(np.arange(table.escape + 1), table.frequencies)
        escape = symbol == table.escape
        row[:] = np.where(escape, 1 << ESCAPE_SHIFT, (table.first + symbol) << VALUE_SHIFT)
        row += table.frequencies[symbol] << PROBABILITY_BITS
        row += np.arange(FREQUENCY_TOTAL) - table.starts()[symbol]
    return entries.reshape(-1)


def _table_offsets(model: Model, chunks: Chunks) -> tuple[np.ndarray, np.ndarray]:
    """Return the first entry of a weight's table as the sum of two terms.

    The first goes by the weight's row in its chunk, int64 [chunk_rows, row_blocks, 1], the second by its column in its
    chunk, int64 [chunk_cols, 1, col_blocks].
    """
    terms = []
    for classes, size in zip((model.row_class, model.column_class), chunks.shape, strict=True):
        padded = np.pad(classes.cpu().numpy() * FREQUENCY_TOTAL, (0, -len(classes) % size))
        terms.append(np.ascontiguousarray(padded.reshape(-1, size).T))
    return terms[0][:, :, None], terms[1][:, None, :]


def _run(
    words: np.ndarray,
    start: np.ndarray,
    offsets: tuple[np.ndarray, np.ndarray],
    tables: tuple[np.ndarray, np.ndarray],
    counts: np.ndarray,
    symbols: np.ndarray,
) -> tuple[np.ndarray, np.ndarray]:
    """Decode some chunks into `symbols`.

    For the state x of one chunk, and entry = table[offset of the weight's table + x % 4096], a step without ESCAPE is

        x = entry.frequency * (x >> 12) + entry.slot_in_symbol
        if x < 2**16: x = x << 16 | words[position]; position += 1

    Args:
        words: int64 [words + 1], the stream and one word after it.
        start: int64 [row_blocks, col_blocks], first word of each chunk.
        offsets: result of `_table_offsets`, the first term for these rows only.
        tables: `decoding_table` in two arrays: its integers, int32, and the rest of its entries, int64.
        counts: int64 [row_blocks, col_blocks], integers in each chunk.
        symbols: int32 [chunk_rows * chunk_cols, row_blocks, col_blocks], receives the integers; entries after the end
            of a shorter chunk are meaningless.

    Returns:
        State and position in the stream of each chunk after its last integer.
    """
    row_offsets, column_offsets = offsets
    values, entries = tables
    may_escape = bool(entries.max() >> ESCAPE_SHIFT)
    # Arrays without dimensions: converting a Python integer takes numpy as long as the operation itself.
    slots, probability, word, sign, low_state, first_escape = (
        np.array(number)
        for number in (FREQUENCY_TOTAL - 1, PROBABILITY_BITS, STREAM_WORD_BITS, 63, STATE_LOW, 1 << ESCAPE_SHIFT)
    )
    state = words.take(start, mode="clip") | (words.take(start + 1, mode="clip") << STREAM_WORD_BITS)
    position = start + STATE_WORDS
    slot, entry, low = (np.empty_like(state) for _ in range(3))
    escaped = np.empty(state.shape, dtype=bool)
    last_state, last_position = state.copy(), position.copy()
    done = 0
    for stop in np.unique(counts).tolist():
        for step in range(done, stop):
            row, column = divmod(step, len(column_offsets))
            np.bitwise_and(state, slots, out=slot)
            np.add(slot, row_offsets[row], out=slot)
            np.add(slot, column_offsets[column], out=slot)
            values.take(slot, out=symbols[step], mode="clip")
            entries.take(slot, out=entry, mode="clip")
            at = None
            if may_escape and np.count_nonzero(np.greater_equal(entry, first_escape, out=escaped)):
                at = np.nonzero(escaped)
                entry[at] -= first_escape
            np.right_shift(state, probability, out=state)
            np.right_shift(entry, probability, out=low)  # the frequency
            np.multiply(state, low, out=state)
            np.bitwise_and(entry, slots, out=entry)
            np.add(state, entry, out=state)
            # From here on `low` is -1 where the state takes the next word, else 0, and `entry` is that word.
            np.subtract(state, low_state, out=low)
            np.right_shift(low, sign, out=low)
            words.take(position, out=entry, mode="clip")
            np.bitwise_and(entry, low, out=entry)
            np.subtract(position, low, out=position)
            np.bitwise_and(low, word, out=low)
            np.left_shift(state, low, out=state)
            np.bitwise_or(state, entry, out=state)
            if at is not None:
                symbols[step][at] = _raw(words, state, position, at)
        done = stop
        here = counts == stop
        last_state[here], last_position[here] = state[here], position[here]
    return last_state, last_position


def _raw(words: np.ndarray, state: np.ndarray, position: np.ndarray, at: tuple[np.ndarray, ...]) -> np.ndarray:
    """Read the raw integers after an ESCAPE in the chunks `at`, int32; advance their state and position."""
    raw = np.zeros(len(at[0]), dtype=np.int64)
    for _ in range(ESCAPE_BITS // STREAM_WORD_BITS):
        part = state[at] & STREAM_WORD_MASK
        raw = (raw << STREAM_WORD_BITS) | part
        state[at] += words.take(position[at], mode="clip") - part
        position[at] += 1
    return raw.astype(np.uint32).view(np.int32)
