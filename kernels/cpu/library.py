"""Compile the C++ of this folder at first use, for the vectors of this CPU, and load it.

The compiler is $CXX, or the first of COMPILERS that is installed; torch.compile needs one, too. The library is kept in
$XDG_CACHE_HOME/vllm_latq (~/.cache/vllm_latq), under a name that changes with the source and the options. A folder that
another user owns or can write to is not used.

OpenMP's symbols are left open on purpose: they are found in the library that torch has loaded, so that products run on
torch's threads, which vLLM binds to cores.
"""

import ctypes
import hashlib
import logging
import os
import shlex
import shutil
import subprocess
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

import torch

from vllm_latq.kernels.errors import require

logger = logging.getLogger(__name__)

COMPILERS = ("c++", "g++", "clang++")
OPTIONS = ("-O3", "-std=c++17", "-ffp-contract=off", "-fPIC", "-shared", "-w")
# Instructions of the products on each kind of CPU; torch's names of the features that the first needs.
INSTRUCTIONS: Mapping[str, tuple[str, ...]] = {
    "avx512": ("-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl", "-mavx512vnni", "-mfma", "-mf16c"),
    "avx2": ("-mavx2", "-mfma", "-mf16c"),
}
AVX512 = ("avx512_f", "avx512_bw", "avx512_dq", "avx512_vl", "avx512_vnni")
FOLDER = Path(__file__).parent
COMPILE_SECONDS = 300  # at most
KINDS = {torch.bfloat16: 0, torch.float16: 1, torch.float32: 2}  # as in common.h


@cache
def instructions() -> str | None:
    """Return the key of INSTRUCTIONS for this CPU; None if it has not even AVX2. ATEN_CPU_CAPABILITY can lower it."""
    capability, features = torch.backends.cpu.get_cpu_capability(), torch.cpu.get_capabilities()
    if capability == "AVX512" and all(features.get(name) for name in AVX512):
        return "avx512"
    return "avx2" if capability in ("AVX2", "AVX512") and features.get("f16c") else None


def load(source: str) -> ctypes.CDLL | None:
    """Return the library of one source, a file of this folder, for this CPU; compile it at the first call.

    Returns:
        None on a CPU without the instructions. None, with a warning for each kind of instructions, if it cannot be
        compiled or loaded.
    """
    best = instructions()
    return None if best is None else _load(source, best)


def run_product(function: Any, view: ctypes.Structure, x: torch.Tensor, rows: int, cols: int) -> torch.Tensor:
    """Return what a product of a library makes of x [n, cols]: [n, rows] in the dtype of x, one of KINDS.

    Args:
        function: the product, as common.h has it.
        view: the weight as the library sees it.
        x: activations.
        rows: of the weight.
        cols: of the weight.

    Raises:
        KernelInputError: x has another number of columns.
        MemoryError: there is no room for the activations as integers.
    """
    require(x.shape[1] == cols, "x", f"{cols} columns", x.shape[1])
    x, y = x.contiguous(), torch.empty(len(x), rows, dtype=x.dtype)
    done = function(
        ctypes.byref(view), ctypes.c_void_p(x.data_ptr()), ctypes.c_int64(len(x)),
        ctypes.c_void_p(y.data_ptr()), KINDS[x.dtype], torch.get_num_threads(),
    )  # fmt: skip
    if not done:
        raise MemoryError(f"no memory for the activations of {min(len(x), 512)} tokens")
    return y


@cache
def _load(source: str, best: str) -> ctypes.CDLL | None:
    kinds = list(INSTRUCTIONS)
    for kind in kinds[kinds.index(best) :]:
        try:
            return _library(source, kind)
        except (OSError, subprocess.SubprocessError) as error:
            said = error.stderr if isinstance(error, subprocess.CalledProcessError) else str(error)
            logger.warning("%s: cannot compile or load it for %s (%s)", source, kind, said.strip()[-500:])
    logger.warning("%s: slower products run instead", source)
    return None


def _library(source: str, kind: str) -> ctypes.CDLL:
    """Load the library of a source for some instructions, after compiling it if that is needed.

    Raises:
        OSError: there is no compiler, or what it made cannot be loaded.
        subprocess.SubprocessError: the compiler failed, or took too long.
    """
    text = b"".join((FOLDER / name).read_bytes() for name in (source, "common.h", "lanes.h"))
    options = [*OPTIONS, *INSTRUCTIONS[kind]]
    digest = hashlib.sha256(text + " ".join(options).encode()).hexdigest()[:16]
    path = _cache() / f"{Path(source).stem}-{kind}-{digest}.so"
    if path.is_file():
        with suppress(OSError):  # damaged, or made on a machine with other libraries
            return ctypes.CDLL(str(path))
    _compile(FOLDER / source, options, path)
    return ctypes.CDLL(str(path))


def _cache() -> Path:
    """Return the folder for libraries; one for this process alone if the user's is not safe or cannot be written."""
    base = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    folder = Path(base) / "vllm_latq"
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        found = folder.stat()
        if folder.is_absolute() and found.st_uid == os.geteuid() and not found.st_mode & 0o022:
            with tempfile.TemporaryFile(dir=folder):
                return folder
    except OSError:
        pass
    return Path(_own_cache().name)


@cache
def _own_cache() -> "tempfile.TemporaryDirectory[str]":
    """Return a folder that is removed when the process ends."""
    return tempfile.TemporaryDirectory(prefix="vllm_latq-")


def _compile(source: Path, options: list[str], target: Path) -> None:
    """Compile to a file of another name first: other processes may look for the target at the same time.

    Raises:
        OSError: there is no compiler.
        subprocess.SubprocessError: the compiler failed, or took too long.
    """
    compiler = shlex.split(os.environ.get("CXX", "")) or list(filter(None, map(shutil.which, COMPILERS)))[:1]
    if not compiler:
        raise OSError(f"no C++ compiler: none of {', '.join(COMPILERS)}; install one, or name it in CXX")
    logger.info("compiling %s for this CPU, once; this takes some seconds", source.name)
    with tempfile.TemporaryDirectory(dir=target.parent) as folder:
        made = os.path.join(folder, target.name)
        command = [*compiler, *options, "-o", made, str(source)]
        subprocess.run(command, check=True, capture_output=True, text=True, errors="replace", timeout=COMPILE_SECONDS)
        with open(made, "rb") as file:
            os.fsync(file.fileno())
        os.replace(made, target)
