"""The tutorial's commands, run in order as written, and the files it names."""

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from helpers import forked

EXAMPLES = Path(__file__).parents[1] / "serving_examples"
TEXT = (EXAMPLES / "TUTORIAL.md").read_text()
# Each `latq` of the shell would import everything again, so a process that has imported everything runs it instead.
# torchrun still starts the installed program.
FUNCTION = """
exec 3> commands 4< statuses
latq() { printf '%q ' "$@" >&3; echo >&3; local status; read -r status <&4; return "$status"; }
"""


def answer(folder: Path) -> str:
    """Run every `latq` that the shell asks for until the shell ends; return what they printed."""
    printed = ""
    with (folder / "commands").open() as commands, (folder / "statuses").open("w") as statuses:
        for line in commands:
            process = forked.start(folder / "log", forked.command, shlex.split(line), {}, str(folder))
            process.join()
            print(process.exitcode, file=statuses, flush=True)
            printed += (folder / "log").read_text()
    return printed


@pytest.mark.long
def test_commands_of_the_tutorial(random_model: Any, evaluation_text: Path, tmp_path: Path) -> None:
    model, _ = random_model(
        "qwen3", "tutorial", hidden_size=128, intermediate_size=128, head_dim=32, max_position_embeddings=2048
    )
    text = tmp_path / "text.txt"
    text.write_text(evaluation_text.read_text()[:8000])
    script = "".join(re.findall(r"^```bash run\n(.*?)^```", TEXT, flags=re.MULTILINE | re.DOTALL))
    assert script.count("latq ") == 7
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    environment = os.environ | {"MODEL": str(model), "TEXT": str(text), "PATH": path, "HF_HUB_OFFLINE": "1"}
    for name in ("commands", "statuses"):
        os.mkfifo(tmp_path / name)
    with (tmp_path / "shell.log").open("w") as log:
        command = ["bash", "-euo", "pipefail", "-c", FUNCTION + script]
        shell = subprocess.Popen(command, cwd=tmp_path, env=environment, stdout=log, stderr=subprocess.STDOUT)
    printed = answer(tmp_path)
    assert shell.wait(timeout=60) == 0, printed + (tmp_path / "shell.log").read_text()
    assert "out: valid" in printed
    assert "top-1 agreement" in printed
    assert (tmp_path / "shared" / "config.json").exists()
    assert (tmp_path / "report.html").stat().st_size > 10_000


def test_files_named_in_the_tutorial_exist() -> None:
    for name in re.findall(r"`([\w.]+\.(?:py|service|yaml))`", TEXT):
        assert (EXAMPLES / name).exists(), name
