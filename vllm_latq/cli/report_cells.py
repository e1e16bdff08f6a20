"""The linears of a checkpoint in rows of blocks and columns of modules, as the report page shows them.

    model.layers.3.mlp.up_proj              row 3, column up_proj
    model.layers.3.mlp.experts.17.up_proj   row 3, column experts.*.up_proj, in one cell with the other experts
    lm_head                                 a row of its own

Invariant: every linear is in exactly one cell.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Any

from vllm_latq.format.report import LayerReport, summed

# Lengths in the units of a heat map, which are about CSS pixels.
CELL_WIDTH, CELL_HEIGHT, LETTER = 38, 18, 6.8
LONGEST_LABEL = 28


@dataclass(frozen=True)
class Linear:
    """A quantized linear.

    Attributes:
        name: name of the module.
        shape: (rows, cols).
        bits: stored bits per weight, counted from the files.
        record: record of the linear in the report.
    """

    name: str
    shape: tuple[int, int]
    bits: float
    record: LayerReport

    @property
    def weights(self) -> int:
        """Number of weights."""
        return self.shape[0] * self.shape[1]

    @property
    def served_bits(self) -> float:
        """Bits per weight in memory while served; the stored bits where the report does not say."""
        return self.bits if self.record.served_bits is None else self.record.served_bits

    @property
    def used(self) -> float | None:
        """Part of the bound that rounding used: of the loss for latq, otherwise of the rounding error."""
        record = self.record
        if record.loss is not None and record.loss_bound:
            return record.loss / record.loss_bound
        error = record.error if record.rounding_error is None else record.rounding_error
        return error / record.bound if error is not None and record.bound else None


@dataclass(frozen=True)
class Cell:
    """The linears of one module of one block: one, or the experts of a layer.

    Attributes:
        row, column: names of block and module; the column is empty for a linear outside the blocks.
        linears: one or more.
    """

    row: str
    column: str
    linears: tuple[Linear, ...]

    @property
    def name(self) -> str:
        """Name of the linear; of experts, with a star for their numbers."""
        return f"{self.row}.{self.column}" if self.column else self.row

    @property
    def shape(self) -> str:
        """Shape as rows×cols; all shapes, if the linears have several."""
        return ", ".join(dict.fromkeys(f"{rows}×{cols}" for rows, cols in (linear.shape for linear in self.linears)))

    @property
    def bits(self) -> float:
        """Stored bits per weight."""
        return self._per_weight([linear.bits for linear in self.linears])

    @property
    def served_bits(self) -> float:
        """Bits per weight in memory while served."""
        return self._per_weight([linear.served_bits for linear in self.linears])

    @property
    def outliers(self) -> float | None:
        """Share of the weights that are outliers."""
        found = [linear.record.outlier_density for linear in self.linears]
        return None if None in found else self._per_weight([density or 0.0 for density in found])

    @property
    def loss(self) -> float | None:
        """Sum of the losses, nats per token."""
        return summed([linear.record for linear in self.linears], "loss")

    @property
    def relative_error(self) -> float | None:
        """Sum of the errors over the sum of the squared outputs."""
        pairs = [(linear.record.error, linear.record.relative_error) for linear in self.linears]
        if any(error is None or relative is None for error, relative in pairs):
            return None
        outputs = sum(error / relative for error, relative in pairs if error and relative)
        return sum(error or 0.0 for error, _ in pairs) / outputs if outputs else 0.0

    @property
    def used(self) -> float | None:
        """Part of the bound that rounding used, where it is the largest part."""
        return max((linear.used for linear in self.linears if linear.used is not None), default=None)

    @property
    def violated(self) -> bool:
        """True if a bound does not hold."""
        return any(linear.record.bound_holds is False for linear in self.linears)

    @property
    def worst(self) -> str:
        """Name of the expert with the largest loss, or else relative error; empty for a single linear."""
        if len(self.linears) == 1:
            return ""
        ranked = [(linear.record.loss or linear.record.relative_error or 0.0, linear.name) for linear in self.linears]
        return max(ranked)[1]

    def _per_weight(self, values: Sequence[float]) -> float:
        total = sum(value * linear.weights for value, linear in zip(values, self.linears, strict=True))
        return total / max(1, sum(linear.weights for linear in self.linears))


def cells(linears: Iterable[Linear]) -> list[Cell]:
    """Return the cells: blocks by number, their modules in stored order, at last what is outside the blocks."""
    found: dict[tuple[str, str], list[Linear]] = {}
    for linear in linears:
        found.setdefault(_place(linear.name), []).append(linear)
    ranks = {column: rank for rank, column in enumerate(dict.fromkeys(column for _, column in found))}

    def rank(place: tuple[str, str]) -> tuple[Any, ...]:
        block, _, number = place[0].rpartition(".")
        return (not place[1], block, int(number), ranks[place[1]]) if place[1] else (True, place[0])

    return [Cell(*place, tuple(found[place])) for place in sorted(found, key=rank)]


def _place(name: str) -> tuple[str, str]:
    """Return row and column of a linear."""
    parts = name.split(".")
    first = next((index for index, part in enumerate(parts[:-1]) if _is_number(part)), None)
    if not first:
        return name, ""
    module = ["*" if _is_number(part) else part for part in parts[first + 1 :]]
    return ".".join(parts[: first + 1]), ".".join(module)


def _is_number(part: str) -> bool:
    return part.isascii() and part.isdecimal() and len(part) < 7


@dataclass(frozen=True)
class Square:
    """One cell of a heat map: place, size, strength of its colour (0 to 1), text inside and on hover."""

    x: float
    y: float
    width: float
    strength: float
    text: str
    title: str
    violated: bool


@dataclass(frozen=True)
class HeatMap:
    """A heat map: heading, explanation, and the geometry of its SVG.

    Attributes:
        left, top: room for the labels.
        rows, columns: (label, place) of each.
    """

    heading: str
    note: str
    left: float
    top: float
    width: float
    height: float
    rows: tuple[tuple[str, float], ...]
    columns: tuple[tuple[str, float], ...]
    squares: tuple[Square, ...]


def heat_map(
    heading: str,
    note: str,
    found: Sequence[Cell],
    value: Callable[[Cell], float | None],
    show: Callable[[float], str],
    strength: Callable[[float], float],
) -> HeatMap | None:
    """Return a heat map of one quantity; None if no cell has it.

    Args:
        heading, note: texts above it.
        found: all cells.
        value: the quantity of a cell.
        show: writes the quantity in at most six characters.
        strength: of the colour, 0 to 1.
    """
    if not any(value(cell) is not None for cell in found):
        return None
    rows = list(dict.fromkeys(cell.row for cell in found))
    columns = [column for column in dict.fromkeys(cell.column for cell in found) if column]
    row_labels, column_labels = _row_labels(rows, found), _suffixes(columns)
    left = 10 + LETTER * max(map(len, row_labels))
    top = 10 + LETTER * max(map(len, column_labels), default=0)
    width = CELL_WIDTH * max(len(columns), 3)
    across = {column: CELL_WIDTH * index for index, column in enumerate(columns)}
    down = {row: CELL_HEIGHT * index for index, row in enumerate(rows)}
    squares = []
    for cell in found:
        number = value(cell)
        if number is not None:
            title = f"{cell.name}: {show(number)}" + (f", worst {cell.worst}" if cell.worst else "")
            wide = CELL_WIDTH if cell.column else width
            place = (left + across.get(cell.column, 0), top + down[cell.row], wide - 2)
            squares.append(Square(*place, min(1.0, max(0.0, strength(number))), show(number), title, cell.violated))
    return HeatMap(
        heading,
        note,
        left,
        top,
        left + width,
        top + CELL_HEIGHT * len(rows),
        tuple((label, top + CELL_HEIGHT * index) for index, label in enumerate(row_labels)),
        tuple((label, left + CELL_WIDTH * index) for index, label in enumerate(column_labels)),
        tuple(squares),
    )


def _row_labels(rows: Sequence[str], found: Sequence[Cell]) -> list[str]:
    """Return the names of rows without what all names of blocks begin with."""
    blocks = {cell.row for cell in found if cell.column}
    levels = zip(*(row.split(".")[:-1] for row in blocks), strict=False)
    shared = sum(1 for _ in takewhile(lambda level: len(set(level)) == 1, levels))
    return [_short(".".join(row.split(".")[shared:]) if row in blocks else row) for row in rows]


def _suffixes(names: Sequence[str]) -> list[str]:
    """Return the shortest ends of dotted names that tell them apart."""
    ends = []
    for name in names:
        parts, length = name.split("."), 1
        while sum(f".{other}".endswith(f".{'.'.join(parts[-length:])}") for other in names) > 1 and length < len(parts):
            length += 1
        length += parts[-length] == "*"
        ends.append(_short(".".join(parts[-length:])))
    return ends


def _short(label: str) -> str:
    return label if len(label) <= LONGEST_LABEL else f"…{label[1 - LONGEST_LABEL :]}"
