"""The Huffman kernel, bit for bit against a plain Python reader and the checkpoint's encoder."""

import pytest
import torch

from helpers.kernel_device import DEVICE
from vllm_latq.coding.huffman.encoder import encode
from vllm_latq.kernels.dev.audit import HUFFMAN
from vllm_latq.kernels.dev.reference import huffman_reference
from vllm_latq.kernels.entropy.chunks import Cut
from vllm_latq.kernels.entropy.huffman import decode_huffman, lookup_table
from vllm_latq.kernels.errors import KernelInputError
from vllm_latq.serving.decode import huffman_arguments

pytestmark = pytest.mark.kernel


def integers(rows: int, cols: int, spread: float, wild: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(rows * cols)
    z = (torch.randn(rows, cols, generator=generator) * spread).round().to(torch.int32)
    if wild:
        z.view(-1)[:wild] = torch.tensor([2**31 - 1, -(2**31), 99999, -77777], dtype=torch.int32)[:wild]
    return z


def arguments(z: torch.Tensor) -> tuple:
    return huffman_arguments(encode(z), DEVICE)


@pytest.mark.parametrize(
    ("rows", "cols", "spread", "wild"),
    [(3, 1100, 1.5, 4), (40, 33, 0.6, 1), (1, 1, 1.0, 0), (5, 20, 0.0, 0), (2, 60, 40.0, 0)],
)
def test_decodes_bit_for_bit(rows: int, cols: int, spread: float, wild: int) -> None:
    z = integers(rows, cols, spread, wild)
    given = arguments(z)
    *tensors, cut, _ = given
    shapes = (cut.rows, cut.cols), (cut.chunk_rows, cut.chunk_cols)
    assert torch.equal(huffman_reference(*tensors, *shapes), z)
    assert torch.equal(decode_huffman(*given).cpu(), z)


def test_audit_compiles_for_the_constants_of_the_format() -> None:
    assert arguments(torch.zeros(1, 1, dtype=torch.int32))[-1] == HUFFMAN


def test_corrupt_streams_are_refused_and_read_nothing_outside() -> None:
    stream, chunk_bits, *rest = arguments(integers(4, 60, 2.0, 2))
    flipped = stream ^ torch.randint(-(2**31), 2**31, stream.shape, dtype=torch.int64).to(stream)
    with pytest.raises(KernelInputError, match="every chunk to end after its number of bits, found chunk 0"):
        decode_huffman(flipped, chunk_bits, *rest)
    with pytest.raises(KernelInputError, match="words"):
        decode_huffman(stream[:-1], chunk_bits, *rest)
    with pytest.raises(KernelInputError, match="chunk_bits"):
        decode_huffman(stream, chunk_bits[:-1], *rest)
    for wrong in (stream[:1].expand(stream.numel()), stream[None], stream.to(torch.int64), stream.view(torch.float32)):
        with pytest.raises(KernelInputError, match="contiguous vector of int32"):
            decode_huffman(wrong, chunk_bits, *rest)


def test_bits_that_no_code_begins_with_are_refused() -> None:
    """ESCAPE alone, coded as 0: its table says nothing about 1."""
    stream, bits, lengths = torch.tensor([-5]).int(), torch.tensor([[32]]).to(torch.uint16), torch.tensor([1]).byte()
    with pytest.raises(KernelInputError):
        decode_huffman(*(part.to(DEVICE) for part in (stream, bits, lengths)), 0, Cut(1, 1, 1, 1), HUFFMAN)


def test_lookup_table_refuses_lengths_that_are_no_prefix_code() -> None:
    with pytest.raises(KernelInputError, match="prefix code"):
        lookup_table(torch.tensor([1, 1, 1], dtype=torch.uint8), HUFFMAN)
    with pytest.raises(KernelInputError, match="up to 15"):
        lookup_table(torch.tensor([1, 16], dtype=torch.uint8), HUFFMAN)
    with pytest.raises(KernelInputError, match="at most 4097 lengths"):
        lookup_table(torch.tensor([[1, 1]], dtype=torch.uint8), HUFFMAN)
