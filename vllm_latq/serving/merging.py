"""The stored shards of one matrix, read and merged: what vLLM's linears and its experts have in common.

    tensors of a shard --read_shard--> Weight --decode--> integers --merge--> one PackedWeight of all shards

Invariant: merging neither rounds nor clips. Shards of one matrix share a width of inliers and its column scales.
"""

from collections.abc import Mapping, Sequence

import torch

from vllm_latq.errors import OTHER_MODEL, CheckpointError
from vllm_latq.format.coded import RansWeight, Weight, weight_from_tensors
from vllm_latq.format.config import LayerScheme
from vllm_latq.format.packed import PackedWeight
from vllm_latq.format.served_size import best_bits
from vllm_latq.format.tensors import SHAPE
from vllm_latq.format.validate import declared_shape
from vllm_latq.serving.decode import decode_on_device
from vllm_latq.serving.sharding import cat_rows

Shard = tuple[str, Weight]  # name in the checkpoint, weight


def read_shard(
    tensors: Mapping[str, torch.Tensor], scheme: LayerScheme, cols: int, where: str, rows: int | None = None
) -> Weight:
    """Validate and wrap the stored tensors (suffix -> tensor) of one shard.

    Args:
        tensors: whole, on the CPU.
        scheme: how it is stored.
        cols: input channels that it must have.
        where: its name in the checkpoint.
        rows: output channels that it must have; None for any.

    Raises:
        CheckpointError: tensors that are missing, damaged or of another shape.
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
    """The integers of coded shards, int16 where they fit, else int32, [rows, cols] on `device`; None for packed ones.

    They are decoded on the layer's device, where that is many times quicker than on the CPU.
    """
    return [
        None if isinstance(weight, PackedWeight) else _narrow(decode_on_device(weight, name, device))
        for name, weight in shards
    ]


def merge(
    shards: Sequence[Shard], integers: Sequence[torch.Tensor | None], device: torch.device, bits: int | None = None
) -> PackedWeight:
    """Stack shards; coded ones become inliers and overflow of the same integers, with a scale for each row.

    Args:
        shards: of one matrix, in order.
        integers: theirs, from `decode`.
        device: of the column scales and the decoded integers.
        bits: width of decoded inliers; None for the one that takes the fewest bytes on a GPU.

    Raises:
        CheckpointError: column scales that differ, although they multiply one input.
    """
    _check_column_scales(shards)
    decoded = [z for z in integers if z is not None]
    if decoded and bits is None:
        bits = best_bits(decoded)
    packed = []
    for (_, weight), z in zip(shards, integers, strict=True):
        if isinstance(weight, PackedWeight):
            packed.append(weight)
        else:
            assert z is not None
            packed.append(weight.pack(z, bits))
    return cat_rows(packed)


def _check_column_scales(shards: Sequence[Shard]) -> None:
    (first, weight), *others = shards
    for name, other in others:
        if not isinstance(other, RansWeight) or not isinstance(weight, RansWeight):
            continue
        if not torch.equal(weight.column_exponents, other.column_exponents):
            expected = f"those of {first}, with which it is one matrix"
            hint = "Quantize with equal exponents for a shared input."
            raise CheckpointError(f"{name}.column_exponents", expected, "others", hint)


def _narrow(integers: torch.Tensor) -> torch.Tensor:
    low, high = (int(limit) for limit in integers.aminmax())
    fits = torch.iinfo(torch.int16).min <= low and high <= torch.iinfo(torch.int16).max
    return integers.to(torch.int16) if fits else integers
