"""vLLM's view of a checkpoint's `quantization_config`: which layer gets which method."""

import re
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from vllm.config import get_current_vllm_config
from vllm.model_executor.layers.fused_moe import RoutedExperts
from vllm.model_executor.layers.linear import LinearBase, UnquantizedLinearMethod
from vllm.model_executor.layers.quantization import register_quantization_config
from vllm.model_executor.layers.quantization.base_config import QuantizationConfig, QuantizeMethodBase
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead

from vllm_latq.errors import ConfigError, UnsupportedModelError
from vllm_latq.format.config import QUANT_METHOD, CheckpointConfig
from vllm_latq.format.scheme import LayerScheme
from vllm_latq.integrations.vllm.linear import LatqLinearMethod
from vllm_latq.integrations.vllm.moe import LatqMoEMethod, expert_leaves
from vllm_latq.integrations.vllm.row_order import stored_order


@register_quantization_config(QUANT_METHOD)
class LatqConfig(QuantizationConfig):
    """The quantization method `latq`.

    Args:
        checkpoint: the parsed `quantization_config`. vLLM passes none for `--quantization latq` on a model that has
            no such config; that is refused.
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
        return QUANT_METHOD

    def get_supported_act_dtypes(self) -> list[torch.dtype]:
        return [torch.bfloat16, torch.half, torch.float32]

    @classmethod
    def get_min_capability(cls) -> int:
        return 75  # below 80 every product dequantizes: see `kernel_path.unsupported`

    @staticmethod
    def get_config_filenames() -> list[str]:
        return []

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> "LatqConfig":
        return cls(CheckpointConfig.from_dict(config, where="config.json: quantization_config"))

    def maybe_update_config(self, model_name: str, hf_config: Any = None, revision: str | None = None) -> None:
        """Keep the configuration of the model that is quantized, be it a draft's."""
        self.model = None if hf_config is None else hf_config.get_text_config()

    def apply_vllm_mapper(self, hf_to_vllm_mapper: Any) -> None:
        """Rename the modules that the config names the way vLLM renames the model's."""
        # Newer mappers also stack names (q_proj -> qkv_proj), which must not touch the unstacked names kept here.
        rename = getattr(hf_to_vllm_mapper, "get_rename_mapper", None)
        mapper = rename() if rename else hf_to_vllm_mapper
        ignore, overrides = self.checkpoint.ignore, self.checkpoint.overrides
        # Prefixes are mapped with the dot behind them, which names of modules end before.
        names = {name: mapper.apply_list([f"{name}."]) for name in (*ignore, *overrides)}
        mapped = {name: found[0].removesuffix(".") for name, found in names.items() if found}
        # vLLM's models themselves call their heads now by the one name, now by the other.
        self.checkpoint = replace(
            self.checkpoint,
            ignore=tuple(dict.fromkeys((*ignore, *(mapped[name] for name in ignore if name in mapped)))),
            overrides={**overrides, **{mapped[name]: overrides[name] for name in overrides if name in mapped}},
        )

    def get_quant_method(self, layer: torch.nn.Module, prefix: str) -> QuantizeMethodBase | None:
        """The method of a layer; None leaves attention and embeddings as they are."""
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

    def _linear_method(self, scheme: LayerScheme, prefix: str, shards: list[str]) -> LatqLinearMethod:
        current = get_current_vllm_config().model_config
        # The code of transformers' models takes rows as they are stored.
        model = None if current is not None and current.using_transformers_backend() else self.model
        if prefix.endswith("query_key_value") and getattr(model, "model_type", None) == "bloom":
            # Of this one vLLM permutes every tensor, as if it were a weight.
            expected, found = "a model whose q, k and v are stored one after the other", "bloom"
            hint = "Load the checkpoint with transformers, or quantize it with query_key_value among those ignored."
            raise UnsupportedModelError(prefix, expected, found, hint)
        return LatqLinearMethod(scheme, prefix, shards, self._recipe(), partial(stored_order, model))

    def _recipe(self) -> dict[str, Any]:
        return dict(self.checkpoint.recipe)

    def _shard_names(self, prefix: str) -> list[str]:
        """Checkpoint modules behind a vLLM layer: three for `...qkv_proj`, one for most."""
        parent, _, leaf = prefix.rpartition(".")
        if leaf == "qkv_proj":
            # vLLM's BERT calls its attention.self.qkv_proj attention.output.qkv_proj.
            parent = re.sub(r"\.attention\.output$", ".attention.self", parent)
        leaves = self.packed_modules_mapping.get(leaf, [leaf])
        return [f"{parent}.{name}" if parent else name for name in leaves]

    def _expert_schemes(self, layer: RoutedExperts, prefix: str) -> dict[str, LayerScheme]:
        """The scheme of each product, the same for all experts; empty if they are not quantized."""
        if self.checkpoint.is_ignored(prefix):
            return {}
        leaves = {product: list(shards.values()) for product, shards in expert_leaves(layer).items()}
        schemes = {}
        for product in leaves:
            names = [f"{prefix}.{n}.{leaf}" for n in range(layer.global_num_experts) for leaf in leaves[product]]
            schemes[product] = self._common_scheme(prefix, names)
        quantized = {product: scheme for product, scheme in schemes.items() if scheme}
        if quantized and len(quantized) < len(schemes):
            found = f"only {', '.join(leaf for product in quantized for leaf in leaves[product])}"
            hint = "vLLM serves them by one kernel: quantize or ignore them alike."
            raise ConfigError(prefix, "all matrices of its experts quantized, or none", found, hint)
        return quantized

    def _common_scheme(self, prefix: str, shards: list[str]) -> LayerScheme | None:
        schemes = {name: self.checkpoint.scheme_for(name) for name in shards}
        if len(set(schemes.values())) > 1:
            found = "; ".join(f"{name}: {scheme or 'ignored'}" for name, scheme in schemes.items())
            hint = "vLLM merges these into one matrix: quantize or ignore them alike."
            raise ConfigError(prefix, "one scheme for all of its shards", found, hint)
        return schemes[shards[0]]


def _embeddings_are_tied() -> bool:
    """Whether the model will use the embedding as its head; a tied head has no tensors of its own."""
    # Of a multimodal model the current configuration says what it makes of its language model's, which may differ.
    model_config = get_current_vllm_config().model_config
    if model_config is None:
        return False
    return bool(getattr(model_config.hf_config.get_text_config(), "tie_word_embeddings", False))
