"""The `latq` command, run as a user runs it."""

import hashlib
import json
import re
import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from vllm_latq.cli.main import main
from vllm_latq.console import JsonEvents


def run(*arguments: object) -> subprocess.CompletedProcess[str]:
    command = [str(Path(sys.executable).with_name("latq")), *(str(argument) for argument in arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=300)


def test_quantize_verify_inspect_eval(
    mini_model: Path, calibration_text: Path, evaluation_text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The longest command runs in a process of its own, as a user would run it."""
    out = tmp_path / "out"
    options = ["--method", "ssqr", "--bits", 4, "--num-samples", 16, "--seq-len", 128]
    done = run("quantize", mini_model, out, *options, "--calibration", calibration_text)
    assert done.returncode == 0, done.stderr
    assert re.search(r"^block 4/4 +4\.\d+ bits +error at most +0\.\d+% \w", done.stderr, flags=re.MULTILINE)
    assert f"serve vllm serve {out} --quantization latq" in done.stderr
    assert main(["verify", str(out)]) == 0
    assert capsys.readouterr().out == f"{out}: valid\n"
    assert main(["inspect", str(out), "--json"]) == 0
    summary = json.loads(capsys.readouterr().out)
    assert 4.3 < summary["bits_per_weight"] < 4.7
    assert {"name", "shape", "bits", "outlier_density", "relative_error", "error", "bound"} <= summary["layers"][
        0
    ].keys()
    assert main(["inspect", str(out)]) == 0
    printed = capsys.readouterr().out
    assert len(printed.splitlines()) < 20
    assert max(len(line.rstrip()) for line in printed.splitlines() if str(out) not in line) <= 80
    assert re.search(r"^3 +4\.\d+", printed, flags=re.MULTILINE)
    assert main(["inspect", str(out), "--layers"]) == 0
    assert re.search(r"^0\.self_attn\.q_proj +256x256 +4\.", capsys.readouterr().out, flags=re.MULTILINE)
    part = tmp_path / "part.txt"
    part.write_text(evaluation_text.read_text()[:20_000])
    text = ["--text", str(part), "--seq-len", "256", "--baseline", str(mini_model), "--max-windows", "8"]
    assert main(["eval", str(out), *text, "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert (result["windows"], len(result["answers"])) == (8, 3)
    assert result["baseline_perplexity"] == pytest.approx(result["perplexity"], rel=0.02)
    assert 20 < result["perplexity"] < 60
    assert 0 < result["kl"] < 0.01
    assert 0.9 < result["top1_agreement"] < 1
    assert result["tokens"] > 1000
    kept = json.loads((out / "latq_evaluation.json").read_text())["runs"]
    assert [run["text"] for run in kept] == [
        {"name": "part.txt", "sha256": hashlib.sha256(part.read_bytes()).hexdigest()}
    ]
    assert kept[0].items() >= {key: result[key] for key in ("kl", "perplexity", "answers", "windows")}.items()
    assert kept[0]["options"]["max_windows"] == 8
    assert main(["eval", str(out), *text[:-1], "2", "--answers", "0"]) == 0
    printed = capsys.readouterr().out
    assert re.search(r"perplexity +[\d.]+ \([+-][\d.]+% against the baseline\)", printed)
    assert len(json.loads((out / "latq_evaluation.json").read_text())["runs"]) == 2
    assert main(["inspect", str(out)]) == 0
    assert "measured     KL divergence 0.00" in capsys.readouterr().out
    # The results are beside the weights, and change neither fingerprint nor what loaders accept.
    assert main(["verify", str(out)]) == 0


def test_quantize_json_events(mini_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["quantize", str(mini_model), str(tmp_path / "out"), "--method", "rtn", "--json"]) == 0
    events = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [event["event"] for event in events].count("layer") == 28
    assert (events[0]["event"], events[-1]["event"]) == ("start", "done")
    assert events[-1]["bits_per_weight"] == pytest.approx(4.125, abs=0.01)


def test_dry_run_computes_and_writes_nothing(
    mini_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["quantize", str(mini_model), str(tmp_path / "out"), "--method", "gptq", "--bits", "3", "--dry-run"]
    assert main([*arguments, "--json"]) == 0
    planned = json.loads(capsys.readouterr().out)
    assert planned["totals"]["bits_per_weight"] == pytest.approx(3.125, abs=0.01)
    assert main(arguments) == 0
    shown = capsys.readouterr().out
    assert re.search(r"^3\.mlp\.down_proj +256x768 +3\.125 ", shown, flags=re.MULTILINE)
    for what, where, size in (("Hessians of the largest block", "memory", 3.1), ("activations", "memory", 536.9)):
        assert re.search(rf"^{what} +{where} +{size}$", shown, flags=re.MULTILINE)
    assert main([*arguments, "--offload", "disk", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["needs"]["disk"]["activations"] == 256 * 2048 * 256 * 4
    assert not list(tmp_path.iterdir())


def test_nothing_but_a_model_and_a_destination(mini_model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["quantize", str(mini_model), "out", "--dry-run", "--json"]) == 0
    planned = json.loads(capsys.readouterr().out)
    assert (planned["recipe"]["method"], planned["recipe"]["bits"]) == ("latq", 4)
    assert planned["totals"]["bits_per_weight"] == 4
    assert planned["needs"]["memory"]["activations"] == 5 * 256 * 2048 * 256 * 4


def test_preset_and_an_option_in_its_place(mini_model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["quantize", str(mini_model), "out", "--preset", "best", "--bits", "3.5", "--dry-run", "--json"]) == 0
    recipe = json.loads(capsys.readouterr().out)["recipe"]
    assert (recipe["method"], recipe["target"], recipe["correction"], recipe["bits"]) == ("latq", "residual", 0.5, 3.5)
    assert main(["quantize", str(mini_model), "out", "--preset", "fast", "--dry-run", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["recipe"]["method"] == "gptq"


@pytest.mark.parametrize(
    ("options", "ignored"),
    [
        ([], ["lm_head"]),
        (["--ignore", "up_proj"], ["up_proj", "lm_head"]),
        (["--lm-head"], []),
        (["--method", "latq"], []),
        (["--method", "latq", "--keep-lm-head"], ["lm_head"]),
        (["--method", "latq", "--keep-lm-head", "--ignore", "up_proj"], ["up_proj", "lm_head"]),
        (["--ignore", "up_proj", "--lm-head", "--ignore", "down_proj"], ["up_proj", "down_proj"]),
    ],
)
def test_head_is_quantized_on_request(
    options: list[str], ignored: list[str], mini_model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    method = [] if "latq" in options else ["--method", "rtn"]
    assert main(["quantize", str(mini_model), "out", *method, *options, "--dry-run", "--json"]) == 0
    planned = json.loads(capsys.readouterr().out)
    assert planned["recipe"]["ignore"] == ignored
    names = {layer["name"] for layer in planned["layers"]}
    assert ("lm_head" in names) == ("lm_head" not in ignored)
    assert any("up_proj" in name for name in names) == ("up_proj" not in ignored)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["quantize", "nowhere", "out", "--method", "rtn"], "expected a model directory or a hub name"),
        (["quantize", "MODEL", "out", "--method", "rtn", "--bits", "5"], "--bits: expected one of"),
        (
            ["quantize", "MODEL", "out", "--group-size", "64"],
            "--group-size does not apply to --method latq; leave it out (--group-size is for rtn",
        ),
        (["quantize", "MODEL", "out", "--bits", "1"], "--bits: expected a finite number above 1 and at most 16"),
        (["quantize", "MODEL", "out", "--method", "rtn", "--ignore", "nosuch"], "--ignore: expected names of linears"),
        (["quantize", "MODEL", "out", "--method", "ssqr", "--bits", "3.5"], "--bits: expected one of 2, 3, 4, 8"),
        (["quantize", "MODEL", "out", "--lm-head", "--ignore", "lm_head"], "give only one of them"),
        (
            ["quantize", "MODEL", "out", "--method", "rtn", "--ignore", "q_prj"],
            "Take names from `latq quantize --dry-run`. Did you mean q_proj?",
        ),
        (
            ["quantize", "MODEL", "out", "--method", "rtn", "--group-size", "100"],
            "Choose a group size that divides them, such as 64 or 32, or -1 for one scale per row.",
        ),
        (["eval", "MODEL", "--text", "x", "--limit", "3"], "--limit requires --tasks."),
        (["eval", "MODEL", "--tasks", "x", "--max-windows", "3"], "--max-windows requires --text or --dataset."),
        (["eval", "MODEL", "--text", "x", "--answers", "3"], "--answers requires --baseline."),
        (["eval", "MODEL", "--tasks", "x", "--reference", "y"], "--reference requires --text or --dataset."),
        (
            ["eval", "MODEL", "--text", "x", "--reference", "y", "--baseline", "MODEL"],
            "--reference and --baseline exclude each other: give one of them.",
        ),
        (
            ["eval", "MODEL", "--text", "x", "--reference", "y", "--save-reference", "z"],
            "--reference and --save-reference exclude each other: give one of them.",
        ),
        (["eval", "MODEL", "--text", "x", "--engine-args", "{}"], "--engine-args requires --through vllm."),
        (
            ["eval", "MODEL", "--text", "x", "--through", "vllm", "--device", "cpu"],
            "--device does not apply to --through vllm; leave it out.",
        ),
        (["trace", "MODEL", "-o", "x", "--num", "0"], "--num: expected at least 1, found 0"),
        (["eval", "MODEL", "--text", __file__, "--max-windows", "0"], "--max-windows: expected at least 1, found 0"),
        (
            ["eval", "MODEL", "--tasks", "arc_easy", "--seq-len", "64"],
            "--seq-len requires --text or --dataset.",
        ),
        (
            ["eval", "MODEL", "--tasks", "arc_easy", "--batch-size", "0"],
            "latq: --batch-size: expected at least 1, found 0",
        ),
        (["eval", "MODEL", "--text", __file__, "--dtype", "int3"], "latq: --dtype: expected auto, float32"),
        (["eval", "MODEL", "--text", "x", "--seq-len", "0"], "latq: --seq-len: expected at least 2, found 0"),
        (
            ["quantize", "MODEL", "out", "--method", "rtn", "--device", "abacus"],
            "latq: --device: expected a device torch can use, found 'abacus'",
        ),
        (["verify", "MODEL", "--tolerance", "0.1"], "--tolerance requires --certificate."),
        (
            ["quantize", "MODEL", "out", "--method", "gptq", "--preset", "best"],
            "--preset sets the method: give either --preset or --method.",
        ),
        (
            ["quantize", "MODEL", "out", "--preset", "fast", "--correction", "0.5"],
            "--correction: expected the default 1.0, found 0.5. Set a target",
        ),
        (
            ["quantize", "MODEL", "out", "--preset", "balanced", "--group-size", "64"],
            "--group-size does not apply to --method latq",
        ),
        (["quantize", "MODEL", "out", "--method", "gptq", "--calibration", "no.txt"], "no.txt"),
        (
            ["quantize", "MODEL", "out", "--method", "gptq", "--calibration", "c5"],
            "found neither a file nor a known dataset",
        ),
        (["verify", "MODEL"], "expected a `quantization_config`, found none"),
        (["inspect", "nowhere"], "expected a model directory, found no such directory"),
        (["inspect", "MODEL/config.json"], "expected a model directory, found a file"),
        (["eval", "MODEL"], "eval requires --text, --dataset or --tasks."),
        (["eval", "nowhere", "--text", "x"], "nowhere"),
    ],
)
def test_bad_input_is_one_clear_line(
    arguments: list[str], message: str, mini_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    assert main([argument.replace("MODEL", str(mini_model)) for argument in arguments]) == 1
    captured = capsys.readouterr()
    assert message in captured.err
    assert captured.err.startswith("latq: ")
    assert captured.err.endswith((".\n", "?\n"))
    assert captured.err.count("\n") == 1
    assert "Traceback" not in captured.err
    assert not list(tmp_path.iterdir())


@pytest.mark.filterwarnings("default")
def test_a_dry_run_shows_warnings(mini_model: Path, calibration_text: Path, capsys: pytest.CaptureFixture[str]) -> None:
    few = ["--num-samples", "2", "--seq-len", "64", "--calibration", str(calibration_text)]
    assert main(["quantize", str(mini_model), "out", "--method", "gptq", "--ignore", "q_proj", *few, "--dry-run"]) == 0
    lines = [line for line in capsys.readouterr().err.splitlines() if "vLLM merges them" in line]
    assert len(lines) == 1


@pytest.mark.parametrize(
    ("last", "said"),
    [("block", "finished blocks are kept: continue with --resume"), ("done", "the checkpoint is complete")],
)
def test_keyboard_interrupt_stops_with_one_line(
    last: str, said: str, mini_model: Path, calibration_text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    """After the first block, or after all: the line says how to go on, and going on works."""
    command = ["quantize", str(mini_model), str(tmp_path / "out"), "--json", "--method", "ssqr", "--num-samples", "8"]
    command += ["--seq-len", "64", "--calibration", str(calibration_text)]
    show = JsonEvents.__call__

    def interrupt(display: JsonEvents, event: Mapping[str, Any]) -> None:
        show(display, event)
        if event["event"] == last:
            signal.raise_signal(signal.SIGINT)

    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a background process may ignore it
    try:
        with monkeypatch.context() as patch:
            patch.setattr(JsonEvents, "__call__", interrupt)
            assert main(command) == 130
    finally:
        signal.signal(signal.SIGINT, before)
    captured = capsys.readouterr()
    assert json.loads(captured.out.splitlines()[-1])["event"] == last
    assert captured.err.splitlines()[-1] == f"latq: interrupted; {said}"
    if last != "done":
        assert main([*command, "--resume"]) == 0
    assert main(["verify", str(tmp_path / "out")]) == 0


def test_interrupt_before_the_directory_was_read(
    mini_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupt(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    (tmp_path / "config.json").write_text("{}")
    monkeypatch.setattr("vllm_latq.quantize.pipeline.Decoder", interrupt)
    assert main(["quantize", str(mini_model), str(tmp_path), "--method", "rtn"]) == 130
    assert "complete" not in capsys.readouterr().err


def test_closed_standard_output(tmp_path: Path, mini_model: Path) -> None:
    command = f"{sys.executable} -m vllm_latq.cli.main quantize {mini_model} {tmp_path / 'out'} --method rtn --json >&-"
    assert subprocess.run(command, shell=True, check=False, timeout=120).returncode == 0
    for reader in ("inspect", "verify"):
        command = f"{sys.executable} -m vllm_latq.cli.main {reader} {tmp_path / 'out'} >&-"
        assert subprocess.run(command, shell=True, check=False, timeout=120).returncode == 0
