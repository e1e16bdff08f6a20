"""Killed, out of room, or locked out: after each, `--resume` ends in the bytes of an uninterrupted run."""

import json
import random
import shutil
import signal
import time
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import save_file

from helpers import forked
from vllm_latq.errors import CheckpointError, ConfigError, LatqError
from vllm_latq.format.files import TensorStore
from vllm_latq.quantize.pipeline import quantize_checkpoint
from vllm_latq.quantize.recipe import Recipe

FEW = {"num_samples": 4, "seq_len": 32}
IGNORED = ("lm_head", "q_proj", "k_proj", "gate_proj", "up_proj", "down_proj")
RECIPES = {
    "ssqr": Recipe("ssqr", 4, group_size=16, **FEW),
    "hptq": Recipe("hptq", bits=6.0, **FEW),
    # It searches long: a part of attention alone.
    "latq": Recipe("latq", bits=6.0, ignore=IGNORED, **FEW),
}
BLOCKS = 3
MINUTE = 60.0


class Runs:
    """Runs of one tiny model in processes of their own, and in this one."""

    def __init__(self, source: Path, text: Path, folder: Path) -> None:
        self.source, self.text, self.folder = source, text, folder
        self.log = folder / "log"

    def whole(self, method: str, out: Path, resume: bool = False) -> Path:
        """A run that nothing interrupts."""
        quantize_checkpoint(RECIPES[method], self.source, out, calibration=str(self.text), resume=resume)
        return out

    def uninterrupted(self, method: str) -> Path:
        """Return the checkpoint that every run must end in."""
        out = self.folder / method
        return out if out.exists() else self.whole(method, out)

    def child(self, method: str, out: Path, *trap: Any) -> Any:
        """A started process that begins or resumes a run."""
        before = trap or (None,)
        return forked.start(self.log, forked.quantize, RECIPES[method].to_dict(), self.source, out, self.text, *before)

    def fate(self, process: Any) -> int:
        """Exit status of a child; negative: the signal that ended it."""
        process.join(MINUTE)
        assert process.exitcode is not None, self.log.read_text()
        return int(process.exitcode)


@pytest.fixture(scope="module")
def runs(random_model: Any, calibration_text: Path, tmp_path_factory: pytest.TempPathFactory) -> Runs:
    source, _ = random_model("llama", "faults", num_hidden_layers=BLOCKS)
    return Runs(source, calibration_text, tmp_path_factory.mktemp("faults"))


def assert_same_bytes(got: Path, expected: Path) -> None:
    names = sorted(path.name for path in expected.iterdir())
    assert sorted(path.name for path in got.iterdir()) == names
    for name in names:
        if name not in ("latq_report.json", "README.md"):  # hold seconds, and the name of the directory
            assert (got / name).read_bytes() == (expected / name).read_bytes(), name


@pytest.mark.parametrize("method", RECIPES)
def test_killed_at_renames_and_in_the_middle_of_writes(method: str, runs: Runs, tmp_path: Path) -> None:
    """Killed and resumed until it comes through; every step that makes something durable can be the last one."""
    chance, kills = random.Random(method), 0
    while True:
        # Two is the least that gets anywhere: a torn file is written again.
        trap = (forked.killed_at_rename, chance.randint(2, 6), chance.random() < 0.5)
        status = runs.fate(runs.child(method, tmp_path / "out", *trap))
        if status != -signal.SIGKILL:
            break
        kills += 1
        assert not (tmp_path / "out" / "config.json").exists()
    assert status == 0, runs.log.read_text()
    assert kills >= 3
    assert_same_bytes(tmp_path / "out", runs.uninterrupted(method))


def test_killed_at_random_moments(runs: Runs, tmp_path: Path) -> None:
    """Whatever the process is at: reading, computing, or in the middle of writing."""
    chance, kills = random.Random(0), 0
    for attempt in range(4):
        process = runs.child("ssqr", tmp_path / "out")
        while process.is_alive() and len(list(tmp_path.glob("out.partial/records-*"))) < attempt:
            time.sleep(0.001)
        time.sleep(chance.uniform(0, 0.1))
        process.kill()
        kills += runs.fate(process) == -signal.SIGKILL
    assert kills >= 2, "the runs were over before they could be killed"
    if not (tmp_path / "out").exists():
        runs.whole("ssqr", tmp_path / "out", resume=True)
    assert_same_bytes(tmp_path / "out", runs.uninterrupted("ssqr"))


