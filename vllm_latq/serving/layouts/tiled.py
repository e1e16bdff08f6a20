"""The way to the Triton kernels: what of a packed weight they take, its layout `tiled`, and their products.

    PackedWeight --kernel_arguments, once at load--> tensors in tile order --tiled_product--> y

The only module of this package that imports `vllm_latq.kernels`, and with it Triton, which a CPU installation may lack:
so each function imports what it needs. With TRITON_INTERPRET=1 the same path runs on the CPU, in Triton's interpreter.

Invariant: `kernel_arguments(w, capacity)` has the same shapes for all weights of one scheme and shape, so a reload
copies into the tensors that CUDA graphs have captured.
"""

import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from vllm_latq.errors import NO_ROOM, CheckpointError
from vllm_latq.format.encodings.packed import PackedWeight

if TYPE_CHECKING:
    from vllm_latq.kernels.layout.weight import KernelWeight

KERNEL_ARGUMENTS = (
    "words", "order", "scale_pairs", "flat_scales", "row_scales", "entries", "slice_ptr", "tickets",
)  # fmt: skip
SMALLEST_CAPACITY = 64  # outlier slots, of 64 bytes each
CONSTANTS = ("rows", "cols", "bits", "group_size", "midrise", "processors")


def has_kernels(device: torch.device) -> bool:
    """Whether Triton kernels run on `device`: NVIDIA and AMD GPUs, and CPUs under Triton's interpreter."""
    return device.type == "cuda" or (device.type == "cpu" and os.environ.get("TRITON_INTERPRET") == "1")


def unsupported(weight: PackedWeight, dtype: torch.dtype) -> str | None:
    """What the kernels cannot do about a weight or its activations; None if they can multiply by it."""
    from vllm_latq.kernels.layout.fields import SUPPORTED_GROUPS
    from vllm_latq.kernels.layout.outliers import MAX_COLUMNS

    device = weight.qweight.device
    if device.type == "cuda" and torch.version.hip is None and torch.cuda.get_device_capability(device) < (8, 0):
        return "a GPU older than Ampere"
    if dtype not in (torch.bfloat16, torch.float16):
        return f"{dtype} activations"
    if weight.group_size not in SUPPORTED_GROUPS:
        return f"a group size of {weight.group_size}"
    if weight.outliers is not None and weight.cols > MAX_COLUMNS:
        return f"outliers in {weight.cols} columns"
    return None


def kernel_arguments(
    weight: PackedWeight, where: str, capacity: int | None = None, alone: bool = True
) -> tuple[dict[str, torch.Tensor | None], dict[str, int], str]:
    """The layout's tensors and constants by name, and the architecture of the device.

    Args:
        weight: on the device to run on.
        where: layer name for errors.
        capacity: outlier slots to allocate; None leaves at least a sixteenth of headroom for reloaded weights.
        alone: False for what `pool` will put together, which gets its headroom there.

    Raises:
        CheckpointError: the outliers need more slots than `capacity`, or lie further beyond the grid than any should.
    """
    from vllm_latq.kernels.errors import KernelInputError
    from vllm_latq.kernels.layout.outliers import SLICE_ROWS
    from vllm_latq.kernels.layout.weight import prepare

    csr = weight.outliers
    outliers: tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None] = (None, None, None)
    if csr is not None:
        outliers = (csr.row_ptr, csr.col_idx, csr.values)
    if csr is not None and capacity is not None and csr.nnz > 2 * SLICE_ROWS * capacity:
        # An entry holds two at most. What has many more would take much memory before their slots are known.
        raise too_many_slots(where, capacity, f"{csr.nnz} of them")
    layout = (weight.bits, weight.group_size, weight.cols)
    try:
        prepared = prepare(weight.qweight, *layout, weight.scales, weight.row_scales, *outliers, weight.midrise)
    except KernelInputError as error:
        raise CheckpointError(f"{where}: {error.where}", error.expected, error.found, error.hint) from error
    tensors = {name: getattr(prepared, name) for name in KERNEL_ARGUMENTS}
    if prepared.slice_ptr is not None and prepared.entries is not None:
        slots = int(prepared.slice_ptr[-1])
        tensors["entries"] = _with_room(prepared.entries, slots, where, capacity) if alone else prepared.entries[:slots]
    return tensors, {name: getattr(prepared, name) for name in CONSTANTS}, prepared.arch


def pool(
    entries: Sequence[torch.Tensor], slice_ptr: Sequence[torch.Tensor], where: str, capacity: int | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Entries and slice pointers of a stack of weights, as `pool_slices` puts them together.

    Args:
        entries, slice_ptr: of each weight, as from `kernel_arguments`.
        where, capacity: as there, of all together.
    """
    from vllm_latq.kernels.layout.outliers import OutlierSlices, pool_slices

    pooled = pool_slices([OutlierSlices(*part) for part in zip(entries, slice_ptr, strict=True)])
    return _with_room(pooled.entries, int(pooled.slice_ptr[-1, -1]), where, capacity), pooled.slice_ptr


def _with_room(entries: torch.Tensor, slots: int, where: str, capacity: int | None) -> torch.Tensor:
    """Entries [..., slots padded to a bucket, 16] with zeros up to the capacity, or to one that leaves headroom."""
    from vllm_latq.kernels.layout.outliers import bucket

    capacity = capacity or bucket(max(slots + slots // 16, SMALLEST_CAPACITY))
    if slots > capacity:
        raise too_many_slots(where, capacity, str(slots))
    # `capacity` is a bucket size, so the entries, padded to one, are never longer.
    return torch.nn.functional.pad(entries, (0, 0, 0, capacity - entries.shape[-2]))


def too_many_slots(where: str, capacity: int, found: str) -> CheckpointError:
    """The error of a reload whose outliers do not fit."""
    return CheckpointError(where, f"outliers for at most {capacity} slots of 16 rows", found, NO_ROOM)


def _kernel_weight(tensors: Sequence[torch.Tensor | None], constants: Sequence[int], arch: str) -> "KernelWeight":
    """What `kernel_arguments` made, or a stack of it, as the kernels take it."""
    from vllm_latq.kernels.layout.weight import KernelWeight

    known: dict[str, Any] = dict(zip(KERNEL_ARGUMENTS + CONSTANTS, (*tensors, *constants), strict=True))
    return KernelWeight(**known | {"midrise": bool(known["midrise"]), "arch": arch})


def tiled_product(
    x: torch.Tensor, tensors: Sequence[torch.Tensor | None], constants: Sequence[int], arch: str
) -> torch.Tensor:
    """x [.., cols] times the transposed weight of `kernel_arguments` -> [.., rows], dtype of x."""
    from vllm_latq.kernels.decode.dispatch import ssqr_matmul

    return ssqr_matmul(x, _kernel_weight(tensors, constants, arch))


def grouped_experts(
    x: torch.Tensor,
    weights: torch.Tensor,
    ids: torch.Tensor,
    products: Sequence[tuple[list[torch.Tensor | None], list[int]]],
    experts: int,
    arch: str,
    activation: str,
) -> torch.Tensor | None:
    """`latq::experts` by the grouped kernel, with sizes that depend on no id; None for more tokens than it is for.

    Args:
        products: of gate and up, and of down: stacks (column scales first) and constants, as for the operator.
        others: as for the operator.
    """
    from vllm_latq.kernels.experts.grouped import routed_experts

    gate_up, down = (_kernel_weight(stacks[1:], constants, arch) for stacks, constants in products)
    (first, _), (second, _) = products
    return routed_experts(x, weights, ids, (gate_up, down), (first[0], second[0]), experts, activation)
