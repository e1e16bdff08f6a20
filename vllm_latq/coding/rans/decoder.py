"""The rANS decoder for a CPU: all chunks advance together, one integer of each a step.

Steps are those that `rans_coder` draws. A step's arrays stay in the cache: chunks are taken some thousand at a time,
and nothing is allocated in between.

Invariant: nothing is read outside the stream, whatever it contains.
"""

import math

import numpy as np
import torch

from vllm_latq.coding.chunks import Chunks
from vllm_latq.coding.rans.encoder import STATE_LOW, STATE_WORDS, WORD_BITS, WORD_MASK, chunks_of
from vllm_latq.coding.rans.model import ESCAPE_BITS, FREQUENCY_TOTAL, PROBABILITY_BITS, Model

# A table entry: integer << 32 | whether it is ESCAPE << 25 | frequency << 12 | slot - first slot of the symbol.
VALUE_SHIFT = 32
ESCAPE_SHIFT = 2 * PROBABILITY_BITS + 1
_SLAB_CHUNKS = 4096


def decode_chunks(chunk_words: torch.Tensor, stream: torch.Tensor, model: Model) -> tuple[torch.Tensor, int | None]:
    """Decode a whole matrix.

    Args:
        chunk_words: uint16 [row_blocks, col_blocks], on the CPU like everything else.
        stream: int32 [words], at least as many as the chunks have.
        model: classes and tables.

    Returns:
        Integers int32 [rows, cols], and the first chunk that does not end as it must (None: all do).
    """
    chunks = chunks_of((len(model.row_class), len(model.column_class)))
    counts = chunks.counts()
    used = chunk_words.to(torch.int64).numpy()
    ends = used.cumsum().reshape(used.shape)
    # A chunk of a damaged stream that runs on reads this 0 again and again.
    words = np.append(stream.contiguous().numpy().view(np.uint16), [0]).astype(np.int64)
    row_offsets, column_offsets = _table_offsets(model, chunks)
    table = decoding_table(model)
    tables = (table >> VALUE_SHIFT).astype(np.int32), table & ((1 << VALUE_SHIFT) - 1)
    symbols = np.zeros((math.prod(chunks.shape), *counts.shape), dtype=np.int32)
    wrong = np.zeros(counts.shape, dtype=bool)
    row_blocks = max(1, _SLAB_CHUNKS // counts.shape[1])
    for start in range(0, counts.shape[0], row_blocks):
        slab = slice(start, start + row_blocks)
        offsets = row_offsets[:, slab], column_offsets
        state, position = _run(words, (ends - used)[slab], offsets, tables, counts[slab], symbols[:, slab])
        wrong[slab] = (state != STATE_LOW) | (position != ends[slab])
    first_wrong = int(np.flatnonzero(wrong)[0]) if wrong.any() else None
    return chunks.join(torch.from_numpy(symbols)), first_wrong


def decoding_table(model: Model) -> np.ndarray:
    """Entries int64 [tables * 4096], for each table and slot; the integer of ESCAPE is 0."""
    entries = np.zeros((len(model.tables), FREQUENCY_TOTAL), dtype=np.int64)
    for row, table in zip(entries, model.tables, strict=True):
        symbol = np.repeat(np.arange(table.escape + 1), table.frequencies)
        escape = symbol == table.escape
        row[:] = np.where(escape, 1 << ESCAPE_SHIFT, (table.first + symbol) << VALUE_SHIFT)
        row += table.frequencies[symbol] << PROBABILITY_BITS
        row += np.arange(FREQUENCY_TOTAL) - table.starts()[symbol]
    return entries.reshape(-1)


def _table_offsets(model: Model, chunks: Chunks) -> tuple[np.ndarray, np.ndarray]:
    """First entries of a weight's table, as two terms: by row in its chunk, int64 [chunk_rows, row_blocks, 1], and by
    column in its chunk, int64 [chunk_cols, 1, col_blocks]."""
    parts = []
    for classes, size in zip((model.row_class, model.column_class), chunks.shape, strict=True):
        padded = np.pad(classes.cpu().numpy() * FREQUENCY_TOTAL, (0, -len(classes) % size))
        parts.append(np.ascontiguousarray(padded.reshape(-1, size).T))
    return parts[0][:, :, None], parts[1][:, None, :]


def _run(
    words: np.ndarray,
    start: np.ndarray,
    offsets: tuple[np.ndarray, np.ndarray],
    tables: tuple[np.ndarray, np.ndarray],
    counts: np.ndarray,
    symbols: np.ndarray,
) -> tuple[np.ndarray, np.ndarray]:
    """Decode chunks.

    Args:
        words: int64 [words], the stream and something behind it.
        start: int64 [row_blocks, col_blocks], first word of each chunk.
        offsets: from `_table_offsets`, the first for these rows.
        tables: `decoding_table` in two: its integers, int32, and the rest of its entries, int64.
        counts: int64 [row_blocks, col_blocks], integers in each chunk.
        symbols: int32 [chunk_rows * chunk_cols, row_blocks, col_blocks], gets the integers; what a shorter chunk has
            behind its end is meaningless.

    Returns:
        State and position in the stream of each chunk after its last integer.
    """
    row_offsets, column_offsets = offsets
    values, entries = tables
    may_escape = bool(entries.max() >> ESCAPE_SHIFT)
    # Arrays without dimensions: numpy takes as long to make one of a Python integer as for the operation.
    slots, probability, word, sign, low_state, first_escape = (
        np.array(number)
        for number in (FREQUENCY_TOTAL - 1, PROBABILITY_BITS, WORD_BITS, 63, STATE_LOW, 1 << ESCAPE_SHIFT)
    )
    state = words.take(start, mode="clip") | (words.take(start + 1, mode="clip") << WORD_BITS)
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
            np.right_shift(entry, probability, out=low)
            np.multiply(state, low, out=state)
            np.bitwise_and(entry, slots, out=entry)
            np.add(state, entry, out=state)
            # -1 where a word follows, else 0.
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
    """The integers that follow an ESCAPE in the chunks `at`, int32; moves their state and position on."""
    raw = np.zeros(len(at[0]), dtype=np.int64)
    for _ in range(ESCAPE_BITS // WORD_BITS):
        half = state[at] & WORD_MASK
        raw = (raw << WORD_BITS) | half
        state[at] += words.take(position[at], mode="clip") - half
        position[at] += 1
    return raw.astype(np.uint32).view(np.int32)
