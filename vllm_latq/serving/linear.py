"""The operator that multiplies by a packed weight, on any device: `latq::linear`.

    PackedWeight --make_operands, once at load--> tensors of a layout, constants --latq::linear--> y

    y[.., i] = sum_j x[.., j] * row_scales[i] * (scales[i, j // group_size] * (z[i, j] + o) + outliers[i, j])

with o = 1/2 on a mid-rise grid, else 0.

    layout      tensors                      product
    tiled       in the tiles of the kernels  Triton's, on GPUs (`kernel_path.py`)
    int4        in the order of torch's      torch's with 4-bit codes, and outliers, on CPUs (`cpu_path.py`)
    checkpoint  as `packed` stores them      dequantize, then matmul, on any device (`dense_path.py`)

Factors of columns are none of its business: `scale_columns` gives them to x first.

It is registered once, when this module is imported, for every backend, with a fake implementation for tracing: a graph
sees one opaque operator, whatever the layout.

Invariant: the first constant is the number of rows; the others are those of the layout.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch

from vllm_latq.serving.layouts.checkpoint import dense_product
from vllm_latq.serving.layouts.int4 import int4_product
from vllm_latq.serving.layouts.tiled import tiled_product

TILED, INT4, CHECKPOINT = "tiled", "int4", "checkpoint"
PRODUCTS: Mapping[str, Callable[..., torch.Tensor]] = {
    TILED: tiled_product,
    INT4: int4_product,
    CHECKPOINT: dense_product,
}

_SCHEMA = "(Tensor x, Tensor?[] tensors, int[] constants, str layout, str arch) -> Tensor"


def scale_columns(x: torch.Tensor, column_scales: torch.Tensor | None) -> torch.Tensor:
    """x [.., cols] times the factors of the weight's columns, float32 [cols], rounded once to the dtype of x.

    Outside the operator, so that torch.compile fuses it with what made x, a norm most often.
    """
    return x if column_scales is None else (x * column_scales).to(x.dtype)


def multiply(
    x: torch.Tensor, tensors: Sequence[torch.Tensor | None], constants: Sequence[int], layout: str, arch: str
) -> torch.Tensor:
    """What the operator runs; arguments as for `linear`."""
    return PRODUCTS[layout](x, tensors, constants, arch)


torch.library.define("latq::linear", _SCHEMA)
# The kernels count on their tickets and leave them at zero, so for its callers the operator changes no input.
torch.library.impl("latq::linear", "CompositeExplicitAutograd")(multiply)


@torch.library.register_fake("latq::linear")
def _linear_fake(x: torch.Tensor, tensors: Any, constants: Sequence[int], layout: str, arch: str) -> torch.Tensor:
    return x.new_empty((*x.shape[:-1], constants[0]))


def linear(
    x: torch.Tensor, tensors: Iterable[torch.Tensor | None], constants: Iterable[int], layout: str, arch: str
) -> torch.Tensor:
    """x [.., cols] times the transposed weight -> [.., rows], dtype of x.

    Args:
        x: activations.
        tensors, constants: of the layout, in its order.
        layout: one of PRODUCTS.
        arch: of the GPU, as the kernels' launch configurations call it; empty but for the tiled layout.
    """
    return torch.ops.latq.linear(x, list(tensors), list(constants), layout, arch)  # type: ignore[no-any-return]
