"""Mixtures whose activation is clamped, and gpt-oss, whose experts also have biases: quantized and loaded again.

Limits are so low that most tokens reach them: a clamp that is left out changes the logits.
"""

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

from helpers.mixtures import into_fused
from helpers.multimodal import random_multimodal
from helpers.walk import walk
from vllm_latq.errors import UnsupportedModelError
from vllm_latq.format.reader import CheckpointReader
from vllm_latq.format.verify import verify
from vllm_latq.quantize.certificate.certificate import verify_certificate
from vllm_latq.quantize.model.decoder import Decoder
from vllm_latq.quantize.model.loading import load_model
from vllm_latq.quantize.pipeline import quantize_checkpoint
from vllm_latq.quantize.recipe import Recipe

SAMPLES = {"num_samples": 4, "seq_len": 32}
GPTQ = Recipe("gptq", 4, group_size=16, **SAMPLES)
LIMIT = 0.05
EXPERTS = {"num_experts_per_tok": 2, "swiglu_limit": LIMIT}
LATENT = {
    **{"num_key_value_heads": 4, "kv_lora_rank": 16, "q_lora_rank": 16, "v_head_dim": 16, "qk_nope_head_dim": 16},
    **{"index_topk": 8, "index_head_dim": 16, "index_n_heads": 2, "hc_mult": 2, "n_routed_experts": 4},
    "mlp_layer_types": ["dense", "sparse"],
}
# Changes to the configuration of a tiny model, and how it is quantized.
FAMILIES = {
    "gpt_oss": (
        {"num_hidden_layers": 1, "num_local_experts": 4, **EXPERTS},
        Recipe("latq", bits=5.0, **SAMPLES),
    ),
    "hy_v4": ({"qk_rope_head_dim": 16, **LATENT, **EXPERTS}, GPTQ),
    # transformers makes one linear of gate and up of its dense layer and shared experts.
    "minimax_m3_vl": (
        {
            **{"num_local_experts": 4, "moe_layer_freq": [0, 1], "swiglu_alpha": 1.5},
            **{"intermediate_size": 48, "dense_intermediate_size": 96},
            **EXPERTS,
        },
        GPTQ,
    ),
    # It stores gates, ups and downs of all experts in three tensors, and clamps after the activation.
    "step3p7": (
        {
            **{"num_experts_per_tok": 2, "n_routed_experts": 4, "moe_intermediate_size": 48, "share_expert_dim": 48},
            **{"mlp_layer_types": ["dense", "sparse"]},
            **{"swiglu_limits": [None, LIMIT], "swiglu_limits_shared": [None, LIMIT]},
        },
        GPTQ,
    ),
    "glm5_next": (
        {
            **{"qk_rope_head_dim": 0, "moe_intermediate_size": 48, "index_kpool": 4},
            **{"layer_types": ["linear_attention", "indexed_attention"], "linear_head_dim": 16, "linear_num_heads": 2},
            **LATENT,
            **EXPERTS,
        },
        Recipe("ssqr", 3, group_size=16, outlier_rate=0.02, **SAMPLES),
    ),
}
FUSED = ("gpt_oss", "hy_v4", "step3p7")  # families that transformers stores with one tensor for a layer's experts
MULTIMODAL = ("minimax_m3_vl", "step3p7", "glm5_next")
# Largest difference of logits: transformers multiplies by these families' matrices in other pieces.
TOLERANCES = {"gpt_oss": 2e-6, "minimax_m3_vl": 2e-6}
TOKENS = torch.randint(3, 2048, (3, 20), generator=torch.Generator().manual_seed(1))
known = [
    pytest.param(
        family,
        marks=pytest.mark.skipif(family not in CONFIG_MAPPING_NAMES, reason="this transformers does not know it"),
    )
    for family in FAMILIES
]


def without_clamps(model: Any) -> None:
    """Set the limits of all modules of a transformers model to infinity."""
    for module in model.modules():
        for name in ("limit", "swiglu_limit"):
            if getattr(module, name, None) == LIMIT:
                setattr(module, name, float("inf"))


