"""Certificates: honest checkpoints pass to the last digits; changed reports, weights and models do not."""

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from helpers.builders import heavy_tailed_layer
from helpers.checkpoints import edit_json
from vllm_latq.cli.main import main
from vllm_latq.coding.packing import pack_codes
from vllm_latq.errors import CheckpointError, ConfigError
from vllm_latq.format.encodings.packed import PackedWeight
from vllm_latq.format.reader import CheckpointReader, checkpoint_fingerprint
from vllm_latq.format.verify import verify
from vllm_latq.quantize.certificate.certificate import verify_certificate
from vllm_latq.quantize.certificate.recompute import worst_case
from vllm_latq.quantize.methods.layer import layer_factor, quantize_layer
from vllm_latq.quantize.pipeline import quantize_checkpoint
from vllm_latq.quantize.recipe import Recipe

# Attention alone is quantized: small matrices, and both streams and every block still take part.
FEW = {"num_samples": 8, "seq_len": 64, "ignore": ("lm_head", "gate_proj", "up_proj", "down_proj")}
# For latq, which searches long for every layer, without the widest.
FEWER = FEW | {"ignore": (*FEW["ignore"], "q_proj")}
LEAST = FEW | {"ignore": (*FEWER["ignore"], "k_proj", "v_proj", "layers.0.self_attn.o_proj")}
RECIPES = {
    "ssqr": Recipe("ssqr", 3, outliers="overflow", target="original", **FEW),
    "hptq": Recipe("hptq", bits=4.0, reduction="lll", rounding="stochastic", **FEW),
    "rtn": Recipe("rtn", 4, **FEW),
    "saving": Recipe("ssqr", 2, beam=2, sweeps=1, **LEAST),
    "saving-exact": Recipe("ssqr", 3, target="original", **LEAST),
    "saving-midrise": Recipe("ssqr", 3, grid="midrise", rounding="stochastic", **LEAST),
    "saving-beam": Recipe("ssqr", 2, beam=2, **LEAST),
    "overflow-sweeps": Recipe("ssqr", 3, outliers="overflow", sweeps=1, **LEAST),
    "gptq-sweeps": Recipe("gptq", 2, sweeps=1, **LEAST),
    "gptq-beam": Recipe("gptq", 2, beam=2, **LEAST),
    "gptq": Recipe("gptq", 3, order="min-pivot", scales="fitted", dtype="bfloat16", **FEW),
    "latq": Recipe("latq", bits=3.0, **FEWER),
    "latq-residual": Recipe("latq", bits=3.0, target="residual", correction=0.5, **FEWER),
    "latq-group": Recipe("latq", bits=3.0, grid="group", target="residual", correction=0.5, **FEW),
    "midrise": Recipe("ssqr", 2, outliers="overflow", grid="midrise", target="residual", **FEW),
}
# Relative difference of float32 sums where the certificate takes another way than the quantizer.
EXACT = 1e-6
PROBED = "model.layers.1.self_attn.o_proj"


@pytest.fixture(scope="module")
def certified(
    two_blocks: Path, calibration_text: Path, tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str], Path]:
    """Method -> its checkpoint, made when it is first asked for."""
    directory = tmp_path_factory.mktemp("certified")

    @cache
    def checkpoint(method: str) -> Path:
        quantize_checkpoint(RECIPES[method], two_blocks, directory / method, calibration=str(calibration_text))
        return directory / method

    return checkpoint


def renew_fingerprint(checkpoint: Path, **changes: float) -> None:
    """Make a changed checkpoint valid in itself, with other changes to its config."""
    path = checkpoint / "config.json"
    config = json.loads(path.read_text()) | changes
    config["quantization_config"]["fingerprint"] = checkpoint_fingerprint(CheckpointReader(checkpoint))
    path.write_text(json.dumps(config))


@pytest.mark.parametrize("method", RECIPES)
def test_every_claim_is_confirmed(
    method: str, certified: Callable[[str], Path], two_blocks: Path, calibration_text: Path
):
    assert list(verify_certificate(certified(method), two_blocks, str(calibration_text), tolerance=EXACT)) == []


