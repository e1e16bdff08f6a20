"""The Huffman kernel in the interpreter, bit for bit against a plain Python reader and the checkpoint's encoder."""

import numpy as np
import pytest
import torch

from vllm_latq.huffman import code_lengths, encode
from vllm_latq.kernels.errors import KernelInputError
from vllm_latq.kernels.huffman import decode_huffman, lookup_table
from vllm_latq.kernels.reference import canonical_codes, huffman_reference

pytestmark = pytest.mark.interpreter

SYMBOLS = 9  # -4 .. 4; everything else is escaped


def integers(rows: int, cols: int, spread: float, wild: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(rows * cols)
    z = (torch.randn(rows, cols, generator=generator) * spread).round().to(torch.int32)
    if wild:
        z.view(-1)[:wild] = torch.tensor([2**31 - 1, -(2**31), 99999, -77777], dtype=torch.int32)[:wild]
    return z


def arguments(z: torch.Tensor) -> tuple:
    coded = encode(z)
    lengths = torch.from_numpy(coded.table.lengths)[None]
    return (coded.stream, coded.chunk_bits, lengths, coded.table.first_symbol, *z.shape)


def encode_classes(z: torch.Tensor, column_class: torch.Tensor) -> tuple:
    """Arguments of the decoder for integers coded with one table per class of columns: bit by bit, as text."""
    rows, cols = z.shape
    symbols = torch.where((z >= -4) & (z <= 4), z + 4, SYMBOLS)
    lengths, words = [], []
    for group in range(int(column_class.max()) + 1):
        counts = torch.bincount(symbols[:, column_class == group].flatten(), minlength=SYMBOLS + 1)
        lengths.append(code_lengths(counts.numpy()))
        codes = canonical_codes(lengths[-1].tolist())
        words.append({index: format(code, f"0{length}b") for (length, code), index in codes.items()})
    chunk_rows, chunk_cols = max(1, 1024 // cols), min(cols, 1024)
    grid = (-(-rows // chunk_rows), -(-cols // chunk_cols))
    chunks = []
    for i in range(grid[0]):
        for j in range(grid[1]):
            bits = ""
            for row in range(i * chunk_rows, min((i + 1) * chunk_rows, rows)):
                for col in range(j * chunk_cols, min((j + 1) * chunk_cols, cols)):
                    symbol = int(symbols[row, col])
                    bits += words[int(column_class[col])][symbol]
                    bits += format(int(z[row, col]) & 0xFFFFFFFF, "032b") if symbol == SYMBOLS else ""
            chunks.append(bits)
    text = "".join(chunks)
    text += "0" * (-len(text) % 32)
    stream = np.array([int(text[i : i + 32], 2) for i in range(0, len(text), 32)], dtype=np.uint32).view(np.int32)
    chunk_bits = torch.tensor([len(bits) for bits in chunks]).view(grid).to(torch.uint16)
    return torch.from_numpy(stream), chunk_bits, torch.from_numpy(np.stack(lengths)), -4, rows, cols, column_class


@pytest.mark.parametrize(
    ("rows", "cols", "spread", "wild"),
    [(3, 1100, 1.5, 4), (40, 33, 0.6, 1), (1, 1, 1.0, 0), (5, 20, 0.0, 0), (2, 60, 40.0, 0)],
)
def test_decodes_bit_for_bit(rows: int, cols: int, spread: float, wild: int) -> None:
    z = integers(rows, cols, spread, wild)
    given = arguments(z)
    assert torch.equal(huffman_reference(*given), z)
    assert torch.equal(decode_huffman(*given), z)


@pytest.mark.parametrize(("classes", "rows", "cols"), [(1, 7, 20), (3, 7, 20), (16, 5, 33), (16, 2, 1040)])
def test_one_table_per_class_of_columns(classes: int, rows: int, cols: int) -> None:
    generator = torch.Generator().manual_seed(classes)
    column_class = torch.randint(0, classes, (cols,), generator=generator, dtype=torch.uint8)
    column_class[:classes] = torch.arange(classes, dtype=torch.uint8)
    spread = torch.linspace(0.3, 2.5, classes)[column_class.long()]
    z = (torch.randn(rows, cols, generator=generator) * spread).round().to(torch.int32)
    z[0, 0], z[-1, -1] = 10**6, -(2**31)
    given = encode_classes(z, column_class)
    assert torch.equal(huffman_reference(*given), z)
    assert torch.equal(decode_huffman(*given), z)


def test_hostile_classes() -> None:
    stream, chunk_bits, lengths, *rest = arguments(integers(4, 60, 2.0))
    two = lengths.repeat(2, 1)
    with pytest.raises(KernelInputError, match="the class of each column"):
        decode_huffman(stream, chunk_bits, two, *rest)
    with pytest.raises(KernelInputError, match="classes below 2"):
        decode_huffman(stream, chunk_bits, two, *rest, torch.full((60,), 2, dtype=torch.uint8))
    with pytest.raises(KernelInputError, match=r"uint8 \(60,\)"):
        decode_huffman(stream, chunk_bits, two, *rest, torch.zeros(59, dtype=torch.uint8))


def test_corrupt_streams_are_refused_and_read_nothing_outside() -> None:
    stream, chunk_bits, *rest = arguments(integers(4, 60, 2.0, 2))
    flipped = stream ^ torch.randint(-(2**31), 2**31, stream.shape, dtype=torch.int64).to(torch.int32)
    with pytest.raises(KernelInputError, match="to end at bit"):
        decode_huffman(flipped, chunk_bits, *rest)
    with pytest.raises(KernelInputError, match="words"):
        decode_huffman(stream[:-1], chunk_bits, *rest)
    with pytest.raises(KernelInputError, match="chunk_bits"):
        decode_huffman(stream, chunk_bits[:-1], *rest)


def test_lookup_table_refuses_lengths_that_are_no_prefix_code() -> None:
    with pytest.raises(KernelInputError, match="prefix code"):
        lookup_table(torch.tensor([[2, 2, 0], [1, 1, 1]], dtype=torch.uint8))
    with pytest.raises(KernelInputError, match="up to 15"):
        lookup_table(torch.tensor([[1, 16]], dtype=torch.uint8))
    with pytest.raises(KernelInputError, match=r"\[classes, symbols \+ 1\]"):
        lookup_table(torch.tensor([1, 1], dtype=torch.uint8))
