"""Fixtures for all tests: the bundled model, its texts, and quantized variants of it with dense twins."""

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import settings
from safetensors.torch import load_file, save_file

from helpers.checkpoints import CheckpointMaker, CheckpointPair, dense_twin
from helpers.random_models import RandomModels
from vllm_latq.format.config import CheckpointConfig
from vllm_latq.format.scheme import LayerScheme

settings.register_profile("fuzz", max_examples=20_000, derandomize=False)  # make fuzz: other examples every time
settings.register_profile("test", derandomize=True, deadline=None)  # else every run tests the same
settings.load_profile("test")
DATA = Path(__file__).parent / "data"
TASK = """
task: next_word
dataset_path: json
dataset_kwargs:
  data_files:
    validation: {data}
output_type: multiple_choice
validation_split: validation
doc_to_text: "{{{{question}}}}"
doc_to_target: "{{{{answer}}}}"
doc_to_choice: "{{{{choices}}}}"
metric_list:
  - metric: acc
"""
# The bundled model knows reStructuredText: what follows "versionadded::" is a version, and so on.
TASK_ROWS = [
    {"question": ".. versionadded::", "choices": [" 3.8", " banana"], "answer": 0},
    {"question": ".. seealso", "choices": ["%", "::"], "answer": 1},
    {"question": "Return ``True`` if", "choices": [" xyzzy", " the"], "answer": 1},
    {"question": "import", "choices": [" os", " =="], "answer": 0},
]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put long files first: a long file at the end would keep one process busy and leave the others idle."""
    items.sort(key=lambda item: not any(item.get_closest_marker(marker) for marker in ("engine", "long")))


@pytest.fixture(autouse=True)
def _same_numbers_every_run() -> None:
    torch.manual_seed(0)


@pytest.fixture(scope="session")
def mini_model() -> Path:
    """The bundled trained model: Qwen3, hidden 256, 4 layers, bf16."""
    return DATA / "pydoc-mini"


@pytest.fixture(scope="session")
def two_blocks(mini_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The bundled model cut to its first two blocks, for tests that do not depend on how good a model is."""
    model = Path(shutil.copytree(mini_model, tmp_path_factory.mktemp("models") / "two-blocks"))
    config = json.loads((model / "config.json").read_text())
    config |= {"num_hidden_layers": 2, "layer_types": config["layer_types"][:2]}
    (model / "config.json").write_text(json.dumps(config))
    tensors = load_file(model / "model.safetensors")
    kept = {name: tensor for name, tensor in tensors.items() if not re.search(r"\.layers\.[23]\.", name)}
    save_file(kept, model / "model.safetensors", metadata={"format": "pt"})
    return model


@pytest.fixture(scope="session")
def calibration_text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The first fifth of the bundled text: enough to draw from; every quantization tokenizes the whole file."""
    text = tmp_path_factory.mktemp("text") / "calibration.txt"
    text.write_text((DATA / "calibration.txt").read_text()[:60_000])
    return text


@pytest.fixture(scope="session")
def whole_calibration_text() -> Path:
    """The whole bundled text, for predictions of the loss on other text: a fifth of it is too little for them."""
    return DATA / "calibration.txt"


@pytest.fixture(scope="session")
def evaluation_text() -> Path:
    return DATA / "evaluation.txt"


@pytest.fixture(scope="session")
def ssqr_checkpoint(mini_model: Path, calibration_text: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The bundled model quantized with SSQR, 4 bits, 1% outliers."""
    from vllm_latq.quantize.recipe import Recipe

    recipe = Recipe("ssqr", 4, outlier_rate=0.01, num_samples=16, seq_len=128)
    return _quantized(recipe, mini_model, calibration_text, tmp_path_factory)


