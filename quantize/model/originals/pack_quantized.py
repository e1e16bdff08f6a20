"""Integers packed into int32 (compressed-tensors, format pack-quantized), as Kimi K2.5 stores its experts.

    proj.weight_packed int32 [m, words]            integers, the first in the lowest bits: 32 // bits in each word, or
                                                   from version 0.18 of compressed-tensors on across words, as one
                                                   stream of ceil(n * bits / 32) words
    proj.weight_scale [m, groups]                  groups of columns; one for all of a row with strategy `channel`
    proj.weight_shape int [2]                      m, n
    proj.weight_zero_point int32 [words, groups]   of asymmetric schemes, packed in the same way down the rows
    proj.weight_g_idx int32 [n]                    group of each column, where they are not in order  ->  proj.weight

    weight = (integer - zero point) * scale, in the dtype of the scales

Integers and zero points are stored plus 2^(bits - 1); without zero points this offset is what is subtracted.

The number of words says which layout it is. Where both layouts have the same number, it is the layout of whole integers
if all bits are 0 that this layout leaves unused.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from vllm_latq.coding.packing import packed_words, unpack_codes
from vllm_latq.errors import UnsupportedModelError
from vllm_latq.quantize.model.originals.published import FLOATS, INCOMPLETE, Published, finite_scales

PACKED, SCALE, SHAPE, ZERO_POINT, G_IDX = (
    f"weight_{part}" for part in ("packed", "scale", "shape", "zero_point", "g_idx")
)
INTEGERS = (torch.int32, "I64")


@dataclass(frozen=True)
class Coding:
    """How the integers of a matrix are stored.

    Attributes:
        bits: 1 to 8.
        group: columns that share a scale; None if all of a row do.
        symmetric: whether there are no zero points.
        by_activation: whether each column has its group in `weight_g_idx`.
    """

    bits: int
    group: int | None
    symmetric: bool
    by_activation: bool

    def words(self, count: int) -> tuple[int, int]:
        """Return the number of words of that many integers: with whole integers in each word, and as one stream."""
        return -(-count // (32 // self.bits)), packed_words(count, self.bits)


@dataclass(frozen=True)
class Integers:
    """A matrix of packed integers.

    Attributes:
        where: the module, for errors.
        names: packed integers, scales and shape, then zero points and groups of columns where the coding has them.
        shape: see `Packed`.
        coding: of the integers.
    """

    where: str
    names: tuple[str, ...]
    shape: tuple[int, int]
    coding: Coding

    def dequantize(self, stored: list[Tensor]) -> Tensor:
        """Return the matrix in the dtype of its scales, as `Packed`."""
        packed, scales, shape, *rest = stored
        (rows, columns), bits = self.shape, self.coding.bits
        if shape.tolist() != [rows, columns]:
            expected = f"[{rows}, {columns}], by the shapes of {PACKED} and {SCALE}"
            raise UnsupportedModelError(f"{self.where}.{SHAPE}", expected, f"{shape.tolist()}", INCOMPLETE)
        floats = finite_scales(scales, f"{self.where}.{SCALE}")
        zero_points = None if self.coding.symmetric else rest.pop(0).T
        streamed = self._is_streamed(packed, columns) or (
            zero_points is not None and self._is_streamed(zero_points, rows)
        )
        groups = self._groups(rest.pop(0) if rest else None)
        offsets: Tensor | int = 1 << (bits - 1)
        if zero_points is not None:
            offsets = _unpack(zero_points, bits, rows, streamed).T[:, groups]
        return ((_unpack(packed, bits, columns, streamed) - offsets) * floats[:, groups]).to(scales.dtype)

    def _is_streamed(self, words: Tensor, count: int) -> bool:
        """Return whether integers can only be packed as one stream."""
        whole, stream = self.coding.words(count)
        used = 32 // self.coding.bits * self.coding.bits
        found = words.shape[1]
        return found != whole or (found == stream and used < 32 and bool((words >> used).any()))

    def _groups(self, stored: Tensor | None) -> Tensor:
        """Return the group of each column."""
        columns = self.shape[1]
        size = self.coding.group or columns
        in_order = torch.arange(columns) // size
        # Written where no order was chosen.
        if stored is None or bool((stored == -1).any()):
            return in_order
        if not torch.equal(stored.sort().values, in_order.to(stored.dtype)):
            expected, found = f"each of {columns // size} groups {size} times", "other numbers"
            raise UnsupportedModelError(f"{self.where}.{G_IDX}", expected, found, INCOMPLETE)
        return stored.long()


def matrix(published: Published, module: str, coding: Coding) -> Integers:
    """Return how a module's weight is stored, after a check of the shapes.

    Raises:
        UnsupportedModelError: tensors that are missing or do not fit each other.
    """
    packed, scale, shape, zero_point, g_idx = (f"{module}.{part}" for part in (PACKED, SCALE, SHAPE, ZERO_POINT, G_IDX))
    published.require(
        packed, packed, "int32 words in a matrix", lambda it: it.dtype == torch.int32 and len(it.shape) == 2
    )
    rows = published.headers[packed].shape[0]
    published.require(
        scale,
        packed,
        f"floats in {rows} rows",
        lambda it: it.dtype in FLOATS and len(it.shape) == 2 and it.shape[0] == rows,
    )
    published.require(shape, packed, "two integers", lambda it: it.dtype in INTEGERS and it.shape == (2,))
    names = [packed, scale, shape]
    groups = published.headers[scale].shape[1]
    # Headers do not tell how many integers of the last word count, only groups do.
    columns = groups * coding.group if coding.group else int(published.read(shape)[1])
    if coding.group is None:
        published.require(scale, packed, "one scale per row", lambda it: it.shape[1] == 1)
    whole, stream = coding.words(columns)
    expected = f"{_either(whole, stream)} words per row, for {columns} columns by {SCALE} or {SHAPE}"
    published.require(packed, packed, expected, lambda it: it.shape[1] in (whole, stream))
    if not coding.symmetric:
        down = coding.words(rows)
        expected = f"int32 words, shape ({_either(*down)}, {groups})"
        published.require(
            zero_point, packed, expected, lambda it: it in [(torch.int32, (words, groups)) for words in down]
        )
        names.append(zero_point)
    elif zero_point in published.headers:
        where = published.where(zero_point)
        raise UnsupportedModelError(where, "no zero points in a symmetric scheme", "a tensor of them", INCOMPLETE)
    if coding.by_activation or g_idx in published.headers:
        expected = f"{columns} integers"
        published.require(g_idx, packed, expected, lambda it: it.dtype in INTEGERS and it.shape == (columns,))
        names.append(g_idx)
    return Integers(published.where(module), tuple(names), (rows, columns), coding)


def _either(whole: int, stream: int) -> str:
    return f"{whole}" if whole == stream else f"{whole} or {stream}"


def _unpack(words: Tensor, bits: int, columns: int, streamed: bool) -> Tensor:
    """Return the integers of each row of words, int32 [rows, columns], with their offset."""
    if streamed:
        return unpack_codes(words, bits, columns).int()
    shifts = torch.arange(32 // bits, dtype=torch.int32) * bits
    return ((words[..., None] >> shifts) & ((1 << bits) - 1)).flatten(1)[:, :columns]