def test_reports_of_before_served_bits_are_confirmed(
    certified: Callable[[str], Path], two_blocks: Path, calibration_text: Path, tmp_path: Path
) -> None:
    shutil.copytree(certified("rtn"), tmp_path / "older")
    path = tmp_path / "older" / "latq_report.json"
    report = json.loads(path.read_text())
    assert report["totals"].pop("served_bits_per_weight") > 4
    assert all(layer.pop("served_bits") > 4 for layer in report["layers"])
    path.write_text(json.dumps(report))
    assert list(verify_certificate(tmp_path / "older", two_blocks, str(calibration_text))) == []


def test_from_the_command_line(
    certified: Callable[[str], Path], two_blocks: Path, calibration_text: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["verify", "--certificate", str(certified("rtn"))]
    assert main([*command, "--calibration", str(calibration_text), "--model", str(two_blocks)]) == 0
    assert "valid, errors and bounds confirmed" in capsys.readouterr().out
    saving = ["verify", "--certificate", str(certified("saving")), "--model", str(two_blocks)]
    assert main([*saving, "--calibration", str(calibration_text)]) == 0
    assert "valid, errors and bounds confirmed" in capsys.readouterr().out
    assert main([*saving, "--calibration", str(calibration_text), "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"checkpoint": saving[2], "valid": True, "problems": []}
    assert main([*command, "--calibration", str(calibration_text)]) == 1
    assert "--certificate requires --model: errors are measured against the original model" in capsys.readouterr().err
    assert main(["verify", str(certified("rtn")), "--model", str(two_blocks)]) == 1
    assert "requires --certificate" in capsys.readouterr().err


def test_changed_report_is_named_by_layer_and_field(
    certified: Callable[[str], Path], two_blocks: Path, calibration_text: Path, tmp_path: Path
) -> None:
    copy = Path(shutil.copytree(certified("ssqr"), tmp_path / "copy"))
    report = json.loads((copy / "latq_report.json").read_text())
    (record,) = (layer for layer in report["layers"] if layer["name"] == PROBED)
    record["error"] *= 0.9
    record["bound"] *= 0.5
    report["calibration"]["samples"] = 4096
    (copy / "latq_report.json").write_text(json.dumps(report))
    assert list(verify(copy)) == []
    problems = [str(problem) for problem in verify_certificate(copy, two_blocks, str(calibration_text))]
    assert len(problems) == 3
    for problem, field in zip(problems, ("calibration", f"{PROBED}.error", f"{PROBED}.bound"), strict=True):
        assert f"{field}: expected " in problem


def test_a_bound_that_is_not_claimed_is_noticed(
    certified: Callable[[str], Path], two_blocks: Path, calibration_text: Path, tmp_path: Path
) -> None:
    copy = Path(shutil.copytree(certified("saving-exact"), tmp_path / "copy"))
    report = json.loads((copy / "latq_report.json").read_text())
    report["layers"][0]["bound_holds"] = None
    (copy / "latq_report.json").write_text(json.dumps(report))
    (problem,) = verify_certificate(copy, two_blocks, str(calibration_text))
    assert "bound_holds: expected a claim" in str(problem)


def test_changed_weight_fails_although_its_fingerprint_was_renewed(
    certified: Callable[[str], Path], two_blocks: Path, calibration_text: Path, tmp_path: Path
) -> None:
    copy = Path(shutil.copytree(certified("ssqr"), tmp_path / "copy"))
    shard = copy / "model-00002-of-00003.safetensors"
    tensors = load_file(shard)
    tensors[f"{PROBED}.scales"] = tensors[f"{PROBED}.scales"] * 4
    save_file(tensors, shard, metadata={"format": "pt"})
    renew_fingerprint(copy)
    assert list(verify(copy)) == []
    problems = [str(problem) for problem in verify_certificate(copy, two_blocks, str(calibration_text))]
    about = [problem for problem in problems if f"{PROBED}." in problem]
    assert any(f"{PROBED}.error: expected the recomputed" in problem for problem in about)
    assert any(f"{PROBED}.bound_holds: expected a rounding error below" in problem for problem in about)
    # Blocks before it are as claimed.
    assert not any("model.layers.0." in problem for problem in problems)


def test_each_number_of_latq_is_recomputed(
    certified: Callable[[str], Path], two_blocks: Path, calibration_text: Path, tmp_path: Path
) -> None:
    copy = Path(shutil.copytree(certified("latq"), tmp_path / "copy"))
    report = json.loads((copy / "latq_report.json").read_text())
    fields = ("bits", "loss", "loss_bound", "bound", "error", "damping", "relative_error")
    changed = []
    for record, field in zip(report["layers"], fields, strict=False):
        record[field] *= 0.98
        changed.append(f"{record['name']}.{field}")
    report["totals"]["bits_per_weight"] -= 0.5
    (copy / "latq_report.json").write_text(json.dumps(report))
    problems = [str(problem) for problem in verify_certificate(copy, two_blocks, str(calibration_text))]
    for problem, where in zip(problems, (*changed, "totals.bits_per_weight"), strict=True):
        assert f"{where}: expected the recomputed" in problem


def test_changed_weights_of_latq_are_noticed(
    certified: Callable[[str], Path], two_blocks: Path, calibration_text: Path, tmp_path: Path
) -> None:
    copy = Path(shutil.copytree(certified("latq"), tmp_path / "copy"))
    shard = copy / "model-00002-of-00003.safetensors"
    tensors = load_file(shard)
    # Scales that are larger by half an octave, with the code of the smaller ones.
    tensors[f"{PROBED}.row_exponents"] += 4
    save_file(tensors, shard, metadata={"format": "pt"})
    problems = [str(problem) for problem in verify_certificate(copy, two_blocks, str(calibration_text))]
    named = {problem.split(f"{PROBED}.")[1].split(":")[0] for problem in problems if f"{PROBED}." in problem}
    assert {"error", "loss", "bound", "loss_bound", "bound_holds"} <= named
    # Each layer stands for itself: the statistics are those of the original model.
    assert not any("_proj." in problem and PROBED not in problem for problem in problems)


def test_another_calibration_text_is_noticed(
    certified: Callable[[str], Path], two_blocks: Path, evaluation_text: Path
) -> None:
    for method in ("latq", "midrise"):
        problems = [str(problem) for problem in verify_certificate(certified(method), two_blocks, str(evaluation_text))]
        assert any(f"{PROBED}.error: expected the recomputed" in problem for problem in problems), method


def test_another_model_is_noticed(
    certified: Callable[[str], Path], two_blocks: Path, calibration_text: Path, tmp_path: Path
) -> None:
    other = Path(shutil.copytree(two_blocks, tmp_path / "other"))
    tensors = load_file(other / "model.safetensors")
    tensors["model.norm.weight"] = tensors["model.norm.weight"] * 2
    tensors[f"{PROBED}.weight"] = torch.zeros_like(tensors[f"{PROBED}.weight"])
    save_file(tensors, other / "model.safetensors", metadata={"format": "pt"})
    problems = [str(problem) for problem in verify_certificate(certified("rtn"), other, str(calibration_text))]
    assert "model.norm.weight: expected the model's own tensor" in problems[0]
    assert any(f"{PROBED}.error: expected the recomputed" in problem for problem in problems)


def test_bounds_of_saving_count_what_was_clipped_and_nothing_else() -> None:
    weight, hessian = heavy_tailed_layer(96, 128)
    recipe = Recipe("ssqr", 2, group_size=32)
    factor = layer_factor(hessian, recipe)
    result = quantize_layer(weight, factor, recipe)
    honest = result.weight
    assert isinstance(honest, PackedWeight)
    assert honest.scales is not None
    half_steps = float((factor.importance.reshape(4, -1).sum(1) @ honest.scales.double().square().T).sum()) / 4
    bound, beyond = worst_case(honest, factor, recipe, result.dequantized - weight)
    assert bound == pytest.approx(result.record.bound, rel=EXACT)
    assert bound - beyond == pytest.approx(half_steps, rel=0.01)
    assert 0.02 * half_steps < beyond < 0.5 * half_steps
    assert result.record.expected_error == pytest.approx((bound - beyond) / 3 + beyond, rel=EXACT)
    # Codes within the grid that are moved by a step leave their cells, which no clipping explains.
    codes = honest.integers()
    spoiled = replace(honest, qweight=pack_codes(torch.where(codes == 0, -1, codes) + 2, 2))
    moved = spoiled.dequantize() - weight
    error = float((moved.double() @ hessian.double() * moved).sum())
    assert error > 2 * worst_case(spoiled, factor, recipe, moved)[0]


def test_what_cannot_be_checked_at_all_is_an_error(
    certified: Callable[[str], Path], two_blocks: Path, calibration_text: Path, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match="the calibration text of the checkpoint"):
        list(verify_certificate(certified("rtn"), two_blocks, None))
    with pytest.raises(ConfigError, match="tolerance: expected a number between 0 and 1"):
        list(verify_certificate(certified("rtn"), two_blocks, str(calibration_text), tolerance=0.0))
    with pytest.raises(CheckpointError, match="This is an unquantized model"):
        list(verify_certificate(two_blocks, two_blocks, str(calibration_text)))
    copy = Path(shutil.copytree(certified("rtn"), tmp_path / "copy"))
    config = json.loads((copy / "config.json").read_text())
    config["quantization_config"]["recipe"] = RECIPES["latq"].to_dict() | {"ignore": FEW["ignore"]}
    (copy / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match="encoding trellis, which this recipe of latq stores, found packed"):
        list(verify_certificate(copy, two_blocks, str(calibration_text)))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"bits": 3}, "bits 3, which this recipe of rtn stores, found 4"),
        ({"group_size": 32}, "group_size 32, which this recipe of rtn stores, found 128"),
        ({"method": "ssqr", "scales": "fitted"}, "outliers True, which this recipe of ssqr stores, found False"),
    ],
)
def test_a_recipe_that_contradicts_the_checkpoint_is_an_error(
    changes: dict[str, object],
    message: str,
    certified: Callable[[str], Path],
    two_blocks: Path,
    calibration_text: Path,
    tmp_path: Path,
) -> None:
    copy = with_recipe(certified("rtn"), tmp_path / "copy", changes)
    with pytest.raises(CheckpointError, match=message):
        list(verify_certificate(copy, two_blocks, str(calibration_text)))


