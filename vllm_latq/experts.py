"""Routed experts as ordinary linears, one set per expert, where transformers fuses them into two tensors per layer.

Invariant: same inputs, same numbers as transformers' own module with the "eager" implementation; only the storage of
the weights differs, so each expert can have its own Hessian, scheme and scales.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from vllm_latq.errors import UnsupportedModelError

PROJECTIONS = ("gate_proj", "up_proj", "down_proj")
FUSED = ("gate_up_proj", "down_proj")


class Expert(nn.Module):
    """One gated feed-forward network. `apply_gate` maps [n, 2 * intermediate] (gate, up) to [n, intermediate].

    Its weights are on the meta device, in the dtype given.
    """

    def __init__(
        self, hidden: int, intermediate: int, apply_gate: Callable[[torch.Tensor], torch.Tensor], dtype: torch.dtype
    ) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(hidden, intermediate, bias=False, device="meta", dtype=dtype)
        self.up_proj = nn.Linear(hidden, intermediate, bias=False, device="meta", dtype=dtype)
        self.down_proj = nn.Linear(intermediate, hidden, bias=False, device="meta", dtype=dtype)
        self._apply_gate = apply_gate

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[n, hidden] -> [n, hidden]."""
        return self.down_proj(self._apply_gate(torch.cat([self.gate_proj(x), self.up_proj(x)], dim=-1)))


class Experts(nn.ModuleList):
    """The experts of one layer, on the meta device: takes the place of a fused module, with its forward signature.

    Args:
        fused: a module of transformers with `gate_up_proj` [experts, 2 * intermediate, hidden] and `down_proj`
            [experts, hidden, intermediate].
        name: of that module, for errors.

    Raises:
        UnsupportedModelError: biases, transposed or interleaved weights, or experts without a gate.
    """

    def __init__(self, fused: Any, name: str) -> None:
        expected = {"has_gate": True, "has_bias": False, "is_transposed": False, "is_concatenated": True}
        layout = {flag: getattr(fused, flag, None) for flag in expected}
        shapes = {leaf: tuple(parameter.shape) for leaf, parameter in fused.named_parameters()}
        if layout != expected or set(shapes) != set(FUSED):
            found = f"{type(fused).__name__} with {layout} and parameters {', '.join(shapes)}"
            raise UnsupportedModelError(name, "gated experts without bias, gate and up one after the other", found)
        count, hidden, intermediate = shapes["down_proj"]
        dtype = fused.down_proj.dtype
        # A bound method keeps its module alive: hold on to the activation, let go of the weights.
        fused.gate_up_proj = fused.down_proj = None
        super().__init__(Expert(hidden, intermediate, fused._apply_gate, dtype) for _ in range(count))

    def forward(self, hidden: torch.Tensor, index: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """Sum of the chosen experts' outputs.

        Args:
            hidden: [tokens, hidden].
            index: int64 [tokens, k], experts of each token; one that does not exist stands for none.
            weights: [tokens, k], of their outputs.
        """
        output = torch.zeros_like(hidden)
        for number, expert in enumerate(self):
            token, choice = torch.where(index == number)
            if len(token):
                result = expert(hidden[token]) * weights[token, choice, None]
                output.index_add_(0, token, result.to(output.dtype))
        return output


def fused_experts(model: nn.Module) -> list[str]:
    """Names of the modules that hold the weights of several experts in one tensor."""
    return [
        name
        for name, module in model.named_modules()
        if any(leaf in FUSED and parameter.dim() == 3 for leaf, parameter in module.named_parameters(recurse=False))
    ]
