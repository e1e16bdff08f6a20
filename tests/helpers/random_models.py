"""Tiny models of any family of transformers, with random weights."""

import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

# The sizes under the names that the families give them; sliding windows are on where the family has them.
SMALL: dict[str, Any] = {
    **dict.fromkeys(("hidden_size", "n_embd", "word_embed_proj_dim"), 32),
    **dict.fromkeys(("intermediate_size", "moe_intermediate_size", "n_inner", "ffn_dim"), 48),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "num_key_value_heads"), 2),
    **dict.fromkeys(("num_attention_heads", "n_head", "rotary_dim"), 4),
    **dict.fromkeys(("max_position_embeddings", "n_positions"), 64),
    **{"head_dim": 8, "vocab_size": 2048, "sliding_window": 8, "use_sliding_window": True, "max_window_layers": 1},
    **{"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2},
}
# A DeepSeek-V4 with each kind of attention and of expert layer.
SMALL_V4: dict[str, Any] = {
    **{"num_hidden_layers": 3, "num_key_value_heads": 1, "q_lora_rank": 16, "o_groups": 2, "o_lora_rank": 8},
    **{"n_routed_experts": 2, "num_experts_per_tok": 2, "hc_mult": 2, "qk_rope_head_dim": 4},
    **{"index_n_heads": 2, "index_head_dim": 8, "index_topk": 2, "swiglu_limit": 0.1},
    "layer_types": ["sliding_attention", "compressed_sparse_attention", "heavily_compressed_attention"],
    "mlp_layer_types": ["hash_moe", "moe", "moe"],
    "compress_rates": {"compressed_sparse_attention": 4, "heavily_compressed_attention": 8},
}


class RandomModels:
    """Makes tiny models of any family, with random weights, biases and norms, and the bundled tokenizer.

    Args:
        directory: where the models are saved, one folder per name.
        tokenizer: folder with tokenizer files for 2048 tokens.
    """

    def __init__(self, directory: Path, tokenizer: Path) -> None:
        self.directory, self.tokenizer = directory, tokenizer

    def __call__(self, model_type: str, name: str = "", **changes: Any) -> tuple[Path, Any]:
        """Save a model; return its directory, and the model (float32)."""
        from transformers import AutoConfig, AutoModelForCausalLM

        torch.manual_seed(0)
        # Falcon derives the size of a head and refuses an argument for it.
        sizes = {key: value for key, value in SMALL.items() if (model_type, key) != ("falcon", "head_dim")}
        config = AutoConfig.for_model(model_type, **sizes | changes)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(0.1 * torch.randn_like(parameter))
        target = self.directory / (name or model_type)
        model.save_pretrained(target)
        for file in ("tokenizer.json", "tokenizer_config.json"):
            shutil.copy(self.tokenizer / file, target)
        return target, model


def add_further_layer(directory: Path) -> None:
    """Add a layer that predicts a further token to a saved model of GLM-4 MoE's kind: its last block, a little changed.

    transformers leaves such a layer out. Embedding and head are stored once more in it, as the published models do.
    """
    tensors = load_file(directory / "model.safetensors")
    last = max(int(name.split(".")[2]) for name in tensors if name.startswith("model.layers."))
    block, further = f"model.layers.{last}.", f"model.layers.{last + 1}."
    hidden = tensors["model.norm.weight"].shape[0]
    added = {name.replace(block, further): 1.05 * tensor for name, tensor in tensors.items() if name.startswith(block)}
    added |= {f"{further}{norm}.weight": torch.ones(hidden) for norm in ("enorm", "hnorm", "shared_head.norm")}
    added[f"{further}eh_proj.weight"] = 0.1 * torch.randn(hidden, 2 * hidden)
    added[f"{further}embed_tokens.weight"] = tensors["model.embed_tokens.weight"].clone()
    added[f"{further}shared_head.head.weight"] = tensors["lm_head.weight"].clone()
    save_file(tensors | added, directory / "model.safetensors", metadata={"format": "pt"})
