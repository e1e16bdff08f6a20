"""The labels that the loss of a whole model is taken at, as the statistics of `latq` draw them."""

import hashlib

import torch


def drawn_labels(logits: torch.Tensor, seed: int) -> torch.Tensor:
    """From the distributions of [n, tokens, vocabulary], each window on its own: int64 [n * tokens]."""
    labels = []
    for number, window in enumerate(logits.softmax(-1)):
        digest = hashlib.sha256(f"{seed} {number}".encode()).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "big") // 2)
        labels.append(torch.multinomial(window, 1, generator=generator))
    return torch.cat(labels).squeeze(1)
