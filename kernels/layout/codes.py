"""Checkpoint order <-> tile order of the packed codes and scales. Torch operations only: runs where the tensors are.

Tile order: the rows, padded to ROW_ALIGN, are cut into row blocks of ROW_BLOCK; the columns, padded to SUPERBLOCK, into
superblocks. A tile (row block, superblock) is contiguous, so a kernel streams a row block with 16-byte loads:

    words   int32 [row blocks, superblocks, planes, ROW_BLOCK, words]        (bits inside a word: `fields.py`)
    scales  int32 [row blocks, superblocks, 256 / group_size / 2, ROW_BLOCK] two consecutive groups as bf16 pairs (or 1)

Among ROW_ALIGN rows they may be permuted (`order`, see `outliers.py`); padding holds integer zero with scale zero.
"""

import torch

from vllm_latq.kernels.errors import require
from vllm_latq.kernels.layout.fields import (
    SUPERBLOCK,
    SUPPORTED_BITS,
    SUPPORTED_GROUPS,
    Segment,
    planes,
    storage,
    words,
)

ROW_BLOCK = 64
ROW_ALIGN = 128  # the largest row tile of a kernel, and whole row blocks; a launch never masks rows of the weight
_CHUNK_CODES = 1 << 24  # codes unpacked at once: bounds the scratch memory of a load to about 200 MB


