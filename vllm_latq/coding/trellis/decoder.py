"""Decode a matrix from the words of its tiles. FORMAT.md section 3.4."""

import torch

from vllm_latq.coding.trellis.code import FACTORS, RATES, TILE, decode_rings, tile_words

# Tiles that are decoded at a time: their windows take about 20 MB.
_BAND_TILES = 1 << 12


def decode_tiles(words: torch.Tensor, rates: torch.Tensor) -> torch.Tensor:
    """Return value * FACTORS[rate] of every weight, float32 [16 row tiles, 16 column tiles], columns as stored.

    Args:
        words: int32 [words], one tile after the other, row by row.
        rates: int64 [row tiles, column tiles].
    """
    row_tiles, column_tiles = rates.shape
    decoded = torch.empty(row_tiles * TILE, column_tiles * TILE, dtype=torch.float32, device=words.device)
    height, start = max(1, _BAND_TILES // column_tiles), 0
    for band, of_band in zip(decoded.split(height * TILE), rates.split(height), strict=True):
        stop = start + int(of_band.sum()) * tile_words(1)
        _decode_band(words[start:stop], of_band, band)
        start = stop
    return decoded


def _decode_band(words: torch.Tensor, rates: torch.Tensor, band: torch.Tensor) -> None:
    """Decode some rows of tiles into `band`."""
    flat = rates.flatten().to(words.device)
    sizes = flat * tile_words(1)
    starts = sizes.cumsum(0) - sizes
    decoded = torch.empty(rates.numel(), TILE, TILE, dtype=torch.float32, device=words.device)
    for rate in RATES:
        chosen = (flat == rate).nonzero()[:, 0]
        if len(chosen):
            index = starts[chosen][:, None] + torch.arange(tile_words(rate), device=words.device)
            decoded[chosen] = decode_rings(words[index], rate).to(torch.float32) * FACTORS[rate]
    in_rows = band.view(rates.shape[0], TILE, rates.shape[1], TILE)
    in_rows.copy_(decoded.view(*rates.shape, TILE, TILE).transpose(1, 2))
