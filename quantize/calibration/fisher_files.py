"""The statistics of a model on disk, in a file per block: H and G of each linear, see `statistics`.

Invariant: a file appears complete or not at all, and is never changed; one that was is not read.
"""

import json
from collections.abc import Iterable, Mapping
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from vllm_latq.errors import CheckpointError
from vllm_latq.format.files import readable
from vllm_latq.format.reader import fingerprint_of, tensor_digest
from vllm_latq.quantize.lattice.grams import LayerStatistics
from vllm_latq.quantize.machine.durable_files import named_failures, rename_durably


class StatisticsFiles:
    """The statistics of a model on disk, one safetensors file per block; the head is block `len(decoder)`."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._checked: set[int] = set()  # blocks whose file is known to be what was written

    def path(self, block: int) -> Path:
        return self.directory / f"statistics-{block:05d}.safetensors"

    def write(self, block: int, statistics: Mapping[str, LayerStatistics]) -> None:
        """Atomically."""
        tensors = {}
        layers = json.dumps({name: (layer.tokens, layer.group, layer.note) for name, layer in statistics.items()})
        for name, layer in statistics.items():
            if layer.group == name:
                tensors[f"{name}.inputs"] = layer.inputs.cpu()
            for index, gram in enumerate(layer.outputs):
                tensors[f"{name}.outputs.{index}"] = gram.cpu()
        temporary = self.path(block).with_suffix(".tmp")
        with named_failures(self.directory):
            self.directory.mkdir(parents=True, exist_ok=True)
            metadata = {"layers": layers, "fingerprint": _fingerprint(block, layers, tensors)}
            save_file(tensors, temporary, metadata=metadata)
            rename_durably(temporary, self.path(block))

    def read(self, block: int) -> dict[str, LayerStatistics]:
        """Linear name -> its statistics, in no particular order; CheckpointError if damaged."""
        path, hint = self.path(block), "Remove it and go on with --resume: it is collected again."
        with readable(path, hint), safe_open(path, framework="pt", device="cpu") as file:
            metadata = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        layers = metadata.get("layers", "")
        if block not in self._checked and metadata.get("fingerprint") != _fingerprint(block, layers, tensors):
            raise CheckpointError(str(path), f"the statistics of block {block} as they were written", "others", hint)
        self._checked.add(block)
        found = {}
        for name, (tokens, group, note) in json.loads(layers).items():
            count = sum(key.startswith(f"{name}.outputs.") for key in tensors)
            outputs = [tensors[f"{name}.outputs.{index}"] for index in range(count)]
            found[name] = LayerStatistics(tensors[f"{group}.inputs"], outputs, tokens, group, note)
        return found

    def complete(self, blocks: Iterable[int]) -> bool:
        """Whether nothing is left to collect."""
        return all(self.path(block).exists() for block in blocks)


def _fingerprint(block: int, layers: str, tensors: Mapping[str, torch.Tensor]) -> str:
    return fingerprint_of([f"{block} {layers}", *(tensor_digest(name, tensor) for name, tensor in tensors.items())])
