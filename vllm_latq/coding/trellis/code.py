"""The trellis code: rings of bits, and the two weights that each window of 16 bits stands for. FORMAT.md section 3.4.

    tile     16 x 16 weights = 128 steps of two neighbouring weights in a row; a step adds `rate` bits to the ring,
             so a weight takes rate / 2 bits
    window   of step t: the 16 bits of the ring that end at bit (t + 1) rate; before the first bit comes the last
             (tail-biting)
    values   of a window w: h = w * 0x10001 * MULTIPLIERS[0] mod 2^32 has four signed bytes; bytes 0 and 2 are added for
             the first weight, 1 and 3 for the second; from rate 6 on, those of MULTIPLIERS[1] are added, too
    weight   value * FACTORS[rate] * scale of the row * scale of the column

The bit-shift trellis, and a hash in place of a stored codebook, are QTIP's (Tseng, Sun, Hou, De Sa, NeurIPS 2024,
sections 3.1 and 3.1.1); rings of one tile and a hash whose bytes are summed are EXL3's (exllamav3). Bytes that are
operands of an integer tensor core as they are, two weights per window, half bits and the multipliers are ours.
docs/trellis-code.md compares this code with others.
"""

from functools import lru_cache

import torch

WINDOW = 16
WINDOWS = 1 << WINDOW
TILE = 16
STEPS = TILE * TILE // 2
RATES = tuple(range(2, 13))
MULTIPLIERS = (0xCAB42AC9, 0x864FB373)
TWO_TERMS_FROM = 6
# Bring values to weights of variance 1. The values of all windows have the root mean square 104.450 with one term and
# 147.881 with two; times FACTORS that is 0.96 to 1.2, because codes with many bits reach a little further. Part of the
# format: numbers of float32, written in full.
FACTORS = {
    2: 0.009191000834107399,
    3: 0.009382479824125767,
    4: 0.00995691679418087,
    5: 0.010722833685576916,
    6: 0.007032681722193956,
    7: 0.007303169462829828,
    8: 0.0075736572034657,
    9: 0.007708901073783636,
    10: 0.00784414540976286,
    11: 0.008114633150398731,
    12: 0.008114633150398731,
}


@lru_cache(2)
def _window_values(terms: int) -> torch.Tensor:
    windows = torch.arange(WINDOWS, dtype=torch.int64, device="cpu")
    values = torch.zeros(WINDOWS, 2, dtype=torch.int64, device="cpu")
    for multiplier in MULTIPLIERS[:terms]:
        hashed = (windows * 0x10001 & 0xFFFFFFFF) * multiplier & 0xFFFFFFFF
        low, second, third, high = (((hashed >> shift & 255) ^ 128) - 128 for shift in (0, 8, 16, 24))
        values += torch.stack((low + third, second + high), 1)
    return values.to(torch.int16)


def window_values(rate: int) -> torch.Tensor:
    """Return the two values of every window, int16 [WINDOWS, 2]; callers must not change them."""
    return _window_values(2 if rate >= TWO_TERMS_FROM else 1)


def step_places() -> tuple[torch.Tensor, torch.Tensor]:
    """Return row and first column in its tile of the weights of each step, int64 [STEPS] each.

    Steps 4 l to 4 l + 3 are what lane l of a warp holds of the first operand of `mma.m16n8k32` for bytes.
    """
    step = torch.arange(STEPS, device="cpu")
    lane, register = step // 4, step % 4
    return lane // 4 + 8 * (register % 2), 4 * (lane % 4) + 2 * (register // 2)


def tile_words(rate: int) -> int:
    """Return the 32-bit words of a tile."""
    return STEPS * rate // 32


def decode_rings(words: torch.Tensor, rate: int) -> torch.Tensor:
    """Return the values of tiles of one rate, int16 [tiles, TILE, TILE], on the device of the words.

    Args:
        words: int32 [tiles, tile_words(rate)]; bit i of a ring is bit 31 - i % 32 of word i // 32.
        rate: bits per step.
    """
    unsigned = words.to(torch.int64) & 0xFFFFFFFF
    pairs = unsigned.roll(1, 1) << 32 | unsigned
    ends = torch.arange(1, STEPS + 1, device=words.device) * rate
    last = (ends - 1) // 32
    windows = pairs[:, last] >> (32 * (last + 1) - ends) & (WINDOWS - 1)
    values = window_values(rate).to(words.device)[windows]
    row, column = (place.to(words.device) for place in step_places())
    tiles = torch.empty(len(words), TILE, TILE, dtype=torch.int16, device=words.device)
    tiles[:, row, column], tiles[:, row, column + 1] = values.unbind(-1)
    return tiles


def pack_rings(symbols: torch.Tensor, rate: int) -> torch.Tensor:
    """Return the words of rings, int32 [tiles, tile_words(rate)], on the device of the symbols.

    Args:
        symbols: integers [tiles, STEPS], the bits that each step adds.
        rate: bits per step.
    """
    shifts = torch.arange(rate - 1, -1, -1, device=symbols.device)
    bits = (symbols.to(torch.int64).unsqueeze(-1) >> shifts & 1).reshape(len(symbols), tile_words(rate), 32)
    words = (bits << torch.arange(31, -1, -1, device=symbols.device)).sum(-1)
    return ((words ^ 1 << 31) - (1 << 31)).to(torch.int32)
