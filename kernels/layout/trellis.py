"""The weight of a trellis code in the form that the kernels read, made once at load.

    row tile   64 rows; several linears of one input are one weight, each padded to whole row tiles
    unit       the 8 column tiles (128 columns as stored) of a row tile, which have one rate
    run        the units of a row tile that have one rate; units are sorted by rate, so that a loop reads each run
    word       i of a tile's ring is at [group, tile row, i, tile] of its unit: a lane reads 4 tiles at once

The last unit of a row tile has one group of 4 tiles where its columns need no more (narrow), else two; it is the last
of its run. The kernels read both groups of a narrow unit, with activations of zero for what is not there.

A window of 16 bits is hashed to the values of two weights: `vllm_latq/coding/trellis/code.py` has the code, and a test
holds the constants here equal to it.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property, reduce
from itertools import accumulate, chain
from operator import or_
from typing import Any

import torch

from vllm_latq.kernels.errors import require
from vllm_latq.kernels.layout.weight import device_facts

RATES = tuple(range(2, 13))
MULTIPLIERS = (0xCAB42AC9, 0x864FB373)
TWO_TERMS_FROM = 6
FACTORS = {
    2: 0.009191000834107399,
    3: 0.009382479824125767,
    4: 0.00995691679418087,
    5: 0.010722833685576916,
    6: 0.007032681722193956,
    7: 0.007303169462829828,
    8: 0.0075736572034657,
    9: 0.007708901073783636,
    10: 0.00784414540976286,
    11: 0.008114633150398731,
    12: 0.008114633150398731,
}
MANTISSAS = tuple(round((2.0 ** (eighth / 8) - 1) * 2**23) for eighth in range(8))  # float32 bits of 2^(eighth / 8)
TILE = 16
TILE_ROWS = 64  # of a row tile, and of a unit
UNIT_COLUMNS = 128
GROUP = 4  # neighbouring tiles that a lane reads at once
RUN_FIELDS = 2 * len(RATES) + 2  # of a row of `runs`
# Words after the last unit, because a narrow unit is read as a whole one.
ROOM = UNIT_COLUMNS // TILE // 2 * (TILE_ROWS // TILE) * GROUP * RATES[-1]


@dataclass(frozen=True)
class TrellisTensors:
    """The tensors of one linear as stored, on one device. FORMAT.md section 3.4.

    Attributes:
        scale: float32 [1].
        row_exponents: int8 [rows], eighths of an octave.
        rates: uint8 [row units, column units], bits per step of two weights.
        trellis: int32 [words], the rings of 16 x 16 tiles, row by row of tiles.
        kept_positions: int32 [kept], row * cols + column, rising.
        kept_values: bfloat16 [kept], what is added to these weights.
    """

    scale: torch.Tensor
    row_exponents: torch.Tensor
    rates: torch.Tensor
    trellis: torch.Tensor
    kept_positions: torch.Tensor
    kept_values: torch.Tensor


@dataclass(frozen=True)
class TrellisOperands:
    """One or several linears of one input, stacked by rows, as the kernels read them.

    Attributes:
        rows, cols: of the stacked weight.
        words: int32 [words + padding], the units of each row tile by rising rate.
        units: int16 [row tiles, units], which columns each unit has: 128 times the number, as stored.
        runs: int16 [row tiles, RUN_FIELDS]: the first unit of each run, and the end of the last; then where the words
            of each run begin in the row tile, in pieces of 64 words, and the end of the last.
        tiles: int32 [row tiles + 1, 4]: where the words of the row tile begin, in pieces of 64; its first kept weight;
            its first row, and the end of its rows, in y.
        tile_scales: float32 [row tiles].
        row_exponents: int8 [row tiles * 64], eighths of an octave.
        column_exponents: int8 [cols], in the order of `columns`.
        columns: int16 [cols], the column of x that each stored column multiplies; read as unsigned.
        kept_places: int32 [kept], row in the row tile * 2^26 + column of x.
        kept_values: bfloat16 [kept].
        tickets: int32 [row tiles, rounded up to 4], zeros; the kernel leaves them zero.
        rate_mask: bit i is set for rate i; loops are compiled for these rates. It may have more than the weight, so
            that weights share a kernel.
        linear_rows: the rows of each linear.
        processors, arch, invariant: as in `KernelWeight`.

    The weights of several experts are one object, from `pool_trellis`: its tensors have a leading dimension then, which
    for words, kept_places and kept_values is 1, because all experts' lie in one array.
    """

    rows: int
    cols: int
    words: torch.Tensor
    units: torch.Tensor
    runs: torch.Tensor
    tiles: torch.Tensor
    tile_scales: torch.Tensor
    row_exponents: torch.Tensor
    column_exponents: torch.Tensor
    columns: torch.Tensor
    kept_places: torch.Tensor
    kept_values: torch.Tensor
    tickets: torch.Tensor
    rate_mask: int
    linear_rows: tuple[int, ...]
    processors: int
    arch: str
    invariant: bool = False

    @property
    def row_tiles(self) -> int:
        """Row tiles of 64 rows, those of each linear padded."""
        return self.runs.shape[-2]

    @property
    def column_units(self) -> int:
        """Units of 128 columns, the last one padded."""
        return self.units.shape[-1]

    @cached_property
    def first_rows(self) -> tuple[int, ...]:
        """The first row in y of each row tile, and the rows of y."""
        ends = accumulate(self.linear_rows)
        tiles = (range(end - rows, end, TILE_ROWS) for rows, end in zip(self.linear_rows, ends, strict=True))
        return (*chain.from_iterable(tiles), self.rows)

    def storage_bytes(self) -> int:
        """Return the bytes that one product reads."""
        parts = [part for name, part in vars(self).items() if isinstance(part, torch.Tensor) and name != "tickets"]
        return sum(part.numel() * part.element_size() for part in parts)


def prepare_trellis(
    linears: Sequence[TrellisTensors], column_exponents: torch.Tensor, columns: torch.Tensor
) -> TrellisOperands:
    """Bring the tensors of linears with one input into the form that the kernels read, on their device.

    Args:
        linears: they share the order of the columns and the exponents of the columns.
        column_exponents: int8 [cols], eighths of an octave, in the order of x.
        columns: int64 [cols], the columns in the order in which they are stored.

    Raises:
        KernelInputError: rates or words that do not fit the shape.
    """
    cols, device = columns.numel(), linears[0].trellis.device
    pieces, units, runs = [], [], []
    for linear in linears:
        words, unit, run = _sorted_units(linear, cols)
        pieces.append(words)
        units.append(unit)
        runs.append(run)
    tile_rows = [-(-linear.row_exponents.numel() // TILE_ROWS) for linear in linears]
    sizes = torch.cat([_tile_sizes(linear, cols) for linear in linears])
    kept_places, kept_starts, kept_values = _kept_weights(linears, cols)
    tiles = torch.zeros(sum(tile_rows) + 1, 4, dtype=torch.int64, device=device)
    tiles[1:, 0] = sizes.cumsum(0) // 64
    tiles[:, 1] = kept_starts
    first = row = 0
    for linear, count in zip(linears, tile_rows, strict=True):
        rows = linear.row_exponents.numel()
        starts = row + TILE_ROWS * torch.arange(count, device=device)
        tiles[first : first + count, 2] = starts
        tiles[first : first + count, 3] = (starts + TILE_ROWS).clamp(max=row + rows)
        first, row = first + count, row + rows
    require(int(tiles[-1, 0]) < 2**31, "trellis", "fewer than 2^37 words", f"{64 * int(tiles[-1, 0])}")
    exponents = torch.zeros(first * TILE_ROWS, dtype=torch.int8, device=device)
    for linear, start in zip(linears, accumulate(tile_rows, initial=0), strict=False):
        exponents[start * TILE_ROWS :][: linear.row_exponents.numel()] = linear.row_exponents
    room = torch.zeros(ROOM, dtype=torch.int32, device=device)
    processors, arch = device_facts(device)
    return TrellisOperands(
        rows=row,
        cols=cols,
        words=torch.cat([*pieces, room]),
        units=torch.cat(units).to(torch.int16),
        runs=torch.cat(runs).to(torch.int16),
        tiles=tiles.to(torch.int32),
        tile_scales=torch.cat([linear.scale.expand(count) for linear, count in zip(linears, tile_rows, strict=True)]),
        row_exponents=exponents,
        column_exponents=column_exponents[columns],
        columns=columns.to(torch.int32).to(torch.int16),  # the low 16 bits
        kept_places=kept_places,
        kept_values=kept_values,
        tickets=torch.zeros(-(-first // 4) * 4, dtype=torch.int32, device=device),
        rate_mask=sum(
            1 << rate for rate in torch.cat([linear.rates.flatten() for linear in linears]).unique().tolist()
        ),
        linear_rows=tuple(linear.row_exponents.numel() for linear in linears),
        processors=processors,
        arch=arch,
    )


def pool_trellis(weights: Sequence[TrellisOperands]) -> TrellisOperands:
    """Return the weights of several experts, of one shape, as one weight."""
    pooled = ("words", "kept_places", "kept_values")
    names = [name for name, part in vars(weights[0]).items() if isinstance(part, torch.Tensor) and name not in pooled]
    parts: dict[str, Any] = {name: torch.stack([getattr(weight, name) for weight in weights]) for name in names}
    used = parts["tiles"][:, -1, :2].to(torch.int64)  # pieces of 64 words, and kept weights, of each
    starts = used.cumsum(0) - used
    require(int(used.sum(0).max()) < 2**31, "trellis", "fewer than 2^37 words", f"{64 * int(used[:, 0].sum())}")
    parts["tiles"][:, :, :2] += starts[:, None].to(torch.int32)
    counts = used.tolist()
    words = [weight.words[: 64 * pieces] for weight, (pieces, _) in zip(weights, counts, strict=True)]
    kept = [(w.kept_places[:count], w.kept_values[:count]) for w, (_, count) in zip(weights, counts, strict=True)]
    places, values = (torch.cat(part)[None] for part in zip(*kept, strict=True))
    return replace(
        weights[0],
        words=torch.cat([*words, weights[0].words.new_zeros(ROOM)])[None],
        kept_places=places,
        kept_values=values,
        rate_mask=reduce(or_, (weight.rate_mask for weight in weights)),
        **parts,
    )


def _is_narrow(cols: int) -> bool:
    """Return whether the last unit has one group of tiles."""
    return 0 < cols % UNIT_COLUMNS <= UNIT_COLUMNS // 2


def _unit_words(rates: torch.Tensor, cols: int) -> torch.Tensor:
    """Return the words of each unit of the layout, int64 [row tiles, units]."""
    words = rates.to(torch.int64) * (TILE_ROWS * UNIT_COLUMNS // 64)
    if _is_narrow(cols):
        words[:, -1] //= 2
    return words


def _tile_sizes(linear: TrellisTensors, cols: int) -> torch.Tensor:
    """Return the words of each row tile, int64 [row tiles]."""
    return _unit_words(linear.rates, cols).sum(1)


def _sorted_units(linear: TrellisTensors, cols: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the words of one linear in the order of the kernels, the number of each unit, and the runs."""
    rows, device = linear.row_exponents.numel(), linear.trellis.device
    row_tiles, column_tiles = -(-rows // TILE), -(-cols // TILE)
    rates = linear.rates.to(torch.int64)
    shape = (-(-rows // TILE_ROWS), -(-cols // UNIT_COLUMNS))
    require(tuple(rates.shape) == shape, "rates", f"{shape}", tuple(rates.shape))
    least, most = RATES[0], RATES[-1]
    require(bool(((rates >= least) & (rates <= most)).all()), "rates", f"{least} to {most}", "others")
    spread = rates.repeat_interleave(TILE_ROWS // TILE, 0).repeat_interleave(UNIT_COLUMNS // TILE, 1)
    ends = (4 * spread[:row_tiles, :column_tiles]).flatten().cumsum(0)
    require(int(ends[-1]) == linear.trellis.numel(), "trellis", f"{int(ends[-1])} words", linear.trellis.numel())
    # Word where each tile's ring begins; -1 for padding.
    starts = torch.full_like(spread, -1)
    starts[:row_tiles, :column_tiles] = ends.view(row_tiles, column_tiles) - 4 * spread[:row_tiles, :column_tiles]
    starts = starts.view(shape[0], TILE_ROWS // TILE, shape[1], 2, GROUP).permute(
        0, 2, 3, 1, 4
    )  # unit; group, row, tile
    order = torch.argsort(rates, dim=1, stable=True)
    sizes = _unit_words(rates, cols)
    sorted_ends = sizes.gather(1, order).flatten().cumsum(0).view(shape)
    unit_ends = torch.empty_like(sorted_ends).scatter_(1, order, sorted_ends)
    words = torch.empty(int(sorted_ends[-1, -1]), dtype=torch.int32, device=device)
    for rate in RATES:
        row, unit = (rates == rate).nonzero(as_tuple=True)
        if len(row):
            at = starts[row, unit][:, :, :, None, :]
            index = at + torch.arange(4 * rate, device=device)[:, None]
            rings = torch.where(at >= 0, linear.trellis[index.clamp(min=0)], 0).reshape(len(row), -1)
            size = rings.shape[1]
            narrow = sizes[row, unit] < size
            first = unit_ends[row, unit] - sizes[row, unit]
            offset = torch.arange(size, device=device)
            kept = (offset < size // 2) | ~narrow[:, None]
            words[(first[:, None] + offset)[kept]] = rings[kept]
    bounds = torch.arange(least, most + 2, device=device).expand(shape[0], -1).contiguous()
    firsts = torch.searchsorted(rates.gather(1, order).contiguous(), bounds)
    places = torch.nn.functional.pad(sizes.gather(1, order).cumsum(1), (1, 0)).gather(1, firsts)
    require(int(places.max()) < 1 << 21, "rates", "fewer than 2^21 words in a row tile", int(places.max()))
    runs = torch.cat((firsts, places // 64), 1)
    return words, order, runs


def _kept_weights(linears: Sequence[TrellisTensors], cols: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the places of the kept weights, the first of each row tile int64 [row tiles + 1], and the values."""
    places, tiles, first = [], [], 0
    for linear in linears:
        position = linear.kept_positions.to(torch.int64)
        row, column = position // cols, position % cols
        places.append((row % TILE_ROWS << 26) + column)
        tiles.append(first + row // TILE_ROWS)
        first += -(-linear.row_exponents.numel() // TILE_ROWS)
    counts = torch.bincount(torch.cat(tiles), minlength=first)
    starts = torch.nn.functional.pad(counts.cumsum(0), (1, 0))
    place = torch.cat(places)
    signed = torch.where(place >= 1 << 31, place - (1 << 32), place).to(torch.int32)
    return signed, starts, torch.cat([linear.kept_values for linear in linears])
