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

so steps s_ij = s / sqrt(DG_i DH_j) make every weight contribute alike. Entries of an antidiagonal do not depend on each
other; tiles are swept along antidiagonals, and inside them entries:

        J=0  J=1  J=2
      +----+----+----+     wave 0: tile (0,0)   wave 1: (1,0) (0,1)   wave 2: (2,0) (1,1) (0,2) ...
  I=0 | 0  | 1  | 2  |     a tile receives what lies left of it (E[I, :J] V_H) and above it (V_G^T F[:I, J])
  I=1 | 1  | 2  | 3  |     in matmuls, F = E V_H, then rounds its own antidiagonals for all tiles of the wave at once
      +----+----+----+
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from vllm_latq.errors import NumericalError
from vllm_latq.quantize.lattice import Factor

TILE = 64


@dataclass(frozen=True)
class TwoSided:
    """What a pass found.

    Attributes:
        z: int32 [r, c], integers in the original order; the weight is z * row_steps[:, None] * col_steps.
        loss: sum_ij DG_i DH_j (target - q)^2, the damped tr(G E H E^T).
        bound: its worst case, 1/4 sum_ij DG_i DH_j s_ij^2.
    """

    z: torch.Tensor
    loss: float
    bound: float


def two_sided_plane(
    weight: torch.Tensor,
    inputs: Factor,
    outputs: Sequence[Factor],
    row_steps: torch.Tensor,
    col_steps: torch.Tensor,
    where: str = "",
    feedback: bool = True,
) -> TwoSided:
    """Unclipped nearest plane on the lattice of G (x) H.

    Args:
        weight: [r, c]; the recursion runs in float32.
        inputs: factor of H, [c, c].
        outputs: factors of the diagonal blocks of G that cover the r rows; blocks do not see each other.
        row_steps, col_steps: positive, [r] and [c]; the step of weight (i, j) is their product.
        where: name of the layer, for errors.
        feedback: False rounds each row on its own, as GPTQ does; G then only weighs the rows by its diagonal, which
            `outputs` must be factors of for loss and bound to hold.

    Raises:
        NumericalError: integers that float32 does not hold exactly, or values that are not finite.
    """
    right = inputs.unit_triangle32
    z = torch.empty(weight.shape, dtype=torch.int32, device=weight.device)
    loss = bound = 0.0
    start = 0
    for factor in outputs:
        rows = start + factor.order
        left = factor.unit_triangle32 if feedback else torch.eye(len(rows), device=weight.device)
        steps = (row_steps[rows].to(torch.float32), col_steps[inputs.order].to(torch.float32))
        integers, residual = _waves(weight[rows][:, inputs.order].to(torch.float32), left, right, steps)
        loss += float(factor.diagonal @ (residual.to(torch.float64).square() @ inputs.diagonal))
        bound += _bound(factor, inputs, steps)
        _check(integers, loss, where)
        back = torch.empty_like(integers)
        back[:, inputs.order] = integers
        z[rows] = back.to(torch.int32)
        start += len(rows)
    return TwoSided(z, loss, bound)


def _bound(outputs: Factor, inputs: Factor, steps: tuple[torch.Tensor, torch.Tensor]) -> float:
    rows, cols = (step.to(torch.float64).square() for step in steps)
    return float((outputs.diagonal @ rows) * (inputs.diagonal @ cols)) / 4


def _check(integers: torch.Tensor, loss: float, where: str) -> None:
    largest = float(integers.abs().max()) if integers.numel() else 0.0
    if largest < 1 << 24 and loss < float("inf"):
        return
    raise NumericalError(
        where or "two_sided_plane",
        "finite weights and integers below 2^24",
        f"integers up to {largest:g} and a loss of {loss:g}",
        "The steps are far too small for this layer: raise the damping or the bits.",
    )


