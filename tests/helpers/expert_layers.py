"""Routed experts of vLLM on one of several ranks, without an engine, and tensors to load into them."""

from functools import cache
from typing import Any

import torch
from vllm.config import LoRAConfig, VllmConfig, set_current_vllm_config
from vllm.model_executor.layers import fused_moe

from helpers.builders import random_weight
from vllm_latq.format.config import CheckpointConfig
from vllm_latq.format.encodings.weight import Weight
from vllm_latq.format.scheme import LayerScheme
from vllm_latq.integrations.vllm.config import LatqConfig

EXPERTS, HIDDEN, INTERMEDIATE, TOP_K = 3, 96, 128, 2
PREFIX = "model.layers.0.mlp.experts"
LEAVES = {"gate_proj": (INTERMEDIATE, HIDDEN), "up_proj": (INTERMEDIATE, HIDDEN), "down_proj": (HIDDEN, INTERMEDIATE)}
PACKED = LayerScheme("packed", 4, 32, True)
HUFFMAN = LayerScheme("huffman")
BIASED: dict[str, Any] = {"activation": "swigluoai", "has_bias": True}
MAKERS = ("FusedMoEFactory", "FusedMoE")  # vLLM renamed it
make_experts: Any = next(getattr(fused_moe, name) for name in MAKERS if hasattr(fused_moe, name))


def build(
    quant: LatqConfig | None,
    size: int = 1,
    expert_parallel: bool = False,
    lora: LoRAConfig | None = None,
    model: Any = None,
    **options: Any,
) -> Any:
    """Return the routed experts of a mixture on one of `size` ranks; `model` stands for vLLM's `model_config`."""
    config = VllmConfig()
    config.model_config = model
    config.lora_config = lora
    config.parallel_config.enable_expert_parallel = expert_parallel
    sizes = {"num_experts": EXPERTS, "top_k": TOP_K, "hidden_size": HIDDEN, "intermediate_size": INTERMEDIATE}
    parallel = {"tp_size": size, "dp_size": 1, "pcp_size": 1}
    with set_current_vllm_config(config):
        runner = make_experts(
            quant_config=quant, prefix=PREFIX, params_dtype=torch.float32, **sizes | parallel | options
        )
    return runner.routed_experts


def quantization(scheme: LayerScheme, **fields: Any) -> LatqConfig:
    return LatqConfig(CheckpointConfig(scheme, **fields))


def checkpoint(scheme: LayerScheme) -> dict[str, Weight]:
    """Return every matrix of every expert by its name inside the layer."""
    return dict(_checkpoint(scheme))


@cache
def _checkpoint(scheme: LayerScheme) -> dict[str, Weight]:
    return {
        f"{expert}.{leaf}": random_weight(scheme, *shape, seed=10 * expert + index)
        for expert in range(EXPERTS)
        for index, (leaf, shape) in enumerate(LEAVES.items())
    }


def load(layer: Any, weights: dict[str, Weight], skip: str = " ") -> None:
    """Give a layer its tensors as the engine does, from the last one to the first."""
    stored = [(f"{name}.{key}", t) for name, weight in weights.items() for key, t in weight.to_tensors().items()]
    assert list(layer.load_weights((name, t) for name, t in reversed(stored) if not name.startswith(skip)))
