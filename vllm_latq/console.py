"""Print the output of the commands: tables, and the events of `events` as a live bar, plain lines or JSON lines.

Invariant: on a terminal of 80 columns, names and notes give way and the bar with its numbers does not.
"""

import io
import json
import math
import os
import shlex
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rich.console import Console, RenderableType
from rich.panel import Panel
from rich.progress import BarColumn, Progress, ProgressColumn, Task, TextColumn, TimeElapsedColumn
from rich.spinner import Spinner
from rich.table import Column, Table
from rich.text import Text

from vllm_latq.errors import printable
from vllm_latq.events import QUANTIZING, ignore_event, seconds_left
from vllm_latq.memory import peak_memory

# Width of tables that are piped into a file.
PIPED_COLUMNS = 160
# Seconds between two lines about a stage where no bar is shown.
QUIET_SECONDS = 30.0


def print_json(value: Any) -> None:
    """Print one JSON document on standard output."""
    print(json.dumps(value, indent=2))


def number(value: float | None, digits: int = 4) -> str:
    """Return a number with a few significant digits; a dash for None."""
    return "-" if value is None else f"{value:.{digits}g}"


def bits(value: float | None) -> str:
    """Return bits per weight with three decimals; a dash for None."""
    return "-" if value is None else f"{value:.3f}"


def percent(share: float | None) -> str:
    """Return a share in percent with three digits; a dash for None."""
    return "-" if share is None else f"{100 * share:#.3g}%"


def size(count: float) -> str:
    """Return a number of bytes in the largest unit that fits: 1.61 GB."""
    for unit, factor in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= factor:
            return f"{count / factor:.3g} {unit}"
    return f"{count:.0f} bytes"