def test_no_room(runs: Runs, tmp_path: Path) -> None:
    """The last shard, with the embedding, does not fit: the write stops in its middle."""
    whole = runs.uninterrupted("ssqr")
    largest = max(path.stat().st_size for path in whole.glob("*.safetensors"))
    assert runs.fate(runs.child("ssqr", tmp_path / "out", forked.small_disk, largest // 2)) == 1
    error = runs.log.read_text()
    assert "out.partial: expected a directory that can be written to, found" in error
    assert "go on with --resume" in error
    assert not (tmp_path / "out").exists()
    assert len(list((tmp_path / "out.partial").glob("records-*"))) == BLOCKS
    assert_same_bytes(runs.whole("ssqr", tmp_path / "out", resume=True), whole)


def test_no_permission(runs: Runs, tmp_path: Path) -> None:
    """Write permission goes away after the first block: its shard, its records and the state were renamed."""
    assert runs.fate(runs.child("ssqr", tmp_path / "out", forked.locked_at_rename, 3)) == 1
    error = runs.log.read_text()
    assert "expected a directory that can be written to" in error
    assert "Permission denied" in error
    (tmp_path / "out.partial").chmod(0o700)
    assert len(list((tmp_path / "out.partial").glob("records-*"))) == 1
    assert_same_bytes(runs.whole("ssqr", tmp_path / "out", resume=True), runs.uninterrupted("ssqr"))


@pytest.mark.parametrize("moment", ["made", "sealing"])
def test_killed_in_the_gaps(moment: str, runs: Runs, tmp_path: Path) -> None:
    """Between making the directory and writing its state; between config.json and the last rename."""
    partial = tmp_path / "out.partial"
    if moment == "made":
        partial.mkdir()
    else:
        shutil.copytree(runs.uninterrupted("ssqr"), partial)
        (partial / "records-00003.json").write_text("{}")
        (partial / "model-00001-of-00004.tmp").write_text("half a tensor")
    assert_same_bytes(runs.whole("ssqr", tmp_path / "out", resume=True), runs.uninterrupted("ssqr"))
    assert not partial.exists()


@pytest.mark.parametrize(("changed", "error"), [("recipe", "of the same recipe"), ("a bit", "fingerprint")])
def test_a_complete_run_is_checked_before_it_is_moved(changed: str, error: str, runs: Runs, tmp_path: Path) -> None:
    """One that was killed when it had nothing left to do but to move its directory."""
    partial = tmp_path / "out.partial"
    shutil.copytree(runs.uninterrupted("ssqr"), partial)
    if changed == "a bit":
        flip_a_bit(next(partial.glob("model-00004-*")))
    with pytest.raises(LatqError, match=error):
        runs.whole("hptq" if changed == "recipe" else "ssqr", tmp_path / "out", resume=True)
    assert not (tmp_path / "out").exists()
    assert (partial / "config.json").exists()


def flip_a_bit(file: Path) -> None:
    data = bytearray(file.read_bytes())
    data[-100] ^= 1
    file.write_bytes(data)


def interrupted(runs: Runs, method: str, out: Path) -> Path:
    """Kill a run when its second block is on disk, and return the directory that it leaves."""
    process = runs.child(method, out)
    records = out.with_name(out.name + ".partial") / "records-00002.json"
    deadline = time.monotonic() + MINUTE
    while not records.exists() and process.is_alive() and time.monotonic() < deadline:
        time.sleep(0.001)
    process.kill()
    process.join(MINUTE)
    if out.exists():
        pytest.skip("the run was done before it could be killed")
    return records.parent


@pytest.mark.parametrize("damage", ["truncated", "changed"])
def test_a_damaged_block_is_refused_and_can_be_redone(damage: str, runs: Runs, tmp_path: Path) -> None:
    partial = interrupted(runs, "ssqr", tmp_path / "out")
    shard = next(partial.glob("model-00001-*"))
    if damage == "changed":
        flip_a_bit(shard)
    else:
        shard.write_bytes(shard.read_bytes()[: shard.stat().st_size // 2])
    with pytest.raises(CheckpointError, match=r"model-00001.*Remove it with its records"):
        runs.whole("ssqr", tmp_path / "out", resume=True)
    shard.unlink()
    (partial / "records-00001.json").unlink()
    assert_same_bytes(runs.whole("ssqr", tmp_path / "out", resume=True), runs.uninterrupted("ssqr"))


def test_a_damaged_last_shard_is_refused(runs: Runs, tmp_path: Path) -> None:
    """The embedding: nothing is computed from it when its records are there."""
    partial = tmp_path / "out.partial"
    process = runs.child("ssqr", tmp_path / "out", forked.killed_at_rename, 2 * (BLOCKS + 1) + 2, False)
    assert runs.fate(process) == -signal.SIGKILL
    assert len(list(partial.glob("records-*"))) == BLOCKS + 1
    flip_a_bit(next(partial.glob("model-00004-*")))
    with pytest.raises(CheckpointError, match=r"model-00004.*Remove it with its records"):
        runs.whole("ssqr", tmp_path / "out", resume=True)


@pytest.mark.parametrize("damage", ["truncated", "changed", "another's"])
def test_damaged_statistics_are_refused_and_can_be_redone(damage: str, runs: Runs, tmp_path: Path) -> None:
    partial = interrupted(runs, "latq", tmp_path / "out")
    statistics = partial / "scratch" / "statistics-00002.safetensors"
    if damage == "truncated":
        statistics.write_bytes(statistics.read_bytes()[:1000])
    elif damage == "changed":
        flip_a_bit(statistics)
    else:
        shutil.copy(partial / "scratch" / "statistics-00001.safetensors", statistics)
    with pytest.raises(CheckpointError, match=r"statistics-00002.*Remove it"):
        runs.whole("latq", tmp_path / "out", resume=True)
    statistics.unlink()
    assert_same_bytes(runs.whole("latq", tmp_path / "out", resume=True), runs.uninterrupted("latq"))


def test_another_text_under_the_same_name_is_refused(runs: Runs, tmp_path: Path) -> None:
    text = tmp_path / "text"
    text.write_text(runs.text.read_text())
    own = Runs(runs.source, text, tmp_path)
    own.log = runs.log
    interrupted(own, "ssqr", tmp_path / "out")
    text.write_text(runs.text.read_text()[5000:])
    with pytest.raises(ConfigError, match="another tokens"):
        own.whole("ssqr", tmp_path / "out", resume=True)


def test_other_weights_in_the_same_place_are_refused(runs: Runs, tmp_path: Path) -> None:
    """Files of the same names, sizes and headers."""
    own = Runs(Path(shutil.copytree(runs.source, tmp_path / "source")), runs.text, tmp_path)
    interrupted(own, "ssqr", tmp_path / "out")
    store = TensorStore(own.source)
    for file in set(store.files.values()):
        tensors = {name: 1.01 * store.get(name) for name, place in store.files.items() if place == file}
        save_file(tensors, own.source / file, metadata={"format": "pt"})
    with pytest.raises(ConfigError, match="another weights"):
        own.whole("ssqr", tmp_path / "out", resume=True)


def changed_in_secret(runs: Runs, partial: Path, tensor: str) -> None:
    """Change one number of a tensor; what is sampled before a run begins is as if it were the same."""
    store = TensorStore(runs.source)
    tensors = {name: store.get(name).clone() for name in store.names()}
    tensors[tensor].view(-1)[1] += 1
    save_file(tensors, runs.source / store.files[tensor], metadata={"format": "pt"})
    state = json.loads((partial / "state.json").read_text())
    state["identity"]["weights"] = TensorStore(runs.source).sampled_digest()
    (partial / "state.json").write_text(json.dumps(state))


@pytest.mark.parametrize(("method", "embedding"), [("ssqr", "layers.0"), ("latq", "the head")])
def test_one_weight_that_is_another_is_found(method: str, embedding: str, runs: Runs, tmp_path: Path) -> None:
    """A quantized weight, one that stays as it is, or the embedding, on which everything depends."""
    own = Runs(Path(shutil.copytree(runs.source, tmp_path / "source")), runs.text, tmp_path)
    partial = interrupted(own, method, tmp_path / "out")
    for tensor, place in (
        ("model.embed_tokens.weight", embedding),
        ("model.layers.0.self_attn.v_proj.weight", "layers.0"),
        ("model.layers.1.input_layernorm.weight", "layers.1"),
    ):
        changed_in_secret(own, partial, tensor)
        with pytest.raises(ConfigError, match=f"an interrupted run of the same model.*other weights up to .*{place}"):
            own.whole(method, tmp_path / "out", resume=True)
        shutil.copytree(runs.source, own.source, dirs_exist_ok=True)


def test_a_block_that_is_not_done_may_be_another(runs: Runs, tmp_path: Path) -> None:
    """A run reads it when it comes to it, so the checkpoint is the changed model's."""
    own = Runs(Path(shutil.copytree(runs.source, tmp_path / "source")), runs.text, tmp_path)
    partial = interrupted(own, "ssqr", tmp_path / "out")
    if (partial / "records-00003.json").exists():
        pytest.skip("the last block was done before the run could be killed")
    changed_in_secret(own, partial, "model.layers.2.mlp.down_proj.weight")
    assert_same_bytes(own.whole("ssqr", tmp_path / "out", resume=True), own.whole("ssqr", tmp_path / "straight"))


def test_a_model_that_changes_during_a_run(runs: Runs, tmp_path: Path) -> None:
    """latq reads a block several times."""
    own = Runs(Path(shutil.copytree(runs.source, tmp_path / "source")), runs.text, tmp_path)
    changed: list[Any] = []

    def listen(event: Any) -> None:
        if event["event"] == "plan":
            changed_in_secret(own, tmp_path / "out.partial", "model.layers.1.self_attn.o_proj.weight")
            changed.append(event)

    with pytest.raises(CheckpointError, match=r"o_proj\.weight: expected the tensor that was read before"):
        quantize_checkpoint(RECIPES["latq"], own.source, tmp_path / "out", calibration=str(own.text), on_event=listen)
    assert changed
