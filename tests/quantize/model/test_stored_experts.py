"""Experts that a checkpoint stores as one tensor per layer: quantized one by one, without reading them all at once."""

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoModelForMultimodalLM
from transformers.models.granitemoe import modeling_granitemoe

from helpers.mixtures import fuse_experts, into_fused
from helpers.multimodal import random_multimodal
from helpers.walk import walk
from vllm_latq.errors import NumericalError, UnsupportedModelError
from vllm_latq.format.files import TensorStore
from vllm_latq.format.reader import CheckpointReader
from vllm_latq.format.verify import verify
from vllm_latq.quantize.certificate.certificate import verify_certificate
from vllm_latq.quantize.model.decoder import Decoder
from vllm_latq.quantize.model.loading import load_model
from vllm_latq.quantize.model.selection import never_quantized
from vllm_latq.quantize.pipeline import quantize_checkpoint
from vllm_latq.quantize.recipe import Recipe

EXPERTS = {"num_experts": 4, "num_local_experts": 4, "moe_intermediate_size": 48}
SAMPLES = {"num_samples": 4, "seq_len": 32}
RTN = Recipe("rtn", 4, group_size=16)
FULL = {"layer_types": ["full_attention", "full_attention"]}
HYBRID = {
    **{"layer_types": ["linear_attention", "full_attention"], "linear_num_key_heads": 2, "linear_num_value_heads": 2},
    **{"linear_key_head_dim": 8, "linear_value_head_dim": 8},
}
# Before, transformers had linears of another kind for its experts, which stay as they are.
granite_experts = pytest.mark.skipif(
    not hasattr(modeling_granitemoe, "GraniteMoeExperts"), reason="a transformers without Granite's fused experts"
)
# Changes to the configuration, where the experts are, the router beside them, and how they are quantized.
FAMILIES = {
    "granitemoe": (
        {"num_experts_per_tok": 2},
        "block_sparse_moe.experts",
        "block_sparse_moe.router.layer",
        Recipe("ssqr", 3, group_size=16, outlier_rate=0.02, **SAMPLES),
    ),
    "qwen3_5_moe_text": (
        {"num_experts_per_tok": 2, "shared_expert_intermediate_size": 48, **HYBRID},
        "mlp.experts",
        "mlp.gate",
        Recipe("gptq", 4, group_size=16, **SAMPLES),
    ),
    "gemma4_text": (
        {"top_k_experts": 2, "enable_moe_block": True, "hidden_size_per_layer_input": 0, "global_head_dim": 8, **FULL},
        "experts",
        "router.proj",
        Recipe("gptq", 3, group_size=8, grid="midrise", **SAMPLES),
    ),
    # Its router weighs what goes into an expert, and its matrices are transposed: gate and up are as wide as they are
    # high, so only the model says how they lie.
    "llama4_text": (
        {"num_experts_per_tok": 1, "intermediate_size": 16, "intermediate_size_mlp": 48, "attention_chunk_size": 8},
        "feed_forward.experts",
        "feed_forward.router",
        Recipe("ssqr", 3, group_size=16, outlier_rate=0.02, **SAMPLES),
    ),
}
TOKENS = torch.randint(3, 2048, (3, 20), generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("family", [pytest.param("granitemoe", marks=granite_experts), *list(FAMILIES)[1:]])
def test_quantized_and_loaded_again(family: str, random_model: Any, calibration_text: Path, tmp_path: Path) -> None:
    changes, experts, router, recipe = FAMILIES[family]
    source, model = random_model(family, f"fused-{family}", **EXPERTS, **changes)
    fuse_experts(source)
    store = TensorStore(source)
    assert sum(len(store.shape(name)) == 3 and "conv" not in name for name in store.names()) == 4
    decoder = Decoder(source, "cpu")
    assert all(parameter.is_meta for parameter in decoder.model.parameters()), "nothing is in memory yet"
    with torch.no_grad():
        torch.testing.assert_close(walk(decoder, TOKENS, len(TOKENS)), model(TOKENS).logits, rtol=0, atol=0)
    assert f"model.layers.1.{router}" in never_quantized(decoder)

    report = quantize_checkpoint(recipe, source, tmp_path / "out", calibration=str(calibration_text))
    quantized = {layer["name"] for layer in report["layers"]}
    leaves = ("gate_proj", "up_proj", "down_proj")
    assert {f"model.layers.1.{experts}.{n}.{leaf}" for n in range(4) for leaf in leaves} <= quantized
    assert not any("router" in name or name.endswith("mlp.gate") for name in quantized)
    assert list(verify(tmp_path / "out")) == []
    assert list(verify_certificate(tmp_path / "out", source, str(calibration_text))) == []

    loaded, _ = load_model(tmp_path / "out", "cpu")
    into_fused(model, tmp_path / "out")
    with torch.no_grad():
        torch.testing.assert_close(loaded(TOKENS).logits, model(TOKENS).logits, rtol=0, atol=1e-5)


@pytest.mark.parametrize("fused", [False, True])
def test_experts_without_a_gate(
    fused: bool, random_model: Any, make_dense_twin: Any, calibration_text: Path, tmp_path: Path
) -> None:
    """Nemotron-H's, between linears to fewer channels and back."""
    sizes = {"n_routed_experts": 4, "num_experts_per_tok": 1, "moe_shared_expert_intermediate_size": 48}
    options = {"n_group": 1, "topk_group": 1, "moe_latent_size": 24, "layers_block_type": ["moe", "attention"]}
    source, model = random_model("nemotron_h", f"no-gate-{fused}", moe_intermediate_size=48, **sizes, **options)
    if fused:
        fuse_experts(source)
    experts = [name for name in TensorStore(source).names() if ".experts." in name]
    assert len(experts) == (2 if fused else 8)
    with torch.no_grad():
        expected = model(TOKENS).logits
    torch.testing.assert_close(walk(Decoder(source, "cpu"), TOKENS, len(TOKENS)), expected, rtol=0, atol=0)
    latq = Recipe("latq", bits=6.0, **SAMPLES)
    recipe = latq if fused else Recipe("ssqr", 3, group_size=8, outlier_rate=0.02, **SAMPLES)
    report = quantize_checkpoint(recipe, source, tmp_path / "out", calibration=str(calibration_text))
    records = {layer["name"]: layer for layer in report["layers"]}
    mixer = "backbone.layers.0.mixer"
    found = {name for name in records if name.startswith(mixer)}
    assert found == {
        *(f"{mixer}.experts.{n}.{leaf}" for n in range(4) for leaf in ("up_proj", "down_proj")),
        *(f"{mixer}.shared_experts.{leaf}" for leaf in ("up_proj", "down_proj")),
        *(f"{mixer}.fc{n}_latent_proj" for n in (1, 2)),
    }
    in_16_bits = AutoModelForCausalLM.from_pretrained(source, dtype=torch.bfloat16)
    with torch.no_grad():
        expected = in_16_bits(TOKENS).logits
    walked = walk(Decoder(source, "cpu", torch.bfloat16), TOKENS, len(TOKENS))
    torch.testing.assert_close(walked, expected, rtol=0, atol=0)
    assert any("stand in" in records[name]["note"] for name in found if ".experts." in name)
    assert list(verify(tmp_path / "out")) == []
    assert list(verify_certificate(tmp_path / "out", source, str(calibration_text))) == []
    dense = make_dense_twin(tmp_path / "out", tmp_path / "dense")
    (loaded, _), (same, _) = (load_model(folder, "cpu") for folder in (tmp_path / "out", dense))
    with torch.no_grad():
        got, expected = loaded(TOKENS).logits, same(TOKENS).logits
    torch.testing.assert_close(got, expected, rtol=0, atol=1e-5)


def test_transposed(mini_model: Path, tmp_path: Path) -> None:
    """Qwen3-VL stores its experts so. The same numbers come out as of those stored in rows."""
    sizes = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48}
    model = random_multimodal(tmp_path / "rows", "qwen3_vl_moe", mini_model, **sizes)
    shutil.copytree(tmp_path / "rows", tmp_path / "columns")
    fuse_experts(tmp_path / "columns", transposed=True)
    with torch.no_grad():
        expected = model(TOKENS).logits
        loaded = AutoModelForMultimodalLM.from_pretrained(tmp_path / "columns", dtype=torch.float32)
        torch.testing.assert_close(loaded(TOKENS).logits, expected, rtol=0, atol=0)
        torch.testing.assert_close(walk(Decoder(tmp_path / "columns", "cpu"), TOKENS, 3), expected, rtol=0, atol=0)
    for folder in ("rows", "columns"):
        quantize_checkpoint(RTN, tmp_path / folder, tmp_path / f"{folder}-out")
    first, second = (CheckpointReader(tmp_path / f"{folder}-out") for folder in ("rows", "columns"))
    assert "model.language_model.layers.1.mlp.experts.3.down_proj" in first.shapes
    assert first.config.fingerprint == second.config.fingerprint


