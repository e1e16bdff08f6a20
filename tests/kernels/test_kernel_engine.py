"""A whole vLLM engine through the kernels, in the interpreter: its tokens, and those after `reload_weights`."""

from typing import Any

import pytest
from engine_probe import assert_same, probe

from vllm_latq.config import CheckpointConfig, LayerScheme

pytestmark = [pytest.mark.interpreter, pytest.mark.engine]

# The kernels take no float32 activations; the dense model is in float32, so logits differ by roundings to float16.
LOGPROB_TOLERANCE = 1e-2
SIZES = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 1,
    "head_dim": 32,
    "use_sliding_window": False,
}


@pytest.fixture(scope="module")
def generations(random_model: Any, make_checkpoint: Any) -> list[Any]:
    """Of two dense models, and of the first one's checkpoint that turns into the second's and back again."""
    source, _ = random_model("qwen3", "engine", **SIZES)
    maker = type(make_checkpoint)(source, source.parent)
    config = CheckpointConfig(LayerScheme("packed", 3, 32, True), ("lm_head",))
    first, second = maker("first", config), maker("second", config, noise_seed=1)
    short = {"max_model_len": 64}
    served = {"model": first.latq, "engine": short | {"dtype": "float16"}, "reload": [second.latq, first.latq]}
    dense = [{"model": pair.dense, "engine": short} for pair in (first, second)]
    return probe([*dense, served | {"operators": True}])


def test_equals_the_dense_model(generations: list[Any]) -> None:
    (dense,), _, (served, *_, operators) = generations
    assert operators == ["ssqr_tiled"]
    assert_same(served, dense, LOGPROB_TOLERANCE)


def test_reload_weights(generations: list[Any]) -> None:
    """To other weights and back; the other ones do differ."""
    (first,), (second,), (served, other, back, _) = generations
    with pytest.raises(AssertionError):
        assert_same(first, second, 10 * LOGPROB_TOLERANCE)
    assert_same(other, second, LOGPROB_TOLERANCE)
    assert back == served
