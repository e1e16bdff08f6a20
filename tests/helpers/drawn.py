"""The labels that the loss of a whole model is taken at, as the statistics of `latq` draw them."""

import torch


def drawn_labels(logits: torch.Tensor, seed: int) -> torch.Tensor:
    """From the distributions of [n, tokens, vocabulary], each window on its own: int64 [n * tokens]."""
    labels = []
    for number, window in enumerate(logits.softmax(-1)):
        generator = torch.Generator().manual_seed(seed * 2**32 + number)
        labels.append(torch.multinomial(window, 1, generator=generator))
    return torch.cat(labels).squeeze(1)
