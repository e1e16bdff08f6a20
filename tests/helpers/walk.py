"""Compute a model one block at a time, in the way of the quantizer."""

import torch

from vllm_latq.quantize.model.decoder import Decoder


def walk_blocks(decoder: Decoder, tokens: torch.Tensor, batch_size: int) -> list[torch.Tensor]:
    """Return the hidden states of each batch after the last block."""
    batches = decoder.embed(tokens, batch_size)
    for index in range(len(decoder)):
        with decoder.block(index) as block:
            for batch in batches:
                batch.hidden = decoder.run(index, block, batch)
    return [batch.hidden for batch in batches]


def walk(decoder: Decoder, tokens: torch.Tensor, batch_size: int) -> torch.Tensor:
    """Return the logits."""
    batches = walk_blocks(decoder, tokens, batch_size)
    with decoder.head() as head, torch.no_grad():
        return torch.cat([head(hidden) for hidden in batches])
