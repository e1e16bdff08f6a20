"""The statistics of a model on disk, in a file per part: H and G of each linear, see `fisher`.

Invariant: files are written atomically and never modified; a modified file is rejected.
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
    """The statistics of a model on disk, one safetensors file per part.

    Attributes:
        source: digest of the tensors of each part of the model. Every file depends on all of them, and notes them.
        noted: part -> `source` as noted in its file, of the files that were read.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.source: list[str] = []
        self.noted: dict[int, list[str]] = {}
        self._checked: set[int] = set()  # parts whose file is known to be what was written

    def path(self, part: int) -> Path:
        """Return the file of a part."""
        return self.directory / f"statistics-{part:05d}.safetensors"

    def write(self, part: int, statistics: Mapping[str, LayerStatistics]) -> None:
        """Write the statistics of a part atomically."""
        tensors = {}
        layers = json.dumps({name: (layer.tokens, layer.leader, layer.note) for name, layer in statistics.items()})
        for name, layer in statistics.items():
            if layer.leader == name:
                tensors[f"{name}.inputs"] = layer.inputs.cpu()
            for index, gram in enumerate(layer.outputs):
                tensors[f"{name}.outputs.{index}"] = gram.cpu()
        temporary = self.path(part).with_suffix(".tmp")
        with named_failures(self.directory):
            self.directory.mkdir(parents=True, exist_ok=True)
            source = json.dumps(self.source)
            fingerprint = _fingerprint(part, f"{layers} {source}", tensors)
            metadata = {"layers": layers, "source": source, "fingerprint": fingerprint}
            save_file(tensors, temporary, metadata=metadata)
            rename_durably(temporary, self.path(part))

    def read(self, part: int) -> dict[str, LayerStatistics]:
        """Return linear -> statistics of a part, in no particular order; CheckpointError if the file is damaged."""
        path, hint = self.path(part), "Remove it and continue with --resume: it is collected again."
        with readable(path, hint), safe_open(path, framework="pt", device="cpu") as file:
            metadata = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        layers = metadata.get("layers", "")
        source = metadata.get("source", "")
        if part not in self._checked and metadata.get("fingerprint") != _fingerprint(
            part, f"{layers} {source}", tensors
        ):
            raise CheckpointError(str(path), f"the statistics of part {part} as they were written", "others", hint)
        self._checked.add(part)
        self.noted[part] = json.loads(source)
        found = {}
        for name, (tokens, leader, note) in json.loads(layers).items():
            count = sum(key.startswith(f"{name}.outputs.") for key in tensors)
            outputs = [tensors[f"{name}.outputs.{index}"] for index in range(count)]
            found[name] = LayerStatistics(tensors[f"{leader}.inputs"], outputs, tokens, leader, note)
        return found

    def complete(self, parts: Iterable[int]) -> bool:
        """Return whether every file is there."""
        return all(self.path(part).exists() for part in parts)


def _fingerprint(part: int, noted: str, tensors: Mapping[str, torch.Tensor]) -> str:
    return fingerprint_of([f"{part} {noted}", *(tensor_digest(name, tensor) for name, tensor in tensors.items())])
