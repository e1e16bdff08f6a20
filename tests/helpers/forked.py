"""Processes for tests of faults and of shared runs, forked from a process that has imported everything.

Forked children would inherit the threads' locks of pytest's process; those of multiprocessing's fork server do not.
"""

import ctypes
import multiprocessing
import os
import resource
import signal
import sys
from collections.abc import Callable
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(
    [
        "vllm_latq.cli.main",
        "vllm_latq.quantize.pipeline",
        "transformers.models.llama.modeling_llama",
        "transformers.models.mixtral.modeling_mixtral",
    ]
)
_CAPABILITY_VERSION = 0x20080522
# CAP_DAC_OVERRIDE and CAP_DAC_READ_SEARCH: what lets root ignore permissions.
_IGNORE_PERMISSIONS = 0b110


def start(log: Path, target: Callable[..., None], *arguments: Any) -> BaseProcess:
    """Start a process that runs `target` and prints to the file `log`."""
    process = CONTEXT.Process(target=_logged, args=(log, target, arguments))
    process.start()
    return process


def command(arguments: list[str], environment: dict[str, str], folder: str = ".") -> None:
    """Run `latq` with these arguments and environment variables, in a folder."""
    import torch

    from vllm_latq.cli.main import main

    torch.set_num_threads(1)
    os.chdir(folder)
    os.environ.update(environment)
    sys.exit(main(arguments))


def hanging_command(arguments: list[str], environment: dict[str, str]) -> None:
    """Run `latq quantize`, and stop this process as soon as it has calibration samples."""
    from vllm_latq.quantize import pipeline

    own = pipeline.calibration_samples

    def samples(*given: Any) -> None:
        own(*given)
        os.kill(os.getpid(), signal.SIGSTOP)

    pipeline.calibration_samples = samples  # type: ignore[assignment]
    command(arguments, environment)


def recomputing_command(arguments: list[str], environment: dict[str, str]) -> None:
    """Run `latq quantize` where statistics are made again and experts share G; print the shapes that all ranks sum."""
    import torch
    from torch import distributed

    from vllm_latq.quantize.calibration import gram_sums, recomputed

    own, shapes = distributed.all_reduce, []

    def all_reduce(tensor: torch.Tensor) -> None:
        shapes.append(tuple(tensor.shape))
        own(tensor)

    recomputed.MOST_ON_DISK = gram_sums.MOST_OWN = 0
    distributed.all_reduce = all_reduce  # type: ignore[assignment]
    try:
        command(arguments, environment)
    finally:
        print("summed by all:", sorted(shapes))


def quantize(
    recipe: dict[str, Any], source: Path, out: Path, text: Path, before: Callable[..., None] | None, *arguments: Any
) -> None:
    """Begin or resume a run, after `before(out, *arguments)` has prepared a fault."""
    import torch

    from vllm_latq.errors import LatqError
    from vllm_latq.quantize.pipeline import quantize_checkpoint
    from vllm_latq.quantize.recipe import Recipe

    torch.set_num_threads(1)
    if before is not None:
        before(out, *arguments)
    try:
        quantize_checkpoint(Recipe.from_dict(recipe), source, out, calibration=str(text), resume=True)
    except LatqError as error:
        sys.exit(f"latq: {error}")


def killed_at_rename(out: Path, number: int, torn: bool) -> None:
    """Kill this process at its n-th rename: before the rename, or with the file only half written (`torn`)."""
    system: Any = os
    rename, count = os.replace, 0

    def replace(old: str | Path, new: str | Path) -> None:
        nonlocal count
        count += 1
        if count == number:
            if torn and Path(old).is_file():
                os.truncate(old, os.path.getsize(old) // 2)
            os.kill(os.getpid(), signal.SIGKILL)
        rename(old, new)

    system.replace = replace


def locked_at_rename(out: Path, number: int) -> None:
    """Take away write permission for the directory after the n-th rename, for root too."""
    header = (ctypes.c_uint32 * 2)(_CAPABILITY_VERSION, 0)
    capabilities = (ctypes.c_uint32 * 6)()
    libc = ctypes.CDLL(None, use_errno=True)
    assert libc.capget(header, capabilities) == 0
    capabilities[0] &= ~_IGNORE_PERMISSIONS  # the effective ones
    assert libc.capset(header, capabilities) == 0
    system: Any = os
    rename, count = os.replace, 0

    def replace(old: str | Path, new: str | Path) -> None:
        nonlocal count
        rename(old, new)
        count += 1
        if count == number:
            os.chmod(Path(new).parent, 0o500)

    system.replace = replace


def small_disk(out: Path, largest: int) -> None:
    """Let no file grow beyond `largest` bytes: a write then fails in its middle, as on a full disk."""
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (largest, resource.RLIM_INFINITY))


def _logged(log: Path, target: Callable[..., None], arguments: tuple[Any, ...]) -> None:
    with log.open("w") as file:
        for stream in (1, 2):
            os.dup2(file.fileno(), stream)
    target(*arguments)
