"""Small models in 8-bit floats, in the form in which DeepSeek-V3 and others are published."""

import json
import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

LARGEST = torch.finfo(torch.float8_e4m3fn).max


def in_float8(source: Path, target: Path, block: tuple[int, int] | None, input_scales: bool = False) -> Path:
    """Write a model whose block matrices are 8-bit floats, and beside it the same model in bfloat16, `-twin`.

    Args:
        source: directory of a model in one file.
        target: of the model in 8-bit floats.
        block: rows and columns that have a scale; None for one scale per matrix.
        input_scales: store scales of the linears' inputs, too.

    Returns:
        The twin: the same matrices times their scales, in bfloat16.
    """
    twin = target.with_name(f"{target.name}-twin")
    for folder in (target, twin):
        shutil.copytree(source, folder)
    stored, plain = {}, {}
    for name, tensor in load_file(source / "model.safetensors").items():
        stored[name] = plain[name] = tensor.bfloat16() if tensor.is_floating_point() else tensor
        # Routers and convolutions stay as they are, here as there.
        if ".layers." not in name or tensor.dim() < 2 or any(part in name for part in ("mlp.gate.", "conv")):
            continue
        matrices = tensor.reshape(-1, *tensor.shape[-2:])
        pairs = [_quantized(matrix.float(), block or tuple(matrix.shape)) for matrix in matrices]
        codes, scales = (
            torch.stack(parts).reshape(*tensor.shape[:-2], *parts[0].shape) for parts in zip(*pairs, strict=True)
        )
        stored[name] = codes
        stored[f"{name}_scale_inv"] = scales if block else scales.reshape(scales.shape[:-2])
        plain[name] = torch.stack([_product(*pair, block or tuple(tensor.shape[-2:])) for pair in pairs])
        plain[name] = plain[name].reshape(tensor.shape).bfloat16()
        if input_scales:
            linear = name.removesuffix("weight")
            stored[f"{linear}activation_scale" if linear != name else f"{name}_activation_scale"] = torch.tensor(0.5)
    quantization = {"quant_method": "fp8", "weight_block_size": block and list(block), "activation_scheme": "dynamic"}
    for folder, tensors, extra in ((target, stored, {"quantization_config": quantization}), (twin, plain, {})):
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
        config = json.loads((source / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(config | {"dtype": "bfloat16"} | extra))
    return twin


def _quantized(matrix: torch.Tensor, block: tuple[int, ...]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return 8-bit floats, and a scale per block: its largest magnitude over the largest 8-bit float."""
    grid = [[part.abs().max() / LARGEST for part in band.split(block[1], 1)] for band in matrix.split(block[0])]
    scales = torch.tensor(grid)
    return (matrix / _spread(scales, matrix.shape, block)).to(torch.float8_e4m3fn), scales


def _product(codes: torch.Tensor, scales: torch.Tensor, block: tuple[int, ...]) -> torch.Tensor:
    return codes.float() * _spread(scales, codes.shape, block)


def _spread(scales: torch.Tensor, shape: torch.Size, block: tuple[int, ...]) -> torch.Tensor:
    """Return the scale of every element."""
    rows, columns = (torch.arange(size) // edge for size, edge in zip(shape, block, strict=True))
    return scales[rows][:, columns]
