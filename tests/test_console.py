"""Progress of a run as a live bar, plain lines and JSON lines, and tables of names that may be hostile."""

import io
import json
import re
from collections.abc import Mapping
from typing import Any

import pytest
from rich.console import Console

from vllm_latq import console
from vllm_latq.console import (
    JsonEvents,
    ProgressDisplay,
    Timeline,
    WarnOnce,
    claim,
    duration,
    print_facts,
    print_table,
    quantize_header,
    short_name,
    size,
)

HEADER = ("[model] -> [out]", "latq, 3 bits, calibrated on text.txt")
LAYER = {
    "event": "layer", "name": "model.layers.0.[bold]q", "shape": [4, 8], "bits": 3.5, "served_bits": 3.6,
    "outlier_density": 0.01,
    "relative_error": 0.002, "error": 1.0, "bound": 4.0, "bound_holds": True, "seconds": 0.5, "note": "outlier rate 2%",
}  # fmt: skip
OTHER = {**LAYER, "name": "model.layers.0.mlp.down_proj", "bits": 2.5, "relative_error": 0.0041, "note": ""}
BROKEN = {**LAYER, "name": "lm_head", "relative_error": None, "bound_holds": False, "note": ""}
STAGES = [
    {"stage": "statistics, forward", "parts": 5, "share": 0.25},
    {"stage": "allocation", "parts": 2, "share": 0.25},
    {"stage": "quantizing", "parts": 6, "share": 0.5},
]
EVENTS: list[Mapping[str, Any]] = [
    {
        "event": "start",
        "blocks": 2,
        "linears": 6,
        "samples": {"samples": 3, "seq_len": 64, "name": "[text]"},
        "device": "cpu",
        "stages": STAGES,
    },
    {"event": "stage", "stage": "statistics, forward", "done": 0, "parts": 5, "seconds_left": None},
    {"event": "stage", "stage": "statistics, forward", "done": 3, "parts": 5, "seconds_left": None},
    {"event": "stage", "stage": "statistics, forward", "done": 5, "parts": 5, "seconds_left": None},
    {"event": "stage", "stage": "allocation", "done": 2, "parts": 2, "seconds_left": None},
    {"event": "plan", "bits": {"model.layers.0.self_attn.[i]q_proj": 2.35, "model.layers.1.mlp.down_proj": 6.8294}},
    LAYER,
    OTHER,
    {"event": "block", "block": 0, "linears": 2, "resumed": False, "seconds_left": 3723.4},
    {"event": "block", "block": 1, "linears": 3, "resumed": True, "seconds_left": 0.0},
    BROKEN,
    {"event": "block", "block": 2, "linears": 1, "resumed": False, "seconds_left": 0.0},
    {
        "event": "done",
        "destination": "[out]",
        "model": "[model]",
        "seconds": 61.5,
        "checkpoint_bytes": 100,
        "model_bytes": 250,
        "notes": 1,
        "bits_per_weight": 3.5,
        "served_bits_per_weight": None,
        "bytes": 90,
        "loss": 1e-3,
        "loss_bound": None,
    },
]


def shown(terminal: bool, width: int = 80, verbose: bool = False) -> str:
    """Return what a display prints of EVENTS."""
    text = io.StringIO()
    target = Console(file=text, force_terminal=terminal, width=width, color_system=None)
    with ProgressDisplay(target, HEADER, verbose) as display:
        for event in EVENTS:
            display(event)
            display.progress.refresh()
    return text.getvalue()


def plain_lines(text: str) -> list[str]:
    """Return what was written to each line, without the codes that a terminal acts on."""
    return [re.sub(r"\x1b\[[\d;?]*[A-Za-z]", "", line) for line in re.split(r"[\r\n]+", text)]


def test_plain_lines_without_a_terminal() -> None:
    lines = re.sub(r"\b0:00:0\d\b", "TIME", shown(False)).splitlines()
    assert lines == [
        *HEADER,
        "6 linears in 2 blocks, 3 windows of 64 tokens of [text], on cpu",
        "stages: statistics, allocation, quantizing",
        "statistics, forward 0/5",
        "statistics, forward 5/5",
        "allocation 2/2",
        "from 2.35 bits (0.self_attn.[i]q_proj) to 6.83 bits (1.mlp.down_proj)",
        "block 1/2   3.000 bits  error at most  0.410% mlp.down_proj  TIME  1:02:04 left",
        "block 2/2  taken from the interrupted run",
        "  lm_head: bound 4 (VIOLATED)",
        "head        3.500 bits  TIME",
        "[out]",
        "  size       100 bytes, 2.5 times smaller than the model (250 bytes)",
        "  bits       3.500 per quantized weight",
        "  predicted  KL divergence 0.001 nats per token",
        "  time       0:01:02",
        "  notes      1, listed by latq inspect [out] --layers",
        "check latq eval '[out]' --dataset wikitext2 --baseline '[model]'",
        "serve vllm serve '[out]' --quantization latq",
    ]


def test_every_linear_is_shown_if_asked_for() -> None:
    lines = shown(False, verbose=True).splitlines()
    assert "  0.[bold]q  4x8  3.500 bits  error 0.200%  bound 4 (holds)  outlier rate 2%" in lines
    assert not [line for line in shown(False).splitlines() if "[bold]" in line]


