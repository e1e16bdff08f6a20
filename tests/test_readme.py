"""The README's file map names every file, once, and nothing else."""

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = ("vllm_latq", "quantize", "kernels", "kernels/emulation", "serving_examples")


def test_file_map_is_true() -> None:
    text = (ROOT / "README.md").read_text()
    for folder in FOLDERS:
        section = text.split(f"**{folder}/**")[1].split("\n**")[0]
        listed = re.findall(r"^\| `(\w+\.py)` \|", section, flags=re.MULTILINE)
        assert listed == sorted(path.name for path in (ROOT / folder).glob("*.py")), folder


def test_both_commands_are_shown() -> None:
    text = (ROOT / "README.md").read_text()
    assert "make demo" in text
    assert "make test" in text
