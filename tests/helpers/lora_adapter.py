"""A random LoRA adapter for a model, in the files that PEFT writes."""

import json
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file

RANK = 8
SIZE = 0.3  # what the adapter adds to the outputs of a layer, relative to them: enough to change tokens


def write_adapter(directory: Path, model: Path) -> Path:
    """Write an adapter for the linears in the blocks of a dense model, float32; return its directory."""
    generator = torch.Generator().manual_seed(0)
    tensors = {}
    with safe_open(model / "model.safetensors", framework="pt") as stored:
        names = stored.keys()
        shapes = {name: stored.get_slice(name).get_shape() for name in names}
    linears = {name.removesuffix(".weight"): shape for name, shape in shapes.items() if name.endswith("_proj.weight")}
    for linear, (rows, cols) in linears.items():
        prefix = f"base_model.model.{linear}"
        tensors[f"{prefix}.lora_A.weight"] = torch.randn(RANK, cols, generator=generator) / cols**0.5
        tensors[f"{prefix}.lora_B.weight"] = SIZE * torch.randn(rows, RANK, generator=generator)
    directory.mkdir()
    save_file(tensors, directory / "adapter_model.safetensors", metadata={"format": "pt"})
    config = {
        **{"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": RANK, "lora_alpha": RANK, "bias": "none"},
        "target_modules": sorted({linear.rpartition(".")[2] for linear in linears}),
    }
    (directory / "adapter_config.json").write_text(json.dumps(config))
    return directory
