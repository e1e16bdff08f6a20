"""Progress of a run as a live bar, plain lines and JSON lines, and tables of names that may be hostile."""

import io
import json

import pytest
from rich.console import Console

from vllm_latq.console import JsonEvents, ProgressDisplay, WarnOnce, claim, print_table

LAYER = {
    "event": "layer", "name": "model.layers.0.[bold]q", "shape": [4, 8], "bits": 3.5, "served_bits": 3.6,
    "outlier_density": 0.01,
    "relative_error": 0.002, "error": 1.0, "bound": 4.0, "bound_holds": True, "seconds": 0.5, "note": "outlier rate 2%",
}  # fmt: skip
EVENTS = [
    {"event": "start", "blocks": 2, "linears": 4, "samples": None},
    {"event": "stage", "stage": "statistics, forward", "done": 0, "parts": 5, "seconds_left": None},
    {"event": "stage", "stage": "statistics, forward", "done": 4, "parts": 5, "seconds_left": 3723.4},
    {"event": "stage", "stage": "allocation", "done": 2, "parts": 2, "seconds_left": 0.0},
    {"event": "plan", "bits": {"model.layers.0.self_attn.[i]q_proj": 2.35, "model.layers.1.mlp.down_proj": 6.8294}},
    LAYER,
    {"event": "block", "block": 0, "linears": 1, "resumed": False, "seconds_left": 59.2},
    {"event": "block", "block": 1, "linears": 3, "resumed": True, "seconds_left": 0.0},
    {
        "event": "done",
        "destination": "[out]",
        "bits_per_weight": 3.5,
        "served_bits_per_weight": None,
        "bytes": 100,
        "loss": 1e-3,
        "loss_bound": None,
    },
]


def shown(terminal: bool) -> str:
    text = io.StringIO()
    with ProgressDisplay(Console(file=text, force_terminal=terminal, width=200 if terminal else 40)) as display:
        for event in EVENTS:
            display(event)
    return text.getvalue()


def test_plain_lines_without_a_terminal() -> None:
    lines = shown(False).splitlines()
    assert lines[:3] == ["statistics, forward 0/5", "statistics, forward 4/5  1:02:04 left", "allocation 2/2"]
    plan = "from 2.350 bits (model.layers.0.self_attn.[i]q_proj) to 6.829 (model.layers.1.mlp.down_proj)"
    assert lines[3] == plan
    assert lines[4].startswith("model.layers.0.[bold]q  4x8  3.500 bits (3.600 served)  outliers 1.00%")
    assert lines[4].endswith("bound 4 (holds)  0.50 s  outlier rate 2%")
    assert lines[5] == "block 1/2  0:01:00 left"
    assert lines[6] == "block 1: taken from the interrupted run"
    assert "\x1b" not in "".join(lines)
    assert lines[-1].startswith("[out]: 3.5000 bits per weight, 100 bytes, - bits in memory while served")
    assert "second-order loss on the calibration text 0.001 nats per token; it predicts" in lines[-1]


def test_bound_is_shown_with_its_claim() -> None:
    assert [claim(2.0, holds) for holds in (True, False, None)] == ["2 (holds)", "2 (VIOLATED)", "2 (not claimed)"]
    assert claim(None, None) == "-"


def test_progress_bar_on_a_terminal() -> None:
    text = shown(True)
    for part in (
        "statistics, forward",
        "4/5",
        "1:02:04 left",
        "block 2/2",
        "4/4",
        "model.layers.0.[bold]q",
        "error/bound 0.25",
        "GiB",
    ):
        assert part in text


def test_a_warning_is_shown_once(capsys: pytest.CaptureFixture[str]) -> None:
    warn = WarnOnce(enabled=True)
    for message in ("one", "other", "one"):
        warn(message)
    assert capsys.readouterr().err.splitlines() == ["latq: warning: one", "latq: warning: other"]


def test_json_lines(capsys: pytest.CaptureFixture[str]) -> None:
    with JsonEvents() as display:
        for event in EVENTS:
            display(event)
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [line["event"] for line in lines] == [event["event"] for event in EVENTS]
    assert all(line["peak_memory"] > 1 << 20 for line in lines)


def test_table_shows_markup_and_control_characters_as_text(capsys: pytest.CaptureFixture[str]) -> None:
    print_table("[/title]", ("name",), [["[/red]\x1b[2J"]])
    out = capsys.readouterr().out
    assert "[/title]" in out
    assert r"[/red]\x1b[2J" in out
