"""Choose the layout that a loaded layer's device multiplies fastest in, and make the layer's operands.

Invariant: operands made with the capacity of earlier operands have the same shapes, so a reload copies the new tensors
into the old ones.
"""

import functools
import logging
import os
from collections.abc import Sequence
from typing import Any

import torch
from torch.nn.utils.rnn import pad_sequence

from vllm_latq.errors import RESTART_TO_RELOAD, CheckpointError
from vllm_latq.format.encodings.packed import PackedWeight
from vllm_latq.format.served_size import best_bits
from vllm_latq.serving.layouts import cpu, int4, trellis
from vllm_latq.serving.layouts.checkpoint import CheckpointOperands, outlier_capacity
from vllm_latq.serving.layouts.cpu import CpuOperands, CpuTrellisOperands
from vllm_latq.serving.layouts.dense import DenseOperands
from vllm_latq.serving.layouts.int4 import Int4Operands
from vllm_latq.serving.layouts.tiled import TiledOperands, has_kernels, pool, too_many_slots, unsupported
from vllm_latq.serving.layouts.trellis import RingOperands
from vllm_latq.serving.linear import Operands
from vllm_latq.serving.trellis import MergedTrellis

logger = logging.getLogger(__name__)

# An outlier of a decoded weight in the layout `checkpoint`: a column and a float32.
CSR_OUTLIER_BITS = 48
# vLLM's variable, and one for CPUs: with its own, vLLM 0.32 calls Triton kernels there, which its CPU build has not.
BATCH_INVARIANT = ("VLLM_BATCH_INVARIANT", "LATQ_BATCH_INVARIANT")


@functools.cache
def _warn(message: str) -> None:
    """Log a warning once, although all experts of a layer give it."""
    logger.warning("%s", message)


def inlier_bits(
    integers: Sequence[Sequence[torch.Tensor | None]], device: torch.device, dtype: torch.dtype
) -> int | None:
    """Return the width of inliers with which decoded integers take the least memory on a device.

    Args:
        integers: for each of the matrices that share a width, its shards [rows, cols]; None for a shard that was not
            coded. The width is None if no shard was.
        device: to multiply on.
        dtype: of the activations.
    """
    decoded = [z for shards in integers for z in shards if z is not None]
    if not decoded:
        return None
    if device.type == "cpu" and not has_kernels(device) and cpu.is_fast(dtype):
        return best_bits(decoded, each=cpu.OUTLIER_BITS)
    if _has_int4(device, dtype) and all(z.shape[1] % min(int4.GROUPS) == 0 for z in decoded):
        return best_bits(decoded, int4.WIDTHS, int4.OUTLIER_BITS)
    if has_kernels(device) and dtype in (torch.bfloat16, torch.float16):
        return best_bits(decoded)
    return best_bits(decoded, each=CSR_OUTLIER_BITS)


def _has_int4(device: torch.device, dtype: torch.dtype) -> bool:
    return device.type == "cpu" and not has_kernels(device) and int4.is_fast(dtype)


def is_batch_invariant() -> bool:
    """Return whether one of BATCH_INVARIANT asks for results of a row that do not depend on the other rows."""
    return "1" in map(os.environ.get, BATCH_INVARIANT)