def _waves(
    weight: torch.Tensor, left: torch.Tensor, right: torch.Tensor, steps: tuple[torch.Tensor, torch.Tensor]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Round a permuted weight [r, c]; returns integers (float32) and target - q, both [r, c]."""
    rows, cols = weight.shape
    row_tiles, col_tiles = -(-rows // TILE), -(-cols // TILE)
    weight = _pad(weight, row_tiles, col_tiles)
    left, right = _pad(left, row_tiles, row_tiles), _pad(right, col_tiles, col_tiles)
    steps_all = _pad(torch.outer(*steps), row_tiles, col_tiles)
    steps_all[rows:], steps_all[:, cols:] = 1.0, 1.0
    error, moved = torch.zeros_like(weight), torch.zeros_like(weight)  # E, and F = E V_H
    integers, residual = torch.empty_like(weight), torch.empty_like(weight)
    for wave in range(row_tiles + col_tiles - 1):
        tiles = [
            (slice(i * TILE, (i + 1) * TILE), slice(j * TILE, (j + 1) * TILE))
            for i in range(max(0, wave - col_tiles + 1), min(row_tiles, wave + 1))
            for j in (wave - i,)
        ]
        beside = torch.stack([error[i, : j.start] @ right[: j.start, j] for i, j in tiles])
        above = torch.stack([left[: i.start, i].T @ moved[: i.start, j] for i, j in tiles])
        done = _round_tiles(
            torch.stack([weight[tile] for tile in tiles]),
            torch.stack([steps_all[tile] for tile in tiles]),
            beside,
            above,
            torch.stack([left[i, i] for i, _ in tiles]),
            torch.stack([right[j, j] for _, j in tiles]),
        )
        for result, whole in zip(done, (integers, error, moved, residual), strict=True):
            for tile, values in zip(tiles, result, strict=True):
                whole[tile] = values
    return integers[:rows, :cols], residual[:rows, :cols]


def _pad(matrix: torch.Tensor, row_tiles: int, col_tiles: int) -> torch.Tensor:
    rows, cols = row_tiles * TILE - matrix.shape[0], col_tiles * TILE - matrix.shape[1]
    return torch.nn.functional.pad(matrix, (0, cols, 0, rows)).contiguous()


def _round_tiles(
    weight: torch.Tensor,
    steps: torch.Tensor,
    beside: torch.Tensor,
    above: torch.Tensor,
    left: torch.Tensor,
    right: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Round the antidiagonals of independent tiles, all [tiles, TILE, TILE]; returns z, E, F and target - q.

    Row i of `flipped[m]` belongs to column TILE - 1 - m, so that the columns which an antidiagonal touches, in the
    order of its rows, are neighbours; an antidiagonal itself is a strided view.
    """
    size = TILE
    right_flipped = right.transpose(1, 2).tril(-1).flip(1).contiguous()
    left_rows = left.transpose(1, 2).tril(-1).contiguous()
    z, error, moved, residual = (torch.zeros_like(weight) for _ in range(4))
    moved_flipped = torch.zeros_like(weight)
    base = weight + beside + above
    for diagonal in range(2 * size - 1):
        low, high = max(0, diagonal - size + 1), min(size, diagonal + 1)
        first = size - 1 - diagonal  # row i of the antidiagonal is column `first + i` of what is flipped

        def entries(tensor: torch.Tensor, d: int = diagonal, low: int = low, high: int = high) -> torch.Tensor:
            shape, strides = (len(tensor), high - low), (size * size, size - 1)
            return tensor.as_strided(shape, strides, tensor.storage_offset() + d + low * (size - 1))

        inner = (error[:, low:high] * right_flipped[:, first + low : first + high]).sum(-1)
        upper = (moved_flipped[:, first + low : first + high] * left_rows[:, low:high]).sum(-1)
        target = entries(base) + inner + upper
        step = entries(steps)
        integer = torch.round(target / step)
        quantized = integer * step
        missed = entries(weight) - quantized
        carried = missed + inner + entries(beside)
        entries(z).copy_(integer)
        entries(error).copy_(missed)
        entries(moved).copy_(carried)
        entries(residual).copy_(target - quantized)
        moved_flipped.as_strided(
            (len(weight), high - low), (size * size, size + 1), first * size + low * (size + 1)
        ).copy_(carried)
    return z, error, moved, residual
