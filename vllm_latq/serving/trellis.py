"""The part of a layer's trellis weights that one rank multiplies by, neither cut nor decoded before its layout is made.

    TrellisWeights of a layer --merge--> MergedTrellis --take--> MergedTrellis --make_operands--> operands of a layout

Invariant: `dequantize()` equals the rows and columns of the stacked `TrellisWeight.dequantize()`, bit for bit.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import torch

from vllm_latq.format.encodings.trellis import TrellisWeight


@dataclass(frozen=True)
class MergedTrellis:
    """Stored weights of equal columns on top of each other, and what a rank owns of the stack.

    Attributes:
        shards: whole, as stored.
        rows: int64 [n] on the CPU, number in the stack of each row; a negative number gives a row of zeros.
        columns: (low, high).
    """

    bits: ClassVar[None] = None

    shards: tuple[TrellisWeight, ...]
    rows: torch.Tensor
    columns: tuple[int, int]

    @classmethod
    def of(cls, shards: Sequence[TrellisWeight]) -> "MergedTrellis":
        """Stack whole weights; nothing is cut."""
        rows = sum(shard.shape[0] for shard in shards)
        return cls(tuple(shards), torch.arange(rows, device="cpu"), (0, shards[0].shape[1]))

    @property
    def device(self) -> torch.device:
        """The device that decodes the weights."""
        return self.shards[0].trellis.device

    @property
    def shape(self) -> tuple[int, int]:
        """(rows, columns) that the rank owns."""
        low, high = self.columns
        return len(self.rows), high - low

    def to(self, device: torch.device) -> "MergedTrellis":
        """Move the stored tensors."""
        return replace(self, shards=tuple(shard.to(device) for shard in self.shards))

    def take(self, rows: torch.Tensor, columns: tuple[int, int]) -> "MergedTrellis":
        """Take rows and columns, numbered in this part; arguments as for `sharding.take`."""
        rows, first = rows.cpu(), self.columns[0]
        kept = torch.where(rows < 0, rows, self.rows[rows.clamp(min=0)])
        return replace(self, rows=kept, columns=(first + columns[0], first + columns[1]))

    def dequantize(self, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """Return the owned part, computed in float32 and rounded once to `dtype`. Decodes one shard at a time."""
        weight = torch.zeros(self.shape, dtype=dtype, device=self.device)
        for shard, start in self._starts():
            owned = ((self.rows >= start) & (self.rows < start + shard.shape[0])).nonzero()[:, 0]
            if len(owned):
                stored = (self.rows[owned] - start).to(self.device)
                weight[owned.to(self.device)] = shard.dequantize(dtype)[stored, slice(*self.columns)]
        return weight

    def _starts(self) -> Iterator[tuple[TrellisWeight, int]]:
        """Yield each shard and the number of its first row in the stack."""
        start = 0
        for shard in self.shards:
            yield shard, start
            start += shard.shape[0]
