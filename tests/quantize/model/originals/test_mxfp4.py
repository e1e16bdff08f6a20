"""gpt-oss as it is published, with experts in MXFP4."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from helpers.originals import TOKENS, change, check_quantized_alike, publish, random_float4
from vllm_latq.errors import LatqError, NumericalError, UnsupportedModelError
from vllm_latq.format.files import TensorStore
from vllm_latq.quantize.model.loading import load_model
from vllm_latq.quantize.model.meta_model import load_config, model_config
from vllm_latq.quantize.model.originals.store import OriginalStore
from vllm_latq.quantize.recipe import Recipe

UP, DOWN = (f"model.layers.1.mlp.experts.{leaf}" for leaf in ("gate_up_proj", "down_proj"))


def _pack(name: str, tensor: torch.Tensor) -> tuple[dict[str, torch.Tensor], torch.Tensor] | None:
    if not name.endswith(("experts.gate_up_proj", "experts.down_proj")):
        return None
    pairs = [random_float4(tensor.shape[2], tensor.shape[1]) for _ in tensor]
    blocks, scales = (torch.stack(parts) for parts in zip(*pairs, strict=True))
    blocks, scales = blocks.reshape(*scales.shape, 16), (scales.log2() + 127).to(torch.uint8)
    return {f"{name}_blocks": blocks, f"{name}_scales": scales}, convert_moe_packed_tensors(blocks, scales)


@pytest.fixture
def published(random_model: Any, tmp_path: Path) -> tuple[Path, Path]:
    """A model with experts in MXFP4, and its twin."""
    sizes = {"num_local_experts": 3, "num_experts_per_tok": 2, "hidden_size": 64, "intermediate_size": 96}
    plain, _ = random_model("gpt_oss", "plain-gpt-oss", **sizes)
    quantization = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn", "lm_head"]}
    return tmp_path / "mxfp4", publish(plain, tmp_path / "mxfp4", _pack, quantization)


def test_as_transformers_dequantizes_them(published: tuple[Path, Path]) -> None:
    source, twin = published
    store, expected = OriginalStore(source), OriginalStore(twin)
    assert store.dequantizes
    assert sorted(store.names()) == sorted(expected.names())
    for name in expected.names():
        assert name in store
        assert store.shape(name) == expected.shape(name)
        assert torch.equal(store.get(name), expected.get(name)), name
    for index in ((2, slice(5, 9)), (0, slice(None), slice(3, 50)), (slice(1, 3),)):
        assert torch.equal(store.part(UP, index), expected.part(UP, index))
    assert f"{UP}_blocks" not in store
    assert f"{UP}_scales" not in store
    assert "quantization_config" not in model_config(source, untied=False)
    assert getattr(load_config(source), "quantization_config", None) is None


def test_evaluated_as_its_twin(published: tuple[Path, Path]) -> None:
    (model, _), (reference, _) = (load_model(folder, "cpu") for folder in published)
    with torch.no_grad():
        torch.testing.assert_close(model(TOKENS).logits, reference(TOKENS).logits, rtol=0, atol=0)
    # transformers computes with experts in bfloat16, whatever the dtype.
    theirs = AutoModelForCausalLM.from_pretrained(published[0]).state_dict()
    for name, tensor in model.state_dict().items():
        assert torch.equal(theirs[name].float(), tensor), name


def test_quantized_as_what_they_stand_for(published: tuple[Path, Path], calibration_text: Path) -> None:
    recipe = Recipe("gptq", 4, group_size=8, num_samples=4, seq_len=32)
    check_quantized_alike(*published, recipe, calibration_text)
    model, _ = load_model(published[0] / "out", "cpu")
    with torch.no_grad():
        assert model(TOKENS).logits.isfinite().all()


def test_one_matrix_is_read_at_a_time(published: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    store, part, read = OriginalStore(published[0]), TensorStore.part, list[Any]()
    monkeypatch.setattr(TensorStore, "part", lambda *given: (read.append(given[1:]), part(*given))[1])
    store.part(DOWN, (1, slice(None), slice(0, 8)))
    assert read == [(f"{DOWN}_blocks", (1,)), (f"{DOWN}_scales", (1,))]


@pytest.mark.parametrize(
    ("edit", "error", "message"),
    [
        (
            lambda tensors: tensors.pop(f"{UP}_scales"),
            UnsupportedModelError,
            f"{UP}_blocks: expected a tensor {UP}_scales beside it, found none",
        ),
        (
            lambda tensors: tensors.update({f"{UP}_scales": tensors[f"{UP}_scales"][:, :7].clone()}),
            UnsupportedModelError,
            r"gate_up_proj_scales: expected bytes, shape \(3, 192, 2\), found shape \(3, 7, 2\) in torch\.uint8",
        ),
        (
            lambda tensors: tensors.update({f"{UP}_scales": tensors[f"{UP}_scales"].float()}),
            UnsupportedModelError,
            r"gate_up_proj_scales: expected bytes, .* in torch\.float32",
        ),
        (
            lambda tensors: tensors.update({f"{UP}_blocks": tensors[f"{UP}_blocks"].flatten(2)}),
            UnsupportedModelError,
            r"gate_up_proj_blocks: expected bytes, shape \(experts, rows, blocks, 16\), found shape \(3, 192, 32\)",
        ),
        (
            lambda tensors: tensors[f"{DOWN}_scales"][1, 2].fill_(255),
            NumericalError,
            "down_proj_scales: expected finite scales, found 3 NaN",
        ),
        (
            lambda tensors: tensors.update({UP: torch.zeros(3, 64, 192)}),
            UnsupportedModelError,
            f"{UP}: expected each tensor stored once, found also {UP}_blocks",
        ),
    ],
)
def test_refused(
    edit: Callable[[Any], Any], error: type[LatqError], message: str, published: tuple[Path, Path]
) -> None:
    change(published[0], lambda tensors, _: edit(tensors))
    with pytest.raises(error, match=message):
        load_model(published[0], "cpu")
