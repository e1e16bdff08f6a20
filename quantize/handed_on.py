"""What blocks hand on: hidden states, and in some models more, to the next block or to any later one.

In Gemma 3n and Gemma 4 some blocks fill mappings, of keys and values that the last ones attend to. In GLM-5 and Zaya a
block returns what its indexer or its router found, too, and the next is called with it. Invariant: between two blocks
all of this waits on the CPU, without a graph, and so do its gradients.
"""

from collections import UserDict
from collections.abc import Callable, Iterable, Iterator, MutableMapping
from dataclasses import dataclass
from typing import Any

import torch

from vllm_latq.errors import UnsupportedModelError

# Name of the blocks' argument, key in it: where the block before returns it, that one's index.
_Place = tuple[str, Any]


class HandedOn:
    """What the blocks have handed on for a few samples, and once gradients are computed, those.

    Args:
        names: of the arguments of blocks that are such mappings.
        beside: name of the argument that is what the block before returned beside hidden states; "" for none.

    Attributes:
        led: how many blocks, from the first on, were run for what they hand on alone.
    """

    def __init__(self, names: Iterable[str] = (), beside: str = "") -> None:
        names = {*names, beside} - {""}
        self.mappings: dict[str, MutableMapping[Any, tuple[torch.Tensor, ...]]] = {name: UserDict() for name in names}
        self.beside = beside
        self._gradients: dict[_Place, list[torch.Tensor]] = {}
        self.led = 0

    def nothing(self) -> "HandedOn":
        """The same, before any block has run."""
        return HandedOn(self.mappings, self.beside)

    def arguments(self, index: int, own: dict[str, Any], device: torch.device) -> dict[str, Any]:
        """The arguments of block `index`, tensors on its device, and what earlier blocks handed on among them."""
        given: dict[str, Any] = {
            name: mapping for name, mapping in self.mappings.items() if name in own and name != self.beside
        }
        if self.beside in own and index - 1 in self.mappings[self.beside]:
            (given[self.beside],) = self.mappings[self.beside][index - 1]
        ready = own | given
        return {name: value.to(device) if isinstance(value, torch.Tensor) else value for name, value in ready.items()}

    def take(self, index: int, output: Any) -> torch.Tensor:
        """The hidden states in what block `index` returned; what is beside them waits for the next block."""
        if not isinstance(output, tuple):
            return output
        if self.beside:
            self.forget(index + 1)
            if len(output) > 1 and output[1] is not None:
                self.mappings[self.beside][index] = (output[1],)
        return output[0]

    def forget(self, index: int) -> None:
        """Drop what was returned for block `index` alone, which has run for the last time."""
        if self.beside:
            self.mappings[self.beside].pop(index - 1, None)

    def rest(self) -> None:
        """Move what was handed on to the CPU, away from the graph that made it."""
        for (name, key), tensors in list(self._entries()):
            self.mappings[name][key] = tuple(tensor.detach().to("cpu") for tensor in tensors)

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for _, tensors in self._entries() for tensor in tensors)

    def backward(self, gradient: torch.Tensor, run: Callable[..., torch.Tensor], *arguments: Any) -> None:
        """Run a block, and go back through it.

        Args:
            gradient: of its output. Those of what it hands on are known from the blocks behind it; those of what it
                reads are added to them.
            run: the block's forward pass, which reads and fills the mappings; takes `arguments`.
        """
        read: dict[_Place, tuple[torch.Tensor, ...]] = {}
        for (name, key), tensors in list(self._entries()):
            read[name, key] = tuple(tensor.detach().requires_grad_(tensor.is_floating_point()) for tensor in tensors)
            self.mappings[name][key] = read[name, key]
        results, gradients = [run(*arguments)], [gradient]
        for place, tensors in self._entries():
            if place in self._gradients:
                results += tensors
                gradients += [known.to(tensors[0].device) for known in self._gradients[place]]
        torch.autograd.backward(results, gradients)
        # Of what the block itself handed on nothing remains: only what it was given has a gradient.
        self._gradients = {
            place: [torch.zeros_like(tensor) if tensor.grad is None else tensor.grad for tensor in tensors]
            for place, tensors in read.items()
            if any(tensor.grad is not None for tensor in tensors)
        }
        self.rest()

    def _entries(self) -> Iterator[tuple[_Place, tuple[torch.Tensor, ...]]]:
        for name, mapping in self.mappings.items():
            for key, tensors in mapping.items():
                if not isinstance(tensors, tuple) or not all(isinstance(tensor, torch.Tensor) for tensor in tensors):
                    where, found = f"the blocks' argument {name}[{key!r}]", type(tensors).__name__
                    raise UnsupportedModelError(where, "tensors in a tuple, handed on to later blocks", found)
                yield (name, key), tensors


@dataclass
class Batch:
    """Hidden states of a few samples between two blocks.

    Attributes:
        tokens: how many these are.
        hidden: [samples, tokens, hidden_size], with a further dimension in models of several streams.
        arguments: keyword arguments of each block's forward (masks, rotary embeddings), by block index.
        handed_on: what blocks hand on to later ones beside hidden states.
        beside: bytes of arguments that wait where hidden states do.
    """

    tokens: int
    hidden: torch.Tensor
    arguments: list[dict[str, Any]]
    handed_on: HandedOn
    beside: int = 0
