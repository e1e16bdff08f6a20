"""Nearest plane on both sides of a weight, tile by tile, each by the trellis code.

To second order, moving a layer's weight by E = W - Q costs (1/2) tr(G E H E^T) nats per token, where H = E[x x^T] is
the mean over tokens of its inputs and G = E[g g^T] that of the gradients of the model's log-likelihood with respect to
its outputs (the Kronecker-factored Fisher matrix; Martens and Grosse, 2015). Both are decomposed in blocks of a tile,

    H[order][:, order] = V D V^T,   V block unit upper triangular,   D block diagonal    (QTIP, section 2.2)

which is the LDL decomposition of `factor` with the triangles inside the blocks moved from V into D: the weights of a
tile are chosen together, so no error is fed back between them. Then

    target = W + E (V_H - I) + (V_G - I)^T E V_H      needs the errors of tiles to the left of a tile and above it only
    tr(G E H E^T) == sum over tiles of tr(D_G R D_H R^T),   R = target - Q      for any Q (GPTQ's identity, in blocks)

so each tile is rounded for its own term, by the Viterbi algorithm with the diagonals of D_G and D_H as weights. This is
YAQA's recursion (Tseng, Sun, De Sa, "Model-Preserving Adaptive Rounding", 2025, section 3.3); the rates of the tiles,
chosen by the same loss, are not part of it.

      J=0  J=1  J=2
    +----+----+----+     wave 0: tile (0,0)   wave 1: (1,0) (0,1)   wave 2: (2,0) (1,1) (0,2) ...
    | 0  | 1  | 2  |     the tiles of a wave do not depend on each other
    | 1  | 2  | 3  |
    +----+----+----+
"""

from dataclasses import dataclass
from functools import cached_property, partial

import torch

from vllm_latq.coding.trellis.code import FACTORS, RATES, TILE, decode_rings, pack_rings, step_places
from vllm_latq.quantize.lattice.factor import Factor
from vllm_latq.quantize.lattice.viterbi.search import nearest_rings


@dataclass(frozen=True)
class BlockFactor:
    """One side of a lattice, padded to whole tiles.

    Attributes:
        order: int64 [n], as of `Factor`; what is padded comes after it.
        triangle: float32 [n_padded, n_padded], V; the identity where padded.
        blocks: float64 [tiles, TILE, TILE], the blocks of D; zero where padded.
    """

    order: torch.Tensor
    triangle: torch.Tensor
    blocks: torch.Tensor

    @property
    def diagonal(self) -> torch.Tensor:
        """Diagonal of D, float64 [n_padded], in rounding order; zero where padded."""
        return self.blocks.diagonal(dim1=1, dim2=2).flatten()


def block_factor(factor: Factor, padded: int) -> BlockFactor:
    """Return the block form of a factor, padded to `padded` entries, a multiple of TILE."""
    size = len(factor.order)
    unit = torch.eye(padded, dtype=torch.float64, device=factor.order.device)
    unit[:size, :size] = factor.unit_triangle()
    diagonal = torch.nn.functional.pad(factor.diagonal, (0, padded - size))
    tiles = padded // TILE
    inside = unit.view(tiles, TILE, tiles, TILE).diagonal(dim1=0, dim2=2).permute(2, 0, 1)
    blocks = inside * diagonal.view(tiles, 1, TILE) @ inside.transpose(1, 2)
    for tile in range(tiles):
        span = slice(tile * TILE, (tile + 1) * TILE)
        unit[:, span] = torch.linalg.solve_triangular(
            inside[tile].clone(), unit[:, span], upper=True, left=False, unitriangular=True
        )
    return BlockFactor(factor.order, unit.to(torch.float32), blocks)


# Mean squared error of the code on a Gaussian of variance 1, by rate (docs/trellis-code.md).
DISTORTION = {
    2: 0.27125, 3: 0.13692, 4: 0.07055, 5: 0.0366, 6: 0.01796, 7: 0.00925, 8: 0.0048, 9: 0.00247, 10: 0.00132,
    11: 0.00072, 12: 0.00043,
}  # fmt: skip
# Largest term of a tile, in multiples of its plan; targets beyond so many scales are kept exactly, or beyond the larger
# number where those would take more bits than a linear has.
LIMIT = 1.5
FURTHEST, FURTHEST_IF_SHORT = 4.0, 6.0
_NOISE_SEED = 271828


