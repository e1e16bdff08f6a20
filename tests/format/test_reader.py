"""Reading a checkpoint directory: every kind of damage is refused with an error that names it."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from helpers.checkpoints import edit_json, edit_tensor, problems
from vllm_latq.cli.inspect import inspect_checkpoint
from vllm_latq.errors import CheckpointError, ConfigError
from vllm_latq.format.files import INDEX_FILE, SINGLE_FILE
from vllm_latq.format.reader import CheckpointReader, TensorStore
from vllm_latq.format.verify import verify


@pytest.fixture
def damaged(ssqr_checkpoint: Path, tmp_path: Path) -> Path:
    """A copy that a test may damage."""
    return Path(shutil.copytree(ssqr_checkpoint, tmp_path / "copy"))


def test_fresh_checkpoints_are_valid(ssqr_checkpoint: Path, hptq_checkpoint: Path) -> None:
    assert problems(ssqr_checkpoint) == ""
    assert problems(hptq_checkpoint) == ""


def test_inspect_agrees_with_the_report(ssqr_checkpoint: Path, hptq_checkpoint: Path) -> None:
    for path in (ssqr_checkpoint, hptq_checkpoint):
        summary = inspect_checkpoint(path)
        reported = json.loads((path / "latq_report.json").read_text())
        assert summary["bits_per_weight"] == pytest.approx(reported["totals"]["bits_per_weight"], rel=1e-12)
        names = [layer["name"] for layer in summary["layers"]]
        assert sorted(names) == sorted(layer["name"] for layer in reported["layers"])
        stored = sum(
            tensor.nbytes
            for shard in path.glob("*.safetensors")
            for name, tensor in load_file(shard).items()
            if name.rpartition(".")[0] in names
        )
        assert summary["bytes"] == stored


def test_missing_directory(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="expected a model directory"):
        CheckpointReader(tmp_path / "nothing")


def test_unquantized_model(mini_model: Path) -> None:
    with pytest.raises(CheckpointError, match="run `latq quantize`"):
        CheckpointReader(mini_model)


def test_directory_without_weights(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"expected model\.safetensors or"):
        TensorStore(tmp_path).names()


@pytest.mark.parametrize("text", ["", "{", "[]", '"x"', "\xff\xfe", "[" * 100000])
def test_broken_json(damaged: Path, text: str) -> None:
    (damaged / "config.json").write_text(text, encoding="latin-1")
    with pytest.raises(CheckpointError, match=r"config\.json"):
        CheckpointReader(damaged)


def test_unknown_config_key(damaged: Path) -> None:
    edit_json(damaged / "config.json", lambda config: config["quantization_config"].update(zeros=1))
    with pytest.raises(ConfigError, match="unknown zeros"):
        CheckpointReader(damaged)


def test_missing_shard(damaged: Path) -> None:
    sorted(damaged.glob("model-*.safetensors"))[1].unlink()
    assert "expected a safetensors file, found no such file" in problems(damaged)


@pytest.mark.parametrize("keep", [0, 7, 100, -1])
def test_truncated_shard(damaged: Path, keep: int) -> None:
    shard = min(damaged.glob("model-*.safetensors"))
    shard.write_bytes(shard.read_bytes()[:keep])
    assert "expected a valid safetensors file" in problems(damaged)


def test_index_that_leaves_the_directory(damaged: Path) -> None:
    index = damaged / "model.safetensors.index.json"
    name = next(iter(json.loads(index.read_text())["weight_map"]))
    edit_json(index, lambda value: value["weight_map"].update({name: "../elsewhere.safetensors"}))
    assert "expected file names without a folder" in problems(damaged)


def test_tensor_that_the_index_lists_but_no_shard_holds(damaged: Path) -> None:
    edit_tensor(damaged, "model.layers.0.mlp.up_proj.scales", None)
    assert "model.layers.0.mlp.up_proj.scales" in problems(damaged)


def test_flipped_bit_changes_the_fingerprint(damaged: Path) -> None:
    name = "model.layers.0.mlp.up_proj.qweight"
    reader = CheckpointReader(damaged)
    tensor = reader.store.get(name).clone()
    tensor[0, 0] ^= 1
    edit_tensor(damaged, name, tensor)
    assert "fingerprint: expected sha256:" in problems(damaged)


@pytest.mark.parametrize("change", [{"grid": "midrise"}, {"ignore": ["lm_head", "other"]}])
def test_changed_config_changes_the_fingerprint(change: dict[str, object], damaged: Path) -> None:
    """With another config, the same tensors are other weights, or cannot be read."""
    path = damaged / "config.json"
    original = path.read_text()
    edit_json(path, lambda config: config["quantization_config"].update(change))
    assert "fingerprint: expected sha256:" in problems(damaged)
    path.write_text(original)
    edit_json(path, lambda config: config["quantization_config"].update(recipe={"seed": 7}))
    assert problems(damaged) == ""


@pytest.mark.parametrize(
    "name", ["tokenizer.json", "generation_config.json", "chat_template.jinja", "2_Dense/model.safetensors", "x\ny.py"]
)
def test_added_or_changed_file_changes_the_fingerprint(name: str, damaged: Path) -> None:
    (damaged / name).parent.mkdir(exist_ok=True)
    (damaged / name).write_bytes((damaged / name).read_bytes() + b" " if (damaged / name).exists() else b"")
    assert "fingerprint: expected sha256:" in problems(damaged)


def test_missing_file_changes_the_fingerprint(damaged: Path) -> None:
    (damaged / "tokenizer.json").unlink()
    assert "fingerprint: expected sha256:" in problems(damaged)


def test_key_of_the_model_changes_the_fingerprint(damaged: Path) -> None:
    edit_json(damaged / "config.json", lambda config: config.update(rms_norm_eps=1.5))
    assert "fingerprint: expected sha256:" in problems(damaged)
    edit_json(damaged / "config.json", lambda config: config.update(rms_norm_eps=1e-6))
    assert problems(damaged) == ""


@pytest.mark.parametrize("name", ["README.md", "LICENSE", "docs/plot.png", ".cache/x.json", ".gitattributes"])
def test_documents_and_hidden_files_do_not_change_the_fingerprint(name: str, damaged: Path) -> None:
    (damaged / name).parent.mkdir(exist_ok=True)
    (damaged / name).write_text("more")
    assert problems(damaged) == ""


def test_link_to_another_folder_is_refused(damaged: Path, tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    (damaged / "1_Pooling").symlink_to(tmp_path / "elsewhere")
    assert "1_Pooling: expected a file, found not a regular file" in problems(damaged)


def test_report_that_lists_a_layer_that_is_not_stored(damaged: Path) -> None:
    more = {"name": "model.layers.9.mlp.up_proj"}
    edit_json(damaged / "latq_report.json", lambda report: report["layers"].append(report["layers"][0] | more))
    assert "found no model.layers.9.mlp.up_proj" in problems(damaged)


def test_missing_report(damaged: Path) -> None:
    (damaged / "latq_report.json").unlink()
    assert "latq_report.json: expected a JSON file, found no such file" in problems(damaged)


def test_second_copy_of_a_tensor_is_refused(damaged: Path) -> None:
    """vLLM or transformers would serve the second copy, in a later shard or in a single file."""
    index = json.loads((damaged / INDEX_FILE).read_text())["weight_map"]
    name = "model.layers.0.input_layernorm.weight"
    last = sorted(set(index.values()))[-1]
    assert index[name] != last
    whole = load_file(damaged / last)
    save_file({**whole, name: torch.zeros(8)}, damaged / last, metadata={"format": "pt"})
    assert any(f"found {name} in {last}" in str(problem) for problem in verify(damaged))
    save_file(whole, damaged / last, metadata={"format": "pt"})
    save_file({name: torch.zeros(8)}, damaged / SINGLE_FILE)
    assert any(f"found {SINGLE_FILE}." in str(problem) for problem in verify(damaged))
    (damaged / SINGLE_FILE).unlink()
    assert list(verify(damaged)) == []
