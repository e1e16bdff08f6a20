"""Compilation in worker processes: what launches need is found without launching, and is in Triton's cache after it.

For an sm_80 that is not there (dry_launch.py), in a process of its own with a cache of its own.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = Path(__file__).parents[1] / "programs" / "compile_in_workers.py"


@pytest.mark.parametrize("part", ["compile_once", "lose_workers"])
def test_workers(part: str, tmp_path: Path) -> None:
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    environment["PYTHONPATH"], environment["TRITON_CACHE_DIR"] = os.pathsep.join(sys.path), str(tmp_path)
    command = [sys.executable, "-W", "ignore", str(PROGRAM), part]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