def make_operands(
    weight: PackedWeight | MergedTrellis,
    dtype: torch.dtype,
    where: str,
    capacity: Any = None,
    alone: bool = True,
) -> Operands:
    """Make the operands of a weight on its device; `invariant` operands if `is_batch_invariant`.

    Args:
        weight: on the device to run on.
        dtype: of the activations.
        where: layer name for errors.
        capacity: of the operands to be replaced; None for the first operands of a layer.
        alone: False for a weight that `stack_operands` will stack with others.

    Raises:
        CheckpointError: more outliers, or words of a trellis, than fit.
    """
    invariant = is_batch_invariant()
    if isinstance(weight, MergedTrellis):
        return trellis_operands(weight, dtype, where, capacity, alone, invariant)
    if has_kernels(weight.qweight.device):
        reason = unsupported(weight, dtype)
        if reason is None:
            return TiledOperands.pack(weight, where, capacity, alone, invariant)
        _warn(f"{where}: the kernels do not support {reason}; falling back to dequantize + matmul")
    elif cpu.supports(weight, dtype):
        return CpuOperands.pack(weight, where, capacity, invariant)
    if weight.outliers is not None:
        nnz = weight.outliers.nnz
        capacity = capacity or outlier_capacity(nnz)
        if nnz > capacity:
            raise CheckpointError(where, f"at most {capacity} outliers", str(nnz), RESTART_TO_RELOAD)
    if int4.supports(weight, dtype):
        return Int4Operands.pack(weight, capacity, invariant)
    if _has_int4(weight.qweight.device, dtype):
        needs = f"torch's 4-bit matmul needs a multiple of {min(int4.GROUPS)} columns with one scale"
        _warn(f"{where}: {needs}; falling back to dequantize + matmul")
    return CheckpointOperands.pack(weight, capacity, invariant)


def trellis_operands(
    weight: MergedTrellis, dtype: torch.dtype, where: str, capacity: Any, alone: bool, invariant: bool
) -> RingOperands | CpuTrellisOperands | DenseOperands:
    """Make the operands of one trellis weight on its device; arguments and errors as for `make_operands`."""
    if has_kernels(weight.device):
        reason = trellis.unsupported(weight, dtype)
        if reason is None:
            return RingOperands.pack(weight, where, capacity, alone, invariant)
        _warn(f"{where}: the kernels do not support {reason}; decoding the weight at load")
    elif cpu.supports_trellis(weight, dtype):
        return CpuTrellisOperands.pack(weight, where, capacity, invariant)
    return DenseOperands.pack(weight.dequantize(dtype), invariant)


def check_room(made: Sequence[Any], where: str, capacity: Any) -> None:
    """Refuse a reloaded stack as soon as the experts made so far exceed the room of all, before more take memory."""
    if capacity is not None and isinstance(made[0], RingOperands):
        trellis.check_words(made, where, capacity)
    elif capacity is not None and isinstance(made[0], TiledOperands):
        slots = sum(part.capacity or 0 for part in made)
        if slots > capacity:
            raise too_many_slots(where, capacity, f"{slots} in {len(made)} experts")


def stack_operands(operands: Sequence[Any], where: str, capacity: Any = None) -> Operands:
    """Stack the operands of several weights of one scheme and shape.

    Args:
        operands: of the weights.
        where: layer name for errors.
        capacity: of the stack to be replaced; None for the first stack of a layer.

    Returns:
        The same tensors with a leading dimension, one entry a weight, except that one array, [1, ...], has all outliers
        in the tiled layout, and all words or kept weights of a trellis. Outliers in other layouts are padded to one
        length with zeros, like the room that each weight has after its last outlier.

    Raises:
        CheckpointError: more outliers than fit.
    """
    if isinstance(operands[0], RingOperands):
        return RingOperands.stack(operands, where, capacity)
    first, tensors = operands[0], [part.tensors() for part in operands]
    parts = {name: _all_or_none([each[name] for each in tensors]) for name in tensors[0]}
    stacked: dict[str, torch.Tensor | None] = {}
    if isinstance(first, TiledOperands) and first.capacity is not None:
        entries, slice_ptr = parts.pop("entries"), parts.pop("slice_ptr")
        stacked["entries"], stacked["slice_ptr"] = pool(entries, slice_ptr, where, capacity)
    stacked |= {name: pad_sequence(part, batch_first=True) if part else None for name, part in parts.items()}
    return type(first).from_lists([stacked[name] for name in tensors[0]], first.constants(), first.arch)


def _all_or_none(tensors: Sequence[torch.Tensor | None]) -> list[torch.Tensor]:
    """Return one tensor of each weight of a stack; an empty list if no weight has the tensor."""
    present = [tensor for tensor in tensors if tensor is not None]
    assert len(present) in (0, len(tensors)), "all weights of a stack have the tensor, or none has"
    return present
