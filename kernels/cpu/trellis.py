"""Weights of the trellis code on a CPU: the layout that trellis.cpp reads, and calls of it.

    pair     two neighbouring ring tiles of one linear: 32 rows; the second may be missing
    string   16 steps of a ring: rate halves of a word; 8 of them are a ring
    words    for each pair, unit and 16 columns: half k of all strings of both tiles side by side, for k = 0, .., rate

A lane of a vector has one string, so that all lanes shift by the same number of bits.
"""

import ctypes
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch.nn.functional import pad

from vllm_latq.kernels.cpu.library import load, run_product
from vllm_latq.kernels.layout.trellis import MANTISSAS, TILE, TILE_ROWS, UNIT_COLUMNS, TrellisTensors

SOURCE = "trellis.cpp"
PAIR_ROWS, STRINGS = 2 * TILE, 8
COLUMN_BITS = 26  # of the place of a kept weight


class RingTensors(NamedTuple):
    """One or several linears of one input, stacked by rows, in the layout. (A NamedTuple, see `PackedTensors`.)

    Attributes:
        words: int16 [as many as the rates take, or more].
        begins: int64 [pairs], the first word of each pair.
        rates: uint8 [pairs, units].
        rows_of: int32 [pairs, 2], the first row of each pair, and its number of rows.
        row_scales: float32 [pairs, 32].
        column_scales: float32 [cols], of the columns as stored.
        columns: int32 [cols], the column of x that each stored column multiplies.
        kept_begins: int32 [pairs + 1].
        kept_places: int32 [the last number of kept_begins, or more], row of the pair * 2^26 + stored column.
        kept_values: bfloat16 [as many].
        rows, cols: of the weight.
    """

    words: torch.Tensor
    begins: torch.Tensor
    rates: torch.Tensor
    rows_of: torch.Tensor
    row_scales: torch.Tensor
    column_scales: torch.Tensor
    columns: torch.Tensor
    kept_begins: torch.Tensor
    kept_places: torch.Tensor
    kept_values: torch.Tensor
    rows: int
    cols: int


TENSORS = RingTensors._fields[:-2]


