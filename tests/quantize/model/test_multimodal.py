"""Models of images and text: their language models are walked block by block exactly, and quantized, nothing else."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForMultimodalLM

from helpers.multimodal import random_multimodal
from helpers.walk import walk
from vllm_latq.errors import LatqError, NumericalError, UnsupportedModelError
from vllm_latq.format.reader import CheckpointReader
from vllm_latq.format.verify import verify
from vllm_latq.quantize.certificate.certificate import verify_certificate
from vllm_latq.quantize.model.decoder import Decoder
from vllm_latq.quantize.model.loading import load_model
from vllm_latq.quantize.model.selection import never_quantized
from vllm_latq.quantize.pipeline import quantize_checkpoint
from vllm_latq.quantize.plan import plan
from vllm_latq.quantize.recipe import Recipe

SAMPLES = {"num_samples": 4, "seq_len": 32}
GPTQ, SSQR = (Recipe(method, 4, group_size=32, **SAMPLES) for method in ("gptq", "ssqr"))
# Where the language model's blocks are stored, what stands beside it, and how it is quantized.
FAMILIES = {
    "gemma3": ("language_model.model.layers", {"vision_tower", "multi_modal_projector"}, GPTQ),
    "mistral3": ("language_model.model.layers", {"vision_tower", "multi_modal_projector"}, GPTQ),
    "llava": ("language_model.model.layers", {"vision_tower", "multi_modal_projector"}, SSQR),
    "qwen2_5_vl": ("model.layers", {"visual"}, Recipe("latq", bits=3.5, ignore=("lm_head",), **SAMPLES)),
    "qwen3_vl": ("model.language_model.layers", {"model.visual"}, Recipe("hptq", bits=3.5, **SAMPLES)),
    "gemma4": (
        "model.language_model.layers",
        {"model.vision_tower", "model.audio_tower", "model.embed_vision", "model.embed_audio"},
        GPTQ,
    ),
    "idefics3": ("model.text_model.layers", {"model.vision_model", "model.connector"}, GPTQ),
}
PROCESSORS = ("processor_config.json", "preprocessor_config.json", "video_preprocessor_config.json")
LEAVES = (*(f"self_attn.{leaf}_proj" for leaf in "qkvo"), "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")
# Embeddings of tokens for every block, and matrices there that take them in.
CHANGES = {
    "gemma4": {
        **{"hidden_size_per_layer_input": 32, "vocab_size_per_layer_input": 2080, "num_kv_shared_layers": 0},
        **{"layer_types": ["sliding_attention", "full_attention"], "global_head_dim": 64, "tie_word_embeddings": True},
    }
}
FURTHER = {"gemma4": ("per_layer_input_gate", "per_layer_projection")}
TOKENS = torch.randint(3, 2048, (3, 20), generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("family", FAMILIES)
def test_quantized_and_loaded_again(
    family: str, mini_model: Path, make_dense_twin: Any, calibration_text: Path, tmp_path: Path
) -> None:
    model = random_multimodal(tmp_path / "source", family, mini_model, **CHANGES.get(family, {}))
    for file in PROCESSORS:
        (tmp_path / "source" / file).write_text("{}")
    blocks, beside, recipe = FAMILIES[family]
    decoder = Decoder(tmp_path / "source", "cpu")
    with torch.no_grad():
        torch.testing.assert_close(walk(decoder, TOKENS, len(TOKENS)), model(TOKENS).logits, rtol=0, atol=0)
    with decoder.head():
        towers = [decoder.model.get_submodule(tower) for tower in decoder.anatomy.towers]
        assert len(towers) == len(beside)
        assert all(parameter.is_meta for tower in towers for parameter in tower.parameters()), "a tower is in memory"
    planned, leaves = plan(recipe, tmp_path / "source"), (*LEAVES, *FURTHER.get(family, ()))
    linears = {f"{blocks}.{n}.{leaf}" for n in range(2) for leaf in leaves}
    assert {layer["name"] for layer in planned["layers"]} == linears
    assert {module["name"] for module in planned["beside"]} == beside

    quantize_checkpoint(recipe, tmp_path / "source", tmp_path / "out", calibration=str(calibration_text))
    assert list(verify(tmp_path / "out")) == []
    assert list(verify_certificate(tmp_path / "out", tmp_path / "source", str(calibration_text))) == []
    assert all((tmp_path / "out" / file).exists() for file in PROCESSORS)
    reader, original = CheckpointReader(tmp_path / "out"), load_file(tmp_path / "source" / "model.safetensors")
    assert set(reader.shapes) == linears
    assert all(reader.config.is_ignored(f"{module}.any.linear") for module in beside)
    for name in original:
        if name.removesuffix(".weight") not in linears:
            torch.testing.assert_close(reader.store.get(name), original[name], rtol=0, atol=0)

    make_dense_twin(tmp_path / "out", tmp_path / "dense")
    loaded, _ = load_model(tmp_path / "out", "cpu")
    dense = AutoModelForMultimodalLM.from_pretrained(tmp_path / "dense", dtype=torch.float32)
    assert type(loaded) is type(dense) is type(model)
    with torch.no_grad():
        got, expected = loaded(TOKENS).logits, dense(TOKENS).logits
    assert expected.std() > 0.01
    torch.testing.assert_close(got, expected, rtol=0, atol=2e-5)


def test_the_language_model_alone(mini_model: Path, tmp_path: Path) -> None:
    """transformers makes two models of Qwen3.5; `architectures` says which of them a checkpoint holds."""
    sizes = {"linear_num_key_heads": 2, "linear_num_value_heads": 2, "linear_key_head_dim": 8}
    hybrid = {"layer_types": ["linear_attention", "full_attention"], "linear_value_head_dim": 8, **sizes}
    random_multimodal(tmp_path / "both", "qwen3_5", mini_model, **hybrid)
    assert Decoder(tmp_path / "both", "cpu").anatomy.towers == ("model.visual",)
    shutil.copytree(tmp_path / "both", tmp_path / "text")
    config = json.loads((tmp_path / "both" / "config.json").read_text())
    config["architectures"] = ["Qwen3_5ForCausalLM"]
    (tmp_path / "text" / "config.json").write_text(json.dumps(config))
    stored = load_file(tmp_path / "both" / "model.safetensors")
    named = {name.replace("model.language_model.", "model."): stored[name] for name in stored if "visual" not in name}
    save_file(named, tmp_path / "text" / "model.safetensors", metadata={"format": "pt"})
    alone = Decoder(tmp_path / "text", "cpu")
    assert alone.anatomy.towers == ()
    assert never_quantized(alone) == ()


def test_what_predicts_further_tokens_stays(mini_model: Path, tmp_path: Path) -> None:
    """Layers in the checkpoint that are no part of the model for transformers, but one for vLLM."""
    shutil.copytree(mini_model, tmp_path / "source")
    tensors = load_file(tmp_path / "source" / "model.safetensors")
    further = {"mtp.layers.0.mlp.up_proj.weight": tensors["model.layers.0.mlp.up_proj.weight"].clone()}
    added = further | {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(32)}  # computed, for transformers
    save_file(tensors | added, tmp_path / "source" / "model.safetensors", metadata={"format": "pt"})
    recipe = Recipe("rtn", 4, group_size=128)
    assert plan(recipe, tmp_path / "source")["beside"] == [{"name": "mtp", "matrices": 1, "weights": 768 * 256}]
    quantize_checkpoint(recipe, tmp_path / "source", tmp_path / "out")
    reader = CheckpointReader(tmp_path / "out")
    assert reader.config.scheme_for("mtp.layers.0.mlp.up_proj") is None
    assert reader.config.scheme_for("model.layers.0.mlp.up_proj") is not None
    assert list(verify(tmp_path / "out")) == []
    for name, tensor in added.items():
        assert torch.equal(reader.store.get(name), tensor)


def test_a_broken_tower_is_refused(mini_model: Path, tmp_path: Path) -> None:
    random_multimodal(tmp_path / "source", "idefics3", mini_model)
    tensors = load_file(tmp_path / "source" / "model.safetensors")
    name = "model.connector.modality_projection.proj.weight"
    broken = {
        f"expected a tensor {name}, found no such tensor": tensors | {name: None},
        f"{name}: expected shape ": tensors | {name: tensors[name][:1]},
    }
    for message, stored in broken.items():
        whole = {key: tensor.contiguous() for key, tensor in stored.items() if tensor is not None}
        save_file(whole, tmp_path / "source" / "model.safetensors", metadata={"format": "pt"})
        with pytest.raises(LatqError, match=message):
            quantize_checkpoint(Recipe("rtn", 4, group_size=32), tmp_path / "source", tmp_path / "out")
    tensors[name][0, 0] = torch.nan
    save_file(tensors, tmp_path / "source" / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(NumericalError, match=f"{name}: expected finite weights, found 1 NaN"):
        quantize_checkpoint(Recipe("rtn", 4, group_size=32), tmp_path / "source", tmp_path / "out")


def test_a_tied_head_of_its_own(mini_model: Path, calibration_text: Path, tmp_path: Path) -> None:
    """Both configurations say so: that of the whole, and that of the language model."""
    model = random_multimodal(tmp_path / "source", "gemma3", mini_model, tie_word_embeddings=True)
    assert model.get_output_embeddings().weight is model.get_input_embeddings().weight
    quantize_checkpoint(Recipe("rtn", 4, group_size=32, ignore=()), tmp_path / "source", tmp_path / "out")
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert not config["tie_word_embeddings"]
    assert not config["text_config"]["tie_word_embeddings"]
    loaded, _ = load_model(tmp_path / "out", "cpu")
    head, embedding = loaded.get_output_embeddings(), model.get_input_embeddings().weight
    assert 0 < (head.dense_weight(torch.float32) - embedding).norm() < 0.2 * embedding.norm()
    assert torch.equal(loaded.get_input_embeddings().weight, embedding)


def test_a_block_that_text_skips_is_refused(mini_model: Path) -> None:
    decoder = Decoder(mini_model, "cpu")
    decoder.model.model.config.num_hidden_layers = 3  # of its four blocks transformers calls so many
    with pytest.raises(UnsupportedModelError, match=r"layers\.3: expected a block that every text passes through"):
        decoder.embed(TOKENS, 3)
