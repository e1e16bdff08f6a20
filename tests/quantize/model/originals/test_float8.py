"""Models published in 8-bit floats: quantized as what these are times their scales, byte for byte."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM

from helpers.mixtures import fuse_experts
from helpers.originals import change, check_quantized_alike, in_float8, in_float8_and_float4
from helpers.random_models import SMALL_V4
from vllm_latq.errors import LatqError, NumericalError, UnsupportedModelError
from vllm_latq.quantize.model.decoder import Decoder
from vllm_latq.quantize.model.meta_model import model_config
from vllm_latq.quantize.model.originals.store import OriginalStore
from vllm_latq.quantize.pipeline import quantize_checkpoint
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
# A row of 4-bit floats has whole blocks.
WIDE_V4 = SMALL_V4 | {"intermediate_size": 64, "moe_intermediate_size": 64}


@pytest.mark.parametrize("name", FAMILIES)
def test_quantized_as_their_products(name: str, random_model: Any, calibration_text: Path, tmp_path: Path) -> None:
    family, sizes, block, recipe = FAMILIES[name]
    plain, _ = random_model(family, f"plain-{family}", **sizes)
    if name == "fused":
        fuse_experts(plain)
    twin = in_float8(plain, tmp_path / "float8", block, input_scales=True)
    check_quantized_alike(tmp_path / "float8", twin, recipe, calibration_text)


def test_experts_in_4_bit_floats(random_model: Any, calibration_text: Path, tmp_path: Path) -> None:
    """DeepSeek-V4, with scales that are powers of two."""
    plain, _ = random_model("deepseek_v4", "plain-v4", **WIDE_V4)
    source = tmp_path / "float4"
    twin = in_float8_and_float4(plain, source, (8, 8))
    recipe = Recipe("gptq", 4, group_size=8, **SAMPLES)
    check_quantized_alike(source, twin, recipe, calibration_text)
    assert json.loads((source / "out/config.json").read_text()).keys().isdisjoint({"expert_dtype"})


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


@pytest.mark.parametrize("block", [[10**12, 2**70], None], ids=["huge blocks", "none"])
def test_one_scale_whatever_the_block(block: list[int] | None, random_model: Any, tmp_path: Path) -> None:
    """A block larger than the matrix, in the other of the two formats; scales in eight bits, too."""
    plain, _ = random_model("qwen3")
    in_float8(plain, tmp_path / "float8", (48, 48))
    codes = torch.randn(48, 32).to(torch.float8_e5m2)
    scale = torch.full((1, 1), 0.25).to(torch.float8_e8m0fnu)

    def edit(tensors: dict[str, Any], config: dict[str, Any]) -> None:
        tensors |= {
            UP: codes,
            SCALES: scale,
            "lm_head.weight_scale_inv": torch.ones(1),
            "other_scale_inv": torch.ones(1),
        }
        config["quantization_config"]["weight_block_size"] = block

    change(tmp_path / "float8", edit)
    store = OriginalStore(tmp_path / "float8")
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
    store = OriginalStore(tmp_path)
    for name, tensor in empty.items():
        assert torch.equal(store.get(name), tensor.bfloat16())


def test_said_by_the_language_model_alone(random_model: Any, tmp_path: Path) -> None:
    """As in multimodal models; nothing of it is left in what is written."""
    plain, _ = random_model("qwen3")
    source = tmp_path / "float8"
    in_float8(plain, source, (16, 12))
    change(
        source, lambda _, config: config.update(text_config={"quantization_config": config.pop("quantization_config")})
    )
    assert OriginalStore(source).get(UP).dtype == torch.bfloat16
    assert "quantization_config" not in model_config(source, untied=False)["text_config"]


def _config(change: dict[str, Any]) -> Callable[[dict[str, Any], dict[str, Any]], None]:
    return lambda _tensors, config: config["quantization_config"].update(change)


def _as_bytes(tensors: dict[str, Any], config: dict[str, Any]) -> tuple[torch.Tensor, torch.Tensor]:
    """Store the scales of a matrix as bytes that are exponents; return them, and the codes."""
    config["quantization_config"]["scale_fmt"] = "ue8m0"
    tensors[SCALES] = torch.arange(120, 129, dtype=torch.uint8).reshape(3, 3)
    return tensors[SCALES], tensors[UP]


def test_bytes_are_exponents_of_scales(random_model: Any, tmp_path: Path) -> None:
    plain, _ = random_model("qwen3")
    in_float8(plain, tmp_path / "float8", (16, 12))
    found: list[torch.Tensor] = []
    change(tmp_path / "float8", lambda tensors, config: found.extend(_as_bytes(tensors, config)))
    exponents, codes = found
    factors = (exponents.float() - 127).exp2().repeat_interleave(16, 0).repeat_interleave(12, 1)[:, :32]
    assert torch.equal(OriginalStore(tmp_path / "float8").get(UP), (codes.float() * factors).bfloat16())


@pytest.mark.parametrize(
    ("edit", "error", "message"),
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
        (lambda tensors, _: tensors[SCALES].fill_(torch.nan), NumericalError, r"up_proj\.weight_scale_inv: .*9 NaN"),
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
            "or is published as one of fp8, mxfp4, compressed-tensors .*, found awq",
        ),
        (
            _config({"scale_fmt": "e5m2"}),
            UnsupportedModelError,
            "scale_fmt: expected float, ue8m0 or none, found 'e5m2'",
        ),
        (
            lambda tensors, config: _as_bytes(tensors, config)[0].fill_(255),
            NumericalError,
            r"up_proj\.weight_scale_inv: expected finite scales, found 9 NaN",
        ),
        (lambda _, config: config.pop("quantization_config"), UnsupportedModelError, "expected weights in 16 bits"),
    ],
)
def test_refused(
    edit: Callable[[Any, Any], Any], error: type[LatqError], message: str, random_model: Any, tmp_path: Path
) -> None:
    plain, _ = random_model("qwen3")
    source = tmp_path / "float8"
    in_float8(plain, source, (16, 12))
    change(source, edit)
    with pytest.raises(error, match=message):
        quantize_checkpoint(RTN, source, tmp_path / "out")
    assert not (tmp_path / "out").exists()


EXPERT = "model.layers.1.ffn.experts.1.w1"


@pytest.mark.parametrize(
    ("edit", "error", "message"),
    [
        (
            lambda tensors: tensors.pop(f"{EXPERT}.scale"),
            UnsupportedModelError,
            rf"w1\.weight: expected a tensor {EXPERT}\.weight_scale_inv beside it, found none",
        ),
        (
            lambda tensors: tensors.update({f"{EXPERT}.scale": torch.ones(64, 2)}),
            UnsupportedModelError,
            r"w1\.scale: .* 32 4-bit floats in a row, shape \(64, 1\), found shape \(64, 2\) in torch\.float32",
        ),
        (
            lambda tensors: tensors.update({f"{EXPERT}.scale": torch.ones(64, 1, dtype=torch.int8)}),
            UnsupportedModelError,
            r"w1\.scale: .*found shape \(64, 1\) in torch\.int8",
        ),
        (
            lambda tensors: tensors.update({f"{EXPERT}.weight": tensors[f"{EXPERT}.weight"][:, :15].clone()}),
            UnsupportedModelError,
            r"w1\.scale: .*shape \(64, 0\)",
        ),
        (
            lambda tensors: tensors[f"{EXPERT}.scale"].view(torch.uint8).fill_(255),
            NumericalError,
            r"w1\.scale: expected finite scales, found 64 NaN",
        ),
    ],
)
def test_4_bit_floats_refused(
    edit: Callable[[Any], Any], error: type[LatqError], message: str, random_model: Any, tmp_path: Path
) -> None:
    plain, _ = random_model("deepseek_v4", "plain-v4", **WIDE_V4)
    in_float8_and_float4(plain, tmp_path / "float4", (8, 8))
    change(tmp_path / "float4", lambda tensors, _: edit(tensors))
    with pytest.raises(error, match=message):
        quantize_checkpoint(Recipe("rtn", 4, group_size=8), tmp_path / "float4", tmp_path / "out")
    assert not (tmp_path / "out").exists()
