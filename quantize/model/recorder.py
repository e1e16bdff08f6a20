"""Stand-ins for decoder blocks: they tell what a model hands to its blocks, and let it go on from given hidden states.

Invariant: what was recorded suffices to run the blocks one after another; a model that does more between its blocks
than to pass on hidden states, and what else `handed_on` knows, is refused.
"""

import inspect
from collections.abc import Callable, Iterable, Mapping, MutableMapping
from itertools import pairwise
from typing import Any

import torch
from torch import nn

from vllm_latq.errors import UnsupportedModelError, summary
from vllm_latq.quantize.machine.offload import Place

_HINT = "Its blocks cannot be quantized one after another."


class Recorder(nn.Module):
    """Stands in for a block: keeps what it is called with, and returns NaN, which shows where it is used.

    Args:
        block: whose arguments it takes.
        outputs: how many things it returns in a tuple; 0 for hidden states that are in none.

    Attributes:
        hidden, output: what it was given, and what it returned.
        beside: what else it returns, if it returns two things.
        arguments: all others; `mappings` are the names of those that blocks may fill for later ones.
    """

    called = False
    hidden: torch.Tensor
    output: torch.Tensor
    arguments: dict[str, Any]
    mappings: list[str]

    def __init__(self, block: nn.Module, outputs: int) -> None:
        super().__init__()
        self.outputs = outputs
        self.beside = torch.full((), torch.nan)
        self.signature = inspect.signature(block.forward)
        self.attributes = {name: value for name, value in vars(block).items() if not name.startswith("_")}

    def __getattr__(self, name: str) -> Any:
        # Models ask their blocks for plain attributes such as attention_type.
        attributes = self.__dict__.get("attributes", {})
        return attributes[name] if name in attributes else super().__getattr__(name)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Keep the arguments of the call by their names, and return hidden states that no block has computed."""
        bound = self.signature.bind(*args, **kwargs).arguments
        for parameter in self.signature.parameters.values():
            if parameter.kind is parameter.VAR_KEYWORD:
                bound.update(bound.pop(parameter.name, {}))
        self.called, self.hidden = True, bound.pop(next(iter(self.signature.parameters)))
        self.arguments = bound
        # Empty now, because no block has run.
        self.mappings = [name for name, value in bound.items() if isinstance(value, MutableMapping) and not value]
        self.output = torch.full_like(self.hidden, torch.nan)
        return (self.output, self.beside)[: self.outputs] if self.outputs else self.output

    def place_slices(self, place: Place, tokens: torch.Size) -> None:
        """Move arguments that are this block's part of a tensor of all tokens [n, tokens] to where hidden states wait.

        A view would keep those of all blocks in memory, on the device, until the last is done.
        """
        for name, value in self.arguments.items():
            of_tokens = isinstance(value, torch.Tensor) and value.dim() == 3 and value.shape[:2] == tokens
            if of_tokens and value.untyped_storage().nbytes() > value.nbytes:
                self.arguments[name] = place(value.to("cpu", copy=True))

    def follows(self, before: "Recorder") -> bool:
        """Return whether it was given what another returned, or a view of all of it."""
        given, returned = self.hidden, before.output
        same_kind = isinstance(given, torch.Tensor) and given.shape == returned.shape
        return same_kind and given.data_ptr() == returned.data_ptr()


class Given(Recorder):
    """Stands in for a block: returns the hidden states it was given."""

    given: torch.Tensor

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Return the given hidden states in the form that the block returns."""
        return (self.given, None)[: self.outputs] if self.outputs else self.given


def record(
    blocks: Iterable[nn.Module], likely: int, run: Callable[[list[Recorder]], bool], where: str
) -> list[Recorder]:
    """Recorders of what a model calls its blocks with.

    Args:
        blocks: the model's own.
        likely: how many things they return, see `Recorder`; if the model cannot use these, others are tried.
        run: the model, with the recorders in place of its blocks; tells whether what it made has the tokens' shape.
        where: the blocks, for errors.

    Raises:
        UnsupportedModelError: whatever recorders return, the model fails.
    """
    blocks, found = list(blocks), []
    for outputs in sorted(range(3), key=lambda count: count != likely):
        recorders = [Recorder(block, outputs) for block in blocks]
        try:
            whole = run(recorders)
        except (AttributeError, LookupError, RuntimeError, TypeError, ValueError) as error:
            failure = error
            continue
        found = recorders
        reached = all(recorder.called for recorder in recorders)
        if not reached or (whole and all(now.follows(before) for before, now in pairwise(recorders))):
            break
    if not found:
        expected = "blocks that hand on hidden states, alone or first in a tuple of at most two"
        raise UnsupportedModelError(where, expected, summary(failure)) from failure
    return found


def _argument_beside(recorders: list[Recorder], blocks: str) -> str:
    """Name of the argument that is what the block before returned beside hidden states, taken out; "" for none.

    Args:
        recorders: of all blocks.
        blocks: name of their list, for errors.

    Raises:
        UnsupportedModelError: there are several such arguments.
    """
    names = set()
    for before, now in pairwise(recorders):
        for name, value in list(now.arguments.items()) if now.called else ():
            if value is before.beside:
                names.add(name)
                now.arguments[name] = None
    if len(names) > 1:
        expected = "one argument that is what the block before returned beside hidden states"
        raise UnsupportedModelError(blocks, expected, ", ".join(sorted(names)), _HINT)
    return "".join(names)


def check_recorded(recorders: list[Recorder], blocks: str) -> str:
    """Refuse a model whose blocks (their list is named `blocks`) get more from each other than can be carried on.

    Returns:
        Name of the argument that is what the block before returned beside hidden states; "" for none.
    """
    argument = _argument_beside(recorders, blocks)
    for index, recorder in enumerate(recorders):
        where = f"{blocks}.{index}"
        if not recorder.called:
            expected = "a block that every text passes through"
            raise UnsupportedModelError(where, expected, "one that text alone skips", _HINT)
        if index and not recorder.follows(recorders[index - 1]):
            raise UnsupportedModelError(where, "the previous block's output as input", "another tensor", _HINT)
        for name, value in recorder.arguments.items():
            if any(tensor.is_floating_point() and tensor.isnan().any() for tensor in _tensors(value)):
                expected = "arguments that do not depend on other blocks"
                raise UnsupportedModelError(where, expected, f"{name}, which does", _HINT)
    return argument


def _tensors(value: Any) -> list[torch.Tensor]:
    """The tensors that an argument is or holds."""
    values = value.values() if isinstance(value, Mapping) else value if isinstance(value, list | tuple) else (value,)
    return [one for one in values if isinstance(one, torch.Tensor)]


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
