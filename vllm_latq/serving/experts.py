"""The operator that runs the experts of a mixture on packed weights, on any device: `latq::experts`.

    y[t] = sum over j of weights[t, j] * down_e(act(gate_e(x[t])) * up_e(x[t])),   e = ids[t, j]

Experts without a gate are down_e(act(up_e(x[t]))). Each of the products may have a bias.

The number of tokens of an expert is known only when the operator runs, so a graph sees one opaque operator of fixed
shapes. It runs in one of three ways:

    few tokens, on kernels      one launch per product for all experts; sizes depend on no id (kernels/experts/grouped)
    otherwise                   each expert multiplies its own tokens; their numbers are read back once a layer
    otherwise, in a CUDA graph  every expert multiplies all tokens; results that no id asked for are dropped

The last two ways multiply expert by expert, as `latq::linear` does.

Invariant: an id outside [0, experts) stands for an expert of another rank, and adds nothing. Sums over experts are
float32 and rounded once.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch.nn import functional

from vllm_latq.kernels.experts.activations import ACTIVATIONS, Activation
from vllm_latq.serving.layouts.tiled import TiledOperands
from vllm_latq.serving.layouts.trellis import RingOperands
from vllm_latq.serving.linear import LAYOUTS, Operands, multiply

_SCHEMA = (
    "(Tensor x, Tensor weights, Tensor ids, Tensor?[] gate_up, Tensor?[] down, Tensor[] biases, "
    "int[] gate_up_constants, int[] down_constants, int experts, str[] layouts, str arch, str activation, "
    "float[] activation_constants) -> Tensor"
)
Run = Callable[[torch.Tensor, int], torch.Tensor]
PIECE = 1 << 15  # elements that torch processes on one CPU thread
GROUPED = (TiledOperands.layout, RingOperands.layout)  # layouts with a kernel for all experts at once


@dataclass(frozen=True)
class _Product:
    """The product of x [n, cols] with the transposed weight of one of the experts.

    Attributes:
        tensors: of the stacked operands: [experts, ...], or [1, ...] where all experts share a tensor, or None.
        constants, layout, arch: of the operands.
        bias: [experts, rows], is added to the product; None for no bias.
    """

    tensors: list[torch.Tensor | None]
    constants: list[int]
    layout: str
    arch: str
    bias: torch.Tensor | None

    def __call__(self, x: torch.Tensor, expert: int) -> torch.Tensor:
        tensors = [None if stack is None else stack[min(expert, len(stack) - 1)] for stack in self.tensors]
        y = multiply(x, tensors, self.constants, self.layout, self.arch)
        return y if self.bias is None else y + self.bias[expert]


def activate_rows(act: Activation, y: torch.Tensor) -> torch.Tensor:
    """Return act(y) for y [n, columns], computed so that the result of a row does not depend on n.

    On a CPU torch computes the last elements of a thread's share by other instructions, and takes other functions for
    tensors without gaps between rows. So this pads y by a column and a row, and cuts it into pieces of one thread each.
    """
    padded = functional.pad(y, (0, 1, 0, 1))[:, :-1]
    rows = max(1, PIECE // y.shape[1] - 1)
    pieces = (padded[start : start + rows + 1] for start in range(0, max(1, len(y)), rows))
    return torch.cat([act(piece)[:-1] for piece in pieces])


def by_expert(x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor, experts: int, run: Run) -> torch.Tensor:
    """Run each expert on its own tokens: float32 [tokens, rows]. Reads back from the device how many each has."""
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
    """Run each expert on all tokens, with sizes that depend on no id: float32 [tokens, rows]."""
    y = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
    for expert in range(experts):
        asked = ids == expert
        weight = weights.to(torch.float32).masked_fill(~asked, 0).sum(1, keepdim=True)
        # Masked, not multiplied by zero: outputs that no id asked for may be infinite.
        y += (run(x, expert) * weight).masked_fill(~asked.any(1, keepdim=True), 0)
    return y


class ExpertConstants(NamedTuple):
    """The last arguments of the operator, which are the same in every call.

    Attributes:
        gate_up, down: constants of the operands of both stacks.
        experts: number of experts of all ranks.
        layouts: of both stacks.
        arch: of the GPU, as the kernels' launch configurations call it.
        activation: one of ACTIVATIONS.
        activation_constants: of the activation, see CONSTANTS.
    """

    gate_up: list[int]
    down: list[int]
    experts: int
    layouts: list[str]
    arch: str
    activation: str
    activation_constants: list[float]


torch.library.define("latq::experts", _SCHEMA)


@torch.library.impl("latq::experts", "CompositeExplicitAutograd")
def _experts(
    x: torch.Tensor,
    weights: torch.Tensor,
    ids: torch.Tensor,
    gate_up: list[torch.Tensor | None],
    down: list[torch.Tensor | None],
    biases: list[torch.Tensor],
    *constants: Any,
) -> torch.Tensor:
    fixed = ExpertConstants(*constants)
    if fixed.layouts[0] == fixed.layouts[1] and fixed.layouts[0] in GROUPED:
        y = grouped_experts(x, weights, ids, gate_up, down, biases, fixed)
        if y is not None:
            return y
    bias, second_bias = biases or (None, None)
    first = _Product(gate_up, fixed.gate_up, fixed.layouts[0], fixed.arch, bias)
    invariant = bool(fixed.gate_up[-1])
    second = _Product(down, fixed.down, fixed.layouts[1], fixed.arch, second_bias)

    def act(y: torch.Tensor) -> torch.Tensor:
        return ACTIVATIONS[fixed.activation](y, *fixed.activation_constants)

    def run(tokens: torch.Tensor, expert: int) -> torch.Tensor:
        y = first(tokens, expert)
        return second(activate_rows(act, y) if invariant else act(y), expert)

    local = max(len(stack) for stack in first.tensors if stack is not None)
    way = by_all if x.is_cuda and torch.cuda.is_current_stream_capturing() else by_expert
    return way(x, weights, ids, local, run).to(x.dtype)


def grouped_experts(
    x: torch.Tensor,
    weights: torch.Tensor,
    ids: torch.Tensor,
    gate_up: list[torch.Tensor | None],
    down: list[torch.Tensor | None],
    biases: list[torch.Tensor],
    constants: ExpertConstants,
) -> torch.Tensor | None:
    """Run the operator on grouped kernels, with sizes that depend on no id; return None if there are too many tokens.

    Both stacks are in the same one of the layouts GROUPED. Arguments as for `run_experts`.
    """
    from vllm_latq.kernels.experts.grouped import routed_experts  # needs Triton, which a CPU installation may lack

    made = LAYOUTS[constants.layouts[0]]
    stacks: Any = (
        made.from_lists(gate_up, constants.gate_up, constants.arch),
        made.from_lists(down, constants.down, constants.arch),
    )
    both = (stacks[0].weight, stacks[1].weight)
    activation = constants.activation, constants.activation_constants
    return routed_experts(x, weights, ids, both, constants.experts, activation, biases)


@torch.library.register_fake("latq::experts")
def _experts_fake(x: torch.Tensor, *arguments: object) -> torch.Tensor:
    return torch.empty_like(x)


def expert_constants(
    gate_up: Operands, down: Operands, experts: int, activation: str, activation_constants: Sequence[float] = ()
) -> ExpertConstants:
    """Return the constants of two stacks of operands; arguments as the attributes of `ExpertConstants`."""
    layouts, arch = [gate_up.layout, down.layout], gate_up.arch or down.arch
    operands = gate_up.constants(), down.constants()
    return ExpertConstants(*operands, experts, layouts, arch, activation, list(activation_constants))


def run_experts(
    x: torch.Tensor,
    weights: torch.Tensor,
    ids: torch.Tensor,
    gate_up: list[torch.Tensor | None],
    down: list[torch.Tensor | None],
    biases: list[torch.Tensor],
    constants: ExpertConstants,
) -> torch.Tensor:
    """Return the weighted sum of the chosen experts' outputs.

    Args:
        x: [tokens, hidden].
        weights: [tokens, k], of the outputs.
        ids: integers [tokens, k], the experts of each token.
        gate_up: the tensors of `stack_operands` for the matrices [2 * intermediate, hidden], gate above up, or
            [intermediate, hidden] without a gate.
        down: the same for the matrices [hidden, intermediate].
        biases: [experts, rows] of each of the two, dtype of x, contiguous; empty for none.
        constants: from `expert_constants`.

    Returns:
        [tokens, hidden], dtype of x.
    """
    return torch.ops.latq.experts(x, weights, ids, gate_up, down, biases, *constants)  # type: ignore[no-any-return]
