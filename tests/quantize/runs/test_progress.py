"""`latq inspect OUT.partial` shows the progress of a run."""

import json
import re
from pathlib import Path

import pytest
import torch

from vllm_latq.cli.main import main
from vllm_latq.errors import CheckpointError
from vllm_latq.quantize.runs.progress import is_partial, partial_progress
from vllm_latq.quantize.runs.writer import CheckpointWriter

RECORD = {"name": "layers.0.up", "bits": 4.0, "error": 0.5, "bound": 1.5, "relative_error": 0.01}


@pytest.fixture
def partial(tmp_path: Path) -> Path:
    writer = CheckpointWriter(tmp_path / "out", 3, {"recipe": {"method": "rtn"}})
    writer.add(0, {"layers.0.norm": torch.ones(5)}, {"layers": [RECORD]})
    return writer.partial


def test_finished_shards_are_counted(partial: Path) -> None:
    assert is_partial(partial)
    assert not is_partial(partial.parent)
    progress = partial_progress(partial)
    assert (progress["shards_done"], progress["shards"], progress["bytes"]) == (1, 3, 20)
    assert progress["recipe"] == {"method": "rtn"}
    assert [layer["name"] for layer in progress["layers"]] == ["layers.0.up"]


def test_command(partial: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", str(partial)]) == 0
    out = capsys.readouterr().out
    assert "shards      1 of 3, 20 bytes" in out
    assert re.search(r"^0 +4\.000 +1\.00% +up ", out, flags=re.MULTILINE)
    assert f"latq quantize MODEL {partial.with_suffix('')} --resume" in out
    assert main(["inspect", str(partial), "--layers"]) == 0
    assert "1.5 (not claimed)" in capsys.readouterr().out
    assert main(["inspect", str(partial), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["shards_done"] == 1


def test_finished_statistics_are_counted(partial: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (partial / "scratch").mkdir()
    (partial / "scratch" / "statistics-00001.safetensors").touch()
    assert main(["inspect", str(partial)]) == 0
    assert "statistics  1 of 3 parts" in capsys.readouterr().out


def test_damaged_state(partial: Path) -> None:
    (partial / "state.json").write_text("{}")
    with pytest.raises(CheckpointError, match="expected `shards` and `identity`"):
        partial_progress(partial)
