"""What a dry run predicts of memory is what a run then measures; its parts count what they say."""

import json
from pathlib import Path
from typing import Any

import forked
import pytest
import torch

from vllm_latq.quantize.forecast.prediction import predict_run
from vllm_latq.quantize.forecast.rehearsal import LiveBytes, Rehearsal, measured
from vllm_latq.quantize.recipe import Recipe

TOLERANCE = 0.2
# One core for CI: latq on two linears of each block.
LATQ_IGNORES = ("lm_head", "q_proj", "k_proj", "v_proj", "gate_proj", "up_proj")
LATQ_SERVED_IGNORES = ("lm_head", "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")
OPTIONS = {
    "gptq": (),
    "ssqr": (),
    "hptq": ("--target-bits", "4"),
    "latq": ("--target-bits", "4", "--ignore", *LATQ_IGNORES),
}


@pytest.mark.parametrize("method", OPTIONS)
def test_memory_is_as_predicted(method: str, mini_model: Path, calibration_text: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    sizes = ("--num-samples", "32", "--seq-len", "128")
    arguments = ["quantize", str(mini_model), str(out), "--method", method, *OPTIONS[method], *sizes, "--json"]
    arguments += ["--calibration", str(calibration_text)]
    for name, more in (("dry", ["--dry-run"]), ("run", [])):
        process = forked.start(tmp_path / name, forked.command, [*arguments, *more], {})
        process.join(200)
        assert process.exitcode == 0, (tmp_path / name).read_text()[-3000:]
    predicted = json.loads((tmp_path / "dry").read_text())["prediction"]
    measured = json.loads((out / "latq_report.json").read_text())
    assert predicted["peak_memory"] == pytest.approx(measured["peak_memory"], rel=TOLERANCE)
    # The part that is the run's own, to which the libraries' does not lend its weight.
    own = predicted["peak_memory"] - predicted["baseline"]
    assert 5e6 < own < predicted["peak_memory"]
    assert predicted["seconds"] == pytest.approx(sum(stage["seconds"] for stage in predicted["stages"].values()))
    assert predicted["seconds"] > 0


def test_linears_too_small_for_the_models_served_bits_are_rehearsed(mini_model: Path, calibration_text: Path) -> None:
    # Of k and v, and of the half of q that is rehearsed, scales alone leave less than the codes of 2 bits take.
    recipe = Recipe("latq", target_bits=2.45, count="served", ignore=LATQ_SERVED_IGNORES, num_samples=4, seq_len=64)
    assert predict_run(recipe, mini_model, str(calibration_text)).stages["quantization"].seconds > 0


@pytest.mark.parametrize(("count", "bits"), [("stored", 3), ("served", 3.5)])
def test_linears_of_two_rows_are_rehearsed(count: str, bits: float, random_model: Any, calibration_text: Path) -> None:
    """k and v of one head of two numbers: half of one is a single row. A run takes this model."""
    shape = {"num_attention_heads": 8, "num_key_value_heads": 1, "head_dim": 2, "hidden_size": 256}
    source, _ = random_model("llama", **shape, intermediate_size=64, num_hidden_layers=1)
    recipe = Recipe("latq", target_bits=bits, count=count, num_samples=4, seq_len=64)
    assert predict_run(recipe, source, str(calibration_text)).stages["quantization"].seconds > 0


def test_live_bytes_are_those_alive_at_once() -> None:
    before = torch.ones(1000)
    with LiveBytes() as live:
        first = torch.zeros(100, 10)
        view = first.T[2:]
        before.add_(1)
        assert (live.now, live.peak) == (4000, 4000)
        second = first + before.view(100, 10)
        assert (live.now, live.peak) == (8000, 8000)
        del first, view
        assert (live.now, live.peak) == (4000, 8000)
        del second
    assert (live.now, live.peak) == (0, 8000)


def test_backward_is_counted() -> None:
    weight = torch.ones(10, 10, requires_grad=True)
    _, cost = measured(lambda: (weight.exp().exp().sum()).backward())
    # Both exponentials are kept for the backward pass, and one gradient is made while they are.
    assert cost.peak >= 3 * 400


def test_sizes_and_growth_of_a_matrix() -> None:
    rehearsal = Rehearsal(128, torch.device("cpu"))
    assert rehearsal.sizes(256, 768) == ((256, 768), (128, 384))
    assert rehearsal.sizes(4096, 14336) == ((293, 1024), (146, 512))
    assert rehearsal.sizes(1, 100) == ((1, 100), (1, 50))
    cost = rehearsal.cost(lambda rows, cols: torch.zeros(rows, cols), 4096, 14336)
    assert cost.peak == pytest.approx(4 * 4096 * 14336, rel=0.01)
    assert cost.kept == cost.peak
