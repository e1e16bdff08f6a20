"""The last to write to a residual stream: found by structure, and what it is asked to take back."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from vllm_latq.format.reader import CheckpointReader
from vllm_latq.quantize.calibration.last_writer import LastWriter, last_writer
from vllm_latq.quantize.calibration.stream import Stream
from vllm_latq.quantize.calibration.windows import load_samples
from vllm_latq.quantize.evaluation.evaluate import evaluate
from vllm_latq.quantize.model.decoder import Decoder
from vllm_latq.quantize.model.parts import model_parts
from vllm_latq.quantize.pipeline import quantize_checkpoint
from vllm_latq.quantize.recipe import Recipe

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


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_huge_channels_do_not_hide_an_mlp(mini_model: Path, dtype: torch.dtype) -> None:
    """Where the MLP's linears are ignored, the last one is o_proj, which an MLP follows."""
    decoder = Decoder(mini_model, "cpu", dtype)
    (batch,) = decoder.embed(TOKENS, len(TOKENS))
    batch.hidden[:, 0, 7], batch.hidden[:, 0, 11] = 3000.0, -2000.0
    with decoder.block(1) as block, torch.no_grad():
        attention = {name: linear for name, linear in decoder.linears(1).items() if "self_attn" in name}
        assert last_writer(attention, lambda: decoder.run(1, block, batch)) is None


@pytest.mark.parametrize("model_type", ["qwen3", "granite"])
def test_the_stream_asks_for_what_the_block_misses(
    random_model: Any, mini_model: Path, calibration_text: Path, model_type: str
) -> None:
    """Against both models run in one piece; the first block of one has other weights."""
    directory, factor = mini_model, 1.0
    if model_type == "granite":
        factor = 0.25
        directory, _ = random_model("granite", "granite-residual", residual_multiplier=factor)
    samples = load_samples(AutoTokenizer.from_pretrained(mini_model), str(calibration_text), 6, 64).tokens
    original, changed = (AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32) for _ in range(2))
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
    missed = (seen["original"] - seen["changed"]).flatten(0, -2) / factor
    expected = seen["inputs"].flatten(0, -2).T @ missed

    decoder = Decoder(directory, "cpu")
    stream = Stream(decoder, samples, "residual")
    with torch.no_grad():
        first, second = model_parts(decoder, [*decoder.linears(0), *decoder.linears(1)])[:2]
        with first.weights() as block:
            stream.inputs(first, block)
            first.linears[blunt].weight.mul_(0.5)
            stream.advance(first, block)
        with second.weights() as block:
            hessians = stream.inputs(second, block)
    drifts = {linear: hessian.drift for hessian in hessians for linear in hessian.shared.names}
    residual = drifts[name].residual
    assert (residual - expected).norm() < 1e-3 * expected.norm()
    assert float(drifts[name].missed) == pytest.approx(float(missed.square().sum()), rel=1e-3)
    assert all(drift.residual is None for linear, drift in drifts.items() if linear != name)


def test_latq_hits_what_it_was_asked_for(mini_model: Path, calibration_text: Path, tmp_path: Path) -> None:
    """Where only the last writers are rounded, a report's error is that of a block's outputs, by transformers."""
    name = f"model.layers.3.{DOWN}"
    decoder = Decoder(mini_model, "cpu")
    every = [linear for block in range(len(decoder)) for linear in decoder.linears(block)]
    # The first block has nothing to round.
    ignore = ("lm_head", *(linear for linear in every if not linear.endswith(DOWN) or "layers.0." in linear))
    options = {"bits": 2.5, "target": "residual", "ignore": ignore, "num_samples": 8, "seq_len": 128}
    errors = {}
    for correction in (0.5, 1.0):
        out = tmp_path / str(correction)
        quantize_checkpoint(
            Recipe("latq", correction=correction, **options), mini_model, out, calibration=str(calibration_text)
        )
        records = {layer["name"]: layer for layer in CheckpointReader(out).report()["layers"]}
        errors[correction] = records[name]["error"]
        assert all(record["bound_holds"] for record in records.values())
    samples = load_samples(AutoTokenizer.from_pretrained(mini_model), str(calibration_text), 8, 128).tokens
    behind = []
    for path in (mini_model, tmp_path / "1.0"):
        model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
        # The output of the last block, before the last norm.
        model.model.layers[3].register_forward_hook(lambda _, __, output: behind.append(output))
        with torch.no_grad():
            model(samples)
    missed = float((behind[0].double() - behind[1].double()).square().sum())
    assert errors[1.0] == pytest.approx(missed, rel=1e-3)
    assert errors[1.0] < errors[0.5]


def test_divergence_falls_at_the_same_bits(
    mini_model: Path, calibration_text: Path, evaluation_text: Path, tmp_path: Path
) -> None:
    divergence = {}
    for target, correction in (("quantized", 1.0), ("residual", 0.5)):
        recipe = Recipe("hptq", bits=3, target=target, correction=correction, num_samples=48, seq_len=256)
        report = quantize_checkpoint(recipe, mini_model, tmp_path / target, calibration=str(calibration_text))
        assert report["totals"]["bits_per_weight"] <= 3
        assert all(layer["bound_holds"] for layer in report["layers"])
        options = {"seq_len": 256, "batch_size": 16, "dtype": "float32", "max_windows": 24}
        divergence[target] = evaluate(tmp_path / target, str(evaluation_text), baseline=mini_model, **options).kl
    assert divergence["residual"] < 0.9 * divergence["quantized"]