@pytest.mark.parametrize("family", [pytest.param("granitemoe", marks=granite_experts), "qwen2_moe"])
def test_experts_of_one_layer_stay(family: str, random_model: Any, tmp_path: Path) -> None:
    """Experts stored as one tensor, or one by one, stay unquantized beside others that are quantized."""
    source, model = random_model(family, f"stay-{family}", **EXPERTS, num_experts_per_tok=2)
    parent = {"granitemoe": "block_sparse_moe", "qwen2_moe": "mlp"}[family]
    recipe = Recipe("rtn", 8, group_size=16, ignore=("lm_head", f"model.layers.0.{parent}.experts"))
    report = quantize_checkpoint(recipe, source, tmp_path / "out")
    assert {layer["name"][:15] for layer in report["layers"] if ".experts." in layer["name"]} == {"model.layers.1."}
    loaded, _ = load_model(tmp_path / "out", "cpu")
    into_fused(model, tmp_path / "out")
    with torch.no_grad():
        torch.testing.assert_close(loaded(TOKENS).logits, model(TOKENS).logits, rtol=0, atol=1e-5)


def test_only_one_matrix_is_read(random_model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    source, model = random_model("qwen3_moe", "one-matrix", **EXPERTS, num_experts_per_tok=2)
    fuse_experts(source)
    store = Decoder(source, "cpu").store
    read: list[str] = []
    get, part = TensorStore.get, TensorStore.part
    monkeypatch.setattr(TensorStore, "get", lambda *given: (read.append("all"), get(*given))[1])
    monkeypatch.setattr(TensorStore, "part", lambda *given: (read.append(str(given[2])), part(*given))[1])
    name = "model.layers.1.mlp.experts.2"
    fused = model.model.layers[1].mlp.experts
    assert torch.equal(store.get(f"{name}.up_proj.weight"), fused.gate_up_proj[2, 48:])
    assert torch.equal(store.get(f"{name}.down_proj.weight"), fused.down_proj[2])
    assert read == ["(2, slice(48, 96, None))", "(2, slice(0, 32, None))"]


def test_what_is_wrong_is_named(random_model: Any, tmp_path: Path) -> None:
    source, _ = random_model("qwen3_moe", "wrong-experts", **EXPERTS, num_experts_per_tok=2)
    fuse_experts(source)
    tensors = load_file(source / "model.safetensors")
    name = "model.layers.0.mlp.experts.gate_up_proj"

    def changed(tensor: torch.Tensor | None, **more: torch.Tensor) -> Path:
        folder = tmp_path / "changed"
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(source, folder)
        left = {key: value for key, value in tensors.items() if key != name}
        held = left | more if tensor is None else left | {name: tensor} | more
        save_file(held, folder / "model.safetensors", metadata={"format": "pt"})
        return folder

    whole = tensors[name]
    with pytest.raises(UnsupportedModelError, match=r"expected shape \(4, 96, 32\), found \(4, 90, 32\)") as refused:
        Decoder(changed(whole[:, :90].contiguous()), "cpu")
    assert name in str(refused.value)
    missing = r"0\.mlp\.experts: expected gate, up, down of 4 experts.*found 1 tensors .*experts\.down_proj"
    with pytest.raises(UnsupportedModelError, match=missing):
        Decoder(changed(None), "cpu")
    single = "model.layers.0.mlp.experts.2.up_proj.weight"
    with pytest.raises(
        UnsupportedModelError, match=r"2\.up_proj\.weight: expected each expert stored once, found also"
    ):
        Decoder(changed(whole, **{single: whole[2, 48:].clone()}), "cpu")
    for dtype, expected in (
        (torch.int8, "floating-point numbers"),
        (torch.float8_e4m3fn, "weights in 16 bits or more"),
    ):
        with pytest.raises(UnsupportedModelError, match=expected):
            quantize_checkpoint(RTN, changed(whole.to(dtype)), tmp_path / f"out-{dtype}")
    stacked = "model.layers.1.mlp.experts.down_proj"
    one_by_one, _ = random_model("qwen3_moe", "twice", **EXPERTS, num_experts_per_tok=2)
    stray = load_file(one_by_one / "model.safetensors") | {stacked: tensors[stacked]}
    save_file(stray, one_by_one / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(
        UnsupportedModelError, match=r"1\.mlp\.experts: expected gate, up, down of 4 experts, each stored once"
    ):
        Decoder(one_by_one, "cpu")
    whole[3, 50, 7] = torch.nan
    with pytest.raises(NumericalError, match=r"experts\.3\.up_proj\.weight.*1 NaN"):
        quantize_checkpoint(RTN, changed(whole), tmp_path / "out")
