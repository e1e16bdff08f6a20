"""Canonical, length-limited Huffman coding of integer matrices in chunks that decode alone. FORMAT.md section 3.3.

    chunk t of `chunks`, of about 1024 integers, starts at bit sum(chunk_bits[:t]) of the stream: no padding in between

Invariant: code lengths satisfy Kraft's equality (or there is a single symbol, of length 1), none above MAX_LENGTH.
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

_DENSE_HISTOGRAM = 1 << 22
# Weights encoded at a time: bounds the temporaries to some MB.
_SLAB_WEIGHTS = 1 << 18


def code_lengths(counts: np.ndarray) -> np.ndarray:
    """Optimal code lengths of at most MAX_LENGTH bits, by package-merge (Larmore and Hirschberg, 1990).

    Args:
        counts: int64 [n], occurrences; zero means no code. At most 2^MAX_LENGTH are not zero.

    Returns:
        uint8 [n]; a single used symbol gets length 1.
    """
    used = np.nonzero(counts)[0]
    lengths = np.zeros(len(counts), dtype=np.uint8)
    if len(used) <= 1:
        lengths[used] = 1
        return lengths
    order = used[np.argsort(counts[used], kind="stable")]
    leaves = counts[order].astype(np.int64)
    # At every level the fresh leaves and the packages (pairs) of the level before are merged by weight. Which leaves a
    # choice of the cheapest items takes is always a prefix of the sorted leaves, so one flag per item is enough.
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
        lengths[order[:taken]] += 1
        chosen = 2 * (chosen - taken)
    return lengths


def build_table(low: int, counts: np.ndarray, outside: int = 0) -> tuple[HuffmanTable, int]:
    """The cheapest table for a histogram, and the payload bits it leads to.

    Rare integers at both ends go through ESCAPE where their table bytes cost more than they save.

    Args:
        low: integer that counts[0] belongs to.
        counts: int64 [n], occurrences of low, low + 1, ...
        outside: occurrences of integers that `counts` does not cover.
    """
    total, best = int(counts.sum()) + outside, None
    peak = int(np.argmax(counts))
    for tail in (0.0, 1e-5, 1e-4, 5e-4, 2e-3, 8e-3):
        first, last = _core(counts, tail * total, peak)
        escaped = total - int(counts[first:last].sum())
        lengths = code_lengths(np.append(counts[first:last], escaped))
        used = np.append(counts[first:last], escaped)
        payload = int((used * lengths.astype(np.int64)).sum()) + ESCAPE_BITS * escaped
        table = HuffmanTable(low + first, lengths)
        cost = payload + table_bits(len(lengths))
        if best is None or cost < best[0]:
            best = (cost, table, payload)
    assert best is not None
    return best[1], best[2]


def encoded_bits(integers: torch.Tensor) -> int:
    """Stored bits of `encode(integers)` without encoding: the payload in whole words, the table, the chunk lengths."""
    table, payload = build_table(*_histogram(integers))
    row_blocks, col_blocks = chunks_of(integers.shape).grid
    return -(-payload // 32) * 32 + table_bits(len(table.lengths)) + 16 * row_blocks * col_blocks


def encode(integers: torch.Tensor) -> HuffmanStream:
    """Encode int32 [rows, cols]; both sizes positive."""
    shape = (integers.shape[0], integers.shape[1])
    table, payload = build_table(*_histogram(integers))
    words = np.zeros(payload // 64 + 2, dtype=np.uint64)
    chunk_bits, end = [], 0
    chunks = chunks_of(shape)
    rows = chunks.shape[0]
    for part in integers.cpu().split(max(1, _SLAB_WEIGHTS // (rows * shape[1])) * rows):
        values, lengths, bits = _fields(part, table)
        end = _put(words, end, values, lengths)
        chunk_bits.append(bits.astype(np.uint16))
    halves = np.stack([words >> 32, words & 0xFFFFFFFF], 1).astype(np.uint32).reshape(-1)
    stream = halves[: -(-payload // 32)].view(np.int32).copy()
    blocked_bits = np.concatenate(chunk_bits).reshape(chunks.grid)
    return HuffmanStream(table, torch.from_numpy(blocked_bits), torch.from_numpy(stream), shape)


def _histogram(integers: torch.Tensor) -> tuple[int, np.ndarray, int]:
    """(lowest counted integer, occurrences from there on, occurrences not covered)."""
    flat = integers.reshape(-1).to(torch.int64)
    if flat.numel() == 0:
        return 0, np.zeros(1, dtype=np.int64), 0
    low, high = (int(bound) for bound in flat.aminmax())
    if high - low >= _DENSE_HISTOGRAM:
        # A few far integers would make the histogram huge: count what lies around the median, escape the rest.
        low, high = int(flat.median()) - MAX_SYMBOLS, int(flat.median()) + MAX_SYMBOLS
        inside = flat[(flat >= low) & (flat <= high)]
    else:
        inside = flat
    counts = torch.bincount(inside - low, minlength=high - low + 1).cpu().numpy()
    return low, counts, flat.numel() - inside.numel()


def _core(counts: np.ndarray, allowance: float, peak: int) -> tuple[int, int]:
    """Range [first, last) around the peak that leaves at most about `allowance` occurrences outside on each side."""
    cumulative = np.cumsum(counts)
    total = cumulative[-1]
    first = int(np.searchsorted(cumulative, allowance / 2, side="right"))
    last = int(np.searchsorted(cumulative, total - allowance / 2, side="left")) + 1
    first, last = min(first, peak), max(last, peak + 1)
    half = MAX_SYMBOLS // 2
    return max(first, peak - half), min(last, peak + half, len(counts))


def _fields(integers: torch.Tensor, table: HuffmanTable) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """What is written for int32 [rows, cols], whole chunks of what `table` was made for.

    Returns:
        Values, right-aligned, uint64 [n], and their bits, at most 16, int64 [n], in stored order; and the bits of each
        chunk, int64 [chunks].
    """
    # One entry behind ESCAPE: nothing, with which the last chunks of rows and columns are filled up.
    codes, lengths = np.append(table.codes(), 0).astype(np.uint64), np.append(table.lengths, 0).astype(np.int64)
    symbols = (integers.to(torch.int64) - table.first_symbol).clamp_(-1, table.escape)
    symbol = _in_order(symbols.masked_fill_(symbols < 0, table.escape), table.escape + 1)
    value, length = codes.take(symbol), lengths.take(symbol)
    bits = length.sum(1)
    escaped = symbol == table.escape
    if escaped.any():
        bits += ESCAPE_BITS * escaped.sum(1)
        raw = _in_order(integers, 0)[escaped].view(np.uint32)
        behind = np.repeat(np.flatnonzero(escaped) + 1, 2)
        value = np.insert(value, behind, np.stack([raw >> 16, raw & 0xFFFF], 1).reshape(-1))
        length = np.insert(length, behind, ESCAPE_BITS // 2)
    return value.reshape(-1), length.reshape(-1), bits


def _in_order(matrix: torch.Tensor, fill: int) -> np.ndarray:
    """Entries by chunk, [chunks, chunk's size], in stored order; `fill` where a chunk is not whole."""
    return chunks_of(matrix.shape).split(matrix, fill).flatten(1).t().contiguous().numpy()


def _put(words: np.ndarray, start: int, value: np.ndarray, length: np.ndarray) -> int:
    """Or fields of at most 16 bits into the stream, uint64 [words], one behind the other from bit `start` on.

    Returns:
        The bit behind the last one.
    """
    value, length = (np.append(part, np.zeros(-len(part) % 4, dtype=part.dtype)) for part in (value, length))
    for _ in range(2):  # four fields to one of at most 64 bits: a quarter of the words to find
        value = (value[0::2] << length[1::2].view(np.uint64)) | value[1::2]
        length = length[0::2] + length[1::2]
    end = start + np.cumsum(length)
    word, offset = np.divmod(end - length, 64)
    # A shift by 64 gives 0.
    left = value << (64 - length).astype(np.uint64)
    np.bitwise_or.at(words, word, left >> offset.view(np.uint64))
    np.bitwise_or.at(words, word + 1, left << (64 - offset).view(np.uint64))
    return int(end[-1])
