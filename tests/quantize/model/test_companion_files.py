"""A checkpoint takes over every file of a model that is not weights, code or a setting, and none from elsewhere."""

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from transformers import AutoTokenizer, MistralConfig, MistralForCausalLM

from vllm_latq.errors import CheckpointError
from vllm_latq.quantize.model.companion_files import companion_files
from vllm_latq.quantize.model.loading import require_loadable
from vllm_latq.quantize.pipeline import quantize_checkpoint
from vllm_latq.quantize.recipe import Recipe

TAKEN = (
    *("LICENSE", "NOTICE", "USE_POLICY.md", "tekken.json", "tokenizer.json", "spiece.model", "qwen.tiktoken"),
    *("additional_chat_templates/tool_use.jinja", "chat_template.jinja", "generation_config.json", "figures/loss.png"),
    *("1_Pooling/config.json", "2_Dense/config.json", "2_Dense/model.safetensors", "docs/lock", "docs/README.md"),
)
LEFT = (
    *("model.safetensors", "model.safetensors.index.json", "consolidated.safetensors", "pytorch_model.bin", "x.gguf"),
    *("pytorch_model.bin.index.json", "model.onnx_data", "rust_model.ot", "training_args.bin", "optimizer.pt"),
    *("PYTORCH_MODEL.BIN", "Consolidated.SafeTensors", "model.tensors"),
    *("adapter_config.json", "params.json", "hf_quant_config.json", "own.py", "docs/conf.py", "1_Pooling/own.py"),
    *("onnx/model.onnx", "onnx/config.json", "onnx/deep/note.txt", "original/model.pth", "original/params.json"),
    *("checkpoint-5/model.safetensors", "checkpoint-5/trainer_state.json", "2_Dense/pytorch_model.bin"),
    *(".gitattributes", ".cache/token", "docs/.token", "config.json", "README.md", "latq_report.json"),
    *("state.json", ".lock", "records-00001.json", "scratch/note", "a.tmp"),
)


def _filled(folder: Path, *names: str) -> Path:
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(name)
    return folder


def test_everything_but_weights_code_and_settings(tmp_path: Path) -> None:
    assert companion_files(_filled(tmp_path, *TAKEN, *LEFT)) == sorted(map(Path, TAKEN))


def _link(target: str, name: str) -> Callable[[Path], object]:
    return lambda model: os.symlink(target, model / name)


@pytest.mark.parametrize(
    ("damage", "found"),
    [
        (_link("../id_rsa", "merges.txt"), "a link that points outside the directory"),
        (_link("../../id_rsa", "1_Pooling/vocab.txt"), "a link that points outside the directory"),
        (_link("../home", "2_Dense"), "a link to a folder"),
        (_link("nowhere", "vocab.json"), "no such file"),
        (_link("vocab.json", "vocab.json"), "no such file|loop"),
        (lambda model: os.mkfifo(model / "vocab.json"), "not a regular file"),
    ],
    ids=["file", "nested", "folder", "dangling", "loop", "fifo"],
)
def test_nothing_from_elsewhere(damage: Callable[[Path], object], found: str, mini_model: Path, tmp_path: Path) -> None:
    """Said before anything is written."""
    model = Path(shutil.copytree(mini_model, tmp_path / "model"))
    _filled(tmp_path, "id_rsa", "home/token.json", "model/1_Pooling/config.json")
    damage(model)
    with pytest.raises(CheckpointError, match=found):
        quantize_checkpoint(Recipe("rtn", 4), model, tmp_path / "out")
    assert not list(tmp_path.glob("out*"))


def test_links_within_the_directory_and_into_the_hub_s_cache(tmp_path: Path) -> None:
    (model := tmp_path / "models--org--name" / "snapshots" / "0a1b").mkdir(parents=True)
    _filled(model, "vocab.txt", "1_Pooling/config.json")
    _filled(tmp_path, "models--org--name/blobs/aa", "models--org--name/refs/main", "models--org--other/blobs/aa")
    os.symlink("vocab.txt", model / "words.txt")
    os.symlink("../../blobs/aa", model / "LICENSE")
    os.symlink("../../../blobs/aa", model / "1_Pooling/NOTICE")
    names = ["1_Pooling/NOTICE", "1_Pooling/config.json", "LICENSE", "vocab.txt", "words.txt"]
    assert companion_files(model) == [Path(name) for name in names]
    for elsewhere in ("../../refs/main", "../../../models--org--other/blobs/aa"):
        os.symlink(elsewhere, model / "NOTICE")
        with pytest.raises(CheckpointError, match=r"NOTICE.*a link that points outside"):
            companion_files(model)
        (model / "NOTICE").unlink()


def test_a_tokenizer_in_tekken_json_alone(tmp_path: Path) -> None:
    """As Mistral publishes its models; licences are copied, too."""
    mistral_common = pytest.importorskip("mistral_common")
    tekken = min(Path(mistral_common.__file__).parent.glob("data/tekken_*.json"))
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "head_dim": 32}
    heads = {"num_attention_heads": 1, "num_key_value_heads": 1, "tie_word_embeddings": True}
    config = MistralConfig(vocab_size=131_072, **sizes, **heads)  # type: ignore[arg-type]
    MistralForCausalLM(config).bfloat16().save_pretrained(_filled(tmp_path / "model", "LICENSE"))
    shutil.copy(tekken, tmp_path / "model" / "tekken.json")
    quantize_checkpoint(Recipe("rtn", 4, group_size=32), tmp_path / "model", tmp_path / "out")
    ours, theirs = (AutoTokenizer.from_pretrained(tmp_path / name)("hello world") for name in ("out", "model"))
    assert ours["input_ids"] == theirs["input_ids"]
    assert (tmp_path / "out" / "LICENSE").read_text() == "LICENSE"


def test_a_checkpoint_that_does_not_load(mini_model: Path, tmp_path: Path) -> None:
    out = Path(shutil.copytree(mini_model, tmp_path / "out"))
    require_loadable(out, mini_model)
    words = json.loads((out / "tokenizer.json").read_text())
    vocabulary = words["model"]["vocab"]
    vocabulary["7"], vocabulary["8"] = vocabulary["8"], vocabulary["7"]
    (out / "tokenizer.json").write_text(json.dumps(words))
    with pytest.raises(CheckpointError, match="expected the tokenizer of the model, found one that gives other tokens"):
        require_loadable(out, mini_model)
    (out / "tokenizer.json").write_text("{")
    with pytest.raises(CheckpointError, match=r"expected a tokenizer that transformers can load.*go on with --resume"):
        require_loadable(out, mini_model)
    (out / "config.json").write_text('{"model_type": "abacus"}')
    with pytest.raises(CheckpointError, match="expected a configuration that transformers can load"):
        require_loadable(out, mini_model)
