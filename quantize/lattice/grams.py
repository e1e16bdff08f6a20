"""The Gram matrices of one linear: of its inputs (H) and of the gradients at its outputs (G)."""

from dataclasses import dataclass, replace

import torch


@dataclass(frozen=True)
class LayerStatistics:
    """Grams of one linear, means over tokens.

    Attributes:
        inputs: float32 [c, c], E[x x^T].
        outputs: float32 [b, b] each, the diagonal blocks of E[g g^T] that cover the r outputs in order; nats^2.
        tokens: number of tokens that reach it.
        group: name of the first linear that reads the same input.
        note: what its record says about them; empty if nothing.
    """

    inputs: torch.Tensor
    outputs: list[torch.Tensor]
    tokens: int
    group: str
    note: str = ""

    @property
    def reached(self) -> bool:
        """Whether anything but zeros came to it, and back from the loss."""
        return float(self.inputs.diagonal().max()) != 0 and any(float(g.diagonal().max()) != 0 for g in self.outputs)

    def to(self, device: torch.device) -> "LayerStatistics":
        outputs = [gram.to(device) for gram in self.outputs]
        return replace(self, inputs=self.inputs.to(device), outputs=outputs)
