"""Runs a program with vLLM's worker processes forked: `python forked_workers.py PROGRAM ARGUMENT ...`."""

import runpy
import sys

from engine_probe import spare_imports

if __name__ == "__main__":
    spare_imports()
    sys.argv = sys.argv[1:]
    runpy.run_path(sys.argv[0], run_name="__main__")