def with_recipe(source: Path, target: Path, changes: dict[str, object]) -> Path:
    """Return a copy of a checkpoint whose recipe says something else."""
    shutil.copytree(source, target)
    edit_json(target / "config.json", lambda config: config["quantization_config"]["recipe"].update(changes))
    return target


@pytest.mark.parametrize(
    ("bits", "message"),
    [
        (2.4, r"expected at most 2\.4 bits per weight, which its recipe states, found 2\.[5-9]"),
        (5.0, r"expected codes of [48] bits, to which the recipe and the loss lead, found [234] bits"),
    ],
)
def test_widths_of_other_bits_than_the_recipe_are_an_error(
    bits: float,
    message: str,
    certified: Callable[[str], Path],
    two_blocks: Path,
    calibration_text: Path,
    tmp_path: Path,
) -> None:
    copy = with_recipe(certified("latq-group"), tmp_path / "copy", {"bits": bits})
    with pytest.raises(CheckpointError, match=message):
        list(verify_certificate(copy, two_blocks, str(calibration_text)))


def test_nothing_but_the_linears_may_differ_from_the_model(
    certified: Callable[[str], Path], two_blocks: Path, calibration_text: Path, tmp_path: Path
) -> None:
    """A changed config, an added bias and a missing norm are found, though the checkpoint is valid in itself."""
    copy = Path(shutil.copytree(certified("rtn"), tmp_path / "copy"))
    shard, index = copy / "model-00002-of-00003.safetensors", copy / "model.safetensors.index.json"
    tensors, listing = load_file(shard), json.loads(index.read_text())
    norm, bias = "model.layers.1.input_layernorm.weight", f"{PROBED}.bias"
    del tensors[norm], listing["weight_map"][norm]
    tensors[bias], listing["weight_map"][bias] = torch.ones(256), shard.name
    save_file(tensors, shard, metadata={"format": "pt"})
    index.write_text(json.dumps(listing))
    renew_fingerprint(copy, rms_norm_eps=1.0)
    problems = [str(problem) for problem in verify_certificate(copy, two_blocks, str(calibration_text))]
    assert len(problems) == 3
    for problem, where in zip(problems, ("config.json: rms_norm_eps", norm, bias), strict=True):
        assert f"{where}: expected " in problem