@dataclass(frozen=True)
class Plan:
    """Lattice, scales and rates that a weight is rounded to; in rounding order, padded to whole tiles.

    Attributes:
        rows, columns: the lattice.
        rates: int64 [row tiles, column tiles], bits per step of each tile.
        row_scales, column_scales: float32 [r], [c].
        furthest: scales beyond which a target is kept exactly.
    """

    rows: BlockFactor
    columns: BlockFactor
    rates: torch.Tensor
    row_scales: torch.Tensor
    column_scales: torch.Tensor
    furthest: float = FURTHEST

    @cached_property
    def distortion(self) -> torch.Tensor:
        """Mean squared error of the code in each tile at scale 1, float64 [row tiles, column tiles]."""
        by_rate = torch.tensor([0.0] * RATES[0] + [DISTORTION[rate] for rate in RATES], dtype=torch.float64)
        return by_rate[self.rates]

    @cached_property
    def energies(self) -> torch.Tensor:
        """Energy of each tile that the scales expect, weighted by D_G and D_H, float64 [row tiles, column tiles]."""
        sides = ((self.rows, self.row_scales), (self.columns, self.column_scales))
        sums = [(side.diagonal * scales.double().square()).view(-1, TILE).sum(1) for side, scales in sides]
        return torch.outer(*sums).cpu()

    def scales(self, i: torch.Tensor, j: torch.Tensor) -> torch.Tensor:
        """Return the scales of the weights of some tiles, float32 [tiles, TILE, TILE]."""
        row_scales, column_scales = (side.view(-1, TILE) for side in (self.row_scales, self.column_scales))
        return row_scales[i][:, :, None] * column_scales[j][:, None, :]

    def weights(self, i: torch.Tensor, j: torch.Tensor) -> torch.Tensor:
        """Return what the loss multiplies squared residuals by in some tiles, float64 [tiles, TILE, TILE]."""
        rows, columns = (side.blocks.diagonal(dim1=1, dim2=2) for side in (self.rows, self.columns))
        return rows[i][:, :, None] * columns[j][:, None, :]

    def losses(self, targets: torch.Tensor, i: torch.Tensor, j: torch.Tensor) -> torch.Tensor:
        """Return the planned terms of some tiles, float64 [tiles]: what the code makes of their energy.

        Their energy is what the scales expect, or that of the targets where it is larger: errors that are fed back can
        make a tile larger than it was. A target beyond FURTHEST scales counts as one of FURTHEST scales.

        Args:
            targets: [tiles, TILE, TILE].
            i, j: rows and columns of the tiles.
        """
        furthest = FURTHEST * self.scales(i, j).double()
        met = (self.weights(i, j) * targets.double().clamp(-furthest, furthest).square()).sum((1, 2)).cpu()
        return self.distortion[i, j] * torch.maximum(self.energies[i, j], met)


@dataclass(frozen=True)
class TrellisPass:
    """Result of a pass, in rounding order, padded to whole tiles.

    Attributes:
        rings: words of each tile, int32 [tile_words(rate)], row by row.
        targets: float32 [r, c].
        quantized: float32 [r, c], what is decoded from the rings, with what is kept.
        kept: bfloat16 [r, c], what is added to the decoded rings to keep weights; zero elsewhere.
        losses: float64 [row tiles, column tiles], the term of each tile.
        planned: float64 [row tiles, column tiles], its plan.
    """

    rings: list[torch.Tensor]
    targets: torch.Tensor
    quantized: torch.Tensor
    kept: torch.Tensor
    losses: torch.Tensor
    planned: torch.Tensor