def test_terminal_cuts_lines_to_its_width() -> None:
    cut = [line for line in plain_lines(shown(True, 60, verbose=True)) if line.startswith("  0.[bold]q  4x8")]
    assert cut
    assert all(len(line) == 60 and line.endswith("…") for line in cut)


@pytest.mark.parametrize("width", [80, 120])
def test_terminal_shows_bar_count_and_time_left_in_its_width(width: int) -> None:
    text = shown(True, width)
    lines = plain_lines(text)
    assert max(map(len, lines)) <= width
    bars = [line for line in lines if line.startswith("quantizing")]
    pattern = r"quantizing 2/6 ━+[╸╺━ ]* +67% \d:\d\d:\d\d  1:02:0\d left"
    assert any(re.fullmatch(pattern, bar.strip()) for bar in bars), bars
    assert min(bar.count("━") + bar.count("╺") + bar.count("╸") for bar in bars) >= 8
    assert any(line.strip().startswith("0.mlp.down_proj  2.50 bits") for line in lines)
    assert any(line.startswith("╭─ [out] ") for line in lines)
    assert any(line.startswith("serve vllm serve '[out]'") for line in lines)
    assert "statistics, forward 3/5" in text


def test_terminal_shows_the_header_and_a_spinner_at_once() -> None:
    text = io.StringIO()
    target = Console(file=text, force_terminal=True, width=80, color_system=None)
    with ProgressDisplay(target, HEADER, waiting="loading") as display:
        display.progress.refresh()
        assert HEADER[0] in text.getvalue()
        assert "loading" in text.getvalue()


def test_only_the_first_process_shows_anything(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "1")
    text = io.StringIO()
    with ProgressDisplay(Console(file=text, force_terminal=True), HEADER):
        pass
    assert text.getvalue() == ""


def test_time_left_counts_later_stages_by_their_shares(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr(console.time, "perf_counter", lambda: now[0])
    timeline = Timeline({"first": 0.25, "second": 0.25, "third": 0.5})
    assert timeline.left() is None
    now[0] += 10.0
    timeline.reach("first", 1, 2, 10.0)  # 10 seconds for an eighth of all
    assert timeline.fraction == 0.125
    assert timeline.left() == pytest.approx(10.0 + 0.75 * 80.0)
    now[0] += 4.0
    assert timeline.left() == pytest.approx(66.0)
    timeline.reach("third", 1, 2, 7.0)
    assert timeline.left() == 7.0
    assert timeline.fraction == 0.75


def test_stages_without_a_run_have_a_bar_of_their_own() -> None:
    text = io.StringIO()
    with ProgressDisplay(Console(file=text, force_terminal=True, width=80, color_system=None)) as display:
        display({"event": "stage", "stage": "evaluating", "done": 1, "parts": 4, "seconds_left": 9.0})
        display.progress.refresh()
    assert re.search(r"evaluating 1/4 ━+.* 25% 0:00:00 +0:00:09 left", text.getvalue())


def test_unknown_events_are_ignored() -> None:
    with ProgressDisplay(Console(file=io.StringIO())) as display:
        display({"event": "new"})


@pytest.mark.parametrize(
    ("name", "short"),
    [
        ("model.layers.12.mlp.experts.3.up_proj", "12.mlp.experts.3.up_proj"),
        ("lm_head", "lm_head"),
        ("encoder.h2.layer", "encoder.h2.layer"),
    ],
)
def test_short_name_begins_at_the_block(name: str, short: str) -> None:
    assert short_name(name) == short


def test_sizes_and_times() -> None:
    assert [size(count) for count in (999, 1500, 2_690_000, 16.4e9, 2e12)] == [
        "999 bytes", "1.5 kB", "2.69 MB", "16.4 GB", "2 TB",
    ]  # fmt: skip
    assert [duration(seconds) for seconds in (0, 59.5, 3723.4, 93784)] == ["0:00:00", "0:01:00", "1:02:04", "26:03:04"]


def test_header_of_a_run() -> None:
    recipe = {"method": "gptq", "bits": 4, "group_size": 128}
    assert quantize_header(recipe, "MODEL", "OUT", None, "cuda:1") == [
        "MODEL -> OUT",
        "gptq, 4 bits, groups of 128, cuda:1",
    ]
    recipe = {"method": "ssqr", "bits": 3, "group_size": -1}
    assert quantize_header(recipe, "M", "O", "c4", None)[1] == "ssqr, 3 bits, one scale per row, calibrated on c4"
    assert quantize_header({"method": "latq", "bits": 2.5}, "M", "O", "c4", None)[1].startswith("latq, 2.5 bits, cal")


def test_bound_is_shown_with_its_claim() -> None:
    assert [claim(2.0, holds) for holds in (True, False, None)] == ["2 (holds)", "2 (VIOLATED)", "2 (not claimed)"]
    assert claim(None, None) == "-"


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


def test_facts_are_aligned(capsys: pytest.CaptureFixture[str]) -> None:
    print_facts({"a": "1", "longer": "\x1b[2J"})
    assert capsys.readouterr().out == "a       1\nlonger  \\x1b[2J\n"
