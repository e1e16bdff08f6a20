"""The last to write to a residual stream: found by structure, and what it is asked to take back."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from vllm_latq.quantize.calibration import load_samples
from vllm_latq.quantize.decoder import Decoder
from vllm_latq.quantize.evaluate import evaluate
from vllm_latq.quantize.pipeline import quantize_checkpoint
from vllm_latq.quantize.recipe import Recipe
from vllm_latq.quantize.residual import LastWriter, last_writer
from vllm_latq.quantize.stream import Stream

TOKENS = torch.randint(3, 2048, (3, 20), generator=torch.Generator().manual_seed(1))
DOWN = "mlp.down_proj"


def found_in(directory: Path, dtype: torch.dtype = torch.float32) -> LastWriter | None:
    """The last writer of a model's second block, without the block's name."""
    decoder = Decoder(directory, "cpu", dtype)
    (batch,) = decoder.embed(TOKENS, len(TOKENS))
    with decoder.block(0) as block, torch.no_grad():
        batch.hidden = decoder.run(0, block, batch)
    with decoder.block(1) as block, torch.no_grad():
        writer = last_writer(decoder.linears(1), lambda: decoder.run(1, block, batch))
    return writer and LastWriter(writer.name.split(".1.", 1)[1], writer.factor)


@pytest.mark.parametrize(
    ("model_type", "name", "factor"),
    [
        ("llama", DOWN, 1.0),
        ("phi3", DOWN, 1.0),
        ("granite", DOWN, 0.25),  # a multiplier of its own
        ("gpt_neox", "mlp.dense_4h_to_h", 1.0),  # attention and MLP side by side
    ],
)
def test_found_by_what_moves_with_it(random_model: Any, model_type: str, name: str, factor: float) -> None:
    options = {"residual_multiplier": 0.25} if model_type == "granite" else {}
    directory, _ = random_model(model_type, f"{model_type}-residual", **options)
    writer = found_in(directory)
    assert writer is not None
    assert writer.name == name
    assert writer.factor == pytest.approx(factor, rel=1e-2)


@pytest.mark.parametrize("model_type", ["gemma2", "olmo2"])
def test_none_where_a_norm_follows(random_model: Any, model_type: str) -> None:
    assert found_in(random_model(model_type, f"{model_type}-residual")[0]) is None


def test_found_in_half_precision(mini_model: Path) -> None:
    writer = found_in(mini_model, torch.bfloat16)
    assert writer is not None
    assert (writer.name, writer.factor) == (DOWN, pytest.approx(1.0, rel=1e-2))


def test_the_stream_asks_for_what_the_block_misses(mini_model: Path, calibration_text: Path) -> None:
    """Against both models run in one piece; the first block of one has other weights."""
    samples = load_samples(AutoTokenizer.from_pretrained(mini_model), str(calibration_text), 6, 64)
    original, changed = (AutoModelForCausalLM.from_pretrained(mini_model, dtype=torch.float32) for _ in range(2))
    blunt = "model.layers.0.self_attn.o_proj"
    with torch.no_grad():
        changed.get_submodule(blunt).weight.mul_(0.5)
    seen: dict[str, torch.Tensor] = {}
    name = f"model.layers.1.{DOWN}"
    changed.get_submodule(name).register_forward_pre_hook(lambda _, inputs: seen.update(inputs=inputs[0]))
    for label, model in (("original", original), ("changed", changed)):
        model.model.layers[1].register_forward_hook(lambda _, __, output, label=label: seen.update({label: output}))
        with torch.no_grad():
            model(samples)
    missed = (seen["original"] - seen["changed"]).flatten(0, -2)
    expected = seen["inputs"].flatten(0, -2).T @ missed

    decoder = Decoder(mini_model, "cpu")
    stream = Stream(decoder, samples, "residual")
    with torch.no_grad():
        with decoder.block(0) as block:
            stream.inputs(0, block, decoder.linears(0))
            decoder.linears(0)[blunt].weight.mul_(0.5)
            stream.advance(0, block)
        with decoder.block(1) as block:
            drifts = {
                linear: hessian.drift
                for hessian in stream.inputs(1, block, decoder.linears(1))
                for linear in hessian.linears
            }
    residual = drifts[name].residual
    assert (residual - expected).norm() < 1e-3 * expected.norm()
    assert all(drift.residual is None for linear, drift in drifts.items() if linear != name)


def test_divergence_falls_at_the_same_bits(
    mini_model: Path, calibration_text: Path, evaluation_text: Path, tmp_path: Path
) -> None:
    divergence = {}
    for target, correction in (("quantized", 1.0), ("residual", 0.5)):
        recipe = Recipe("hptq", target_bits=3, target=target, correction=correction, num_samples=48, seq_len=256)
        report = quantize_checkpoint(recipe, mini_model, tmp_path / target, calibration=str(calibration_text))
        assert report["totals"]["bits_per_weight"] <= 3
        assert all(layer["bound_holds"] for layer in report["layers"])
        options = {"seq_len": 256, "batch_size": 16, "dtype": "float32", "max_windows": 24}
        divergence[target] = evaluate(tmp_path / target, str(evaluation_text), baseline=mini_model, **options).kl
    assert divergence["residual"] < 0.9 * divergence["quantized"]
