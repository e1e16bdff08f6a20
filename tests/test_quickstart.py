"""The quickstart's commands, and those for several processes, run in order as the pages print them."""

import os
import shlex
import subprocess
from pathlib import Path
from typing import Any

import pytest

from helpers import forked
from helpers.documentation import environment, runnable

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
def test_commands_of_the_quickstart(random_model: Any, evaluation_text: Path, tmp_path: Path) -> None:
    model, _ = random_model(
        "qwen3", "quickstart", hidden_size=128, intermediate_size=128, head_dim=32, max_position_embeddings=2048
    )
    text, held_out = tmp_path / "text.txt", tmp_path / "held_out.txt"
    text.write_text(evaluation_text.read_text()[:8000])
    held_out.write_text(evaluation_text.read_text()[8000:16000])
    script = runnable("quickstart.md", "quickstart") + runnable("quantize.md", "quickstart")
    assert script.count("latq ") == 7
    for name in ("commands", "statuses"):
        os.mkfifo(tmp_path / name)
    with (tmp_path / "shell.log").open("w") as log:
        command = ["bash", "-euo", "pipefail", "-c", FUNCTION + script]
        variables = environment(MODEL=model, TEXT=text, HELD_OUT=held_out)
        shell = subprocess.Popen(command, cwd=tmp_path, env=variables, stdout=log, stderr=subprocess.STDOUT)
    printed = answer(tmp_path)
    assert shell.wait(timeout=60) == 0, printed + (tmp_path / "shell.log").read_text()
    assert "out: valid" in printed
    assert "top-1 agreement" in printed
    assert (tmp_path / "shared" / "config.json").exists()
    assert (tmp_path / "report.html").stat().st_size > 10_000
