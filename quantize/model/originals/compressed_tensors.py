"""Models quantized by compressed-tensors: integers packed into int32, and 8-bit floats, each module by its scheme.

    proj.weight_packed, ...                                        pack-quantized, see `pack_quantized`
    proj.weight [m, n] float8, proj.weight_scale                   float-quantized: a scale for all of the matrix [1],
                                                                   for each row [m, 1], or for each block

A model whose modules are of both formats says mixed-precision.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from vllm_latq.errors import UnsupportedModelError
from vllm_latq.quantize.model.originals import float8, pack_quantized
from vllm_latq.quantize.model.originals.published import INCOMPLETE, Found, Packed, Published

# Rows and columns that share a scale; None stands for all of them.
Block = tuple[int | None, int | None]
# How config.json names the schemes in which the columns of a group are chosen by their activations.
BY_ACTIVATION = ("group", "dynamic", True)
FORMATS = (None, "pack-quantized", "float-quantized")


@dataclass(frozen=True)
class Scheme:
    """One entry of `config_groups`.

    Attributes:
        targets: names of modules, patterns of names (re:...), and classes of modules.
        bits: 1 to 8 of integers; None for 8-bit floats.
        block: rows and columns that share a scale; None stands for all of them.
        symmetric: whether there are no zero points.
        by_activation: whether each column has its group in `weight_g_idx`.
    """

    targets: tuple[str, ...]
    bits: int | None
    block: Block
    symmetric: bool
    by_activation: bool


def find(published: Published) -> Found:
    """Find the matrices of integers and of 8-bit floats.

    Raises:
        UnsupportedModelError: a scheme that is not understood, a matrix without one, or tensors that are missing or do
            not fit each other.
    """
    schemes = _schemes(published)
    found = Found()
    for name, header in published.headers.items():
        module, _, leaf = name.rpartition(".")
        packed: Packed
        if leaf == pack_quantized.PACKED:
            scheme = _scheme(published, module, [scheme for scheme in schemes if scheme.bits is not None])
            assert scheme.bits is not None
            coding = pack_quantized.Coding(scheme.bits, scheme.block[1], scheme.symmetric, scheme.by_activation)
            packed = pack_quantized.matrix(published, module, coding)
        elif leaf == "weight" and header.dtype in float8.FLOAT8:
            scheme = _scheme(published, module, [scheme for scheme in schemes if scheme.bits is None])
            packed = float8.packed(published, name, f"{name}_scale", scheme.block)
            found.hidden.add(f"{module}.input_scale")
        else:
            continue
        found.packed[f"{module}.weight"] = packed
    return found


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
    block, symmetric = _block(weights), weights.get("symmetric", True)
    bits, kind = weights.get("num_bits"), weights.get("type", "int")
    integers = kind == "int" and type(bits) is int and 1 <= bits <= 8 and block is not None and block[0] == 1
    floats = kind == "float" and bits == 8 and symmetric is True
    if group.get("format") not in FORMATS or block is None or not (integers or floats) or type(symmetric) is not bool:
        expected = "integers of 1 to 8 bits by group or channel, or symmetric 8-bit floats, with their block sizes"
        raise published.refuse(f"{key}.weights", expected)
    by_activation = weights.get("actorder") in BY_ACTIVATION
    return Scheme(tuple(targets), bits if integers else None, block, symmetric, by_activation)


def _block(weights: Mapping[str, Any]) -> Block | None:
    """Return rows and columns that share a scale; None if a scheme does not say so."""
    strategy, size, structure = (weights.get(key) for key in ("strategy", "group_size", "block_structure"))
    if strategy == "tensor":
        return None, None
    if strategy == "channel" and size in (None, -1):
        return 1, None
    if strategy == "block" and isinstance(structure, list):
        rows, columns = structure if len(structure) == 2 else (None, None)
    else:
        rows, columns = 1, size if strategy == "group" else None
    sizes = (type(edge) is int and edge > 0 for edge in (rows, columns))
    return (rows, columns) if all(sizes) else None


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
