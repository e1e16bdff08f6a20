"""Models published in 8-bit floats: quantized as what these are times their scales, byte for byte."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from helpers.float8 import in_float8
from helpers.mixtures import fuse_experts
from helpers.walk import walk
from vllm_latq.errors import LatqError, NumericalError, UnsupportedModelError
from vllm_latq.format.verify import verify
from vllm_latq.quantize.certificate.certificate import verify_certificate
from vllm_latq.quantize.model.decoder import Decoder
from vllm_latq.quantize.model.float8_store import Float8Store
from vllm_latq.quantize.model.loading import load_model
from vllm_latq.quantize.model.meta_model import model_config
from vllm_latq.quantize.pipeline import quantize_checkpoint
from vllm_latq.quantize.plan import plan
from vllm_latq.quantize.recipe import Recipe

SAMPLES = {"num_samples": 4, "seq_len": 32}
RTN = Recipe("rtn", 4, group_size=16)
# An ignored linear is stored as bfloat16.
SSQR = Recipe("ssqr", 3, group_size=16, outlier_rate=0.02, ignore=("0.mlp.up_proj",), **SAMPLES)
LATENT = {
    **{"q_lora_rank": 24, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8},
    **{"n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1},
    "num_key_value_heads": 4,
}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "shared_expert_intermediate_size": 48}
LINEAR = {"linear_num_key_heads": 2, "linear_num_value_heads": 2, "linear_key_head_dim": 8, "linear_value_head_dim": 8}
# Family, its sizes, block (or one scale for a matrix), recipe. Blocks at the edges are smaller but for the last.
FAMILIES: dict[str, tuple[str, dict[str, Any], tuple[int, int] | None, Recipe]] = {
    "dense": ("qwen3", {}, (20, 12), SSQR),
    "one scale": ("ministral3", {}, None, Recipe("hptq", bits=3.5, **SAMPLES)),
    "latent": ("deepseek_v3", LATENT, (20, 12), Recipe("latq", bits=3.5, **SAMPLES)),
    "fused": (
        "qwen3_5_moe_text",
        EXPERTS | LINEAR | {"layer_types": ["linear_attention", "full_attention"]},
        (16, 16),
        Recipe("gptq", 4, group_size=16, **SAMPLES),
    ),
}
TOKENS = torch.randint(3, 2048, (3, 20), generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("name", FAMILIES)
def test_quantized_as_their_products(
    name: str, random_model: Any, mini_model: Path, calibration_text: Path, tmp_path: Path
) -> None:
    family, sizes, block, recipe = FAMILIES[name]
    plain, _ = random_model(family, f"plain-{family}", **sizes)
    if name == "fused":
        fuse_experts(plain)
    source = tmp_path / "float8"
    twin = in_float8(plain, source, block, input_scales=True)
    text = str(calibration_text)
    for folder in (source, twin):
        quantize_checkpoint(recipe, folder, folder / "out", calibration=text)
    assert plan(recipe, source) == plan(recipe, twin)
    found, expected = ({file.name: file for file in (folder / "out").iterdir()} for folder in (source, twin))
    assert found.keys() == expected.keys()
    for file in found.keys() - {"README.md", "latq_report.json"}:  # these have times and the source's name
        assert found[file].read_bytes() == expected[file].read_bytes(), file
    assert list(verify(source / "out")) == []
    assert list(verify_certificate(source / "out", source, text)) == []
    (model, _), (reference, _) = (load_model(folder, "cpu") for folder in (source, twin))
    with torch.no_grad():
        logits = reference(TOKENS).logits
        torch.testing.assert_close(model(TOKENS).logits, logits, rtol=0, atol=0)
        torch.testing.assert_close(walk(Decoder(source, "cpu"), TOKENS, len(TOKENS)), logits, rtol=0, atol=0)


def test_as_transformers_multiplies_them(random_model: Any, tmp_path: Path) -> None:
    plain, _ = random_model("qwen3")
    source = tmp_path / "float8"
    in_float8(plain, source, (16, 8))
    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.bfloat16)
    decoder = Decoder(source, "cpu")
    with decoder.block(1) as block:
        for name, parameter in block.named_parameters():
            # Older versions round the scale to bfloat16 as well.
            theirs = model.model.layers[1].get_parameter(name).float()
            torch.testing.assert_close(parameter, theirs, rtol=2**-7, atol=0, msg=name)


UP = "model.layers.1.mlp.up_proj.weight"
SCALES = f"{UP}_scale_inv"
Q_SCALES = "model.layers.1.self_attn.q_proj.weight_scale_inv"


def _changed(source: Path, change: Callable[[Any, Any], Any]) -> None:
    tensors, config = load_file(source / "model.safetensors"), json.loads((source / "config.json").read_text())
    change(tensors, config)
    save_file(tensors, source / "model.safetensors", metadata={"format": "pt"})
    (source / "config.json").write_text(json.dumps(config))


@pytest.mark.parametrize("block", [[10**12, 2**70], None], ids=["huge blocks", "none"])
def test_one_scale_whatever_the_block(block: list[int] | None, random_model: Any, tmp_path: Path) -> None:
    """A block larger than the matrix, in the other of the two formats; scales in eight bits, too."""
    plain, _ = random_model("qwen3")
    in_float8(plain, tmp_path / "float8", (48, 32))
    codes = torch.randn(48, 32).to(torch.float8_e5m2)
    scale = torch.full((1, 1), 0.25).to(torch.float8_e8m0fnu)

    def change(tensors: dict[str, Any], config: dict[str, Any]) -> None:
        tensors |= {
            UP: codes,
            SCALES: scale,
            "lm_head.weight_scale_inv": torch.ones(1),
            "other_scale_inv": torch.ones(1),
        }
        config["quantization_config"]["weight_block_size"] = block

    _changed(tmp_path / "float8", change)
    store = Float8Store(tmp_path / "float8")
    assert torch.equal(store.get(UP), (codes.float() / 4).bfloat16())
    assert "other_scale_inv" in store.names(), "it is of nothing"
    assert "other_scale_inv" in store
    assert SCALES not in store
    assert not any(name.startswith("model.") and name.endswith("_scale_inv") for name in store.names())


def test_an_empty_matrix_has_no_blocks(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(
        '{"quantization_config": {"quant_method": "fp8", "weight_block_size": [4, 4]}}'
    )
    empty = {"a": torch.empty(0, 8), "b": torch.empty(2, 0, 8)}
    save_file({name: tensor.to(torch.float8_e4m3fn) for name, tensor in empty.items()}, tmp_path / "model.safetensors")
    store = Float8Store(tmp_path)
    for name, tensor in empty.items():
        assert torch.equal(store.get(name), tensor.bfloat16())


def test_said_by_the_language_model_alone(random_model: Any, tmp_path: Path) -> None:
    """As in multimodal models; nothing of it is left in what is written."""
    plain, _ = random_model("qwen3")
    source = tmp_path / "float8"
    in_float8(plain, source, (16, 12))
    _changed(
        source, lambda _, config: config.update(text_config={"quantization_config": config.pop("quantization_config")})
    )
    assert Float8Store(source).get(UP).dtype == torch.bfloat16
    assert "quantization_config" not in model_config(source, untied=False)["text_config"]


def _config(change: dict[str, Any]) -> Callable[[dict[str, Any], dict[str, Any]], None]:
    return lambda _tensors, config: config["quantization_config"].update(change)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (lambda tensors, _: tensors.pop(SCALES), UnsupportedModelError, f"{UP}: expected a tensor {SCALES}"),
        (
            lambda tensors, _: tensors.update({Q_SCALES: tensors[Q_SCALES].T.contiguous()}),
            UnsupportedModelError,
            r"q_proj\.weight_scale_inv: expected scales, shape \(2, 3\), as floats, found shape \(3, 2\)",
        ),
        (
            lambda tensors, _: tensors.update({SCALES: tensors[SCALES][:2].clone()}),
            UnsupportedModelError,
            r"up_proj\.weight_scale_inv: expected scales, shape \(3, 3\), as floats, found shape \(2, 3\)",
        ),
        (
            lambda tensors, _: tensors.update({SCALES: torch.ones(3, 3, dtype=torch.uint8)}),
            UnsupportedModelError,
            r"found shape \(3, 3\) in torch\.uint8",
        ),
        (lambda tensors, _: tensors[SCALES].fill_(torch.nan), NumericalError, r"up_proj\.weight: .*NaN"),
        (
            lambda tensors, _: tensors.update({"model.norm.weight": torch.ones(32).to(torch.float8_e4m3fn)}),
            UnsupportedModelError,
            r"model\.norm\.weight: expected 8-bit floats in matrices alone, found shape \(32,\)",
        ),
        (_config({"weight_block_size": [0, 16]}), UnsupportedModelError, r"weight_block_size: .*found \[0, 16\]"),
        (_config({"weight_block_size": "16"}), UnsupportedModelError, "weight_block_size: .*found '16'"),
        (_config({"weight_block_size": [True, 12]}), UnsupportedModelError, r"weight_block_size: .*found \[True, 12\]"),
        (
            _config({"quant_method": "awq"}),
            UnsupportedModelError,
            "or is published in 8-bit floats.*found quant_method awq",
        ),
        (lambda _, config: config.pop("quantization_config"), UnsupportedModelError, "expected weights in 16 bits"),
    ],
)
def test_refused(
    change: Callable[[Any, Any], Any], error: type[LatqError], message: str, random_model: Any, tmp_path: Path
) -> None:
    plain, _ = random_model("qwen3")
    source = tmp_path / "float8"
    in_float8(plain, source, (16, 12))
    _changed(source, change)
    with pytest.raises(error, match=message):
        quantize_checkpoint(RTN, source, tmp_path / "out")
    assert not (tmp_path / "out").exists()
