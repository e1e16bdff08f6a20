"""Routed experts as ordinary linears, one set per expert, where transformers fuses them into two tensors per layer.

Invariant: for the same inputs the outputs equal those of transformers' own module with the "eager" implementation. Only
the storage of the weights differs, so each expert can have its own Hessian, scheme and scales. (Where the fused module
holds gate and up interleaved, as gpt-oss's, sums have another order.)
"""

import re
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import nn

from vllm_latq.errors import UnsupportedModelError

# Tensor of a fused module -> linears of an expert whose rows the tensor holds, one above the other or interleaved.
FUSED: Mapping[str, tuple[str, ...]] = {
    "gate_up_proj": ("gate_proj", "up_proj"),
    "up_proj": ("up_proj",),
    "down_proj": ("down_proj",),
}
BIAS = "_bias"  # ends the name of the tensor of a fused module that holds biases
# Names under which configurations have the number of experts that a token is sent to.
CHOSEN_EXPERTS = ("num_experts_per_tok", "num_experts_per_token", "top_k_experts", "moe_topk", "moe_top_k")
# A linear of a routed expert; the group is the name of its layer's experts.
EXPERT = re.compile(r"(.*\.experts)\.\d+\.")


class Expert(nn.Module):
    """One feed-forward network, with or without a gate; its weights are on the meta device.

    Args:
        hidden, intermediate: channels.
        first: name in FUSED of the tensor that would hold the linears that read the input.
        activate: maps the outputs of these linears, [n, intermediate] each, side by side, to [n, intermediate].
        dtype: of the weights.
        bias: whether the linears have one.
    """

    def __init__(
        self,
        hidden: int,
        intermediate: int,
        first: str,
        activate: Callable[[torch.Tensor], torch.Tensor],
        dtype: torch.dtype,
        bias: bool,
    ) -> None:
        super().__init__()
        self.first = first
        for leaf in FUSED[first]:
            self.add_module(leaf, nn.Linear(hidden, intermediate, bias, device="meta", dtype=dtype))
        self.down_proj = nn.Linear(intermediate, hidden, bias, device="meta", dtype=dtype)
        self._activate = activate

    @property
    def inputs(self) -> dict[str, list[nn.Linear]]:
        """Name of a tensor of FUSED -> the linears that the tensor would hold, which share an input."""
        readers: list[Any] = [self.get_submodule(leaf) for leaf in FUSED[self.first]]
        return {self.first: readers, "down_proj": [self.down_proj]}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map [n, hidden] to [n, hidden]."""
        return self.down_proj(self._activate(torch.cat([linear(x) for linear in self.inputs[self.first]], -1)))


class Experts(nn.ModuleList):
    """The experts of one layer, on the meta device: takes the place of a fused module, with its forward signature.

    Args:
        fused: a module of transformers with `gate_up_proj` [experts, 2 * intermediate, hidden], or without a gate
            `up_proj` [experts, intermediate, hidden], and `down_proj` [experts, hidden, intermediate], or with the last
            two dimensions exchanged; and perhaps biases [experts, rows], named as the tensors and BIAS. The module
            loses all of them.
        activate: see `Expert`.
    """

    def __init__(self, fused: Any, activate: Callable[[torch.Tensor], torch.Tensor]) -> None:
        self.gated = hasattr(fused, "gate_up_proj")
        first, dtype = "gate_up_proj" if self.gated else "up_proj", fused.down_proj.dtype
        count, hidden, intermediate = matrices_shape(fused, "down_proj")
        parameters = [leaf for leaf, _ in fused.named_parameters()]
        # A bound method keeps its module alive, so the weights are released and the activation is kept.
        for leaf in parameters:
            setattr(fused, leaf, None)
        bias = any(leaf.endswith(BIAS) for leaf in parameters)
        super().__init__(Expert(hidden, intermediate, first, activate, dtype, bias) for _ in range(count))

    def tokens(self, hidden: torch.Tensor, *_: torch.Tensor) -> torch.Tensor:
        """Return, from the arguments of `forward`, the tokens that any expert may be given, [tokens, hidden]."""
        return hidden

    def forward(self, hidden: torch.Tensor, index: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """Return the weighted sum of the chosen experts' outputs.

        Args:
            hidden: [tokens, hidden].
            index: int64 [tokens, k], experts of each token; a number that no expert has stands for none.
            weights: [tokens, k], of the experts' outputs.
        """
        # As in transformers, experts without a gate are summed in the dtype of the weights, and rounded once.
        output = torch.zeros_like(hidden, dtype=hidden.dtype if self.gated else weights.dtype)
        for number, expert in enumerate(self):
            token, choice = torch.where(index == number)
            if len(token):
                result = expert(hidden[token]) * weights[token, choice, None]
                output.index_add_(0, token, result.to(output.dtype))
        return output.to(hidden.dtype)


class InputScaledExperts(Experts):
    """Llama 4's experts: the router scales the input of an expert, not its output."""

    def tokens(self, hidden: torch.Tensor, *_: torch.Tensor) -> torch.Tensor:
        """Return the tokens that any expert is given: the rows that are not zero."""
        return hidden[hidden.any(-1)]

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        """Map [experts * tokens, hidden], all tokens for each expert and zeros where it was not chosen, to outputs."""
        given = hidden.view(len(self), -1, hidden.shape[-1])
        results = []
        for expert, own in zip(self, given, strict=True):
            chosen, result = own.any(-1), torch.zeros_like(own)
            if chosen.any():
                result[chosen] = expert(own[chosen])
            results.append(result)
        return torch.cat(results)


