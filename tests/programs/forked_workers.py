"""Runs a program with vLLM's worker processes forked: `python forked_workers.py PROGRAM ARGUMENT ...`."""

import runpy
import sys

from helpers.warm_vllm import fork_workers

if __name__ == "__main__":
    fork_workers()
    sys.argv = sys.argv[1:]
    runpy.run_path(sys.argv[0], run_name="__main__")
