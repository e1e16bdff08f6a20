"""Check every invariant of a stored linear before anything else reads it. FORMAT.md section 4.

A check that would read out of bounds where an earlier invariant is violated is not reached.
"""

from collections.abc import Iterator, Mapping

import torch

from vllm_latq.errors import CheckpointError
from vllm_latq.format.encodings.registry import encoding_of, tensor_specs
from vllm_latq.format.encodings.weight import Weight
from vllm_latq.format.problems import problem
from vllm_latq.format.scheme import LayerScheme
from vllm_latq.format.tensors import SHAPE, Header


def weight_from_tensors(
    tensors: Mapping[str, torch.Tensor], scheme: LayerScheme, shape: tuple[int, int], where: str
) -> Weight:
    """Validate and wrap the tensors (suffix -> tensor) of one linear in any encoding; raises CheckpointError."""
    check(tensors, scheme, shape, where)
    return encoding_of(scheme).from_tensors(tensors, scheme, shape)


def check(tensors: Mapping[str, torch.Tensor], scheme: LayerScheme, shape: tuple[int, int], where: str) -> None:
    """Raise the first problem of a linear's tensors (suffix -> tensor), if there is one."""
    for found in problems(tensors, scheme, shape, where):
        raise found


def declared_shape(tensor: torch.Tensor, where: str) -> tuple[int, int]:
    """Return the (rows, cols) in a linear's `weight_shape` tensor; raise CheckpointError unless it holds two sizes."""
    if tensor.dtype != torch.int32 or tuple(tensor.shape) != (2,) or int(tensor.min()) < 1:
        values = f" {tensor.tolist()}" if tensor.numel() <= 2 else ""
        raise problem(f"{where}.{SHAPE}", "two positive int32 sizes", f"{tensor.dtype} {tuple(tensor.shape)}{values}")
    return int(tensor[0]), int(tensor[1])


def problems(
    tensors: Mapping[str, torch.Tensor], scheme: LayerScheme, shape: tuple[int, int], where: str
) -> Iterator[CheckpointError]:
    """Yield an error for every violated invariant of a linear [rows, cols] = `shape` stored under `scheme`."""
    if min(shape) < 1:
        yield problem(f"{where}.{SHAPE}", "two positive sizes", str(shape))
        return
    structural = list(header_problems(tensors, scheme, shape, where))
    yield from structural
    if structural:
        return
    stored_shape = tuple(tensors[SHAPE].tolist())
    if stored_shape != tuple(shape):
        yield problem(f"{where}.{SHAPE}", f"the shape of the linear, {tuple(shape)}", str(stored_shape))
        return
    yield from encoding_of(scheme).problems(tensors, scheme, shape, where)


def header_problems(
    tensors: Mapping[str, torch.Tensor | Header], scheme: LayerScheme, shape: tuple[int, int], where: str
) -> Iterator[CheckpointError]:
    """Yield an error for every wrong name, dtype and shape of a linear's tensors; their values are not read."""
    specs = tensor_specs(scheme, *shape, where=where)
    for suffix, spec in specs.items():
        if suffix not in tensors:
            yield problem(f"{where}.{suffix}", f"a tensor {spec}", "no such tensor")
        elif found := spec.mismatch(tensors[suffix]):
            yield problem(f"{where}.{suffix}", str(spec), found)
    for suffix in tensors.keys() - specs.keys():
        yield problem(f"{where}.{suffix}", f"only {', '.join(specs)}", "an unknown tensor")
