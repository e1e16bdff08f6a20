"""Where the calibration activations wait between two blocks: in memory, or in a file that is mapped into it.

Invariant: a mapped file has no name once it is open, so nothing is left behind however the process ends.
"""

import ctypes
import os
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch

from vllm_latq.errors import ConfigError
from vllm_latq.quantize.machine.durable_files import named_failures

OFFLOADS = ("cpu", "disk")
Place = Callable[[torch.Tensor], torch.Tensor]


def placer(offload: str, folder: Path) -> Place:
    """A function that moves a CPU tensor to where activations wait.

    Args:
        offload: "cpu" leaves them in memory; "disk" maps a file, whose pages the system writes out when it needs room.
        folder: where the file goes; the system's temporary directory where it does not exist, as on another machine.

    Raises:
        ConfigError: another name.
    """
    if offload not in OFFLOADS:
        raise ConfigError("offload", f"one of {', '.join(OFFLOADS)}", repr(offload))
    return (lambda tensor: tensor) if offload == "cpu" else (lambda tensor: _mapped(tensor, folder))


def return_freed_memory() -> None:
    """Give memory that was freed back to the system; with glibc only, whose heap keeps it.

    Without it the resident memory grew by half a block with every block of a model of 32 blocks (512 channels).
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def _mapped(tensor: torch.Tensor, folder: Path) -> torch.Tensor:
    if not tensor.numel():
        return tensor
    folder = folder if folder.is_dir() else Path(tempfile.gettempdir())
    with named_failures(folder), tempfile.NamedTemporaryFile(dir=folder, prefix="activations-") as file:
        # Reserves the space now: a full disk is an error here, and not a bus error at some later write.
        _reserve(file.fileno(), tensor.numel() * tensor.element_size())
        place = torch.from_file(file.name, shared=True, size=tensor.numel(), dtype=tensor.dtype)
    return place.view(tensor.shape).copy_(tensor)


def _reserve(descriptor: int, size: int) -> None:
    if hasattr(os, "posix_fallocate"):
        os.posix_fallocate(descriptor, 0, size)
    else:
        os.truncate(descriptor, size)
