"""The statistics of one part of a model at a time, made again whenever they are needed, and never on disk.

    first:    tokens -> block 0 -> ... -> head                       inputs of every block are kept
              head -> ... -> block 1                                 gradients after each block take their place
    a sweep:  tokens -> block 0 -> ... -> head                       each block is run with gradients, from the tokens
                                                                     before it and the gradient after it

A sweep gives the same numbers as `fisher.collect_statistics`: the same tokens pass through the same weights. It takes
one more pass forward and backward, and the grams of one part in memory.

Invariant: hidden states and gradients take the room of those that `collect_statistics` keeps.
"""

from collections.abc import Collection
from typing import Any, NamedTuple

import torch
from torch import nn

from vllm_latq.quantize.calibration import fisher
from vllm_latq.quantize.calibration.fisher import Backpropagation, Stages, block_statistics, go_back, head_statistics
from vllm_latq.quantize.calibration.gram_sums import LayerSums, gram_bytes
from vllm_latq.quantize.machine.offload import return_freed_memory
from vllm_latq.quantize.model.carried_state import Batch
from vllm_latq.quantize.model.decoder import Decoder
from vllm_latq.quantize.model.parts import Part, model_parts

# Bytes of statistics above which they are made again rather than kept on disk. A run that makes them again passes the
# tokens through the model three times more, which is little beside the search for codes.
MOST_ON_DISK = 64 * 10**9


def made_again(decoder: Decoder, quantized: Collection[str]) -> bool:
    """Return whether the statistics of a model's linears are made again, because they would not fit a disk."""
    return statistics_bytes(decoder, quantized) > MOST_ON_DISK


def statistics_bytes(decoder: Decoder, quantized: Collection[str]) -> int:
    """Return the bytes of the tensors of all statistics: X^T X of every input, and G of every output."""
    return sum(sum(gram_bytes(part.linears)[:2]) for part in model_parts(decoder, quantized))


class _After(NamedTuple):
    """Gradients of some tokens after a block.

    Attributes:
        hidden: of the hidden states.
        handed_on: of all else that the block hands on, see `HandedOn.gradients`.
    """

    hidden: torch.Tensor
    handed_on: Any


class RecomputedStatistics:
    """The statistics of the wanted linears, a part at a time in the order of the model, as often as that is walked.

    Args:
        run: model and tokens. All its processes ask for the same parts.
        stages: gives the progress of the pass forward, the head and the pass backward.
    """

    def __init__(self, run: Backpropagation, stages: Stages = fisher.ignore_stages) -> None:
        self.run = run
        self._parts = run.parts()
        self._after = _gradients_after(run, stages)
        self._batches: list[Batch] = []
        self._next = len(self._after) + 1  # the part that the tokens of the sweep have reached

    def of(self, part: Part, module: nn.Module) -> dict[str, LayerSums]:
        """Return linear -> statistics of a part.

        Args:
            part: the part. A sweep begins again if it has passed the part.
            module: the part's module, with its own weights in memory.
        """
        if part.index < self._next:
            self._batches, self._next = self.run.embed(), 0
        for passed in self._parts[self._next : part.index]:
            with passed.weights() as block:
                self._advance(passed, block)
        hidden = [batch.hidden for batch in self._batches]
        if part.is_head:
            self._batches, self._next = [], part.index + 1
            return head_statistics(self.run, part, module, hidden)
        known = self._after[part.index]
        for batch, gradients in zip(self._batches, known, strict=True):
            batch.handed_on.gradients = gradients.handed_on
        after = [gradients.hidden for gradients in known]
        statistics = block_statistics(self.run, part, module, self._batches, hidden, after)
        self._advance(part, module)
        return statistics

    def _advance(self, part: Part, block: nn.Module) -> None:
        """Pass the tokens of the sweep through a block."""
        with torch.no_grad():
            for batch in self._batches:
                batch.hidden.copy_(part.run(block, batch))
                batch.arguments[part.index] = {}
                batch.handed_on.forget(part.index)
        return_freed_memory()
        self._next = part.index + 1


def _gradients_after(run: Backpropagation, stages: Stages) -> list[list[_After]]:
    """Return the gradients after each block, for each batch of this process's tokens."""
    forward, at_head, backward = map(stages, fisher.STAGES)
    batches, (*blocks, head) = run.embed(), run.parts()
    waiting = run.forward(batches, forward)
    at_head(0, 1)
    with head.weights() as module:
        head_statistics(run, Part(run.decoder, head.index, {}), module, waiting[-1])
    at_head(1, 1)
    found: list[list[_After]] = []
    for part in reversed(blocks):
        backward(len(blocks) - 1 - part.index, len(blocks))
        found.append(
            [_After(one, batch.handed_on.gradients) for one, batch in zip(waiting.pop(), batches, strict=True)]
        )
        if part.index > 0:  # nothing needs the gradient of the embeddings
            with part.weights() as block:
                for batch, hidden, after in zip(batches, waiting[-1], found[-1], strict=True):
                    hidden.copy_(go_back(part, block, batch, hidden, after.hidden))
            return_freed_memory()
    backward(len(blocks), len(blocks))
    return found[::-1]
