"""Huffman coding: lossless, optimal, and of the size that it states. Damaged streams: test_huffman_decoder.py."""

import heapq

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from helpers.builders import gaussian_integers
from vllm_latq.coding.huffman import decoder as huffman_decode
from vllm_latq.coding.huffman import encoder as huffman
from vllm_latq.coding.huffman.decoder import decode_stream

SHAPES = [(1, 1), (1, 5000), (3, 33), (63, 63), (40, 1024), (5, 1500), (17, 500)]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("spread", [0.0, 0.3, 2.0, 400.0])
def test_huffman_round_trip_and_size(shape: tuple[int, int], spread: float) -> None:
    integers = gaussian_integers(shape, spread)
    encoded = huffman.encode(integers)
    assert torch.equal(decode_stream(encoded, "stream"), integers)
    assert encoded.storage_bits() == huffman.encoded_bits(integers)


@pytest.mark.parametrize("shape", [(40, 1024), (63, 63), (5, 1500), (9, 4100)])
def test_slab_size_does_not_change_the_stream(shape: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    integers = gaussian_integers(shape, 3.0)
    integers[0, 0], integers[-1, -1], integers[1, 5:8] = 10**6, -(10**9), 2**31 - 1
    whole = huffman.encode(integers)
    monkeypatch.setattr(huffman, "_SLAB_WEIGHTS", 5000)
    monkeypatch.setattr(huffman_decode, "_SLAB_CHUNKS", 3)
    parts = huffman.encode(integers)
    assert torch.equal(parts.stream, whole.stream)
    assert torch.equal(parts.chunk_bits, whole.chunk_bits)
    assert torch.equal(decode_stream(parts, "stream"), integers)


@settings(deadline=None, max_examples=30)
@given(st.lists(st.integers(-(2**31), 2**31 - 1), min_size=1, max_size=80))
def test_any_int32_survives_huffman_coding(values: list[int]) -> None:
    integers = torch.tensor(values, dtype=torch.int32).reshape(1, -1)
    assert torch.equal(decode_stream(huffman.encode(integers), "stream"), integers)


@pytest.mark.parametrize("center", [-(2**31), 2**31 - 1])
def test_huffman_tables_at_the_ends_of_int32(center: int) -> None:
    integers = torch.full((4, 40), center, dtype=torch.int32)
    integers[::2, :7] = -1 - center
    assert torch.equal(decode_stream(huffman.encode(integers), "stream"), integers)


def test_distant_integers_are_escaped() -> None:
    integers = gaussian_integers((64, 256), 2.0)
    integers[0, 0], integers[63, 255] = 2**31 - 1, -(2**31)
    encoded = huffman.encode(integers)
    assert torch.equal(decode_stream(encoded, "stream"), integers)
    assert encoded.storage_bits() < 64 * 256 * 5
    assert encoded.storage_bits() == huffman.encoded_bits(integers)


@given(st.lists(st.integers(0, 10**6), min_size=2, max_size=60))
def test_lengths_are_optimal_and_complete(counts: list[int]) -> None:
    lengths = huffman.code_lengths(np.array(counts)).astype(np.int64)
    used = np.array(counts) > 0
    assert ((lengths > 0) == used).all()
    assert lengths.max() <= huffman.MAX_LENGTH
    if used.sum() >= 2:
        assert (1 << (huffman.MAX_LENGTH - lengths[used])).sum() == 1 << huffman.MAX_LENGTH
    if used.sum() >= 2 and _plain_huffman_depth(counts) <= huffman.MAX_LENGTH:
        assert (lengths * np.array(counts)).sum() == _plain_huffman_cost(counts)


def _plain_huffman_cost(counts: list[int]) -> int:
    heap, cost = [count for count in counts if count], 0
    heapq.heapify(heap)
    while len(heap) > 1:
        merged = heapq.heappop(heap) + heapq.heappop(heap)
        cost += merged
        heapq.heappush(heap, merged)
    return cost


def _plain_huffman_depth(counts: list[int]) -> int:
    heap = [(count, index, 0) for index, count in enumerate(counts) if count]
    heapq.heapify(heap)
    while len(heap) > 1:
        (a, index, depth_a), (b, _, depth_b) = heapq.heappop(heap), heapq.heappop(heap)
        heapq.heappush(heap, (a + b, index, max(depth_a, depth_b) + 1))
    return heap[0][2]


def test_length_limit_on_fibonacci_counts() -> None:
    counts = [1, 1]
    while len(counts) < 30:
        counts.append(counts[-1] + counts[-2])
    lengths = huffman.code_lengths(np.array(counts)).astype(np.int64)
    assert lengths.max() == huffman.MAX_LENGTH
    assert (1 << (huffman.MAX_LENGTH - lengths)).sum() == 1 << huffman.MAX_LENGTH


def test_size_is_close_to_the_entropy() -> None:
    integers = gaussian_integers((512, 1024), 3.0)
    _, counts = integers.unique(return_counts=True)
    p = counts.double() / integers.numel()
    entropy = float(-(p * p.log2()).sum())
    # 16 bits per chunk of 1024 weights, and the redundancy of whole code lengths (0.015 bit here)
    assert entropy < huffman.encode(integers).storage_bits() / integers.numel() < entropy + 0.06


def test_codes_match_the_definition() -> None:
    table = huffman.HuffmanTable(-1, np.array([2, 1, 3, 3], dtype=np.uint8))
    assert table.codes().tolist() == [0b10, 0b0, 0b110, 0b111]


def test_each_chunk_can_be_decoded_alone() -> None:
    integers = gaussian_integers((6, 2500), 2.0)
    encoded = huffman.encode(integers)
    bits = "".join(format(word & 0xFFFFFFFF, "032b") for word in encoded.stream.tolist())
    codes = {
        format(code, f"0{length}b"): index
        for index, (code, length) in enumerate(zip(encoded.table.codes(), encoded.table.lengths, strict=True))
        if length
    }
    lengths = encoded.chunk_bits.to(torch.int64)
    start = int(lengths.flatten()[: 4 * 3 + 1].sum())  # row 4, column block 1
    text, found, prefix = bits[start : start + int(lengths[4, 1])], [], ""
    for bit in text:
        prefix += bit
        if prefix in codes:
            found.append(codes[prefix] + encoded.table.first_symbol)
            prefix = ""
    assert found == integers[4, 1024:2048].tolist()
