"""Read and merge the stored shards of one matrix; vLLM's linears and experts share these steps.

    tensors of a shard --read_shard--> Weight --decode--> integers --merge--> one PackedWeight of all shards

Invariant: merging neither rounds nor clips. The shards of one matrix share their column scales, and the decoded ones
share the width of their codes.
"""

from collections.abc import Mapping, Sequence

import torch

from vllm_latq.errors import OTHER_MODEL, CheckpointError
from vllm_latq.format.encodings.packed import PackedWeight
from vllm_latq.format.encodings.weight import Weight
from vllm_latq.format.scheme import LayerScheme
from vllm_latq.format.served_size import best_bits
from vllm_latq.format.tensors import SHAPE
from vllm_latq.format.validate import declared_shape, weight_from_tensors
from vllm_latq.serving.decode import decode_on_device
from vllm_latq.serving.sharding import cat_rows

Shard = tuple[str, Weight]  # name in the checkpoint, weight


def read_shard(
    tensors: Mapping[str, torch.Tensor], scheme: LayerScheme, cols: int, where: str, rows: int | None = None
) -> Weight:
    """Validate and wrap the stored tensors (suffix -> tensor) of one shard.

    Args:
        tensors: whole, on the CPU.
        scheme: how the shard is stored.
        cols: required number of input channels.
        where: the shard's name in the checkpoint.
        rows: required number of output channels; None for any.

    Raises:
        CheckpointError: tensors are missing, damaged or of another shape.
    """
    if SHAPE not in tensors:
        hint = "The checkpoint is incomplete."
        raise CheckpointError(f"{where}.{SHAPE}", "a tensor int32 (2)", "no such tensor", hint)
    shape = declared_shape(tensors[SHAPE], where)
    if shape[1] != cols:
        raise CheckpointError(f"{where}.{SHAPE}", f"{cols} input channels", str(shape[1]), OTHER_MODEL)
    if rows is not None and shape[0] != rows:
        raise CheckpointError(f"{where}.{SHAPE}", f"{rows} output channels", str(shape[0]), OTHER_MODEL)
    return weight_from_tensors(tensors, scheme, shape, where)


def decode(shards: Sequence[Shard], device: torch.device) -> list[torch.Tensor | None]:
    """Decode the coded shards on the layer's device, many times faster than on the CPU.

    Returns:
        For each shard its integers, int16 where they fit, else int32, [rows, cols] on `device`; None if it is packed.
    """
    decoded = (decode_on_device(weight, name, device) for name, weight in shards)
    return [None if integers is None else _narrow(integers) for integers in decoded]


def merge(
    shards: Sequence[Shard], integers: Sequence[torch.Tensor | None], device: torch.device, bits: int | None = None
) -> PackedWeight:
    """Stack shards; decoded integers become inliers and outliers, with a scale for each row.

    Args:
        shards: the shards of one matrix, in row order.
        integers: result of `decode`.
        device: the device of the integers.
        bits: width of the codes of decoded shards; None for the width that takes the fewest bytes on a GPU.

    Raises:
        CheckpointError: the shards' column scales differ, although they multiply the same input.
    """
    _check_column_scales(shards)
    decoded = [z for z in integers if z is not None]
    if decoded and bits is None:
        bits = best_bits(decoded)
    return cat_rows([weight.pack(z, bits) for (_, weight), z in zip(shards, integers, strict=True)])


def _check_column_scales(shards: Sequence[Shard]) -> None:
    """Raise CheckpointError if two shards have different column scales."""
    (first, weight), *others = shards
    for name, other in others:
        scales, other_scales = weight.column_scales, other.column_scales
        if scales is not None and other_scales is not None and not torch.equal(scales, other_scales):
            expected = f"the column scales of {first} (fused with this layer)"
            hint = "Quantize the linears of one input with equal column scales."
            raise CheckpointError(name, expected, "different ones", hint)


def _narrow(integers: torch.Tensor) -> torch.Tensor:
    """Return the integers as int16 if they fit."""
    low, high = (int(limit) for limit in integers.aminmax())
    fits = torch.iinfo(torch.int16).min <= low and high <= torch.iinfo(torch.int16).max
    return integers.to(torch.int16) if fits else integers
