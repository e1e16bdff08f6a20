"""Walking a model block by block gives what transformers gives, and each family is walked correctly."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from helpers.walk import walk
from vllm_latq.errors import CheckpointError, NumericalError, UnsupportedModelError
from vllm_latq.quantize.calibration.hessian import HessianCollector
from vllm_latq.quantize.model.decoder import Decoder


def test_tied_head_reads_the_embedding(mini_model: Path) -> None:
    tokens = torch.arange(40).reshape(2, 20)
    model = AutoModelForCausalLM.from_pretrained(mini_model, dtype=torch.float32)
    decoder = Decoder(mini_model, "cpu")
    assert decoder.tied
    with torch.no_grad():
        torch.testing.assert_close(walk(decoder, tokens, 2), model(tokens).logits, rtol=0, atol=1e-4)


def test_nothing_is_in_memory_outside_a_block(mini_model: Path) -> None:
    decoder = Decoder(mini_model, "cpu")
    decoder.embed(torch.arange(20).reshape(1, 20), 1)
    with decoder.block(1) as block:
        assert all(parameter.device.type == "cpu" for parameter in block.parameters())
    assert all(parameter.device.type == "meta" for parameter in decoder.model.parameters())


def test_hessians_are_shared_and_right(random_model: Any) -> None:
    directory, model = random_model("qwen3")
    decoder = Decoder(directory, "cpu")
    tokens = torch.randint(0, 64, (4, 20), generator=torch.Generator().manual_seed(1))
    seen: list[torch.Tensor] = []
    model.model.layers[0].mlp.down_proj.register_forward_pre_hook(lambda _, arguments: seen.append(arguments[0]))
    with torch.no_grad():
        model(tokens)
    collector = HessianCollector()
    batches = decoder.embed(tokens, 2)
    with decoder.block(0) as block, collector.watching(decoder.linears(0)):
        for batch in batches:
            decoder.run(0, block, batch)
    groups = [tuple(name.rpartition(".")[2] for name in hessian.shared.names) for hessian in collector.hessians]
    assert groups == [("q_proj", "k_proj", "v_proj"), ("o_proj",), ("gate_proj", "up_proj"), ("down_proj",)]
    assert {hessian.tokens for hessian in collector.hessians} == {80}
    inputs = seen[0].reshape(-1, 48).double()
    torch.testing.assert_close(collector.hessians[3].matrix.double(), inputs.T @ inputs, rtol=1e-4, atol=1e-6)


@pytest.fixture
def copy(mini_model: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(mini_model, tmp_path / "copy"))


def test_already_quantized(copy: Path) -> None:
    config = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps({**config, "quantization_config": {"quant_method": "gptq"}}))
    with pytest.raises(UnsupportedModelError, match="expected a model that is not quantized"):
        Decoder(copy, "cpu")


UP = "model.layers.1.mlp.up_proj.weight"
HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"
INCOMPLETE = [
    (lambda tensors: tensors.pop(UP), CheckpointError, f"expected a tensor {UP}"),
    (
        lambda tensors: tensors.update({UP: torch.zeros(3, 3)}),
        UnsupportedModelError,
        "expected shape (768, 256), found",
    ),
]


def rewrite(model: Path, damage: Any) -> None:
    tensors = load_file(model / "model.safetensors")
    damage(tensors)
    save_file(tensors, model / "model.safetensors")


@pytest.mark.parametrize(("damage", "error", "message"), INCOMPLETE)
def test_incomplete_weights_are_refused_before_any_is_read(
    copy: Path, damage: Any, error: type[Exception], message: str
) -> None:
    rewrite(copy, damage)
    with pytest.raises(error) as caught:
        Decoder(copy, "cpu")
    assert message in str(caught.value)
    assert UP in str(caught.value)


def test_a_tied_head_that_is_stored_too(copy: Path) -> None:
    """Equal to the embedding, it is left out; with other values readers would disagree; alone it is not enough."""
    rewrite(copy, lambda tensors: tensors.update({HEAD: tensors[EMBEDDING].clone()}))
    assert Decoder(copy, "cpu").tied
    rewrite(copy, lambda tensors: tensors[HEAD][0].add_(1))
    with pytest.raises(UnsupportedModelError, match=rf"{HEAD}: expected what {EMBEDDING} holds, found other values"):
        Decoder(copy, "cpu")
    rewrite(copy, lambda tensors: tensors.pop(EMBEDDING))
    with pytest.raises(CheckpointError, match=f"expected a tensor {EMBEDDING}"):
        Decoder(copy, "cpu")


def test_weights_that_are_not_finite(copy: Path) -> None:
    rewrite(copy, lambda tensors: tensors[UP].view(-1)[:3].fill_(float("nan")))
    decoder = Decoder(copy, "cpu")
    with pytest.raises(NumericalError, match="expected finite weights, found 3 NaN") as caught, decoder.block(1):
        pass
    assert UP in str(caught.value)
