"""The functions of the package: `vllm_latq.quantize`, which is a package too, and `vllm_latq.evaluate`."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

import vllm_latq
from helpers.random_models import RandomModels
from vllm_latq.errors import ConfigError
from vllm_latq.format.reader import CheckpointReader

FIRST = "import vllm_latq; function = vllm_latq.quantize; import vllm_latq.quantize.recipe as module"
LAST = "import vllm_latq.quantize.recipe as module; import vllm_latq; function = vllm_latq.quantize"
NAMED = "from vllm_latq import quantize as function; import vllm_latq.quantize.recipe as module; import vllm_latq"


@pytest.mark.parametrize("imports", [FIRST, LAST, NAMED])
def test_quantize_is_function_and_package_in_any_order_of_imports(imports: str) -> None:
    code = (
        f"{imports}; assert callable(function) and function is vllm_latq.quantize; "
        "assert vllm_latq.quantize.recipe is module and module.Recipe; "
        "assert 'Recipe' in vars(__import__('importlib').import_module('vllm_latq.quantize.recipe')); "
        "import sys; assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_quantize_and_evaluate(
    two_blocks: Path, calibration_text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = {"method": "gptq", "bits": 8, "num_samples": 8, "seq_len": 64}
    report = vllm_latq.quantize(two_blocks, tmp_path / "out", calibration=str(calibration_text), **options)
    assert report["recipe"]["bits"] == 8
    assert f"vllm serve {tmp_path / 'out'}" in capsys.readouterr().err  # the last line of the command's display
    text = tmp_path / "text.txt"
    text.write_text("Return the number of items in the list, or None if there is no list. " * 20)
    found = vllm_latq.evaluate(tmp_path / "out", str(text), seq_len=64, baseline=two_blocks)
    assert found.kl is not None
    assert 0 < found.kl < 0.01


def test_events_in_place_of_the_display(two_blocks: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    events: list[str] = []
    vllm_latq.quantize(
        two_blocks, tmp_path / "out", preset="fast", on_event=lambda event: events.append(event["event"]),
        num_samples=2, seq_len=32,
    )  # fmt: skip
    assert (events[0], events[-1]) == ("start", "done")
    assert capsys.readouterr() == ("", "")
    assert CheckpointReader(tmp_path / "out").report()["calibration"]["name"] == "bundled"


def test_bad_option() -> None:
    with pytest.raises(ConfigError, match="unknown wbits"):
        vllm_latq.quantize("nowhere", "out", wbits=4)


def test_no_other_attribute() -> None:
    with pytest.raises(AttributeError, match="module 'vllm_latq' has no attribute 'evaluation'"):
        _ = vllm_latq.evaluation


@pytest.mark.parametrize(("hidden", "size"), [(128, 128), (192, 64), (96, 32), (48, -1)])
def test_groups_that_divide_the_channels(hidden: int, size: int, random_model: RandomModels, tmp_path: Path) -> None:
    """And windows as long as the model has positions."""
    sizes = {"hidden_size": hidden, "intermediate_size": 2 * hidden, "num_attention_heads": 4, "head_dim": hidden // 4}
    model, _ = random_model("llama", f"llama-{hidden}", num_hidden_layers=1, num_key_value_heads=4, **sizes)
    with pytest.warns(UserWarning, match="seq_len|group_size") as said:
        report = vllm_latq.quantize(model, tmp_path / "out", preset="fast", num_samples=2, on_event=lambda _: None)
    assert report["recipe"]["group_size"] == size
    assert report["recipe"]["seq_len"] == report["calibration"]["seq_len"] == 64
    lines = [str(warning.message) for warning in said]
    assert "seq_len: 64 instead of 2048, the positions of the model." in lines
    groups = {64: "groups of 64", 32: "groups of 32", -1: "one scale for each row"}
    assert [line for line in lines if line.startswith("group_size")] == (
        [] if size == 128 else [f"group_size: {groups[size]}, because 128 does not divide {hidden} channels."]
    )
    recipe = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]
    assert recipe["group_size"] == size


def test_groups_that_are_asked_for_stay(random_model: RandomModels, tmp_path: Path) -> None:
    model, _ = random_model("llama", "llama-32")
    with pytest.raises(ValueError, match="group_size"):
        vllm_latq.quantize(model, tmp_path / "out", preset="fast", group_size=128, seq_len=8, on_event=lambda _: None)
