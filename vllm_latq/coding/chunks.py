"""Chunks of an entropy-coded matrix; each is decoded without the others. FORMAT.md sections 3.3 and 3.4.

    integers z [rows, cols]
      +-----------+-----------+---+      chunk: shape[0] x shape[1] integers in row-major order, fewer at the lower and
      | chunk 0,0 | chunk 0,1 |   |      right edge;  shape[1] = min(cols, weights),
      +-----------+-----------+---+      shape[0] = max(1, weights // cols)
      | chunk 1,0 |    ...        |      chunks are stored in row-major order, too

Invariant: chunks of several rows are as wide as the matrix, so the integers that a short chunk lacks are its last.
"""

from dataclasses import dataclass

import numpy as np
import torch


@dataclass(frozen=True)
class Chunks:
    """The way a matrix is cut into chunks.

    Attributes:
        rows, cols: size of the matrix, both positive.
        weights: approximate number of weights in a whole chunk.
    """

    rows: int
    cols: int
    weights: int

    @property
    def shape(self) -> tuple[int, int]:
        """Rows and columns of a whole chunk."""
        return max(1, self.weights // self.cols), min(self.cols, self.weights)

    @property
    def grid(self) -> tuple[int, int]:
        """(row_blocks, col_blocks) of the matrix."""
        rows, cols = self.shape
        return -(-self.rows // rows), -(-self.cols // cols)

    def counts(self) -> np.ndarray:
        """Integers in each chunk, int64 [row_blocks, col_blocks]."""
        rows, cols = (
            np.minimum(total - np.arange(number) * size, size)
            for total, size, number in zip((self.rows, self.cols), self.shape, self.grid, strict=True)
        )
        return rows[:, None] * cols[None, :]

    def split(self, matrix: torch.Tensor, fill: int) -> torch.Tensor:
        """Return the integers by position in their chunk, [shape[0] * shape[1], row_blocks, col_blocks].

        Positions that a short chunk lacks hold `fill`.
        """
        rows, cols = self.shape
        filled = torch.nn.functional.pad(matrix, (0, -self.cols % cols, 0, -self.rows % rows), value=fill)
        tiled = filled.view(self.grid[0], rows, self.grid[1], cols)
        return tiled.permute(1, 3, 0, 2).reshape(rows * cols, *self.grid)

    def join(self, integers: torch.Tensor) -> torch.Tensor:
        """Undo `split`: return the matrix [rows, cols]."""
        (rows, cols), (row_blocks, col_blocks) = self.shape, self.grid
        tiled = integers.view(rows, cols, row_blocks, col_blocks).permute(2, 0, 3, 1)
        return tiled.reshape(row_blocks * rows, col_blocks * cols)[: self.rows, : self.cols].contiguous()
