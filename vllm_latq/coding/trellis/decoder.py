"""Decode a matrix from the words of its tiles. FORMAT.md section 3.4."""

import torch

from vllm_latq.coding.trellis.code import FACTORS, RATES, TILE, decode_rings, tile_words


def decode_tiles(words: torch.Tensor, rates: torch.Tensor) -> torch.Tensor:
    """Return value * FACTORS[rate] of every weight, float32 [16 row tiles, 16 column tiles], columns as stored.

    Temporaries take some 40 bytes for each weight.

    Args:
        words: int32 [words], one tile after the other, row by row.
        rates: int64 [row tiles, column tiles].
    """
    row_tiles, column_tiles = rates.shape
    flat = rates.flatten().to(words.device)
    sizes = flat * tile_words(1)
    starts = sizes.cumsum(0) - sizes
    decoded = torch.empty(rates.numel(), TILE, TILE, dtype=torch.float32, device=words.device)
    for rate in RATES:
        chosen = (flat == rate).nonzero()[:, 0]
        if len(chosen):
            index = starts[chosen][:, None] + torch.arange(tile_words(rate), device=words.device)
            decoded[chosen] = decode_rings(words[index], rate).to(torch.float32) * FACTORS[rate]
    return decoded.view(*rates.shape, TILE, TILE).transpose(1, 2).reshape(row_tiles * TILE, column_tiles * TILE)
