"""The checkpoint appears complete or not at all, and finished shards survive."""

import json
import shutil
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import pytest
import torch

from helpers.programs import program, run_program
from vllm_latq.cli.main import main
from vllm_latq.errors import CheckpointError, ConfigError
from vllm_latq.format.config import NEEDS_IMPORT, CheckpointConfig
from vllm_latq.format.reader import CheckpointReader, TensorStore, checkpoint_fingerprint
from vllm_latq.format.scheme import LayerScheme
from vllm_latq.quantize.runs import writer as writing
from vllm_latq.quantize.runs.writer import CheckpointWriter

RECORDS = ["", "[]", "{}", '{"digests": [], "layers": [], "bytes": 0}']
IDENTITY = {"recipe": {"bits": 4}, "source": "model"}
CONFIG = CheckpointConfig(LayerScheme("packed", 4, 128))


@pytest.fixture
def source(tmp_path: Path) -> Path:
    directory = tmp_path / "source"
    directory.mkdir()
    (directory / "config.json").write_text('{"model_type": "llama", "transformers_weights": "other.safetensors"}')
    (directory / "tokenizer.json").write_text("{}")
    return directory


def write(out: Path, source: Path, resume: bool = False) -> CheckpointWriter:
    writer = CheckpointWriter(out, 2, IDENTITY, resume)
    for shard in range(2):
        if writer.records(shard) is None:
            writer.add(shard, {f"tensor{shard}": torch.full((3,), shard)}, {"layers": [shard]})
    writer.finish(source, CONFIG, {"layers": []}, "# card\n")
    return writer


def test_complete_directory(tmp_path: Path, source: Path) -> None:
    write(tmp_path / "out", source)
    names = sorted(path.name for path in (tmp_path / "out").iterdir())
    assert names == [
        "README.md",
        "config.json",
        "latq_report.json",
        "model-00001-of-00002.safetensors",
        "model-00002-of-00002.safetensors",
        "model.safetensors.index.json",
        "tokenizer.json",
    ]
    store = TensorStore(tmp_path / "out")
    assert sorted(store.names()) == ["tensor0", "tensor1"]
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["model_type"] == "llama"
    assert config["transformers_weights"] == NEEDS_IMPORT
    assert config["quantization_config"]["fingerprint"] == checkpoint_fingerprint(CheckpointReader(tmp_path / "out"))
    assert not (tmp_path / "out.partial").exists()


