"""Nearest plane on both sides of a weight, on integers with group scales.

With H = V_H D_H V_H^T and G = V_G D_G V_G^T (unit upper triangles in rounding order, see `factor`), E = W - Q, and

    target = W + E (V_H - I) + (V_G - I)^T E V_H      needs the errors to the left of a weight and above it only

each weight is rounded to the integer nearest to its target, and clipped to the grid. Then for any Q

    tr(G E H E^T) == sum over weights of D_G[i] D_H[j] (target - Q)[i, j]^2

so a weight that is not clipped costs at most a quarter of its squared scale, times D_G[i] D_H[j] (Babai's bound for the
lattice G (x) H). Feedback between tiles is a product of matrices, as in `trellis_plane`; inside the tiles of a wave,
diagonals are rounded one after the other.
"""

from dataclasses import dataclass

import torch

from vllm_latq.coding.trellis.code import TILE
from vllm_latq.quantize.lattice.factor import Factor
from vllm_latq.quantize.lattice.outliers import Grid
from vllm_latq.quantize.lattice.trellis_plane import feed_back, tile_blocks


@dataclass(frozen=True)
class GroupPass:
    """Result of a pass, in rounding order.

    Attributes:
        integers: int32 [r, c].
        targets: float32 [r, c], the values that were rounded.
    """

    integers: torch.Tensor
    targets: torch.Tensor


def group_plane(weight: torch.Tensor, rows: Factor, columns: Factor, scales: torch.Tensor, grid: Grid) -> GroupPass:
    """Round a weight on the lattice of both factors.

    Args:
        weight: float32 [r, c], rows and columns in rounding order.
        rows, columns: of G and H.
        scales: float32 [r, c], the scale of each weight, none of them zero.
        grid: bounded, mid-tread.
    """
    height, width = weight.shape
    padding = (0, -width % TILE, 0, -height % TILE)
    weight = torch.nn.functional.pad(weight, padding)
    scales = torch.nn.functional.pad(scales, padding, value=1.0)
    down, right = (_padded_triangle(factor) for factor in (rows, columns))
    error, carried, targets, integers = (torch.zeros_like(weight) for _ in range(4))  # carried: E V_H
    row_tiles, column_tiles = (size // TILE for size in weight.shape)
    for wave in range(row_tiles + column_tiles - 1):
        i = torch.arange(max(0, wave - column_tiles + 1), min(row_tiles, wave + 1))
        j = wave - i
        beside, above = feed_back(error, right, carried, down, i, j)
        tile = _Tiles(
            tile_blocks(weight)[i, j],
            beside,
            above,
            tile_blocks(down)[i, i],
            tile_blocks(right)[j, j],
            tile_blocks(scales)[i, j],
        )
        done = tile.rounded(grid)
        for matrix, part in zip((integers, targets, error, carried), done, strict=True):
            tile_blocks(matrix)[i, j] = part
    return GroupPass(integers[:height, :width].to(torch.int32), targets[:height, :width])


def _padded_triangle(factor: Factor) -> torch.Tensor:
    """Return V, float32, with the identity where it is padded to whole tiles."""
    size = len(factor.order)
    unit = torch.eye(size + -size % TILE, dtype=torch.float32, device=factor.order.device)
    unit[:size, :size] = factor.unit_triangle()
    return unit


@dataclass(frozen=True)
class _Tiles:
    """Independent tiles to round, [n, TILE, TILE] each: weights, feedback from other tiles, triangles, scales."""

    weight: torch.Tensor
    beside: torch.Tensor
    above: torch.Tensor
    down: torch.Tensor
    right: torch.Tensor
    scales: torch.Tensor

    def rounded(self, grid: Grid) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return integers, targets, errors E, and E V_H."""
        integers, targets, error = (torch.zeros_like(self.weight) for _ in range(3))
        carried = torch.zeros_like(self.weight)
        outside = self.weight + self.beside + self.above
        above, beside = self.down.transpose(1, 2), self.right.transpose(1, 2)
        for diagonal in range(2 * TILE - 1):
            i = torch.arange(max(0, diagonal - TILE + 1), min(TILE, diagonal + 1))
            j = diagonal - i
            # Weights that are not rounded yet are still zero in `error` and `carried`.
            left = (error[:, i] * beside[:, j]).sum(2)
            over = (carried.transpose(1, 2)[:, j] * above[:, i]).sum(2)
            wanted = outside[:, i, j] + left + over
            integer = (wanted / self.scales[:, i, j]).round_().clamp_(grid.low, grid.high)
            left_over = self.weight[:, i, j] - integer * self.scales[:, i, j]
            integers[:, i, j], targets[:, i, j], error[:, i, j] = integer, wanted, left_over
            carried[:, i, j] = left_over + left + self.beside[:, i, j]
        return integers, targets, error, carried
