"""Integers packed into int32 (compressed-tensors, format pack-quantized), as Kimi K2 stores its experts.

    proj.weight_packed int32 [m, ceil(n / p)]      p = 32 // bits integers per word, the first in the lowest bits
    proj.weight_scale [m, groups]                  groups of columns; one for all of a row with strategy `channel`
    proj.weight_shape int [2]                      m, n
    proj.weight_zero_point int32 [ceil(m / p), groups]      of asymmetric schemes, packed down the rows
    proj.weight_g_idx int32 [n]                    group of each column, where they are not in order  ->  proj.weight

    weight = (integer - zero point) * scale, in the dtype of the scales

Integers and zero points are stored plus 2^(bits - 1); without zero points this offset is what is subtracted.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from vllm_latq.errors import UnsupportedModelError
from vllm_latq.quantize.model.originals.published import FLOATS, INCOMPLETE, Found, Published, finite_scales

PACKED, SCALE, SHAPE, ZERO_POINT, G_IDX = (
    f"weight_{part}" for part in ("packed", "scale", "shape", "zero_point", "g_idx")
)
INTEGERS = (torch.int32, "I64")
# How config.json names the schemes in which the columns of a group are chosen by their activations.
BY_ACTIVATION = ("group", "dynamic", True)


@dataclass(frozen=True)
class Scheme:
    """One entry of `config_groups`.

    Attributes:
        targets: names of modules, patterns of names (re:...), and classes of modules.
        bits: 1 to 8.
        group: columns that share a scale; None if all of a row do.
        symmetric: whether there are no zero points.
        by_activation: whether each column has its group in `weight_g_idx`.
    """

    targets: tuple[str, ...]
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
        names: packed integers, scales and shape, then zero points and groups of columns where the scheme has them.
        shape: see `Packed`.
        scheme: of the matrix.
    """

    where: str
    names: tuple[str, ...]
    shape: tuple[int, int]
    scheme: Scheme

    def dequantize(self, stored: list[Tensor]) -> Tensor:
        """Return the matrix in the dtype of its scales, as `Packed`."""
        packed, scales, shape, *rest = stored
        (rows, columns), bits = self.shape, self.scheme.bits
        if shape.tolist() != [rows, columns]:
            expected = f"[{rows}, {columns}], by the shapes of {PACKED} and {SCALE}"
            raise UnsupportedModelError(f"{self.where}.{SHAPE}", expected, f"{shape.tolist()}", INCOMPLETE)
        floats = finite_scales(scales, f"{self.where}.{SCALE}")
        offset = torch.tensor(1 << (bits - 1)) if self.scheme.symmetric else _unpack(rest.pop(0).T, bits, rows).T
        groups = self._groups(rest.pop(0) if rest else None)
        offsets = offset if self.scheme.symmetric else offset[:, groups]
        return ((_unpack(packed, bits, columns) - offsets) * floats[:, groups]).to(scales.dtype)

    def _groups(self, stored: Tensor | None) -> Tensor:
        """Return the group of each column."""
        columns = self.shape[1]
        size = self.scheme.group or columns
        in_order = torch.arange(columns) // size
        # Written where no order was chosen.
        if stored is None or bool((stored == -1).any()):
            return in_order
        if not torch.equal(stored.sort().values, in_order.to(stored.dtype)):
            expected, found = f"each of {columns // size} groups {size} times", "other numbers"
            raise UnsupportedModelError(f"{self.where}.{G_IDX}", expected, found, INCOMPLETE)
        return stored.long()


def find(published: Published) -> Found:
    """Find the packed matrices.

    Raises:
        UnsupportedModelError: a scheme that is not understood, a matrix without one, or tensors that are missing or do
            not fit each other.
    """
    schemes = _schemes(published)
    found = Found()
    for packed in published.headers:
        if packed.endswith(f".{PACKED}"):
            module = packed.removesuffix(f".{PACKED}")
            matrix = _matrix(published, module, _scheme(published, module, schemes))
            found.packed[f"{module}.weight"] = matrix
            found.hidden.update(matrix.names)
    return found