def test_what_does_not_load_is_not_complete(tmp_path: Path, mini_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is finished by a resumed run, without a trace of the first end."""
    source = Path(shutil.copytree(mini_model, tmp_path / "source"))
    (source / "NOTICE").write_text("removed later")
    with monkeypatch.context() as patched:
        patched.setattr(writing, "copy_companions", lambda *_: shutil.copy(source / "NOTICE", tmp_path / "out.partial"))
        with pytest.raises(CheckpointError, match=r"expected a tokenizer.*--resume"):
            write(tmp_path / "out", source)
    assert not (tmp_path / "out").exists()
    assert not (tmp_path / "out.partial" / "config.json").exists()
    (source / "NOTICE").unlink()
    writing._unlock(tmp_path / "out.partial")
    write(tmp_path / "out", source, resume=True)
    write(tmp_path / "straight", source)
    listed = [sorted(path.name for path in (tmp_path / name).iterdir()) for name in ("out", "straight")]
    assert listed[0] == listed[1]
    assert "tokenizer.json" in listed[0]


def test_interrupted_run_does_not_load_and_resumes(tmp_path: Path, source: Path) -> None:
    writer = CheckpointWriter(tmp_path / "out", 2, IDENTITY)
    writer.add(0, {"tensor0": torch.full((3,), 0)}, {"layers": [{"name": "up"}]})
    writer.close()
    assert not (tmp_path / "out").exists()
    assert not (tmp_path / "out.partial" / "config.json").exists()
    with pytest.raises(CheckpointError, match=r"found an interrupted one\. Go on with --resume"):
        CheckpointWriter(tmp_path / "out", 2, IDENTITY)
    resumed = CheckpointWriter(tmp_path / "out", 2, IDENTITY, resume=True)
    assert resumed.records(0)["layers"] == [{"name": "up"}]  # type: ignore[index]
    assert resumed.records(1) is None
    resumed.close()
    write(tmp_path / "out", source, resume=True)
    write(tmp_path / "straight", source)
    for path in (tmp_path / "straight").iterdir():
        assert path.read_bytes() == (tmp_path / "out" / path.name).read_bytes()


def test_resume_with_another_recipe_is_refused(tmp_path: Path) -> None:
    writer = CheckpointWriter(tmp_path / "out", 2, IDENTITY)
    writer.add(0, {"tensor0": torch.zeros(3)}, {"layers": []})
    writer.close()
    with pytest.raises(ConfigError, match=r"found one with another recipe \([a-z_, ]+\)"):
        CheckpointWriter(tmp_path / "out", 2, {**IDENTITY, "recipe": {"bits": 3}}, resume=True)


def test_a_run_that_got_nowhere_is_in_nobody_s_way(tmp_path: Path, source: Path) -> None:
    """As one that its first layer ended, or that was killed while it wrote its first shard: the next is another."""
    CheckpointWriter(tmp_path / "out", 2, {**IDENTITY, "recipe": {"bits": 3}}).close()
    (tmp_path / "out.partial" / "model-00001-of-00002.tmp").write_text("torn")
    write(tmp_path / "out", source)
    assert not (tmp_path / "out.partial").exists()


def lets_others_in(out: Path) -> bool:
    """Return whether another process may go on with a run; this process would not notice its own lock."""
    return run_program("hold_run.py", out, 0).returncode == 0


@pytest.mark.parametrize("resume", [False, True])
def test_two_processes_do_not_work_in_one_directory(resume: bool, tmp_path: Path, source: Path) -> None:
    command = [sys.executable, program("hold_run.py"), tmp_path / "out", "600"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as other:
        try:
            assert other.stdout is not None
            assert other.stdout.readline() == "ready\n"
            torn = tmp_path / "out.partial" / "model-00001-of-00002.tmp"
            torn.write_text("what it is writing")
            with pytest.raises(CheckpointError, match=r"expected no other run at work in it, found one\. Wait"):
                CheckpointWriter(tmp_path / "out", 2, IDENTITY, resume)
            assert torn.exists()
        finally:
            other.kill()
    write(tmp_path / "out", source, resume=True)


def test_a_second_writer_in_this_process_does_not_free_the_first_one_s_lock(tmp_path: Path) -> None:
    writer = CheckpointWriter(tmp_path / "out", 2, IDENTITY)
    for resume in (False, True):
        with pytest.raises(CheckpointError, match="expected no other run at work in it"):
            CheckpointWriter(tmp_path / "out", 2, IDENTITY, resume)
        assert not lets_others_in(tmp_path / "out")
    writer.close()
    assert lets_others_in(tmp_path / "out")


def test_a_writer_that_is_refused_lets_others_in(tmp_path: Path) -> None:
    with closing(CheckpointWriter(tmp_path / "out", 2, IDENTITY)) as writer:
        writer.add(0, {"tensor0": torch.zeros(3)}, {"layers": []})
    with pytest.raises(ConfigError, match="another recipe"):
        CheckpointWriter(tmp_path / "out", 2, {**IDENTITY, "recipe": {"bits": 3}}, resume=True)
    assert lets_others_in(tmp_path / "out")


def test_others_may_read_it_as_far_as_the_umask_lets_them(tmp_path: Path, source: Path) -> None:
    (tmp_path / "plain").write_text("")
    write(tmp_path / "out", source)
    for path in (tmp_path / "out").iterdir():
        assert path.stat().st_mode == (tmp_path / "plain").stat().st_mode, path.name


@pytest.mark.parametrize("files", [["notes"], ["config.json", "model.safetensors"]])
def test_resume_does_not_touch_what_no_run_left(files: list[str], tmp_path: Path) -> None:
    partial = tmp_path / "out.partial"
    partial.mkdir()
    for name in files:
        (partial / name).write_text("{}")
    with pytest.raises((CheckpointError, ConfigError), match=r"out\.partial: expected .*Move it away"):
        CheckpointWriter(tmp_path / "out", 2, IDENTITY, resume=True)
    assert sorted(path.name for path in partial.iterdir()) == files
    assert (partial / files[0]).read_text() == "{}"


def test_a_file_in_the_place_of_the_partial_run(tmp_path: Path) -> None:
    (tmp_path / "out.partial").write_text("x")
    with pytest.raises(CheckpointError, match="found a file without it"):
        CheckpointWriter(tmp_path / "out", 2, IDENTITY, resume=True)


@pytest.mark.parametrize("content", RECORDS)
def test_damaged_records_are_named(content: str, tmp_path: Path) -> None:
    writer = CheckpointWriter(tmp_path / "out", 2, IDENTITY)
    (tmp_path / "out.partial" / "records-00001.json").write_text(content)
    with pytest.raises(CheckpointError, match=r"records-00001.*its block is done again"):
        writer.records(0)


def test_a_destination_that_links_elsewhere(tmp_path: Path, source: Path) -> None:
    for name in ("empty", "dangling"):
        (tmp_path / name).symlink_to(tmp_path / "disk" / name)
    (tmp_path / "disk" / "empty").mkdir(parents=True)
    for name in ("empty", "dangling"):
        write(tmp_path / name, source)
        assert (tmp_path / name).is_symlink()
        assert (tmp_path / "disk" / name / "config.json").is_file()


def test_destinations_that_cannot_be_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(CheckpointError, match=r"directory that can be written to, found.*Choose another") as caught:
        CheckpointWriter(tmp_path / "file" / "out", 2, IDENTITY)
    assert caught.value.found == f"no such directory {tmp_path / 'file'}"
    with pytest.raises(CheckpointError, match="expected a new or empty directory, found a file"):
        CheckpointWriter(tmp_path / "file", 2, IDENTITY)
    (tmp_path / "loop").symlink_to("loop")
    with pytest.raises(CheckpointError, match="expected a new or empty directory, found a link that leads nowhere"):
        CheckpointWriter(tmp_path / "loop", 2, IDENTITY)
    with pytest.raises(CheckpointError, match="expected a name to create a directory by"):
        CheckpointWriter(tmp_path / "nowhere" / "..", 2, IDENTITY)
    (tmp_path / "empty").mkdir()
    monkeypatch.chdir(tmp_path / "empty")
    with pytest.raises(CheckpointError, match="expected a name to create a directory by"):
        CheckpointWriter(".", 2, IDENTITY)
    assert not list(tmp_path.rglob("*partial*"))


def test_existing_files_are_never_touched(tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.mkdir()
    (out / "precious").write_text("x")
    with pytest.raises(CheckpointError, match="expected a new or empty directory"):
        CheckpointWriter(out, 1, IDENTITY)
    assert [path.name for path in out.iterdir()] == ["precious"]
    assert not (tmp_path / "out.partial").exists()


@pytest.mark.parametrize(("old", "new"), [('"up"', '"down"'), ('"bytes": 24', '"bytes": -5'), ("tensor0", "tensor1")])
def test_records_that_were_changed_are_refused(old: str, new: str, tmp_path: Path) -> None:
    writer = CheckpointWriter(tmp_path / "out", 2, IDENTITY)
    writer.add(0, {"tensor0": torch.full((3,), 0)}, {"layers": [{"name": "up", "bits": 0.1 + 0.2}]})
    assert writer.records(0) is not None
    path = tmp_path / "out.partial" / "records-00001.json"
    assert old in path.read_text()
    path.write_text(path.read_text().replace(old, new))
    with pytest.raises(CheckpointError, match=r"records-00001.*as they were written, found others"):
        writer.records(0)


def test_what_a_killed_run_was_writing_is_removed(tmp_path: Path, source: Path) -> None:
    """safetensors writes to a hidden file of its own first; what a temporary name links to is not ours."""
    CheckpointWriter(tmp_path / "out", 2, IDENTITY).close()
    (tmp_path / "foreign").write_text("x")
    for name in (".tmpQAnJ9r", "model-00001-of-00002.tmp", "activations-1"):
        (tmp_path / "out.partial" / name).write_text("torn")
    (tmp_path / "out.partial" / "config.json.tmp").symlink_to(tmp_path / "foreign")
    write(tmp_path / "out", source, resume=True)
    write(tmp_path / "straight", source)
    listed = [sorted(path.name for path in (tmp_path / name).iterdir()) for name in ("out", "straight")]
    assert listed[0] == listed[1]
    assert (tmp_path / "foreign").read_text() == "x"


def test_a_destination_that_links_to_itself(tmp_path: Path) -> None:
    (tmp_path / "out").symlink_to("out")
    with pytest.raises(CheckpointError, match="expected a new or empty directory"):
        CheckpointWriter(tmp_path / "out", 2, IDENTITY)


def test_a_name_that_is_too_long(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="expected a directory that can be written to"):
        CheckpointWriter(tmp_path / ("x" * 300), 2, IDENTITY)


def test_a_run_whose_records_vanish_does_not_finish(tmp_path: Path, source: Path) -> None:
    writer = CheckpointWriter(tmp_path / "out", 2, IDENTITY)
    writer.add(0, {"tensor0": torch.full((3,), 0)}, {"layers": []})
    with pytest.raises(CheckpointError, match=r"records-00002.*found no such file"):
        writer.finish(source, CONFIG, {"layers": []}, "# card\n")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("name", ["x" * 300, "x" * 250, "x/" * 3000 + "out"], ids=["name", "partial", "path"])
def test_a_name_that_is_too_long_is_refused(
    name: str, mini_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Also where only OUT.partial is too long for the file system."""
    assert main(["quantize", str(mini_model), str(tmp_path / name), "--method", "rtn", "--group-size", "16"]) == 1
    error = capsys.readouterr().err
    assert "expected a directory that can be written to, found file name too long" in error
    assert "Choose another directory" in error
