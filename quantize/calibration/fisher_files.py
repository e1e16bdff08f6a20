"""The statistics of a model on disk, in a file per part: H and G of each linear, see `fisher`."""

from collections.abc import Iterable, Mapping
from pathlib import Path

from vllm_latq.quantize.lattice.grams import LayerStatistics
from vllm_latq.quantize.machine.sealed_files import read_sealed, write_sealed


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
        layers = {name: (layer.tokens, layer.leader, layer.note) for name, layer in statistics.items()}
        tensors = {}
        for name, layer in statistics.items():
            if layer.leader == name:
                tensors[f"{name}.inputs"] = layer.inputs.cpu()
            for index, gram in enumerate(layer.outputs):
                tensors[f"{name}.outputs.{index}"] = gram.cpu()
        write_sealed(self.path(part), {"layers": layers, "source": self.source}, tensors)

    def read(self, part: int) -> dict[str, LayerStatistics]:
        """Return linear -> statistics of a part, in no particular order; CheckpointError if the file is damaged."""
        hint = "Remove it and continue with --resume: it is collected again."
        expected = f"the statistics of part {part}"
        noted, tensors = read_sealed(self.path(part), expected, hint, part not in self._checked)
        self._checked.add(part)
        self.noted[part] = noted["source"]
        found = {}
        for name, (tokens, leader, note) in noted["layers"].items():
            count = sum(key.startswith(f"{name}.outputs.") for key in tensors)
            outputs = [tensors[f"{name}.outputs.{index}"] for index in range(count)]
            found[name] = LayerStatistics(tensors[f"{leader}.inputs"], outputs, tokens, leader, note)
        return found

    def complete(self, parts: Iterable[int]) -> bool:
        """Return whether every file is there."""
        return all(self.path(part).exists() for part in parts)
