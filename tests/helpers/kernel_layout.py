"""Inverses of the functions in `kernels/layout`: from what a kernel reads back to what a checkpoint stores."""

import torch

from vllm_latq.kernels.layout.codes import ROW_BLOCK, codes_to_stream
from vllm_latq.kernels.layout.entries import Coordinates, Entries
from vllm_latq.kernels.layout.fields import SUPERBLOCK, storage
from vllm_latq.kernels.layout.outliers import SLICE_ROWS, OutlierSlices


def untile_codes(tiles: torch.Tensor, bits: int) -> torch.Tensor:
    """Inverse of `tile_codes`: uint8 [row blocks * ROW_BLOCK, superblocks * 256]."""
    blocks, supers, _, _, per_row = tiles.shape
    shape = (blocks, supers, ROW_BLOCK, per_row, 2)
    fields = [torch.zeros(shape, dtype=torch.uint8, device=tiles.device) for _ in storage(bits)]
    for field, segments in zip(fields, storage(bits), strict=True):
        for segment in segments:
            word = tiles[:, :, segment.plane]
            for half in range(2):
                part = (word >> (segment.offset + 16 * half)) & ((1 << segment.width) - 1)
                field[..., half] |= (part << segment.low).to(torch.uint8)
    by_row = torch.stack(fields, 2).permute(0, 3, 1, 2, 4, 5)  # [blocks, ROW_BLOCK, supers, fields, words, halves]
    return by_row.reshape(blocks * ROW_BLOCK, supers * SUPERBLOCK)


def untile_weight(tiles: torch.Tensor, bits: int, rows: int, cols: int, order: torch.Tensor) -> torch.Tensor:
    """Inverse of `tile_weight`: int32 [rows, ceil(cols * bits / 32)]."""
    codes = untile_codes(tiles, bits)
    restored = torch.empty_like(codes)
    restored[order] = codes
    return codes_to_stream(restored[:rows, :cols], bits)


def entries_to_coordinates(entries: Entries) -> Coordinates:
    """Inverse of `value_entries`."""
    value = (entries.entry >> 16).to(torch.int16).view(torch.bfloat16)
    return Coordinates(entries.row, entries.entry.to(torch.int64) & 0xFFFF, value)


def slices_to_entries(slices: OutlierSlices, order: torch.Tensor) -> Entries:
    """Inverse of `slice_entries`, without the padding."""
    slots = int(slices.slice_ptr[-1])
    entries = slices.entries[:slots]
    owner = torch.repeat_interleave(slices.slice_ptr.diff().to(torch.int64), output_size=slots)
    tile_row = owner[:, None] * SLICE_ROWS + torch.arange(SLICE_ROWS, device=entries.device)
    slot, lane = entries.nonzero(as_tuple=True)
    row = order[tile_row[slot, lane]]
    by_row = torch.argsort(row * slots + slot)
    return Entries(row[by_row], entries[slot, lane][by_row])
