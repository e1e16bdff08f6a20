"""Pack b-bit codes into int32 words, and unpack them. FORMAT.md section 3.1.

Invariant: code j of a row occupies bits [j*b, (j+1)*b) of the row's little-endian bit stream; bits past the last code
are zero. Codes may straddle words (b = 3). `unpack_codes(pack_codes(codes, b), b, cols) == codes`.
"""

import math

import torch
from torch.nn import functional

WORD_BITS = 32


def packed_words(cols: int, bits: int) -> int:
    """Return the number of int32 words in a packed row of `cols` codes."""
    return -(-cols * bits // WORD_BITS)


def pack_codes(codes: torch.Tensor, bits: int) -> torch.Tensor:
    """Pack unsigned codes [rows, cols] (any integer dtype, values < 2**bits) into int32 [rows, packed_words]."""
    rows, cols = codes.shape
    length, fields = _stretch(bits)
    stretches = -(-cols // len(fields))
    padded = functional.pad(codes.to(torch.uint8), (0, stretches * len(fields) - cols))
    padded = padded.reshape(rows, stretches, len(fields))
    stream = padded.new_zeros((rows, stretches, length))
    for index, (byte, shift) in enumerate(fields):
        stream[..., byte] |= padded[..., index] << shift
        if shift + bits > 8:
            stream[..., byte + 1] |= padded[..., index] >> (8 - shift)
    words = packed_words(cols, bits)
    stream = functional.pad(stream.view(rows, stretches * length), (0, 4 * words - stretches * length))
    # Flat first: a single row that was cut keeps its stride, and a view as words refuses that stride.
    return stream.reshape(-1).view(torch.int32).view(rows, words)


def unpack_codes(packed: torch.Tensor, bits: int, cols: int) -> torch.Tensor:
    """Undo `pack_codes`: int32 [rows, packed_words] -> uint8 codes [rows, cols]."""
    assert packed.shape[1] >= packed_words(cols, bits), f"{tuple(packed.shape)} words for {cols} codes of {bits} bits"
    length, fields = _stretch(bits)
    stretches = -(-cols // len(fields))
    # A copy: where a dimension has size 1, a contiguous tensor may still have a stride that the view refuses.
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
    """Return the shortest run of whole bytes that codes fill: its length, and the byte and bit each code starts at.

    All runs of a row look alike, so that the k-th codes of all runs are one strided operation.
    """
    common = math.gcd(bits, 8)
    return bits // common, [divmod(index * bits, 8) for index in range(8 // common)]


def codes_at(packed: torch.Tensor, bits: int, rows: torch.Tensor, cols: torch.Tensor) -> torch.Tensor:
    """Return single codes, int32 [n], at the coordinates rows and cols (integers [n])."""
    start = cols.to(torch.int64) * bits
    word, shift = rows.to(torch.int64) * packed.shape[1] + start // WORD_BITS, start % WORD_BITS
    flat = packed.reshape(-1)
    # Only a code that straddles two words needs the next word; clamped, because the last word has none.
    low = flat[word].to(torch.int64) & 0xFFFFFFFF
    high = flat[(word + 1).clamp(max=flat.numel() - 1)].to(torch.int64) & 0xFFFFFFFF
    return ((((high << WORD_BITS) | low) >> shift) & ((1 << bits) - 1)).to(torch.int32)


def zero_point(bits: int, midrise: bool) -> float:
    """Return the code that stands for zero; on a mid-rise grid, the middle between two codes."""
    return (1 << (bits - 1)) - 0.5 * midrise
