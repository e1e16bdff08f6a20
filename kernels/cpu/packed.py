"""Weights of 2, 3, 4 or 8 bits on a CPU: the layout that packed.cpp reads, and calls of it.

    tile      16 rows; the last one is padded
    block     128 columns; the last one is padded
    quarter   32 columns of a tile: 8 vectors of 16 rows x 4 columns, one byte each; they are packed together
    region    4096 columns; the last one is smaller
    entry     an outlier: bfloat16 value << 16 | row of the tile << 12 | column of the region

Entries are ordered by tile, region, column, row. An outlier with more than 8 significant bits is up to three entries.
"""

import ctypes
from typing import Any, NamedTuple

import torch
from torch.nn.functional import pad

from vllm_latq.kernels.cpu.library import KINDS, load, run_product
from vllm_latq.kernels.errors import require
from vllm_latq.kernels.layout.entries import coordinates

SOURCE = "packed.cpp"
TILE, BLOCK, QUARTER, VECTORS, COLUMNS = 16, 128, 32, 8, 4
REGION = 4096
BAND_WEIGHTS = 1 << 22  # weights packed at a time, at load: bounds the temporaries to some 10 MB
GROUP_STEP = QUARTER  # group sizes are multiples of it, or a whole row


class PackedTensors(NamedTuple):
    """A weight [rows, cols] in the layout. (A NamedTuple is cheaper to make than a dataclass, and each
    product makes one.)

    Attributes:
        words: uint8 [tiles, blocks, 4, bits, 64].
        scales: bfloat16 [tiles, groups, 16], or None for ones.
        row_scales: float32 [rows], or None.
        entry_begins: int32 [tiles * regions + 1], or None without outliers.
        entries: int32 [the last number of entry_begins, or more], or None.
        rows, cols, bits: of the weight.
        group: columns with one scale; a whole row if it is at least `cols`.
        midrise: whether the grid lies half a step above the multiples of the scale.
    """

    words: torch.Tensor
    scales: torch.Tensor | None
    row_scales: torch.Tensor | None
    entry_begins: torch.Tensor | None
    entries: torch.Tensor | None
    rows: int
    cols: int
    bits: int
    group: int
    midrise: bool


TENSORS, CONSTANTS = PackedTensors._fields[:5], PackedTensors._fields[5:]


class _Packed(ctypes.Structure):
    """`Packed` of packed.cpp."""

    _fields_ = [*((name, ctypes.c_void_p) for name in TENSORS), *((name, ctypes.c_int64) for name in CONSTANTS)]


def is_available() -> bool:
    """Return whether this CPU has the instructions, and the source compiles; compiles it at the first call."""
    return load(SOURCE) is not None


def pack_codes(codes: torch.Tensor, bits: int) -> torch.Tensor:
    """Pack codes, uint8 [rows, cols]: uint8 [tiles, blocks, 4, bits, 64]."""
    codes = pad(codes, (0, -codes.shape[1] % BLOCK, 0, -codes.shape[0] % TILE))
    quarters = BLOCK // QUARTER
    split = codes.view(-1, TILE, codes.shape[1] // BLOCK, quarters, VECTORS, COLUMNS)
    v = split.permute(4, 0, 2, 3, 1, 5).reshape(VECTORS, len(split), -1, quarters, TILE * COLUMNS)
    if bits == 3:
        words = [v[2 * i] | v[2 * i + 1] << 3 for i in range(3)]
        words[0] |= (v[6] & 3) << 6
        words[1] |= (v[7] & 3) << 6
        words[2] |= v[6] >> 2 << 6 | v[7] >> 2 << 7
    else:
        fields = 8 // bits
        words = [v[i * fields].clone() for i in range(bits)]
        for i, word in enumerate(words):
            for field in range(1, fields):
                word |= v[i * fields + field] << field * bits
    return torch.stack(words, 3)


def pack_scales(scales: torch.Tensor) -> torch.Tensor:
    """Put scales, bfloat16 [rows, groups], in order: [tiles, groups, 16]."""
    padded = pad(scales, (0, 0, 0, -len(scales) % TILE))
    return padded.view(-1, TILE, scales.shape[1]).transpose(1, 2).contiguous()


def pack_outliers(
    row_ptr: torch.Tensor, col_idx: torch.Tensor, values: torch.Tensor, cols: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Put the outliers of a CSR matrix in order: where the entries of each tile and region begin, and the
    entries.

    Returns:
        int32 [tiles * regions + 1], and int32 [entries].

    Raises:
        KernelInputError: a value has more than 24 significant bits.
    """
    points = coordinates(row_ptr, col_idx, values, cols)
    regions, tiles = -(-cols // REGION), -(-(len(row_ptr) - 1) // TILE)
    place = (points.row // TILE * regions + points.col // REGION) * REGION + points.col % REGION
    order = torch.argsort(place * TILE + points.row % TILE, stable=True)
    high = points.value.view(torch.int16).to(torch.int32) << 16
    entries = (high | (points.row % TILE << 12 | points.col % REGION).to(torch.int32))[order]
    counts = torch.bincount(place // REGION, minlength=tiles * regions)
    return pad(counts.cumsum(0), (1, 0)).to(torch.int32), entries


def multiply(x: torch.Tensor, weight: PackedTensors) -> torch.Tensor:
    """Return x [n, cols] times the transposed weight, [n, rows]; x has one of the dtypes KINDS.

    The results of a row of x do not depend on the other rows. A row with an infinite number, or NaN, gives NaN.
    """
    return run_product(_library().latq_packed_product, _view(weight), x, weight.rows, weight.cols)


def dense_rows(weight: PackedTensors, first: int, count: int, dtype: torch.dtype) -> torch.Tensor:
    """Return rows of the dense weight [count, cols], each number computed in float32 and rounded once to `dtype`.

    Args:
        weight: the weight.
        first: first row, a multiple of 16.
        count: of rows, a multiple of 16 unless they reach the last row.
        dtype: bfloat16, float16 or float32.
    """
    require(first % TILE == 0, "first", f"a multiple of {TILE}", first)
    whole = count % TILE == 0 or first + count == weight.rows
    require(whole, "count", f"a multiple of {TILE}, or all rows that are left", count)
    rows = torch.empty(count, weight.cols, dtype=dtype)
    _library().latq_packed_rows(
        ctypes.byref(_view(weight)), ctypes.c_int64(first), ctypes.c_int64(count), ctypes.c_void_p(rows.data_ptr()),
        KINDS[dtype], torch.get_num_threads(),
    )  # fmt: skip
    return rows


def _library() -> ctypes.CDLL:
    library = load(SOURCE)
    assert library is not None, "is_available() was asked before"
    return library


def _view(weight: PackedTensors) -> _Packed:
    tensors: tuple[Any, ...] = weight[: len(TENSORS)]
    pointers = (None if tensor is None else tensor.data_ptr() for tensor in tensors)
    return _Packed(*pointers, *weight[len(TENSORS) :])