def split_experts(fused: Any, name: str) -> Experts:
    """Make the experts of one layer, to take the place of a fused module of transformers.

    Args:
        fused: see `Experts`; the module loses its weights.
        name: of the module, for errors.

    Raises:
        UnsupportedModelError: see `check_fused`.
    """
    check_fused(fused, name)
    gated = getattr(fused, "has_gate", True)
    if is_llama4(fused):
        return InputScaledExperts(fused, partial(_gate, fused.act_fn))
    if is_interleaved(fused):
        return Experts(fused, partial(_interleaved, fused._apply_gate))
    return Experts(fused, fused._apply_gate if gated else fused.act_fn.__call__)


def check_fused(fused: Any, name: str) -> None:
    """Raise UnsupportedModelError if a fused module has other parameters than `Experts` describes.

    Args:
        fused: see `Experts`.
        name: of the module, for errors.
    """
    gated, biased = getattr(fused, "has_gate", True), getattr(fused, "has_bias", False)
    weights = {"gate_up_proj" if gated else "up_proj", "down_proj"}
    expected = weights | ({f"{leaf}{BIAS}" for leaf in weights} if biased else set())
    parameters = {leaf for leaf, _ in fused.named_parameters()}
    # A module without this method may do anything between its products.
    known = is_llama4(fused) or hasattr(fused, "_apply_gate")
    if not known or parameters != expected:
        found = f"{type(fused).__name__} with parameters {', '.join(sorted(parameters))}"
        raise UnsupportedModelError(name, "experts that consist of linears, with or without a gate and biases", found)


def matrices_shape(fused: Any, leaf: str) -> tuple[int, int, int]:
    """Return (experts, rows, columns) of the matrices in a tensor of a fused module, transposed or not."""
    count, rows, columns = fused.get_parameter(leaf).shape
    return (count, columns, rows) if is_transposed(fused) else (count, rows, columns)


def is_llama4(fused: Any) -> bool:
    """Return whether a module is Llama 4's: its router scales inputs, and it holds its matrices transposed."""
    return type(fused).__name__ == "Llama4TextExperts"


def is_transposed(fused: Any) -> bool:
    """Return whether a fused module holds its matrices transposed, [columns, rows]."""
    return is_llama4(fused) or bool(getattr(fused, "is_transposed", False))


def is_interleaved(fused: Any) -> bool:
    """Return whether rows of gate and up alternate in a fused module, as in gpt-oss's."""
    return not getattr(fused, "is_concatenated", True)


def _interleaved(act: Callable[[torch.Tensor], torch.Tensor], gate_up: torch.Tensor) -> torch.Tensor:
    return act(torch.stack(gate_up.chunk(2, dim=-1), -1).flatten(-2))


def _gate(act: Callable[[torch.Tensor], torch.Tensor], gate_up: torch.Tensor) -> torch.Tensor:
    gate, up = gate_up.chunk(2, dim=-1)
    return up * act(gate)


def fused_experts(model: nn.Module) -> dict[str, dict[str, tuple[str, ...]]]:
    """Map the name of each module that holds several experts in one tensor to the tensors of FUSED that it has."""
    stacks = {
        name: {leaf for leaf, parameter in module.named_parameters(recurse=False) if parameter.dim() == 3}
        for name, module in model.named_modules()
    }
    parts = {name: {leaf: FUSED[leaf] for leaf in FUSED if leaf in leaves} for name, leaves in stacks.items()}
    return {name: found for name, found in parts.items() if found}
