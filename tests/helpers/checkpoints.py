"""Checkpoints of a few kilobytes, one per encoding: complete, valid, and small enough to be damaged thousands of times.

Shapes are odd on purpose: 3-bit codes straddle words, chunks are cut at both edges, one matrix has a single row.
"""

import json
from functools import cache
from pathlib import Path

import torch
from safetensors.torch import save_file

from vllm_latq.coding.huffman.encoder import encode
from vllm_latq.format.coded import HuffmanWeight, RansWeight, Weight
from vllm_latq.format.config import CheckpointConfig, LayerScheme
from vllm_latq.format.packed import PackedWeight
from vllm_latq.format.reader import config_digest, fingerprint_of, tensor_digest

SHAPES = {"layers.0.up": (9, 66), "layers.0.down": (40, 36), "layers.1.up": (1, 33)}
SCHEMES = {
    "ssqr": LayerScheme("packed", 3, -1, True),
    "packed": LayerScheme("packed", 4, 3, False),
    "midrise": LayerScheme("packed", 2, 3, True, grid="midrise"),
    "huffman": LayerScheme("huffman"),
    "rans": LayerScheme("rans"),
}


@cache
def tiny_weight(scheme: LayerScheme, shape: tuple[int, int], seed: int) -> Weight:
    """A random weight [rows, cols] stored under `scheme`; a tenth are outliers where the scheme has them."""
    generator = torch.Generator().manual_seed(seed)
    integers = (2 * torch.randn(shape, generator=generator)).round().to(torch.int32)
    if scheme.encoding == "huffman":
        integers[0, 0] = 2**24 + 1  # takes the way of ESCAPE, and is no number of float32
        return HuffmanWeight(torch.tensor([0.01]), encode(integers))
    if scheme.encoding == "rans":
        integers = (integers * torch.linspace(0.1, 3, shape[1])).round().to(torch.int32)
        integers[-1, -1], integers[0, 0] = 2**24 + 1, 2**31 - 1  # take the way of ESCAPE, and are no numbers of float32
        rows, cols = (torch.randint(-9, 9, (size,), generator=generator).to(torch.int8) for size in shape)
        return RansWeight.from_integers(integers, torch.tensor([0.01]), rows, cols, scheme.grid == "midrise")
    half = 1 << (scheme.bits - 1)
    mask = torch.rand(shape, generator=generator) < 0.1
    values = torch.randn(shape, generator=generator)
    scales = (torch.rand(shape[0], scheme.groups(shape[1]), generator=generator) + 0.1).to(torch.bfloat16)
    outliers = (mask, values) if scheme.outliers else (None, None)
    integers = integers.clamp(-half, half - 1)
    return PackedWeight.from_integers(
        integers, scales, scheme.bits, scheme.group_size, *outliers, scheme.grid == "midrise"
    )


def write_tiny_checkpoint(directory: Path, encoding: str) -> Path:
    """Write a checkpoint with two shards, an index, a report and a fingerprint; returns its directory."""
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
                "fingerprint": fingerprint_of([config_digest(config), *digests]),
            }
        },
    }
    for file, value in documents.items():
        (directory / file).write_text(json.dumps(value))
    return directory


def list_twice(path: Path) -> str:
    """Let the header of a safetensors file list one tensor twice, first as an empty one; returns its name."""
    content = path.read_bytes()
    end = 8 + int.from_bytes(content[:8], "little")
    name = next(name for name in json.loads(content[8:end]) if name != "__metadata__")
    empty = json.dumps({name: {"dtype": "U8", "shape": [0], "data_offsets": [0, 0]}})
    header = f"{empty[:-1]},".encode() + content[9:end]
    path.write_bytes(len(header).to_bytes(8, "little") + header + content[end:])
    return name
