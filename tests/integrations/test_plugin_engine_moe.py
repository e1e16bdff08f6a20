"""The real engine on mixtures of experts: its log-probabilities equal those of the dense model in transformers.

Routing amplifies differences: another expert changes everything after it, so agreement shows equal routing, too.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from helpers.checkpoints import without_tensors
from helpers.engine_probe import NO_EXPERTS, OLD_VLLM, PROMPTS, assert_plausible, assert_same, probe
from helpers.logprobs import assert_agrees
from helpers.mixtures import into_fused
from vllm_latq.format.config import CheckpointConfig
from vllm_latq.format.scheme import LayerScheme
from vllm_latq.quantize.pipeline import quantize_checkpoint
from vllm_latq.quantize.recipe import Recipe

pytestmark = [
    pytest.mark.engine,
    pytest.mark.skipif(OLD_VLLM, reason=NO_EXPERTS),
]

# Both sides multiply by the same float32 numbers.
LOGPROB_TOLERANCE = 2e-4
LOST = "model.layers.1.block_sparse_moe.experts.3.w2.scales"
SIZES = {
    **{"hidden_size": 128, "intermediate_size": 64, "moe_intermediate_size": 64, "head_dim": 32},
    **{"num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2},
    **{"sliding_window": None, "use_sliding_window": False},
}
CHANGES = {
    "mixtral": {},
    "qwen3_moe": {"num_hidden_layers": 1},
    # These store the experts of a layer as one tensor.
    "granitemoe": {},
    "gemma4_text": {
        **{"top_k_experts": 2, "enable_moe_block": True, "hidden_size_per_layer_input": 0, "sliding_window": 64},
        # Attention over everything has one matrix for keys and values.
        **{"layer_types": ["sliding_attention", "full_attention"], "attention_k_eq_v": True},
        **{"global_head_dim": 64, "num_global_key_value_heads": 1},
    },
    # Its router weighs inputs, and vLLM rotates queries and keys in another order of channels; in every second block
    # nothing is rotated, and in this one the experts are.
    "llama4_text": {
        **{"num_experts_per_tok": 1, "intermediate_size_mlp": 96, "interleave_moe_layer_step": 2},
        **{"no_rope_layer_interval": 2, "attention_chunk_size": 128},
    },
    # Its gates are clamped and alternate with up, its experts have biases, its attention has sinks.
    "gpt_oss": {
        "sliding_window": 64,
        "rope_parameters": {
            **{"rope_type": "yarn", "factor": 2.0, "rope_theta": 10000.0, "beta_fast": 32.0, "beta_slow": 1.0},
            **{"truncate": False, "original_max_position_embeddings": 32},
        },
    },
}
FUSED = ("granitemoe", "gemma4_text", "llama4_text", "gpt_oss")
ENGINE = {"max_model_len": 64}
SAMPLES = {"num_samples": 4, "seq_len": 32}
RECIPES = {
    "mixtral": Recipe("ssqr", 3, group_size=32, outlier_rate=0.02, **SAMPLES),
    "qwen3_moe": Recipe("latq", bits=3.5, **SAMPLES),
    "granitemoe": Recipe("gptq", 4, group_size=32, ignore=("model.layers.0.block_sparse_moe.experts",), **SAMPLES),
    "gemma4_text": Recipe("hptq", bits=3.5, **SAMPLES),
    "llama4_text": Recipe("latq", bits=4.5, **SAMPLES),
    "gpt_oss": Recipe("gptq", 4, group_size=32, **SAMPLES),
}


@pytest.fixture(scope="module")
def pairs(
    random_model: Any, make_checkpoint: Any, make_dense_twin: Any, calibration_text: Path, tmp_path_factory: Any
) -> dict[str, tuple[Path, Path]]:
    """Return checkpoint and dense twin of each family: two from the quantizer, others rounded in more encodings."""
    folder, found = tmp_path_factory.mktemp("mixtures"), {}
    for family, recipe in RECIPES.items():
        source, model = random_model(family, f"served-{family}", **SIZES | CHANGES[family])
        quantize_checkpoint(recipe, source, folder / family, calibration=str(calibration_text))
        found[family] = folder / family, folder / f"{family}-dense"
        if family in FUSED:
            into_fused(model, folder / family)
            model.save_pretrained(folder / f"{family}-dense")
        else:
            make_dense_twin(*found[family])
    maker = type(make_checkpoint)(source.parent / "served-mixtral", folder)
    config = CheckpointConfig(LayerScheme("packed", 3, 32, True), ("lm_head", "block_sparse_moe.gate"))
    found["other_mixtral"] = maker("other", config, noise_seed=1)
    source, _ = random_model("qwen2_moe", "served-qwen2_moe", shared_expert_intermediate_size=96, **SIZES)
    leaves = ("gate_proj", "up_proj", "down_proj")
    coded = [f"model.layers.{n}.mlp.experts.{e}.{leaf}" for n in range(2) for e in range(4) for leaf in leaves]
    ignored = ("lm_head", "mlp.gate", "shared_expert_gate")
    config = CheckpointConfig(
        LayerScheme("packed", 4, 32, False), ignored, dict.fromkeys(coded, LayerScheme("trellis"))
    )
    found["qwen2_moe"] = type(make_checkpoint)(source, folder)("shared", config)
    return found


@pytest.fixture(scope="module")
def generations(pairs: dict[str, tuple[Path, Path]]) -> dict[str, Any]:
    """Return all generations that one process can make, by name."""
    mixtral, other, qwen3, qwen2 = (pairs[name][0] for name in ("mixtral", "other_mixtral", "qwen3_moe", "qwen2_moe"))
    damaged = without_tensors(other, LOST)
    jobs: dict[str, dict[str, Any]] = {
        "mixtral": {"model": mixtral, "engine": ENGINE, "reload": [other, damaged, mixtral]},
        "qwen3_moe": {"model": qwen3, "engine": ENGINE, "reload": [qwen3]},
        "qwen2_moe": {"model": qwen2, "engine": ENGINE},
        **{family: {"model": pairs[family][0], "engine": ENGINE} for family in FUSED},
        "gpt_oss": {"model": pairs["gpt_oss"][0], "engine": ENGINE, "reload": [pairs["gpt_oss"][0]]},
        "dummy": {"model": qwen2, "engine": ENGINE | {"load_format": "dummy"}},
    }
    return dict(zip(jobs, probe(list(jobs.values())), strict=True))


def assert_right(generations: list[dict[str, Any]], dense: Path) -> None:
    """Assert that answers agree with the dense model in transformers."""
    model = AutoModelForCausalLM.from_pretrained(dense, dtype=torch.float32)
    assert len(generations) == len(PROMPTS)
    for prompt, generation in zip(PROMPTS, generations, strict=True):
        assert_agrees(model, prompt, generation, LOGPROB_TOLERANCE)


@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe", "qwen2_moe", *FUSED])
def test_mixture_equals_the_dequantized_model(
    family: str, generations: dict[str, Any], pairs: dict[str, tuple[Path, Path]]
) -> None:
    assert_right(generations[family][0], pairs[family][1])


def test_reloading_a_mixture_and_back(generations: dict[str, Any], pairs: dict[str, tuple[Path, Path]]) -> None:
    """The other weights give other answers; a damaged checkpoint leaves the weights from before."""
    first, other, error, other_still, back = generations["mixtral"]
    assert_right(other, pairs["other_mixtral"][1])
    assert other != first
    assert f"CheckpointError: {LOST}: expected a tensor" in error
    assert other_still == other
    assert back == first
    for family in ("qwen3_moe", "gpt_oss"):
        first, again = generations[family]
        assert again == first


def test_dummy_mixture_generates_plausible_tokens(generations: dict[str, Any]) -> None:
    assert_plausible(generations["dummy"][0])


def test_expert_parallel_equals_one_process(generations: dict[str, Any], pairs: dict[str, tuple[Path, Path]]) -> None:
    """Two processes cut attention by tensor parallelism and share out the experts."""
    split = ENGINE | {"tensor_parallel_size": 2, "enable_expert_parallel": True}
    ((served,),) = probe([{"model": pairs["mixtral"][0], "engine": split}])
    assert_same(served, generations["mixtral"][0], LOGPROB_TOLERANCE)
