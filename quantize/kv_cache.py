"""Bytes that a sequence takes in vLLM's caches, from the configuration of a model alone.

    layer kind            per token                                   per sequence
    full attention        keys and values of all heads, or the        -
                          latent vector of MLA and its rotary part
    indexed attention     the same, and a key of the indexer          -
    sliding, chunked      as full, for the last tokens alone          -
    linear attention      -                                           states of the convolution and the recurrence
    hybrid                as full                                     as linear attention

Keys, values and states of convolutions have 16 bits, recurrent states 32, keys of an indexer 8 bits and a scale.

Invariant: a kind of layer, or a recurrence, that is not known here is refused by name, never guessed at.
"""

from typing import Any, NamedTuple

from vllm_latq.errors import UnsupportedModelError

KEY_BYTES, STATE_BYTES = 2, 4
INDEX_SCALE_BYTES = 4  # of each indexer key, which vLLM keeps in 8-bit floats
ATTENDS = ("full_attention", "attention", "sliding_attention", "chunked_attention", "indexed_attention", "hybrid")
RECURS = ("linear_attention", "mamba", "recurrent", "conv", "hybrid")
WINDOWS = {"sliding_attention": "sliding_window", "chunked_attention": "attention_chunk_size"}
EMPTY = ("mlp", "moe")  # of a model whose layers are attention or feed-forward networks, not both
_HINT = "Choose --bits yourself."


class LayerCache(NamedTuple):
    """Cache of one layer.

    Attributes:
        per_token: bytes of each token that is kept.
        window: number of tokens that are kept at most; None for all.
        per_sequence: bytes of a sequence of any length.
    """

    per_token: int = 0
    window: int | None = None
    per_sequence: int = 0

    def nbytes(self, context: int, in_flight: int) -> int:
        """Return the bytes of a sequence of `context` tokens, of which a step computes at most `in_flight`."""
        kept = context if self.window is None else min(context, self.window - 1 + in_flight)
        return self.per_sequence + self.per_token * kept


def layer_caches(config: Any, where: str) -> list[LayerCache]:
    """Return the cache of each layer of a language model.

    Args:
        config: transformers configuration of the model.
        where: its place, for errors.

    Raises:
        UnsupportedModelError: a kind of layer that is not known here.
    """
    text = config.get_text_config()
    kinds, views = _kinds(text), getattr(text, "per_layer_config", None)
    layers = []
    for index, kind in enumerate(kinds):
        if kind not in (*ATTENDS, *RECURS, *EMPTY):
            expected = f"layers of the kinds {', '.join(dict.fromkeys((*ATTENDS, *RECURS, *EMPTY)))}"
            raise UnsupportedModelError(f"{where}: KV cache", expected, repr(kind), _HINT)
        own = text if views is None else views[index]
        window = getattr(own, WINDOWS[kind]) if kind in WINDOWS else None
        layers.append(
            LayerCache(
                _attention_bytes(own, kind, where) if kind in ATTENDS else 0,
                window,
                _state_bytes(own, kind, where) if kind in RECURS else 0,
            )
        )
    # The last layers of Gemma 3n and 4 read the keys and values of earlier layers.
    if shared := getattr(text, "num_kv_shared_layers", 0) or 0:
        layers[-shared:] = [LayerCache()] * shared
    return layers


def attending_layers(config: Any, where: str) -> list[bool]:
    """Return for each layer of a language model whether it keeps keys and values that scales of a KV cache are for.

    Raises:
        UnsupportedModelError: an encoder, attention that keeps one latent vector (MLA), or no layer with a KV cache.
    """
    text, expected = config.get_text_config(), "attention layers that cache keys and values"
    kept = [kind in ATTENDS for kind in _kinds(text)]
    found = "latent attention (MLA), which caches one vector" if getattr(text, "kv_lora_rank", None) else ""
    if found or not any(kept):
        raise UnsupportedModelError(f"{where}: KV cache", expected, found or "none", "Leave out --kv-cache-scheme.")
    return kept


