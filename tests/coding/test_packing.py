"""Bit packing: exact round trips and the documented bit positions."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from vllm_latq.coding.packing import codes_at, pack_codes, packed_words, unpack_codes
from vllm_latq.format.scheme import SUPPORTED_BITS


@pytest.mark.parametrize("bits", SUPPORTED_BITS)
@given(rows=st.integers(1, 4), cols=st.sampled_from([1, 31, 32, 33, 63, 96, 500]), seed=st.integers(0, 2**31))
def test_packing_round_trip(bits: int, rows: int, cols: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    codes = torch.randint(0, 2**bits, (rows, cols), generator=generator, dtype=torch.uint8)
    packed = pack_codes(codes, bits)
    assert packed.dtype == torch.int32
    assert packed.shape == (rows, packed_words(cols, bits))
    assert torch.equal(unpack_codes(packed, bits, cols), codes)


@pytest.mark.parametrize("bits", SUPPORTED_BITS)
@pytest.mark.parametrize("rows", [0, 1, 2])
def test_rows_of_every_width(rows: int, bits: int) -> None:
    for cols in range(100):
        codes = torch.randint(0, 2**bits, (rows, cols), generator=torch.Generator().manual_seed(cols))
        packed = pack_codes(codes, bits)
        assert packed.is_contiguous()
        assert packed.shape == (rows, packed_words(cols, bits))
        assert torch.equal(unpack_codes(packed, bits, cols), codes.to(torch.uint8))
        apart = torch.nn.functional.pad(packed, (1, 1), value=-1)[:, 1:]
        for words in (apart, packed.t().contiguous().t(), packed.t().contiguous().t()[:1]):
            assert torch.equal(unpack_codes(words, bits, cols), codes[: len(words)].to(torch.uint8)), (
                "of words in a view"
            )
        assert torch.equal(pack_codes(codes.t().contiguous().t(), bits), packed)


@pytest.mark.parametrize("bits", SUPPORTED_BITS)
def test_bit_positions_follow_the_format(bits: int) -> None:
    cols = 67
    codes = torch.randint(0, 2**bits, (1, cols), generator=torch.Generator().manual_seed(0))
    stream = sum(int(code) << (bits * j) for j, code in enumerate(codes[0]))
    words = [(stream >> (32 * k)) & 0xFFFFFFFF for k in range(packed_words(cols, bits))]
    assert [word & 0xFFFFFFFF for word in pack_codes(codes, bits)[0].tolist()] == words


@pytest.mark.parametrize("bits", SUPPORTED_BITS)
@pytest.mark.parametrize(("cols", "share"), [(1, 1.0), (33, 0.3), (96, 1.0), (500, 0.05), (40, 0.0)])
def test_single_codes(bits: int, cols: int, share: float) -> None:
    generator = torch.Generator().manual_seed(0)
    codes = torch.randint(0, 2**bits, (7, cols), generator=generator)
    mask = torch.rand(7, cols, generator=generator) <= share
    rows, columns = mask.nonzero(as_tuple=True)
    assert torch.equal(codes_at(pack_codes(codes, bits), bits, rows, columns), codes[mask].to(torch.int32))


def test_zero_rows() -> None:
    assert unpack_codes(pack_codes(torch.zeros(0, 40, dtype=torch.uint8), 3), 3, 40).shape == (0, 40)
