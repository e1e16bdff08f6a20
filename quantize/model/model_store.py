"""The files of a model, seen as the tensors that it is quantized with: those stored, parts of them, or several joined.

    experts.gate_up_proj [experts, 2 * intermediate, hidden]  ->  experts.0.gate_proj.weight, experts.0.up_proj.weight
    experts.down_proj    [experts, hidden, intermediate]      ->  experts.0.down_proj.weight
    experts.down_proj_bias [experts, hidden]                  ->  experts.0.down_proj.bias
    moe.gate_proj.weight [experts, intermediate, hidden]      ->  moe.experts.0.gate_proj.weight
    q_conv1d.weight, k_conv1d.weight, v_conv1d.weight         ->  conv1d.weight

Some families store experts with their last two dimensions exchanged, or the rows of gate and up alternating. Invariant:
the matrices of one expert are read at a time, never the tensor that holds them all. What is joined can be read, but
`names` has its parts: they are written.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from vllm_latq.errors import UnsupportedModelError
from vllm_latq.models.experts import BIAS, FUSED, is_interleaved, is_transposed, matrices_shape
from vllm_latq.models.stored_names import fused_tensors, joined_tensors
from vllm_latq.quantize.model.originals.store import OriginalStore


@dataclass(frozen=True)
class _Matrix:
    """Rows of one expert in a stored tensor, which holds columns where it is transposed; or a part of its biases."""

    tensor: str
    expert: int
    rows: slice
    columns: int | None
    transposed: bool

    @property
    def shape(self) -> tuple[int, ...]:
        count = len(range(self.rows.start, self.rows.stop, self.rows.step or 1))
        return (count,) if self.columns is None else (count, self.columns)


class ModelStore(OriginalStore):
    """The safetensors files of a Hugging Face model directory, with experts one by one, and what its model joins.

    Args:
        directory: of the model.
    """

    def __init__(self, directory: str | Path) -> None:
        super().__init__(directory)
        self._matrices: dict[str, _Matrix] = {}
        self._hidden: set[str] = set()
        self._joined: dict[str, list[str]] = {}

    def __contains__(self, name: str) -> bool:
        return (
            name in self._matrices or name in self._joined or (name not in self._hidden and super().__contains__(name))
        )

    def names(self) -> Iterable[str]:
        """Names of all tensors, with the matrices of stacked experts in place of the stacks."""
        return [*(name for name in super().names() if name not in self._hidden), *self._matrices]

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of one tensor, from its file's header; raises CheckpointError if it is missing."""
        if name in self._joined:
            first, *_ = shapes = [super(ModelStore, self).shape(part) for part in self._joined[name]]
            return sum(shape[0] for shape in shapes), *first[1:]
        return self._matrices[name].shape if name in self._matrices else super().shape(name)

    def get(self, name: str) -> torch.Tensor:
        """One tensor on the CPU.

        Raises:
            CheckpointError: it is missing, or its file is damaged.
            UnsupportedModelError: parts of several dtypes.
        """
        if name in self._joined:
            parts = [super(ModelStore, self).get(part) for part in self._joined[name]]
            for part, tensor in zip(self._joined[name], parts, strict=True):
                if tensor.dtype != parts[0].dtype:
                    wanted = f"{parts[0].dtype} like {self._joined[name][0]}, with which it makes {name}"
                    raise UnsupportedModelError(f"{self.directory}: {part}", wanted, f"{tensor.dtype}")
            return torch.cat(parts)
        if name not in self._matrices:
            return super().get(name)
        at = self._matrices[name]
        if at.rows.step:  # which no part of a file has
            whole = self.part(at.tensor, (at.expert,))
            return (whole.T if at.transposed else whole)[at.rows].contiguous()
        if at.transposed:
            return self.part(at.tensor, (at.expert, slice(None), at.rows)).T.contiguous()
        return self.part(at.tensor, (at.expert, at.rows))

    def stored(self, name: str) -> list[str]:
        """Stored tensors that a tensor is read from: itself, or the tensors that are joined to it."""
        return self._joined.get(name, [name])

    def fit(self, model: Any) -> None:
        """Show the tensors of a model: experts one by one, and joined what its model joins.

        Args:
            model: as transformers makes it, on the meta device; says which tensors hold experts, and their shapes.

        Raises:
            UnsupportedModelError: a tensor of experts of another shape than the model's, experts stored twice, parts to
                be joined that do not fit each other.
        """
        self._joined = joined_tensors(model, list(super().names()))
        for name, (first, *others) in self._joined.items():
            expected = super().shape(first)[1:]
            for part in (first, *others):
                shape = super().shape(part)
                if not shape or shape[1:] != expected:
                    wanted = f"shape [rows, {', '.join(map(str, expected))}] like {first}, with which it makes {name}"
                    raise UnsupportedModelError(f"{self.directory}: {part}", wanted, str(list(shape)))
        for name, tensors in fused_tensors(model, list(super().names())).items():
            self._split(tensors, name, model.get_submodule(name))
            self._hidden.update(tensors.values())
        for name, matrix in self._matrices.items():
            if super().__contains__(name):
                hint = "Remove one of them from the checkpoint."
                where, found = f"{self.directory}: {name}", f"also a part of {matrix.tensor}"
                raise UnsupportedModelError(where, "each expert stored once", found, hint)

    def _split(self, tensors: Mapping[str, str], name: str, fused: Any) -> None:
        """Name the matrices and biases of a layer's experts, the module `name`, by its stored `tensors`."""
        # Tensors named as those of a linear are a level above those of single experts.
        linears = {leaf: tensor.removesuffix(f".{leaf}.weight") + ".experts" for leaf, tensor in tensors.items()}
        stems = {
            linears[leaf] if tensor.endswith(".weight") else tensor.removesuffix(f".{leaf}")
            for leaf, tensor in tensors.items()
        }
        stem = stems.pop() if len(stems) == 1 else name
        for leaf in tensors:
            kind, matrix = ("bias", leaf.removesuffix(BIAS)) if leaf.endswith(BIAS) else ("weight", leaf)
            single = not hasattr(fused, matrix)  # gate or up, which are not in one tensor
            count, rows, columns = matrices_shape(fused, "gate_up_proj" if single else matrix)
            rows = rows // 2 if single else rows
            expected = (count, rows, columns) if single else tuple(fused.get_parameter(leaf).shape)
            found = super().shape(tensors[leaf])
            if found not in ([(count, rows)] if kind == "bias" else [(count, rows, columns), (count, columns, rows)]):
                where = f"{self.directory}: {tensors[leaf]}"
                raise UnsupportedModelError(where, f"shape {expected}", f"{found}", "Is config.json its own?")
            # Stored as its model holds it, or the other way round.
            transposed = kind == "weight" and is_transposed(fused) == (found == expected)
            parts = (matrix,) if single else FUSED[matrix]
            for part, projection in enumerate(parts):
                own = _rows(part, len(parts), rows, is_interleaved(fused))
                for expert in range(count):
                    at = _Matrix(tensors[leaf], expert, own, columns if kind == "weight" else None, transposed)
                    self._matrices[f"{stem}.{expert}.{projection}.{kind}"] = at


def _rows(part: int, parts: int, rows: int, interleaved: bool) -> slice:
    """Return which of `rows` belong to one of the linears of a matrix, which follow one another or alternate."""
    if interleaved and parts > 1:
        return slice(part, rows, parts)
    size = rows // parts
    return slice(part * size, (part + 1) * size)
