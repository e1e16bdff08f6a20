"""The programs of `tests/programs/`: where they are, and an environment in which they can import `helpers`."""

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

TESTS = Path(__file__).resolve().parents[1]


def program(name: str) -> Path:
    """Return the path of a program."""
    path = TESTS / "programs" / name
    assert path.exists(), path
    return path


def importing_helpers(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the environment with the folder of the tests before all others that Python imports from."""
    return {**environment, "PYTHONPATH": os.pathsep.join([str(TESTS), environment.get("PYTHONPATH", "")])}


def run_program(name: str, *arguments: Any, **options: Any) -> subprocess.CompletedProcess[str]:
    """Run a program in a process of its own; return its status and what it printed.

    Args:
        name: file in `tests/programs/`.
        arguments: of the command line, turned into strings.
        options: of `subprocess.run`.
    """
    command = [sys.executable, "-W", "ignore", str(program(name)), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, env=importing_helpers(os.environ), **options)
