"""The layout `dense`, on any device: the decoded weight as a matrix, which torch multiplies by.

    MergedTrellis --dequantize, once at load--> matrix --product--> y

It is for weights of the encoding `trellis` on devices without kernels, and for what the kernels do not support. It
takes the memory of an unquantized weight.

Invariant: each entry is computed in float32 and rounded once, to the dtype of the layer.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch

from vllm_latq.serving.layouts.checkpoint import multiply_rows
from vllm_latq.serving.layouts.listed import ListedOperands


@dataclass(frozen=True)
class DenseOperands(ListedOperands):
    """A weight [rows, cols] in the layout `dense`; or, to be registered, the weights of several experts.

    The weights of several experts are one object, whose tensor has a leading dimension; `product` takes one weight.

    Attributes:
        dense: [rows, cols], dtype of the layer.
        rows: output channels.
        invariant: whether the product of a row must not depend on the other rows.
    """

    TENSORS = ("dense",)
    CONSTANTS = ("rows", "invariant")
    layout: ClassVar[str] = "dense"
    arch: ClassVar[str] = ""
    capacity: ClassVar[None] = None  # no tensor's size depends on the data

    dense: torch.Tensor
    rows: int
    invariant: bool

    @classmethod
    def pack(cls, dense: torch.Tensor, invariant: bool = False) -> "DenseOperands":
        """Take a matrix [rows, cols]."""
        return cls(dense, dense.shape[0], invariant)

    def product(self, x: torch.Tensor) -> torch.Tensor:
        """Return x [.., cols] times the transposed weight, [.., rows], dtype of x."""
        return multiply_rows(x, self.dense.to(x.dtype), bool(self.invariant))
