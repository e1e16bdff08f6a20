"""Both loaders refuse the same checkpoints with the same error, before their hosts open a file."""

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, Qwen3ForCausalLM

from helpers.checkpoints import CheckpointPair, edit_json, edit_tensor
from vllm_latq.errors import CheckpointError, ConfigError
from vllm_latq.format.reader import CheckpointReader
from vllm_latq.integrations.vllm.config import LatqConfig

NAME = "model.layers.1.mlp.down_proj"
INDEX = "model.safetensors.index.json"
Damage = Callable[[Path], Any]


def load_by_transformers(path: Path) -> None:
    AutoModelForCausalLM.from_pretrained(path)


def load_by_a_class_of_transformers(path: Path) -> None:
    Qwen3ForCausalLM.from_pretrained(path)


def load_by_vllm(path: Path) -> None:
    """Do what vLLM does with the method before it makes the model."""
    config = json.loads((path / "config.json").read_text())
    LatqConfig.from_config(config["quantization_config"]).maybe_update_config(str(path))


def editing_config(edit: Callable[[Any], object]) -> Damage:
    return lambda path: edit_json(path / "config.json", edit)


def add_tensor(path: Path) -> None:
    file = path / "model.safetensors"
    save_file(load_file(file) | {f"{NAME}.zero_points": torch.zeros(1)}, file)


def as_floats(path: Path) -> None:
    edit_tensor(path, f"{NAME}.qweight", CheckpointReader(path).store.get(f"{NAME}.qweight").float())


def link_outside(path: Path) -> None:
    shutil.move(path / "model.safetensors", path.parent / "elsewhere.safetensors")
    (path / "model.safetensors").symlink_to(path.parent / "elsewhere.safetensors")


def index(path: Path, metadata: object) -> None:
    (path / "model.safetensors").rename(path / "model-00001-of-00001.safetensors")
    names = load_file(path / "model-00001-of-00001.safetensors")
    content = {"metadata": metadata, "weight_map": dict.fromkeys(names, "model-00001-of-00001.safetensors")}
    (path / INDEX).write_text(json.dumps(content))


def pipe(path: Path) -> None:
    index(path, {})
    (path / "model-00001-of-00001.safetensors").unlink()
    os.mkfifo(path / "model-00001-of-00001.safetensors")


DAMAGES: dict[str, tuple[Damage, str]] = {
    "stray": (lambda path: (path / "consolidated.safetensors").touch(), "found consolidated.safetensors"),
    "pickle": (lambda path: (path / "pytorch_model.bin").touch(), "found pytorch_model.bin"),
    "redirected": (
        editing_config(lambda config: config.update(transformers_weights="model.safetensors")),
        "config.json: expected no key `transformers_weights`",
    ),
    "dtype": (as_floats, f"{NAME}.qweight: expected torch.int32"),
    "unknown tensor": (add_tensor, f"{NAME}.zero_points: expected only .* found an unknown tensor"),
    "missing tensor": (lambda path: edit_tensor(path, f"{NAME}.qweight", None), f"{NAME}.qweight: expected a tensor"),
    "no shape": (lambda path: edit_tensor(path, f"{NAME}.weight_shape", None), f"{NAME}: expected a tensor weight_sh"),
    "ignored": (
        editing_config(lambda config: config["quantization_config"]["ignore"].append("down_proj")),
        r"down_proj: expected no quantized tensors for an ignored module, found some\. Fix `ignore`",
    ),
    "link": (link_outside, "model.safetensors: expected a safetensors file, found a link that points outside"),
    "pipe": (pipe, "model-00001-of-00001.safetensors: expected a safetensors file, found not a regular file"),
    "null metadata": (lambda path: index(path, None), "index.json: expected an object `metadata`, found None"),
}
LOADERS = (load_by_transformers, load_by_a_class_of_transformers, load_by_vllm)
# A class of transformers, unlike AutoModel, does not tell the quantizer the directory before it reads the index.
CASES = [
    (name, loader)
    for name in DAMAGES
    for loader in LOADERS
    if (name, loader) != ("null metadata", load_by_a_class_of_transformers)
]


@pytest.mark.parametrize(("name", "loader"), CASES)
def test_refused(name: str, loader: Callable[[Path], None], ssqr_pair: CheckpointPair, tmp_path: Path) -> None:
    path = Path(shutil.copytree(ssqr_pair.latq, tmp_path / "checkpoint"))
    damage, message = DAMAGES[name]
    damage(path)
    with pytest.raises(CheckpointError, match=message):
        loader(path)


def test_tied_head_with_quantized_tensors(mixed_pair: CheckpointPair, tmp_path: Path) -> None:
    """transformers would use the embedding, and not the tensors that `latq verify` checks."""
    path = Path(shutil.copytree(mixed_pair.latq, tmp_path / "checkpoint"))
    edit_json(path / "config.json", lambda config: config.update(tie_word_embeddings=True))
    with pytest.raises(CheckpointError, match="lm_head: expected no quantized tensors for an ignored module or a tied"):
        load_by_transformers(path)


def test_directory_without_weights_is_left_to_vllm(ssqr_pair: CheckpointPair, tmp_path: Path) -> None:
    """Weights may be streamed from elsewhere, or may be dummies."""
    shutil.copy(ssqr_pair.latq / "config.json", tmp_path)
    load_by_vllm(tmp_path)


def test_vllm_verifies_the_whole_checkpoint_if_asked(
    ssqr_checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The headers of this checkpoint are right, and its tokenizer is not the one that was written."""
    path = Path(shutil.copytree(ssqr_checkpoint, tmp_path / "checkpoint"))
    (path / "tokenizer.json").write_text("{}")
    load_by_vllm(path)
    monkeypatch.setenv("LATQ_VERIFY", "1")
    load_by_vllm(ssqr_checkpoint)
    with pytest.raises(CheckpointError, match="fingerprint: expected sha256:"):
        load_by_vllm(path)
    config = LatqConfig.from_config(json.loads((path / "config.json").read_text())["quantization_config"])
    with pytest.raises(ConfigError, match="LATQ_VERIFY: expected a model in a local directory, found 'org/name'"):
        config.maybe_update_config("org/name")
    monkeypatch.setenv("LATQ_VERIFY", "yes")
    with pytest.raises(ConfigError, match="LATQ_VERIFY: expected 0 or 1, found 'yes'"):
        load_by_vllm(path)
