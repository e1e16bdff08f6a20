"""The model card names its model as the hub does, says what was measured, and prints commands that work."""

import json
import shlex
from pathlib import Path
from typing import Any

import pytest

from vllm_latq.cli.main import build_parser
from vllm_latq.cli.quantize import _recipe
from vllm_latq.quantize.recipe import Recipe
from vllm_latq.quantize.runs.card import base_model, model_card, update_card
from vllm_latq.quantize.runs.commands import commands

LATQ = Recipe("latq", bits=3.0)


def written(source: Path, recipe: Recipe = LATQ, **changes: Any) -> str:
    """Return the card of a checkpoint `out` of a model."""
    totals = {"weights": 1000, "bits_per_weight": 3.0, "bytes": 375, "served_bits_per_weight": 3.25}
    report = {
        "totals": {**totals, "loss": 0.002, "loss_bound": 0.01},
        "model": base_model(source),
        "calibration": {"name": "bundled", "sha256": "ab12", "samples": 4, "seq_len": 8},
        **{"date": "2026-01-02T03:04:05+00:00", "vllm_latq": "0.1.0", "torch": "2.11"},
    }
    return model_card(source, recipe, report | changes, "out")


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """Directory of a model without weights."""
    source = tmp_path / "pydoc-mini"
    source.mkdir()
    (source / "config.json").write_text(json.dumps({"architectures": ["LlamaForCausalLM"]}))
    return source


def test_base_model(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(model)
    (model / "model.safetensors").write_bytes(b"12345")
    cached = tmp_path / "models--org--some-model" / "snapshots" / "0123abcd"
    cached.parent.mkdir(parents=True)
    model.rename(cached)
    assert base_model(cached) == {"name": "org/some-model", "bytes": 5}
    cached.rename(model)
    for source in (model, Path()):
        assert base_model(source) == {"name": "pydoc-mini", "bytes": 5}
    card = written(model)
    assert "base_model: pydoc-mini\nbase_model_relation: quantized\n" in card
    assert "3.000 stored, 3.250 in GPU memory" in card
    assert "`bundled`, 4 windows of 8 tokens, SHA-256 `ab12`" in card
    assert "0.002 nats per token, at most 0.01" in card
    assert "**`import vllm_latq` must come before `from_pretrained`.**" in card
    assert "PATH" not in card


def test_licence_and_task_are_those_of_the_base_model(model: Path) -> None:
    assert "its card names none" in written(model)
    assert "pipeline_tag: text-generation\n" in written(model)
    (model / "README.md").write_text(
        "---\nlanguage:\n- en\nlicense: other\nlicense_name: 'my-licence'\nlicense_link: https://a.b/c: d\n"
        "pipeline_tag: image-text-to-text\n---\n# A model\nlicense: mit\n"
    )
    card = written(model)
    front = card.split("---\n")[1]
    assert "license: other\nlicense_name: my-licence\n" in front
    assert 'license_link: "https://a.b/c: d"\n' in front
    assert front.count("pipeline_tag: image-text-to-text\n") == front.count("pipeline_tag") == 1
    assert "| licence | the base model's: `my-licence` |" in card


def test_options_are_those_of_the_method(model: Path) -> None:
    latq, gptq = written(model), written(model, Recipe("gptq", bits=3), calibration=None)
    assert "- bits: `3.0`" in latq
    assert "- group_size:" not in latq
    assert "- outlier_rate:" not in latq
    assert "- bits: `3`" in gptq
    assert "- group_size:" in gptq


@pytest.mark.parametrize(
    "recipe",
    [
        Recipe("latq", bits=3.14159),
        Recipe("latq", bits=4.0, ignore=("a b", "lm_head"), target="residual", correction=0.5),
        Recipe("gptq", bits=3, group_size=-1, sweeps=2, ignore=()),
        Recipe("ssqr", bits=2, outliers="overflow", outlier_rate=0.02, num_samples=16),
        Recipe("hptq", bits=3.125, reduction="lll", seed=7),
        Recipe("rtn", bits=8, scales="signed"),
    ],
    ids=lambda recipe: recipe.method,
)
def test_command_makes_the_same_recipe(recipe: Recipe) -> None:
    calibration = {"name": "my text.txt"}
    words = shlex.split(commands(recipe, "org/model", "out; rm -r x", calibration)["Quantize"])
    options = build_parser().parse_args(words[1:])
    assert _recipe(options) == recipe
    assert (options.model, options.destination) == ("org/model", "out; rm -r x")
    assert options.calibration == "my text.txt"


def test_evaluations_are_written_into_the_card(model: Path) -> None:
    out = model.parent / "out"
    out.mkdir()
    assert not update_card(out)
    (out / "README.md").write_text("# A card of someone else\n")
    assert not update_card(out)
    card = written(model)
    assert "Not measured yet" in card
    run = {"text": {"name": "held|out`.txt"}, "windows": 4, "seq_len": 128, "perplexity": 20.5, "kl": 0.0123}
    run |= {"kl_p99": 0.25, "kl_max": 1.5, "on_answers": True, "through": "vllm"}
    for tasks in (None, {"arc_easy": {"acc": 0.75}}):
        (out / "README.md").write_text(card)
        (out / "latq_evaluation.json").write_text(json.dumps({"runs": [run | {"tasks": tasks}]}))
        for _ in range(2):  # the second time replaces the table of the first
            assert update_card(out)
            found = (out / "README.md").read_text()
            assert "| `heldout.txt, answers, through vLLM` | 4 x 128 | 20.5 | - | 0.0123 | 0.25 | 1.5 | - |" in found
            assert "Not measured yet" not in found
            assert ("| `arc_easy` | `acc` | 0.75 |" in found) == bool(tasks)
            assert found.split("## Serve")[1] == card.split("## Serve")[1]
    assert sorted(path.name for path in out.iterdir()) == ["README.md", "latq_evaluation.json"]
