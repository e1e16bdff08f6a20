"""Which method each layer gets, and what the plugin refuses."""

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import BloomConfig, Llama4Config, LlamaConfig, Qwen3VLTextConfig
from vllm.config import ModelConfig, VllmConfig, set_current_vllm_config
from vllm.model_executor.layers.linear import LinearBase, UnquantizedLinearMethod
from vllm.model_executor.layers.quantization import get_quantization_config
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding
from vllm.model_executor.models.utils import WeightsMapper

from vllm_latq import plugin
from vllm_latq.errors import ConfigError, UnsupportedModelError
from vllm_latq.format.config import CheckpointConfig
from vllm_latq.format.scheme import LayerScheme
from vllm_latq.integrations.vllm import config as vllm_config
from vllm_latq.integrations.vllm.config import LatqConfig
from vllm_latq.integrations.vllm.linear import LatqLinearMethod

SCHEME = LayerScheme("packed", 4, 64, True)
QKV = {"qkv_proj": ["q_proj", "k_proj", "v_proj"]}


def quantization(ignore: tuple[str, ...] = (), overrides: dict[str, LayerScheme] | None = None) -> LatqConfig:
    config = LatqConfig(CheckpointConfig(SCHEME, ignore, overrides or {}))
    config.packed_modules_mapping = QKV
    config.maybe_update_config("", LlamaConfig())
    return config


def running(model: Any) -> Any:
    """Return a current configuration of vLLM for a model that vLLM runs by its own code."""
    return SimpleNamespace(model_config=SimpleNamespace(hf_config=model, using_transformers_backend=lambda: False))


def bare(cls: type) -> torch.nn.Module:
    """Return an object of a layer class without calling its __init__: enough to choose a method for it."""
    layer = cls.__new__(cls)
    torch.nn.Module.__init__(layer)
    return layer


@pytest.fixture(autouse=True)
def current_config() -> object:
    with set_current_vllm_config(VllmConfig()):
        yield


def test_registering_twice_is_harmless() -> None:
    plugin.register()
    plugin.register()
    assert get_quantization_config("latq") is LatqConfig


def test_entry_points_import_nothing_heavy() -> None:
    heavy = "{'vllm', 'torch', 'transformers'} & set(sys.modules)"
    code = f"import sys, vllm_latq.plugin, vllm_latq.cli.main; assert not {heavy}, {heavy}"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_ignored_linears_stay_dense() -> None:
    config = quantization(ignore=("o_proj", "model.layers.1.self_attn.q_proj"))
    linear = bare(LinearBase)
    assert isinstance(config.get_quant_method(linear, "model.layers.0.mlp.down_proj"), LatqLinearMethod)
    assert isinstance(config.get_quant_method(linear, "model.layers.0.self_attn.o_proj"), UnquantizedLinearMethod)
    assert isinstance(config.get_quant_method(linear, "model.layers.0.self_attn.qkv_proj"), LatqLinearMethod)


def test_overrides_choose_the_scheme() -> None:
    three = LayerScheme("packed", 3, 128, False)
    config = quantization(overrides={"model.layers.0.mlp.down_proj": three})
    assert config.get_quant_method(bare(LinearBase), "model.layers.0.mlp.down_proj").scheme == three
    assert config.get_quant_method(bare(LinearBase), "model.layers.1.mlp.down_proj").scheme == SCHEME


@pytest.mark.parametrize(
    "config",
    [
        quantization(ignore=("k_proj",)),
        quantization(overrides={"model.layers.0.self_attn.v_proj": LayerScheme("packed", 3, 64, True)}),
    ],
    ids=["ignore", "scheme"],
)
def test_disagreeing_shards_of_a_merged_layer_are_refused(config: LatqConfig) -> None:
    with pytest.raises(ConfigError, match=r"layers\.0\.self_attn\.qkv_proj: expected one scheme for all of its shards"):
        config.get_quant_method(bare(LinearBase), "model.layers.0.self_attn.qkv_proj")


