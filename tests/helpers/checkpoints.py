"""Checkpoints that tests read, damage or compare: tiny ones, quantized ones beside their dense twins, and edits.

A tiny checkpoint of each encoding has a few kilobytes, is complete and valid, and small enough to be damaged thousands
of times. Its shapes are odd on purpose: 3-bit codes straddle words, chunks are cut at both edges, and one matrix has a
single row.
"""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import load_file, save_file

from helpers.builders import round_to_nearest, tiny_weight
from vllm_latq.errors import LatqError
from vllm_latq.format.config import CheckpointConfig
from vllm_latq.format.reader import CheckpointReader, config_digest, fingerprint_of, tensor_digest
from vllm_latq.format.scheme import LayerScheme
from vllm_latq.format.verify import verify

SHAPES = {"layers.0.up": (9, 66), "layers.0.down": (40, 36), "layers.1.up": (1, 33)}
SCHEMES = {
    "trellis": LayerScheme("trellis"),
    "ssqr": LayerScheme("packed", 3, -1, True),
    "packed": LayerScheme("packed", 4, 3, False),
    "midrise": LayerScheme("packed", 2, 3, True, grid="midrise"),
    "huffman": LayerScheme("huffman"),
}


def write_tiny_checkpoint(directory: Path, encoding: str) -> Path:
    """Write a checkpoint with two shards, an index, a report and a fingerprint; return its directory."""
    scheme = SCHEMES[encoding]
    config = CheckpointConfig(scheme, ignore=("head",), recipe={"method": encoding})
    shards: list[dict[str, torch.Tensor]] = [{"embed.weight": torch.ones(3, 5)}, {"norm.weight": torch.ones(5)}]
    layers = []
    for seed, (name, shape) in enumerate(SHAPES.items()):
        weight = tiny_weight(scheme, shape, seed)
        shards[seed % 2] |= {f"{name}.{suffix}": tensor for suffix, tensor in weight.to_tensors().items()}
        layers.append({"name": name, "shape": list(shape), "error": 0.5, "bound": 1.0, "bound_holds": True})
    files = [f"model-{index:05d}-of-00002.safetensors" for index in (1, 2)]
    weight_map = {name: file for file, tensors in zip(files, shards, strict=True) for name in tensors}
    digests = [tensor_digest(name, tensor) for tensors in shards for name, tensor in tensors.items()]
    directory.mkdir(parents=True)
    for file, tensors in zip(files, shards, strict=True):
        save_file(tensors, directory / file, metadata={"format": "pt"})
    documents = {
        "model.safetensors.index.json": {"metadata": {}, "weight_map": weight_map},
        "latq_report.json": {"layers": layers, "recipe": {"method": encoding}},
        "config.json": {
            "quantization_config": {
                **config.to_dict(),
                "fingerprint": fingerprint_of([config_digest({}, config), *digests]),
            }
        },
    }
    for file, value in documents.items():
        (directory / file).write_text(json.dumps(value))
    return directory


def list_twice(path: Path) -> str:
    """Make the header of a safetensors file list one tensor twice, first as an empty one; return its name."""
    content = path.read_bytes()
    end = 8 + int.from_bytes(content[:8], "little")
    name = next(name for name in json.loads(content[8:end]) if name != "__metadata__")
    empty = json.dumps({name: {"dtype": "U8", "shape": [0], "data_offsets": [0, 0]}})
    header = f"{empty[:-1]},".encode() + content[9:end]
    path.write_bytes(len(header).to_bytes(8, "little") + header + content[end:])
    return name


def problems(directory: Path) -> str:
    """Return what `verify` finds wrong with a checkpoint, a line each; every finding is an error of this project."""
    found = list(verify(directory))
    assert all(isinstance(problem, LatqError) for problem in found)
    return "\n".join(map(str, found))


def edit_json(path: Path, edit: Callable[[Any], object]) -> None:
    """Change the value of a JSON file in place by `edit`."""
    value = json.loads(path.read_text())
    edit(value)
    path.write_text(json.dumps(value))