def _matrix(published: Published, module: str, scheme: Scheme) -> Integers:
    """Return how a module's weight is stored, after a check of the shapes."""
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
    columns = groups * scheme.group if scheme.group else int(published.read(shape)[1])
    if scheme.group is None:
        published.require(scale, packed, "one scale per row", lambda it: it.shape[1] == 1)
    words = -(-columns // scheme.per_word)
    expected = f"{words} words of {scheme.per_word} integers per row, for {columns} columns by {SCALE} or {SHAPE}"
    published.require(packed, packed, expected, lambda it: it.shape[1] == words)
    if not scheme.symmetric:
        down = -(-rows // scheme.per_word), groups
        published.require(zero_point, packed, f"int32 words, shape {down}", lambda it: it == (torch.int32, down))
        names.append(zero_point)
    elif zero_point in published.headers:
        where = published.where(zero_point)
        raise UnsupportedModelError(where, "no zero points in a symmetric scheme", "a tensor of them", INCOMPLETE)
    if scheme.by_activation or g_idx in published.headers:
        expected = f"{columns} integers"
        published.require(g_idx, packed, expected, lambda it: it.dtype in INTEGERS and it.shape == (columns,))
        names.append(g_idx)
    return Integers(published.where(module), tuple(names), (rows, columns), scheme)


def _schemes(published: Published) -> list[Scheme]:
    """Return the schemes of the `quantization_config`."""
    if published.quantization.get("transform_config"):
        raise published.refuse("transform_config", "none: transforms of weights are not undone")
    sparsity = published.quantization.get("sparsity_config") or {}
    if not isinstance(sparsity, Mapping) or sparsity.get("format", "dense") != "dense":
        raise published.refuse("sparsity_config", "none, or the format dense")
    groups = published.quantization.get("config_groups")
    if not isinstance(groups, Mapping) or not groups:
        raise published.refuse("config_groups", "groups of modules, each with a scheme")
    return [_read_scheme(published, f"config_groups.{name}", group) for name, group in groups.items()]


def _read_scheme(published: Published, key: str, group: Any) -> Scheme:
    """Return the scheme of one entry of `config_groups`."""
    weights = group.get("weights") if isinstance(group, Mapping) else None
    targets = group.get("targets") if isinstance(group, Mapping) else None
    if (
        not isinstance(weights, Mapping)
        or not isinstance(targets, list)
        or not all(isinstance(t, str) for t in targets)
    ):
        raise published.refuse(key, "targets and weights")
    bits, strategy, size = (weights.get(part) for part in ("num_bits", "strategy", "group_size"))
    known = weights.get("type", "int") == "int" and group.get("format") in (None, "pack-quantized")
    sizes = {"group": type(size) is int and size > 0, "channel": size in (None, -1)}
    symmetric = weights.get("symmetric", True)
    if not (known and type(bits) is int and 1 <= bits <= 8 and sizes.get(str(strategy)) and type(symmetric) is bool):
        raise published.refuse(f"{key}.weights", "integers of 1 to 8 bits, pack-quantized, by group or channel")
    by_activation = weights.get("actorder") in BY_ACTIVATION
    return Scheme(tuple(targets), bits, size if strategy == "group" else None, symmetric, by_activation)


def _scheme(published: Published, module: str, schemes: list[Scheme]) -> Scheme:
    """Return the scheme of a module: one that names it, else the one for its class."""
    named = [scheme for scheme in schemes if any(_is_named(published, module, target) for target in scheme.targets)]
    chosen = {*(named or (scheme for scheme in schemes if "Linear" in scheme.targets))}
    if len(chosen) != 1:
        where = f"{published.directory}/config.json: quantization_config.config_groups"
        raise UnsupportedModelError(where, f"one scheme for {module}", f"{len(chosen)}", INCOMPLETE)
    return chosen.pop()


def _is_named(published: Published, module: str, target: str) -> bool:
    """Return whether a target is the name of a module, or a pattern of it."""
    if not target.startswith("re:"):
        return target == module
    try:
        return re.match(target.removeprefix("re:"), module) is not None
    except re.error as error:
        where = f"{published.directory}/config.json: quantization_config.config_groups"
        raise UnsupportedModelError(where, "patterns of names", f"{target!r}: {error}") from None


def _unpack(words: Tensor, bits: int, columns: int) -> Tensor:
    """Return the integers of each row of words, int32 [rows, columns], with their offset."""
    shifts = torch.arange(32 // bits, dtype=torch.int32) * bits
    return ((words[..., None] >> shifts) & ((1 << bits) - 1)).flatten(1)[:, :columns]
