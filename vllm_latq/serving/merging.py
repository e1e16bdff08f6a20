"""Read, merge and cut the stored shards of one matrix; vLLM's linears and experts share these steps.

    tensors of a shard --read_shard--> Weight --decode--> integers --merge--> one PackedWeight of all shards
    tensors of a shard --read_shard--> TrellisWeight --merge--> one MergedTrellis of all shards

Invariant: merging neither rounds nor clips. The decoded shards of one matrix share the width of their codes, and those
of a trellis code share the scales and the order of their columns.
"""

from collections.abc import Mapping, Sequence

import torch

from vllm_latq.errors import OTHER_MODEL, CheckpointError
from vllm_latq.format.encodings.packed import PackedWeight
from vllm_latq.format.encodings.trellis import TrellisWeight
from vllm_latq.format.encodings.weight import IntegerWeight, Weight
from vllm_latq.format.scheme import LayerScheme
from vllm_latq.format.served_size import best_bits
from vllm_latq.format.tensors import SHAPE
from vllm_latq.format.validate import declared_shape, weight_from_tensors
from vllm_latq.serving.decode import decode_on_device
from vllm_latq.serving.sharding import cat_rows, take
from vllm_latq.serving.trellis import MergedTrellis

Shard = tuple[str, Weight]  # name in the checkpoint, weight
Merged = PackedWeight | MergedTrellis


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
        For each shard its integers, int16 where they fit, else int32, [rows, cols] on `device`; None without a code
        of integers.
    """
    decoded = (
        decode_on_device(weight, name, device) if isinstance(weight, IntegerWeight) else None for name, weight in shards
    )
    return [None if integers is None else _narrow(integers) for integers in decoded]


def merge(
    shards: Sequence[Shard], integers: Sequence[torch.Tensor | None], device: torch.device, bits: int | None = None
) -> Merged:
    """Stack shards; decoded integers become inliers and outliers, with a scale for each row.

    Args:
        shards: the shards of one matrix, in row order.
        integers: result of `decode`.
        device: the device of the integers.
        bits: width of the codes of decoded shards; None for the width that takes the fewest bytes on a GPU.

    Raises:
        CheckpointError: the shards' scales of columns, or orders of columns, differ, although they multiply the same
            input.
    """
    trellis = [(name, weight) for name, weight in shards if isinstance(weight, TrellisWeight)]
    if trellis:
        _check_columns(trellis)
        return MergedTrellis.of([weight for _, weight in trellis])
    decoded = [z for z in integers if z is not None]
    if decoded and bits is None:
        bits = best_bits(decoded)
    return cat_rows(
        [
            weight.pack(z, bits)
            for (_, weight), z in zip(shards, integers, strict=True)
            if isinstance(weight, IntegerWeight)
        ]
    )


def cut(whole: Merged, rows: torch.Tensor, columns: tuple[int, int], where: str) -> Merged:
    """Take the rows and columns of a rank; arguments and errors as for `sharding.take`."""
    if isinstance(whole, MergedTrellis):
        return whole.take(rows, columns)
    return take(whole, rows.to(whole.qweight.device), columns, where)


def _check_columns(shards: Sequence[tuple[str, TrellisWeight]]) -> None:
    """Raise CheckpointError if two shards have different column exponents, or different importance of columns."""
    (first, weight), *others = shards
    for name, other in others:
        for attribute in ("column_exponents", "column_importance"):
            if not torch.equal(getattr(other, attribute), getattr(weight, attribute)):
                what = attribute.replace("_", " ")
                expected = f"the {what} of {first} (fused with this layer)"
                hint = f"Quantize the linears of one input with equal {what}."
                raise CheckpointError(name, expected, "different ones", hint)


def _narrow(integers: torch.Tensor) -> torch.Tensor:
    """Return the integers as int16 if they fit."""
    low, high = (int(limit) for limit in integers.aminmax())
    fits = torch.iinfo(torch.int16).min <= low and high <= torch.iinfo(torch.int16).max
    return integers.to(torch.int16) if fits else integers