class _Trellis(ctypes.Structure):
    """`Trellis` of trellis.cpp."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in TENSORS),
        *((name, ctypes.c_int64) for name in ("rows", "cols", "pairs")),
    ]


def is_available() -> bool:
    """Return whether this CPU has the instructions, and the source compiles; compiles it at the first call."""
    return load(SOURCE) is not None


def octave_eighths(exponents: torch.Tensor) -> torch.Tensor:
    """Return 2^(exponent / 8), float32, as the kernels for GPUs compute it."""
    wide = exponents.to(torch.int32)
    mantissas = torch.tensor(MANTISSAS, dtype=torch.int32)[(wide % 8).long()]
    return ((wide // 8 + 127 << 23) + mantissas).view(torch.float32)


def prepare_trellis(
    linears: Sequence[TrellisTensors], column_exponents: torch.Tensor, columns: torch.Tensor
) -> RingTensors:
    """Put linears of one input in order.

    Args:
        linears: on the CPU, in the order of their rows; each begins with a whole tile.
        column_exponents: int8 [cols].
        columns: int64 [cols], the column of x of each stored column.
    """
    cols, rows, parts = len(columns), 0, []
    stored = columns.argsort()
    for linear in linears:
        parts.append(_in_pairs(linear, stored, rows))
        rows += len(linear.row_exponents)
    sizes = [len(part["words"]) for part in parts]
    kept = [len(part["kept_places"]) for part in parts]
    for part, first, kept_first in zip(parts, _before(sizes), _before(kept), strict=True):
        part["begins"] = part["begins"] + first
        part["kept_begins"] = part["kept_begins"][:-1] + kept_first
    joined = {name: torch.cat([part[name] for part in parts]) for name in parts[0]}
    joined["kept_begins"] = pad(joined["kept_begins"], (0, 1), value=sum(kept))
    return RingTensors(
        column_scales=octave_eighths(column_exponents)[columns],
        columns=columns.to(torch.int32),
        rows=rows,
        cols=cols,
        **joined,
    )


def multiply(x: torch.Tensor, weight: RingTensors) -> torch.Tensor:
    """Return x [n, cols] times the transposed weight, [n, rows]; x has one of the dtypes KINDS.

    The results of a row of x do not depend on the other rows. A row with an infinite number, or NaN, gives NaN.
    """
    return run_product(_library().latq_trellis_product, _view(weight), x, weight.rows, weight.cols)


def _in_pairs(linear: TrellisTensors, stored: torch.Tensor, first_row: int) -> dict[str, torch.Tensor]:
    """Return the tensors of one linear that depend on its rows; its words and kept weights begin at 0.

    Args:
        linear: on the CPU.
        stored: int64 [cols], the stored column of each column of x.
        first_row: of the linear, in y.
    """
    cols, rows = len(stored), len(linear.row_exponents)
    tiles, groups, pairs = -(-rows // TILE), -(-cols // TILE), -(-rows // PAIR_ROWS)
    # Tiles of one unit have one rate, so both tiles of a pair have.
    units = linear.rates.to(torch.int64).repeat_interleave(TILE_ROWS // PAIR_ROWS, 0)[:pairs]
    rates = units.repeat_interleave(UNIT_COLUMNS // TILE, 1)[:, :groups]
    of_tiles = rates.repeat_interleave(2, 0)[:tiles]
    starts = _starts(of_tiles * (STRINGS * TILE // 32)).to(torch.int64)  # a ring is 8 strings of 16 `rate` bits
    sizes = rates * (2 * STRINGS)
    at = _starts(sizes)
    words = torch.zeros(int(sizes.sum()), dtype=torch.int16)
    for rate in of_tiles.unique().tolist():
        tile, group = (of_tiles == rate).nonzero(as_tuple=True)
        ring = linear.trellis[starts[tile, group][:, None] + torch.arange(STRINGS * TILE * rate // 32)]
        # Bit 0 of a ring is the highest of its first word. [tiles, 8 strings, rate halves]
        halves = ring.view(torch.int16).view(len(ring), -1, 2).flip(2).reshape(len(ring), STRINGS, rate)
        half, string = torch.arange(rate)[:, None] * (2 * STRINGS), torch.arange(STRINGS)
        to = (at[tile // 2, group] + tile % 2 * STRINGS)[:, None, None] + half + string
        words[to] = halves.transpose(1, 2)
    scales = linear.scale * octave_eighths(linear.row_exponents)
    begins = torch.arange(0, rows, PAIR_ROWS)
    positions = linear.kept_positions.to(torch.int64)
    row, column = positions // cols, stored[positions % cols]
    return {
        "words": words,
        "begins": at[:, 0].contiguous(),
        "rates": units.to(torch.uint8),
        "rows_of": torch.stack((first_row + begins, (rows - begins).clamp(max=PAIR_ROWS)), 1).to(torch.int32),
        "row_scales": pad(scales, (0, -rows % PAIR_ROWS)).view(pairs, PAIR_ROWS),
        "kept_begins": pad(torch.bincount(row // PAIR_ROWS, minlength=pairs).cumsum(0), (1, 0)).to(torch.int32),
        "kept_places": (row % PAIR_ROWS << COLUMN_BITS | column).to(torch.int32),
        "kept_values": linear.kept_values,
    }


def _starts(sizes: torch.Tensor) -> torch.Tensor:
    """Return the sum of all sizes before each."""
    return sizes.flatten().cumsum(0).view(sizes.shape) - sizes


def _before(sizes: list[int]) -> list[int]:
    return [sum(sizes[:i]) for i in range(len(sizes))]


def _library() -> ctypes.CDLL:
    library = load(SOURCE)
    assert library is not None, "is_available() was asked before"
    return library


def _view(weight: RingTensors) -> _Trellis:
    tensors: tuple[Any, ...] = weight[: len(TENSORS)]
    pointers = (tensor.data_ptr() for tensor in tensors)
    return _Trellis(*pointers, weight.rows, weight.cols, len(weight.begins))
