"""latq on group scales: bits, widths of merged linears, bounds, resumed runs, exports, and contradictions."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from helpers.random_models import RandomModels
from vllm_latq.cli.main import main
from vllm_latq.errors import ConfigError
from vllm_latq.format.encodings.packed import PackedWeight
from vllm_latq.format.files import TensorStore
from vllm_latq.format.reader import REPORT_FILE, CheckpointReader
from vllm_latq.format.verify import verify
from vllm_latq.quantize.export import export_checkpoint
from vllm_latq.quantize.pipeline import quantize_checkpoint
from vllm_latq.quantize.recipe import Recipe

RECIPE = Recipe("latq", 3.1, grid="group", num_samples=16, seq_len=128, ignore=("lm_head",))
IDS = torch.arange(3, 43).reshape(2, 20)


@pytest.fixture(scope="module")
def checkpoint(two_blocks: Path, calibration_text: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("group") / "out"
    quantize_checkpoint(RECIPE, two_blocks, out, calibration=str(calibration_text))
    return out


def report(directory: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((directory / REPORT_FILE).read_text())
    return found


def widths(directory: Path) -> dict[str, int]:
    reader = CheckpointReader(directory)
    weights = {name: reader.weight(name) for name in reader.shapes}
    return {name: weight.bits for name, weight in weights.items() if isinstance(weight, PackedWeight)}


def test_bits_are_met_by_several_widths(checkpoint: Path) -> None:
    assert list(verify(checkpoint)) == []
    found = widths(checkpoint)
    assert len(set(found.values())) > 1
    for block in ("model.layers.0", "model.layers.1"):
        assert len({found[f"{block}.self_attn.{leaf}_proj"] for leaf in "qkv"}) == 1
        assert found[f"{block}.mlp.gate_proj"] == found[f"{block}.mlp.up_proj"]
    totals = report(checkpoint)["totals"]
    assert 2.8 < totals["bits_per_weight"] <= 3.1
    assert CheckpointReader(checkpoint).config.scheme.group_size == 128


def test_losses_are_within_their_bounds_and_below_those_of_plain_rounding(
    checkpoint: Path, two_blocks: Path, calibration_text: Path, tmp_path: Path
) -> None:
    layers = report(checkpoint)["layers"]
    assert all(0 < layer["loss"] <= layer["loss_bound"] and layer["bound_holds"] for layer in layers)
    assert all(0 < layer["error"] <= layer["bound"] for layer in layers)
    assert all(layer["clipped"] == 0 for layer in layers)
    gptq = Recipe("gptq", 3, num_samples=16, seq_len=128)
    quantize_checkpoint(gptq, two_blocks, tmp_path / "gptq", calibration=str(calibration_text))
    original = logits(two_blocks)
    assert divergence(original, logits(checkpoint)) < 0.7 * divergence(original, logits(tmp_path / "gptq"))


def logits(directory: Path) -> torch.Tensor:
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    with torch.no_grad():
        return model(IDS).logits


def divergence(original: torch.Tensor, other: torch.Tensor) -> float:
    p, q = (part.log_softmax(-1) for part in (original, other))
    return float((p.exp() * (p - q)).sum(-1).mean())


def test_resumed_run_writes_the_same(
    checkpoint: Path, two_blocks: Path, calibration_text: Path, tmp_path: Path
) -> None:
    """The second block is quantized again, and the widths of the first one are those that were written."""

    def stop(event: Any) -> None:
        if event["event"] == "block":
            raise KeyboardInterrupt

    out = tmp_path / "out"
    with pytest.raises(KeyboardInterrupt):
        quantize_checkpoint(RECIPE, two_blocks, out, calibration=str(calibration_text), on_event=stop)
    quantize_checkpoint(RECIPE, two_blocks, out, calibration=str(calibration_text), resume=True)
    for file in sorted(checkpoint.glob("*.safetensors")):
        assert file.read_bytes() == (out / file.name).read_bytes()
    configs = [json.loads((directory / "config.json").read_text()) for directory in (checkpoint, out)]
    assert configs[0] == configs[1]


def test_export_has_the_codes_and_scales(checkpoint: Path, tmp_path: Path) -> None:
    export_checkpoint(checkpoint, tmp_path / "out")
    ours, theirs = CheckpointReader(checkpoint), TensorStore(tmp_path / "out")
    for name in ours.shapes:
        tensors = ours.weight(name).to_tensors()
        assert torch.equal(theirs.get(f"{name}.weight_packed"), tensors["qweight"])
        assert torch.equal(theirs.get(f"{name}.weight_scale"), tensors["scales"])
    config = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]
    groups = config["config_groups"].values()
    assert sorted(group["weights"]["num_bits"] for group in groups) == sorted(set(widths(checkpoint).values()))


def test_inspect_shows_bits_and_loss(checkpoint: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", str(checkpoint), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["bits_per_weight"] == report(checkpoint)["totals"]["bits_per_weight"]
    page = checkpoint.with_name("report.html")
    assert main(["report", str(checkpoint), "-o", str(page)]) == 0
    assert page.stat().st_size > 10_000


def test_scales_of_whole_rows_count_as_they_are_served(
    random_model: RandomModels, calibration_text: Path, tmp_path: Path
) -> None:
    """They take twice as many bits in memory as in files, and neither exceeds the recipe's."""
    source, _ = random_model("llama", "whole-rows")
    recipe = Recipe("latq", 4.0, grid="group", group_size=-1, num_samples=2, seq_len=32, ignore=("lm_head",))
    quantize_checkpoint(recipe, source, tmp_path / "out", calibration=str(calibration_text))
    totals = report(tmp_path / "out")["totals"]
    assert 3 < totals["bits_per_weight"] < totals["served_bits_per_weight"] <= 4.0


