"""The activations of experts: each maps outputs of the first product to inputs of the second.

Names are vLLM's, except `swiglu`: it stands for all that vLLM makes of clamps and of an alpha and a beta.

Needs no Triton, so that it also serves devices without kernels.
"""

from collections.abc import Callable, Mapping
from functools import partial

import torch
from torch.nn import functional

Activation = Callable[..., torch.Tensor]
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


def _swiglu(gate_up: torch.Tensor, limit: float, alpha: float, beta: float) -> torch.Tensor:
    gate, up = gate_up.chunk(2, dim=-1)
    gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    return gate * torch.sigmoid(alpha * gate) * (up + beta)


def _swiglustep(gate_up: torch.Tensor, limit: float) -> torch.Tensor:
    gate, up = gate_up.chunk(2, dim=-1)
    return functional.silu(gate).clamp(max=limit) * up.clamp(-limit, limit)


# Name -> [.., 2 * n], gate before up, or [.., n] without a gate, -> [.., n]. Those of CONSTANTS also take constants.
ACTIVATIONS: Mapping[str, Activation] = {
    **{name: partial(_gated, act) for name, act in _SMOOTH.items()},
    **{f"{name}{UNGATED}": act for name, act in _SMOOTH.items()},
    f"relu2{UNGATED}": _relu2,
    "swiglu": _swiglu,
    "swiglustep": _swiglustep,
}
# Names of the constants that an activation takes. `limit` bounds up from both sides, and the gate from above: swiglu
# bounds the gate itself, multiplies the gate by alpha inside the sigmoid, and adds beta to up; swiglustep bounds
# silu(gate).
CONSTANTS: Mapping[str, tuple[str, ...]] = {"swiglu": ("limit", "alpha", "beta"), "swiglustep": ("limit",)}
