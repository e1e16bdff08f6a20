"""Integers packed into int32 (compressed-tensors, format pack-quantized), as Kimi K2.5 stores its experts.

    proj.weight_packed int32 [m, ceil(n / p)]      p = 32 // bits integers per word, the first in the lowest bits
    proj.weight_scale [m, groups]                  groups of columns; one for all of a row with strategy `channel`
    proj.weight_shape int [2]                      m, n
    proj.weight_zero_point int32 [ceil(m / p), groups]      of asymmetric schemes, packed down the rows
    proj.weight_g_idx int32 [n]                    group of each column, where they are not in order  ->  proj.weight

    weight = (integer - zero point) * scale, in the dtype of the scales

Integers and zero points are stored plus 2^(bits - 1); without zero points this offset is what is subtracted.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

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

    @property
    def per_word(self) -> int:
        """Return the number of integers in a word."""
        return 32 // self.bits


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
        offset = torch.tensor(1 << (bits - 1)) if self.coding.symmetric else _unpack(rest.pop(0).T, bits, rows).T
        groups = self._groups(rest.pop(0) if rest else None)
        offsets = offset if self.coding.symmetric else offset[:, groups]
        return ((_unpack(packed, bits, columns) - offsets) * floats[:, groups]).to(scales.dtype)

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
    words = -(-columns // coding.per_word)
    expected = f"{words} words of {coding.per_word} integers per row, for {columns} columns by {SCALE} or {SHAPE}"
    published.require(packed, packed, expected, lambda it: it.shape[1] == words)
    if not coding.symmetric:
        down = -(-rows // coding.per_word), groups
        published.require(zero_point, packed, f"int32 words, shape {down}", lambda it: it == (torch.int32, down))
        names.append(zero_point)
    elif zero_point in published.headers:
        where = published.where(zero_point)
        raise UnsupportedModelError(where, "no zero points in a symmetric scheme", "a tensor of them", INCOMPLETE)
    if coding.by_activation or g_idx in published.headers:
        expected = f"{columns} integers"
        published.require(g_idx, packed, expected, lambda it: it.dtype in INTEGERS and it.shape == (columns,))
        names.append(g_idx)
    return Integers(published.where(module), tuple(names), (rows, columns), coding)


def _unpack(words: Tensor, bits: int, columns: int) -> Tensor:
    """Return the integers of each row of words, int32 [rows, columns], with their offset."""
    shifts = torch.arange(32 // bits, dtype=torch.int32) * bits
    return ((words[..., None] >> shifts) & ((1 << bits) - 1)).flatten(1)[:, :columns]
