"""The decoder that runs on a CPU, against the integers that were encoded."""

import dataclasses

import numpy as np
import pytest
import torch

from helpers.builders import gaussian_integers
from vllm_latq.coding.huffman import encoder as huffman
from vllm_latq.coding.huffman.decoder import decode_stream, value_range
from vllm_latq.errors import CheckpointError

# Several rows to a chunk, one, several chunks to a row; the last ones full, short, and a single weight.
SHAPES = [(1, 1), (5, 1), (33, 63), (7, 500), (8, 512), (9, 512), (3, 1024), (3, 1025), (2, 2500), (64, 300)]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("deviation", [0.0, 3.0, 400.0])
def test_decoding_returns_the_encoded_integers(shape: tuple[int, int], deviation: float) -> None:
    integers = gaussian_integers(shape, deviation)
    encoded = huffman.encode(integers)
    decoded = decode_stream(encoded, "layer.stream")
    assert decoded.dtype == torch.int32
    assert torch.equal(decoded, integers)
    assert value_range(encoded, "layer.stream") == (integers.min(), integers.max())


def test_escaped_integers_decode_exactly() -> None:
    integers = gaussian_integers((20, 300), 2.0)
    integers[3, 7], integers[19, 299], integers[0, 0] = 2**31 - 1, -(2**31), 10**6
    encoded = huffman.encode(integers)
    assert encoded.table.lengths[encoded.table.escape] > 0
    assert torch.equal(decode_stream(encoded, "layer.stream"), integers)


@pytest.mark.parametrize("seed", range(20))
def test_random_bits_are_refused(seed: int) -> None:
    """No chunk of a random stream ends where it should."""
    encoded = huffman.encode(gaussian_integers((20, 300), 3.0))
    generator = torch.Generator().manual_seed(seed)
    stream = torch.randint(-(2**31), 2**31 - 1, encoded.stream.shape, generator=generator, dtype=torch.int32)
    with pytest.raises(CheckpointError, match=r"layer\.stream: expected chunk 0 to end at bit \d+, found bit"):
        decode_stream(dataclasses.replace(encoded, stream=stream), "layer.stream")
    with pytest.raises(CheckpointError, match=r"layer\.stream: expected chunk 0 to end at bit \d+, found bit"):
        value_range(dataclasses.replace(encoded, stream=stream), "layer.stream")


@pytest.mark.parametrize("seed", range(10))
def test_flipped_bits_that_move_the_end_of_a_chunk_are_refused(seed: int) -> None:
    encoded = huffman.encode(gaussian_integers((20, 300), 2.0))
    generator = torch.Generator().manual_seed(seed)
    stream = encoded.stream.clone()
    stream[torch.randint(0, stream.numel(), (5,), generator=generator)] ^= 0x5A5A5A5A
    with pytest.raises(CheckpointError, match=r"layer\.stream: expected chunk \d to end at bit \d+, found bit"):
        decode_stream(dataclasses.replace(encoded, stream=stream), "layer.stream")


def test_other_codes_of_the_same_lengths_decode_to_other_integers() -> None:
    """Nothing in the stream itself can tell: the fingerprint of the checkpoint does."""
    integers = torch.arange(6000, dtype=torch.int32).reshape(20, 300) % 4
    encoded = huffman.encode(integers)
    assert encoded.table.lengths.tolist() == [2, 2, 2, 2, 0], "every pair of bits is the code of an integer"
    decoded = decode_stream(dataclasses.replace(encoded, stream=~encoded.stream), "layer.stream")
    assert torch.equal(decoded, 3 - integers)


def test_stream_with_an_unused_code_is_refused() -> None:
    table = huffman.HuffmanTable(0, np.array([1], dtype=np.uint8))  # ESCAPE alone, coded as 0
    damaged = huffman.HuffmanStream(table, torch.tensor([[32]]).to(torch.uint16), torch.tensor([-5]).int(), (1, 1))
    with pytest.raises(CheckpointError, match=r"chunk 0 to end at bit 32, found bit 0"):
        decode_stream(damaged, "layer.stream")


def test_huffman_chunk_of_another_length_is_refused() -> None:
    encoded = huffman.encode(gaussian_integers((40, 300), 3.0))
    bits = encoded.chunk_bits.to(torch.int32)
    bits[2, 0], bits[3, 0] = bits[2, 0] + 1, bits[3, 0] - 1
    damaged = dataclasses.replace(encoded, chunk_bits=bits.to(torch.uint16))
    with pytest.raises(CheckpointError, match=r"layer\.stream: expected chunk 2 to end at bit"):
        decode_stream(damaged, "layer.stream")
