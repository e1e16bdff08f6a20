"""Outlier storage for the kernels: 16-row slices, stored column-major, balanced by sorting rows.

Row block b (64 rows) owns slices 4b..4b+3; slice s owns slots slice_ptr[s]..slice_ptr[s+1], and slot t holds one entry
of each of its 16 rows:

    entries int32 [slots, 16]:   slot t    r0 r1 r2 ... r15      short rows are padded with entry 0 (nothing, column 0)
                                 slot t+1  r0 r1 r2 ... r15

Rows are sorted by their count, longest first, so the rows of a slice are about equally long: little padding. That is
among ROW_ALIGN rows, whose slices are dealt out to their two blocks in turns, so these are about equally long, too, and
slice 4b is the longest of its block. A warp reads a slot in one piece and every lane keeps its own row.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from vllm_latq.kernels.errors import require
from vllm_latq.kernels.layout.codes import ROW_ALIGN, ROW_BLOCK, tile_rows
from vllm_latq.kernels.layout.entries import MAX_COLUMNS, Entries

SLICE_ROWS = 16
SMALLEST_CAPACITY = 64  # outliers, or slots of them, that a served weight has room for
_BUCKETS_PER_OCTAVE = 8


@dataclass(frozen=True)
class OutlierCsr:
    """Outliers as the checkpoint stores them.

    row_ptr: int32 [rows + 1]; col_idx: integer [n]; values: bfloat16 or float32 [n].
    """

    row_ptr: torch.Tensor
    col_idx: torch.Tensor
    values: torch.Tensor


@dataclass(frozen=True)
class OutlierSlices:
    """entries: int32 [slots padded to a bucket, 16]; slice_ptr: int32 [padded rows / 16 + 1]."""

    entries: torch.Tensor
    slice_ptr: torch.Tensor


def bucket(count: int) -> int:
    """`count` rounded up to one of eight sizes per power of two, so that equal layer shapes share tensor shapes."""
    if count <= _BUCKETS_PER_OCTAVE:
        return max(count, 1)
    step = 1 << max(0, (count - 1).bit_length() - 1 - (_BUCKETS_PER_OCTAVE.bit_length() - 1))
    return -(-count // step) * step


def with_headroom(count: int) -> int:
    """`count` and a sixteenth: how many outliers, or slots, a served weight needs room for, as it may be reloaded."""
    return max(count + count // 16, SMALLEST_CAPACITY)


def check_csr(row_ptr: torch.Tensor, col_idx: torch.Tensor, values: torch.Tensor, rows: int, cols: int) -> None:
    """Refuse CSR arrays that could make a kernel read out of bounds. Called once, at load; synchronises the device."""
    require(cols <= MAX_COLUMNS, "outliers", f"at most {MAX_COLUMNS} columns (16-bit column index)", cols,
            "Shard the layer, or store it without outliers.")  # fmt: skip
    for name, part in (("row_ptr", row_ptr), ("col_idx", col_idx)):
        whole = not (part.is_floating_point() or part.is_complex() or part.dtype == torch.bool)
        require(whole, name, "integers", part.dtype)
    require(values.dtype in (torch.bfloat16, torch.float32, torch.float64), "outlier values", "bfloat16 or float32",
            values.dtype)  # fmt: skip
    require(bool(values.isfinite().all()), "outlier values", "finite numbers", "NaN or infinity")
    require(row_ptr.shape == (rows + 1,), "row_ptr", f"{rows + 1} entries", tuple(row_ptr.shape))
    require(col_idx.shape == values.shape and col_idx.ndim == 1, "col_idx and values", "two vectors of one length",
            f"{tuple(col_idx.shape)} and {tuple(values.shape)}")  # fmt: skip
    pointers = row_ptr.to(torch.int64).cpu()
    require(int(pointers[0]) == 0 and int(pointers[-1]) == col_idx.numel(), "row_ptr",
            f"to run from 0 to {col_idx.numel()}", f"{int(pointers[0])}..{int(pointers[-1])}")  # fmt: skip
    require(bool((pointers.diff() >= 0).all()), "row_ptr", "never to fall", "a falling entry")
    if col_idx.numel():
        low, high = col_idx.to(torch.int64).aminmax()
        require(int(low) >= 0 and int(high) < cols, "col_idx", f"columns in [0, {cols})", f"{int(low)}..{int(high)}")


def row_order(counts: torch.Tensor, padded: int) -> torch.Tensor:
    """Checkpoint row of each tile row: of each ROW_ALIGN rows those with more entries first, 16 in each block in turn.

    Args:
        counts: int64 [rows], entries per row.
        padded: rows after padding; the index of a padding row is at or above `rows`.

    Returns:
        int64 [padded].
    """
    full = torch.full((padded,), -1, dtype=torch.int64, device=counts.device)
    full[: counts.numel()] = counts
    within = torch.argsort(full.view(-1, ROW_ALIGN), dim=1, descending=True, stable=True)
    rows = within + torch.arange(0, padded, ROW_ALIGN, device=counts.device)[:, None]
    return rows.view(-1, ROW_BLOCK // SLICE_ROWS, ROW_ALIGN // ROW_BLOCK, SLICE_ROWS).transpose(1, 2).flatten()


def slice_entries(entries: Entries, order: torch.Tensor) -> OutlierSlices:
    """Lay entries out in slices.

    Args:
        entries: sorted by row, and in it by column.
        order: int64 [padded rows], checkpoint row of each tile row.
    """
    padded, device = order.numel(), order.device
    counts = torch.bincount(entries.row, minlength=padded)
    longest = counts[order].view(-1, SLICE_ROWS).amax(1)
    slice_ptr = torch.zeros(longest.numel() + 1, dtype=torch.int64, device=device)
    slice_ptr[1:] = longest.cumsum(0)
    first = counts.cumsum(0) - counts
    nth_in_row = torch.arange(entries.row.numel(), device=device) - first[entries.row]
    target = tile_rows(order)[entries.row]
    slot = slice_ptr[target // SLICE_ROWS] + nth_in_row
    slices = torch.zeros(bucket(int(slice_ptr[-1])), SLICE_ROWS, dtype=torch.int32, device=device)
    slices[slot, target % SLICE_ROWS] = entries.entry
    return OutlierSlices(slices, slice_ptr.to(torch.int32))


def pool_slices(parts: Sequence[OutlierSlices]) -> OutlierSlices:
    """Slices of several matrices in one array, without the padding of each; their pointers count from its beginning.

    Returns:
        entries: int32 [1, slots padded to a bucket, 16]; slice_ptr: int32 [matrices, padded rows / 16 + 1].
    """
    pointers = torch.stack([part.slice_ptr for part in parts])
    lengths = pointers[:, -1].tolist()
    slots = sum(lengths)
    used = [part.entries[:length] for part, length in zip(parts, lengths, strict=True)]
    entries = torch.cat([*used, parts[0].entries.new_zeros(bucket(slots) - slots, SLICE_ROWS)])
    first = torch.tensor([0, *lengths[:-1]], dtype=torch.int32, device=pointers.device).cumsum(0, dtype=torch.int32)
    return OutlierSlices(entries[None], pointers + first[:, None])
