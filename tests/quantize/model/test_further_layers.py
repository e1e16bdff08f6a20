"""Layers that predict further tokens (MTP): their linears are rounded to nearest at a width of their own."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from helpers import format_reader
from helpers.checkpoints import dense_twin, problems
from helpers.random_models import add_further_layer
from vllm_latq.cli.inspect import inspect_checkpoint
from vllm_latq.errors import ConfigError
from vllm_latq.format.reader import CheckpointReader
from vllm_latq.quantize.certificate.certificate import verify_certificate
from vllm_latq.quantize.pipeline import quantize_checkpoint
from vllm_latq.quantize.recipe import Recipe

ATTENTION = [f"self_attn.{leaf}_proj" for leaf in "qkvo"]
FEEDING = [
    f"mlp.{part}.{leaf}_proj" for part in ("shared_experts", "experts.0", "experts.3") for leaf in ("gate", "down")
]
FEW: dict[str, Any] = {"group_size": 16, "num_samples": 2, "seq_len": 16}


@pytest.fixture(scope="module")
def model(random_model: Any) -> Path:
    sizes = {"n_routed_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2, "n_shared_experts": 1}
    source, _ = random_model("glm4_moe", "further", first_k_dense_replace=1, num_nextn_predict_layers=1, **sizes)
    add_further_layer(source)
    return source


@pytest.fixture(scope="module")
def checkpoint(model: Path, calibration_text: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    target = tmp_path_factory.mktemp("further") / "out"
    quantize_checkpoint(Recipe("gptq", 4, mtp_bits=3, **FEW), model, target, calibration=str(calibration_text))
    return target


def test_linears_of_the_block_inside_are_rounded(checkpoint: Path, model: Path) -> None:
    """Routers, norms, the matrix that joins two inputs, embedding and head of the layer stay as they are."""
    assert problems(checkpoint) == ""
    reader, original = CheckpointReader(checkpoint), load_file(model / "model.safetensors")
    beside, further = reader.config.beside, "model.layers.2."
    assert {f"{further}{name}" for name in ATTENTION + FEEDING} <= beside.keys()
    assert len(beside) == 4 + 3 * 5
    assert {(scheme.encoding, scheme.bits, scheme.group_size) for scheme in beside.values()} == {("packed", 3, 16)}
    read = format_reader.matrices(checkpoint)
    for name in beside:
        found, expected = reader.weight(name).dequantize(), original[f"{name}.weight"]
        assert np.array_equal(read[name], found.numpy())
        assert (found - expected).norm() < 0.3 * expected.norm()
    kept = {name for name in original if name.startswith(further)} - {f"{name}.weight" for name in beside}
    assert f"{further}eh_proj.weight" in kept
    assert f"{further}mlp.gate.weight" in kept
    assert all(torch.equal(reader.store.get(name), original[name]) for name in kept)
    assert len(inspect_checkpoint(checkpoint)["beside"]) == len(beside)
    assert {record["name"] for record in reader.report()["beside"]} == beside.keys()


def test_certificate_covers_the_layer(checkpoint: Path, model: Path, calibration_text: Path) -> None:
    assert list(verify_certificate(checkpoint, model, str(calibration_text))) == []


def test_transformers_loads_the_other_layers(checkpoint: Path, tmp_path: Path) -> None:
    ids = torch.arange(4, 24).reshape(2, 10)
    latq, dense = (
        AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
        for path in (checkpoint, dense_twin(checkpoint, tmp_path / "dense"))
    )
    with torch.no_grad():
        torch.testing.assert_close(latq(ids).logits, dense(ids).logits)


def test_models_without_such_layers_are_refused(two_blocks: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="layers that predict further tokens"):
        quantize_checkpoint(Recipe("rtn", 4, mtp_bits=4), two_blocks, tmp_path / "out")
