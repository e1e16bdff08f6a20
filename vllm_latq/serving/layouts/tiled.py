"""The layout `tiled`, on GPUs: the tiles of the Triton kernels, and the products of the kernels.

    PackedWeight --pack, once at load--> KernelWeight --product--> y

`kernels/layout` needs no Triton, which a CPU installation may lack; the kernels and their launch configurations do, so
functions import them when they are called. With TRITON_INTERPRET=1 the same path runs on the CPU, in Triton's
interpreter.

Invariant: `pack(w, capacity)` has the same shapes for all weights of one scheme and shape, so a reload copies into the
tensors that CUDA graphs have captured.
"""

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch

from vllm_latq.errors import RESTART_TO_RELOAD, CheckpointError
from vllm_latq.format.encodings.packed import PackedWeight
from vllm_latq.kernels.errors import KernelInputError
from vllm_latq.kernels.layout.fields import SUPPORTED_GROUPS
from vllm_latq.kernels.layout.outliers import (
    MAX_COLUMNS,
    SLICE_ROWS,
    OutlierCsr,
    OutlierSlices,
    bucket,
    pool_slices,
    with_headroom,
)
from vllm_latq.kernels.layout.weight import KernelWeight, prepare, with_spread

TENSORS = (
    "words",
    "order",
    "scale_pairs",
    "flat_scales",
    "row_scales",
    "entries",
    "slice_ptr",
    "spread",
    "list_ptr",
    "tickets",
)
CONSTANTS = ("rows", "cols", "bits", "group_size", "midrise", "processors", "invariant")


def has_kernels(device: torch.device) -> bool:
    """Return whether Triton kernels run on `device`: NVIDIA and AMD GPUs, and CPUs under Triton's interpreter."""
    return device.type == "cuda" or (device.type == "cpu" and os.environ.get("TRITON_INTERPRET") == "1")


def unsupported_activations(device: torch.device, dtype: torch.dtype) -> str | None:
    """Return what the kernels do not support about activations or their device; None if they support both."""
    if device.type == "cuda" and torch.version.hip is None and torch.cuda.get_device_capability(device) < (8, 0):
        return "a GPU older than Ampere"
    if dtype not in (torch.bfloat16, torch.float16):
        return f"{dtype} activations"
    return None


def unsupported(weight: PackedWeight, dtype: torch.dtype) -> str | None:
    """Return what the kernels do not support about a weight or its activations; None if they can multiply by it."""
    reason = unsupported_activations(weight.qweight.device, dtype)
    if reason is not None:
        return reason
    if weight.group_size not in SUPPORTED_GROUPS:
        return f"a group size of {weight.group_size}"
    if weight.outliers is not None and weight.cols > MAX_COLUMNS:
        return f"outliers in {weight.cols} columns"
    return None


