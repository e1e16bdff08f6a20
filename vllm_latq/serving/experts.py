"""The operator that runs the experts of a mixture on packed weights, on any device: `latq::experts`.

    y[t] = sum over j of weights[t, j] * down_e(act(gate_e(x[t])) * up_e(x[t])),   e = ids[t, j]

Experts without a gate are down_e(act(up_e(x[t]))).

How many tokens an expert gets is known only when it runs, so a graph sees one opaque operator of fixed shapes.

    few tokens, on kernels    one launch per product for all experts; sizes depend on no id (kernels/experts/grouped)
    else                      each expert multiplies its own tokens; how many these are is read back once a layer
    else, in a CUDA graph     every expert multiplies all tokens, and what was not asked for is dropped

The last two multiply expert by expert, as `latq::linear` does.

Invariant: an id outside [0, experts) stands for an expert of another rank, and adds nothing. Sums over experts are
float32 and rounded once.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch.nn import functional

from vllm_latq.serving.layouts.tiled import grouped_experts
from vllm_latq.serving.linear import TILED, multiply, scale_columns
from vllm_latq.serving.operands import Operands

Activation = Callable[[torch.Tensor], torch.Tensor]
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


# By vLLM's names: outputs of the first product, [.., rows], -> inputs of the second.
ACTIVATIONS: Mapping[str, Activation] = {
    **{name: partial(_gated, act) for name, act in _SMOOTH.items()},
    **{f"{name}_no_mul": act for name, act in _SMOOTH.items()},
    "relu2_no_mul": _relu2,
}
_SCHEMA = (
    "(Tensor x, Tensor weights, Tensor ids, Tensor?[] gate_up, Tensor?[] down, int[] gate_up_constants, "
    "int[] down_constants, int experts, str[] layouts, str arch, str activation) -> Tensor"
)
Run = Callable[[torch.Tensor, int], torch.Tensor]


@dataclass(frozen=True)
class _Product:
    """x [n, cols] times the transposed weight of one of the experts.

    Attributes:
        column_scales: float32 [experts, cols], or None.
        tensors: those of `Operands`, [experts, ...] each, [1, ...] what all share, or None.
        constants, layout, arch: as `multiply` takes them.
    """

    column_scales: torch.Tensor | None
    tensors: list[torch.Tensor | None]
    constants: list[int]
    layout: str
    arch: str

    def __call__(self, x: torch.Tensor, expert: int) -> torch.Tensor:
        stacks = (self.column_scales, *self.tensors)
        scales, *tensors = (None if stack is None else stack[min(expert, len(stack) - 1)] for stack in stacks)
        return multiply(scale_columns(x, scales), tensors, self.constants, self.layout, self.arch)


def by_expert(x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor, experts: int, run: Run) -> torch.Tensor:
    """Each expert on its own tokens: float32 [tokens, rows]. Reads back from the device how many each has."""
    known = torch.where((ids >= 0) & (ids < experts), ids, experts).flatten()
    order = known.argsort(stable=True)
    counts = torch.bincount(known, minlength=experts + 1).tolist()
    y = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
    for expert, pairs in enumerate(order.split(counts)[:experts]):
        if len(pairs):
            tokens = pairs // ids.shape[1]
            y.index_add_(0, tokens, run(x[tokens], expert) * weights.flatten()[pairs].unsqueeze(1).to(torch.float32))
    return y


def by_all(x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor, experts: int, run: Run) -> torch.Tensor:
    """Each expert on all tokens, with sizes that depend on no id: float32 [tokens, rows]."""
    y = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
    for expert in range(experts):
        asked = ids == expert
        weight = weights.to(torch.float32).masked_fill(~asked, 0).sum(1, keepdim=True)
        # Not weighed by zero: what nobody asked for may be infinite.
        y += (run(x, expert) * weight).masked_fill(~asked.any(1, keepdim=True), 0)
    return y


torch.library.define("latq::experts", _SCHEMA)


@torch.library.impl("latq::experts", "CompositeExplicitAutograd")
def _experts(
    x: torch.Tensor,
    weights: torch.Tensor,
    ids: torch.Tensor,
    gate_up: list[torch.Tensor | None],
    down: list[torch.Tensor | None],
    gate_up_constants: list[int],
    down_constants: list[int],
    experts: int,
    layouts: list[str],
    arch: str,
    activation: str,
) -> torch.Tensor:
    products = ((gate_up, gate_up_constants), (down, down_constants))
    if all(layout == TILED for layout in layouts):
        y = grouped_experts(x, weights, ids, products, experts, arch, activation)
        if y is not None:
            return y
    first, second = (
        _Product(stacks[0], stacks[1:], constants, layout, arch)
        for layout, (stacks, constants) in zip(layouts, products, strict=True)
    )

    def run(tokens: torch.Tensor, expert: int) -> torch.Tensor:
        return second(ACTIVATIONS[activation](first(tokens, expert)), expert)

    local = next(len(stack) for stack in first.tensors if stack is not None)
    way = by_all if x.is_cuda and torch.cuda.is_current_stream_capturing() else by_expert
    return way(x, weights, ids, local, run).to(x.dtype)


@torch.library.register_fake("latq::experts")
def _experts_fake(x: torch.Tensor, *arguments: object) -> torch.Tensor:
    return torch.empty_like(x)


def expert_constants(gate_up: Operands, down: Operands, experts: int, activation: str) -> tuple[Any, ...]:
    """The last arguments of `run_experts`.

    Args:
        gate_up, down: operands of both stacks.
        experts: of all ranks.
        activation: one of ACTIVATIONS.
    """
    constants = [list(part.constants.values()) for part in (gate_up, down)]
    return *constants, experts, [gate_up.layout, down.layout], gate_up.arch or down.arch, activation


def run_experts(
    x: torch.Tensor,
    weights: torch.Tensor,
    ids: torch.Tensor,
    gate_up: list[torch.Tensor | None],
    down: list[torch.Tensor | None],
    *constants: Any,
) -> torch.Tensor:
    """The weighted sum of the chosen experts' outputs.

    Args:
        x: [tokens, hidden].
        weights: [tokens, k], of the outputs.
        ids: integers [tokens, k], the experts of each token.
        gate_up: column scales, float32 [experts, hidden] or None, and the tensors of `stack_operands` for the matrices
            [2 * intermediate, hidden], gate above up, or [intermediate, hidden] without a gate.
        down: the same for the matrices [hidden, intermediate].
        constants: from `expert_constants`.

    Returns:
        [tokens, hidden], dtype of x.
    """
    return torch.ops.latq.experts(x, weights, ids, gate_up, down, *constants)  # type: ignore[no-any-return]