@pytest.fixture(scope="session")
def hptq_checkpoint(mini_model: Path, calibration_text: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The bundled model quantized with HPTQ at 4.125 bits."""
    from vllm_latq.quantize.recipe import Recipe

    recipe = Recipe("hptq", bits=4.125, num_samples=16, seq_len=128)
    return _quantized(recipe, mini_model, calibration_text, tmp_path_factory)


def _quantized(recipe: object, model: Path, text: Path, factory: pytest.TempPathFactory) -> Path:
    from vllm_latq.quantize.pipeline import quantize_checkpoint

    destination = factory.mktemp("checkpoints") / "checkpoint"
    quantize_checkpoint(recipe, model, destination, calibration=str(text))  # type: ignore[arg-type]
    return destination


@pytest.fixture(scope="session")
def make_checkpoint(mini_model: Path, tmp_path_factory: pytest.TempPathFactory) -> CheckpointMaker:
    return CheckpointMaker(mini_model, tmp_path_factory.mktemp("checkpoints"))


@pytest.fixture(scope="session")
def ssqr_pair(make_checkpoint: CheckpointMaker) -> CheckpointPair:
    """3 bits with outliers, in groups of 64, so that tensor parallelism over 2 ranks cuts no group."""
    return make_checkpoint("ssqr", CheckpointConfig(LayerScheme("packed", 3, 64, True), ("lm_head",)))


@pytest.fixture(scope="session")
def other_ssqr_pair(make_checkpoint: CheckpointMaker) -> CheckpointPair:
    """Other weights in the layout of `ssqr_pair`."""
    return make_checkpoint("other", CheckpointConfig(LayerScheme("packed", 3, 64, True), ("lm_head",)), noise_seed=1)


@pytest.fixture(scope="session")
def hptq_pair(make_checkpoint: CheckpointMaker) -> CheckpointPair:
    return make_checkpoint("hptq", CheckpointConfig(LayerScheme("huffman"), ("lm_head",)))


@pytest.fixture(scope="session")
def mixed_pair(make_checkpoint: CheckpointMaker) -> CheckpointPair:
    """4 bits without outliers, other encodings of two layers, of the head and of the embedding."""
    overrides = {
        "model.layers.1.mlp.down_proj": LayerScheme("huffman"),
        "model.layers.2.self_attn.o_proj": LayerScheme("packed", 2, -1, True, "midrise"),
        "lm_head": LayerScheme("trellis"),
    }
    beside = {"model.embed_tokens": LayerScheme("packed", 8, 64)}
    return make_checkpoint("mixed", CheckpointConfig(LayerScheme("packed", 4, 64, False), (), overrides, beside=beside))


@pytest.fixture
def tasks_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with the lm-eval task `next_word`: four questions, which the bundled model answers right."""
    data = tmp_path / "next_word.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in TASK_ROWS))
    folder = tmp_path / "tasks"
    folder.mkdir()
    (folder / "next_word.yaml").write_text(TASK.format(data=data))
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    return folder


@pytest.fixture(scope="session")
def biased_pair(mini_model: Path, tmp_path_factory: pytest.TempPathFactory) -> CheckpointPair:
    """A random Qwen2 with biases on q, k and v, and one key-value head, which tensor parallelism must replicate.

    Half of it is packed on mid-rise grids, half trellis-coded.
    """
    from transformers import Qwen2Config, Qwen2ForCausalLM

    torch.manual_seed(0)
    sizes = {"hidden_size": 128, "intermediate_size": 256, "num_attention_heads": 4, "num_key_value_heads": 1}
    config = Qwen2Config(
        vocab_size=2048, num_hidden_layers=2, max_position_embeddings=256, initializer_range=0.2, **sizes
    )
    model = Qwen2ForCausalLM(config)
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            torch.nn.init.normal_(parameter)
    source = tmp_path_factory.mktemp("biased") / "source"
    model.save_pretrained(source)
    for file in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(mini_model / file, source)
    maker = CheckpointMaker(source, source.parent)
    coded = [name for name, _ in model.named_modules() if ".layers.1." in name and name.endswith("_proj")]
    overrides = dict.fromkeys(coded, LayerScheme("trellis"))
    return maker(
        "biased", CheckpointConfig(LayerScheme("packed", 3, 32, True, grid="midrise"), ("lm_head",), overrides)
    )


@pytest.fixture(scope="session")
def random_model(mini_model: Path, tmp_path_factory: pytest.TempPathFactory) -> RandomModels:
    return RandomModels(tmp_path_factory.mktemp("random"), mini_model)


@pytest.fixture(scope="session")
def make_dense_twin() -> Any:
    return dense_twin
