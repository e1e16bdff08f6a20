"""Bytes of the KV cache, against published sizes and against the caches that transformers fills."""

from typing import Any

import pytest
import torch

from helpers.random_models import RandomModels
from vllm_latq.errors import UnsupportedModelError
from vllm_latq.quantize.kv_cache import LayerCache, layer_caches

QWEN3_8B = {"num_hidden_layers": 36, "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128}
QWEN3_NEXT = {"linear_num_key_heads": 16, "linear_key_head_dim": 128, "linear_num_value_heads": 32}


def caches(model_type: str, **sizes: Any) -> list[LayerCache]:
    from transformers import AutoConfig

    return layer_caches(AutoConfig.for_model(model_type, **sizes), model_type)


def per_token(layers: list[LayerCache]) -> int:
    return sum(layer.per_token for layer in layers)


def test_grouped_heads() -> None:
    assert per_token(caches("qwen3", **QWEN3_8B)) == 36 * 2 * 8 * 128 * 2
    assert per_token(caches("gpt2")) == 12 * 2 * 768 * 2
    assert per_token(caches("falcon", multi_query=True, new_decoder_architecture=False)) == 32 * 2 * 64 * 2


def test_latent_attention() -> None:
    """DeepSeek-V3 keeps 512 numbers and 64 rotated ones of a token; V3.2 a key of its indexer, too."""
    assert per_token(caches("deepseek_v3")) == 61 * 576 * 2
    assert per_token(caches("deepseek_v32")) == 61 * (576 * 2 + 128 + 4)


def test_sliding_windows() -> None:
    layers = caches("gemma3_text", num_hidden_layers=6, sliding_window=512, num_key_value_heads=1, head_dim=256)
    assert [layer.window for layer in layers] == [512] * 5 + [None]
    assert layers[0].nbytes(100_000, 2048) == 1024 * (511 + 2048)
    assert layers[0].nbytes(300, 2048) == 1024 * 300
    assert layers[5].nbytes(100_000, 2048) == 1024 * 100_000
    assert {layer.window for layer in caches("mistral", sliding_window=4096)} == {4096}
    assert {layer.window for layer in caches("mistral", sliding_window=None)} == {None}
    assert {layer.window for layer in caches("qwen2", sliding_window=4096, use_sliding_window=False)} == {None}


def test_layers_that_share_keys_and_heads_that_differ() -> None:
    shared = caches("gemma3n_text", num_hidden_layers=10, num_kv_shared_layers=4, head_dim=64, num_key_value_heads=2)
    assert [layer.per_token for layer in shared] == [512] * 6 + [0] * 4
    kinds = ["sliding_attention"] * 5 + ["full_attention"]
    sizes = {"head_dim": 256, "global_head_dim": 512, "num_key_value_heads": 8, "num_kv_shared_layers": 0}
    mixed = caches("gemma4_text", num_hidden_layers=6, layer_types=kinds, **sizes)
    assert [layer.per_token for layer in mixed] == [8 * 512 * 2] * 5 + [8 * 1024 * 2]


def test_recurrent_layers() -> None:
    layers = caches("qwen3_next", num_hidden_layers=4, linear_value_head_dim=128, **QWEN3_NEXT)
    state = 4 * 32 * 128 * 128 + 2 * 3 * (2 * 16 * 128 + 32 * 128)
    assert [layer.per_sequence for layer in layers] == [state] * 3 + [0]
    assert [layer.per_token > 0 for layer in layers] == [False] * 3 + [True]
    (layer,) = set(caches("falcon_h1", mamba_d_ssm=1024, mamba_n_heads=16, mamba_d_head=64, mamba_d_state=256))
    assert layer.per_token > 0
    assert layer.per_sequence == 4 * 16 * 64 * 256 + 2 * 3 * (1024 + 2 * 256)
    jamba = caches("jamba", hidden_size=64, mamba_d_state=16, mamba_expand=2)
    assert {layer.per_sequence for layer in jamba} == {0, 4 * 128 * 16 + 2 * 3 * 128}
    kimi = caches("kimi_linear", linear_num_heads=8, linear_head_dim=128)
    assert {layer.per_sequence for layer in kimi} == {0, 4 * 8 * 128 * 128 + 2 * 3 * 3 * 1024}
    assert {layer.per_token for layer in kimi} == {0, 2 * 576}
    kinds = {"layer_types": ["conv", "full_attention"], "num_hidden_layers": 2, "hidden_size": 64, "conv_L_cache": 3}
    assert caches("lfm2", **kinds)[0] == LayerCache(per_sequence=2 * 2 * 64)


@pytest.mark.parametrize(
    ("model_type", "found"),
    [
        ("deepseek_v4", "found '(heavily_compressed|compressed_sparse)_attention'"),
        ("minimax", "state of linear_attention: expected a recurrence .* found model type minimax"),
        ("qwen4_exp", "indexer: expected index_head_dim in config.json, found none"),
    ],
)
def test_unknown_layers_are_refused(model_type: str, found: str) -> None:
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

    if model_type not in CONFIG_MAPPING_NAMES:
        pytest.skip("this transformers does not know it")
    with pytest.raises(UnsupportedModelError, match=found):
        caches(model_type)


@pytest.mark.parametrize("model_type", ["llama", "gemma3_text", "phi3"])
def test_tokens_take_what_transformers_keeps(model_type: str, random_model: RandomModels) -> None:
    _, model = random_model(model_type, f"kv-{model_type}")
    with torch.no_grad():
        kept = model(torch.arange(5)[None], use_cache=True).past_key_values
    numbers = [layer.keys.numel() + layer.values.numel() for layer in kept.layers]
    assert [2 * count for count in numbers] == [layer.nbytes(5, 5) for layer in layer_caches(model.config, "here")]
