"""Small models in the forms in which originals are published, and twins in bfloat16 that hold the same numbers."""

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from helpers.walk import walk
from vllm_latq.format.verify import verify
from vllm_latq.quantize.certificate.certificate import verify_certificate
from vllm_latq.quantize.model.decoder import Decoder
from vllm_latq.quantize.model.loading import load_model
from vllm_latq.quantize.pipeline import quantize_checkpoint
from vllm_latq.quantize.plan import plan
from vllm_latq.quantize.recipe import Recipe

LARGEST = torch.finfo(torch.float8_e4m3fn).max
TOKENS = torch.randint(3, 2048, (3, 20), generator=torch.Generator().manual_seed(1))
# From name and bfloat16 matrices: the tensors to store in their place, and the same numbers in bfloat16.
Pack = Callable[[str, torch.Tensor], tuple[dict[str, torch.Tensor], torch.Tensor] | None]


def publish(source: Path, target: Path, pack: Pack, quantization: dict[str, Any], **config: Any) -> Path:
    """Write a model in a form of originals, and beside it the same model in bfloat16, `-twin`.

    Args:
        source: directory of a model in one file.
        target: of the model that is written.
        pack: gets every tensor; None leaves it in bfloat16.
        quantization: `quantization_config` of the model that is written.
        config: other keys of its config.json.

    Returns:
        The twin.
    """
    twin = target.with_name(f"{target.name}-twin")
    for folder in (target, twin):
        shutil.copytree(source, folder)
    stored, plain = {}, {}
    for name, tensor in load_file(source / "model.safetensors").items():
        plain[name] = tensor.bfloat16() if tensor.is_floating_point() else tensor
        parts, plain[name] = pack(name, plain[name]) or ({name: plain[name]}, plain[name])
        stored.update(parts)
    for folder, tensors, extra in ((target, stored, {"quantization_config": quantization} | config), (twin, plain, {})):
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
        own = json.loads((source / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(own | {"dtype": "bfloat16"} | extra))
    return twin


def check_quantized_alike(source: Path, twin: Path, recipe: Recipe, text: Path) -> None:
    """Assert that a model and its twin give the same checkpoints, plans and logits."""
    for folder in (source, twin):
        quantize_checkpoint(recipe, folder, folder / "out", calibration=str(text))
    plans = [plan(recipe, folder) for folder in (source, twin)]
    for planned in plans:
        planned["needs"].pop("reads")  # the files of the two differ in size
    assert plans[0] == plans[1]
    found, expected = ({file.name: file for file in (folder / "out").iterdir()} for folder in (source, twin))
    assert found.keys() == expected.keys()
    for file in found.keys() - {"README.md", "latq_report.json"}:  # these have times and the source's name
        assert found[file].read_bytes() == expected[file].read_bytes(), file
    assert list(verify(source / "out")) == []
    assert list(verify_certificate(source / "out", source, str(text))) == []
    (model, _), (reference, _) = (load_model(folder, "cpu") for folder in (source, twin))
    with torch.no_grad():
        logits = reference(TOKENS).logits
        torch.testing.assert_close(model(TOKENS).logits, logits, rtol=0, atol=0)
        torch.testing.assert_close(walk(Decoder(source, "cpu"), TOKENS, len(TOKENS)), logits, rtol=0, atol=0)


def change(model: Path, edit: Callable[[dict[str, torch.Tensor], dict[str, Any]], Any]) -> None:
    """Edit the tensors and the config.json of a model in one file."""
    tensors, config = load_file(model / "model.safetensors"), json.loads((model / "config.json").read_text())
    edit(tensors, config)
    save_file(tensors, model / "model.safetensors", metadata={"format": "pt"})
    (model / "config.json").write_text(json.dumps(config))


def in_float8(source: Path, target: Path, block: tuple[int, int] | None, input_scales: bool = False) -> Path:
    """Publish a model as DeepSeek-V3 and others are: with block matrices in 8-bit floats.

    Args:
        source, target: see `publish`.
        block: rows and columns that have a scale; None for one scale per matrix.
        input_scales: store scales of the linears' inputs, too.

    Returns:
        The twin: the same matrices times their scales, in bfloat16.
    """

    def pack(name: str, tensor: torch.Tensor) -> tuple[dict[str, torch.Tensor], torch.Tensor] | None:
        # Routers and convolutions stay as they are, here as there.
        if ".layers." not in name or tensor.dim() < 2 or any(part in name for part in ("mlp.gate.", "conv")):
            return None
        matrices = tensor.reshape(-1, *tensor.shape[-2:])
        pairs = [quantized(matrix.float(), block or tuple(matrix.shape)) for matrix in matrices]
        codes, scales = (
            torch.stack(parts).reshape(*tensor.shape[:-2], *parts[0].shape) for parts in zip(*pairs, strict=True)
        )
        stored = {name: codes, f"{name}_scale_inv": scales if block else scales.reshape(scales.shape[:-2])}
        if input_scales:
            linear = name.removesuffix("weight")
            stored[f"{linear}activation_scale" if linear != name else f"{name}_activation_scale"] = torch.tensor(0.5)
        plain = torch.stack([_product(*pair, block or tuple(tensor.shape[-2:])) for pair in pairs])
        return stored, plain.reshape(tensor.shape).bfloat16()

    quantization = {"quant_method": "fp8", "weight_block_size": block and list(block), "activation_scheme": "dynamic"}
    return publish(source, target, pack, quantization)


def in_float8_and_float4(source: Path, target: Path, block: tuple[int, int]) -> Path:
    """Publish a model as DeepSeek-V4 is: scales are powers of two, and experts are in 4-bit floats.

    The twin's matrices come from transformers' own dequantization, which wants whole blocks.
    """
    # transformers cannot import this module before its models.
    from transformers.integrations.finegrained_fp8 import Fp8Dequantize

    def pack(name: str, tensor: torch.Tensor) -> tuple[dict[str, torch.Tensor], torch.Tensor] | None:
        if not name.endswith(".weight") or tensor.dim() < 2 or not re.search(r"\.(ffn\.[es]|attn\.w)", name):
            return None
        scale = f"{name.removesuffix('weight')}scale"
        if ".experts." in name:
            codes, scales = random_float4(*tensor.shape)
            codes = codes.view(torch.int8)
        else:
            codes, scales = quantized(tensor.float(), block, power_of_two=True)
        scales = scales.to(torch.float8_e8m0fnu)
        return {name: codes, scale: scales}, Fp8Dequantize(None)._dequantize_one(codes, scales)

    quantization = {"quant_method": "fp8", "fmt": "e4m3", "scale_fmt": "ue8m0", "weight_block_size": list(block)}
    return publish(source, target, pack, quantization | {"activation_scheme": "dynamic"}, expert_dtype="fp4")


def random_float4(rows: int, columns: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return random bytes [rows, columns / 2], every one a pair of 4-bit floats, and scales [rows, columns / 32]."""
    return torch.randint(256, (rows, columns // 2), dtype=torch.uint8), 2.0 ** torch.randint(
        -8, -3, (rows, columns // 32)
    )


def quantized(
    matrix: torch.Tensor, block: tuple[int, ...], power_of_two: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return 8-bit floats, and a scale per block: its largest magnitude over the largest 8-bit float."""
    grid = [[part.abs().max() / LARGEST for part in band.split(block[1], 1)] for band in matrix.split(block[0])]
    scales = torch.tensor(grid)
    if power_of_two:
        scales = scales.log2().ceil().exp2()
    return (matrix / _spread(scales, matrix.shape, block)).to(torch.float8_e4m3fn), scales


def _product(codes: torch.Tensor, scales: torch.Tensor, block: tuple[int, ...]) -> torch.Tensor:
    return codes.float() * _spread(scales, codes.shape, block)


def _spread(scales: torch.Tensor, shape: torch.Size, block: tuple[int, ...]) -> torch.Tensor:
    """Return the scale of every element."""
    rows, columns = (torch.arange(size) // edge for size, edge in zip(shape, block, strict=True))
    return scales[rows][:, columns]
