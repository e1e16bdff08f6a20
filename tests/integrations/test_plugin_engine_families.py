"""The real engine on families whose layers it merges, or runs, differently: encoders, linears fused in the checkpoint,
linear and latent attention, and keys and values that blocks share.

Its answers are compared with what transformers computes for the dense model.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModel, AutoModelForCausalLM

from helpers.encoders import random_encoder
from helpers.engine_probe import NO_EXPERTS, OLD_VLLM, PROMPTS, probe
from helpers.logprobs import assert_agrees
from vllm_latq.kernels.cpu import library
from vllm_latq.quantize.pipeline import quantize_checkpoint
from vllm_latq.quantize.recipe import Recipe

pytestmark = pytest.mark.engine

# Both sides multiply by the same float32 numbers.
LOGPROB_TOLERANCE = 2e-4
BFLOAT16_TOLERANCE = 0.1  # in which vLLM runs these on a CPU, on both sides
STATE_TOLERANCE = 1e-5
QKV = tuple(f"0.attention.self.{leaf}" for leaf in ("query", "key", "value"))
SAMPLES = {"num_samples": 8, "seq_len": 32}
RECIPES = {
    # vLLM calls the layer that merges these attention.output.qkv_proj.
    "bert": Recipe("ssqr", 3, group_size=32, outlier_rate=0.02, ignore=QKV, **SAMPLES),
    "roberta": Recipe("gptq", 4, group_size=32, **SAMPLES),
    "modernbert": Recipe("hptq", bits=3.5, **SAMPLES),
    "phi3": Recipe("latq", bits=3.5, ignore=(), **SAMPLES),  # its head, too
    "gemma4_text": Recipe("latq", bits=3.5, **SAMPLES),
    # vLLM does not tell its head how it is quantized.
    "qwen3_next": Recipe("gptq", 8, group_size=32, ignore=(), **SAMPLES),
    # Linears that vLLM merges must have a common order of columns.
    "glm4_moe_lite": Recipe("latq", bits=6.0, **SAMPLES),
}
# vLLM 0.25 does not tell ModernBERT's linears how they are quantized.
ENCODERS = ("bert", "roberta", "modernbert")[: 2 if OLD_VLLM else 3]
# The sizes that vLLM's attention takes on a CPU, where it is not that of Llama.
ATTENTION = {
    "qwen3_next": {  # a block of linear, one of softmax attention
        **{"hidden_size": 128, "head_dim": 32, "layer_types": ["linear_attention", "full_attention"]},
        **{"linear_num_key_heads": 2, "linear_num_value_heads": 4},
        **{"linear_key_head_dim": 128, "linear_value_head_dim": 128},
        **{"num_experts": 4, "moe_intermediate_size": 64, "shared_expert_intermediate_size": 64},
    },
    "glm4_moe_lite": {  # multi-head latent attention: one of its linears is dequantized by vLLM
        **{"hidden_size": 128, "intermediate_size": 96, "num_key_value_heads": 4, "head_dim": 64, "v_head_dim": 128},
        **{"q_lora_rank": 64, "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64},
        **{"n_routed_experts": 4, "moe_intermediate_size": 64, "n_shared_experts": 1, "n_group": 1, "topk_group": 1},
        "first_k_dense_replace": 1,
    },
}
DECODERS = {
    # It stores q, k and v, and gate and up, as one matrix each, as vLLM wants them.
    "phi3": {"hidden_size": 128, "intermediate_size": 192, "head_dim": 32, "sliding_window": None},
    # Two of four blocks attend to keys and values of others, and every block has embeddings of its own.
    "gemma4_text": {
        **{"hidden_size": 128, "head_dim": 32, "global_head_dim": 64, "sliding_window": 64, "num_hidden_layers": 4},
        **{"num_kv_shared_layers": 2, "layer_types": ["sliding_attention", "full_attention"] * 2},
        **{"hidden_size_per_layer_input": 16, "vocab_size_per_layer_input": 2048, "use_double_wide_mlp": True},
    },
}
if OLD_VLLM:  # which does not start it, dense or not, with transformers 5.23
    del DECODERS["gemma4_text"]


@pytest.fixture(scope="module")
def pairs(
    random_model: Any, make_dense_twin: Any, calibration_text: Path, tmp_path_factory: Any
) -> dict[str, tuple[Path, Path]]:
    """Return the checkpoint and the dense twin of each family."""
    folder, found = tmp_path_factory.mktemp("families"), {}
    for family in (*ENCODERS, *DECODERS):
        recipe = RECIPES[family]
        source = folder / f"{family}-source"
        if family in ENCODERS:
            random_encoder(source, family, calibration_text)
        else:
            source, _ = random_model(family, f"served-{family}", **DECODERS[family])
        quantize_checkpoint(recipe, source, folder / family, calibration=str(calibration_text))
        found[family] = folder / family, make_dense_twin(folder / family, folder / f"{family}-dense")
    return found


@pytest.fixture(scope="module")
def answers(pairs: dict[str, tuple[Path, Path]]) -> dict[str, Any]:
    """Return the answers of one process, by family."""
    jobs = [
        {"model": checkpoint, "engine": {"max_model_len": 64}, "layouts": True, "pooling": family in ENCODERS}
        for family, (checkpoint, _) in pairs.items()
    ]
    return dict(zip(pairs, probe(jobs), strict=True))


@pytest.mark.parametrize("family", ENCODERS)
def test_hidden_states_match_the_dequantized_models(
    family: str, answers: dict[str, Any], pairs: dict[str, tuple[Path, Path]]
) -> None:
    model = AutoModel.from_pretrained(pairs[family][1], dtype=torch.float32)
    states, layouts = answers[family]
    assert layouts, "nothing was served quantized"
    for prompt, found in zip(PROMPTS, states, strict=True):
        with torch.no_grad():
            expected = model(torch.tensor([prompt])).last_hidden_state[0]
        expected = torch.nn.functional.normalize(expected, dim=-1)
        torch.testing.assert_close(torch.tensor(found), expected, rtol=0, atol=STATE_TOLERANCE)


@pytest.mark.parametrize("family", DECODERS)
def test_logprobs_match_the_dequantized_models(
    family: str, answers: dict[str, Any], pairs: dict[str, tuple[Path, Path]]
) -> None:
    model = AutoModelForCausalLM.from_pretrained(pairs[family][1], dtype=torch.float32)
    generations, layouts = answers[family]
    assert layouts, "nothing was served quantized"
    for prompt, generation in zip(PROMPTS, generations, strict=True):
        assert_agrees(model, prompt, generation, LOGPROB_TOLERANCE)


@pytest.mark.skipif(OLD_VLLM, reason=NO_EXPERTS)
@pytest.mark.parametrize("family", ATTENTION)
def test_attention(
    family: str, random_model: Any, make_dense_twin: Any, calibration_text: Path, tmp_path: Path
) -> None:
    """Attention of other kinds than Llama's, beside shared and routed experts."""
    source, _ = random_model(family, f"served-{family}", num_experts_per_tok=2, **ATTENTION[family])
    quantize_checkpoint(RECIPES[family], source, tmp_path / "out", calibration=str(calibration_text))
    dense = make_dense_twin(tmp_path / "out", tmp_path / "dense")
    engine = {"max_model_len": 64, "dtype": "bfloat16"}
    (served, layouts), (expected,) = probe(
        [{"model": tmp_path / "out", "engine": engine, "layouts": True}, {"model": dense, "engine": engine}]
    )
    if library.instructions():
        assert layouts == ["cpu_trellis" if RECIPES[family].method == "latq" else "cpu"]
    for ours, theirs in zip(served, expected, strict=True):
        got, reference = ours["logprobs"][0], theirs["logprobs"][0]  # later tokens follow those chosen first
        common = got.keys() & reference.keys()
        assert len(common) >= 3
        for token in common:
            assert abs(got[token] - reference[token]) <= BFLOAT16_TOLERANCE
