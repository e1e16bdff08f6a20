"""Stand-ins for decoder blocks: they tell what a model hands to its blocks, and let it go on from given hidden states.

Invariant: what was recorded suffices to run the blocks one after another; a model that does more between its blocks
than to pass hidden states on, and the mappings of `handed_on`, is refused.
"""

import inspect
from collections.abc import MutableMapping
from typing import Any

import torch
from torch import nn

from vllm_latq.errors import UnsupportedModelError
from vllm_latq.quantize.offload import Place


class Recorder(nn.Module):
    """Stands in for a block: keeps what it is called with, and returns NaN, which shows where it is used.

    Attributes:
        hidden, output: what it was given, and what it returned.
        arguments: all others; `mappings` are the names of those that blocks may fill for later ones.
    """

    called = False
    hidden: torch.Tensor
    output: torch.Tensor
    arguments: dict[str, Any]
    mappings: list[str]

    def __init__(self, block: nn.Module, as_tuple: bool) -> None:
        super().__init__()
        self.as_tuple = as_tuple
        self.signature = inspect.signature(block.forward)
        self.attributes = {name: value for name, value in vars(block).items() if not name.startswith("_")}

    def __getattr__(self, name: str) -> Any:
        # Models ask their blocks for plain attributes such as attention_type.
        attributes = self.__dict__.get("attributes", {})
        return attributes[name] if name in attributes else super().__getattr__(name)

    def forward(self, *args: Any, **kwargs: Any) -> torch.Tensor | tuple[torch.Tensor]:
        bound = self.signature.bind(*args, **kwargs).arguments
        for parameter in self.signature.parameters.values():
            if parameter.kind is parameter.VAR_KEYWORD:
                bound.update(bound.pop(parameter.name, {}))
        self.called, self.hidden = True, bound.pop("hidden_states")
        self.arguments = bound
        # Empty now, because no block has run.
        self.mappings = [name for name, value in bound.items() if isinstance(value, MutableMapping) and not value]
        self.output = torch.full_like(self.hidden, torch.nan)
        return (self.output,) if self.as_tuple else self.output

    def place_slices(self, place: Place) -> int:
        """Move arguments that are this block's part of a tensor with as many tokens to where hidden states wait.

        A view would keep those of all blocks in memory, on the device, until the last is done.

        Returns:
            Their bytes.
        """
        placed = 0
        for name, value in self.arguments.items():
            if isinstance(value, torch.Tensor) and value.dim() == 3 and value.shape[:2] == self.hidden.shape[-3:-1]:
                part = value.nbytes if value.untyped_storage().nbytes() > value.nbytes else 0
                self.arguments[name] = place(value.to("cpu", copy=True)) if part else value
                placed += part
        return placed

    def follows(self, before: "Recorder") -> bool:
        """Whether it was given what another returned, or a view of all of it."""
        given, returned = self.hidden, before.output
        same_kind = isinstance(given, torch.Tensor) and given.shape == returned.shape
        return same_kind and given.data_ptr() == returned.data_ptr()


class Given(Recorder):
    """Stands in for a block: returns the hidden states it was given."""

    given: torch.Tensor

    def forward(self, *args: Any, **kwargs: Any) -> torch.Tensor | tuple[torch.Tensor]:
        return (self.given,) if self.as_tuple else self.given


def check_recorded(recorders: list[Recorder], blocks: str) -> None:
    """Refuse a model whose blocks (their list is named `blocks`) get more from each other than hidden states."""
    hint = "Its blocks cannot be quantized one after another."
    for index, recorder in enumerate(recorders):
        where = f"{blocks}.{index}"
        if not recorder.called:
            raise UnsupportedModelError(
                where, "a block that every text passes through", "one that text alone skips", hint
            )
        if index and not recorder.follows(recorders[index - 1]):
            raise UnsupportedModelError(where, "the previous block's output as input", "another tensor", hint)
        for name, value in recorder.arguments.items():
            tensors = value if isinstance(value, list | tuple) else (value,)
            if any(isinstance(t, torch.Tensor) and t.is_floating_point() and t.isnan().any() for t in tensors):
                expected = "arguments that do not depend on other blocks"
                raise UnsupportedModelError(where, expected, f"{name}, which does", hint)


def shared(arguments: list[dict[str, Any]], first: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The arguments of a batch, with tensors equal to those of the first batch replaced by them, to save memory."""
    known: dict[int, Any] = {}

    def same(mine: Any, other: Any) -> Any:
        if isinstance(mine, tuple) and isinstance(other, tuple) and len(mine) == len(other):
            return tuple(same(a, b) for a, b in zip(mine, other, strict=True))
        if not isinstance(mine, torch.Tensor) or not isinstance(other, torch.Tensor):
            return mine
        if id(mine) not in known:
            known[id(mine)] = other if mine.shape == other.shape and torch.equal(mine, other) else mine
        return known[id(mine)]

    return [
        {name: same(value, theirs.get(name)) for name, value in mine.items()}
        for mine, theirs in zip(arguments, first, strict=True)
    ]
