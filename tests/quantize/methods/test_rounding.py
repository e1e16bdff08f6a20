"""Embeddings that are rounded to nearest: stored as FORMAT.md says, read by rows, counted, and checked."""

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from helpers import format_reader
from helpers.checkpoints import dense_twin, edit_json, edit_tensor, problems
from vllm_latq.cli.inspect import inspect_checkpoint
from vllm_latq.cli.report_page import ReportPage
from vllm_latq.console import size
from vllm_latq.errors import CheckpointError, ConfigError, NumericalError
from vllm_latq.format.reader import CheckpointReader
from vllm_latq.format.scheme import LayerScheme
from vllm_latq.quantize.certificate.certificate import verify_certificate
from vllm_latq.quantize.methods import rounding
from vllm_latq.quantize.methods.rounding import round_matrix
from vllm_latq.quantize.pipeline import quantize_checkpoint
from vllm_latq.quantize.plan import plan
from vllm_latq.quantize.recipe import Recipe

EMBEDDING = "model.embed_tokens"
# A head of its own, and few windows to measure errors on.
OPTIONS: dict[str, Any] = {"ignore": (), "num_samples": 2, "seq_len": 32}


@pytest.fixture(scope="module")
def checkpoint(two_blocks: Path, calibration_text: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    target = tmp_path_factory.mktemp("embedding") / "out"
    recipe = Recipe("rtn", 4, embedding_bits=8, group_size=64, kv_cache_scheme="fp8", **OPTIONS)
    quantize_checkpoint(recipe, two_blocks, target, calibration=str(calibration_text))
    return target


def test_embedding_is_stored_as_specified(checkpoint: Path, two_blocks: Path) -> None:
    assert problems(checkpoint) == ""
    reader = CheckpointReader(checkpoint)
    assert format_reader.fingerprint(checkpoint) == reader.config.fingerprint
    expected = format_reader.matrices(checkpoint)[EMBEDDING]
    found = reader.weight(EMBEDDING).dequantize()
    assert np.array_equal(expected, found.numpy())
    original = load_file(two_blocks / "model.safetensors")[f"{EMBEDDING}.weight"].float()
    error = float((found - original).square().sum() / original.square().sum())
    (record,) = reader.report()["beside"]
    assert record["weight_error"] == pytest.approx(error, rel=1e-5)
    assert error < 1e-4
    assert EMBEDDING not in reader.linears


def test_embedding_is_counted_apart_from_the_linears(checkpoint: Path, two_blocks: Path) -> None:
    found = inspect_checkpoint(checkpoint)
    vocabulary, hidden = found["beside"][0]["shape"]
    stored = vocabulary * hidden + 2 * vocabulary * hidden // 64 + 8
    assert found["beside"] == [{"name": EMBEDDING, "shape": [2048, 256]}]
    assert found["beside_bytes"] == stored
    assert EMBEDDING not in {layer["name"] for layer in found["layers"]}
    assert ReportPage(checkpoint).beside == f"{EMBEDDING}, {vocabulary * hidden:,} weights, {size(stored)}"
    planned = plan(Recipe("rtn", 4, embedding_bits=8, group_size=64, **OPTIONS), two_blocks)
    assert planned["rounded"] == {EMBEDDING: stored}
    scales_of_the_cache = 2 * 2 * 4
    assert planned["needs"]["disk"]["checkpoint"] + scales_of_the_cache == sum(
        tensor.nbytes for path in checkpoint.glob("*.safetensors") for tensor in load_file(path).values()
    )


def test_certificate_covers_the_embedding(checkpoint: Path, two_blocks: Path, calibration_text: Path) -> None:
    assert list(verify_certificate(checkpoint, two_blocks, str(calibration_text))) == []
    other = Path(shutil.copytree(checkpoint, checkpoint.with_name("other")))
    scales = CheckpointReader(checkpoint).store.get(f"{EMBEDDING}.scales")
    edit_tensor(other, f"{EMBEDDING}.scales", 1.1 * scales)
    (found,) = verify_certificate(other, two_blocks, str(calibration_text))
    assert f"{EMBEDDING}: expected the model's own matrix, rounded to nearest, found another one" in str(found)


def test_damaged_embeddings_are_refused(checkpoint: Path, tmp_path: Path) -> None:
    unnamed = Path(shutil.copytree(checkpoint, tmp_path / "unnamed"))
    edit_json(unnamed / "config.json", lambda config: config["quantization_config"].pop("beside"))
    with pytest.raises(CheckpointError, match=f"{EMBEDDING}"):
        AutoModelForCausalLM.from_pretrained(unnamed)
    damaged = Path(shutil.copytree(checkpoint, tmp_path / "damaged"))
    edit_tensor(damaged, f"{EMBEDDING}.scales", torch.zeros(2048, 4, dtype=torch.bfloat16))
    with pytest.raises(CheckpointError, match=f"{EMBEDDING}.scales: expected scales that are not zero"):
        AutoModelForCausalLM.from_pretrained(damaged)
    assert f"{EMBEDDING}.scales: expected scales that are not zero" in problems(damaged)


def test_scaled_embeddings_are_looked_up_as_the_family_does(random_model: Any, tmp_path: Path) -> None:
    """Gemma multiplies embeddings by a number. Group sizes that do not divide a row become smaller ones."""
    model, _ = random_model("gemma3_text", tie_word_embeddings=False)
    quantize_checkpoint(Recipe("rtn", 8, group_size=16, embedding_bits=4, ignore=()), model, tmp_path / "out")
    dense = AutoModelForCausalLM.from_pretrained(dense_twin(tmp_path / "out", tmp_path / "dense"), dtype=torch.float32)
    latq = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32)
    ids = torch.arange(2, 22).reshape(2, 10)
    with torch.no_grad():
        assert torch.equal(latq(ids).logits, dense(ids).logits)
        assert torch.equal(latq.dequantize()(ids).logits, dense(ids).logits)


def test_an_embedding_that_is_the_head_is_refused(two_blocks: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="expected an embedding that is not also the head") as refused:
        quantize_checkpoint(Recipe("rtn", 4, embedding_bits=8), two_blocks, tmp_path / "out")
    assert "--lm-head" in str(refused.value)


def test_bands_do_not_change_the_result(monkeypatch: pytest.MonkeyPatch) -> None:
    weight, scheme, cpu = torch.randn(33, 64), LayerScheme("packed", 4, 32), torch.device("cpu")
    whole, record = round_matrix(weight, scheme, "table", cpu)
    monkeypatch.setattr(rounding, "BAND_WEIGHTS", 640)
    banded, again = round_matrix(weight, scheme, "table", cpu)
    assert all(torch.equal(whole[name], banded[name]) for name in whole)
    assert record == pytest.approx(again)
    with pytest.raises(NumericalError, match="table"):
        round_matrix(weight.fill_(torch.nan), scheme, "table", cpu)
