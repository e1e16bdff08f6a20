"""Decode Huffman streams on the CPU, all chunks at once. FORMAT.md section 3.3.

    step s:   chunk 0   chunk 1   chunk 2  ...     one lookup each: the next 15 bits -> (integer, code length)
              position  position  position         advance each by its own code length

The arrays of a step stay in the cache: a few thousand chunks are decoded at a time, and a step allocates nothing.

Invariant: nothing is read outside the stream, whatever it contains; a chunk that does not end where its length says is
refused.
"""

import math
from collections.abc import Iterator

import numpy as np
import torch

from vllm_latq.coding.huffman.stream import ESCAPE_BITS, MAX_LENGTH, HuffmanStream, HuffmanTable, chunks_of
from vllm_latq.coding.packing import WORD_BITS
from vllm_latq.errors import REPAIR, CheckpointError

_ESCAPED = 1 << 8  # added to the code length of ESCAPE
_SLAB_CHUNKS = 4096


def decode_stream(stream: HuffmanStream, where: str) -> torch.Tensor:
    """Decode a validated stream with numpy.

    Args:
        stream: the encoded integers.
        where: tensor name for errors.

    Returns:
        int32 [rows, cols] on the CPU.

    Raises:
        CheckpointError: the stream contradicts its chunk lengths.
    """
    chunks = chunks_of(stream.shape)
    symbols = np.zeros((math.prod(chunks.shape), math.prod(chunks.grid)), dtype=np.int32)
    for _ in _slabs(stream, where, symbols):
        pass
    return chunks.join(torch.from_numpy(symbols).view(-1, *chunks.grid))


def value_range(stream: HuffmanStream, where: str) -> tuple[int, int]:
    """Decode a validated stream a slab at a time; return its smallest and its largest integer.

    Raises:
        CheckpointError: the stream contradicts its chunk lengths.
    """
    lowest, highest = math.inf, -math.inf
    for counts, symbols in _slabs(stream, where):
        for count in np.unique(counts).tolist():
            own = counts == count
            lowest = min(lowest, symbols[:count].min(0)[own].min())
            highest = max(highest, symbols[:count].max(0)[own].max())
    return int(lowest), int(highest)


def _slabs(
    stream: HuffmanStream, where: str, whole: np.ndarray | None = None
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Decode some chunks at a time; yield the weights in each chunk, int64 [chunks], and the integers as in `whole`.

    Args:
        stream: the encoded integers.
        where: tensor name for errors.
        whole: int32 [largest chunk, chunks], receives all integers; None for a new array for each slab.
    """
    chunks = chunks_of(stream.shape)
    counts = chunks.counts().reshape(-1)
    ends = stream.chunk_bits.cpu().numpy().reshape(-1).cumsum(dtype=np.int64)
    starts = np.append(0, ends[:-1])
    windows, tables = _windows(stream.stream.cpu().numpy()), _tables(stream.table)
    for first in range(0, counts.size, _SLAB_CHUNKS):
        slab = slice(first, first + _SLAB_CHUNKS)
        size = (math.prod(chunks.shape), counts[slab].size)
        symbols = np.zeros(size, dtype=np.int32) if whole is None else whole[:, slab]
        reached = _decode_chunks(windows, tables, starts[slab], counts[slab], symbols)
        if (wrong := np.flatnonzero(reached != ends[slab])).size:
            chunk = first + int(wrong[0])
            expected = f"chunk {chunk} to end at bit {ends[chunk]}"
            raise CheckpointError(where, expected, f"bit {reached[wrong[0]]}", REPAIR)
        yield counts[slab], symbols


def _windows(stream: np.ndarray) -> np.ndarray:
    """Return the 64 bits from each word of the stream on, uint64 [words + 2], with zeros after its end."""
    words = np.zeros(len(stream) + 3, dtype=np.uint64)
    words[: len(stream)] = stream.view(np.uint32)
    windows = words[:-1] << WORD_BITS
    windows |= words[1:]
    return windows


def _tables(code: HuffmanTable) -> tuple[np.ndarray, np.ndarray]:
    """Return, for each value of the next MAX_LENGTH bits, the integer and the length of its code.

    Both are [2**15], int32 and int64.
    """
    index, length = code.lookup()
    escaped = (index == code.escape) & (length > 0)
    return (code.first_symbol + index.astype(np.int64)).astype(np.int32), length + _ESCAPED * escaped


def _decode_chunks(
    windows: np.ndarray,
    tables: tuple[np.ndarray, np.ndarray],
    start: np.ndarray,
    counts: np.ndarray,
    symbols: np.ndarray,
) -> np.ndarray:
    """Decode some chunks into `symbols`.

    Args:
        windows, tables: results of `_windows` and `_tables`.
        start: int64 [chunks], first bit of each chunk.
        counts: int64 [chunks], weights in each chunk.
        symbols: int32 [largest chunk, chunks], receives the integers; entries after the end of a shorter chunk are
            meaningless.

    Returns:
        The bit that each chunk has reached after its weights, int64 [chunks].
    """
    integers, lengths = tables
    may_escape = bool(lengths.max() >= _ESCAPED)
    # Arrays without dimensions: converting a Python integer takes numpy as long as the operation itself.
    word_shift, word_mask, escape_length = (np.array(number) for number in (5, WORD_BITS - 1, _ESCAPED))
    unused_bits = np.array(64 - MAX_LENGTH, dtype=np.uint64)
    position, reached = start.copy(), start.copy()
    word, prefix, length = (np.empty_like(start) for _ in range(3))
    # The same memory without a sign, because shifts need unsigned integers.
    bit, window = word.view(np.uint64), prefix.view(np.uint64)
    escaped = np.empty(start.shape, dtype=bool)
    done = 0
    for stop in np.unique(counts).tolist():
        for step in range(done, stop):
            np.right_shift(position, word_shift, out=word)
            windows.take(word, out=window, mode="clip")
            np.bitwise_and(position, word_mask, out=word)
            np.left_shift(window, bit, out=window)
            np.right_shift(window, unused_bits, out=window)
            integers.take(prefix, out=symbols[step], mode="clip")
            lengths.take(prefix, out=length, mode="clip")
            np.add(position, length, out=position)
            if may_escape and np.count_nonzero(np.greater_equal(length, escape_length, out=escaped)):
                at = np.flatnonzero(escaped)
                raw_bit = position[at] - _ESCAPED
                raw = windows.take(raw_bit >> 5, mode="clip") << (raw_bit & 31).astype(np.uint64)
                symbols[step, at] = (raw >> (64 - ESCAPE_BITS)).astype(np.uint32).view(np.int32)
                position[at] = raw_bit + ESCAPE_BITS
        done = stop
        reached[counts == stop] = position[counts == stop]
    return reached
