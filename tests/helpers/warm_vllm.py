"""Run Python programs in processes forked from one that has imported vLLM: importing it takes most of a short run."""

import atexit
import gc
import importlib
import json
import multiprocessing
import os
import subprocess
import sys
import tempfile
from functools import cache, partial
from pathlib import Path
from typing import Any

from helpers.programs import importing_helpers, program

# Read when vLLM, or a package that it imports, is imported.
ENVIRONMENT = {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "OMP_NUM_THREADS": "1"}
# For small engines: one process, and in it one unbound thread. Two that wait for each other on a busy core are slow.
QUICK = {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}


def run(path: Path, *arguments: str, **environment: str) -> tuple[int, str]:
    """Return the exit status of a program (negative: the signal that ended it) and all that it printed."""
    with tempfile.NamedTemporaryFile() as output:
        request = {
            **{"program": str(path), "arguments": arguments, "folder": os.getcwd(), "output": output.name},
            "environment": {**os.environ, **ENVIRONMENT, **environment},
        }
        server = _server()
        if server.poll() is not None:
            _server.cache_clear()
            server = _server()
        assert server.stdin
        assert server.stdout
        print(json.dumps(request), file=server.stdin, flush=True)
        answer = server.stdout.readline()
        assert answer, f"the process that had imported vLLM ended, status {server.wait()}: see what it printed"
        return int(answer), Path(output.name).read_text(errors="replace")


def fork_workers() -> None:
    """Let vLLM do in forked processes, or in this one, what it does in processes that import everything again."""
    registry: Any = importlib.import_module("vllm.model_executor.models.registry")
    executor: Any = importlib.import_module("vllm.v1.executor.multiproc_executor")
    collector: Any = gc
    # Workers are spawned on a CPU for the sake of bound threads, and models inspected apart for the sake of CUDA.
    executor.get_mp_context = partial(multiprocessing.get_context, "fork")
    registry._run_in_subprocess = lambda function: function()
    # Garbage is collected many times per engine; what has been imported need not be searched each time.
    gc.freeze()
    collector.unfreeze = lambda: None


@cache
def _server() -> subprocess.Popen[str]:
    """Start the server, once in each process of pytest. It ends with its input."""
    server = subprocess.Popen(
        [sys.executable, program("warm_vllm_server.py")],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=importing_helpers(os.environ | ENVIRONMENT),
    )
    atexit.register(server.kill)
    return server
