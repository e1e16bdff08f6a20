"""Mixtures of experts: walked, quantized expert by expert from routed tokens, and loaded again."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from helpers.mixtures import never_choose
from vllm_latq.errors import ConfigError, UnsupportedModelError
from vllm_latq.format.reader import CheckpointReader
from vllm_latq.format.verify import verify
from vllm_latq.models.experts import split_experts
from vllm_latq.quantize.calibration.stream import Stream
from vllm_latq.quantize.model.decoder import Decoder
from vllm_latq.quantize.model.parts import model_parts
from vllm_latq.quantize.pipeline import quantize_checkpoint
from vllm_latq.quantize.recipe import Recipe

# gate and up, then down, of each expert, as the checkpoints call them; what stays unquantized
FAMILIES = {
    "mixtral": ("block_sparse_moe.experts.", ("w1", "w3", "w2"), {"model.layers.0.block_sparse_moe.gate"}),
    "qwen3_moe": ("mlp.experts.", ("gate_proj", "up_proj", "down_proj"), {"model.layers.0.mlp.gate"}),
    "qwen2_moe": (
        "mlp.experts.",
        ("gate_proj", "up_proj", "down_proj"),
        {"model.layers.0.mlp.gate", "model.layers.0.mlp.shared_expert_gate"},
    ),
}
EXPERTS = {"num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2, "shared_expert_intermediate_size": 48}
RECIPE = Recipe("gptq", 4, group_size=16, num_samples=4, seq_len=32)
TOKENS = torch.randint(3, 2048, (3, 20), generator=torch.Generator().manual_seed(1))
# transformers may sum the experts' outputs in another order.
LOGIT_TOLERANCE = 1e-5


@pytest.mark.parametrize("model_type", FAMILIES)
def test_quantized_and_loaded_again(
    model_type: str, random_model: Any, make_dense_twin: Any, calibration_text: Path, tmp_path: Path
) -> None:
    directory, model = random_model(model_type, **EXPERTS)
    parent, leaves, routers = FAMILIES[model_type]
    report = quantize_checkpoint(RECIPE, directory, tmp_path / "out", calibration=str(calibration_text))
    assert list(verify(tmp_path / "out")) == []
    names = [layer["name"] for layer in report["layers"]]
    for expert in range(4):
        assert {f"model.layers.1.{parent}{expert}.{leaf}" for leaf in leaves} <= set(names)
    assert not routers & set(names)
    assert routers <= set(CheckpointReader(tmp_path / "out").config.ignore)
    assert all(layer["error"] < layer["bound"] or layer["clipped"] for layer in report["layers"])
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32)
    dense = AutoModelForCausalLM.from_pretrained(make_dense_twin(tmp_path / "out", tmp_path / "dense"))
    with torch.no_grad():
        got, expected, original = loaded(TOKENS).logits, dense(TOKENS).logits, model(TOKENS).logits
    torch.testing.assert_close(got, expected, rtol=0, atol=LOGIT_TOLERANCE)
    assert (got - original).abs().max() > 100 * LOGIT_TOLERANCE


def test_in_bfloat16(random_model: Any, calibration_text: Path, tmp_path: Path) -> None:
    """As on a GPU, where the model runs in its own dtype."""
    directory, _ = random_model("mixtral", **EXPERTS)
    recipe = Recipe("gptq", 4, group_size=16, num_samples=4, seq_len=32, dtype="bfloat16")
    quantize_checkpoint(recipe, directory, tmp_path / "out", calibration=str(calibration_text))
    assert list(verify(tmp_path / "out")) == []
    decoder = Decoder(directory, "cpu", torch.bfloat16)
    assert {(parameter.dtype, parameter.is_meta) for parameter in decoder.model.parameters()} == {
        (torch.bfloat16, True)
    }


def test_hessians_are_those_of_routed_tokens(random_model: Any) -> None:
    directory, model = random_model("mixtral", **EXPERTS)
    experts = model.model.layers[0].mlp.experts
    seen: list[tuple[torch.Tensor, torch.Tensor]] = []
    experts.register_forward_pre_hook(lambda _, arguments: seen.append(arguments[:2]))
    samples = TOKENS.repeat(8, 1)
    with torch.no_grad():
        model(samples)
    hidden, index = seen[0]
    decoder = Decoder(directory, "cpu")
    part = model_parts(decoder, decoder.linears(0))[0]
    with part.weights() as block:
        hessians = Stream(decoder, samples).inputs(part, block)
    for expert in range(4):
        (found,) = (h for h in hessians if f"model.layers.0.block_sparse_moe.experts.{expert}.w1" in h.shared.names)
        assert [name.rpartition(".")[2] for name in found.shared.names] == ["w1", "w3"]
        routed = hidden[(index == expert).any(1)]
        assert len(routed) >= 32
        assert found.note == ""
        assert found.tokens == len(routed)
        torch.testing.assert_close(found.matrix, routed.T @ routed, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("repeats", [8, 1])
def test_inputs_weighed_by_the_router(repeats: int, random_model: Any) -> None:
    """Llama 4's: Hessians are those of weighed tokens, also where few reach an expert, and so are gradients."""
    sizes = {"num_experts_per_tok": 1, "intermediate_size_mlp": 48, "attention_chunk_size": 16}
    directory, model = random_model("llama4_text", **EXPERTS | sizes)
    fused = model.model.layers[0].feed_forward.experts
    seen: list[torch.Tensor] = []
    fused.register_forward_pre_hook(lambda _, arguments: seen.append(arguments[0]))
    samples = TOKENS.repeat(repeats, 1)
    with torch.no_grad():
        model(samples)
    hidden = seen[0].requires_grad_()
    given, everything = hidden.detach().view(4, -1, 32), hidden[hidden.any(-1)].detach()
    assert len(everything) == samples.numel()
    decoder, noted = Decoder(directory, "cpu"), 0
    assert decoder.anatomy.base == "model"
    part = model_parts(decoder, decoder.linears(0))[0]
    with part.weights() as block:
        hessians = Stream(decoder, samples).inputs(part, block)
        own = block.feed_forward.experts(hidden)
        cotangent = torch.randn_like(own)
        (own_gradient,) = torch.autograd.grad(own, hidden, cotangent)
        (gradient,) = torch.autograd.grad(fused(hidden), hidden, cotangent)
    torch.testing.assert_close(own_gradient, gradient)
    for expert in range(4):
        (found,) = (h for h in hessians if f"model.layers.0.feed_forward.experts.{expert}.gate_proj" in h.shared.names)
        routed = given[expert][given[expert].any(-1)]
        missing = max(0, 32 - len(routed))
        expected = routed.T @ routed + missing / len(everything) * everything.T @ everything
        assert found.tokens == len(routed) + missing
        torch.testing.assert_close(found.matrix, expected, rtol=1e-4, atol=1e-4)
        noted += bool(found.note)
    assert bool(noted) is (repeats == 1)


