"""The benchmark's own rows, at a tiny size: its numbers are those of the checkpoint that it measured."""

import json
from pathlib import Path

import pytest
import torch

from helpers.originals import in_float8
from vllm_latq.errors import ConfigError
from vllm_latq.format.files import TensorStore
from vllm_latq.quantize.evaluation.evaluate import evaluate
from vllm_latq.quantize.pipeline import quantize_checkpoint
from vllm_latq.quantize.studies import bench

# Two ways to the same float32 logits.
KL_TOLERANCE = 1e-3


def test_row_states_what_the_checkpoint_gives(
    mini_model: Path,
    calibration_text: Path,
    evaluation_text: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    recipe = bench.our_settings(3, 64, num_samples=8, seq_len=64, dtype="float32")["gptq"]
    assert (recipe.bits, recipe.group_size) == (3, 64)
    assert bench.our_settings(3, 64)["latq"].bits == 3.25
    assert all(setting.ignored == ("lm_head",) for setting in bench.our_settings(3, 64).values())
    result = tmp_path / "bench.json"
    texts = ["--calibration", str(calibration_text), "--text", str(evaluation_text)]
    sizes = ["--num-samples", "8", "--seq-len", "64", "--max-windows", "8", "--bits", "3", "--group-size", "64"]
    sizes += ["--dtype", "float32"]
    bench.main([str(mini_model), *texts, *sizes, "--peers", "--only", "latq gptq", "-o", str(result)])
    (row,) = json.loads(result.read_text())
    assert "latq gptq" in capsys.readouterr().out
    assert row["quantizer"] == "latq"
    assert row["options"] == json.loads(json.dumps(recipe.to_dict()))
    assert 0 < row["timing"]["quantize"] < row["timing"]["process"]
    assert 0 < row["timing"]["quantize_cpu"] < row["timing"]["process_cpu"]

    report = quantize_checkpoint(recipe, mini_model, tmp_path / "again", calibration=str(calibration_text))
    expected = evaluate(
        tmp_path / "again", str(evaluation_text), seq_len=64, baseline=mini_model, dtype="float32", max_windows=8
    )
    assert row["bits"] == pytest.approx(report["totals"]["bits_per_weight"])
    assert row["kl"] == pytest.approx(expected.kl, rel=KL_TOLERANCE)
    assert row["perplexity"] == pytest.approx(expected.perplexity, rel=KL_TOLERANCE)
    # Inputs of the first block are the original's for both; later ones follow the quantized prefix in the report.
    errors = sum(layer["relative_error"] for layer in report["layers"])
    assert row["layer_error"] == pytest.approx(errors, rel=0.2)


def test_layer_error_is_that_of_the_outputs(mini_model: Path, calibration_text: Path, tmp_path: Path) -> None:
    shared = bench.Bench(
        mini_model, str(calibration_text), "", 2, 32, tmp_path, tmp_path, group_size=64, dtype="float32"
    )
    job = shared._job("latq", "gptq", 3, shared.samples, {})
    given = TensorStore(Path(job.model))
    assert job.group_size == 64
    assert all(given.get(key).dtype == torch.float32 for key in given.names())
    assert json.loads((Path(job.model) / "config.json").read_text())["dtype"] == "float32"
    name = "model.layers.0.self_attn.q_proj"
    found = {}
    with shared.decoder.block(0) as block, torch.no_grad():
        batch = shared.decoder.embed(shared.samples, 2)[0]
        block.self_attn.q_proj.register_forward_pre_hook(lambda _, inputs: found.update(inputs=inputs[0]))
        shared.decoder.run(0, block, batch)
        weight = block.self_attn.q_proj.weight.clone()
    exact = {key: shared.decoder.store.get(f"{key}.weight").float() for key in shared.hessians}
    moved = exact | {name: weight + 0.01 * torch.randn(weight.shape, generator=torch.Generator().manual_seed(0))}
    weights = {key: bench.PeerWeight(value, 0) for key, value in moved.items()}
    inputs = found["inputs"].double().flatten(0, 1)
    wrong = inputs @ (moved[name] - weight).double().T
    expected = wrong.square().sum() / (inputs @ weight.double().T).square().sum()
    assert shared._layer_error(weights) == pytest.approx(float(expected), rel=1e-4)


def test_a_float32_copy_of_8_bit_floats_is_refused(mini_model: Path, calibration_text: Path, tmp_path: Path) -> None:
    in_float8(mini_model, tmp_path / "float8", (128, 128))
    with pytest.raises(ConfigError, match="published quantized"):
        bench.Bench(tmp_path / "float8", str(calibration_text), "", 2, 32, tmp_path, tmp_path, dtype="float32")
    assert not (tmp_path / "float32").exists()
