"""The statistics of a model on disk, in a file per block: H and G of each linear, see `statistics`.

Invariant: a file appears complete or not at all, and is never changed.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from vllm_latq.quantize.writer import rename_durably
from vllm_latq.store import readable


@dataclass(frozen=True)
class LayerStatistics:
    """Grams of one linear, means over tokens.

    Attributes:
        inputs: float32 [c, c], E[x x^T].
        outputs: float32 [b, b] each, the diagonal blocks of E[g g^T] that cover the r outputs in order; nats^2.
        tokens: number of tokens that reach it.
        group: name of the first linear that reads the same input.
        note: what its record says about them; empty if nothing.
    """

    inputs: torch.Tensor
    outputs: list[torch.Tensor]
    tokens: int
    group: str
    note: str = ""

    def to(self, device: torch.device) -> "LayerStatistics":
        outputs = [gram.to(device) for gram in self.outputs]
        return replace(self, inputs=self.inputs.to(device), outputs=outputs)


class StatisticsFiles:
    """The statistics of a model on disk, one safetensors file per block; the head is block `len(decoder)`."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory

    def path(self, block: int) -> Path:
        return self.directory / f"statistics-{block:05d}.safetensors"

    def write(self, block: int, statistics: Mapping[str, LayerStatistics]) -> None:
        """Atomically."""
        tensors, metadata = {}, {}
        for name, layer in statistics.items():
            metadata[name] = f"{layer.tokens} {layer.group} {layer.note}"
            if layer.group == name:
                tensors[f"{name}.inputs"] = layer.inputs.cpu()
            for index, gram in enumerate(layer.outputs):
                tensors[f"{name}.outputs.{index}"] = gram.cpu()
        self.directory.mkdir(parents=True, exist_ok=True)
        temporary = self.path(block).with_suffix(".tmp")
        save_file(tensors, temporary, metadata=metadata)
        rename_durably(temporary, self.path(block))

    def read(self, block: int) -> dict[str, LayerStatistics]:
        """Linear name -> its statistics, in no particular order; CheckpointError if damaged."""
        with (
            readable(self.path(block), "Remove it and go on with --resume: it is collected again."),
            safe_open(self.path(block), framework="pt", device="cpu") as file,
        ):
            inputs: dict[str, torch.Tensor] = {}
            found = {}
            names = set(file.keys())
            for name, text in (file.metadata() or {}).items():
                tokens, group, note = text.split(" ", 2)
                if group not in inputs:
                    inputs[group] = file.get_tensor(f"{group}.inputs")
                count = sum(key.startswith(f"{name}.outputs.") for key in names)
                outputs = [file.get_tensor(f"{name}.outputs.{index}") for index in range(count)]
                found[name] = LayerStatistics(inputs[group], outputs, int(tokens), group, note)
        return found

    def complete(self, blocks: Iterable[int]) -> bool:
        """Whether nothing is left to collect."""
        return all(self.path(block).exists() for block in blocks)