@pytest.mark.parametrize("change", ["a bias that is missing", "another parameter"])
def test_experts_of_another_layout_are_refused(change: str, random_model: Any) -> None:
    _, model = random_model("qwen3_moe", **EXPERTS)
    fused = model.model.layers[0].mlp.experts
    if change == "a bias that is missing":
        fused.has_bias = True
    else:
        fused.norm = torch.nn.Parameter(torch.ones(4))
    with pytest.raises(UnsupportedModelError, match=r"expected experts that consist of linears, .*gate_up_proj"):
        split_experts(fused, "experts")


def test_an_expert_that_no_token_reaches(random_model: Any, calibration_text: Path, tmp_path: Path) -> None:
    directory, _ = random_model("mixtral", "starved", **EXPERTS | {"num_experts_per_tok": 1})
    never_choose(directory, 3)
    report = quantize_checkpoint(RECIPE, directory, tmp_path / "out", calibration=str(calibration_text))
    notes = {layer["name"]: layer["note"] for layer in report["layers"]}
    for leaf, channels in (("w1", 32), ("w3", 32), ("w2", 48)):
        expected = (
            f"0 routed tokens for {channels} input channels: the layer's 128 tokens stand in for the missing {channels}"
        )
        assert notes[f"model.layers.0.block_sparse_moe.experts.3.{leaf}"] == expected
    assert json.loads((tmp_path / "out" / "latq_report.json").read_text())["layers"] == [
        layer | {"shape": list(layer["shape"])} for layer in report["layers"]
    ]


def test_following_the_original_model_is_refused(random_model: Any, calibration_text: Path, tmp_path: Path) -> None:
    directory, _ = random_model("mixtral", **EXPERTS)
    for method, options in (("gptq", {"bits": 4, "group_size": 16}), ("latq", {"bits": 4.0})):
        recipe = Recipe(method, num_samples=4, seq_len=32, target="original", **options)
        with pytest.raises(ConfigError, match="found routed experts"):
            quantize_checkpoint(recipe, directory, tmp_path / "out", calibration=str(calibration_text))
        assert not list(tmp_path.iterdir()), "refused before anything is computed"