@pytest.mark.parametrize(
    ("tied", "ignore", "quantized"), [(False, (), True), (True, (), False), (False, ("lm_head",), False)]
)
@pytest.mark.parametrize("name", ["lm_head", ""], ids=["named", "unnamed"])  # as EXAONE-MoE's is in vLLM
def test_quantized_and_ignored_heads(
    name: str, tied: bool, ignore: tuple[str, ...], quantized: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(vllm_config, "get_current_vllm_config", lambda: running(LlamaConfig(tie_word_embeddings=tied)))
    method = quantization(ignore).get_quant_method(bare(ParallelLMHead), name)
    assert isinstance(method, LatqLinearMethod) == quantized
    assert quantized or method is None


def test_head_is_quantized_where_the_config_does_not_mention_ties(monkeypatch: pytest.MonkeyPatch) -> None:
    text = Qwen3VLTextConfig()
    assert not hasattr(text, "tie_word_embeddings")
    monkeypatch.setattr(vllm_config, "get_current_vllm_config", lambda: running(text))
    assert isinstance(quantization().get_quant_method(bare(ParallelLMHead), "lm_head"), LatqLinearMethod)


def test_running_model_decides_whether_its_head_is_tied(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM gives a nested language model the setting of the outer model."""
    config = quantization()
    config.maybe_update_config("", LlamaConfig(tie_word_embeddings=True))
    monkeypatch.setattr(vllm_config, "get_current_vllm_config", lambda: running(LlamaConfig(tie_word_embeddings=False)))
    assert isinstance(config.get_quant_method(bare(ParallelLMHead), "lm_head"), LatqLinearMethod)


@pytest.mark.parametrize("implementation", ["vllm", "transformers"])
def test_rows_are_reordered_only_for_models_of_vllm(implementation: Any, random_model: Any) -> None:
    """Models that run by transformers' code take the rows as they are stored."""
    directory, _ = random_model("llama4_text", num_local_experts=2, moe_layers=[], intermediate_size_mlp=48)
    model = ModelConfig(str(directory), model_impl=implementation)
    config = quantization()
    config.maybe_update_config("", model.hf_config)
    with set_current_vllm_config(VllmConfig(model_config=model)):
        method = config.get_quant_method(bare(LinearBase), "model.layers.0.self_attn.qkv_proj")
    stored = torch.arange(16)
    assert torch.equal(method.order("model.layers.0.self_attn.v_proj", 16), stored)
    found = method.order("model.layers.0.self_attn.k_proj", 16)
    assert torch.equal(found, stored) is (implementation == "transformers")


def test_rows_of_a_nested_language_model_are_reordered() -> None:
    config = quantization()
    config.maybe_update_config("", Llama4Config())
    method = config.get_quant_method(bare(LinearBase), "language_model.model.layers.0.self_attn.qkv_proj")
    rows = config.model.num_attention_heads * config.model.head_dim
    assert not torch.equal(method.order("language_model.model.layers.0.self_attn.q_proj", rows), torch.arange(rows))


def test_embeddings_and_other_layers_are_left_alone() -> None:
    assert quantization().get_quant_method(bare(VocabParallelEmbedding), "model.embed_tokens") is None
    assert quantization().get_quant_method(torch.nn.Identity(), "model.layers.0.self_attn.attn") is None


def test_permuted_attention_heads_are_refused() -> None:
    config = quantization()
    config.maybe_update_config("", BloomConfig())
    with pytest.raises(UnsupportedModelError, match=r"query_key_value: expected .* one after the other, found bloom"):
        config.get_quant_method(bare(LinearBase), "transformer.h.0.self_attention.query_key_value")
    assert config.get_quant_method(bare(LinearBase), "transformer.h.0.mlp.dense_h_to_4h").scheme == SCHEME


def test_names_are_mapped_to_vllm_names() -> None:
    huffman, renamed = (
        LayerScheme("huffman"),
        {"model.visual.": "visual.", "lm_head.": "language_model.lm_head.", "head.": "new.head."},
    )
    overrides = {"model.layers.0.down": huffman, "head": huffman}
    config = quantization(("lm_head", "model.layers.1.o", "model.visual"), overrides)
    config.apply_vllm_mapper(WeightsMapper(orig_to_new_prefix=renamed | {"model.": "language_model."}))
    ignored = ("language_model.layers.1.o", "visual.blocks.0.attn.qkv", "language_model.lm_head")
    assert all(config.checkpoint.is_ignored(name) for name in ignored)
    assert config.checkpoint.is_ignored("lm_head"), "Qwen3-VL's head is renamed as it is loaded, but calls itself so"
    assert not config.checkpoint.is_ignored("language_model.layers.1.q")
    assert all(
        config.checkpoint.scheme_for(name) == huffman for name in ("language_model.layers.0.down", "head", "new.head")
    )


def test_unquantized_model_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"the model is not quantized\. Quantize it first"):
        LatqConfig()


def test_unknown_format_is_refused() -> None:
    config = CheckpointConfig(SCHEME).to_dict() | {"format_version": 99}
    with pytest.raises(ConfigError, match=r"config\.json: quantization_config\.format_version: expected 2, found 99"):
        LatqConfig.from_config(config)


def test_quantization_flag_on_an_unquantized_model_is_refused(mini_model: Path) -> None:
    """Goes through vLLM's own argument handling, as `vllm serve MODEL --quantization latq` does."""
    from vllm.engine.arg_utils import EngineArgs

    with pytest.raises(ValueError, match=r"the model is not quantized\. Quantize it first"):
        EngineArgs(model=str(mini_model), quantization="latq").create_engine_config()