def duration(seconds: float) -> str:
    """Return a time as hours:minutes:seconds, rounded up; days count as hours."""
    minutes, rest = divmod(math.ceil(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02}:{rest:02}"


def claim(bound: float | None, holds: bool | None) -> str:
    """Return a bound and whether it holds; `holds` is None if clipped weights void the bound."""
    verdict = {True: "holds", False: "VIOLATED", None: "not claimed"}[holds]
    return "-" if bound is None else f"{number(bound)} ({verdict})"


def prediction(loss: float, bound: float | None) -> str:
    """Return a sentence about the whole model: its second-order loss on the calibration text, and the bound."""
    limit = "" if bound is None else f", at most {number(bound)}"
    measured = f"second-order loss on the calibration text {number(loss)} nats per token{limit}"
    return f"{measured}; it predicts the KL divergence, and underestimates it if that text is short"


def short_name(name: str) -> str:
    """Return the name of a module from its block's number on: `model.layers.0.mlp.up_proj` is `0.mlp.up_proj`."""
    parts = name.split(".")
    first = next((index for index, part in enumerate(parts) if part.isdecimal()), 0)
    return ".".join(parts[first:])


def is_reporting_rank() -> bool:
    """Return whether this process reports errors and warnings. Only the first process of torchrun does."""
    return os.environ.get("RANK", "0") == "0"


def prepare_streams() -> None:
    """Discard output to a closed stream, and escape characters that a stream cannot encode."""
    sys.stdout, sys.stderr = (stream or open(os.devnull, "w") for stream in (sys.stdout, sys.stderr))  # noqa: SIM115
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


class WarnOnce:
    """A replacement for `warnings.showwarning` that prints each message once, wherever it is raised.

    Args:
        enabled: whether to print any warning.
    """

    def __init__(self, enabled: bool) -> None:
        self.enabled = enabled
        self._shown: set[str] = set()

    def __call__(self, message: Warning | str, *_: Any, **__: Any) -> None:
        """Print a warning, once."""
        if self.enabled and str(message) not in self._shown:
            self._shown.add(str(message))
            print(f"latq: warning: {message}", file=sys.stderr)


def print_table(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print a table. The first column is left-aligned, all others are right-aligned."""
    # Names come from files. Text keeps rich from reading them as markup, and `printable` escapes control characters.
    table = Table(title=Text(printable(title)), title_justify="left", box=None, pad_edge=False, header_style="bold")
    for index, column in enumerate(columns):
        table.add_column(column, justify="left" if index == 0 else "right", overflow="fold")
    for row in rows:
        table.add_row(*(Text(printable(cell)) for cell in row))
    # Piped output is not cut to the width of a terminal.
    Console(width=None if sys.stdout.isatty() else PIPED_COLUMNS).print(table)


def print_facts(facts: Mapping[str, str]) -> None:
    """Print one aligned line for each name and its text."""
    width = max(map(len, facts))
    for name, text in facts.items():
        print(f"{name:{width}}  {printable(text)}")


class JsonEvents:
    """Print each event as one line of JSON, with the peak memory so far in bytes as `peak_memory`."""

    def __enter__(self) -> "JsonEvents":
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def __call__(self, event: Mapping[str, Any]) -> None:
        """Print one event as a line of JSON."""
        print(json.dumps({**event, "peak_memory": peak_memory()}), flush=True)


class Timeline:
    """Share that is done of a run, and the time that its rest takes.

    A run measures the time of the stage that it is in. Later stages are expected to take their shares of the time of
    all stages: `stages` holds them, in order.
    """

    def __init__(self, stages: Mapping[str, float]) -> None:
        self.stages, self.started = dict(stages), time.perf_counter()
        self.reach("", 0, 1, None)

    def reach(self, stage: str, done: int, parts: int, seconds_left: float | None) -> None:
        """Note how many parts of a stage are done, and the seconds that the rest of it takes."""
        self.stage, self.seconds_left, self.noted = stage, seconds_left, time.perf_counter()
        self.part = done / parts if parts else 1.0

    @property
    def fraction(self) -> float:
        """Share of the run that is done."""
        before, _ = self._around()
        return (before + self.part * self.stages.get(self.stage, 0.0)) / (sum(self.stages.values()) or 1.0)

    def left(self) -> float | None:
        """Return the seconds that the rest of the run takes; None before anything is measured."""
        if self.seconds_left is None:
            return None
        before, later = self._around()
        done = before + self.part * self.stages.get(self.stage, 0.0)
        rate = (self.noted - self.started) / done if done else 0.0
        return max(self.seconds_left + later * rate - (time.perf_counter() - self.noted), 0.0)

    def _around(self) -> tuple[float, float]:
        """Return the shares of all stages before and after the present one."""
        names, shares = list(self.stages), list(self.stages.values())
        at = names.index(self.stage) if self.stage in names else -1
        return sum(shares[: max(at, 0)]), sum(shares[at + 1 :])


class _TimeLeft(ProgressColumn):
    """Column with the time that the rest of a run takes."""

    def __init__(self, display: "ProgressDisplay") -> None:
        super().__init__(Column(min_width=len("00:00:00 left"), no_wrap=True, justify="right"))
        self.display = display

    def render(self, task: Task) -> Text:
        """Return the text of the column."""
        left = self.display.timeline.left()
        return Text("" if left is None else f"{duration(left)} left")


class _Bar(Progress):
    """A bar for the whole run and a line below it; a spinner before the run begins."""

    status = ""
    spinner = Spinner("dots")

    def get_renderables(self) -> Iterator[RenderableType]:
        """Yield what is shown at the foot of the terminal."""
        status = Text(self.status, style="dim", no_wrap=True, overflow="ellipsis")
        if not self.tasks:
            self.spinner.update(text=status)
            yield self.spinner
            return
        yield self.make_tasks_table(self.tasks)
        yield status


class ProgressDisplay:
    """Show the events of a run: a header, a line per block, on a terminal a live bar below them, and a closing box.

    Args:
        console: where to print; standard error by default.
        header: lines to print at once.
        verbose: whether to print a line per linear, too.
        waiting: what happens until the first event.
    """

    def __init__(
        self,
        console: Console | None = None,
        header: Sequence[str] = (),
        verbose: bool = False,
        waiting: str = "loading the libraries and the model",
    ) -> None:
        self.console = console or Console(stderr=True)
        self.header, self.verbose, self.shown = header, verbose, is_reporting_rank()
        self.timeline = Timeline({})
        self.progress = _Bar(
            TextColumn("{task.description}", markup=False, table_column=Column(min_width=10, no_wrap=True)),
            TextColumn("{task.fields[count]}", table_column=Column(no_wrap=True, justify="right")),
            BarColumn(bar_width=None, table_column=Column(ratio=1, min_width=8)),
            TextColumn("{task.percentage:>3.0f}%", table_column=Column(no_wrap=True)),
            TimeElapsedColumn(Column(no_wrap=True)),
            _TimeLeft(self),
            console=self.console,
            disable=not self.console.is_terminal or not self.shown,
            expand=True,
            transient=True,
        )
        self.progress.status = waiting
        self.blocks = self.linears = self.done = 0
        self.blocks_measured = False
        self.layers: list[Mapping[str, Any]] = []
        self.spoke = self.began = time.perf_counter()

    def __enter__(self) -> "ProgressDisplay":
        # In a file, an error that comes before the first event stands alone.
        if self.console.is_terminal:
            self._head()
        self.progress.start()
        return self

    def _head(self) -> None:
        """Print the header, once."""
        header, self.header = self.header, ()
        for index, line in enumerate(header):
            if self.shown:
                self._print(line, style="" if index else "bold")

    def __exit__(self, *_: object) -> None:
        self.progress.stop()

    def __call__(self, event: Mapping[str, Any]) -> None:
        """Show one event."""
        self._head()
        getattr(self, f"_{event['event']}", ignore_event)(event)

    def _print(self, line: str, style: str = "") -> None:
        """Print a line as it is: a terminal cuts it to its width, a file gets all of it."""
        cut: dict[str, Any] = {"no_wrap": True, "overflow": "ellipsis"} if self.console.is_terminal else {}
        self.console.print(Text(printable(line), style=style), highlight=False, soft_wrap=not cut, **cut)

    def _start(self, event: Mapping[str, Any]) -> None:
        self.blocks, self.linears = event["blocks"], event["linears"]
        self.timeline = Timeline({stage["stage"]: stage["share"] for stage in event["stages"]})
        text = event["samples"]
        windows = f", {text['samples']} windows of {text['seq_len']} tokens" if text else ""
        windows += f" of {text['name']}" if text and text.get("name") else ""
        self._print(f"{self.linears} linears in {self.blocks} blocks{windows}, on {event['device']}")
        names = [stage["stage"] for stage in event["stages"]]
        if len(names) > 1:
            self._print(f"stages: {', '.join(dict.fromkeys(name.partition(',')[0] for name in names))}")
        self.began = time.perf_counter()
        self._reach(names[0], 0, event["stages"][0]["parts"], None)

    def _stage(self, event: Mapping[str, Any]) -> None:
        stage, done, parts = event["stage"], event["done"], event["parts"]
        self.began = time.perf_counter()
        if stage not in self.timeline.stages:
            self.timeline, self.progress.status = Timeline({stage: 1.0}), ""
        self._reach(stage, done, parts, event["seconds_left"])
        # A file shows where each stage of a run begins and ends.
        if not self.console.is_terminal and (self._silent() or (self.blocks and done in (0, parts))):
            self._print(f"{stage} {done}/{parts}{self._left()}")

    def _reach(self, stage: str, done: int, parts: int, seconds_left: float | None) -> None:
        self.timeline.reach(stage, done, parts, seconds_left)
        shown: dict[str, Any] = {"description": stage, "count": f"{done}/{parts}", "completed": self.timeline.fraction}
        if self.progress.tasks:
            self.progress.update(self.progress.tasks[0].id, **shown)
        else:
            self.progress.status = ""
            self.progress.add_task(total=1.0, **shown)

    def _silent(self) -> bool:
        """Return whether nothing was printed for QUIET_SECONDS; the time begins anew then."""
        now = time.perf_counter()
        if now - self.spoke < QUIET_SECONDS:
            return False
        self.spoke = now
        return True

    def _left(self) -> str:
        left = self.timeline.left()
        return f"  {duration(left)} left" if left else ""

    def _plan(self, event: Mapping[str, Any]) -> None:
        planned = sorted((value, short_name(name)) for name, value in event["bits"].items())
        (least, fewest), (most, richest) = planned[0], planned[-1]
        self._print(f"from {least:.2f} bits ({fewest}) to {most:.2f} bits ({richest})")

    def _layer(self, event: Mapping[str, Any]) -> None:
        self.layers.append(event)
        self.done += 1
        name = short_name(event["name"])
        if self.verbose:
            self._print(f"  {_layer_line(name, event)}")
        elif event["bound_holds"] is False:
            self._print(f"  {name}: bound {claim(event['bound'], False)}", style="red")
        self.progress.status = f"  {name}  {event['bits']:.2f} bits  {peak_memory() / 2**30:.1f} GiB of memory"
        # Linears of a block take unlike times: once a whole block is measured, the clock runs down between blocks.
        elapsed, rest = time.perf_counter() - self.began, self.linears - self.done
        measured = self.timeline.left() if self.blocks_measured else seconds_left(elapsed, len(self.layers), rest)
        self._reach(QUANTIZING, self.done, self.linears, measured)

    def _block(self, event: Mapping[str, Any]) -> None:
        layers, self.layers = self.layers, []
        now = time.perf_counter()
        seconds, self.began = now - self.began, now
        width = len(str(self.blocks))
        # The last shard is not a block: it holds the head and the embeddings.
        index = event["block"] + 1
        place = f"block {index:>{width}}/{self.blocks}" if index <= self.blocks else f"{'head':<{7 + 2 * width}}"
        self.done += event["linears"] if event["resumed"] else 0
        self.blocks_measured = event["seconds_left"] is not None
        self._reach(QUANTIZING, self.done, self.linears, event["seconds_left"])
        if event["resumed"]:
            self._print(f"{place}  taken from the interrupted run")
        elif layers:
            line = f"{place}  {_block_line(layers)}  {duration(seconds)}"
            self._print(line if self.console.is_terminal else f"{line}{self._left()}")

    def _done(self, event: Mapping[str, Any]) -> None:
        self.progress.stop()
        facts, commands = closing_facts(event), next_commands(event)
        if self.console.is_terminal:
            grid = Table.grid(padding=(0, 2))
            for name, text in facts.items():
                grid.add_row(Text(name, style="bold"), Text(printable(text), overflow="fold"))
            title = Text(printable(event["destination"]), style="bold")
            self.console.print(Panel(grid, title=title, title_align="left", expand=False))
        else:
            self._print(event["destination"])
            for name, text in facts.items():
                self._print(f"  {name:9}  {text}")
        # Outside the box, so that a terminal copies them as one line.
        for name, command in commands.items():
            line = Text.assemble((f"{name:6}", "bold"), printable(command))
            self.console.print(line, highlight=False, soft_wrap=True)


def _block_line(layers: Sequence[Mapping[str, Any]]) -> str:
    """Return bits and the largest relative error of the linears of one block."""
    sizes = [math.prod(layer["shape"]) for layer in layers]
    mean = sum(layer["bits"] * size for layer, size in zip(layers, sizes, strict=True)) / sum(sizes)
    worst = max(layers, key=lambda layer: layer["relative_error"] or 0.0)
    if worst["relative_error"] is None:
        return f"{mean:6.3f} bits"
    _, _, leaf = short_name(worst["name"]).partition(".")
    return f"{mean:6.3f} bits  error at most {percent(worst['relative_error']):>7} {leaf or worst['name']}"


def _layer_line(name: str, layer: Mapping[str, Any]) -> str:
    rows, cols = layer["shape"]
    error = "" if layer["relative_error"] is None else f"  error {percent(layer['relative_error'])}"
    bound = "" if layer["bound"] is None else f"  bound {claim(layer['bound'], layer['bound_holds'])}"
    note = f"  {layer['note']}" if layer["note"] else ""
    return f"{name}  {rows}x{cols}  {bits(layer['bits'])} bits{error}{bound}{note}"


def closing_facts(event: Mapping[str, Any]) -> dict[str, str]:
    """Return size, bits, predicted loss and time of a finished run, from its last event."""
    stored, served, out = event["bits_per_weight"], event["served_bits_per_weight"], event["destination"]
    total, before = event["checkpoint_bytes"], event["model_bytes"]
    same = served is None or abs(served - stored) < 0.05
    memory = "" if same else f"; {served:.2f} in memory while served"
    facts = {"size": f"{size(total)}, {before / total:.1f} times smaller than the model ({size(before)})"}
    facts["bits"] = f"{stored:.3f} per quantized weight{memory}"
    if event["loss"] is not None:
        bound = "" if event["loss_bound"] is None else f", at most {number(event['loss_bound'], 2)}"
        facts["predicted"] = f"KL divergence {number(event['loss'], 2)} nats per token{bound}"
    facts["time"] = duration(event["seconds"])
    if event["notes"]:
        facts["notes"] = f"{event['notes']}, listed by latq inspect {out} --layers"
    return facts


def next_commands(event: Mapping[str, Any]) -> dict[str, str]:
    """Return the commands that check and serve the checkpoint of a finished run."""
    out, model = event["destination"], event["model"]
    return {
        "check": shlex.join(["latq", "eval", out, "--dataset", "wikitext2", "--baseline", model]),
        "serve": shlex.join(["vllm", "serve", out, "--quantization", "latq"]),
    }


def quantize_header(
    recipe: Mapping[str, Any], model: str, destination: str, calibration: str | None, device: str | None
) -> list[str]:
    """Return the header of a run of `latq quantize`: what is done to which model, on which text and device."""
    options = [recipe["method"], f"{recipe['bits']:g} bits"]
    if recipe.get("group_size") is not None:
        options.append("one scale per row" if recipe["group_size"] < 0 else f"groups of {recipe['group_size']}")
    if calibration is not None:
        options.append(f"calibrated on {calibration}")
    if device is not None:
        options.append(device)
    return [f"{model} -> {destination}", ", ".join(options)]