def edit_tensor(directory: Path, name: str, tensor: torch.Tensor | None) -> None:
    """Replace a stored tensor of a checkpoint, or remove it from its file but not from the index."""
    for shard in directory.glob("*.safetensors"):
        tensors = load_file(shard)
        if tensors.pop(name, None) is not None:
            save_file(tensors | ({} if tensor is None else {name: tensor}), shard)


class CheckpointPair(NamedTuple):
    """A quantized checkpoint, and an unquantized one (float32) with the dequantized weights."""

    latq: Path
    dense: Path


class CheckpointMaker:
    """Writes quantized variants of a model beside their dense twins, by rounding to nearest.

    Args:
        source: model directory with one safetensors file.
        directory: where the checkpoints go.
    """

    def __init__(self, source: Path, directory: Path) -> None:
        self.source, self.directory = source, directory

    def __call__(self, name: str, config: CheckpointConfig, noise_seed: int | None = None) -> CheckpointPair:
        """Quantize every linear that `config` does not ignore. An `lm_head` to be quantized is untied first.

        Args:
            name: the beginning of the names of both directories.
            config: scheme, ignore list and overrides.
            noise_seed: adds a little noise to the weights first, to get another model of the same shape.
        """
        pair = CheckpointPair(self.directory / f"{name}-latq", self.directory / f"{name}-dense")
        tensors = load_file(self.source / "model.safetensors")
        tied = config.is_ignored("lm_head") and "lm_head.weight" not in tensors
        if not tied:
            tensors.setdefault("lm_head.weight", tensors["model.embed_tokens.weight"].clone())
        stored, dense = {}, {}
        generator = None if noise_seed is None else torch.Generator().manual_seed(noise_seed)
        for key, tensor in tensors.items():
            module, original = key.removesuffix(".weight"), tensor.float()
            scheme = config.scheme_for(module)
            if generator is not None and tensor.ndim == 2:
                original += 0.1 * original.std() * torch.randn(original.shape, generator=generator)
            if scheme is None or tensor.ndim != 2 or (module.endswith("embed_tokens") and module not in config.beside):
                stored[key], dense[key] = tensor, tensor.float()
                continue
            weight = round_to_nearest(original, scheme)
            stored |= {f"{module}.{suffix}": value.contiguous() for suffix, value in weight.to_tensors().items()}
            dense[key] = weight.dequantize()
        self._write(pair.latq, stored, {"quantization_config": config.to_dict(), "tie_word_embeddings": tied})
        self._write(pair.dense, dense, {"dtype": "float32", "tie_word_embeddings": tied})
        return pair

    def _write(self, directory: Path, tensors: dict[str, torch.Tensor], changes: dict[str, Any]) -> None:
        directory.mkdir()
        for file in self.source.iterdir():
            if file.name not in ("config.json", "model.safetensors"):
                shutil.copy(file, directory)
        config = json.loads((self.source / "config.json").read_text()) | changes
        (directory / "config.json").write_text(json.dumps(config))
        save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})


def dense_twin(checkpoint: Path, target: Path) -> Path:
    """Write an unquantized float32 model with the dequantized weights of a checkpoint; return its directory."""
    shutil.copytree(checkpoint, target, ignore=shutil.ignore_patterns("*.safetensors*", "latq_report.json"))
    config = json.loads((target / "config.json").read_text())
    del config["quantization_config"], config["transformers_weights"]
    (target / "config.json").write_text(json.dumps(config | {"dtype": "float32"}))
    reader = CheckpointReader(checkpoint)
    dense = {f"{module}.weight": reader.weight(module).dequantize() for module in reader.shapes}
    for name in reader.store.names():
        module, _, leaf = name.rpartition(".")
        if module not in reader.shapes or leaf == "bias":
            dense[name] = reader.store.get(name).float()
    save_file(dense, target / "model.safetensors", metadata={"format": "pt"})
    return target


def without_tensors(source: Path, *names: str) -> Path:
    """Return a copy of a checkpoint that lacks some tensors."""
    target = source.with_name(f"{source.name}-without-{names[0]}")
    shutil.copytree(source, target)
    tensors = load_file(target / "model.safetensors")
    for name in names:
        del tensors[name]
    save_file(tensors, target / "model.safetensors", metadata={"format": "pt"})
    return target
