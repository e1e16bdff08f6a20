"""The parts of a run that a prediction adds up: stages, and the blocks of a model sorted into kinds.

Invariant: blocks of a kind have linears of the same shapes, in the same order, quantized or not.
"""

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

import torch

from vllm_latq.quantize.forecast.rehearsal import LiveBytes, timed
from vllm_latq.quantize.model.carried_state import Batch
from vllm_latq.quantize.model.decoder import Decoder
from vllm_latq.quantize.model.shards import all_shard_linears, shard_weights, untouched_names


@dataclass(frozen=True)
class Stage:
    """A part of a run: wall seconds, and bytes at most beyond the baseline."""

    seconds: float
    memory: float


@dataclass(frozen=True)
class Kind:
    """Blocks with the same linears.

    Attributes:
        shard: the first of them, or the number of blocks for the head.
        count: of them.
        advanced: of these, how many have something to quantize behind them.
        loading: seconds to load one.
        weights: bytes of its weights in the dtype of the computation.
        pages: bytes of its tensors in the mapped file, which are resident from the first read until it is closed.
    """

    shard: int
    count: int
    advanced: int
    loading: float
    weights: int
    pages: int

    @property
    def held(self) -> int:
        """Bytes while one of them is at work."""
        return self.weights + self.pages


def block_kinds(decoder: Decoder, quantized: Collection[str]) -> list[Kind]:
    """The kinds of a model's blocks, and its head if that is quantized; loads one of each, twice."""
    members: dict[object, list[int]] = {}
    last = max(shard for shard, linears in enumerate(all_shard_linears(decoder, quantized)) if linears)
    for index in range(len(decoder)):
        linears = decoder.linears(index).items()
        shapes = tuple((tuple(linear.weight.shape), name in quantized) for name, linear in linears)
        members.setdefault(shapes, []).append(index)
    kinds = [
        _kind(decoder, shards, sum(shard < last for shard in shards), decoder.stored_tensors(shards[0]))
        for shards in members.values()
    ]
    if last == len(decoder):
        kinds.append(_kind(decoder, [last], 0, untouched_names(decoder, last, ())))
    return kinds


def lead_to(index: int, decoder: Decoder, batches: Iterable[Batch]) -> None:
    """Run the blocks before one that is rehearsed, if it may read what they hand on beside hidden states."""
    waiting = [batch for batch in batches if batch.handed_on]
    # The head reads nothing of it.
    for earlier in range(waiting[0].handed_on.led, index) if waiting and index < len(decoder) else ():
        with decoder.block(earlier) as block, torch.no_grad():
            for batch in waiting:
                decoder.run(earlier, block, batch)
                batch.handed_on.led = earlier + 1


def stored_bytes(decoder: Decoder, names: Iterable[str]) -> int:
    """Of tensors as the model's files hold them."""
    sizes = [tensor.numel() * tensor.element_size() for tensor in map(decoder.store.get, names)]
    decoder.store.close()
    return sum(sizes)


def _kind(decoder: Decoder, shards: Sequence[int], advanced: int, stored: Iterable[str]) -> Kind:
    def load() -> int:
        with LiveBytes() as live, shard_weights(decoder, shards[0]):
            return live.now

    weights = load()
    _, seconds = timed(load)
    return Kind(shards[0], len(shards), advanced, seconds, weights, stored_bytes(decoder, stored))
