"""LATQ: nearest plane on the lattice of G (x) H, each tile by the trellis code, its rate from the loss of the model.

    W[i, j] ~ scale * 2^(row_exponents[i] / 8) * 2^(column_exponents[j] / 8) * code

Scales follow the size of what is rounded: one factor for each row and one for each column, fitted to the squares of the
weights, then to those of the targets that a first pass meets (what is fed back adds to the weights). In this pass noise
as large as the code's errors stands for them.
Rates follow the loss: a unit of weights whose squared errors the loss multiplies by A gets the rate that minimises

    A * DISTORTION[rate] + price * bits           with one price for the whole model (reverse water-filling)

Linears that read one input (q/k/v, gate/up) share the order and the factors of their columns: when they are served as
one matrix, its input is permuted and scaled once.

The guarantee is enforced, not Babai's: the term of every tile is at most LIMIT times its plan, or its worst weights are
kept exactly until it is. So the loss of a layer is at most LIMIT / 2 times the sum of its plans. The plan of a tile is
DISTORTION[rate] times its energy.
"""

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch

from vllm_latq.coding.trellis.code import RATES, TILE
from vllm_latq.coding.trellis.layout import UNIT_COLUMNS, UNIT_ROWS, tile_rates, tiles
from vllm_latq.errors import NumericalError, naming
from vllm_latq.format.encodings.octaves import OCTAVE, octave_eighths
from vllm_latq.format.encodings.registry import tensor_specs
from vllm_latq.format.encodings.trellis import TrellisWeight
from vllm_latq.format.scheme import LayerScheme
from vllm_latq.quantize.lattice.targets import Drift, corrected_target
from vllm_latq.quantize.lattice.trellis_plane import (
    DISTORTION,
    FURTHEST,
    FURTHEST_IF_SHORT,
    LIMIT,
    Plan,
    TrellisPass,
    noisy_targets,
    tile_terms,
    trellis_plane,
)
from vllm_latq.quantize.methods.lattices import SMALLEST, InputLattice, OutputLattice
from vllm_latq.quantize.recipe import Recipe

KEPT_BITS = 48
# Weights kept exactly per weight of a unit, by its rate, beside those that are outlying before anything is rounded:
# medians over the bundled model at 1.6 to 5 bits. What is fed back to coarse units takes more of them beyond FURTHEST.
USUALLY_KEPT = {2: 6e-4, 3: 3.5e-4, 4: 3e-4, 5: 1.5e-4, 6: 8e-5} | dict.fromkeys(RATES[5:], 3e-5)
# How many more weights are kept than the targets of a first pass let expect.
_KEPT_SLACK = 1.1
# Part of its bits that a linear may leave over where it keeps fewer weights than there is room for, and how often it is
# rounded again to leave less.
_MOST_LEFT, _TRIES = 0.01, 5
_BISECTIONS = 60
_OCTAVES = 200.0
_ROUNDS = 10


@dataclass(frozen=True)
class UnitLosses:
    """Costs of the units of a linear, before anything is rounded.

    Attributes:
        worth: by how much the loss multiplies the code's distortion, per weight, float64 [row units, column units].
        sizes: number of weights in each unit, with padding, float64 of the same shape.
        weights: number of weights.
        fixed_bits: all stored bits except the trellis and the kept weights.
        outlying: weights that are kept at any rate.
    """

    worth: torch.Tensor
    sizes: torch.Tensor
    weights: int
    fixed_bits: float
    outlying: int

    def rates(self, price: float) -> torch.Tensor:
        """Return the rate of every unit at a price per bit, uint8 [row units, column units]."""
        distortions = list(DISTORTION.values())
        # A step is two weights: what is saved per bit of the rate, for half as many steps as weights.
        gains = [2 * (less - more) for less, more in itertools.pairwise(distortions)]
        thresholds = torch.tensor(gains, dtype=torch.float64).reciprocal()
        return (torch.bucketize(self.worth / price, thresholds, right=True) + RATES[0]).to(torch.uint8)

    def bits(self, price: float, kept: float | None = None) -> float:
        """Return the stored bits at a price per bit with so many kept weights, or as many as there usually are."""
        usual = 0.0 if kept is not None else KEPT_BITS
        each = [rate / 2 + usual * USUALLY_KEPT[rate] for rate in RATES]
        taken = torch.tensor(each, dtype=torch.float64)[self.rates(price).to(torch.int64) - RATES[0]]
        return (
            self.fixed_bits + KEPT_BITS * (self.outlying if kept is None else kept) + float((taken * self.sizes).sum())
        )

    def price(self, bits: float, kept: float | None = None) -> float:
        """Return the lowest price per bit at which at most so many bits are stored; infinity if there is none.

        Arguments as for `bits`.
        """
        if self.bits(math.inf, kept) > bits:
            return math.inf
        low, high = -_OCTAVES, _OCTAVES
        for _ in range(_BISECTIONS):
            middle = (low + high) / 2
            low, high = (middle, high) if self.bits(2.0**middle, kept) > bits else (low, middle)
        return 2.0**high


