"""The activations of experts, by vLLM's names: each maps outputs of the first product to inputs of the second.

Needs no Triton, so that it also serves devices without kernels.
"""

from collections.abc import Callable, Mapping
from functools import partial

import torch
from torch.nn import functional

Activation = Callable[[torch.Tensor], torch.Tensor]
UNGATED = "_no_mul"  # ends the name of an activation without a gate
_SMOOTH: Mapping[str, Activation] = {
    "silu": functional.silu,
    "gelu": functional.gelu,
    "gelu_tanh": partial(functional.gelu, approximate="tanh"),
}


def _gated(act: Activation, gate_up: torch.Tensor) -> torch.Tensor:
    gate, up = gate_up.chunk(2, dim=-1)
    return act(gate) * up


def _relu2(x: torch.Tensor) -> torch.Tensor:
    return functional.relu(x).square()


# Name -> [.., 2 * n], gate before up, or [.., n] without a gate, -> [.., n].
ACTIVATIONS: Mapping[str, Activation] = {
    **{name: partial(_gated, act) for name, act in _SMOOTH.items()},
    **{f"{name}{UNGATED}": act for name, act in _SMOOTH.items()},
    f"relu2{UNGATED}": _relu2,
}
