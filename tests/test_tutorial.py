"""The tutorial's commands, run in order as written, and the files it names."""

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

EXAMPLES = Path(__file__).parents[1] / "serving_examples"
TEXT = (EXAMPLES / "TUTORIAL.md").read_text()


@pytest.mark.long
def test_commands(random_model: Any, evaluation_text: Path, tmp_path: Path) -> None:
    model, _ = random_model(
        "qwen3", "tutorial", hidden_size=128, intermediate_size=128, head_dim=32, max_position_embeddings=2048
    )
    text = tmp_path / "text.txt"
    text.write_text(evaluation_text.read_text()[:8000])
    script = "".join(re.findall(r"^```bash run\n(.*?)^```", TEXT, flags=re.MULTILINE | re.DOTALL))
    assert script.count("latq ") == 7
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    environment = os.environ | {"MODEL": str(model), "TEXT": str(text), "PATH": path, "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", script],
        cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=900,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "out: valid" in done.stdout
    assert "top1_agreement" in done.stdout
    assert (tmp_path / "shared" / "config.json").exists()
    assert (tmp_path / "report.html").stat().st_size > 10_000


def test_named_files_exist() -> None:
    for name in re.findall(r"`([\w.]+\.(?:py|service|yaml))`", TEXT):
        assert (EXAMPLES / name).exists(), name
