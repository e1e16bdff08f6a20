"""State that blocks hand on: hidden states, and in some models more, to the next block or to any later one.

In Gemma 3n and Gemma 4 some blocks fill mappings, of keys and values that the last ones attend to. In GLM-5 and Zaya a
block returns what its indexer or its router found, too, and the next is called with it. Invariant: between two blocks
all of this waits where hidden states do, without a graph; its gradients wait on the CPU.
"""

from collections import UserDict
from collections.abc import Callable, Iterable, Iterator, MutableMapping
from dataclasses import dataclass
from typing import Any

import torch

from vllm_latq.errors import UnsupportedModelError
from vllm_latq.quantize.machine.offload import Place

# Name of the blocks' argument, key in it; of what the block before returned, that one's index.
_Place = tuple[str, Any]


class HandedOn:
    """The state that the blocks have handed on for a few samples, and its gradients once they are computed.

    Args:
        names: of the arguments of blocks that are such mappings.
        beside: name of the argument that is what the block before returned beside hidden states; "" for none.
        place: moves what waits to where it does.
    """

    def __init__(self, names: Iterable[str] = (), beside: str = "", place: Place = lambda tensor: tensor) -> None:
        self.mappings: dict[str, MutableMapping[Any, tuple[torch.Tensor, ...]]] = {name: UserDict() for name in names}
        self.beside = beside
        self._place = place
        self._returned: dict[int, torch.Tensor] = {}  # by the block
        self._given: torch.Tensor | None = None
        self.gradients: dict[_Place, list[torch.Tensor]] = {}
        self._waiting: set[int] = set()  # addresses

    def __bool__(self) -> bool:
        """Return whether blocks hand on anything beside hidden states."""
        return bool(self.mappings or self.beside)

    def nothing(self) -> "HandedOn":
        """The same, before any block has run."""
        return HandedOn(self.mappings, self.beside, self._place)

    def arguments(self, index: int, own: dict[str, Any], device: torch.device) -> dict[str, Any]:
        """The arguments of block `index`, tensors on its device, and what earlier blocks handed on among them."""
        ready = own | {name: mapping for name, mapping in self.mappings.items() if name in own}
        if self.beside in own and index - 1 in self._returned:
            ready[self.beside] = self._returned[index - 1]
        ready = {name: value.to(device) if isinstance(value, torch.Tensor) else value for name, value in ready.items()}
        self._given = ready.get(self.beside)
        return ready

    def take(self, index: int, output: Any) -> torch.Tensor:
        """The hidden states in what block `index` returned; what is beside them waits for the next block."""
        if not isinstance(output, tuple):
            return output
        if self.beside:
            self.forget(index + 1)
            beside = output[1] if len(output) > 1 else None
            if beside is not None:
                passed_on = beside is self._given and index - 1 in self._returned
                self._returned[index] = self._returned[index - 1] if passed_on else beside
            self._given = None
        return output[0]

    def forget(self, index: int) -> None:
        """Drop what was returned for block `index` alone, which has run for the last time."""
        self._returned.pop(index - 1, None)

    def rest(self) -> None:
        """Move what was handed on to where it waits, away from the graph that made it."""
        there, self._waiting = self._waiting, set()
        for place, tensors in list(self._entries()):
            waiting = [tensor.detach().to("cpu") for tensor in tensors]
            self._put(place, [tensor if tensor.data_ptr() in there else self._place(tensor) for tensor in waiting])
        self._waiting = {tensor.data_ptr() for _, tensors in self._entries() for tensor in tensors}

    def backward(self, gradient: torch.Tensor, run: Callable[..., torch.Tensor], *arguments: Any) -> None:
        """Run a block, and go back through it.

        Args:
            gradient: of its output. Those of what it hands on are known from the blocks behind it; those of what it
                reads are added to them.
            run: the block's forward pass, which reads and fills the mappings; takes `arguments`.
        """
        read: dict[_Place, list[torch.Tensor]] = {}
        for place, tensors in list(self._entries()):
            read[place] = [tensor.detach().requires_grad_(tensor.is_floating_point()) for tensor in tensors]
            self._put(place, read[place])
        results, gradients = [run(*arguments)], [gradient]
        for place, tensors in self._entries():
            for tensor, known in zip(tensors, self.gradients.get(place, ()), strict=False):
                if tensor.requires_grad:
                    results.append(tensor)
                    gradients.append(known.to(tensor.device))
        torch.autograd.backward(results, gradients)
        # Gradients remain only for the state that the block was given, not for the state that it handed on.
        self.gradients = {
            place: [torch.zeros_like(tensor) if tensor.grad is None else tensor.grad for tensor in tensors]
            for place, tensors in read.items()
            if any(tensor.grad is not None for tensor in tensors)
        }
        self.rest()

    def _entries(self) -> Iterator[tuple[_Place, tuple[torch.Tensor, ...]]]:
        returned = {self.beside: {index: (tensor,) for index, tensor in self._returned.items()}}
        for name, mapping in (self.mappings | returned).items():
            for key, tensors in mapping.items():
                if not isinstance(tensors, tuple) or not all(isinstance(tensor, torch.Tensor) for tensor in tensors):
                    kind = (tensors[0] if name == self.beside else tensors).__class__.__name__
                    expected = "a tensor, or tensors in a tuple, handed on to later blocks"
                    raise UnsupportedModelError(f"the blocks' argument {name}[{key!r}]", expected, kind)
                yield (name, key), tensors

    def _put(self, place: _Place, tensors: list[torch.Tensor]) -> None:
        name, key = place
        if name == self.beside:
            (self._returned[key],) = tensors
        else:
            self.mappings[name][key] = tuple(tensors)


@dataclass
class Batch:
    """Hidden states of a few samples between two blocks.

    Attributes:
        hidden: [samples, tokens, hidden_size], with a further dimension in models of several streams.
        arguments: keyword arguments of each block's forward (masks, rotary embeddings), by block index.
        handed_on: what blocks hand on to later ones beside hidden states.
    """

    hidden: torch.Tensor
    arguments: list[dict[str, Any]]
    handed_on: HandedOn
