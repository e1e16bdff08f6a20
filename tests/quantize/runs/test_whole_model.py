"""Runs that look at the whole model: latq, from model to checkpoint."""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from vllm_latq.format.reader import CheckpointReader
from vllm_latq.format.verify import verify
from vllm_latq.quantize.evaluation.evaluate import evaluate
from vllm_latq.quantize.pipeline import quantize_checkpoint
from vllm_latq.quantize.recipe import PARTS, Recipe

FEW = {"num_samples": 32, "seq_len": 128}
TARGET = 3.0
LATQ = Recipe("latq", target_bits=TARGET, **FEW)
# Attention alone, for what does not need the rest.
ATTENTION = {"ignore": ("lm_head", "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"), "num_samples": 16, "seq_len": 64}


class InterruptionError(Exception):
    pass


@pytest.fixture(scope="module")
def checkpoint(mini_model: Path, whole_calibration_text: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("latq") / "checkpoint"
    quantize_checkpoint(LATQ, mini_model, path, calibration=str(whole_calibration_text))
    return path


def test_the_model_meets_its_bits_and_layers_differ(checkpoint: Path) -> None:
    assert list(verify(checkpoint)) == []
    report = CheckpointReader(checkpoint).report()
    assert TARGET - 0.01 < report["totals"]["bits_per_weight"] <= TARGET
    bits = [layer["bits"] for layer in report["layers"]]
    assert max(bits) - min(bits) > 0.5


def test_loss_and_error_are_below_their_bounds(checkpoint: Path) -> None:
    report = CheckpointReader(checkpoint).report()
    for layer in report["layers"]:
        assert layer["bound_holds"] is True
        assert 0 < layer["loss"] <= layer["loss_bound"]
        assert 0 < layer["error"] <= layer["bound"]
        # uniform residuals would make it 1; undamped grams and dead columns lower it
        assert 0.2 < layer["error"] / layer["expected_error"] < 1.5
    assert report["totals"]["loss"] == pytest.approx(sum(layer["loss"] for layer in report["layers"]))


@pytest.mark.parametrize("bits", [2.0, TARGET])
def test_all_layers_end_with_one_step(
    bits: float, checkpoint: Path, mini_model: Path, whole_calibration_text: Path, tmp_path: Path
) -> None:
    """Shares are right: no search for a scale that meets one has to leave the model's step."""
    report = CheckpointReader(checkpoint).report()
    if bits != TARGET:
        recipe = Recipe("latq", target_bits=bits, **FEW)
        report = quantize_checkpoint(recipe, mini_model, tmp_path / "out", calibration=str(whole_calibration_text))
    sizes = [math.prod(layer["shape"]) for layer in report["layers"]]
    # The bound of the loss is 1/8 of the squared step for each weight.
    octaves = [0.5 * math.log2(layer["loss_bound"] / size) for layer, size in zip(report["layers"], sizes, strict=True)]
    assert max(octaves) - min(octaves) < 0.2


def test_steps_do_not_run_away_at_a_bit_per_weight(mini_model: Path, calibration_text: Path, tmp_path: Path) -> None:
    """Damping goes by the step, and the step by what is estimated to be fed back: neither drives the other up."""
    recipe = Recipe("latq", target_bits=1.0, **(FEW | ATTENTION))
    report = quantize_checkpoint(recipe, mini_model, tmp_path / "out", calibration=str(calibration_text))
    assert 0.99 < report["totals"]["bits_per_weight"] <= 1.0
    assert max(layer["damping"] for layer in report["layers"]) < 2
    assert report["totals"]["loss"] < 0.1


def test_linears_of_one_input_share_their_column_exponents(checkpoint: Path) -> None:
    reader = CheckpointReader(checkpoint)
    for block in range(4):
        for names in (("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"), ("mlp.gate_proj", "mlp.up_proj")):
            exponents = [reader.store.get(f"model.layers.{block}.{name}.column_exponents") for name in names]
            assert all((one == exponents[0]).all() for one in exponents)


def test_kl_is_far_below_hptqs_and_near_what_the_report_predicts(
    checkpoint: Path, mini_model: Path, whole_calibration_text: Path, evaluation_text: Path, tmp_path: Path
) -> None:
    text = tmp_path / "text.txt"
    text.write_text(evaluation_text.read_text(encoding="utf-8")[:24_000], encoding="utf-8")
    options = {"seq_len": 256, "baseline": str(mini_model), "batch_size": 8, "dtype": "float32"}
    hptq = Recipe("hptq", target_bits=TARGET, **FEW)
    quantize_checkpoint(hptq, mini_model, tmp_path / "hptq", calibration=str(whole_calibration_text))
    found, paper = (evaluate(path, str(text), **options).kl for path in (checkpoint, tmp_path / "hptq"))
    assert found < 0.35 * paper
    predicted = CheckpointReader(checkpoint).report()["totals"]["loss"]
    assert 0.3 < predicted / found < 3


def test_an_interrupted_run_resumes_to_the_same_bytes(two_blocks: Path, calibration_text: Path, tmp_path: Path) -> None:
    recipe = Recipe("latq", target_bits=TARGET, target="residual", **ATTENTION)

    def interrupt(event: Mapping[str, Any]) -> None:
        if event["event"] == "block":
            raise InterruptionError

    options = {"calibration": str(calibration_text)}
    checkpoint = tmp_path / "whole"
    stages: dict[str, list[tuple[int, int]]] = {}
    left: list[tuple[str, int | None, float | None]] = []

    def note(event: Mapping[str, Any]) -> None:
        if event["event"] == "stage":
            stages.setdefault(event["stage"], []).append((event["done"], event["parts"]))
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


def test_switched_off_parts_leave_no_trace(two_blocks: Path, calibration_text: Path, tmp_path: Path) -> None:
    recipe = Recipe("latq", target_bits=2.5, without=PARTS, order="natural", **ATTENTION)
    report = quantize_checkpoint(recipe, two_blocks, tmp_path / "plain", calibration=str(calibration_text))
    assert all(2.49 < layer["bits"] <= 2.5 for layer in report["layers"])
    reader = CheckpointReader(tmp_path / "plain")
    assert all(
        not reader.store.get(name).any()
        for name in reader.store.names()
        if name.endswith(("row_exponents", "n_exponents"))
    )
