"""Encode integer matrices with a canonical, length-limited Huffman code. FORMAT.md section 3.3.

    chunk t of `chunks`, of about 1024 integers, starts at bit sum(chunk_bits[:t]) of the stream, without padding

Invariant: code lengths satisfy Kraft's equality (or a single symbol has length 1) and are at most MAX_LENGTH.
Within a word the stream runs from the most significant bit down.
"""

import numpy as np
import torch

from vllm_latq.coding.huffman.stream import (
    ESCAPE_BITS,
    MAX_LENGTH,
    MAX_SYMBOLS,
    HuffmanStream,
    HuffmanTable,
    chunks_of,
    table_bits,
)
from vllm_latq.coding.packing import WORD_BITS

_DENSE_HISTOGRAM = 1 << 22
# Shares of rare integers at both ends that are escaped; the cheapest of these is taken.
_TAILS = (0.0, 1e-5, 1e-4, 5e-4, 2e-3, 8e-3)
# Weights encoded at a time: bounds the temporaries to some MB.
_SLAB_WEIGHTS = 1 << 18


def code_lengths(counts: np.ndarray) -> np.ndarray:
    """Return optimal code lengths of at most MAX_LENGTH bits, by package-merge (Larmore and Hirschberg, 1990).

    Args:
        counts: int64 [n], occurrences; zero means no code. At most 2^MAX_LENGTH of them are positive.

    Returns:
        uint8 [n]; a single used symbol gets length 1.
    """
    used = np.nonzero(counts)[0]
    lengths = np.zeros(len(counts), dtype=np.uint8)
    if len(used) <= 1:
        lengths[used] = 1
        return lengths
    rarest_first = used[np.argsort(counts[used], kind="stable")]
    leaves = counts[rarest_first].astype(np.int64)
    # Each level merges the leaves with the packages (pairs) of the level before, sorted by weight. The cheapest items
    # of a level always contain a prefix of the sorted leaves, so one flag per item is enough.
    weights, is_leaf = leaves, [np.ones(len(leaves), dtype=bool)]
    for _ in range(MAX_LENGTH - 1):
        pairs = len(weights) // 2 * 2
        merged = np.concatenate([leaves, weights[:pairs:2] + weights[1:pairs:2]])
        rank = np.argsort(merged, kind="stable")
        weights = merged[rank]
        is_leaf.append(rank < len(leaves))
    chosen = 2 * len(leaves) - 2
    for level in reversed(is_leaf):
        taken = int(level[:chosen].sum())
        lengths[rarest_first[:taken]] += 1
        chosen = 2 * (chosen - taken)
    return lengths


def build_table(low: int, counts: np.ndarray, outside: int = 0) -> tuple[HuffmanTable, int]:
    """Return the cheapest table for a histogram, and the bits of the payload encoded with it.

    Rare integers at both ends are escaped where their bytes in the table cost more than they save.

    Args:
        low: the integer counted in counts[0].
        counts: int64 [n], occurrences of low, low + 1, ...
        outside: occurrences of integers that `counts` does not cover.
    """
    total, peak = int(counts.sum()) + outside, int(np.argmax(counts))

    def candidate(tail: float) -> tuple[HuffmanTable, int]:
        first, last = _core(counts, tail * total, peak)
        escaped = total - int(counts[first:last].sum())
        used = np.append(counts[first:last], escaped)
        lengths = code_lengths(used)
        payload = int((used * lengths.astype(np.int64)).sum()) + ESCAPE_BITS * escaped
        return HuffmanTable(low + first, lengths), payload

    candidates = [candidate(tail) for tail in _TAILS]
    return min(candidates, key=lambda found: found[1] + table_bits(len(found[0].lengths)))


