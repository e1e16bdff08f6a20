"""The rANS decoder for any device: all chunks advance together, one integer of each a step.

Steps are those that `rans_coder` draws. They are written once for numpy arrays (on a CPU: a step on a small layer is
dominated by the overhead of its operations, and numpy's is a third of torch's) and torch tensors (other devices): both
have the operators and the `take` that are used.

Invariant: nothing is read outside the stream, whatever it contains.
"""

from typing import Any

import numpy as np
import torch

from vllm_latq.rans_coder import (
    CHUNK_WEIGHTS,
    STATE_LOW,
    STATE_WORDS,
    WORD_BITS,
    WORD_MASK,
    chunk_counts,
    chunk_shape,
    unblock,
)
from vllm_latq.rans_tables import ESCAPE_BITS, FREQUENCY_TOTAL, PROBABILITY_BITS, Model

# A table entry: integer << 32 | whether it is ESCAPE << 25 | frequency << 12 | slot - first slot of the symbol.
VALUE_SHIFT = 32
ESCAPE_SHIFT = 2 * PROBABILITY_BITS + 1
FREQUENCY_MASK = 2 * FREQUENCY_TOTAL - 1
SLOT_MASK = FREQUENCY_TOTAL - 1
_WORDS_PER_STEP = 1 + ESCAPE_BITS // WORD_BITS


def decode_chunks(
    chunk_words: torch.Tensor, stream: torch.Tensor, model: Model, device: torch.device | str
) -> tuple[torch.Tensor, int | None]:
    """Decode a whole matrix.

    Args:
        chunk_words: uint16 [row_blocks, col_blocks], on the CPU like everything else.
        stream: int32 [words], at least as many as the chunks have.
        model: classes and tables.
        device: on which to decode.

    Returns:
        Integers int32 [rows, cols] on `device`, and the first chunk that does not end as it must (None: all do).
    """
    on_cpu = torch.device(device).type == "cpu"
    place = (lambda array: array) if on_cpu else (lambda array: torch.from_numpy(array).to(device))
    shape = (len(model.row_class), len(model.column_class))
    counts = chunk_counts(shape)
    used = chunk_words.to(torch.int64).numpy()
    ends = used.cumsum().reshape(used.shape)
    # Chunks of a damaged stream run on: this far behind its end at the most.
    padding = np.zeros(STATE_WORDS + _WORDS_PER_STEP * CHUNK_WEIGHTS, dtype=np.int64)
    words = np.append(stream.contiguous().numpy().view(np.uint16), padding)
    chunk_rows, chunk_cols = chunk_shape(shape[1])
    symbols = place(np.zeros((chunk_rows * chunk_cols, *counts.shape), dtype=np.int32))
    state, position = _run(
        place(words),
        place(ends - used),
        [place(offsets) for offsets in _table_offsets(model, shape)],
        place(decoding_table(model)),
        place(counts),
        any(table.frequencies[-1] for table in model.tables),
        symbols,
    )
    wrong = ((state != STATE_LOW) | (position != place(ends))).reshape(-1)
    first_wrong = int(wrong.nonzero()[0][0]) if bool(wrong.any()) else None
    return unblock(torch.as_tensor(symbols), shape), first_wrong


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


def _table_offsets(model: Model, shape: tuple[int, int]) -> tuple[np.ndarray, np.ndarray]:
    """First entries of a weight's table, as two terms: by row in its chunk, int64 [chunk_rows, row_blocks, 1], and by
    column in its chunk, int64 [chunk_cols, 1, col_blocks]."""
    parts = []
    for classes, size in zip((model.row_class, model.column_class), chunk_shape(shape[1]), strict=True):
        padded = np.pad(classes.cpu().numpy() * FREQUENCY_TOTAL, (0, -len(classes) % size))
        parts.append(np.ascontiguousarray(padded.reshape(-1, size).T))
    return parts[0][:, :, None], parts[1][:, None, :]


def _run(
    words: Any, position: Any, offsets: list[Any], table: Any, counts: Any, may_escape: bool, symbols: Any
) -> tuple[Any, Any]:
    """Decode all chunks.

    Args:
        words: int64 [words], the stream and padding.
        position: int64 [row_blocks, col_blocks], first word of each chunk.
        offsets: from `_table_offsets`.
        table: from `decoding_table`.
        counts: int64 [row_blocks, col_blocks], integers in each chunk.
        may_escape: whether any table has a frequency for ESCAPE.
        symbols: int32 [chunk_rows * chunk_cols, row_blocks, col_blocks], gets the integers; what a shorter chunk has
            behind its end is meaningless.

    Returns:
        State and position in the stream of each chunk after its last integer.
    """
    row_offsets, column_offsets = offsets
    width = len(column_offsets)
    stops = set(counts.reshape(-1).tolist())
    state = words.take(position) | (words.take(position + 1) << WORD_BITS)
    position = position + STATE_WORDS
    last_state, last_position = state, position
    for step in range(max(stops)):
        slot = (state & SLOT_MASK) + (row_offsets[step // width] + column_offsets[step % width])
        entry = table.take(slot)
        value = entry >> VALUE_SHIFT
        state = ((entry >> PROBABILITY_BITS) & FREQUENCY_MASK) * (state >> PROBABILITY_BITS) + (entry & SLOT_MASK)
        low = state < STATE_LOW
        state = (state << (low * WORD_BITS)) | (words.take(position) * low)
        position = position + low
        if may_escape and (escaped := (entry >> ESCAPE_SHIFT) & 1).any():
            raw = 0
            for _ in range(ESCAPE_BITS // WORD_BITS):
                half = state & WORD_MASK
                raw = (raw << WORD_BITS) | half
                state = state + (words.take(position) - half) * escaped
                position = position + escaped
            value = value + (raw - ((raw >> (ESCAPE_BITS - 1)) << ESCAPE_BITS)) * escaped
        symbols[step] = value
        if step + 1 in stops:
            ends_here = counts == step + 1
            last_state = last_state + (state - last_state) * ends_here
            last_position = last_position + (position - last_position) * ends_here
    return last_state, last_position
