"""Packing of b-bit codes into int32 words, and back. FORMAT.md section 3.1.

Invariant: code j of a row occupies bits [j*b, (j+1)*b) of the row's little-endian bit stream; bits past the last code
are zero. Codes may straddle words (b = 3). `unpack_codes(pack_codes(codes, b), b, cols) == codes`.
"""

import math

import torch
from torch.nn import functional

WORD_BITS = 32


def packed_words(cols: int, bits: int) -> int:
    """Number of int32 words in a packed row of `cols` codes."""
    return -(-cols * bits // WORD_BITS)


def pack_codes(codes: torch.Tensor, bits: int) -> torch.Tensor:
    """Pack unsigned codes [rows, cols] (any integer dtype, values < 2**bits) into int32 [rows, packed_words]."""
    rows, cols = codes.shape
    length, fields = _stretch(bits)
    stretches = -(-cols // len(fields))
    parts = functional.pad(codes.to(torch.uint8), (0, stretches * len(fields) - cols))
    parts = parts.reshape(rows, stretches, len(fields))
    stream = parts.new_zeros((rows, stretches, length))
    for index, (byte, shift) in enumerate(fields):
        stream[..., byte] |= parts[..., index] << shift
        if shift + bits > 8:
            stream[..., byte + 1] |= parts[..., index] >> (8 - shift)
    words = packed_words(cols, bits)
    stream = functional.pad(stream.view(rows, stretches * length), (0, 4 * words - stretches * length))
    # Flat, because a single row that was cut keeps its stride, which no word has.
    return stream.reshape(-1).view(torch.int32).view(rows, words)


def unpack_codes(packed: torch.Tensor, bits: int, cols: int) -> torch.Tensor:
    """Inverse of `pack_codes`: int32 [rows, packed_words] -> uint8 codes [rows, cols]."""
    assert packed.shape[1] >= packed_words(cols, bits), f"{tuple(packed.shape)} words for {cols} codes of {bits} bits"
    length, fields = _stretch(bits)
    stretches = -(-cols // len(fields))
    # A copy, because what is contiguous may still have strides that no view takes, where a dimension has size 1.
    stream = packed.clone(memory_format=torch.contiguous_format).view(torch.uint8)
    stream = functional.pad(stream, (0, stretches * length - stream.shape[1])).view(len(packed), stretches, length)
    codes = []
    for byte, shift in fields:
        code = stream[..., byte] >> shift
        if shift + bits > 8:
            code |= stream[..., byte + 1] << (8 - shift)
        codes.append(code)
    whole = torch.stack(codes, -1).bitwise_and_((1 << bits) - 1)
    return whole.view(len(packed), stretches * len(fields))[:, :cols]


def _stretch(bits: int) -> tuple[int, list[tuple[int, int]]]:
    """The shortest run of whole bytes that codes fill: how many bytes, and the byte and bit that each code starts at.

    Every such run of a row looks alike, so a code of all of them is one strided operation.
    """
    common = math.gcd(bits, 8)
    return bits // common, [divmod(index * bits, 8) for index in range(8 // common)]


def codes_at(packed: torch.Tensor, bits: int, rows: torch.Tensor, cols: torch.Tensor) -> torch.Tensor:
    """Single codes, int32 [n], at the coordinates rows and cols (integers [n])."""
    start = cols.to(torch.int64) * bits
    word, shift = rows.to(torch.int64) * packed.shape[1] + start // WORD_BITS, start % WORD_BITS
    flat = packed.reshape(-1)
    # The next word is needed only by a code that straddles; clamped, because the last one has none.
    low = flat[word].to(torch.int64) & 0xFFFFFFFF
    high = flat[(word + 1).clamp(max=flat.numel() - 1)].to(torch.int64) & 0xFFFFFFFF
    return ((((high << WORD_BITS) | low) >> shift) & ((1 << bits) - 1)).to(torch.int32)


def _signed(words: torch.Tensor) -> torch.Tensor:
    """int64 in [0, 2^32) -> int32 with the same bits."""
    return torch.where(words >= 1 << 31, words - (1 << 32), words).to(torch.int32)


def zero_point(bits: int, midrise: bool) -> float:
    """The code, or the middle between two, that stands for zero."""
    return (1 << (bits - 1)) - 0.5 * midrise
