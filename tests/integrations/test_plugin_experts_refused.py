"""Routed experts that the plugin refuses: unsupported kinds, tensors of another model, and damaged or missing ones."""

from collections.abc import Callable
from copy import deepcopy
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import GptOssConfig
from vllm.config import LoRAConfig

from helpers.builders import random_weight
from helpers.expert_layers import (
    BIASED,
    EXPERTS,
    HIDDEN,
    HUFFMAN,
    INTERMEDIATE,
    PACKED,
    PREFIX,
    build,
    checkpoint,
    load,
    quantization,
)
from vllm_latq.errors import CheckpointError, ConfigError, UnsupportedModelError, UnsupportedShapeError
from vllm_latq.format.scheme import LayerScheme
from vllm_latq.integrations.vllm import moe as vllm_moe


def test_biases_that_are_wrong_are_named(rank_of: Callable[[int], None]) -> None:
    rank_of(0)
    biases = {name: torch.zeros(weight.shape[0]) for name, weight in checkpoint(PACKED).items()}
    for change, message in (
        ({"2.up_proj": None}, r"experts\.2\.up_proj\.bias: expected a bias of 128 numbers, found no such tensor"),
        ({"0.down_proj": torch.zeros(5)}, r"experts\.0\.down_proj\.bias: expected 96 finite numbers, found .*\(5,\)"),
        ({"1.gate_proj": torch.full((INTERMEDIATE,), torch.nan)}, r"experts\.1\.gate_proj\.bias: expected 128 finite"),
    ):
        layer = build(quantization(PACKED), **BIASED)
        load(layer, checkpoint(PACKED))
        given = {name: bias for name, bias in (biases | change).items() if bias is not None}
        assert list(layer.load_weights((f"{name}.bias", bias) for name, bias in given.items()))
        with pytest.raises(CheckpointError, match=message):
            layer.quant_method.process_weights_after_loading(layer)
    with pytest.raises(UnsupportedModelError, match=r"expected experts without biases to quantize again"):
        layer.quant_method.dequantize_weight(layer)


@pytest.mark.parametrize(
    ("skip", "message"),
    [
        ("1.up_proj.outlier_col_idx", r"experts\.1\.up_proj\.outlier_col_idx: .*found no such tensor"),
        ("1.down_proj.weight_shape", r"experts\.1\.down_proj\.weight_shape: .*found no such tensor"),
        ("2.gate_proj", r"experts\.2\.gate_proj: expected tensors weight_shape, qweight, .*found none of them"),
    ],
)
def test_error_names_the_missing_tensor(skip: str, message: str, rank_of: Callable[[int], None]) -> None:
    rank_of(0)
    layer = build(quantization(PACKED))
    load(layer, checkpoint(PACKED), skip)
    with pytest.raises(CheckpointError, match=message):
        layer.quant_method.process_weights_after_loading(layer)


def test_damaged_tensor_of_an_expert_is_refused(rank_of: Callable[[int], None]) -> None:
    rank_of(0)
    layer, weights = build(quantization(PACKED)), deepcopy(checkpoint(PACKED))
    weights["2.down_proj"].outliers.col_idx[0] = INTERMEDIATE
    load(layer, weights)
    with pytest.raises(CheckpointError, match=r"experts\.2\.down_proj\.outlier_col_idx: expected columns in"):
        layer.quant_method.process_weights_after_loading(layer)


@pytest.mark.parametrize(
    ("shape", "expected"), [((INTERMEDIATE, 64), "96 input channels"), ((64, HIDDEN), "128 output channels")]
)
def test_experts_of_another_model_are_refused(
    shape: tuple[int, int], expected: str, rank_of: Callable[[int], None]
) -> None:
    rank_of(0)
    layer, weights = build(quantization(PACKED)), checkpoint(PACKED)
    weights["0.up_proj"] = random_weight(PACKED, *shape, 0)
    load(layer, weights)
    with pytest.raises(CheckpointError, match=rf"experts\.0\.up_proj\.weight_shape: expected {expected}"):
        layer.quant_method.process_weights_after_loading(layer)


