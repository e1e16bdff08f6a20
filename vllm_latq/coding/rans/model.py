"""Choose the statistical model of a rANS-coded matrix: classes of rows and columns, and a table for each class sum.

    z [rows, cols]            weight (i, j) is coded with table  row_class[i] + column_class[j]

A class is the logarithm of the spread of a row or a column, so the sum of two classes is the logarithm of the spread
expected of a weight. Classes are chosen so that tables, classes and integers together take the fewest bits. FORMAT.md
section 3.4.

Invariant: the frequencies of a table sum to 2**PROBABILITY_BITS; every integer coded with the table has a positive
frequency, or ESCAPE has.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np
import torch

PROBABILITY_BITS = 12
FREQUENCY_TOTAL = 1 << PROBABILITY_BITS
CLASS_BITS = 4
MAX_TABLES = 2 * (1 << CLASS_BITS) - 1
MAX_SYMBOLS = FREQUENCY_TOTAL - 1
ESCAPE_BITS = 32
ENTRY_BITS = 16
RANGE_BITS = 64
# Rows and columns are first sorted into quarter octaves of spread; a class is a union of 1, 2 or 4 of them.
_FINE_PER_OCTAVE = 4
_FINE_CLASSES = 32
_UNIONS = (1, 2, 4)
# Keeps the logarithm of the spread finite for a column of zeros; as much as one integer 1 among 50 zeros.
_SPREAD_FLOOR = 0.02
# Weights handled at a time: bounds the int64 temporaries to some hundred MB.
_BLOCK_WEIGHTS = 1 << 24

# Class of each fine class: of rows, and of columns.
Maps = tuple[np.ndarray, np.ndarray]


@dataclass(frozen=True)
class Table:
    """Frequencies of the symbols first, first + 1, ..., then of ESCAPE, which stands for any other integer.

    Attributes:
        first: smallest integer with a place in the table.
        frequencies: int64 [n + 1], summing to FREQUENCY_TOTAL; 0 means that the symbol cannot occur.
    """

    first: int
    frequencies: np.ndarray

    @property
    def escape(self) -> int:
        """Index of ESCAPE."""
        return len(self.frequencies) - 1

    def starts(self) -> np.ndarray:
        """Return the first slot of each symbol, int64 [n + 1]."""
        return np.cumsum(self.frequencies) - self.frequencies

    def symbols(self, integers: np.ndarray) -> np.ndarray:
        """Return the symbol index of each integer; ESCAPE where the table has no frequency for it."""
        index = integers - self.first
        index = np.where((index >= 0) & (index < self.escape), index, self.escape)
        return np.where(self.frequencies[index] > 0, index, self.escape)

    def stored_bits(self) -> int:
        """Count the stored bits of the table."""
        return RANGE_BITS + ENTRY_BITS * len(self.frequencies)


@dataclass(frozen=True)
class Model:
    """Classes and tables, which encoder and decoder must agree on.

    Attributes:
        row_class: int64 [rows], below 16.
        column_class: int64 [cols], below 16.
        tables: at most MAX_TABLES, one per sum of two classes.
    """

    row_class: torch.Tensor
    column_class: torch.Tensor
    tables: list[Table]


@dataclass(frozen=True)
class _Histogram:
    """Occurrences of low, low + 1, ..., then of all other integers, float64 [row classes, column classes, size + 1]."""

    low: int
    counts: np.ndarray

    def cheapest(self, candidates: Iterable[Maps]) -> tuple[float, Maps]:
        """Return the fewest bits that tables and integers take, and the maps that lead to them, the first of several.

        The classes themselves always take CLASS_BITS each. All tables are planned in one call: each takes microseconds.
        """
        maps = list(candidates)
        tables = [self.merged(*one) for one in maps]
        ends = np.cumsum([len(table) for table in tables])
        bits = _plan(np.concatenate(tables))[0]
        costs = [float(tables_bits.sum()) for tables_bits in np.split(bits, ends[:-1])]
        best = int(np.argmin(costs))
        return costs[best], maps[best]

    def merged(self, row_map: np.ndarray, column_map: np.ndarray) -> np.ndarray:
        """Return the occurrences per table, [tables, size + 1], with fine classes mapped to these classes."""
        table = (row_map[:, None] + column_map[None, :]).reshape(-1)
        flat = self.counts.reshape(len(table), -1)
        used = flat.any(1)
        selection = np.zeros((int(table.max()) + 1, int(used.sum())))
        selection[table[used], np.arange(selection.shape[1])] = 1
        return selection @ flat[used]


def choose_model(integers: torch.Tensor) -> Model:
    """Return the cheapest model found for int32 [rows, cols], deterministically, with classes on the same device."""
    row_fine, column_fine = _fine_classes(integers)
    histogram = _histogram(integers, row_fine, column_fine)
    row_count, column_count, _ = histogram.counts.shape
    row_map, column_map = _improve(histogram, *histogram.cheapest(_candidates(row_count, column_count)))
    counts = histogram.merged(row_map, column_map)
    _, left, right = _plan(counts)
    tables = [
        _table(histogram.low, count, int(first), int(last))
        for count, first, last in zip(counts, left, right, strict=True)
    ]
    device = integers.device
    classes = torch.from_numpy(row_map).to(device)[row_fine], torch.from_numpy(column_map).to(device)[column_fine]
    return Model(*classes, tables)


def _fine_classes(integers: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the quarter octave of each row's and column's spread, int64 [rows] and [cols]; the least spread is 0."""
    rows, cols = integers.shape
    step = max(1, _BLOCK_WEIGHTS // cols)
    magnitude = torch.zeros(cols, dtype=torch.float64, device=integers.device)
    for block in integers.split(step):
        magnitude += block.to(torch.float64).abs().sum(0)
    column = magnitude / rows + _SPREAD_FLOOR
    # A row's spread is measured in units of the columns' spreads, so that wide columns do not drown the others.
    row = torch.cat([block.to(torch.float64).abs() @ (1 / column) for block in integers.split(step)]) / cols
    return _quarter_octaves(row + _SPREAD_FLOOR), _quarter_octaves(column)


def _quarter_octaves(spread: torch.Tensor) -> torch.Tensor:
    """Return the fine class of each spread, from 0 on."""
    level = (spread.log2() * _FINE_PER_OCTAVE).round().to(torch.int64)
    level = (level - level.max()).clamp(min=1 - _FINE_CLASSES)
    return level - level.min()


def _histogram(integers: torch.Tensor, row_fine: torch.Tensor, column_fine: torch.Tensor) -> _Histogram:
    """Count the integers of each pair of fine classes."""
    low, high = (int(bound) for bound in integers.aminmax())
    if high - low >= MAX_SYMBOLS:
        # A few far integers would make the histogram huge: count those near the median, and escape the others.
        middle = int(integers.reshape(-1).median()) - MAX_SYMBOLS // 2
        low = min(max(middle, low), high - MAX_SYMBOLS + 1)
        high = low + MAX_SYMBOLS - 1
    size, columns = high - low + 1, int(column_fine.max()) + 1
    shape = (int(row_fine.max()) + 1, columns, size + 1)
    total = torch.zeros(shape[0] * shape[1] * shape[2], dtype=torch.int64, device=integers.device)
    step = max(1, _BLOCK_WEIGHTS // integers.shape[1])
    for block, row in zip(integers.split(step), row_fine.split(step), strict=True):
        symbol = block.to(torch.int64) - low
        symbol = torch.where((symbol >= 0) & (symbol < size), symbol, size)
        symbol += (row.unsqueeze(1) * columns + column_fine) * (size + 1)
        total += torch.bincount(symbol.reshape(-1), minlength=total.numel())
    return _Histogram(low, total.cpu().numpy().astype(np.float64).reshape(shape))


def _candidates(rows: int, columns: int) -> Iterator[Maps]:
    """Yield maps of fine classes to classes: unions of equal width, for rows and columns or for one of them."""
    for union in _UNIONS:
        row_map, column_map = _unite(rows, union), _unite(columns, union)
        yield row_map, column_map
        yield np.zeros_like(row_map), column_map
        yield row_map, np.zeros_like(column_map)
    yield np.zeros(rows, dtype=np.int64), np.zeros(columns, dtype=np.int64)


def _unite(count: int, union: int) -> np.ndarray:
    """Return classes of `union` neighbours each, counted from the widest, at most 16; the lowest takes the rest."""
    from_widest = (count - 1 - np.arange(count)) // union
    from_widest = np.minimum(from_widest, (1 << CLASS_BITS) - 1)
    return from_widest.max() - from_widest


def _improve(histogram: _Histogram, bits: float, maps: Maps) -> Maps:
    """Merge the two widest or the two narrowest classes of rows or columns as long as that saves bits."""
    while tried := list(_merges(*maps)):
        fewer, merged = histogram.cheapest(tried)
        if fewer >= bits:
            break
        bits, maps = fewer, merged
    return maps


def _merges(row_map: np.ndarray, column_map: np.ndarray) -> Iterator[Maps]:
    """Yield maps with one merged pair of classes at an end of the rows' or the columns' classes."""
    if row_map.max():
        yield np.maximum(row_map - 1, 0), column_map
        yield np.minimum(row_map, row_map.max() - 1), column_map
    if column_map.max():
        yield row_map, np.maximum(column_map - 1, 0)
        yield row_map, np.minimum(column_map, column_map.max() - 1)


def _plan(counts: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return the cost of each table in bits, and the range [left, right) of its symbols that makes it cheapest.

    A symbol rarer than the smallest frequency is coded in PROBABILITY_BITS. It takes its frequency from the other
    symbols, which costs log2(e) * (n / FREQUENCY_TOTAL - count) bits to first order. Symbols at both ends cost a table
    entry each, and are escaped where that is cheaper.

    Args:
        counts: float64 [tables, size + 1]; the last column is escaped anyway.
    """
    inside, outside = counts[:, :-1], counts[:, -1]
    total = counts.sum(1, keepdims=True)
    least = total / FREQUENCY_TOTAL
    with np.errstate(divide="ignore", invalid="ignore"):
        fair = inside * np.log2(total / inside)
    rare = inside * PROBABILITY_BITS + (least - inside) / np.log(2)
    cost = np.where(inside == 0, 0, np.where(inside < least, rare, fair)) + ENTRY_BITS
    escaped = inside * (ESCAPE_BITS + PROBABILITY_BITS)
    gain = np.pad(np.cumsum(escaped - cost, 1), ((0, 0), (1, 0)))  # of keeping the symbols before each position
    position, peak = np.arange(gain.shape[1]), inside.argmax(1)[:, None]
    left = np.where(position <= peak, gain, np.inf).argmin(1)
    right = np.where(position > peak, gain, -np.inf).argmax(1)
    saved = np.take_along_axis(gain, right[:, None], 1) - np.take_along_axis(gain, left[:, None], 1)
    bits = escaped.sum(1) - saved[:, 0] + outside * (ESCAPE_BITS + PROBABILITY_BITS) + ENTRY_BITS + RANGE_BITS
    return bits, left, right


def _table(low: int, counts: np.ndarray, left: int, right: int) -> Table:
    """Return the table of one class for counts [size + 1], with the symbols [left, right)."""
    escaped = counts.sum() - counts[left:right].sum()
    return Table(low + left, frequencies(np.append(counts[left:right], escaped)))


def frequencies(counts: np.ndarray) -> np.ndarray:
    """Return frequencies, int64 [n], that sum to FREQUENCY_TOTAL, for occurrences [n]; at most 2**12 are positive.

    Every occurring symbol gets a frequency of one. The rest is given out one by one, where it saves most bits. If
    nothing occurs, the last symbol (ESCAPE) gets everything.
    """
    total = counts.sum()
    if not total:
        result = np.zeros(len(counts), dtype=np.int64)
        result[-1] = FREQUENCY_TOTAL
        return result
    used = np.nonzero(counts)[0]
    weight = counts[used].astype(np.float64)
    chosen = np.maximum(1, np.floor(weight * (FREQUENCY_TOTAL / total))).astype(np.int64)
    while (missing := FREQUENCY_TOTAL - int(chosen.sum())) > 0:
        chosen[np.argmax(weight * np.log1p(1 / chosen))] += 1
    for _ in range(-missing):
        loss = np.where(chosen > 1, -weight * np.log1p(-1 / np.maximum(chosen, 2)), np.inf)
        chosen[np.argmin(loss)] -= 1
    result = np.zeros(len(counts), dtype=np.int64)
    result[used] = chosen
    return result