def encoded_bits(integers: torch.Tensor) -> int:
    """Return the stored bits of `encode(integers)` without encoding: stream words, table and chunk lengths."""
    table, payload = build_table(*_histogram(integers))
    row_blocks, col_blocks = chunks_of(integers.shape).grid
    return -(-payload // WORD_BITS) * WORD_BITS + table_bits(len(table.lengths)) + 16 * row_blocks * col_blocks


def encode(integers: torch.Tensor) -> HuffmanStream:
    """Encode int32 [rows, cols]; both sizes positive."""
    shape = (integers.shape[0], integers.shape[1])
    table, payload = build_table(*_histogram(integers))
    words = np.zeros(payload // 64 + 2, dtype=np.uint64)
    chunk_bits, end = [], 0
    chunks = chunks_of(shape)
    rows = chunks.shape[0]
    for slab in integers.cpu().split(max(1, _SLAB_WEIGHTS // (rows * shape[1])) * rows):
        values, lengths, bits = _fields(slab, table)
        end = _put(words, end, values, lengths)
        chunk_bits.append(bits.astype(np.uint16))
    pairs = np.stack([words >> WORD_BITS, words & 0xFFFFFFFF], 1).astype(np.uint32).reshape(-1)
    stream = pairs[: -(-payload // WORD_BITS)].view(np.int32).copy()
    blocked_bits = np.concatenate(chunk_bits).reshape(chunks.grid)
    return HuffmanStream(table, torch.from_numpy(blocked_bits), torch.from_numpy(stream), shape)


def _histogram(integers: torch.Tensor) -> tuple[int, np.ndarray, int]:
    """Return the lowest counted integer, the occurrences from it on, and the number of integers not counted."""
    flat = integers.reshape(-1).to(torch.int64)
    if flat.numel() == 0:
        return 0, np.zeros(1, dtype=np.int64), 0
    low, high = (int(bound) for bound in flat.aminmax())
    if high - low >= _DENSE_HISTOGRAM:
        # A few far integers would make the histogram huge: count those near the median, and escape the others.
        low, high = int(flat.median()) - MAX_SYMBOLS, int(flat.median()) + MAX_SYMBOLS
        inside = flat[(flat >= low) & (flat <= high)]
    else:
        inside = flat
    counts = torch.bincount(inside - low, minlength=high - low + 1).cpu().numpy()
    return low, counts, flat.numel() - inside.numel()


def _core(counts: np.ndarray, allowance: float, peak: int) -> tuple[int, int]:
    """Return the range [first, last) around the peak outside of which about `allowance` occurrences lie."""
    cumulative = np.cumsum(counts)
    total = cumulative[-1]
    first = int(np.searchsorted(cumulative, allowance / 2, side="right"))
    last = int(np.searchsorted(cumulative, total - allowance / 2, side="left")) + 1
    first, last = min(first, peak), max(last, peak + 1)
    reach = MAX_SYMBOLS // 2
    return max(first, peak - reach), min(last, peak + reach, len(counts))


def _fields(integers: torch.Tensor, table: HuffmanTable) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return the bit fields that encode int32 [rows, cols], whole chunks of the matrix that `table` was made for.

    Returns:
        Values, right-aligned, uint64 [n], and their lengths, at most 16 bits, int64 [n], in stored order; and the bits
        of each chunk, int64 [chunks].
    """
    # One more entry after ESCAPE has no bits: it fills the short chunks at the edges.
    codes, lengths = np.append(table.codes(), 0).astype(np.uint64), np.append(table.lengths, 0).astype(np.int64)
    symbols = (integers.to(torch.int64) - table.first_symbol).clamp_(-1, table.escape)
    symbol = _in_order(symbols.masked_fill_(symbols < 0, table.escape), table.escape + 1)
    value, length = codes.take(symbol), lengths.take(symbol)
    bits = length.sum(1)
    escaped = symbol == table.escape
    if escaped.any():
        bits += ESCAPE_BITS * escaped.sum(1)
        raw = _in_order(integers, 0)[escaped].view(np.uint32)
        after = np.repeat(np.flatnonzero(escaped) + 1, 2)
        value = np.insert(value, after, np.stack([raw >> 16, raw & 0xFFFF], 1).reshape(-1))
        length = np.insert(length, after, ESCAPE_BITS // 2)
    return value.reshape(-1), length.reshape(-1), bits


def _in_order(matrix: torch.Tensor, fill: int) -> np.ndarray:
    """Return the matrix by chunk, [chunks, chunk's size], in stored order; `fill` where a chunk is short."""
    return chunks_of(matrix.shape).split(matrix, fill).flatten(1).t().contiguous().numpy()


def _put(words: np.ndarray, start: int, value: np.ndarray, length: np.ndarray) -> int:
    """Write fields of at most 16 bits one after the other into the stream, uint64 [words], from bit `start` on.

    Returns:
        The bit after the last field.
    """
    value, length = (np.append(array, np.zeros(-len(array) % 4, dtype=array.dtype)) for array in (value, length))
    for _ in range(2):  # joins four fields to one of at most 64 bits, so that a quarter of the words must be found
        value = (value[0::2] << length[1::2].view(np.uint64)) | value[1::2]
        length = length[0::2] + length[1::2]
    end = start + np.cumsum(length)
    word, offset = np.divmod(end - length, 64)
    # A shift by 64 gives 0.
    left = value << (64 - length).astype(np.uint64)
    np.bitwise_or.at(words, word, left >> offset.view(np.uint64))
    np.bitwise_or.at(words, word + 1, left << (64 - offset).view(np.uint64))
    return int(end[-1])
