"""The order in which `two_sided_plane` rounds: tiles in waves, and inside the tiles antidiagonals.

Entries of an antidiagonal do not depend on each other; tiles are swept along antidiagonals, and inside them entries:

        J=0  J=1  J=2
      +----+----+----+     wave 0: tile (0,0)   wave 1: (1,0) (0,1)   wave 2: (2,0) (1,1) (0,2) ...
  I=0 | 0  | 1  | 2  |     a tile receives what lies left of it (E[I, :J] V_H) and above it (V_G^T F[:I, J])
  I=1 | 1  | 2  | 3  |     in matmuls, F = E V_H, then rounds its own antidiagonals for all tiles of the wave at once
      +----+----+----+
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch

TILE = 64
# Antidiagonals whose views are made at once: a view takes as long as an operation on it.
STRETCH = 16
# Largest distance past the last point of the codes' grid, in steps, at which a target is clipped to it (NOTES.md).
CLIPPED = 0.75


def largest_target(width: int) -> float:
    """Return the largest distance from zero, in steps, of a target that codes take: CLIPPED past their last point."""
    # Less what float32 may err by, so that no residual is longer than CLIPPED steps.
    return (2.0 ** (width - 1) - 0.5 + CLIPPED) * (1 - 2.0**-20)


def round_in_waves(
    weight: torch.Tensor,
    left: torch.Tensor,
    right: torch.Tensor,
    steps: tuple[torch.Tensor, torch.Tensor],
    width: int | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Round a weight whose rows and columns are in rounding order.

    Args:
        weight: [r, c].
        left, right: V_G [r, r] and V_H [c, c].
        steps: of the rows [r] and of the columns [c].
        width: of served codes; None for the multiples of the steps.

    Returns:
        The integers and target - q, both [r, c] in the dtype of the weight.
    """
    rows, cols = weight.shape
    size = min(TILE, max(rows, cols, 1))
    row_tiles, col_tiles = -(-rows // size), -(-cols // size)
    weight = _pad(weight, row_tiles * size, col_tiles * size)
    left, right = (
        _pad(triangle, tiles * size, tiles * size) for triangle, tiles in ((left, row_tiles), (right, col_tiles))
    )
    steps_all = _pad(torch.outer(*steps), row_tiles * size, col_tiles * size)
    steps_all[rows:], steps_all[:, cols:] = 1.0, 1.0
    error, carried = torch.zeros_like(weight), torch.zeros_like(weight)  # E, and F = E V_H
    integers, residual = torch.empty_like(weight), torch.empty_like(weight)
    for wave in range(row_tiles + col_tiles - 1):
        first, last = max(0, wave - col_tiles + 1), min(row_tiles, wave + 1)
        tiles = [(_span(i, size), _span(wave - i, size)) for i in range(first, last)]
        done = _round_tiles(
            Tile(
                weight=torch.stack([weight[tile] for tile in tiles], -1),
                steps=torch.stack([steps_all[tile] for tile in tiles], -1),
                beside=torch.stack([error[i, : j.start] @ right[: j.start, j] for i, j in tiles], -1),
                above=torch.stack([left[: i.start, i].T @ carried[: i.start, j] for i, j in tiles], -1),
                left=torch.stack([left[i, i] for i, _ in tiles], -1),
                right=torch.stack([right[j, j] for _, j in tiles], -1),
            ),
            width,
        )
        for result, whole in zip(done, (integers, error, carried, residual), strict=True):
            for tile, values in zip(tiles, result.unbind(-1), strict=True):
                whole[tile] = values
    return integers[:rows, :cols], residual[:rows, :cols]


@dataclass(frozen=True)
class Tile:
    """The tiles of a wave, stacked along the last dimension: all [size, size, tiles].

    Attributes:
        weight, steps: of the entries.
        beside: E V_H of the columns to the left of the tile.
        above: V_G^T F of the rows above the tile.
        left, right: the diagonal blocks of V_G and V_H that the tile lies at.
    """

    weight: torch.Tensor
    steps: torch.Tensor
    beside: torch.Tensor
    above: torch.Tensor
    left: torch.Tensor
    right: torch.Tensor


class _Antidiagonal(NamedTuple):
    """Views of one antidiagonal of all tiles: [entries, tiles], and [ahead, entries, tiles] of the entries after it.

    target collects W + E (V_H - I) + (V_G - I)^T F, of which from_left and from_above are the sums received so far.
    to_right and to_below are those sums of the antidiagonals ahead, and rightward what V_H weighs the error with.
    """

    weight: torch.Tensor
    steps: torch.Tensor
    from_left: torch.Tensor
    from_above: torch.Tensor
    integers: torch.Tensor
    error: torch.Tensor
    carried: torch.Tensor
    target: torch.Tensor
    to_right: torch.Tensor
    to_below: torch.Tensor
    rightward: torch.Tensor


def _round_tiles(tile: Tile, width: int | None) -> tuple[torch.Tensor, ...]:
    """Round the antidiagonals of independent tiles, all [size, size, tiles]; return z, E, F and target - q.

    Entry (i, j) lies at [i + j, i], so that an antidiagonal of all tiles is contiguous. Once it is rounded, it adds to
    the entries that lie k = 1, 2 ... antidiagonals after it:

        to (i, j + k), at [i + j + k, i]        E_ij V_H[j, j + k]
        to (i + k, j), at [i + j + k, i + k]    F_ij V_G[i, i + k]
    """
    size, _, tiles = tile.weight.shape
    diagonals = 2 * size - 1
    row = torch.arange(size, device=tile.weight.device)
    place = (row[:, None] + row, row[:, None])

    def laid_out(values: torch.Tensor, rows: int = diagonals, columns: int = size, empty: float = 0.0) -> torch.Tensor:
        skewed = values.new_full((rows, columns, tiles), empty)
        skewed[place] = values
        return skewed

    # With room for what is added past a tile's edges.
    from_left, from_above = laid_out(tile.beside, diagonals + size), laid_out(tile.above, diagonals + size, 2 * size)
    weight, steps = laid_out(tile.weight), laid_out(tile.steps, empty=1.0)
    z, error, carried, target = (torch.zeros_like(weight) for _ in range(4))
    downward = _shifts(tile.left)
    # Along an antidiagonal columns fall: reversed, between zeros for the columns that a tile does not have.
    rightward = torch.nn.functional.pad(_shifts(tile.right).flip(1), (0, 0, size, size))
    narrow, wide = size * tiles, 2 * size * tiles
    for start in range(0, diagonals, STRETCH):
        stop = min(start + STRETCH, diagonals)
        low, high = max(0, start - size + 1), min(size, stop)
        ahead = min(size - 1, diagonals - 1 - start)
        window = (stop - start, ahead, high - low, tiles)
        entries = (weight, steps, from_left, from_above, z, error, carried, target)
        to_right = from_left.as_strided(window, (narrow, narrow, tiles, 1), (start + 1) * narrow + low * tiles)
        to_below = from_above.as_strided(window, (wide, wide + tiles, tiles, 1), (start + 1) * wide + (low + 1) * tiles)
        v_h = rightward.as_strided(window, (tiles, 3 * narrow, tiles, 1), (2 * size - stop + low) * tiles)
        v_g = downward[:ahead, low:high]
        views = (*(part[start:stop, low:high].unbind() for part in entries), to_right.unbind(), to_below.unbind())
        for line in map(_Antidiagonal, *views, reversed(v_h.unbind())):
            torch.add(line.from_left, line.from_above, out=line.target).add_(line.weight)
            torch.div(line.target, line.steps, out=line.integers)
            quantized = _round(line.integers, width) * line.steps
            torch.sub(line.weight, quantized, out=line.error)
            torch.add(line.error, line.from_left, out=line.carried)
            line.to_right.addcmul_(line.error, line.rightward)
            line.to_below.addcmul_(line.carried, v_g)
    residual = target.sub_((z if width is None else z + 0.5) * steps)
    return tuple(part[place] for part in (z, error, carried, residual))


def _round(targets: torch.Tensor, width: int | None) -> torch.Tensor:
    """Replace targets, in steps, by the integers they go to; return the points of the grid, z or z + 1/2."""
    if width is None:
        return targets.round_()
    end = 1 << (width - 1)
    clipped = targets.clamp(-end, end - 1)
    torch.where(targets.abs() <= largest_target(width), clipped, targets, out=targets).floor_()
    return targets + 0.5


def _shifts(triangle: torch.Tensor) -> torch.Tensor:
    """Return triangle[i, i + k] at [k - 1, i] for upper triangles [size, size, tiles], zero past the edge."""
    size, _, tiles = triangle.shape
    padded = torch.nn.functional.pad(triangle, (0, 0, 0, size))
    return padded.as_strided((size - 1, size, tiles), (tiles, (2 * size + 1) * tiles, 1), tiles).contiguous()


def _pad(matrix: torch.Tensor, rows: int, cols: int) -> torch.Tensor:
    return torch.nn.functional.pad(matrix, (0, cols - matrix.shape[1], 0, rows - matrix.shape[0])).contiguous()


def _span(index: int, size: int) -> slice:
    return slice(index * size, (index + 1) * size)
