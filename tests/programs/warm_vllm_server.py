"""Imports vLLM once, and runs each Python program that it is asked for in a process forked from this one.

    {"program": "run_engines.py", "arguments": [...], "environment": {...}, "folder": path, "output": path}

is a line of its input. Each has a process of its own, as if it were started with `python program`, but ends without
taking down what was imported. What vLLM itself spawns imports everything again.
"""

import gc
import importlib
import json
import os
import runpy
import signal
import sys
import traceback
from contextlib import suppress
from pathlib import Path

PRELOADED = (
    "vllm.entrypoints.llm",
    "vllm.v1.engine.core",
    "vllm.v1.worker.cpu_worker",
    "vllm.v1.executor.multiproc_executor",
    "vllm.model_executor.models.qwen3",
    "vllm_latq.plugin",
)
SECONDS = 600


def serve() -> None:
    """Answer every request on the standard input with the exit status of its program, a line each."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # some releases of vLLM print when they are imported
    gc.disable()
    for name in PRELOADED:
        importlib.import_module(name)
    gc.freeze()
    gc.enable()
    for line in sys.stdin:
        child = os.fork()
        if not child:
            answers.close()
            run_program(**json.loads(line))
        _, status = os.waitpid(child, 0)
        print(os.waitstatus_to_exitcode(status), file=answers, flush=True)


def run_program(program: str, arguments: list[str], environment: dict[str, str], folder: str, output: str) -> None:
    """Run the program in this process, which is the request's own, and end the process."""
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
    serve()
