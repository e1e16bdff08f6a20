"""Nearest plane on both sides of a weight: the lattice of a layer as the loss of the whole model sees it.

To second order, moving a layer's weight by E = W - Q costs (1/2) tr(G E H E^T) nats per token, where H = E[x x^T] is
the mean over tokens of its inputs and G = E[g g^T] that of the gradients of the model's log-likelihood with respect to
its outputs (the Kronecker-factored Fisher matrix; Martens and Grosse, 2015; for quantization, Tseng, Sun, De Sa,
"Model-Preserving Adaptive Rounding", 2025). GPTQ is nearest plane on the lattice of I (x) H. This is nearest plane on
the lattice of G (x) H, whose triangular factor is the Kronecker product of both. With V unit upper triangular from H =
V D V^T in rounding order, of both matrices,

    target = W + E (V_H - I) + (V_G - I)^T E V_H      needs the errors to the left of an entry and above it only
    q_ij   = s_ij round(target_ij / s_ij)
    tr(G E H E^T) == sum_ij DG_i DH_j (target_ij - q_ij)^2 <= 1/4 sum_ij DG_i DH_j s_ij^2    (GPTQ's identity)

so steps s_ij = s / sqrt(DG_i DH_j) make every weight contribute alike.

Where integers become codes of some width while they are served, those that do not fit are dear. The grid is then
mid-rise, (z + 1/2) s_ij, and a target that lies at most CLIPPED steps beyond its last point goes there, instead of
becoming an outlier: its error, like any other, is fed back. It is at most 3/2 of half a step, which makes the bound 9/4
of what it would be.

Entries of an antidiagonal do not depend on each other; tiles are swept along antidiagonals, and inside them entries:

        J=0  J=1  J=2
      +----+----+----+     wave 0: tile (0,0)   wave 1: (1,0) (0,1)   wave 2: (2,0) (1,1) (0,2) ...
  I=0 | 0  | 1  | 2  |     a tile receives what lies left of it (E[I, :J] V_H) and above it (V_G^T F[:I, J])
  I=1 | 1  | 2  | 3  |     in matmuls, F = E V_H, then rounds its own antidiagonals for all tiles of the wave at once
      +----+----+----+
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, partial

import torch

from vllm_latq.errors import NumericalError
from vllm_latq.quantize.lattice.factor import Factor

TILE = 64
# Antidiagonals whose views are made at once: a view takes as long as an operation on it.
STRETCH = 16
# How far beyond the last point of the codes' grid a target may lie, in steps, to be clipped to it (NOTES.md).
CLIPPED = 0.75
# Sums of larger multiples of a step would err by a visible part of it in float32.
FLOAT32_INTEGERS = 1 << 16


@dataclass(frozen=True)
class TwoSided:
    """What a pass found.

    Attributes:
        z: int32 [r, c], integers in the original order; the weight is z * row_steps[:, None] * col_steps, with z + 1/2
            for z on the grid of served codes.
        loss: sum_ij DG_i DH_j (target - q)^2, the damped tr(G E H E^T).
        bound: its worst case, sum_ij DG_i DH_j (furthest s_ij)^2.
    """

    z: torch.Tensor
    loss: float
    bound: float


def reach(width: int) -> float:
    """How many steps from zero a target can lie that codes take: CLIPPED beyond the last point of their grid."""
    # Less what float32 may err by, so that no residual is longer than CLIPPED steps.
    return (2.0 ** (width - 1) - 0.5 + CLIPPED) * (1 - 2.0**-20)


def furthest(served: bool) -> float:
    """How many steps a target can lie from where it goes: half of one, but CLIPPED beyond the grid of codes."""
    return CLIPPED if served else 0.5


def two_sided_plane(
    weight: torch.Tensor,
    inputs: Factor,
    outputs: Sequence[Factor],
    row_steps: torch.Tensor,
    col_steps: torch.Tensor,
    feedback: bool = True,
    width: int | None = None,
) -> TwoSided:
    """Nearest plane on the lattice of G (x) H.

    Args:
        weight: [r, c]; the recursion runs in float32, or in float64 where integers need it.
        inputs: factor of H, [c, c].
        outputs: factors of the diagonal blocks of G that cover the r rows; blocks do not see each other.
        row_steps, col_steps: positive, [r] and [c]; the step of weight (i, j) is their product.
        feedback: False rounds each row on its own, as GPTQ does; G then only weighs the rows by its diagonal, which
            `outputs` must be factors of for loss and bound to hold.
        width: of codes in bits, whose grid then is mid-rise, and takes what lies at most CLIPPED steps beyond it;
            None for the multiples of the steps, without end.

    Raises:
        NumericalError: integers that float32 does not hold exactly, or values that are not finite.
    """
    right = cache(partial(_triangle, inputs))
    z = torch.empty(weight.shape, dtype=torch.int32, device=weight.device)
    loss = bound = 0.0
    start = 0
    for factor in outputs:
        rows = start + factor.order
        for dtype in (torch.float32, torch.float64):
            left = _triangle(factor, dtype) if feedback else torch.eye(len(rows), dtype=dtype, device=weight.device)
            steps = (row_steps[rows].to(dtype), col_steps[inputs.order].to(dtype))
            permuted = weight[rows][:, inputs.order].to(dtype)
            integers, residual = _waves(permuted, left, right(dtype), steps, width)
            largest = float(integers.abs().max()) if integers.numel() else 0.0
            if largest < FLOAT32_INTEGERS:
                break
        loss += float(factor.diagonal @ (residual.to(torch.float64).square() @ inputs.diagonal))
        bound += _squares(factor, inputs, steps) * furthest(width is not None) ** 2
        _check(largest, loss)
        back = torch.empty_like(integers)
        back[:, inputs.order] = integers
        z[rows] = back.to(torch.int32)
        start += len(rows)
    return TwoSided(z, loss, bound)


def _triangle(factor: Factor, dtype: torch.dtype) -> torch.Tensor:
    return factor.unit_triangle32 if dtype == torch.float32 else factor.unit_triangle()


def _squares(outputs: Factor, inputs: Factor, steps: tuple[torch.Tensor, torch.Tensor]) -> float:
    """sum_ij DG_i DH_j s_ij^2."""
    rows, cols = (step.to(torch.float64).square() for step in steps)
    return float((outputs.diagonal @ rows) * (inputs.diagonal @ cols))


def _check(largest: float, loss: float) -> None:
    if largest < 1 << 24 and loss < float("inf"):
        return
    raise NumericalError(
        "two_sided_plane",
        "finite weights and integers below 2^24",
        f"integers up to {largest:g} and a loss of {loss:g}",
        "The steps are far too small for this layer: raise the damping, or lower the target bits.",
    )


def _waves(
    weight: torch.Tensor,
    left: torch.Tensor,
    right: torch.Tensor,
    steps: tuple[torch.Tensor, torch.Tensor],
    width: int | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Round a permuted weight [r, c]; returns integers and target - q, both [r, c] in its dtype."""
    rows, cols = weight.shape
    size = min(TILE, max(rows, cols, 1))
    row_tiles, col_tiles = -(-rows // size), -(-cols // size)
    weight = _pad(weight, row_tiles * size, col_tiles * size)
    left, right = (
        _pad(triangle, tiles * size, tiles * size) for triangle, tiles in ((left, row_tiles), (right, col_tiles))
    )
    steps_all = _pad(torch.outer(*steps), row_tiles * size, col_tiles * size)
    steps_all[rows:], steps_all[:, cols:] = 1.0, 1.0
    error, moved = torch.zeros_like(weight), torch.zeros_like(weight)  # E, and F = E V_H
    integers, residual = torch.empty_like(weight), torch.empty_like(weight)
    for wave in range(row_tiles + col_tiles - 1):
        tiles = [
            (slice(i * size, (i + 1) * size), slice(j * size, (j + 1) * size))
            for i in range(max(0, wave - col_tiles + 1), min(row_tiles, wave + 1))
            for j in (wave - i,)
        ]
        beside = [error[i, : j.start] @ right[: j.start, j] for i, j in tiles]
        above = [left[: i.start, i].T @ moved[: i.start, j] for i, j in tiles]
        triangles = [left[i, i] for i, _ in tiles], [right[j, j] for _, j in tiles]
        parts = [weight[tile] for tile in tiles], [steps_all[tile] for tile in tiles], beside, above, *triangles
        done = _round_tiles(width, *(torch.stack(part, -1) for part in parts))
        for result, whole in zip(done, (integers, error, moved, residual), strict=True):
            for tile, values in zip(tiles, result.unbind(-1), strict=True):
                whole[tile] = values
    return integers[:rows, :cols], residual[:rows, :cols]


def _pad(matrix: torch.Tensor, rows: int, cols: int) -> torch.Tensor:
    return torch.nn.functional.pad(matrix, (0, cols - matrix.shape[1], 0, rows - matrix.shape[0])).contiguous()


def _round_tiles(
    width: int | None,
    weight: torch.Tensor,
    steps: torch.Tensor,
    beside: torch.Tensor,
    above: torch.Tensor,
    left: torch.Tensor,
    right: torch.Tensor,
) -> tuple[torch.Tensor, ...]:
    """Round the antidiagonals of independent tiles, all [size, size, tiles]; returns z, E, F and target - q.

    Entry (i, j) lies at [i + j, i], so that an antidiagonal of all tiles is contiguous. Once it is rounded, it adds to
    the entries k = 1, 2 ... antidiagonals behind it what they need of it:

        to (i, j + k), at [i + j + k, i]        E_ij V_H[j, j + k]
        to (i + k, j), at [i + j + k, i + k]    F_ij V_G[i, i + k]
    """
    size, _, tiles = weight.shape
    diagonals = 2 * size - 1
    row = torch.arange(size, device=weight.device)
    place = (row[:, None] + row, row[:, None])

    def laid_out(tile: torch.Tensor, rows: int = diagonals, width: int = size, empty: float = 0.0) -> torch.Tensor:
        skewed = tile.new_full((rows, width, tiles), empty)
        skewed[place] = tile
        return skewed

    # The target less W: E (V_H - I) and (V_G - I)^T F, with room for what is added beyond a tile's edges.
    from_left, from_above = laid_out(beside, diagonals + size), laid_out(above, diagonals + size, 2 * size)
    weight, steps = laid_out(weight), laid_out(steps, empty=1.0)
    z, error, moved, target = (torch.zeros_like(weight) for _ in range(4))
    downward = _shifts(left)
    # Along an antidiagonal columns fall: reversed, between zeros for the columns that a tile does not have.
    rightward = torch.nn.functional.pad(_shifts(right).flip(1), (0, 0, size, size))
    narrow, wide = size * tiles, 2 * size * tiles
    for start in range(0, diagonals, STRETCH):
        stop = min(start + STRETCH, diagonals)
        low, high = max(0, start - size + 1), min(size, stop)
        ahead = min(size - 1, diagonals - 1 - start)
        window = (stop - start, ahead, high - low, tiles)
        parts = [part[start:stop, low:high] for part in (weight, steps, from_left, from_above, z, error, moved, target)]
        right_of = from_left.as_strided(window, (narrow, narrow, tiles, 1), (start + 1) * narrow + low * tiles)
        below = from_above.as_strided(window, (wide, wide + tiles, tiles, 1), (start + 1) * wide + (low + 1) * tiles)
        v_h = rightward.as_strided(window, (tiles, 3 * narrow, tiles, 1), (2 * size - stop + low) * tiles)
        v_g = downward[:ahead, low:high]
        views = zip(*(part.unbind() for part in (*parts, right_of, below)), reversed(v_h.unbind()), strict=True)
        for value, step, left_sum, top_sum, integer, missed, carried, wanted, to_right, to_below, by in views:
            torch.add(left_sum, top_sum, out=wanted).add_(value)
            torch.div(wanted, step, out=integer)
            quantized = _round(integer, width) * step
            torch.sub(value, quantized, out=missed)
            torch.add(missed, left_sum, out=carried)
            to_right.addcmul_(missed, by)
            to_below.addcmul_(carried, v_g)
    residual = target.sub_((z if width is None else z + 0.5) * steps)
    return tuple(part[place] for part in (z, error, moved, residual))


def _round(steps: torch.Tensor, width: int | None) -> torch.Tensor:
    """Targets in steps, replaced by the integers that they go to; returns those, or of a mid-rise grid its points."""
    if width is None:
        return steps.round_()
    half = 1 << (width - 1)
    clipped = steps.clamp(-half, half - 1)
    torch.where(steps.abs() <= reach(width), clipped, steps, out=steps).floor_()
    return steps + 0.5


def _shifts(triangle: torch.Tensor) -> torch.Tensor:
    """Of upper triangles [size, size, tiles]: triangle[i, i + k] at [k - 1, i], zero beyond the edge."""
    size, _, tiles = triangle.shape
    padded = torch.nn.functional.pad(triangle, (0, 0, 0, size))
    return padded.as_strided((size - 1, size, tiles), (tiles, (2 * size + 1) * tiles, 1), tiles).contiguous()
