"""A model without weights, as transformers builds it from a config.json: a language model, or an encoder.

Invariant: no code of the model's own is run, and no weight is in memory.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, AutoModelForMultimodalLM, PreTrainedConfig
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_MASKED_LM_MAPPING,
    MODEL_FOR_MULTIMODAL_LM_MAPPING,
)

from vllm_latq.errors import UnsupportedModelError, summary
from vllm_latq.format.config import NEEDS_IMPORT, REDIRECTING_KEYS, redirections
from vllm_latq.format.files import read_json
from vllm_latq.quantize.model.originals.store import FORMS, form_of

# Values that a run needs. Trainers leave other values of these keys in config.json; None lets transformers choose.
NEEDED = {
    **{"return_dict": True, "use_cache": False, "gradient_checkpointing": False, "chunk_size_feed_forward": 0},
    **{"output_attentions": False, "output_hidden_states": False, "output_router_logits": False},
    **{"_attn_implementation": None, "_experts_implementation": None},
}
# Keys of config.json that say how the weights of a published model are stored.
STORED_FORM = ("quantization_config", "expert_dtype")
# The linear with which encoders sum up a text in its first token's state.
POOLER = "pooler.dense"


def read_config(directory: str | Path) -> Any:
    """Return the transformers configuration of a model or checkpoint, and of its parts, with the NEEDED values."""
    config = AutoConfig.from_pretrained(directory, trust_remote_code=False)
    for part in _parts(config):
        for key, value in NEEDED.items():
            if hasattr(part, key):
                setattr(part, key, value)
    return config


def _parts(config: Any) -> Iterator[Any]:
    """Yield a configuration and those of the parts of its model."""
    yield config
    for name in config.sub_configs:
        if isinstance(part := getattr(config, name, None), PreTrainedConfig):
            yield from _parts(part)


def load_config(source: Path) -> Any:
    """The transformers configuration of a model directory, as if nothing were quantized.

    Raises:
        UnsupportedModelError: no configuration of a model, or of one that is quantized and in none of FORMS.
    """
    try:
        config = read_config(source)
    except (AttributeError, KeyError, OSError, TypeError, ValueError, StrictDataclassError) as error:
        raise UnsupportedModelError(f"{source}/config.json", "a model configuration", summary(error)) from None
    # In a multimodal model the language model's configuration may say so.
    for part in (config, config.get_text_config()):
        quantization = vars(part).pop("quantization_config", None)
        if quantization is not None and (form := form_of(quantization)) not in FORMS:
            expected = f"a model that is not quantized, or is published as one of {', '.join(FORMS)}"
            hint = "Quantize the original model instead."
            raise UnsupportedModelError(f"{source}/config.json: quantization_config", expected, form, hint)
    return config


def is_encoder(config: Any) -> bool:
    """Return whether each token sees later ones, too: a masked language model, of which transformers keeps a table."""
    decodes = config.is_encoder_decoder or getattr(config, "is_decoder", False)
    return type(config) in MODEL_FOR_MASKED_LM_MAPPING and not decodes


def auto_class(config: Any) -> Any:
    """transformers' class that makes the model of a configuration: below any head, of language, or of images, too."""
    if is_encoder(config):
        return AutoModel
    multimodal: Any = MODEL_FOR_MULTIMODAL_LM_MAPPING.get(type(config), None)
    if multimodal is None:
        return AutoModelForCausalLM
    # Some configurations belong to both kinds of model: then the checkpoint says which of them it holds.
    either = type(config) in MODEL_FOR_CAUSAL_LM_MAPPING
    held = config.architectures if isinstance(config.architectures, list) else []
    return AutoModelForCausalLM if either and multimodal.__name__ not in held else AutoModelForMultimodalLM


def meta_model(source: Path, config: Any, dtype: torch.dtype) -> Any:
    """The model of a configuration on the meta device, in evaluation mode: of an encoder, what stands below any head.

    Raises:
        UnsupportedModelError: transformers knows no such model.
    """
    try:
        with torch.device("meta"):
            model = auto_class(config).from_config(config, dtype=dtype).eval()
    except (AttributeError, ImportError, KeyError, NotImplementedError, TypeError, ValueError) as error:
        expected = "a causal language model or an encoder, which transformers can make here"
        raise UnsupportedModelError(f"{source}/config.json", expected, summary(error)) from None
    if is_encoder(config):
        # It stands behind the blocks, and is stored only where it was trained.
        model.pooler = None
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    return model


def model_config(source: Path, untied: bool) -> dict[str, Any]:
    """Return the config.json of a checkpoint: the model's, without keys that say how the model was stored.

    transformers refuses to load it without the quantizer of this package.

    Args:
        source: model directory.
        untied: whether the checkpoint's head no longer is the embedding.
    """
    config = read_json(source / "config.json")
    for place, key in redirections(config):
        del place[key]
    for part in (config, config.get("text_config")):
        if isinstance(part, dict):
            for key in STORED_FORM:
                part.pop(key, None)
            part.update(dict.fromkeys(REDIRECTING_KEYS, NEEDS_IMPORT))
    if untied:
        own_head = {"tie_word_embeddings": False}
        # Some readers ask a multimodal model's own configuration, others that of its language model.
        text = config.get("text_config")
        config |= own_head | ({"text_config": {**text, **own_head}} if text else {})
    return config