def test_cutting_a_group_of_an_expert_is_refused(rank_of: Callable[[int], None]) -> None:
    """Only down_proj can be cut so: groups of gate and up lie along the hidden channels, which no rank cuts."""
    rank_of(1)
    scheme = LayerScheme("packed", 4, 128, True)
    with pytest.raises(UnsupportedShapeError, match=r"experts\.\*\.down_proj: expected input channels per rank in"):
        build(quantization(scheme), 4, hidden_size=128)


@pytest.mark.parametrize(
    ("options", "found"),
    [
        ({"activation": "situ"}, "the activation situ"),
        ({"activation": "gelu", "swiglu_limit": 7.0}, "the activation gelu with a limit"),
        ({"activation": "swigluoai_uninterleave"}, "the activation swigluoai_uninterleave"),
        ({"apply_router_weight_on_input": True}, "several experts per token whose inputs the router scales"),
    ],
)
def test_unsupported_kinds_of_experts_are_refused(
    options: dict[str, Any], found: str, rank_of: Callable[[int], None]
) -> None:
    rank_of(0)
    with pytest.raises(
        UnsupportedModelError, match=f"experts: expected experts that consist of linears.*found {found}"
    ):
        build(quantization(PACKED), **options)


@pytest.mark.parametrize(("key", "value"), [("swiglu_limit", 5.0), ("swiglu_alpha", 1.5)])
def test_constants_that_vllm_does_not_take_are_refused(key: str, value: float, rank_of: Callable[[int], None]) -> None:
    """vLLM's gpt-oss does not read them from config.json."""
    rank_of(0)
    as_published, other = (
        SimpleNamespace(hf_text_config=GptOssConfig(**keys), dtype=torch.float32, is_moe=True)
        for keys in ({}, {key: value})
    )
    build(quantization(PACKED), model=as_published, **BIASED)
    with pytest.raises(UnsupportedModelError, match=f"experts: expected {key} .* in config.json.*found {value}"):
        build(quantization(PACKED), model=other, **BIASED)


def test_a_rank_without_experts_is_refused(rank_of: Callable[[int], None]) -> None:
    rank_of(EXPERTS)
    expected = f"experts: expected at least one expert on every rank, found {EXPERTS} experts, none on this"
    with pytest.raises(UnsupportedModelError, match=expected):
        build(quantization(PACKED), EXPERTS + 1, expert_parallel=True)


@pytest.mark.parametrize("targets", [None, ["o_proj", "experts"]])
def test_adapters_of_experts_are_refused(targets: list[str] | None, rank_of: Callable[[int], None]) -> None:
    rank_of(0)
    with pytest.raises(UnsupportedModelError, match=r"experts: expected no LoRA adapters of quantized experts, found"):
        build(quantization(PACKED), lora=LoRAConfig(target_modules=targets))


def test_adapters_of_other_layers_are_no_obstacle(rank_of: Callable[[int], None]) -> None:
    rank_of(0)
    layer = build(quantization(PACKED), lora=LoRAConfig(target_modules=["o_proj"]))
    assert isinstance(layer.quant_method, vllm_moe.LatqMoEMethod)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (
            {"ignore": ("2.up_proj",)},
            r"experts: expected one scheme for all of its shards, found .*2\.up_proj: ignored",
        ),
        ({"overrides": {f"{PREFIX}.1.down_proj": HUFFMAN}}, r"experts: expected one scheme for all of its shards"),
        ({"ignore": ("down_proj",)}, "experts: expected all matrices of its experts quantized, or none, found only"),
    ],
)
def test_experts_with_different_schemes_are_refused(
    fields: dict[str, Any], message: str, rank_of: Callable[[int], None]
) -> None:
    rank_of(0)
    with pytest.raises(ConfigError, match=message):
        build(quantization(PACKED, **fields))
