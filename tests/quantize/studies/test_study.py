"""The study: every row is a valid recipe, and what it prints is what it measured."""

import json
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

from vllm_latq.quantize.recipe import METHODS, Recipe
from vllm_latq.quantize.studies import bench, orders, study


@pytest.mark.parametrize("bits", [4, 3, 2, 1.5])
def test_rows_are_valid_and_distinct(bits):
    rows = list(study.recipes(bits, 256, 256, group_size=64))
    assert len({name for name, _ in rows}) == len({recipe for _, recipe in rows}) == len(rows)
    expected = set(METHODS) if bits >= 2 else {"hrtn", "hptq", "latq"}
    assert {recipe.method for _, recipe in rows} == expected
    assert {recipe.ignored for _, recipe in rows} == {("lm_head",)}
    assert {recipe.group_size for _, recipe in rows if recipe.method in ("rtn", "gptq", "ssqr")} <= {64}


@pytest.mark.parametrize("module", [bench, orders, study])
def test_help_shows_how_to_call_it(
    module: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["file.py", "--help"])
    monkeypatch.setenv("COLUMNS", "200")
    with pytest.raises(SystemExit):
        module.main()
    assert capsys.readouterr().out.startswith(f"usage: python -m {module.__name__} [-h]")


@pytest.fixture
def run_study(
    mini_model: Path, calibration_text: Path, evaluation_text: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[..., None]:
    """The command, with further arguments, on little text."""

    def run(*arguments: str) -> None:
        texts = ["--calibration", str(calibration_text), "--text", str(evaluation_text), "--max-windows", "2"]
        small = ["--num-samples", "2", "--seq-len", "32"]
        monkeypatch.setattr(sys, "argv", ["study", str(mini_model), *texts, *small, *arguments])
        study.main()

    return run


def test_a_row_is_measured_and_written(
    run_study: Callable[..., None], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "rows.json"
    run_study("--bits", "2", "3", "--only", "rtn", "-o", str(output))
    two, three = json.loads(output.read_text())
    assert (two["about_bits"], three["about_bits"]) == (2, 3)
    assert two["bits"] == pytest.approx(2.126, abs=1e-3)
    assert 0 < three["kl"] < two["kl"]
    assert three["log2_error"] < two["log2_error"] < 0
    table = capsys.readouterr().out.splitlines()[-3:]
    assert table[0].startswith("| method | KL at about 3 bits | KL at about 2 bits |")
    assert table[2].startswith(f"| rtn | {three['kl']:.2e} | {two['kl']:.2e} |")


def test_a_row_that_cannot_be_had_does_not_end_the_study(
    run_study: Callable[..., None], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The scales take so much of 1.01 bits that no bit is left for codes."""
    rows = [("too few", Recipe("latq", bits=1.01, num_samples=4, seq_len=32)), ("rtn", Recipe("rtn", 4))]
    monkeypatch.setattr(study, "recipes", lambda *_: iter(rows))
    run_study("--bits", "1.01")
    out = capsys.readouterr().out
    assert "too few: recipe.bits: expected at least" in out
    assert out.splitlines()[-1].startswith("| rtn |")
