"""Packing of b-bit codes into int32 words, and back. FORMAT.md section 3.1.

Invariant: code j of a row occupies bits [j*b, (j+1)*b) of the row's little-endian bit stream; bits past the last code
are zero. Codes may straddle words (b = 3). `unpack_codes(pack_codes(codes, b), b, cols) == codes`.
"""

import torch

WORD_BITS = 32
# Codes treated together: their int64 intermediates (some 30 bytes a code) must not outgrow the matrix itself.
_BAND_CODES = 1 << 18


def packed_words(cols: int, bits: int) -> int:
    """Number of int32 words in a packed row of `cols` codes."""
    return -(-cols * bits // WORD_BITS)


def pack_codes(codes: torch.Tensor, bits: int) -> torch.Tensor:
    """Pack unsigned codes [rows, cols] (any integer dtype, values < 2**bits) into int32 [rows, packed_words]."""
    return torch.cat([_pack(band, bits) for band in codes.split(_band_rows(codes.shape[1]))])


def _pack(codes: torch.Tensor, bits: int) -> torch.Tensor:
    rows, cols = codes.shape
    words = packed_words(cols, bits)
    low, shift = _positions(cols, bits, codes.device)
    wide = codes.to(torch.int64) << shift
    packed = torch.zeros((rows, words + 1), dtype=torch.int64, device=codes.device)
    # Fields never overlap, so addition is a bitwise or; a straddling code leaves its upper part to the next word.
    packed.index_add_(1, low, wide & 0xFFFFFFFF)
    packed.index_add_(1, low + 1, wide >> WORD_BITS)
    return _signed(packed[:, :words])


def unpack_codes(packed: torch.Tensor, bits: int, cols: int) -> torch.Tensor:
    """Inverse of `pack_codes`: int32 [rows, packed_words] -> uint8 codes [rows, cols]."""
    if WORD_BITS % bits == 0:
        shifts = torch.arange(0, WORD_BITS, bits, dtype=torch.int32, device=packed.device)
        codes = (packed.unsqueeze(-1) >> shifts) & ((1 << bits) - 1)
        return codes.to(torch.uint8).reshape(packed.shape[0], -1)[:, :cols]
    return torch.cat([_unpack_straddling(band, bits, cols) for band in packed.split(_band_rows(cols))])


def _unpack_straddling(packed: torch.Tensor, bits: int, cols: int) -> torch.Tensor:
    low, shift = _positions(cols, bits, packed.device)
    words = torch.nn.functional.pad(packed.to(torch.int64) & 0xFFFFFFFF, (0, 1))
    pair = words[:, low] | (words[:, low + 1] << WORD_BITS)
    return ((pair >> shift) & ((1 << bits) - 1)).to(torch.uint8)


def codes_at(packed: torch.Tensor, bits: int, rows: torch.Tensor, cols: torch.Tensor) -> torch.Tensor:
    """Single codes, int32 [n], at the coordinates rows and cols (integers [n])."""
    start = cols.to(torch.int64) * bits
    word, shift = rows.to(torch.int64) * packed.shape[1] + start // WORD_BITS, start % WORD_BITS
    flat = packed.reshape(-1)
    # The next word is needed only by a code that straddles; clamped, because the last one has none.
    low = flat[word].to(torch.int64) & 0xFFFFFFFF
    high = flat[(word + 1).clamp(max=flat.numel() - 1)].to(torch.int64) & 0xFFFFFFFF
    return ((((high << WORD_BITS) | low) >> shift) & ((1 << bits) - 1)).to(torch.int32)


def put_codes(packed: torch.Tensor, bits: int, rows: torch.Tensor, cols: torch.Tensor, codes: torch.Tensor) -> None:
    """Set single codes (integers [n]) in place; arguments as for `codes_at`, no coordinate twice."""
    start = cols.to(torch.int64) * bits
    word, shift = rows.to(torch.int64) * packed.shape[1] + start // WORD_BITS, start % WORD_BITS

    def fields(values: torch.Tensor) -> torch.Tensor:
        wide = values.to(torch.int64) << shift
        return torch.cat((wide & 0xFFFFFFFF, wide >> WORD_BITS))

    # Fields never overlap, so what several codes change in a word adds up without carry.
    change = fields(codes) - fields(codes_at(packed, bits, rows, cols))
    changed = change.nonzero()[:, 0]
    words, index = torch.cat((word, word + 1))[changed].unique(return_inverse=True)
    flat = packed.view(-1)
    sums = flat[words].to(torch.int64) & 0xFFFFFFFF
    sums.index_add_(0, index, change[changed])
    flat[words] = _signed(sums)


def _signed(words: torch.Tensor) -> torch.Tensor:
    """int64 in [0, 2^32) -> int32 with the same bits."""
    return torch.where(words >= 1 << 31, words - (1 << 32), words).to(torch.int32)


def _band_rows(cols: int) -> int:
    return max(1, _BAND_CODES // max(cols, 1))


def _positions(cols: int, bits: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Word index and bit offset of each code in a row."""
    start = torch.arange(cols, dtype=torch.int64, device=device) * bits
    return start // WORD_BITS, start % WORD_BITS


def zero_point(bits: int, midrise: bool) -> float:
    """The code, or the middle between two, that stands for zero."""
    return (1 << (bits - 1)) - 0.5 * midrise
