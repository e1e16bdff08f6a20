"""Mixtures of experts seen by the loss of the whole model: gradients of routed tokens, and latq."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM

from helpers.drawn import drawn_labels
from helpers.mixtures import never_choose
from vllm_latq.format.verify import verify
from vllm_latq.quantize.calibration.fisher import Backpropagation, collect_statistics
from vllm_latq.quantize.calibration.fisher_files import StatisticsFiles
from vllm_latq.quantize.certificate.certificate import verify_certificate
from vllm_latq.quantize.evaluation.predictions import Predictions, compare
from vllm_latq.quantize.lattice.grams import LayerStatistics
from vllm_latq.quantize.model.decoder import Decoder
from vllm_latq.quantize.pipeline import quantize_checkpoint
from vllm_latq.quantize.recipe import Recipe

EXPERTS = {"num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2, "hidden_size": 64, "head_dim": 16}
SAMPLES = {"num_samples": 16, "seq_len": 64}
BLOCK = "model.layers.0.block_sparse_moe.experts"
TOKENS, SEED = torch.randint(3, 2048, (2, 60), generator=torch.Generator().manual_seed(1)), 5


def statistics(directory: Path, samples: torch.Tensor, files: StatisticsFiles) -> dict[str, LayerStatistics]:
    """Return the statistics of the linears of the first block."""
    decoder = Decoder(directory, "cpu")
    collect_statistics(Backpropagation(decoder, samples, dict(decoder.linears(0)), SEED), files)
    return files.read(0)


def routed_gradients(model: Any, directory: Path, samples: torch.Tensor) -> dict[str, torch.Tensor]:
    """Expert's linear -> gradients of its outputs, [routed tokens, r], by one ordinary backward pass."""
    decoder = Decoder(directory, "cpu")
    experts = decoder.model.model.layers[0].mlp.experts
    experts.to_empty(device="cpu")
    fused = model.model.layers[0].mlp.experts
    for number, expert in enumerate(experts):
        gate, up = fused.gate_up_proj[number].detach().chunk(2)
        for linear, weight in (
            (expert.gate_proj, gate),
            (expert.up_proj, up),
            (expert.down_proj, fused.down_proj[number]),
        ):
            linear.weight = nn.Parameter(weight.detach().clone(), requires_grad=False)
    seen: dict[str, torch.Tensor] = {}

    def keep(name: str) -> Any:
        def hook(_: nn.Module, __: Any, output: torch.Tensor) -> None:
            output.retain_grad()
            seen[name] = output

        return hook

    for number, expert in enumerate(experts):
        for leaf, linear in (("w1", expert.gate_proj), ("w3", expert.up_proj), ("w2", expert.down_proj)):
            linear.register_forward_hook(keep(f"{BLOCK}.{number}.{leaf}"))
    own, model.model.layers[0].mlp.experts = fused, experts
    try:
        logits = model(samples).logits
        labels = drawn_labels(logits.detach(), SEED)
        nn.functional.cross_entropy(logits.flatten(0, 1), labels, reduction="sum").backward()
    finally:
        model.model.layers[0].mlp.experts = own
    return {name: output.grad for name, output in seen.items() if output.grad is not None}


@pytest.mark.parametrize("sharing", [False, True])
def test_gradients_are_those_of_routed_tokens(
    sharing: bool, random_model: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Means over all tokens; what few tokens reach gets the mean of the layer's experts for each missing one.

    Where experts share G, it is the mean over all of them, with the trace of each expert's own gradients.
    """
    if sharing:
        monkeypatch.setattr("vllm_latq.quantize.calibration.gram_sums.MOST_OWN", 0)
    directory, model = random_model("mixtral", "whole-mixtral", **EXPERTS)
    found = statistics(directory, TOKENS, StatisticsFiles(tmp_path))
    gradients = routed_gradients(model, directory, TOKENS)
    assert gradients.keys() == {name for name in found if BLOCK in name}
    completed = 0
    for leaf, channels in (("w1", 64), ("w3", 64), ("w2", 48)):
        names = [f"{BLOCK}.{expert}.{leaf}" for expert in range(4)]
        every = torch.cat([gradients[name] for name in names])
        assert len(every) == 2 * TOKENS.numel()
        for name in names:
            missing = max(0, channels - len(gradients[name]))
            completed += missing
            expected = gradients[name].T @ gradients[name] + missing * every.T @ every / len(every)
            if sharing:
                expected = expected.trace() / every.square().sum() * every.T @ every
            (gram,) = found[name].outputs
            assert found[name].tokens == len(gradients[name]) + missing
            assert bool(found[name].note) is bool(missing)
            assert float((gram * TOKENS.numel() - expected).norm()) < 1e-3 * float(expected.norm())
    assert completed > 0


def test_an_expert_that_no_token_reaches(random_model: Any, tmp_path: Path) -> None:
    directory, _ = random_model("mixtral", "whole-starved", **EXPERTS | {"num_experts_per_tok": 1})
    never_choose(directory, 3)
    files = StatisticsFiles(tmp_path)
    found = statistics(directory, TOKENS, files)
    for leaf, channels in (("w1", 64), ("w2", 48)):
        layer = found[f"{BLOCK}.3.{leaf}"]
        assert layer.tokens == channels
        assert layer.note.startswith(f"0 routed tokens for {channels} input channels")
        others = [found[f"{BLOCK}.{expert}.{leaf}"] for expert in range(3)]
        assert 0 < float(layer.outputs[0].trace()) < sum(float(other.outputs[0].trace()) for other in others)


def test_latq_from_model_to_checkpoint(
    random_model: Any, make_dense_twin: Any, calibration_text: Path, tmp_path: Path
) -> None:
    sizes = {"num_experts": 3, "num_experts_per_tok": 2, "num_hidden_layers": 1}
    directory, model = random_model("qwen3_moe", "whole-qwen3", **sizes)
    recipe = Recipe("latq", bits=4.0, **SAMPLES)
    report = quantize_checkpoint(recipe, directory, tmp_path / "out", calibration=str(calibration_text))
    assert list(verify(tmp_path / "out")) == []
    assert list(verify_certificate(tmp_path / "out", directory, str(calibration_text))) == []
    assert 3.9 < report["totals"]["bits_per_weight"] <= 4.0
    assert all(layer["bound_holds"] for layer in report["layers"])
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32)
    dense = AutoModelForCausalLM.from_pretrained(make_dense_twin(tmp_path / "out", tmp_path / "dense"))
    with torch.no_grad():
        got, expected, original = (one(TOKENS).logits.flatten(0, 1) for one in (loaded, dense, model))
    torch.testing.assert_close(got, expected, rtol=0, atol=1e-4)
    ours, theirs = (Predictions.of(logits, TOKENS.flatten()) for logits in (got, original))
    kl = compare(ours, theirs, got.shape[1]).kl
    assert kl is not None
    assert 0 < kl.mean() < 1
