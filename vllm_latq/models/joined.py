"""Linears that a checkpoint stores one by one, and that transformers concatenates to one, as separate linears again."""

from collections.abc import Sequence

import torch
from torch import nn


class JoinedLinears(nn.Module):
    """Linears of equal size without biases that share an input; their outputs stand side by side.

    Args:
        joined: the linear whose place they take, on the meta device.
        leaves: their names, in the order of the rows of `joined`.
    """

    def __init__(self, joined: nn.Linear, leaves: Sequence[str]) -> None:
        super().__init__()
        rows, dtype = joined.out_features // len(leaves), joined.weight.dtype
        for leaf in leaves:
            self.add_module(leaf, nn.Linear(joined.in_features, rows, bias=False, device="meta", dtype=dtype))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map [.., in_features] to [.., out_features] of the linear whose place they take."""
        return torch.cat([linear(x) for linear in self.children()], -1)
