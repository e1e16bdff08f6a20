"""The Gram matrices of linears: of their inputs (H) and of the gradients at their outputs (G)."""

from dataclasses import dataclass, replace
from typing import ClassVar

import torch


@dataclass(frozen=True)
class SharedInput:
    """The linears that read one input: they share its Hessian, its factor and its order.

    Attributes:
        names: names of the linears, in the order in which the block first calls them.
    """

    names: tuple[str, ...]

    @property
    def leader(self) -> str:
        """The first linear, which names the input in messages."""
        return self.names[0]

    def __len__(self) -> int:
        return len(self.names)


@dataclass(frozen=True)
class LayerStatistics:
    """Grams of one linear, means over tokens.

    Attributes:
        inputs: float32 [c, c], E[x x^T].
        outputs: float32 [b, b] each, the diagonal blocks of E[g g^T] that cover the r outputs in order; nats^2.
        tokens: number of tokens that reach the linear.
        leader: name of the first linear that reads the same input (`SharedInput.leader`).
        note: what the record of the linear says about these statistics; empty if nothing.
    """

    inputs: torch.Tensor
    outputs: list[torch.Tensor]
    tokens: int
    leader: str
    note: str = ""
    owner: ClassVar[None] = None  # every process may have them

    @property
    def channels(self) -> int:
        """Number of input channels."""
        return len(self.inputs)

    @property
    def reached(self) -> bool:
        """Return whether nonzero inputs came to the linear, and nonzero gradients back from the loss."""
        return float(self.inputs.diagonal().max()) != 0 and any(float(g.diagonal().max()) != 0 for g in self.outputs)

    def to(self, device: torch.device) -> "LayerStatistics":
        """Return the same statistics with their tensors on `device`."""
        outputs = [gram.to(device) for gram in self.outputs]
        return replace(self, inputs=self.inputs.to(device), outputs=outputs)


# Columns of a gram that a processor multiplies at once, and the rows from which on that takes less time in all.
_COLUMNS = 128
_MANY_ROWS = 512


def add_gram(gram: torch.Tensor, rows: torch.Tensor) -> None:
    """Add rows^T rows to a symmetric gram, float32 [c, c]; rows are float32 [n, c].

    Of many rows a processor multiplies the blocks from the diagonal on, about half of the work; the others are copies.
    """
    if rows.is_cuda or len(rows) < _MANY_ROWS:
        gram.addmm_(rows.T, rows)
        return
    for start in range(0, len(gram), _COLUMNS):
        stop = start + _COLUMNS
        gram[start:stop, start:].addmm_(rows[:, start:stop].T, rows[:, start:])
        gram[stop:, start:stop] = gram[start:stop, stop:].T
