"""Every way a model directory can be broken has an error; none is evaluated with random weights."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from helpers.local_hub import COMMIT, REPOSITORY, local_hub
from vllm_latq.errors import CheckpointError, ConfigError
from vllm_latq.format.files import INDEX_FILE
from vllm_latq.quantize.model.loading import load_model, model_directory

WEIGHT = "model.layers.2.mlp.up_proj.weight"


def test_loads_in_the_asked_dtype(mini_model: Path) -> None:
    model, tokenizer = load_model(mini_model, "cpu")
    assert model.dtype == torch.float32
    assert not model.training
    assert tokenizer.decode(tokenizer("import os")["input_ids"]) == "import os"
    assert load_model(mini_model, "cpu", "bfloat16")[0].dtype == torch.bfloat16


def test_paths_that_hold_no_model(mini_model: Path, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="found no such directory"):
        load_model(tmp_path / "nowhere", "cpu")
    with pytest.raises(CheckpointError, match="found a file"):
        load_model(mini_model / "config.json", "cpu")
    with pytest.raises(CheckpointError, match="expected a model that transformers can load"):
        load_model(tmp_path, "cpu")


def _truncated(folder: Path) -> None:
    content = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(content[: len(content) // 2])


def _one_weight(folder: Path, change: Callable[[torch.Tensor], torch.Tensor | None]) -> None:
    tensors = load_file(folder / "model.safetensors")
    changed = change(tensors.pop(WEIGHT))
    if changed is not None:
        tensors[WEIGHT] = changed
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def _without_tokenizer(folder: Path) -> None:
    (folder / "tokenizer.json").unlink()
    (folder / "tokenizer_config.json").unlink()


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (_truncated, "SafetensorError"),
        (lambda folder: (folder / "model.safetensors").unlink(), r"no file named model\.safetensors"),
        (lambda folder: (folder / "config.json").write_text("{"), r"not a valid JSON file\. Check"),
        (lambda folder: (folder / "config.json").write_text('{"model_type": "abacus"}'), "model type `abacus`"),
        (lambda folder: _one_weight(folder, lambda weight: None), f"expected all weights, found 1 missing.*{WEIGHT}"),
        (
            lambda folder: _one_weight(folder, lambda weight: weight[:5].clone()),
            "expected a model that transformers can load.*mismatch",
        ),
        (_without_tokenizer, "expected a tokenizer, found none"),
    ],
    ids=["truncated", "no-weights", "bad-json", "unknown-type", "missing-weight", "wrong-shape", "no-tokenizer"],
)
def test_broken_model_directory(mini_model: Path, tmp_path: Path, damage: Callable[[Path], None], message: str) -> None:
    folder = tmp_path / "broken"
    shutil.copytree(mini_model, folder)
    damage(folder)
    with pytest.raises(CheckpointError, match=message) as raised:
        load_model(folder, "cpu")
    assert str(folder) in str(raised.value)


def test_device_and_dtype(mini_model: Path) -> None:
    with pytest.raises(ConfigError, match="dtype: expected auto, float32"):
        load_model(mini_model, "cpu", "float31")
    with pytest.raises(ConfigError, match="dtype: expected auto, float32"):
        load_model(mini_model, "cpu", "int8")
    with pytest.raises(ConfigError, match="device: expected a device torch can use, found 'abacus'"):
        load_model(mini_model, "abacus")
    with pytest.raises(ConfigError, match=r"device: expected a device torch can use, found .*CUDA device"):
        load_model(mini_model, "cuda:99")
    if not torch.cuda.is_available():
        with pytest.raises(ConfigError, match=r"found no CUDA device\. Use --device cpu, or install a CUDA build"):
            load_model(mini_model, "cuda")


def test_model_directory(mini_model: Path) -> None:
    assert model_directory(mini_model) == mini_model
    assert model_directory(str(mini_model)) == mini_model


@pytest.mark.parametrize("name", ["", "/no/such", "a/b/c", "../up/side", "./here"])
def test_names_that_are_no_model(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(CheckpointError, match="expected a model directory or a hub name org/name, found no such"):
        model_directory(name)


@pytest.mark.parametrize("sharded", [True, False])
def test_download_takes_the_weights_that_the_index_names(sharded: bool, tmp_path: Path) -> None:
    """A repository may hold the same weights in other formats, too."""
    source = tmp_path / "source"
    shards = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
    own = ["config.json", "tokenizer.json", "2_Dense/model.safetensors"]
    own += [INDEX_FILE, *shards] if sharded else ["model.safetensors"]
    for name in (*own, "consolidated.safetensors", "original/model.safetensors", "pytorch_model.bin", *shards):
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        (source / name).write_text("{}")
    if sharded:
        (source / INDEX_FILE).write_text(json.dumps({"weight_map": {"a": shards[0], "b": shards[1]}}))
    code = f"from vllm_latq.quantize.model.loading import model_directory as m; print(m({REPOSITORY!r}))"
    with local_hub(source) as address:
        # huggingface_hub reads its address when it is imported.
        environment = {**os.environ, "HF_ENDPOINT": address, "HF_HOME": str(tmp_path / "home"), "HF_HUB_OFFLINE": "0"}
        done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    snapshot = Path(done.stdout.strip().splitlines()[-1])
    assert snapshot.name == COMMIT
    downloaded = sorted(str(path.relative_to(snapshot)) for path in snapshot.rglob("*") if path.is_file())
    assert downloaded == sorted(own)


@pytest.mark.parametrize("name", ["org/name", "name"])
def test_hub_out_of_reach(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(CheckpointError, match=f"model {name}: .*connection to the hub"):
        model_directory(name)
