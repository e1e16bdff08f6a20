"""Every encoding dequantizes what it stored, and packs coded integers without loss."""

import pytest
import torch

from helpers.builders import gaussian_integers
from vllm_latq.coding.huffman import encoder as huffman
from vllm_latq.format.encodings.huffman import HuffmanWeight
from vllm_latq.format.encodings.packed import PackedWeight
from vllm_latq.format.scheme import LayerScheme
from vllm_latq.format.served_size import best_bits
from vllm_latq.format.validate import weight_from_tensors


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
@pytest.mark.parametrize(("shape", "group_size"), [((1, 1), -1), ((5, 63), 21), ((7, 96), 32), ((3, 33), -1)])
@pytest.mark.parametrize("density", [None, 0.0, 0.3])
def test_packed_round_trip(bits: int, shape: tuple[int, int], group_size: int, density: float | None) -> None:
    generator = torch.Generator().manual_seed(bits)
    groups = 1 if group_size == -1 else shape[1] // group_size
    integers = torch.randint(-(2 ** (bits - 1)), 2 ** (bits - 1), shape, generator=generator)
    scales = torch.rand(shape[0], groups, generator=generator).add(0.5).to(torch.bfloat16)
    values = torch.randn(shape, generator=generator).to(torch.bfloat16)
    mask = None if density is None else torch.rand(shape, generator=generator) < density
    weight = PackedWeight.from_integers(integers, scales, bits, group_size, mask, values)
    expected = integers.float() * scales.float().repeat_interleave(shape[1] // groups, 1)
    if mask is not None:
        expected = torch.where(mask, values.float(), expected)
    assert torch.equal(weight.dequantize(), expected)
    tensors = weight.to_tensors()
    again = weight_from_tensors(tensors, weight.scheme, shape, "layer")
    assert torch.equal(again.dequantize(), expected)
    assert weight.storage_bits() == sum(tensor.nbytes * 8 for tensor in tensors.values())


@pytest.mark.parametrize("spread", [0.2, 1.0, 6.0, 60.0])
@pytest.mark.parametrize("bits", [None, 2, 8])
def test_huffman_packed_is_lossless(spread: float, bits: int | None) -> None:
    integers = gaussian_integers((20, 65), spread)
    integers[3, 7] = 12345
    weight = HuffmanWeight(torch.tensor([0.0123]), huffman.encode(integers))
    again = weight_from_tensors(weight.to_tensors(), LayerScheme("huffman"), (20, 65), "layer")
    assert isinstance(again, HuffmanWeight)
    packed = again.pack(again.integers(), bits)
    assert torch.equal(packed.dequantize(), weight.dequantize())
    assert torch.equal(packed.dequantize(), integers.float() * torch.tensor(0.0123))


def test_best_bits_minimises_bytes() -> None:
    narrow = torch.randint(-2, 2, (50, 50), dtype=torch.int32)
    assert best_bits([narrow]) == 2
    assert best_bits([narrow * 3]) == 4
    narrow[0, 0] = 99  # one overflow of 2500 costs less than a wider code
    assert best_bits([narrow]) == 2
