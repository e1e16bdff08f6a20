"""A whole vLLM engine through the kernels, in the interpreter: its tokens, compiled and reloaded too, and experts."""

from itertools import product
from typing import Any

import pytest

from helpers.engine_probe import NO_EXPERTS, OLD_VLLM, assert_same, probe
from helpers.lora_adapter import RANK, write_adapter
from helpers.trellis import TRELLIS
from vllm_latq.format.config import CheckpointConfig
from vllm_latq.format.scheme import LayerScheme

pytestmark = [pytest.mark.interpreter, pytest.mark.engine, pytest.mark.xdist_group("engine")]

# The kernels support no float32 activations; the dense model is in float32, so logits differ by roundings to float16.
LOGPROB_TOLERANCE = 1e-2
# vLLM tries a new engine with as many tokens as a step may have, which the interpreter takes its time for.
SHORT = {"max_model_len": 64, "max_num_batched_tokens": 64}
TOKENS = {"tokens": 2}  # one of the prompt, one of a step that decodes
SIZES = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 1,
    "head_dim": 32,
    "use_sliding_window": False,
}


@pytest.fixture(scope="module")
def generations(random_model: Any, make_checkpoint: Any, tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    """Return outputs of four engines: dense models, then checkpoints.

    A dense model with and without a LoRA adapter; a second dense model; the first model's checkpoint with and without
    the adapter, which then reloads the second model's checkpoint and its own; the first checkpoint, compiled by torch.
    """
    source, _ = random_model("qwen3", "engine", **SIZES)
    maker = type(make_checkpoint)(source, source.parent)
    trellis = {"model.layers.0.mlp.down_proj": TRELLIS}
    config = CheckpointConfig(LayerScheme("packed", 3, 32, True), ("lm_head",), trellis)
    first, second = maker("first", config), maker("second", config, noise_seed=1)
    lora = SHORT | {"enable_lora": True, "max_lora_rank": RANK}
    adapter = str(write_adapter(tmp_path_factory.mktemp("lora") / "adapter", first.dense))
    half = {"dtype": "float16"}
    served = {"model": first.latq, "engine": lora | half, "adapter": adapter, "layouts": True}
    reload = {} if OLD_VLLM else {"reload": [second.latq, first.latq]}
    return probe(
        [
            {"model": first.dense, "engine": lora, "adapter": adapter} | TOKENS,
            {"model": second.dense, "engine": SHORT} | TOKENS,
            served | reload | TOKENS,
            {"model": first.latq, "engine": SHORT | half | {"enforce_eager": False}} | TOKENS,
        ]
    )


@pytest.mark.skipif(OLD_VLLM, reason=NO_EXPERTS)
def test_experts(random_model: Any, make_checkpoint: Any) -> None:
    """In float16 the experts run grouped; in float32, which the kernels do not support, one by one on dense weights.

    The first layer's are packed, the second layer's in a trellis code.
    """
    mixture = {"moe_intermediate_size": 64, "num_experts": 4, "num_experts_per_tok": 2, "num_hidden_layers": 2}
    source, _ = random_model("qwen3_moe", "experts", **(SIZES | mixture))
    linears = product(range(4), ("gate_proj", "up_proj", "down_proj"))
    trellis = {f"model.layers.1.mlp.experts.{expert}.{leaf}": TRELLIS for expert, leaf in linears}
    config = CheckpointConfig(LayerScheme("packed", 4, 32, True), ("lm_head", "mlp.gate"), trellis)
    model = type(make_checkpoint)(source, source.parent)("packed-experts", config).latq
    engines = [SHORT | {"dtype": dtype} for dtype in ("float16", "float32")]
    (grouped,), (dense,) = probe([{"model": model, "engine": engine} | TOKENS for engine in engines])
    assert_same(grouped, dense, LOGPROB_TOLERANCE)


def test_equals_the_dense_model(generations: list[Any]) -> None:
    (_, dense), _, (_, served, *_, layouts), (compiled,) = generations
    assert sorted(layouts) == ["tiled", "trellis"]
    assert_same(served, dense, LOGPROB_TOLERANCE)
    assert_same(compiled, dense, LOGPROB_TOLERANCE)


@pytest.mark.skipif(OLD_VLLM, reason="vLLM 0.25 does not find the weights below LoRA's layers again")
def test_reload_weights(generations: list[Any]) -> None:
    """To other weights and back; the other ones do differ."""
    (_, first), (second,), (_, served, other, back, _), _ = generations
    with pytest.raises(AssertionError):
        assert_same(first, second, 10 * LOGPROB_TOLERANCE)
    assert_same(other, second, LOGPROB_TOLERANCE)
    assert back == served


def test_lora_adapter(generations: list[Any]) -> None:
    """The adapter's products are added to the kernels' products."""
    (expected, dense), _, (adapted, *_), _ = generations
    assert_same(adapted, expected, LOGPROB_TOLERANCE)
    with pytest.raises(AssertionError):
        assert_same(adapted, dense, 10 * LOGPROB_TOLERANCE)
