"""Runs Python programs in processes forked from one that has imported vLLM: importing it takes most of a short run.

    {"program": "engine_probe.py", "arguments": [...], "environment": {...}, "folder": path, "output": path}

is a line of its input. Each has a process of its own, as if it were started with `python program`, but ends without
taking down what was imported. What vLLM itself spawns imports everything again.
"""

import atexit
import gc
import importlib
import json
import os
import runpy
import signal
import subprocess
import sys
import tempfile
import traceback
from contextlib import suppress
from functools import cache
from pathlib import Path

PRELOADED = (
    "vllm.entrypoints.llm",
    "vllm.v1.engine.core",
    "vllm.v1.worker.cpu_worker",
    "vllm.v1.executor.multiproc_executor",
    "vllm.model_executor.models.qwen3",
    "vllm_latq.plugin",
)
# What is read when vLLM, or what it imports, is imported.
ENVIRONMENT = {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "OMP_NUM_THREADS": "1"}
# For small engines: one process, and in it one unbound thread. Two that wait for each other on a busy core are slow.
QUICK = {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
SECONDS = 600


def run(program: Path, *arguments: str, **environment: str) -> tuple[int, str]:
    """Exit status of a program (negative: the signal that ended it) and what it printed, errors included."""
    with tempfile.NamedTemporaryFile() as output:
        request = {
            **{"program": str(program), "arguments": arguments, "folder": os.getcwd(), "output": output.name},
            "environment": {**os.environ, **ENVIRONMENT, **environment},
        }
        server = _server()
        if server.poll() is not None:
            _server.cache_clear()
            server = _server()
        print(json.dumps(request), file=server.stdin, flush=True)
        answer = server.stdout.readline()
        assert answer, f"the process that had imported vLLM ended, status {server.wait()}: see what it printed"
        return int(answer), Path(output.name).read_text(errors="replace")


@cache
def _server() -> subprocess.Popen[str]:
    """One for each process of pytest. It ends with its input."""
    command = [sys.executable, __file__]
    server = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=os.environ | ENVIRONMENT
    )
    atexit.register(server.kill)
    return server


def _serve() -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # some releases say something when they are imported
    gc.disable()
    for name in PRELOADED:
        importlib.import_module(name)
    gc.freeze()
    gc.enable()
    for line in sys.stdin:
        child = os.fork()
        if not child:
            answers.close()
            _child(**json.loads(line))
        _, status = os.waitpid(child, 0)
        print(os.waitstatus_to_exitcode(status), file=answers, flush=True)


def _child(program: str, arguments: list[str], environment: dict[str, str], folder: str, output: str) -> None:
    status = 1
    try:
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        for stream in (1, 2):
            os.dup2(os.open(output, os.O_WRONLY | os.O_APPEND), stream)
        os.environ.clear()
        os.environ.update(environment)
        os.chdir(folder)
        sys.argv = [program, *arguments]
        sys.path[0] = str(Path(program).parent)
        signal.alarm(SECONDS)
        runpy.run_path(program, run_name="__main__")
        status = 0
    except SystemExit as end:
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
        status = end.code & 0xFF if isinstance(end.code, int) else int(bool(end.code))
    except BaseException:
        traceback.print_exc()
    finally:
        for stream in (sys.stdout, sys.stderr):
            with suppress(ValueError):
                stream.flush()
        os._exit(status)  # taking down all that was imported takes seconds


if __name__ == "__main__":
    _serve()
