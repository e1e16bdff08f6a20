"""vLLM's view of a checkpoint's `quantization_config`: which layer gets which method."""

import re
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from vllm.config import get_current_vllm_config
from vllm.model_executor.layers.attention import Attention
from vllm.model_executor.layers.fused_moe import RoutedExperts
from vllm.model_executor.layers.linear import LinearBase, UnquantizedLinearMethod
from vllm.model_executor.layers.quantization import register_quantization_config
from vllm.model_executor.layers.quantization.base_config import QuantizationConfig, QuantizeMethodBase
from vllm.model_executor.layers.quantization.kv_cache import BaseKVCacheMethod
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding

from vllm_latq.errors import ConfigError, UnsupportedModelError
from vllm_latq.format.config import QUANT_METHOD, CheckpointConfig
from vllm_latq.format.scheme import LayerScheme
from vllm_latq.integrations.vllm.checkpoint_files import check_files
from vllm_latq.integrations.vllm.embedding import LatqEmbeddingMethod, install_method
from vllm_latq.integrations.vllm.linear import LatqLinearMethod
from vllm_latq.integrations.vllm.moe import LatqMoEMethod, expert_leaves
from vllm_latq.integrations.vllm.row_order import numbered, stored_order


@register_quantization_config(QUANT_METHOD)
class LatqConfig(QuantizationConfig):
    """The quantization method `latq`.

    Args:
        checkpoint: the parsed `quantization_config`; None, which vLLM passes for `--quantization latq` on a model
            without such a config, raises ConfigError.
    """

    def __init__(self, checkpoint: CheckpointConfig | None = None) -> None:
        super().__init__()
        if checkpoint is None:
            raise ConfigError(
                "config.json: quantization_config",
                "the configuration of a quantized checkpoint",
                "none: the model is not quantized",
                "Quantize it first (`latq quantize MODEL OUT`), then serve OUT.",
            )
        self.checkpoint = checkpoint
        self.model: Any = None

    def get_name(self) -> Any:
        """Return the method's name."""
        return QUANT_METHOD

    def get_supported_act_dtypes(self) -> list[torch.dtype]:
        """Return the dtypes that activations may have."""
        return [torch.bfloat16, torch.half, torch.float32]

    @classmethod
    def get_min_capability(cls) -> int:
        """Return the smallest CUDA compute capability, times 10."""
        return 75  # below 80 every product dequantizes: see `unsupported` in serving/layouts/tiled.py

    @staticmethod
    def get_config_filenames() -> list[str]:
        """Return no file: the configuration is in config.json."""
        return []

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> "LatqConfig":
        """Parse a `quantization_config`; raises ConfigError."""
        return cls(CheckpointConfig.from_dict(config, where="config.json: quantization_config"))

    def maybe_update_config(self, model_name: str, hf_config: Any = None, revision: str | None = None) -> None:
        """Check the checkpoint's files, and keep the configuration of the model, which may be a draft model."""
        check_files(model_name, revision)
        self.model = None if hf_config is None else hf_config.get_text_config()

    def apply_vllm_mapper(self, hf_to_vllm_mapper: Any) -> None:
        """Rename the modules that the config names the way vLLM renames the model's."""
        # Newer mappers also stack names (q_proj -> qkv_proj). The names kept here must stay unstacked.
        rename = getattr(hf_to_vllm_mapper, "get_rename_mapper", None)
        mapper = rename() if rename else hf_to_vllm_mapper
        ignore, overrides, beside = self.checkpoint.ignore, self.checkpoint.overrides, self.checkpoint.beside
        # Mappers map prefixes that end with a dot; names of modules have none, so one is added and removed.
        names = {name: mapper.apply_list([f"{name}."]) for name in (*ignore, *overrides, *beside)}
        mapped = {name: found[0].removesuffix(".") for name, found in names.items() if found}
        # Some of vLLM's models name their heads by the old name, others by the new name: keep both.
        self.checkpoint = replace(
            self.checkpoint,
            ignore=tuple(dict.fromkeys((*ignore, *(mapped[name] for name in ignore if name in mapped)))),
            overrides={**overrides, **{mapped[name]: overrides[name] for name in overrides if name in mapped}},
            beside={**beside, **{mapped[name]: beside[name] for name in beside if name in mapped}},
        )

    def get_quant_method(self, layer: torch.nn.Module, prefix: str) -> QuantizeMethodBase | None:
        """Return the method of a layer; None leaves embeddings, and attention without scales, as they are."""
        if isinstance(layer, Attention):
            return BaseKVCacheMethod(self) if self.checkpoint.has_kv_scales else None
        if isinstance(layer, LinearBase):
            shards = self._shard_names(prefix)
            scheme = self._common_scheme(prefix, shards)
            return self._linear_method(scheme, prefix, shards) if scheme else UnquantizedLinearMethod()
        if isinstance(layer, ParallelLMHead):
            # Some of vLLM's models do not name their heads.
            prefix = prefix or "lm_head"
            scheme = None if _embeddings_are_tied() else self.checkpoint.scheme_for(prefix)
            return self._linear_method(scheme, prefix, [prefix]) if scheme else None
        if isinstance(layer, RoutedExperts):
            schemes = self._expert_schemes(layer, prefix)
            return LatqMoEMethod(layer.moe_config, schemes, prefix, self._recipe()) if schemes else None
        return None

    @property
    def embeddings(self) -> set[str]:
        """Names of the quantized embeddings; what else is beside the linears belongs to layers that are ignored."""
        return {name for name in self.checkpoint.beside if not self.checkpoint.is_ignored(name)}

    def install_heads(self, model: torch.nn.Module) -> None:
        """Give the quantized heads of a model their method where vLLM's model did not ask for it."""
        if _embeddings_are_tied():
            return
        for name, module in model.named_modules():
            scheme = self.checkpoint.scheme_for(name) if isinstance(module, ParallelLMHead) else None
            if scheme and not isinstance(module.quant_method, LatqLinearMethod):
                install_method(module, self._linear_method(scheme, name, [name]))

    def install_embeddings(self, model: torch.nn.Module) -> None:
        """Give the quantized embeddings of a model that vLLM has made their method.

        Many of vLLM's models do not ask for the method of their embedding, or do not name the embedding.
        """
        for name, module in model.named_modules():
            scheme = self.checkpoint.beside.get(name)
            if scheme and isinstance(module, VocabParallelEmbedding) and not isinstance(module, ParallelLMHead):
                install_method(module, LatqEmbeddingMethod(scheme, name, [name], self._recipe(), numbered))

    def _linear_method(self, scheme: LayerScheme, prefix: str, shards: list[str]) -> LatqLinearMethod:
        current = get_current_vllm_config().model_config
        # transformers' models take rows in the stored order.
        model = None if current is not None and current.using_transformers_backend() else self.model
        if prefix.endswith("query_key_value") and getattr(model, "model_type", None) == "bloom":
            # vLLM permutes every tensor of bloom's query_key_value, as if it were a weight.
            expected, found = "a model whose q, k and v are stored one after the other", "bloom"
            hint = "Load the checkpoint with transformers, or quantize the model with query_key_value ignored."
            raise UnsupportedModelError(prefix, expected, found, hint)
        return LatqLinearMethod(scheme, prefix, shards, self._recipe(), partial(stored_order, model))

    def _recipe(self) -> dict[str, Any]:
        return dict(self.checkpoint.recipe)

    def _shard_names(self, prefix: str) -> list[str]:
        """Return the checkpoint modules that a vLLM layer merges: three for `...qkv_proj`, one for most layers."""
        parent, _, leaf = prefix.rpartition(".")
        if leaf == "qkv_proj":
            # vLLM's BERT names the layer attention.output.qkv_proj, the checkpoint has attention.self.
            parent = re.sub(r"\.attention\.output$", ".attention.self", parent)
        leaves = self.packed_modules_mapping.get(leaf, [leaf])
        return [f"{parent}.{name}" if parent else name for name in leaves]

    def _expert_schemes(self, layer: RoutedExperts, prefix: str) -> dict[str, LayerScheme]:
        """Return the scheme of each matrix, the same for all experts; empty if they are not quantized."""
        if self.checkpoint.is_ignored(prefix) and not any(
            name.startswith(f"{prefix}.") for name in self.checkpoint.beside
        ):
            return {}
        leaves = {matrix: list(shards.values()) for matrix, shards in expert_leaves(layer).items()}
        schemes = {}
        for matrix in leaves:
            names = [f"{prefix}.{n}.{leaf}" for n in range(layer.global_num_experts) for leaf in leaves[matrix]]
            schemes[matrix] = self._common_scheme(prefix, names)
        quantized = {matrix: scheme for matrix, scheme in schemes.items() if scheme}
        if quantized and len(quantized) < len(schemes):
            found = f"only {', '.join(leaf for matrix in quantized for leaf in leaves[matrix])}"
            hint = "vLLM runs them in one kernel: quantize all of them, or ignore all of them."
            raise ConfigError(prefix, "all matrices of its experts quantized, or none", found, hint)
        return quantized

    def _common_scheme(self, prefix: str, shards: list[str]) -> LayerScheme | None:
        schemes = {name: self.checkpoint.scheme_for(name) for name in shards}
        if len(set(schemes.values())) > 1:
            found = "; ".join(f"{name}: {scheme or 'ignored'}" for name, scheme in schemes.items())
            hint = "vLLM merges these layers into one matrix: quantize all with one scheme, or ignore all of them."
            raise ConfigError(prefix, "one scheme for all of its shards", found, hint)
        return schemes[shards[0]]


def _embeddings_are_tied() -> bool:
    """Return whether the model will use the embedding as its head; a tied head has no tensors of its own."""
    # A multimodal model may tie its language model's embeddings or not: the current configuration decides.
    model_config = get_current_vllm_config().model_config
    if model_config is None:
        return False
    return bool(getattr(model_config.hf_config.get_text_config(), "tie_word_embeddings", False))
