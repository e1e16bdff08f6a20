"""Runs that look at the whole model: latq, from model to checkpoint."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from helpers.chat import talk, with_template, write_lines
from vllm_latq.errors import ConfigError
from vllm_latq.format.reader import CheckpointReader
from vllm_latq.format.verify import verify
from vllm_latq.quantize.certificate.certificate import verify_certificate
from vllm_latq.quantize.evaluation.evaluate import evaluate
from vllm_latq.quantize.pipeline import quantize_checkpoint
from vllm_latq.quantize.recipe import Recipe
from vllm_latq.quantize.runs import writer

FEW = {"num_samples": 32, "seq_len": 128}
TARGET = 3.0
LATQ = Recipe("latq", bits=TARGET, ignore=("lm_head",), **FEW)
# Attention alone, for what does not need the rest.
ATTENTION = {"ignore": ("lm_head", "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"), "num_samples": 16, "seq_len": 64}


class InterruptionError(Exception):
    pass


@pytest.fixture(scope="module")
def checkpoint(two_blocks: Path, whole_calibration_text: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("latq") / "checkpoint"
    quantize_checkpoint(LATQ, two_blocks, path, calibration=str(whole_calibration_text))
    return path


def test_the_model_meets_its_bits_and_layers_differ(checkpoint: Path) -> None:
    assert list(verify(checkpoint)) == []
    report = CheckpointReader(checkpoint).report()
    # Half a bit per step of one unit is 0.0026 bits per weight of this small model; each input leaves less than that.
    assert TARGET - 4 * 0.0026 < report["totals"]["bits_per_weight"] <= TARGET
    assert report["totals"]["served_bits_per_weight"] == report["totals"]["bits_per_weight"]
    bits = [layer["bits"] for layer in report["layers"]]
    assert max(bits) - min(bits) > 0.5


def test_loss_and_error_are_below_their_bounds(checkpoint: Path) -> None:
    report = CheckpointReader(checkpoint).report()
    for layer in report["layers"]:
        assert layer["bound_holds"] is True
        assert 0 < layer["loss"] <= layer["loss_bound"]
        assert 0 < layer["error"] <= layer["bound"]
        assert layer["loss"] / layer["loss_bound"] > 0.2
    assert report["totals"]["loss"] == pytest.approx(sum(layer["loss"] for layer in report["layers"]))


def test_few_bits_are_met_and_damping_does_not_run_away(
    two_blocks: Path, calibration_text: Path, tmp_path: Path
) -> None:
    """Damping goes by the price of a bit, and the price by the damped lattices: neither drives the other up."""
    recipe = Recipe("latq", bits=1.3, **(FEW | ATTENTION))
    report = quantize_checkpoint(recipe, two_blocks, tmp_path / "out", calibration=str(calibration_text))
    assert 1.29 < report["totals"]["bits_per_weight"] <= 1.3
    assert max(layer["damping"] for layer in report["layers"]) < 2
    assert report["totals"]["loss"] < 0.1


def test_fewer_bits_than_the_lowest_rates_take_are_refused(
    two_blocks: Path, calibration_text: Path, tmp_path: Path
) -> None:
    recipe = Recipe("latq", bits=1.05, **ATTENTION)
    with pytest.raises(ConfigError, match=r"recipe.bits: expected at least 1\.\d+ bits per weight, which the lowest"):
        quantize_checkpoint(recipe, two_blocks, tmp_path / "out", calibration=str(calibration_text))


def test_a_run_that_takes_more_than_its_bits_is_refused_at_its_end(
    two_blocks: Path, calibration_text: Path, tmp_path: Path
) -> None:
    """No weight is known to bring it about: here the records of a block that is done say that it took a bit more."""
    recipe, options = Recipe("latq", bits=TARGET, **ATTENTION), {"calibration": str(calibration_text)}

    def interrupt(event: Mapping[str, Any]) -> None:
        if event["event"] == "block" and event["block"] == 1:
            raise InterruptionError

    with pytest.raises(InterruptionError):
        quantize_checkpoint(recipe, two_blocks, tmp_path / "out", on_event=interrupt, **options)
    records = tmp_path / "out.partial" / "records-00002.json"
    noted = json.loads(records.read_text())
    noted.pop("fingerprint")
    for layer in noted["layers"]:
        layer["bits"] += 1
    records.write_text(json.dumps({**noted, "fingerprint": writer._digest(noted)}))
    with pytest.raises(ConfigError, match=r"recipe\.bits: expected at most 3 bits per weight, found 3\.\d+ stored"):
        quantize_checkpoint(recipe, two_blocks, tmp_path / "out", resume=True, **options)
    assert not (tmp_path / "out").exists()


def test_linears_of_one_input_share_order_and_factors_of_columns(checkpoint: Path) -> None:
    reader = CheckpointReader(checkpoint)
    for block in range(2):
        for names in (("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"), ("mlp.gate_proj", "mlp.up_proj")):
            for shared in ("column_exponents", "column_importance"):
                stored = [reader.store.get(f"model.layers.{block}.{name}.{shared}") for name in names]
                assert all((one == stored[0]).all() for one in stored)


def test_kl_is_far_below_hptqs_and_near_what_the_report_predicts(
    checkpoint: Path, two_blocks: Path, whole_calibration_text: Path, evaluation_text: Path, tmp_path: Path
) -> None:
    text = tmp_path / "text.txt"
    text.write_text(evaluation_text.read_text(encoding="utf-8")[:24_000], encoding="utf-8")
    options = {"seq_len": 256, "baseline": str(two_blocks), "batch_size": 8, "dtype": "float32"}
    hptq = Recipe("hptq", bits=TARGET, **FEW)
    quantize_checkpoint(hptq, two_blocks, tmp_path / "hptq", calibration=str(whole_calibration_text))
    found, paper = (evaluate(path, str(text), **options).kl for path in (checkpoint, tmp_path / "hptq"))
    assert found < 0.25 * paper
    predicted = CheckpointReader(checkpoint).report()["totals"]["loss"]
    assert 0.3 < predicted / found < 3


def test_an_interrupted_run_resumes_to_the_same_bytes(two_blocks: Path, calibration_text: Path, tmp_path: Path) -> None:
    recipe = Recipe("latq", bits=TARGET, target="residual", **ATTENTION)

    def interrupt(event: Mapping[str, Any]) -> None:
        if event["event"] == "block":
            raise InterruptionError

    options = {"calibration": str(calibration_text)}
    checkpoint = tmp_path / "whole"
    stages: dict[str, list[tuple[int, int]]] = {}
    left: list[tuple[str, int | None, float | None]] = []
    expected: dict[str, int] = {}

    def note(event: Mapping[str, Any]) -> None:
        if event["event"] == "start":
            expected.update({stage["stage"]: stage["parts"] for stage in event["stages"]})
            assert sum(stage["share"] for stage in event["stages"]) == pytest.approx(1.0)
        if event["event"] == "stage":
            stages.setdefault(event["stage"], []).append((event["done"], event["parts"]))
        if event["event"] == "plan":
            assert len(event["bits"]) == expected["quantizing"]
            assert all(1 < bits < 13 for bits in event["bits"].values())
        if event["event"] in ("stage", "block"):
            left.append((event["event"], event.get("done"), event["seconds_left"]))

    quantize_checkpoint(recipe, two_blocks, checkpoint, on_event=note, **options)
    # Two blocks forward, the head, two blocks backward; then two blocks, twice.
    assert stages == {
        "statistics, forward": [(0, 2), (1, 2), (2, 2)],
        "statistics, head": [(0, 1), (1, 1)],
        "statistics, backward": [(0, 2), (1, 2), (2, 2)],
        "allocation": [(0, 4), (1, 4), (2, 4), (2, 4), (3, 4), (4, 4)],
    }
    quantizing = {"quantizing": len(CheckpointReader(checkpoint).shapes)}
    assert expected == {stage: parts[-1][1] for stage, parts in stages.items()} | quantizing
    assert list(expected) == [*stages, "quantizing"]
    # Nothing is said before the first part of a stage is done; of the last nothing is left. The head is the last shard.
    assert all((seconds is None) == (kind == "stage" and done == 0) for kind, done, seconds in left)
    blocks = [seconds for kind, _, seconds in left if kind == "block"]
    assert blocks[0]
    assert blocks[1:] == [0.0, 0.0]
    with pytest.raises(InterruptionError):
        quantize_checkpoint(recipe, two_blocks, tmp_path / "again", on_event=interrupt, **options)
    stages.clear()
    quantize_checkpoint(recipe, two_blocks, tmp_path / "again", resume=True, on_event=note, **options)
    assert list(stages) == ["allocation"]
    for shard in sorted(checkpoint.glob("*.safetensors")):
        assert (tmp_path / "again" / shard.name).read_bytes() == shard.read_bytes()
    assert {path.name for path in checkpoint.iterdir()} == {path.name for path in (tmp_path / "again").iterdir()}


def test_conversations_are_judged_on_their_answers(two_blocks: Path, tmp_path: Path) -> None:
    """The certificate takes the loss at the same tokens; a resumed run would notice other answers."""
    model = with_template(two_blocks, tmp_path / "chat")
    talks = [talk(f"What does function {n} return?", f"A list of {n} names, or None.") for n in range(120)]
    source = write_lines(tmp_path / "talks.jsonl", talks)
    report = quantize_checkpoint(Recipe("latq", bits=TARGET, **ATTENTION), model, tmp_path / "out", calibration=source)
    described = report["calibration"]
    assert 0 < described["answer_tokens"] < described["samples"] * described["seq_len"] / 2
    assert list(verify_certificate(tmp_path / "out", model, source)) == []
