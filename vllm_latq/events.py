"""Events that a long computation emits while it works: plain dicts, which a display shows or prints as JSON.

    start  once: blocks, linears, samples, device, stages
    stage  before and after each part of a stage: stage, done, parts, seconds_left
    plan   once, by latq: bits of every linear
    layer  one per quantized linear: its record in the report
    block  one per shard: block, linears, resumed, seconds_left
    done   once: destination, model, seconds, checkpoint_bytes, model_bytes, notes (how many layers have one), and the
           totals of the report

`stages` of "start" lists what comes, in order: the name of a stage, its parts, and its expected share of the time of
all stages. `seconds_left` is of a stage alone, and None before its first part is measured.
"""

import time
from collections.abc import Callable, Mapping
from typing import Any

Listener = Callable[[Mapping[str, Any]], None]
# Name of the stage in which linears are quantized: it has a "layer" event for each part instead of "stage" events.
QUANTIZING = "quantizing"
# Takes how many parts of a stage are done, of how many.
Progress = Callable[[int, int], None]


def ignore_event(_event: Mapping[str, Any]) -> None:
    """Ignore an event."""


def ignore_progress(_done: int, _parts: int) -> None:
    """Ignore progress."""


def seconds_left(seconds: float, done: int, left: int) -> float | None:
    """Return the seconds that the rest of a stage takes if each of its parts takes the mean of the finished ones.

    Args:
        seconds: time of all finished parts together.
        done: number of finished parts.
        left: number of parts that are not finished.

    Returns:
        None before the first part is finished: nothing was measured then.
    """
    return seconds / done * left if done else None


def stage_progress(emit: Listener, stage: str) -> Progress:
    """Return a function that emits how much of a stage is done, and the seconds that the rest of it takes."""
    started = time.perf_counter()

    def advance(done: int, parts: int) -> None:
        nonlocal started
        now = time.perf_counter()
        started = started if done else now
        left = seconds_left(now - started, done, parts - done)
        emit({"event": "stage", "stage": stage, "done": done, "parts": parts, "seconds_left": left})

    return advance
