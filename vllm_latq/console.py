"""Print the output of the commands: tables, and the progress of a run as a live bar, plain lines or JSON lines."""

import io
import json
import math
import os
import sys
from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Any

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
)
from rich.table import Table
from rich.text import Text

from vllm_latq.errors import printable
from vllm_latq.memory import peak_memory


def print_json(value: Any) -> None:
    """Print one JSON document on standard output."""
    print(json.dumps(value, indent=2))


def number(value: float | None, digits: int = 4) -> str:
    """Return a number with a few significant digits; a dash for None."""
    return "-" if value is None else f"{value:.{digits}g}"


def bits(value: float | None) -> str:
    """Return bits per weight with three decimals; a dash for None."""
    return "-" if value is None else f"{value:.3f}"


def claim(bound: float | None, holds: bool | None) -> str:
    """Return a bound and whether it holds; `holds` is None if clipped weights void the bound."""
    verdict = {True: "holds", False: "VIOLATED", None: "not claimed"}[holds]
    return "-" if bound is None else f"{number(bound)} ({verdict})"


def time_left(seconds: float | None) -> str:
    """Return the remaining time of a stage as hours:minutes:seconds; empty if it is unknown or zero."""
    return f"{timedelta(seconds=math.ceil(seconds))} left" if seconds else ""


def prediction(loss: float, bound: float | None) -> str:
    """Return a sentence about the whole model: its second-order loss on the calibration text, and the bound."""
    limit = "" if bound is None else f", at most {number(bound)}"
    measured = f"second-order loss on the calibration text {number(loss)} nats per token{limit}"
    return f"{measured}; it predicts the KL divergence, and underestimates it if that text is short"


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
    table = Table(title=Text(printable(title)))
    for index, column in enumerate(columns):
        table.add_column(column, justify="left" if index == 0 else "right", overflow="fold")
    for row in rows:
        table.add_row(*(Text(printable(cell)) for cell in row))
    # Piped output is not cut to the width of a terminal.
    Console(width=None if sys.stdout.isatty() else 160).print(table)


class JsonEvents:
    """Print each event as one line of JSON, with the peak memory so far in bytes as `peak_memory`."""

    def __enter__(self) -> "JsonEvents":
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def __call__(self, event: Mapping[str, Any]) -> None:
        """Print one event as a line of JSON."""
        print(json.dumps({**event, "peak_memory": peak_memory()}), flush=True)


class ProgressDisplay:
    """Print one line per linear, and on a terminal a live bar below the lines."""

    def __init__(self, console: Console | None = None) -> None:
        self.console = console or Console(stderr=True)
        self.progress = Progress(
            TextColumn("{task.description}", markup=False),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("{task.fields[left]}", markup=False),
            TextColumn("{task.fields[status]}", markup=False),
            console=self.console,
            disable=not self.console.is_terminal,
        )
        self.stages: dict[str, TaskID] = {}

    def __enter__(self) -> "ProgressDisplay":
        self.progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.progress.stop()

    def __call__(self, event: Mapping[str, Any]) -> None:
        """Show one event."""
        handler = getattr(self, f"_{event['event']}")
        handler(event)

    def _start(self, event: Mapping[str, Any]) -> None:
        self.blocks = event["blocks"]
        self.task = self.progress.add_task(f"block 0/{self.blocks}", total=event["linears"], status="", left="")

    def _stage(self, event: Mapping[str, Any]) -> None:
        stage, done, parts = event["stage"], event["done"], event["parts"]
        if stage not in self.stages:
            self.stages[stage] = self.progress.add_task(stage, total=parts, status="", left="")
        left = time_left(event["seconds_left"])
        self.progress.update(self.stages[stage], completed=done, visible=done < parts, left=left)
        if not self.console.is_terminal:
            self.console.print(f"{stage} {done}/{parts}  {left}".rstrip(), highlight=False)

    def _plan(self, event: Mapping[str, Any]) -> None:
        planned = sorted((value, name) for name, value in event["bits"].items())
        (least, fewest), (most, richest) = planned[0], planned[-1]
        line = f"from {least:.3f} bits ({fewest}) to {most:.3f} ({richest})"
        self.console.print(line, highlight=False, markup=False, soft_wrap=True)

    def _layer(self, event: Mapping[str, Any]) -> None:
        self.console.print(
            f"{event['name']}  {event['shape'][0]}x{event['shape'][1]}  {bits(event['bits'])} bits "
            f"({bits(event['served_bits'])} served)  "
            f"outliers {100 * event['outlier_density']:.2f}%  relative error {number(event['relative_error'])}  "
            f"error {number(event['error'])}  bound {claim(event['bound'], event['bound_holds'])}  "
            f"{event['seconds']:.2f} s" + (f"  {event['note']}" if event["note"] else ""),
            highlight=False,
            markup=False,
            soft_wrap=True,
        )
        ratio = event["error"] / event["bound"] if event["error"] is not None and event["bound"] else None
        memory = f"{peak_memory() / 2**30:.1f} GiB"
        status = f"{event['name']}  {event['bits']:.2f} bits  error/bound {number(ratio, 2)}  {memory}"
        self.progress.update(self.task, advance=1, status=status)

    def _block(self, event: Mapping[str, Any]) -> None:
        # The last shard is not a block: it holds the head and the embeddings.
        block, left = f"block {min(event['block'] + 1, self.blocks)}/{self.blocks}", time_left(event["seconds_left"])
        self.progress.update(self.task, description=block, left=left)
        if left and not self.console.is_terminal:
            self.console.print(f"{block}  {left}", highlight=False)
        if event["resumed"]:
            self.console.print(f"block {event['block']}: taken from the interrupted run", highlight=False)
            self.progress.advance(self.task, event["linears"])

    def _done(self, event: Mapping[str, Any]) -> None:
        self.console.print(
            f"{event['destination']}: {event['bits_per_weight']:.4f} bits per weight, {event['bytes']:,} bytes, "
            f"{bits(event['served_bits_per_weight'])} bits in memory while served"
            + (f", {prediction(event['loss'], event['loss_bound'])}" if event["loss"] is not None else ""),
            highlight=False,
            markup=False,
            soft_wrap=True,
        )
