"""rANS coding: lossless, within a percent of the entropy of its classes, of the size it states, safe when damaged."""

import dataclasses
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file

from helpers.builders import gaussian_integers
from vllm_latq.coding.huffman import encoder as huffman
from vllm_latq.coding.rans import decoder as rans_decoder
from vllm_latq.coding.rans import encoder as rans
from vllm_latq.coding.rans.model import FREQUENCY_TOTAL, MAX_TABLES, choose_model, frequencies
from vllm_latq.errors import CheckpointError

# Several rows to a chunk, one, several chunks to a row; the last ones full, short, and a single weight.
SHAPES = [(1, 1), (1, 4097), (5000, 1), (3, 33), (63, 65), (2, 4096), (9, 500), (2, 8300)]


def classes(rows: int, cols: int, octaves: float) -> torch.Tensor:
    """Return integers whose rows and columns each have deviations over so many octaves."""
    spread = torch.exp2(octaves * torch.linspace(-1, 1, rows))[:, None] * torch.exp2(octaves * torch.rand(cols))
    return (torch.randn(rows, cols) * spread).round().to(torch.int32)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("deviation", [0.0, 0.3, 3.0, 400.0])
def test_rans_round_trip_and_estimated_size(shape: tuple[int, int], deviation: float) -> None:
    integers = gaussian_integers(shape, deviation)
    encoded = rans.encode(integers)
    decoded = rans_decoder.decode_stream(encoded, "layer.stream")
    assert decoded.dtype == torch.int32
    assert torch.equal(decoded, integers)
    # A word per chunk may be estimated wrong: more only if every chunk ends near a multiple of 16 bits of information.
    assert abs(rans.encoded_bits(integers) - encoded.storage_bits()) <= 32 * (1 + encoded.chunk_words.numel() // 8)


@pytest.mark.parametrize("shape", [(63, 400), (7, 8300)])
def test_slab_size_does_not_change_decoding(shape: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rans_decoder, "_SLAB_CHUNKS", 2)
    integers = gaussian_integers(shape, 3.0)
    integers[0, 0], integers[-1, -1], integers[1, 5:8] = 10**6, -(10**9), 2**31 - 1
    encoded = rans.encode(integers)
    assert torch.equal(rans_decoder.decode_stream(encoded, "layer.stream"), integers)
    assert rans_decoder.value_range(encoded, "layer.stream") == (integers.min(), integers.max())


def test_rows_and_columns_of_different_spreads() -> None:
    torch.manual_seed(0)
    integers = classes(120, 300, 2.0)
    encoded = rans.encode(integers)
    assert torch.equal(rans_decoder.decode_stream(encoded, "layer.stream"), integers)
    model = encoded.model()
    assert model.row_class.max() > 1
    assert model.column_class.max() > 1
    assert len(model.tables) <= MAX_TABLES
    assert all(table.frequencies.sum() == FREQUENCY_TOTAL for table in model.tables)


def test_zeros_take_no_payload() -> None:
    encoded = rans.encode(torch.zeros((64, 640), dtype=torch.int32))
    assert (encoded.chunk_words == 2).all()
    assert encoded.table_ranges.tolist() == [[0, 1]]


def test_distant_integers_take_little_space() -> None:
    integers = gaussian_integers((64, 256), 2.0)
    integers[0, 0], integers[63, 255], integers[3, 3] = 2**31 - 1, -(2**31), 10**6
    encoded = rans.encode(integers)
    assert torch.equal(rans_decoder.decode_stream(encoded, "layer.stream"), integers)
    assert encoded.storage_bits() < rans.encode(gaussian_integers((64, 256), 2.0)).storage_bits() + 1000


@pytest.mark.parametrize("center", [-(2**31), 2**31 - 1])
def test_rans_tables_at_the_ends_of_int32(center: int) -> None:
    integers = torch.full((4, 40), center, dtype=torch.int32)
    integers[::2, :7] = 0  # far away: the tables cover a window around the median
    assert torch.equal(rans_decoder.decode_stream(rans.encode(integers), "layer.stream"), integers)


@settings(deadline=None, max_examples=12)
@given(st.lists(st.integers(-(2**31), 2**31 - 1), min_size=1, max_size=60), st.integers(1, 7))
def test_any_int32_survives_rans_coding(values: list[int], cols: int) -> None:
    integers = torch.tensor(values * cols, dtype=torch.int32).reshape(-1, cols)
    encoded = rans.encode(integers)
    assert torch.equal(rans_decoder.decode_stream(encoded, "layer.stream"), integers)


@given(st.lists(st.integers(0, 10**7), min_size=1, max_size=300))
def test_frequencies_sum_to_the_total_and_keep_every_symbol(counts: list[int]) -> None:
    found = frequencies(np.array(counts))
    assert found.sum() == FREQUENCY_TOTAL
    if any(counts):
        assert ((found > 0) == (np.array(counts) > 0)).all()


def test_frequencies_of_one_symbol_per_slot() -> None:
    assert (frequencies(np.arange(1, FREQUENCY_TOTAL + 1)) == 1).all()


def test_chunk_decoded_as_the_format_describes() -> None:
    """FORMAT.md section 3.4, word for word, in plain integers."""
    torch.manual_seed(1)
    integers = classes(30, 300, 1.0)
    integers[14, 7] = 2**31 - 9
    encoded = rans.encode(integers)
    words = encoded.stream.numpy().view(np.uint16).tolist()
    lengths = encoded.chunk_words.reshape(-1).tolist()
    row_class = [(int(encoded.row_class[i // 8]) >> (4 * (i % 8))) & 15 for i in range(30)]
    column_class = [(int(encoded.column_class[j // 8]) >> (4 * (j % 8))) & 15 for j in range(300)]
    tables, start = [], 0
    for first, count in encoded.table_ranges.tolist():
        entries = encoded.frequencies[start : start + count + 1].tolist()
        tables.append([(first + k if k < count else None, f) for k, f in enumerate(entries)])
        start += count + 1
    rows = 4096 // 300
    read = iter(words[lengths[0] : lengths[0] + lengths[1]])  # the second chunk: rows 13 to 25
    state = next(read) + (next(read) << 16)
    found = []
    for i in range(rows, 2 * rows):
        for j in range(300):
            slot, base = state % 4096, 0
            entries = iter(tables[row_class[i] + column_class[j]])
            symbol, frequency = next(entries)
            while slot >= base + frequency:
                base += frequency
                symbol, frequency = next(entries)
            state = frequency * (state // 4096) + slot - base
            if state < 1 << 16:
                state = (state << 16) + next(read)
            if symbol is None:
                halves = []
                for _ in range(2):
                    halves.append(state % (1 << 16))
                    state = (state >> 16 << 16) + next(read)
                symbol = (halves[0] << 16) + halves[1]
                symbol -= (symbol >> 31) << 32
            found.append(symbol)
    assert state == 1 << 16
    assert list(read) == []
    assert found == integers[rows : 2 * rows].reshape(-1).tolist()


def trained_integers(mini_model: Path, name: str, step: float) -> torch.Tensor:
    """Round a layer of the bundled model by nearest plane on scales per row and column; inputs: the embeddings."""
    from vllm_latq.quantize.lattice.factor import factorize
    from vllm_latq.quantize.lattice.nearest_plane import nearest_plane

    tensors = load_file(mini_model / "model.safetensors")
    weight = tensors[f"model.layers.0.{name}.weight"].float()
    inputs = tensors["model.embed_tokens.weight"].float() * tensors["model.layers.0.input_layernorm.weight"].float()
    factor = factorize(inputs.T @ inputs)
    column = torch.empty_like(factor.diagonal)
    column[factor.order] = factor.diagonal.rsqrt()
    row = weight.square().mean(1).sqrt().sqrt()
    scales = row[:, None] * column / column.log().mean().exp()
    scales *= step * weight.std() / scales.square().mean().sqrt()
    return nearest_plane(weight, factor, scales.float()).z


@pytest.mark.parametrize("step", [0.9, 0.4])
@pytest.mark.parametrize("name", ["self_attn.q_proj", "mlp.gate_proj"])
def test_trained_layers_are_coded_near_the_entropy_of_their_classes(mini_model: Path, name: str, step: float) -> None:
    integers = trained_integers(mini_model, name, step)
    encoded = rans.encode(integers)
    assert torch.equal(rans_decoder.decode_stream(encoded, "layer.stream"), integers)
    model = choose_model(integers)
    table = model.row_class[:, None] + model.column_class
    entropy = 0.0
    for index in table.unique():
        counts = integers[table == index].unique(return_counts=True)[1].double()
        entropy -= float((counts * (counts / counts.sum()).log2()).sum())
    payload = 16 * int(encoded.chunk_words.to(torch.int64).sum())
    # On average 24 of the 32 bits of a chunk's state are lost; 12-bit frequencies and the coder cost the rest.
    assert entropy < payload < 1.002 * entropy + 32 * encoded.chunk_words.numel()
    bits = encoded.storage_bits()
    assert math.isclose(bits, rans.encoded_bits(integers), abs_tol=0.002 * integers.numel())
    assert rans.encoded_bits(integers) > bits - 0.0005 * integers.numel()
    assert bits < huffman.encoded_bits(integers)


def test_corrupt_rans_streams_are_refused() -> None:
    integers = gaussian_integers((40, 300), 3.0)
    encoded = rans.encode(integers)
    for seed in range(8):
        generator = torch.Generator().manual_seed(seed)
        noise = torch.randint(-(2**31), 2**31, encoded.stream.shape, generator=generator).to(torch.int32)
        stream = noise if seed % 2 else encoded.stream.clone()
        stream[seed] ^= 1 << 4 * seed
        with pytest.raises(CheckpointError, match=r"layer\.stream: expected chunk \d to end after its own number"):
            rans_decoder.decode_stream(dataclasses.replace(encoded, stream=stream), "layer.stream")


def test_wrong_final_state_is_refused() -> None:
    encoded = rans.encode(gaussian_integers((4, 40), 3.0))
    for bit in range(16):  # of the last word that is read: all others are where they were
        halves = encoded.stream.numpy().copy().view(np.uint16)
        halves[int(encoded.chunk_words) - 1] ^= 1 << bit
        damaged = dataclasses.replace(encoded, stream=torch.from_numpy(halves.view(np.int32)))
        with pytest.raises(CheckpointError, match=r"layer\.stream: expected chunk 0 to end"):
            rans_decoder.decode_stream(damaged, "layer.stream")
        with pytest.raises(CheckpointError, match=r"layer\.stream: expected chunk 0 to end"):
            rans_decoder.value_range(damaged, "layer.stream")


def test_rans_chunk_of_another_length_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    encoded = rans.encode(gaussian_integers((40, 300), 3.0))
    words = encoded.chunk_words.to(torch.int32)
    words[1, 0], words[2, 0] = words[1, 0] + 1, words[2, 0] - 1
    damaged = dataclasses.replace(encoded, chunk_words=words.to(torch.uint16))
    with pytest.raises(CheckpointError, match=r"layer\.stream: expected chunk 1 to end after"):
        rans_decoder.decode_stream(damaged, "layer.stream")
    monkeypatch.setattr(rans_decoder, "_SLAB_CHUNKS", 1)
    with pytest.raises(CheckpointError, match=r"layer\.stream: expected chunk 1 to end"):
        rans_decoder.value_range(damaged, "layer.stream")
