"""The operator that multiplies by a quantized weight, on any device: `latq::linear`.

    PackedWeight or MergedTrellis --make_operands, once at load--> operands of a layout --latq::linear--> y

A PackedWeight is multiplied by as

    y[.., i] = sum_j x[.., j] * row_scales[i] * (scales[i, j // group_size] * (z[i, j] + o) + outliers[i, j])

with o = 1/2 on a mid-rise grid, else 0.

    layout      tensors                      product
    tiled       in the tiles of the kernels  Triton's, on GPUs (`layouts/tiled.py`)
    cpu         in lanes of vectors          our C++, on CPUs (`layouts/cpu.py`)
    cpu_trellis in lanes of vectors          our C++, on CPUs (`layouts/cpu.py`)
    int4        in the order of torch's      torch's with 4-bit codes, on CPUs without a compiler (`layouts/int4.py`)
    checkpoint  as `packed` stores them      dequantize, then matmul, on any device (`layouts/checkpoint.py`)
    trellis     in the order of the kernels  Triton's, on GPUs (`layouts/trellis.py`)
    dense       a decoded trellis weight     matmul, on any device (`layouts/dense.py`)

A layer registers the tensors of its operands and passes them to the operator as a list, with the constants as another:
torch allows no other types. The class of the layout packs and unpacks both. The operator is registered once, when this
module is imported, for every backend, with a fake implementation for tracing: a graph sees one opaque operator,
whatever the layout.

Invariant: the first constant is the number of rows, and the last is whether the operands are `invariant`: whether the
product of a row of x must not depend on the other rows. The others are those of the layout.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, get_args

import torch

from vllm_latq.serving.layouts.checkpoint import CheckpointOperands
from vllm_latq.serving.layouts.cpu import CpuOperands, CpuTrellisOperands
from vllm_latq.serving.layouts.dense import DenseOperands
from vllm_latq.serving.layouts.int4 import Int4Operands
from vllm_latq.serving.layouts.tiled import TiledOperands
from vllm_latq.serving.layouts.trellis import RingOperands

Operands = (
    TiledOperands | CpuOperands | Int4Operands | CheckpointOperands | RingOperands | CpuTrellisOperands | DenseOperands
)
LAYOUTS: Mapping[str, type[Operands]] = {made.layout: made for made in get_args(Operands)}

_SCHEMA = "(Tensor x, Tensor?[] tensors, int[] constants, str layout, str arch) -> Tensor"


def multiply(
    x: torch.Tensor, tensors: Sequence[torch.Tensor | None], constants: Sequence[int], layout: str, arch: str
) -> torch.Tensor:
    """Run the operator; arguments as for `linear`."""
    return LAYOUTS[layout].from_lists(tensors, constants, arch).product(x)


torch.library.define("latq::linear", _SCHEMA)
# The kernels write to their tickets but leave them at zero, so for its callers the operator changes no input.
torch.library.impl("latq::linear", "CompositeExplicitAutograd")(multiply)


@torch.library.register_fake("latq::linear")
def _linear_fake(x: torch.Tensor, tensors: Any, constants: Sequence[int], layout: str, arch: str) -> torch.Tensor:
    return x.new_empty((*x.shape[:-1], constants[0]))


def linear(
    x: torch.Tensor, tensors: Iterable[torch.Tensor | None], constants: list[int], layout: str, arch: str
) -> torch.Tensor:
    """Multiply x [.., cols] by the transposed weight: [.., rows], dtype of x.

    Args:
        x: activations.
        tensors: values of the operands' `tensors()`, in order.
        constants, layout, arch: of the operands.
    """
    return torch.ops.latq.linear(x, list(tensors), constants, layout, arch)  # type: ignore[no-any-return]
