"""Compile what launches will need in many processes at once; alone, Triton compiles at each first launch, one by one.

Triton asks `jit_cache_hook` before it compiles; the one here notes what, and says that it is done. Worker processes
compile that into Triton's cache on disk, where the launches proper find it.

Invariant: meanwhile nothing is launched, not even what is compiled.
"""

import importlib
import multiprocessing
import os
import sys
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager, suppress
from typing import Any

from triton import knobs
from triton.runtime.jit import JITFunction

Kernel = tuple[str, str, str]  # module, name, and what it is specialized for, as Triton writes that
MOST_PROCESSES = 16


def available_processes() -> int:
    """One for each core that this process may use, MOST_PROCESSES at most."""
    return min(MOST_PROCESSES, len(os.sched_getaffinity(0)))


def kernels_of(launches: Iterable[Callable[[], object]]) -> list[Kernel]:
    """Return the kernels that Triton would compile for launches, once each; a launch that raises counts until there.

    The launches write nothing: only the list of kernels is of use.
    """
    found: dict[Kernel, None] = {}

    def note(*, fn: Any, compile: dict[str, Any], **_: Any) -> bool:
        found[fn.module, fn.name, compile["specialization_data"]] = None
        return True

    with knobs.runtime.scope(), _nothing_launched():
        knobs.runtime.jit_cache_hook = note
        for launch in launches:
            with suppress(Exception):  # and again when it is launched, where it is reported
                launch()
    return list(found)


@contextmanager
def _nothing_launched() -> Iterator[None]:
    run = JITFunction.run

    def warm_up(self: Any, *arguments: Any, warmup: bool, **named: Any) -> Any:
        return run(self, *arguments, warmup=True, **named)

    JITFunction.run = warm_up
    try:
        yield
    finally:
        JITFunction.run = run


def _compile(kernel: Kernel) -> None:
    module, name, specialization = kernel
    getattr(importlib.import_module(module), name).preload(specialization)


class CompilePool:
    """Worker processes that compile; a context manager, which ends them.

    Args:
        processes: how many.
        initializer: runs in each first.
    """

    def __init__(self, processes: int, initializer: Callable[[], object] | None = None) -> None:
        # Spawned, because a process forked from one that uses a GPU cannot use it.
        context = multiprocessing.get_context("spawn")
        self._workers: ProcessPoolExecutor | None = ProcessPoolExecutor(processes, context, initializer)

    def __enter__(self) -> "CompilePool":
        return self

    def __exit__(self, *_: object) -> None:
        if self._workers:
            self._workers.shutdown(cancel_futures=True)

    def compile(self, launches: Iterable[Callable[[], object]]) -> None:
        """Compile what the launches need and is not compiled; when it returns, workers are idle.

        An error is not reported: the launch will meet it. If workers die, this pool says so and compiles nothing more.
        """
        kernels = kernels_of(launches) if self._workers else []
        if not self._workers or len(kernels) < 2:  # one is compiled as well by its launch
            return
        try:
            futures = [self._workers.submit(_compile, kernel) for kernel in kernels]
            died = any(isinstance(future.exception(), BrokenProcessPool) for future in futures)
        except BrokenProcessPool:
            died = True
        if died:
            self._workers = None
            print("processes that compile kernels died: from here on, one is compiled after the other", file=sys.stderr)