@dataclass(frozen=True)
class Share:
    """Share of the model's bits that a linear gets.

    Attributes:
        losses: of its units.
        bits: stored bits that must not be exceeded.
    """

    losses: UnitLosses
    bits: float

    def rates(self, kept: float | None = None) -> torch.Tensor:
        """Return the highest rates that leave room for so many kept weights, or as many as there usually are.

        Without room for the lowest rates, the lowest. uint8 [row units, column units].
        """
        return self.losses.rates(self.losses.price(self.bits, kept))


@dataclass(frozen=True)
class LatqResult:
    """Quantized layer.

    Attributes:
        weight: as it is stored.
        dequantized: decoded weight, float32 [r, c].
        planned: sum of the plans of the tiles, D_G D_H weighted squared errors.
        loss: sum of the terms of the tiles, the damped tr(G E H E^T).
    """

    weight: TrellisWeight
    dequantized: torch.Tensor
    planned: float
    loss: float

    @property
    def loss_bound(self) -> float:
        """Limit of the loss that is enforced, nats per token."""
        return LIMIT * self.planned / 2


@dataclass(frozen=True)
class Scales:
    """Scales of the linears of one input, as they are stored.

    Attributes:
        scale: name -> float32 [1].
        rows: name -> int8 [r], eighths of an octave.
        columns: int8 [c], eighths of an octave, shared.
    """

    scale: Mapping[str, torch.Tensor]
    rows: Mapping[str, torch.Tensor]
    columns: torch.Tensor

    def of(self, name: str, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the scales of rows and columns of a linear, float32 [r] and [c]."""
        rows = self.scale[name] * octave_eighths(self.rows[name])
        return rows.to(device), octave_eighths(self.columns).to(device)


def fitted_scales(targets: Mapping[str, torch.Tensor]) -> Scales:
    """Fit the squares of targets, name -> [r, c], by factors of rows and shared factors of columns.

    A rank-one fit of the variances: in turn, each side is the mean of the squares divided by the other side.
    """
    squares = torch.cat([target.double().square() for target in targets.values()])
    rows = squares.mean(1).clamp_(min=SMALLEST)
    columns = torch.ones_like(squares[0])
    for _ in range(_ROUNDS):
        columns = (squares / rows[:, None]).mean(0).clamp_(min=SMALLEST)
        rows = (squares / columns).mean(1).clamp_(min=SMALLEST)
    column_octaves = 0.5 * columns.log2()
    middle = column_octaves.median()
    scale, exponents = {}, {}
    for name, part in zip(targets, rows.split([len(target) for target in targets.values()]), strict=True):
        octaves = 0.5 * part.log2() + middle
        level = octaves.median()
        scale[name] = level.exp2().to(torch.float32).reshape(1).cpu()
        exponents[name] = _eighths(octaves - level)
    return Scales(scale, exponents, _eighths(column_octaves - middle))


def _eighths(octaves: torch.Tensor) -> torch.Tensor:
    return (OCTAVE * octaves).round().clamp(-128, 127).to(torch.int8).cpu()


def unit_losses(
    weights: Mapping[str, torch.Tensor], inputs: InputLattice, outputs: Mapping[str, OutputLattice]
) -> dict[str, UnitLosses]:
    """Return what each unit of the linears of one input costs, before anything is rounded; name -> [r, c]."""
    scales = fitted_scales(weights)
    found = {}
    for name, weight in weights.items():
        rows, columns = scales.of(name, weight.device)
        diagonal = torch.cat([part.diagonal for part in outputs[name].blocks])
        row_losses = _sums(diagonal * _padded(rows, len(diagonal)).double().square(), UNIT_ROWS)
        diagonal = inputs.blocks.diagonal
        order = inputs.factor.order
        column_losses = _sums(diagonal * _padded(columns[order], len(diagonal)).double().square(), UNIT_COLUMNS)
        sizes = torch.outer(
            *(
                _sums(torch.ones(TILE * count, dtype=torch.float64), unit)
                for count, unit in zip(tiles(*weight.shape), (UNIT_ROWS, UNIT_COLUMNS), strict=True)
            )
        )
        outlying = int((weight.abs() > FURTHEST * rows[:, None] * columns).sum())
        fixed = _fixed_bits(weight.shape[0], weight.shape[1])
        worth = torch.outer(row_losses, column_losses).cpu() / sizes
        found[name] = UnitLosses(worth, sizes, weight.numel(), fixed, outlying)
    return found


def _sums(values: torch.Tensor, size: int) -> torch.Tensor:
    """Return the sums of `size` values each, of fewer at the end."""
    return torch.nn.functional.pad(values, (0, -len(values) % size)).view(-1, size).sum(1)


def _padded(values: torch.Tensor, size: int) -> torch.Tensor:
    return torch.nn.functional.pad(values, (0, size - len(values)))


def _fixed_bits(rows: int, cols: int) -> float:
    """Return the stored bits of a linear except trellis and kept weights."""
    return sum(spec.bits() for spec in tensor_specs(LayerScheme("trellis"), rows, cols).values())


def latq(
    targets: Mapping[str, torch.Tensor],
    inputs: InputLattice,
    outputs: Mapping[str, OutputLattice],
    shares: Mapping[str, Share],
) -> Iterator[tuple[str, LatqResult]]:
    """Round the linears of one input; yields name and result. A linear gets the bits that those before it leave.

    Args:
        targets: name -> [r, c].
        inputs, outputs: their lattices.
        shares: their shares of the model's bits.
    """
    scales = fitted_scales(targets)
    met = {}
    for name, target in targets.items():
        rounding = _Rounding(name, target, inputs, outputs[name], scales)
        met[name] = rounding.in_place([noisy_targets(*block) for block in rounding.plans(shares[name].rates())])
    scales, left = fitted_scales(met), 0.0
    for name, target in targets.items():
        with naming(name):
            rows, columns = scales.of(name, target.device)
            outlying = int((met[name].abs() > FURTHEST * rows[:, None] * columns).sum())
            share = Share(shares[name].losses, shares[name].bits + left)
            result = _Rounding(name, target, inputs, outputs[name], scales).within(share, outlying)
        left = share.bits - result.weight.storage_bits()
        yield name, result


@dataclass(frozen=True)
class _Attempt:
    """A linear, rounded at some rates; it may take too many bits.

    Attributes:
        passes: of the blocks of outputs.
        weight: as it is stored.
    """

    passes: list[TrellisPass]
    weight: TrellisWeight

    @property
    def kept(self) -> int:
        """How many weights are kept exactly."""
        return len(self.weight.kept_positions)

    def fits(self, share: Share) -> bool:
        """Return whether it takes no more than a share of the bits."""
        return self.weight.storage_bits() <= share.bits


@dataclass(frozen=True)
class _Rounding:
    """The rounding of one linear.

    Attributes:
        name: of the linear.
        target: [r, c].
        inputs, outputs: its lattice.
        scales: of the linears of its input.
    """

    name: str
    target: torch.Tensor
    inputs: InputLattice
    outputs: OutputLattice
    scales: Scales

    def plans(self, rates: torch.Tensor, furthest: float = FURTHEST) -> Iterator[tuple[torch.Tensor, Plan]]:
        """Yield the weight and the plan of each block of outputs, at rates of the units; `furthest` as of `Plan`."""
        columns, order = self.inputs.blocks, self.inputs.factor.order
        row_scales, column_scales = self.scales.of(self.name, self.target.device)
        column_scales = _padded(column_scales[order], len(columns.triangle))
        of_tiles, start = tile_rates(rates, *self.target.shape), 0
        for factor, rows in zip(self.outputs.factors, self.outputs.blocks, strict=True):
            stop, size = start + len(factor.order), len(rows.triangle)
            weight = self.target[start:stop, order].to(torch.float32)
            weight = torch.nn.functional.pad(weight, (0, len(column_scales) - weight.shape[1], 0, size - len(weight)))
            here = of_tiles[start // TILE :][: size // TILE]
            yield weight, Plan(rows, columns, here, _padded(row_scales[start:stop], size), column_scales, furthest)
            start = stop

    def in_place(self, blocks: Sequence[torch.Tensor]) -> torch.Tensor:
        """Return blocks of outputs as one matrix, columns in their own order, less padding."""
        cols = self.target.shape[1]
        sizes = [len(factor.order) for factor in self.outputs.factors]
        stored = torch.cat([block[:size, :cols] for block, size in zip(blocks, sizes, strict=True)])
        matrix = torch.empty_like(stored)
        matrix[:, self.inputs.factor.order] = stored
        return matrix

    def within(self, share: Share, outlying: int) -> LatqResult:
        """Round within a share of the bits, if the lowest rates fit; about `outlying` weights are kept exactly.

        Where more are, it keeps fewer of them, and then rounds again at lower rates until the share is met. Lower rates
        alone would not do: what they feed back puts more targets beyond FURTHEST, which cost more than the rates save.
        """
        done = self._at(share, outlying, FURTHEST)
        if not done.fits(share):
            done = self._short(share, outlying)
        loss = float(sum(one.losses.sum() for one in done.passes))
        if not math.isfinite(loss):
            hint = "Its weights or its statistics are damaged."
            raise NumericalError("trellis_plane", "a finite loss", f"{loss:g}", hint)
        planned = float(sum(one.planned.sum() for one in done.passes))
        quantized = self.in_place([one.quantized for one in done.passes])
        return LatqResult(done.weight, quantized, planned, loss)

    def _short(self, share: Share, room: float) -> "_Attempt":
        """Round where the weights beyond FURTHEST scales do not fit: keep those beyond FURTHEST_IF_SHORT.

        At first the rates leave room for about `room` kept weights.
        """
        done = self._at(share, room, FURTHEST_IF_SHORT)
        while not done.fits(share) and int(done.weight.rates.max()) > RATES[0]:
            room = max(done.kept, math.ceil(_KEPT_SLACK * room))
            done = self._at(share, room, FURTHEST_IF_SHORT)
        # Now so few may be kept that much of the share is left.
        low, high = float(done.kept), float(room)
        for _ in range(_TRIES):
            if share.bits - done.weight.storage_bits() <= _MOST_LEFT * share.bits:
                break
            middle = (low + high) / 2
            tried = self._at(share, middle, FURTHEST_IF_SHORT)
            done, low, high = (tried, low, middle) if tried.fits(share) else (done, middle, high)
        return done

    def _at(self, share: Share, room: float, furthest: float) -> "_Attempt":
        """Round at the highest rates that leave room for about so many kept weights."""
        rates = share.rates(_KEPT_SLACK * room)
        passes = [trellis_plane(*block) for block in self.plans(rates, furthest)]
        return _Attempt(passes, self._stored(passes, rates))

    def _stored(self, passes: Sequence[TrellisPass], rates: torch.Tensor) -> TrellisWeight:
        """Return the weight as it is stored."""
        kept = self.in_place([one.kept for one in passes]).cpu().flatten()
        positions = kept.nonzero()[:, 0]
        return TrellisWeight(
            self.scales.scale[self.name],
            self.scales.rows[self.name],
            self.scales.columns.clone(),  # a file cannot hold one tensor under the names of several linears
            self.inputs.importance.cpu().clone(),
            rates.cpu(),
            torch.cat([ring for one in passes for ring in one.rings]),
            positions.to(torch.int32),
            kept[positions].contiguous(),
        )


def stored_terms(
    weight: TrellisWeight, quantized: torch.Tensor, target: torch.Tensor, inputs: InputLattice, outputs: OutputLattice
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the terms and the plans of the tiles of a stored weight, float64 [row tiles, column tiles] each.

    Args:
        weight: as it is stored.
        quantized: [r, c], what it decodes to.
        target: [r, c].
        inputs, outputs: its lattice.
    """
    scales = Scales({"": weight.scale}, {"": weight.row_exponents}, weight.column_exponents)
    of_both = [
        _Rounding("", part, inputs, outputs, scales).plans(weight.rates) for part in (quantized, target - quantized)
    ]
    found = [tile_terms(part, error, plan) for (part, plan), (error, _) in zip(*of_both, strict=True)]
    terms, plans = zip(*found, strict=True)
    return torch.cat(terms), torch.cat(plans)


@dataclass(frozen=True)
class Target:
    """Target of the rounding of a linear.

    Attributes:
        weight: of the linear, float32 [r, c].
        corrected: the matrix that is rounded, float32 [r, c]; the weight itself unless targets are corrected.
        drift: that the matrix is corrected for, means over tokens.
    """

    weight: torch.Tensor
    corrected: torch.Tensor
    drift: Drift | None = None


def targeted(weight: torch.Tensor, inputs: InputLattice, drift: Drift | None, recipe: Recipe) -> Target:
    """Return the target of a linear, float32 [r, c], given the lattice and the drift of its input."""
    corrected = weight if drift is None else corrected_target(weight, inputs.factor, drift, recipe.correction)
    return Target(weight, corrected, drift)
