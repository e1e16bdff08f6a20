"""Labels drawn from a model's own predictions, as for the statistics of `latq`, and the gradients of their loss."""

import hashlib
from typing import Any

import torch
from torch import nn


def drawn_labels(logits: torch.Tensor, seed: int) -> torch.Tensor:
    """Draw a label per token from logits [n, tokens, vocabulary], each window by itself: int64 [n * tokens]."""
    labels = []
    for number, window in enumerate(logits.softmax(-1)):
        digest = hashlib.sha256(f"{seed} {number}".encode()).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "big") // 2)
        labels.append(torch.multinomial(window, 1, generator=generator))
    return torch.cat(labels).squeeze(1)


def one_backward_pass(
    model: Any, samples: torch.Tensor, seed: int, counted: torch.Tensor | None = None
) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """Return linear -> (inputs, gradients of its outputs) of all tokens, by one backward pass of the whole model.

    Linears that no gradient reaches are left out. The loss is that of the `counted` positions, or of all.
    """
    seen: dict[str, tuple[torch.Tensor, Any]] = {}

    def watch(name: str, linear: nn.Linear) -> None:
        def keep(_: nn.Module, arguments: tuple[torch.Tensor], output: torch.Tensor) -> None:
            if output.requires_grad:
                output.retain_grad()
                seen[name] = arguments[0], output

        linear.register_forward_hook(keep)

    for name, module in model.named_modules():
        if isinstance(module, nn.Linear):
            watch(name, module)
    logits = model(samples).logits
    labels = drawn_labels(logits.detach(), seed)
    losses = nn.functional.cross_entropy(logits.flatten(0, 1), labels, reduction="none")
    (losses if counted is None else losses[counted.flatten()]).sum().backward()
    return {name: (x.detach().flatten(0, -2), y.grad.flatten(0, -2)) for name, (x, y) in seen.items()}
