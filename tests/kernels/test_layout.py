"""Packed layout: exact round trips, the documented bit positions, and refusals. No kernel runs here."""

import pytest
import torch

from helpers.kernel_layout import untile_codes, untile_weight
from vllm_latq.kernels.errors import KernelInputError
from vllm_latq.kernels.layout.codes import (
    ROW_BLOCK,
    codes_to_stream,
    padded_rows,
    stream_to_codes,
    tile_codes,
    tile_scales,
    tile_weight,
)
from vllm_latq.kernels.layout.fields import planes, storage, words
from vllm_latq.kernels.layout.weight import prepare


def random_codes(rows: int, cols: int, bits: int) -> torch.Tensor:
    return torch.randint(0, 2**bits, (rows, cols), generator=torch.Generator().manual_seed(1), dtype=torch.uint8)


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
@pytest.mark.parametrize("cols", [1, 31, 32, 33, 500])
def test_stream_round_trip(bits: int, cols: int) -> None:
    codes = random_codes(5, cols, bits)
    stream = codes_to_stream(codes, bits)
    assert stream.shape == (5, -(-cols * bits // 32))
    assert torch.equal(stream_to_codes(stream, bits, cols), codes)


def test_stream_is_little_endian_and_crosses_words() -> None:
    codes = torch.zeros(1, 33, dtype=torch.uint8)
    codes[0, 10] = 0b111  # bits 30, 31 and 32
    codes[0, 32] = 0b101  # bits 96 and 98
    assert codes_to_stream(codes, 3).tolist() == [[-(1 << 30), 1, 0, 0b101]]


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
def test_every_stored_bit_is_used_once(bits: int) -> None:
    seen = set()
    for segments in storage(bits):
        assert sorted(bit for s in segments for bit in range(s.low, s.low + s.width)) == list(range(bits))
        for s in segments:
            seen |= {(s.plane, s.offset + i) for i in range(s.width)}
    assert seen == {(p, i) for p in range(planes(bits)) for i in range(16)}


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
def test_tiles_round_trip_and_are_natural_order(bits: int) -> None:
    codes = random_codes(2 * ROW_BLOCK, 512, bits)
    tiles = tile_codes(codes, bits)
    assert tiles.shape == (2, 2, planes(bits), ROW_BLOCK, words(bits))
    assert torch.equal(untile_codes(tiles, bits), codes)
    # One code by hand: column 256 + 1 is field 0, word 0, high half of the second superblock.
    segment = storage(bits)[0][0]
    word = int(tiles[1, 1, segment.plane, 7, 0])
    stored = word >> (segment.offset + 16) & (1 << segment.width) - 1
    assert stored == int(codes[ROW_BLOCK + 7, 257]) >> segment.low & (1 << segment.width) - 1


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
@pytest.mark.parametrize(("rows", "cols"), [(1, 33), (63, 500), (130, 256), (129, 1)])
def test_weight_round_trip(bits: int, rows: int, cols: int) -> None:
    qweight = codes_to_stream(random_codes(rows, cols, bits), bits)
    order = torch.randperm(padded_rows(rows), generator=torch.Generator().manual_seed(2))
    tiles = tile_weight(qweight, bits, cols, order)
    assert torch.equal(untile_weight(tiles, bits, rows, cols, order), qweight)


@pytest.mark.parametrize("group_size", [32, 64, 128])
def test_scale_pairs(group_size: int) -> None:
    cols = 3 * group_size if group_size == 128 else 256 + group_size
    scales = torch.randn(70, cols // group_size).bfloat16()
    pairs = tile_scales(scales, group_size, cols, torch.arange(128))
    assert pairs.shape == (2, 2, 128 // group_size, 64)
    per_super = 256 // group_size
    for row, group in [(0, 0), (69, cols // group_size - 1), (3, 1)]:
        within = group % per_super
        word = int(pairs[row // 64, group // per_super, within // 2, row % 64])
        bits = (word >> 16 * (within % 2)) & 0xFFFF
        assert bits == int(scales[row, group].view(torch.int16)) & 0xFFFF


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"bits": 5}, "bits: expected one of"),
        ({"group_size": 48}, "group_size: expected one of"),
        ({"cols": 320}, "words for 320 columns"),
        ({"scales": torch.zeros(4, 3, dtype=torch.bfloat16)}, "scales: expected bfloat16"),
        ({"row_scales": torch.zeros(5)}, "row_scales: expected"),
    ],
)
def test_refusals(change: dict, message: str) -> None:
    arguments = {"qweight": torch.zeros(4, 32, dtype=torch.int32), "bits": 4, "group_size": 128, "cols": 256}
    with pytest.raises(KernelInputError, match=message):
        prepare(**(arguments | change))


def test_refuses_a_shard_that_cuts_a_group() -> None:
    with pytest.raises(KernelInputError, match="whole groups"):
        prepare(torch.zeros(4, 20, dtype=torch.int32), 4, 128, 160)