@pytest.mark.parametrize("family", known)
def test_quantized_and_loaded_again(
    family: str, random_model: Any, mini_model: Path, make_dense_twin: Any, calibration_text: Path, tmp_path: Path
) -> None:
    changes, recipe = FAMILIES[family]
    if family in MULTIMODAL:
        source = tmp_path / "source"
        model = random_multimodal(source, family, mini_model, **changes)
    else:
        source, model = random_model(family, f"clamped-{family}", **changes)
    decoder = Decoder(source, "cpu")
    with torch.no_grad():
        expected = model(TOKENS).logits
    torch.testing.assert_close(walk(decoder, TOKENS, 3), expected, rtol=0, atol=TOLERANCES.get(family, 0))

    report = quantize_checkpoint(recipe, source, tmp_path / "out", calibration=str(calibration_text))
    quantized = {layer["name"] for layer in report["layers"]}
    assert sum(".experts." in name for name in quantized) in (12, 24)
    assert not [name for name in quantized if re.search(r"router|indexer|\.gate$|hc_|_hc", name)]
    # vLLM's GLM-5.3-Flash takes no quantized attention.
    assert any(".self_attn." in name for name in quantized) == (family != "glm5_next")
    assert list(verify(tmp_path / "out")) == []
    assert list(verify_certificate(tmp_path / "out", source, str(calibration_text))) == []

    loaded, _ = load_model(tmp_path / "out", "cpu")
    if family in FUSED:
        same, suffix = model, ".weight"
        names = {at.removesuffix(suffix): name.removesuffix(suffix) for name, at in decoder.stored.items()}
        into_fused(same, tmp_path / "out", names)
    else:
        same, _ = load_model(make_dense_twin(tmp_path / "out", tmp_path / "dense"), "cpu")
    with torch.no_grad():
        expected = same(TOKENS).logits
        torch.testing.assert_close(loaded(TOKENS).logits, expected, rtol=0, atol=2e-5)
        without_clamps(same)
        assert (same(TOKENS).logits - expected).abs().max() > 0.01


def test_joined_linears_that_stay(mini_model: Path, make_dense_twin: Any, tmp_path: Path) -> None:
    """One of MiniMax-M3's gates stays unquantized beside others; or none of what transformers joins is quantized."""
    changes, _ = FAMILIES["minimax_m3_vl"]
    random_multimodal(tmp_path / "source", "minimax_m3_vl", mini_model, **changes)
    shared = ("shared_experts.gate_proj", "shared_experts.up_proj")
    dense = ("layers.0.block_sparse_moe.gate_proj", "layers.0.block_sparse_moe.up_proj")
    for number, ignore in enumerate((shared, (*shared, *dense))):
        out = tmp_path / f"out{number}"
        quantize_checkpoint(Recipe("rtn", 4, group_size=16, ignore=("lm_head", *ignore)), tmp_path / "source", out)
        loaded, _ = load_model(out, "cpu")
        same, _ = load_model(make_dense_twin(out, tmp_path / f"dense{number}"), "cpu")
        with torch.no_grad():
            torch.testing.assert_close(loaded(TOKENS).logits, same(TOKENS).logits, rtol=0, atol=2e-5)


def test_biases_of_experts(random_model: Any, tmp_path: Path) -> None:
    """Gate and up alternate in gpt-oss's tensors, in the checkpoint they are linears of their own with their biases."""
    source, model = random_model("gpt_oss", "biases", num_local_experts=4, **EXPERTS)
    quantize_checkpoint(Recipe("rtn", 8, group_size=16), source, tmp_path / "out")
    reader, fused = CheckpointReader(tmp_path / "out"), model.model.layers[1].mlp.experts
    stem = "model.layers.1.mlp.experts.2"
    for part, leaf in enumerate(("gate_proj", "up_proj")):
        assert torch.equal(reader.store.get(f"{stem}.{leaf}.bias"), fused.gate_up_proj_bias[2, part::2])
        weight, exact = reader.weight(f"{stem}.{leaf}").dequantize(), fused.gate_up_proj[2, :, part::2].T
        assert (weight - exact).abs().max() < 0.01
    assert torch.equal(reader.store.get(f"{stem}.down_proj.bias"), fused.down_proj_bias[2])
    assert (reader.weight(f"{stem}.down_proj").dequantize() - fused.down_proj[2].T).abs().max() < 0.01


def test_biases_of_another_size_are_refused(random_model: Any, tmp_path: Path) -> None:
    source, _ = random_model("gpt_oss", "odd-biases", num_local_experts=4, **EXPERTS)
    tensors = load_file(source / "model.safetensors")
    name = "model.layers.0.mlp.experts.gate_up_proj_bias"
    tensors[name] = tensors[name][:, :50].contiguous()
    save_file(tensors, source / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(UnsupportedModelError, match=r"gate_up_proj_bias: expected shape \(4, 96\), found \(4, 50\)"):
        Decoder(source, "cpu")