@dataclass(frozen=True)
class TiledOperands:
    """A weight in the layout `tiled`, or the weights of several experts as one KernelWeight."""

    layout: ClassVar[str] = "tiled"

    weight: KernelWeight

    @classmethod
    def pack(
        cls,
        weight: PackedWeight,
        where: str,
        capacity: int | None = None,
        alone: bool = True,
        invariant: bool = False,
    ) -> "TiledOperands":
        """Put a weight on its device in tile order.

        Args:
            weight: on the device to run on.
            where: layer name for errors.
            capacity: outlier slots to allocate; None leaves at least a sixteenth of headroom for reloaded weights.
            alone: False for a weight that `pool` will put together with others; `pool` allocates the headroom then.
            invariant: whether the product of a row must not depend on the other rows.

        Raises:
            CheckpointError: the outliers need more slots than `capacity`, or the kernels cannot take them.
        """
        csr = weight.outliers
        outliers = None if csr is None else OutlierCsr(csr.row_ptr, csr.col_idx, csr.values)
        # An entry holds one outlier at most. Refuse more outliers before counting their slots, which takes memory.
        if csr is not None and capacity is not None and csr.nnz > SLICE_ROWS * capacity:
            raise too_many_slots(where, capacity, f"{csr.nnz} of them")
        layout = (weight.bits, weight.group_size, weight.cols)
        try:
            made = prepare(weight.qweight, *layout, weight.scales, weight.row_scales, outliers, weight.midrise)
        except KernelInputError as error:
            raise CheckpointError(f"{where}: {error.where}", error.expected, error.found, error.hint) from error
        made = replace(made, invariant=invariant)
        if made.entries is not None and made.slice_ptr is not None:
            slots = int(made.slice_ptr[-1])
            room = _with_room(made.entries, slots, where, capacity) if alone else made.entries[:slots]
            made = replace(made, entries=room)
            if alone and outliers is not None and _spreads(made):
                made = with_spread(made, outliers, room.numel())  # never more than the entries by rows, with padding
        return cls(made)

    @classmethod
    def from_lists(cls, tensors: Sequence[torch.Tensor | None], constants: Sequence[int], arch: str) -> "TiledOperands":
        """Unpack the values of `tensors()`, and `constants()` and `arch`, which the operator is given."""
        fields: dict[str, Any] = dict(zip(TENSORS, tensors, strict=True))
        fields.update(zip(CONSTANTS, constants, strict=True))
        fields |= {name: bool(fields[name]) for name in ("midrise", "invariant")}
        return cls(KernelWeight(**fields, arch=arch))

    def tensors(self) -> dict[str, torch.Tensor | None]:
        """Return the tensors to register, by name."""
        return {name: getattr(self.weight, name) for name in TENSORS}

    def constants(self) -> list[int]:
        """Return what is the same for every weight of a scheme and shape; the first is the number of rows."""
        return [int(getattr(self.weight, name)) for name in CONSTANTS]

    @property
    def arch(self) -> str:
        """The GPU's architecture, as the kernels' launch configurations call it; empty on a CPU."""
        return self.weight.arch

    @property
    def capacity(self) -> int | None:
        """Slots of outliers that the tensors have room for; None for a weight without outliers."""
        return None if self.weight.entries is None else self.weight.entries.shape[-2]

    def product(self, x: torch.Tensor) -> torch.Tensor:
        """Return x [.., cols] times the transposed weight, [.., rows], dtype of x."""
        from vllm_latq.kernels.decode.dispatch import ssqr_matmul

        return ssqr_matmul(x, self.weight)


def pool(
    entries: Sequence[torch.Tensor], slice_ptr: Sequence[torch.Tensor], where: str, capacity: int | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Put the entries of several weights in one array, [1, slots, ..], with slice pointers [weights, ..] into it.

    Args:
        entries, slice_ptr: tensors of each weight, from `TiledOperands.pack` with alone=False.
        where: layer name for errors.
        capacity: outlier slots to allocate for all weights together; None leaves headroom.

    Raises:
        CheckpointError: the outliers need more slots than `capacity`.
    """
    pooled = pool_slices([OutlierSlices(*part) for part in zip(entries, slice_ptr, strict=True)])
    return _with_room(pooled.entries, int(pooled.slice_ptr[-1, -1]), where, capacity), pooled.slice_ptr


def _spreads(weight: KernelWeight) -> bool:
    """Return whether a launch configuration that may serve the weight wants its outliers by row tile and superblock."""
    from vllm_latq.kernels.configs import spreads

    return spreads(weight.bits, weight.arch, weight.group_size, weight.invariant)


def _with_room(entries: torch.Tensor, slots: int, where: str, capacity: int | None) -> torch.Tensor:
    """Pad entries [.., slots padded to a bucket, 16] with zeros to `capacity`, or to a capacity with headroom."""
    capacity = capacity or bucket(with_headroom(slots))
    if slots > capacity:
        raise too_many_slots(where, capacity, str(slots))
    # `capacity` is a bucket size, so the entries, padded to a bucket size too, are never longer.
    return torch.nn.functional.pad(entries, (0, 0, 0, capacity - entries.shape[-2]))


def too_many_slots(where: str, capacity: int, found: str) -> CheckpointError:
    """Make the error of a reload whose outliers do not fit."""
    return CheckpointError(where, f"outliers for at most {capacity} slots of 16 rows", found, RESTART_TO_RELOAD)