def test_experts_of_a_layer_have_one_width(random_model: RandomModels, calibration_text: Path, tmp_path: Path) -> None:
    sizes = {"hidden_size": 64, "moe_intermediate_size": 64, "intermediate_size": 64}
    source, _ = random_model("qwen3_moe", "group-experts", num_experts=4, num_experts_per_tok=2, **sizes)
    recipe = Recipe("latq", 3.7, grid="group", group_size=32, num_samples=8, seq_len=32)
    quantize_checkpoint(recipe, source, tmp_path / "out", calibration=str(calibration_text))
    found = widths(tmp_path / "out")
    for block in ("model.layers.0", "model.layers.1"):
        assert len({width for name, width in found.items() if name.startswith(f"{block}.mlp.experts.")}) == 1
    export_checkpoint(tmp_path / "out", tmp_path / "exported")


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"method": "latq", "grid": "midrise"}, r"recipe\.grid: expected one of trellis, group, found 'midrise'"),
        ({"method": "gptq", "grid": "group"}, r"recipe\.grid: expected one of midtread, midrise, found 'group'"),
        ({"method": "hptq", "grid": "group"}, r"recipe\.grid: .*hptq does not use grid"),
        ({"method": "latq", "group_size": 64}, r"recipe\.group_size: .*or choose grid group"),
        ({"method": "latq", "grid": "group", "scales": "mse"}, r"latq does not use scales"),
        ({"method": "latq", "grid": "group", "bits": 2}, r"recipe\.bits: expected a finite number above 2"),
    ],
)
def test_contradictions_are_refused(options: dict[str, Any], error: str) -> None:
    with pytest.raises(ConfigError, match=error):
        Recipe(**options)


def test_recipe_states_what_it_reads() -> None:
    assert Recipe("latq").to_dict()["grid"] == "trellis"
    assert "group_size" not in Recipe("latq").to_dict()
    assert RECIPE.to_dict()["group_size"] == 128
    assert Recipe.from_dict(RECIPE.to_dict()) == RECIPE
    assert Recipe("gptq").to_dict()["grid"] == "midtread"


def test_command_refuses_groups_of_the_trellis(two_blocks: Path, tmp_path: Path, capsys: Any) -> None:
    arguments = ["quantize", str(two_blocks), str(tmp_path / "out"), "--group-size", "64"]
    assert main(arguments) == 1
    assert "--group-size does not apply to --method latq; leave it out" in capsys.readouterr().err
    assert main([*arguments, "--grid", "group", "--dry-run", "--bits", "3"]) == 0
    assert main([*arguments[:3], "--grid", "midrise"]) == 1
    assert "--grid: expected one of trellis, group" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
