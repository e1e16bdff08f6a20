"""The order of rows in which vLLM's models want a linear, where it is not the order in the checkpoint.

Such models permute weights by name and shape before any layer sees them, but do not permute packed tensors.

    llama4    q_proj, k_proj    each head [d / 2, 2] -> [2, d / 2]: the model rotates neighbours, vLLM rotates halves
    falcon    query_key_value   [KV heads, queries of each + 2, d] -> all queries, all keys, all values
    gpt_neox  query_key_value   [heads, 3, d] -> the same
"""

from typing import Any

import torch

Config = Any  # a configuration of transformers


def numbered(_: str, rows: int) -> torch.Tensor:
    """Return the stored rows of a matrix that vLLM wants in the stored order, int64 [rows]."""
    return torch.arange(rows, device="cpu")


def stored_order(config: Config, linear: str, rows: int) -> torch.Tensor:
    """Return the stored row for each row in vLLM's order, int64 [rows].

    Args:
        config: of the language model; None for a model that vLLM runs by the code of transformers.
        linear: name of the stored matrix.
        rows: number of rows of the matrix.
    """
    numbers, kind = torch.arange(rows, device="cpu"), (getattr(config, "model_type", None), linear.rpartition(".")[2])
    if kind == ("llama4_text", "q_proj"):
        return _halves(numbers, config.num_attention_heads)
    if kind == ("llama4_text", "k_proj"):
        return _halves(numbers, config.num_key_value_heads)
    if kind == ("falcon", "query_key_value"):
        heads = config.num_attention_heads
        groups = config.num_kv_heads if config.new_decoder_architecture else 1 if config.multi_query else heads
        return _grouped_by_kind(numbers, heads, groups)
    if kind == ("gpt_neox", "query_key_value"):
        return _grouped_by_kind(numbers, config.num_attention_heads, config.num_attention_heads)
    return numbers


def _halves(numbers: torch.Tensor, heads: int) -> torch.Tensor:
    return numbers.view(heads, -1, 2).transpose(1, 2).flatten()


def _grouped_by_kind(numbers: torch.Tensor, heads: int, groups: int) -> torch.Tensor:
    parts = numbers.view(groups, heads // groups + 2, -1).split([heads // groups, 1, 1], 1)
    return torch.cat([part.flatten() for part in parts])
