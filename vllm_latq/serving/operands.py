"""What a loaded layer keeps: the layout that its device multiplies fastest in, its tensors and constants.

Invariant: operands made with the capacity of earlier ones have their shapes, so a reload copies one into the other.
"""

import functools
import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch.nn.utils.rnn import pad_sequence

from vllm_latq.errors import NO_ROOM, CheckpointError
from vllm_latq.format.encodings.packed import PackedWeight
from vllm_latq.format.served_size import best_bits
from vllm_latq.serving.layouts import int4 as cpu_path
from vllm_latq.serving.layouts.checkpoint import dense_arguments, outlier_capacity
from vllm_latq.serving.layouts.int4 import int4_arguments, takes
from vllm_latq.serving.layouts.tiled import has_kernels, kernel_arguments, pool, too_many_slots, unsupported
from vllm_latq.serving.linear import CHECKPOINT, INT4, TILED

logger = logging.getLogger(__name__)

# Of coded weights in memory where every product dequantizes: a column and a float32.
CSR_OUTLIER_BITS = 48


@dataclass(frozen=True)
class Operands:
    """y = linear(x, tensors.values(), constants.values(), layout, arch).

    Attributes:
        layout: of `linear_op.PRODUCTS`.
        tensors: by name; they may be replaced by others of the same shapes.
        constants: by name; the same for every weight of a scheme and shape.
        capacity: outliers, or slots of them, that the tensors have room for; None without outliers.
        arch: of the GPU that the tiled layout is for.
    """

    layout: str
    tensors: dict[str, torch.Tensor | None]
    constants: dict[str, int]
    capacity: int | None
    arch: str = ""


@functools.cache
def _warn(message: str) -> None:
    """Once: the experts of a layer have one name."""
    logger.warning("%s", message)


def inlier_bits(
    integers: Sequence[Sequence[torch.Tensor | None]], device: torch.device, dtype: torch.dtype
) -> int | None:
    """The width of inliers that decoded integers take least memory with on a device.

    Args:
        integers: of matrices that share a width, the shards [rows, cols] of each; None for those that were not coded.
            If none was, the width is None.
        device: to multiply on.
        dtype: of the activations.
    """
    decoded = [[z for z in shards if z is not None] for shards in integers]
    cols = {z.shape[1] for shards in decoded for z in shards}
    if not cols:
        return None
    if _has_int4(device, dtype) and all(size % min(cpu_path.GROUPS) == 0 for size in cols):
        return best_bits(*decoded, widths=cpu_path.WIDTHS, each=cpu_path.OUTLIER_BITS)
    if has_kernels(device) and dtype in (torch.bfloat16, torch.float16):
        return best_bits(*decoded)
    return best_bits(*decoded, each=CSR_OUTLIER_BITS)


def _has_int4(device: torch.device, dtype: torch.dtype) -> bool:
    return device.type == "cpu" and not has_kernels(device) and cpu_path.is_fast(dtype)


def make_operands(
    weight: PackedWeight, dtype: torch.dtype, where: str, capacity: int | None = None, alone: bool = True
) -> Operands:
    """Operands of a weight on its device.

    Args:
        weight: on the device to run on.
        dtype: of the activations.
        where: layer name for errors.
        capacity: of the operands to be replaced; None for the first ones.
        alone: False for one of those that `stack_operands` will put side by side.

    Raises:
        CheckpointError: more outliers than fit.
    """
    if has_kernels(weight.qweight.device):
        reason = unsupported(weight, dtype)
        if reason is None:
            tensors, constants, arch = kernel_arguments(weight, where, capacity, alone)
            entries = tensors["entries"]
            return Operands(TILED, tensors, constants, None if entries is None else entries.shape[0], arch)
        _warn(f"{where}: the kernels do not take {reason}; every product will dequantize")
    if weight.outliers is not None:
        nnz = weight.outliers.nnz
        capacity = capacity or outlier_capacity(nnz)
        if nnz > capacity:
            raise CheckpointError(where, f"at most {capacity} outliers", str(nnz), NO_ROOM)
    if takes(weight, dtype):
        return Operands(INT4, *int4_arguments(weight, capacity), capacity)
    if _has_int4(weight.qweight.device, dtype):
        reason = f"a multiple of {min(cpu_path.GROUPS)} columns with one scale"
        _warn(f"{where}: torch's 4-bit product takes {reason}; every product will dequantize")
    return Operands(CHECKPOINT, *dense_arguments(weight, capacity), capacity)


def check_room(made: Sequence[Operands], where: str, capacity: int | None) -> None:
    """Refuse a reloaded stack as soon as those made of it exceed the room that all share, before more take memory."""
    if capacity is not None and made[0].layout == TILED:
        slots = sum(part.capacity or 0 for part in made)
        if slots > capacity:
            raise too_many_slots(where, capacity, f"{slots} in {len(made)} experts")


def stack_operands(operands: Sequence[Operands], where: str, capacity: int | None = None) -> Operands:
    """Operands of several weights of one scheme and shape, side by side.

    Args:
        where, capacity: as for `make_operands`, of the stack.

    Returns:
        The same tensors with a leading dimension, one entry a weight; but outliers in the tiled layout share one array,
        [1, ...]. Those in other layouts are padded to one length with zeros, which are what they hold behind their
        row pointers anyway.

    Raises:
        CheckpointError: more outliers than fit.
    """
    first, capacities = operands[0], [part.capacity for part in operands if part.capacity is not None]
    parts = {name: [part.tensors[name] for part in operands] for name in first.tensors}
    if first.layout == TILED and first.capacity is not None:
        entries, slice_ptr = (_all_or_none(parts.pop(name)) for name in ("entries", "slice_ptr"))
        shared = dict(zip(("entries", "slice_ptr"), pool(entries, slice_ptr, where, capacity), strict=True))
        tensors = {name: shared[name] if name in shared else _stack(parts[name]) for name in first.tensors}
        return replace(first, tensors=tensors, capacity=shared["entries"].shape[1])
    tensors = {name: _stack(part) for name, part in parts.items()}
    return replace(first, tensors=tensors, capacity=max(capacities, default=None))


def _all_or_none(tensors: Sequence[torch.Tensor | None]) -> list[torch.Tensor]:
    """Those of a stack of weights: empty if none has the tensor."""
    present = [tensor for tensor in tensors if tensor is not None]
    assert len(present) in (0, len(tensors)), "all weights of a stack have the tensor, or none has"
    return present


def _stack(tensors: Sequence[torch.Tensor | None]) -> torch.Tensor | None:
    present = _all_or_none(tensors)
    return pad_sequence(present, batch_first=True) if present else None