def _kinds(text: Any) -> list[str]:
    """Return the kind of each layer. Without a list of them, all attend to everything, or to a sliding window."""
    kinds = getattr(text, "layer_types", None) or getattr(text, "layers_block_type", None)
    if kinds:
        return list(kinds)
    slides = getattr(text, "sliding_window", None) and getattr(text, "use_sliding_window", True)
    return ["sliding_attention" if slides else "full_attention"] * text.num_hidden_layers


def _attention_bytes(layer: Any, kind: str, where: str) -> int:
    """Return the bytes of a token in a layer that attends."""
    size = getattr(layer, "index_head_dim", None)
    if kind == "indexed_attention" and not size:
        raise UnsupportedModelError(f"{where}: indexer", "index_head_dim in config.json", "none", _HINT)
    index = size + INDEX_SCALE_BYTES if size else 0
    if rank := getattr(layer, "kv_lora_rank", None):
        return KEY_BYTES * (rank + layer.qk_rope_head_dim) + index
    heads = getattr(layer, "num_attention_heads", None) or getattr(layer, "n_head", None)
    hidden = getattr(layer, "hidden_size", None) or getattr(layer, "n_embd", None)
    if not heads or not hidden:
        raise UnsupportedModelError(f"{where}: KV cache", "num_attention_heads and hidden_size", "neither", _HINT)
    size = getattr(layer, "head_dim", None) or getattr(layer, "attention_head_dim", None) or hidden // heads
    values = getattr(layer, "v_head_dim", None) or size
    if kind == "full_attention" and not hasattr(layer, "per_layer_config"):
        # Gemma 4 before transformers had configurations of layers.
        size = values = getattr(layer, "global_head_dim", None) or size
        heads = getattr(layer, "num_global_key_value_heads", None) or heads
    return KEY_BYTES * _kv_heads(layer, heads) * (size + values) + index


def _kv_heads(layer: Any, heads: int) -> int:
    """Return the number of heads of keys and values."""
    if getattr(layer, "multi_query", False) and not getattr(layer, "new_decoder_architecture", False):
        return 1  # Falcon, GPT-BigCode
    return int(getattr(layer, "num_key_value_heads", None) or getattr(layer, "num_kv_heads", None) or heads)


def _state_bytes(layer: Any, kind: str, where: str) -> int:
    """Return the bytes of the states of a recurrent layer: of its convolution, and of its recurrence."""

    def get(name: str) -> Any:
        return getattr(layer, name, None)

    if kind == "conv" and get("conv_L_cache"):  # LFM2
        return KEY_BYTES * (get("conv_L_cache") - 1) * layer.hidden_size
    if get("linear_num_key_heads"):  # gated delta net: Qwen3-Next, OLMo hybrid
        keys = get("linear_num_key_heads") * get("linear_key_head_dim")
        values = get("linear_num_value_heads") * get("linear_value_head_dim")
        return _states(2 * keys + values, get("linear_conv_kernel_dim"), values * get("linear_key_head_dim"))
    if get("linear_num_heads"):  # Kimi linear
        width = get("linear_num_heads") * get("linear_head_dim")
        return _states(3 * width, get("linear_conv_kernel_dim"), width * get("linear_head_dim"))
    if get("mamba_n_heads") or get("mamba_num_heads"):  # Mamba-2: Falcon-H1, Bamba, Granite hybrid, Nemotron-H
        heads = get("mamba_n_heads") or get("mamba_num_heads")
        width = heads * (get("mamba_d_head") or get("mamba_head_dim"))
        size = get("mamba_d_state") or get("ssm_state_size")
        groups = get("mamba_n_groups") or get("n_groups")
        return _states(width + 2 * groups * size, get("mamba_d_conv") or get("conv_kernel"), width * size)
    if get("mamba_d_state") and get("mamba_expand"):  # Mamba-1: Jamba
        width = get("mamba_expand") * layer.hidden_size
        return _states(width, get("mamba_d_conv"), width * get("mamba_d_state"))
    expected = "a recurrence whose sizes config.json gives: gated delta net, Kimi linear, Mamba, short convolution"
    raise UnsupportedModelError(f"{where}: state of {kind}", expected, f"model type {layer.model_type}", _HINT)


def _states(channels: int, kernel: int, recurrent: int) -> int:
    return KEY_BYTES * channels * (kernel - 1) + STATE_BYTES * recurrent
