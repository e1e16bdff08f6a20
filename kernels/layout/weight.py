"""The weight in the form that the kernels read, made once at load."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from vllm_latq.kernels.errors import require
from vllm_latq.kernels.layout.codes import ROW_BLOCK, check_shape, padded_rows, tile_scales, tile_weight
from vllm_latq.kernels.layout.entries import coordinates, value_entries
from vllm_latq.kernels.layout.outliers import (
    OutlierCsr,
    OutlierSlices,
    check_csr,
    pool_slices,
    row_order,
    slice_entries,
)
from vllm_latq.kernels.layout.spread import LEVELS, spread_entries

HIP = "hip"


@dataclass(frozen=True)
class KernelWeight:
    """W[i, j] = row_scales[i] * (scales[i, group of j] * (code[i, j] - zero) + outlier[i, j]) in tile order.

    Attributes:
        midrise: whether zero is 2^(bits-1) - 1/2, between two codes, instead of 2^(bits-1).
        words: int32 [row blocks, superblocks, planes, 64, words], see `codes.py`.
        order: int32 [padded rows], checkpoint row of each tile row.
        scale_pairs: int32 [row blocks, superblocks, pairs, 64] for group sizes 32, 64, 128; else None.
        flat_scales: float32 [padded rows], tile order, where one scale serves the whole row; else None.
        row_scales: float32 [padded rows], tile order, or None.
        entries, slice_ptr: outlier slices, see `outliers.py` and `entries.py`; None where the scheme has no outliers.
        tickets: int32 [row blocks, one for those that write x^T, padding], zeros; the kernel leaves them zero.
        processors: multiprocessors of the device, for choosing split-K; 1 on a CPU.
        arch: "sm_90" and the like, or HIP, for choosing launch configurations; empty on a CPU.
        invariant: whether one launch configuration serves all numbers of activation rows, so that the result of a row
            does not depend on the number of rows.
        spread, list_ptr: the same outliers by row tile and superblock, see `spread.py`; None unless `with_spread` made
            them. Serving makes them where a launch configuration asks for them.

    The weights of several experts, for `grouped.py`, are one KernelWeight: its tensors have a leading dimension then,
    which for entries is 1, because all lie in one array (`outliers.pool_slices`).
    """

    bits: int
    group_size: int
    rows: int
    cols: int
    midrise: bool
    words: torch.Tensor
    order: torch.Tensor
    scale_pairs: torch.Tensor | None
    flat_scales: torch.Tensor | None
    row_scales: torch.Tensor | None
    entries: torch.Tensor | None
    slice_ptr: torch.Tensor | None
    tickets: torch.Tensor
    processors: int
    arch: str
    invariant: bool = False
    spread: torch.Tensor | None = None
    list_ptr: torch.Tensor | None = None

    @property
    def padded_rows(self) -> int:
        """Rows after padding to ROW_ALIGN."""
        return self.order.shape[-1]

    @property
    def superblocks(self) -> int:
        """Superblocks of 256 columns."""
        return self.words.shape[-4]

    def storage_bytes(self) -> int:
        """Return the bytes that one product reads, without the room after the last entry. Synchronises the device."""
        parts = [self.words, self.scale_pairs, self.flat_scales, self.row_scales, self.slice_ptr]
        if self.entries is not None and self.slice_ptr is not None:
            parts += [self.order, self.entries[: int(self.slice_ptr[-1])]]
        return sum(part.numel() * part.element_size() for part in parts if part is not None)


def stack_weights(weights: Sequence[KernelWeight]) -> KernelWeight:
    """Return the weights of several experts, of one scheme and shape, as one weight."""
    names = [name for name, part in vars(weights[0]).items() if isinstance(part, torch.Tensor) and name != "entries"]
    parts = {name: torch.stack([getattr(weight, name) for weight in weights]) for name in names}
    slices = [
        OutlierSlices(weight.entries, weight.slice_ptr)
        for weight in weights
        if weight.entries is not None and weight.slice_ptr is not None
    ]
    return replace(weights[0], **(parts | (vars(pool_slices(slices)) if slices else {})))


def _in_tile_order(vector: torch.Tensor, order: torch.Tensor) -> torch.Tensor:
    """Return a vector of rows in tile order, float32 [padded rows], zero for padding."""
    tiled = torch.zeros(order.numel(), dtype=torch.float32, device=vector.device)
    real = order < vector.numel()
    tiled[real] = vector[order[real]].to(torch.float32)
    return tiled


def device_facts(device: torch.device) -> tuple[int, str]:
    """Return the number of multiprocessors, and "sm_XY" for NVIDIA, HIP for AMD or nothing for a CPU."""
    if device.type != "cuda":
        return 1, ""
    facts = torch.cuda.get_device_properties(device)
    return facts.multi_processor_count, HIP if torch.version.hip else f"sm_{facts.major}{facts.minor}"


def prepare(
    qweight: torch.Tensor,
    bits: int,
    group_size: int,
    cols: int,
    scales: torch.Tensor | None = None,
    row_scales: torch.Tensor | None = None,
    outliers: OutlierCsr | None = None,
    midrise: bool = False,
) -> KernelWeight:
    """Bring checkpoint tensors of one layer (or merged layers, stacked by rows) into tile order, on their device.

    Args:
        qweight: int32 [rows, ceil(cols * bits / 32)], code j in bits [j * bits, (j + 1) * bits) of its row.
        bits: 2, 3, 4 or 8.
        group_size: 32, 64, 128 or -1 for one group per row.
        scales: bfloat16 [rows, groups], or None for 1.
        row_scales: float32 [rows], or None for 1.
        outliers: None for a scheme without outliers.
        midrise: whether the grid lies half a step above the multiples of the scale.

    Raises:
        KernelInputError: shapes, dtypes or CSR arrays that a kernel must not be given.
    """
    check_shape(qweight, bits, group_size, cols)
    _check_scales(scales, row_scales, qweight.shape[0], 1 if group_size == -1 else cols // group_size)
    rows, device = qweight.shape[0], qweight.device
    order = torch.arange(padded_rows(rows), device=device)
    entries = slice_ptr = None
    if outliers is not None:
        order, slices = _slice_outliers(outliers, rows, cols)
        entries, slice_ptr = slices.entries, slices.slice_ptr
    scale_pairs = flat_scales = None
    if scales is not None and group_size == -1:
        flat_scales = _in_tile_order(scales[:, 0], order)
    elif scales is not None:
        scale_pairs = tile_scales(scales, group_size, cols, order)
    processors, arch = device_facts(device)
    return KernelWeight(
        bits=bits,
        group_size=group_size if scale_pairs is not None else -1,
        rows=rows,
        cols=cols,
        midrise=midrise,
        words=tile_weight(qweight, bits, cols, order),
        order=order.to(torch.int32),
        scale_pairs=scale_pairs,
        flat_scales=flat_scales,
        row_scales=_in_tile_order(row_scales, order) if row_scales is not None else None,
        entries=entries,
        slice_ptr=slice_ptr,
        tickets=torch.zeros(_ticket_count(order.numel()), dtype=torch.int32, device=device),
        processors=processors,
        arch=arch,
    )


def with_spread(weight: KernelWeight, outliers: OutlierCsr, room: int | None = None) -> KernelWeight:
    """Return the weight with its outliers by row tile and superblock, too.

    Args:
        weight: from `prepare`.
        outliers: those that `prepare` was given.
        room: entries to allocate; None for the entries that there are, rounded up to a bucket.
    """
    points = coordinates(outliers.row_ptr, outliers.col_idx, outliers.values, weight.cols)
    levels = 1 if outliers.values.dtype == torch.bfloat16 else LEVELS
    made = spread_entries(points, weight.order.to(torch.int64), weight.cols, levels, room)
    return replace(weight, spread=made.entries, list_ptr=made.list_ptr)


def _check_scales(scales: torch.Tensor | None, row_scales: torch.Tensor | None, rows: int, groups: int) -> None:
    """Refuse scales of the wrong shape or dtype."""
    if scales is not None:
        require(scales.shape == (rows, groups) and scales.dtype == torch.bfloat16, "scales",
                f"bfloat16 {(rows, groups)}", f"{scales.dtype} {tuple(scales.shape)}")  # fmt: skip
    if row_scales is not None:
        require(row_scales.shape == (rows,), "row_scales", f"{(rows,)}", tuple(row_scales.shape))


def _slice_outliers(csr: OutlierCsr, rows: int, cols: int) -> tuple[torch.Tensor, OutlierSlices]:
    """Check outliers, sort the rows by their entries and lay the entries out in slices.

    Returns:
        The checkpoint row of each tile row, int64 [padded rows]; and the slices.
    """
    check_csr(csr.row_ptr, csr.col_idx, csr.values, rows, cols)
    entries = value_entries(coordinates(csr.row_ptr, csr.col_idx, csr.values, cols))
    order = row_order(torch.bincount(entries.row, minlength=rows), padded_rows(rows))
    return order, slice_entries(entries, order)


def _ticket_count(padded: int) -> int:
    """Return one ticket per row block and one for the writers of x^T, rounded up to 16 bytes.

    The tickets of one expert in a stack then begin at a multiple of 16 bytes, as those of a single weight do, so Triton
    does not compile another kernel for an unaligned pointer.
    """
    needed = padded // ROW_BLOCK + 1
    return -(-needed // 4) * 4
