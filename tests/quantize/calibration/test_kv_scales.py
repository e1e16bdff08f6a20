"""Scales of a KV cache: equal to what transformers' own cache holds, and refused where there are none to measure."""

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache

from helpers.checkpoints import edit_json, edit_tensor, problems
from helpers.encoders import random_encoder
from vllm_latq.errors import ConfigError, NumericalError, UnsupportedModelError
from vllm_latq.format.reader import CheckpointReader
from vllm_latq.quantize.calibration.kv_scales import LARGEST, KeyValueRanges
from vllm_latq.quantize.calibration.windows import load_samples
from vllm_latq.quantize.machine.distributed import ALONE
from vllm_latq.quantize.model.decoder import Decoder
from vllm_latq.quantize.pipeline import quantize_checkpoint
from vllm_latq.quantize.recipe import Recipe
from vllm_latq.quantize.runs.writer import CheckpointWriter

FEW: dict[str, Any] = {"num_samples": 4, "seq_len": 64}
CACHED: dict[str, Any] = {"kv_cache_scheme": "fp8", **FEW}
# For speed one linear of each block.
LEFT = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "lm_head")


def scales(checkpoint: Path) -> dict[str, torch.Tensor]:
    store = CheckpointReader(checkpoint).store
    return {name: store.get(name) for name in store.names() if name.endswith(("k_scale", "v_scale"))}


@pytest.fixture(scope="module")
def checkpoint(two_blocks: Path, calibration_text: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    target = tmp_path_factory.mktemp("kv") / "rtn"
    quantize_checkpoint(Recipe("rtn", 3, **CACHED), two_blocks, target, calibration=str(calibration_text))
    return target


def test_scales_are_those_of_the_quantized_models_cache(checkpoint: Path, calibration_text: Path) -> None:
    assert problems(checkpoint) == ""
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    samples = load_samples(AutoTokenizer.from_pretrained(checkpoint), str(calibration_text), 4, 64).tokens
    cache = DynamicCache()
    with torch.no_grad():
        model(samples, past_key_values=cache, use_cache=True)
    found = scales(checkpoint)
    assert len(found) == 2 * len(cache.layers) == 4
    for index, layer in enumerate(cache.layers):
        for leaf, cached in (("k", layer.keys), ("v", layer.values)):
            expected = cached.abs().max() / LARGEST
            assert torch.allclose(found[f"model.layers.{index}.self_attn.{leaf}_scale"], expected, rtol=1e-4)


def test_latq_stores_scales_and_the_same_weights(
    random_model: Any, calibration_text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An interrupted run measures the same keys and values as one in one piece."""
    model, _ = random_model("qwen3", "cached")
    left: dict[str, Any] = {"ignore": LEFT, "num_samples": 4, "seq_len": 32}
    recipes = {"a": Recipe("latq", 4, **left), "b": Recipe("latq", 4, kv_cache_scheme="fp8", **left)}
    for name, recipe in recipes.items():
        quantize_checkpoint(recipe, model, tmp_path / name, calibration=str(calibration_text))
    stores = {name: CheckpointReader(tmp_path / name).store for name in recipes}
    plain = set(stores["a"].names())
    assert set(stores["b"].names()) - plain == scales(tmp_path / "b").keys()
    assert all(torch.equal(stores["a"].get(name), stores["b"].get(name)) for name in plain)

    def stop(self: CheckpointWriter, shard: int, *_: Any) -> None:
        if shard == 1:
            raise KeyboardInterrupt
        add(self, shard, *_)

    add = CheckpointWriter.add
    monkeypatch.setattr(CheckpointWriter, "add", stop)
    with pytest.raises(KeyboardInterrupt):
        quantize_checkpoint(recipes["b"], model, tmp_path / "c", calibration=str(calibration_text))
    monkeypatch.setattr(CheckpointWriter, "add", add)
    quantize_checkpoint(recipes["b"], model, tmp_path / "c", calibration=str(calibration_text), resume=True)
    assert scales(tmp_path / "c") == scales(tmp_path / "b")


def test_attention_functions_are_left_as_they_were(two_blocks: Path) -> None:
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    before = dict(ALL_ATTENTION_FUNCTIONS)
    with KeyValueRanges(Decoder(two_blocks, "cpu"), [False, False]).watching(0):
        assert dict(ALL_ATTENTION_FUNCTIONS) != before
    assert dict(ALL_ATTENTION_FUNCTIONS) == before


def test_keys_of_zero_are_an_error(two_blocks: Path) -> None:
    ranges = KeyValueRanges(Decoder(two_blocks, "cpu"), [True, True])
    ranges.largest["model.layers.0.self_attn"] = torch.tensor([0.0, 1.0])
    with pytest.raises(NumericalError, match="finite, and not all zero"):
        ranges.tensors(ALONE)


@pytest.mark.parametrize(("family", "found"), [("deepseek_v3", "latent attention"), ("falcon", "another attention")])
def test_models_without_keys_to_measure_are_refused(
    family: str, found: str, random_model: Any, calibration_text: Path, tmp_path: Path
) -> None:
    model, _ = random_model(family)
    with pytest.raises(UnsupportedModelError, match=found):
        quantize_checkpoint(
            Recipe("rtn", 4, group_size=-1, kv_cache_scheme="fp8", num_samples=2, seq_len=16),
            model,
            tmp_path / "out",
            calibration=str(calibration_text),
        )


def test_encoders_are_refused(calibration_text: Path, tmp_path: Path) -> None:
    random_encoder(tmp_path / "bert", "bert", calibration_text)
    with pytest.raises(UnsupportedModelError, match="found an encoder"):
        quantize_checkpoint(Recipe("rtn", 4, group_size=-1, **CACHED), tmp_path / "bert", tmp_path / "out")


def test_damaged_scales_are_refused(checkpoint: Path, tmp_path: Path) -> None:
    damages = {
        "zero": torch.zeros(1),
        "two": torch.ones(2),
        "half": torch.ones(1, dtype=torch.float16),
        "infinite": torch.full((1,), torch.inf),
    }
    for name, tensor in damages.items():
        damaged = Path(shutil.copytree(checkpoint, tmp_path / name))
        edit_tensor(damaged, "model.layers.1.self_attn.v_scale", tensor)
        assert "model.layers.1.self_attn.v_scale: expected a positive number, float32 [1]" in problems(damaged)
    other = Path(shutil.copytree(checkpoint, tmp_path / "other"))
    edit_json(other / "config.json", lambda config: config["quantization_config"]["kv_cache_scheme"].update(num_bits=4))
    with pytest.raises(ConfigError, match="kv_cache_scheme"):
        CheckpointReader(other)