def padded_rows(rows: int) -> int:
    """Rows after padding to ROW_ALIGN."""
    return -(-rows // ROW_ALIGN) * ROW_ALIGN


def tile_rows(order: torch.Tensor) -> torch.Tensor:
    """Inverse of `order`: the tile row of each checkpoint row, int64 [padded rows]."""
    tile_row = torch.empty_like(order)
    tile_row[order] = torch.arange(order.numel(), device=order.device)
    return tile_row


def superblocks(cols: int) -> int:
    """Superblocks of 256 columns that cover `cols`."""
    return -(-cols // SUPERBLOCK)


def stream_to_codes(qweight: torch.Tensor, bits: int, cols: int) -> torch.Tensor:
    """Codes of little-endian bit streams, one per row.

    Args:
        qweight: int32 [rows, ceil(cols * bits / 32)].

    Returns:
        uint8 [rows, cols].
    """
    rows = qweight.shape[0]
    # 32 codes fill exactly `bits` words, and each of the 32 has a fixed word and shift.
    spans = -(-cols // 32)
    stream = torch.nn.functional.pad(qweight, (0, spans * bits - qweight.shape[1])).view(rows, spans, bits)
    codes = torch.empty(rows, spans, 32, dtype=torch.uint8, device=qweight.device)
    mask = (1 << bits) - 1
    for i in range(32):
        word, shift = divmod(i * bits, 32)
        value = stream[..., word] >> shift
        if shift + bits > 32:
            value = (value & ((1 << (32 - shift)) - 1)) | (stream[..., word + 1] << (32 - shift))
        codes[..., i] = (value & mask).to(torch.uint8)
    return codes.view(rows, spans * 32)[:, :cols]


def codes_to_stream(codes: torch.Tensor, bits: int) -> torch.Tensor:
    """Inverse of `stream_to_codes`: uint8 [rows, cols] -> int32 [rows, ceil(cols * bits / 32)]."""
    rows, cols = codes.shape
    spans = -(-cols // 32)
    padded = torch.nn.functional.pad(codes, (0, spans * 32 - cols)).view(rows, spans, 32).to(torch.int32)
    stream = torch.zeros(rows, spans, bits, dtype=torch.int32, device=codes.device)
    for i in range(32):
        word, shift = divmod(i * bits, 32)
        stream[..., word] |= padded[..., i] << shift
        if shift + bits > 32:
            stream[..., word + 1] |= padded[..., i] >> (32 - shift)
    return stream.view(rows, spans * bits)[:, : -(-cols * bits // 32)].contiguous()


def _field_view(codes: torch.Tensor, bits: int) -> torch.Tensor:
    """[rows, superblocks * 256] -> [row blocks, superblocks, fields, ROW_BLOCK, words, half]."""
    rows, cols = codes.shape
    per_row = words(bits)
    view = codes.view(rows // ROW_BLOCK, ROW_BLOCK, cols // SUPERBLOCK, SUPERBLOCK // (2 * per_row), per_row, 2)
    return view.permute(0, 2, 3, 1, 4, 5)


def _deposit(field: torch.Tensor, segment: Segment) -> torch.Tensor:
    """int32 words holding `segment` of a field's codes uint8 [..., words, half]."""
    part = ((field >> segment.low) & ((1 << segment.width) - 1)).to(torch.int32) << segment.offset
    return part[..., 0] | (part[..., 1] << 16)


def tile_codes(codes: torch.Tensor, bits: int) -> torch.Tensor:
    """Codes uint8 [rows, cols] (rows % ROW_BLOCK == 0, cols % 256 == 0) -> tile words, see the module docstring."""
    fields = _field_view(codes, bits)
    blocks, supers = fields.shape[:2]
    tiles = torch.zeros(blocks, supers, planes(bits), ROW_BLOCK, words(bits), dtype=torch.int32, device=codes.device)
    for index, segments in enumerate(storage(bits)):
        for segment in segments:
            tiles[:, :, segment.plane] |= _deposit(fields[:, :, index], segment)
    return tiles


def tile_weight(qweight: torch.Tensor, bits: int, cols: int, order: torch.Tensor) -> torch.Tensor:
    """Checkpoint words -> tile words.

    Args:
        qweight: int32 [rows, ceil(cols * bits / 32)].
        order: int64 [padded rows], the checkpoint row held by each tile row, one of the same ROW_ALIGN; rows or more
            means padding.

    Returns:
        int32 [row blocks, superblocks, planes, ROW_BLOCK, words].
    """
    rows, zero_point = qweight.shape[0], 1 << (bits - 1)
    supers = superblocks(cols)
    tiles = []
    step = max(1, _CHUNK_CODES // (supers * SUPERBLOCK * ROW_ALIGN)) * ROW_ALIGN
    for part in order.split(step):
        codes = torch.full((part.numel(), supers * SUPERBLOCK), zero_point, dtype=torch.uint8, device=qweight.device)
        real = part < rows
        codes[real, :cols] = stream_to_codes(qweight[part[real]], bits, cols)
        tiles.append(tile_codes(codes, bits))
    return torch.cat(tiles)


def tile_scales(scales: torch.Tensor, group_size: int, cols: int, order: torch.Tensor) -> torch.Tensor:
    """Group scales -> pairs in tile order.

    Args:
        scales: bfloat16 [rows, cols / group_size], group_size in {32, 64, 128}.
        order: as in `tile_weight`.

    Returns:
        int32 [row blocks, superblocks, max(1, 128 / group_size), ROW_BLOCK]; the even group in the low half.
    """
    rows, groups = scales.shape
    per_super = SUPERBLOCK // group_size
    supers = superblocks(cols)
    padded = torch.zeros(order.numel(), supers * per_super, dtype=torch.bfloat16, device=scales.device)
    real = order < rows
    padded[real, :groups] = scales[order[real]]
    pairs = padded.view(torch.int16).view(order.numel(), supers, per_super // 2, 2).to(torch.int32)
    packed = (pairs[..., 0] & 0xFFFF) | (pairs[..., 1] << 16)
    return packed.view(-1, ROW_BLOCK, supers, per_super // 2).permute(0, 2, 3, 1).contiguous()


def check_shape(qweight: torch.Tensor, bits: int, group_size: int, cols: int) -> None:
    """Refuse weights that the layout cannot hold, from shapes and dtypes alone (no device synchronisation)."""
    require(bits in SUPPORTED_BITS, "bits", f"one of {SUPPORTED_BITS}", bits)
    require(group_size in SUPPORTED_GROUPS, "group_size", f"one of {SUPPORTED_GROUPS}", group_size)
    require(cols > 0, "cols", "at least one column", cols)
    require(qweight.dtype == torch.int32 and qweight.ndim == 2, "qweight", "int32 [rows, words]",
            f"{qweight.dtype} {tuple(qweight.shape)}")  # fmt: skip
    expected = -(-cols * bits // 32)
    require(qweight.shape[1] == expected, "qweight", f"{expected} words for {cols} columns of {bits} bits",
            qweight.shape[1])  # fmt: skip
    require(group_size == -1 or cols % group_size == 0, "cols", f"a multiple of group_size {group_size}", cols,
            "A tensor-parallel shard must hold whole groups.")  # fmt: skip