def trellis_plane(weight: torch.Tensor, plan: Plan) -> TrellisPass:
    """Round a weight whose rows and columns are in rounding order, float32 [r, c], padded to whole tiles."""
    rows, columns = plan.rows, plan.columns
    row_tiles, column_tiles = (size // TILE for size in weight.shape)
    error, carried = torch.zeros_like(weight), torch.zeros_like(weight)  # E, and F = E V_H
    targets, quantized = torch.zeros_like(weight), torch.zeros_like(weight)
    kept = torch.zeros(weight.shape, dtype=torch.bfloat16, device=weight.device)
    losses, planned = (torch.zeros(row_tiles, column_tiles, dtype=torch.float64) for _ in range(2))
    rings = [torch.empty(0)] * (row_tiles * column_tiles)
    for wave in range(row_tiles + column_tiles - 1):
        i = torch.arange(max(0, wave - column_tiles + 1), min(row_tiles, wave + 1))
        j = wave - i
        beside, above = feed_back(error, columns.triangle, carried, rows.triangle, i, j)
        before = tile_blocks(weight)[i, j]
        wanted = before + beside + above
        planned[i, j] = plan.losses(wanted, i, j)
        done = _round(wanted, i, j, plan, LIMIT * planned[i, j])
        tile_blocks(targets)[i, j], tile_blocks(quantized)[i, j], tile_blocks(kept)[i, j] = (
            wanted,
            done.values,
            done.kept,
        )
        tile_blocks(error)[i, j] = before - done.values
        tile_blocks(carried)[i, j] = before - done.values + beside
        losses[i, j] = done.losses
        for n, ring in zip((i * column_tiles + j).tolist(), done.rings, strict=True):
            rings[n] = ring
    return TrellisPass(rings, targets, quantized, kept, losses, planned)


def feed_back(
    error: torch.Tensor,
    right: torch.Tensor,
    carried: torch.Tensor,
    down: torch.Tensor,
    i: torch.Tensor,
    j: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return what the errors beside and above the tiles of a wave add to their targets, [tiles, TILE, TILE] each.

    Args:
        error, carried: E and F = E V_H, zero where tiles are not rounded yet.
        right, down: V_H and V_G.
        i, j: rows and columns of tiles.
    """
    if error.is_cuda:
        return _feed_back_at_once(error, right, carried, down, i, j)
    spans = [(_span(row), _span(column)) for row, column in zip(i.tolist(), j.tolist(), strict=True)]
    beside = torch.stack([error[row, : column.start] @ right[: column.start, column] for row, column in spans])
    above = torch.stack([down[: row.start, row].T @ carried[: row.start, column] for row, column in spans])
    return beside, above


def _feed_back_at_once(
    error: torch.Tensor,
    right: torch.Tensor,
    carried: torch.Tensor,
    down: torch.Tensor,
    i: torch.Tensor,
    j: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the same in two launches, for a GPU: each product is as long as the longest, over errors that are zero."""
    height, width = int(i.max()) * TILE, int(j.max()) * TILE
    beside = error[:, :width].unflatten(0, (-1, TILE))[i] @ _columns(right[:width])[j]
    return beside, _columns(down[:height])[i].transpose(1, 2) @ _columns(carried[:height])[j]


def noisy_targets(weight: torch.Tensor, plan: Plan) -> torch.Tensor:
    """Return targets [r, c] as a pass meets them, with noise in place of the code's errors.

    A target leaves a residual R of variance distortion * scale^2. The errors solve R = V_G^T E V_H, and the target is
    W - E + R.
    """
    residual = torch.randn(weight.shape, generator=torch.Generator().manual_seed(_NOISE_SEED)).to(weight.device)
    deviation = plan.distortion.sqrt().to(torch.float32).to(weight.device)
    residual *= deviation.repeat_interleave(TILE, 0).repeat_interleave(TILE, 1)
    residual *= plan.row_scales[:, None] * plan.column_scales
    solve = partial(torch.linalg.solve_triangular, unitriangular=True)
    error = solve(plan.rows.triangle.T, residual, upper=False)
    error = solve(plan.columns.triangle, error, upper=True, left=False)
    return weight - error + residual


@dataclass(frozen=True)
class _Rounded:
    """The tiles of a wave: words of each, values and kept [tiles, TILE, TILE], and terms float64 [tiles]."""

    rings: list[torch.Tensor]
    values: torch.Tensor
    kept: torch.Tensor
    losses: torch.Tensor


def _round(wanted: torch.Tensor, i: torch.Tensor, j: torch.Tensor, plan: Plan, limits: torch.Tensor) -> _Rounded:
    """Round independent tiles, in rows i and columns j of tiles, to targets [tiles, TILE, TILE]."""
    left, right = plan.rows.blocks[i], plan.columns.blocks[j]
    weights, scales = plan.weights(i, j), plan.scales(i, j)
    outlying = wanted.abs() > plan.furthest * scales
    rates = plan.rates[i, j]
    factors = torch.tensor([FACTORS[rate] for rate in rates.tolist()], dtype=torch.float32, device=wanted.device)
    units = scales * factors[:, None, None]
    # In units of a value; the largest price of a tile is 1, which keeps float32 safe.
    price = torch.where(outlying, 0.0, weights * units.double().square())
    price = (price / price.amax((1, 2), keepdim=True).clamp(min=1e-300)).to(torch.float32)
    in_units = torch.where(outlying | (units == 0), 0.0, wanted / units)
    row, column = step_places()
    rings: list[torch.Tensor] = [torch.empty(0)] * len(wanted)
    decoded = torch.zeros_like(wanted)
    for rate in rates.unique().tolist():
        chosen = (rates == rate).nonzero()[:, 0]
        targets, prices = (
            torch.stack((part[chosen][:, row, column], part[chosen][:, row, column + 1]), -1)
            for part in (in_units, price)
        )
        words = pack_rings(nearest_rings(targets, prices, rate), rate)
        decoded[chosen] = decode_rings(words, rate).to(decoded) * FACTORS[rate]
        for n, ring in zip(chosen.tolist(), words.cpu(), strict=True):
            rings[n] = ring
    # In the order of operations of the format, so that these are the stored weights bit for bit.
    decoded = decoded * plan.row_scales.view(-1, TILE)[i][:, :, None] * plan.column_scales.view(-1, TILE)[j][:, None, :]
    return _keep(wanted, decoded, outlying, (left, right), rings, limits)


def _keep(
    wanted: torch.Tensor,
    decoded: torch.Tensor,
    outlying: torch.Tensor,
    blocks: tuple[torch.Tensor, torch.Tensor],
    rings: list[torch.Tensor],
    limits: torch.Tensor,
) -> _Rounded:
    """Keep outlying weights exactly, and those that cost most in tiles whose terms exceed their limits."""
    kept = torch.where(outlying, wanted - decoded, 0.0).to(torch.bfloat16)
    values = decoded + kept
    losses = _terms(wanted - values, *blocks)
    while bool((over := losses > limits).any()):
        worst = (wanted - values).double().square()
        worst *= blocks[0].diagonal(dim1=1, dim2=2)[:, :, None] * blocks[1].diagonal(dim1=1, dim2=2)[:, None, :]
        index = worst.flatten(1).argmax(1)
        for n in over.nonzero()[:, 0].tolist():
            i, j = divmod(int(index[n]), TILE)
            kept[n, i, j] = wanted[n, i, j] - decoded[n, i, j]
        values = decoded + kept
        losses = _terms(wanted - values, *blocks)
    return _Rounded(rings, values, kept, losses)


def _terms(residual: torch.Tensor, left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """Return tr(D_G R D_H R^T) of each tile, float64 [tiles]."""
    residual = residual.double()
    return ((left @ residual @ right) * residual).sum((1, 2)).cpu()


def _span(tile: int) -> slice:
    return slice(tile * TILE, (tile + 1) * TILE)


def tile_terms(quantized: torch.Tensor, error: torch.Tensor, plan: Plan) -> tuple[torch.Tensor, torch.Tensor]:
    """Return term and plan of each tile of a weight, however it was rounded, float64 [row tiles, column tiles] each.

    Args:
        quantized, error: Q and E = W - Q, [r, c], in rounding order, padded to whole tiles.
        plan: its lattice, scales and rates.
    """
    rows, columns = plan.rows, plan.columns
    residual = rows.triangle.double().T @ error.double() @ columns.triangle.double()
    i, j = (index.flatten() for index in torch.meshgrid(*map(torch.arange, plan.rates.shape), indexing="ij"))
    tiles, targets = (tile_blocks(matrix)[i, j] for matrix in (residual, quantized.double() + residual))
    terms, planned = _terms(tiles, rows.blocks[i], columns.blocks[j]), plan.losses(targets, i, j)
    return terms.view(plan.rates.shape), planned.view(plan.rates.shape)


def _columns(matrix: torch.Tensor) -> torch.Tensor:
    """View the columns of tiles of a matrix, [column tiles, rows, TILE]."""
    return matrix.unflatten(1, (-1, TILE)).transpose(0, 1)


def tile_blocks(matrix: torch.Tensor) -> torch.Tensor:
    """View the tiles of a matrix, [row tiles, column tiles, TILE, TILE]."""
    return matrix.unflatten(1, (-1, TILE)).unflatten(0, (-1, TILE)).transpose(1, 2)
