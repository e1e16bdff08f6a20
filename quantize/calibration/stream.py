"""The calibration text on its way through the blocks: the input of each linear, and what the next block will see.

    hidden:    after the blocks quantized so far           -> Y, the inputs that the quantized model will have
    original:  after the same blocks with their own weights -> X, kept only for corrected targets

Invariant: inputs are always seen with the block's own weights in place; `advance` runs with those that were written.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import torch
from torch import nn

from vllm_latq.errors import CalibrationError
from vllm_latq.models.experts import Experts
from vllm_latq.quantize.calibration.experts import complete_experts
from vllm_latq.quantize.calibration.hessian import HessianCollector, InputHessian, recording, reduce_hessians
from vllm_latq.quantize.calibration.kv_scales import KeyValueRanges
from vllm_latq.quantize.calibration.last_writer import LastWriter, last_writer
from vllm_latq.quantize.lattice.grams import SharedInput
from vllm_latq.quantize.machine.distributed import ALONE, World
from vllm_latq.quantize.machine.offload import Place
from vllm_latq.quantize.model.carried_state import Batch
from vllm_latq.quantize.model.decoder import Decoder
from vllm_latq.quantize.model.parts import Part, model_parts

# Tokens that pass through a block at a time: enough to keep the matmuls busy, small beside the block itself. On a CPU
# few enough for intermediates that the allocator keeps: gptq on a model of 3.7M parameters took 14.0 s of one core,
# against 17.4 s with 8192 (3.6 s of them page faults) and 16.5 s with 256.
TOKENS_PER_BATCH, TOKENS_PER_CPU_BATCH = 8192, 2048


class Stream:
    """Hidden states of all calibration samples, a block at a time.

    Args:
        decoder: whose blocks they pass.
        samples: token ids int64 [n, tokens]; None for no calibration, when there is nothing to see.
        target: of the recipe; but for "quantized", the original model's hidden states are carried along.
        world: the processes that share the run; `samples` are this one's.
        place: moves hidden states to where they wait between two blocks.

    Attributes:
        key_values: records the keys and values of the quantized blocks; None where nobody asks for them.
    """

    key_values: KeyValueRanges | None = None

    def __init__(
        self,
        decoder: Decoder,
        samples: torch.Tensor | None,
        target: str = "quantized",
        world: World = ALONE,
        place: Place = lambda hidden: hidden,
    ) -> None:
        self.decoder, self.target, self.world = decoder, target, world
        self.batches: list[Batch] = []
        if samples is not None:
            self.batches = decoder.embed(samples, samples_per_batch(decoder.device, samples.shape[1]), place)
        self.originals: list[Batch] | None = None
        if target != "quantized":
            self.originals = [
                replace(batch, hidden=place(batch.hidden.clone()), handed_on=batch.handed_on.nothing())
                for batch in self.batches
            ]

    def __bool__(self) -> bool:
        return bool(self.batches)

    def inputs(self, part: Part, module: nn.Module) -> list[InputHessian]:
        """Return the Hessians of the inputs of a part's linears, and carry the original stream past the part."""
        if not self.batches:
            return [InputHessian(SharedInput((name,)), torch.empty(0)) for name in part.linears]
        collector, routed = HessianCollector(), any(isinstance(one, Experts) for one in module.modules())
        writer = self._last_writer(part, module)
        last = {writer.name: part.linears[writer.name]} if writer else {}
        for position, batch in enumerate(self.batches):
            seen = self._original(position, part, module, part.linears)
            with collector.watching(part.linears, seen), recording(last) as inputs:
                after = part.run(module, batch)
            if writer:
                assert self.originals is not None
                away = self.originals[position].hidden.float() - after.float()
                collector.of(writer.name).add_residual(inputs[writer.name], away / writer.factor)
            elif not routed and position == 0:
                collector.stop_early()
        reduce = partial(reduce_hessians, self.world)
        hessians = reduce(collector.hessians)
        hessians = complete_experts(module, part.linears, hessians, lambda: self._all(part, module), reduce)
        reached = {name for hessian in hessians for name in hessian.shared.names}
        if missed := [name for name in part.linears if name not in reached]:
            hint = f"Its block does not call it on this text: leave it out, with --ignore {missed[0]}"
            raise CalibrationError(missed[0], "calibration tokens that reach this linear", "none", hint)
        return hessians

    def skip(self, part: Part, module: nn.Module) -> None:
        """Carry the original stream past a part whose inputs need not be seen again."""
        for position in range(len(self.batches)):
            self._original(position, part, module, {})

    def advance(self, part: Part, module: nn.Module) -> None:
        """Carry the quantized stream past a block that holds its quantized weights."""
        with nullcontext() if self.key_values is None else self.key_values.watching(part.index):
            for batch in self.batches:
                batch.hidden.copy_(part.run(module, batch))
                batch.arguments[part.index] = {}
        for batch in (*self.batches, *(self.originals or ())):
            batch.handed_on.forget(part.index)

    def _last_writer(self, part: Part, module: nn.Module) -> LastWriter | None:
        if self.target != "residual" or part.is_head or not part.linears:
            return None
        # The first process finds it for all of them: the answer depends on a tolerance.
        return self.world.from_first(lambda: last_writer(part.linears, lambda: part.run(module, self.batches[0])))

    def _all(self, part: Part, module: nn.Module) -> None:
        for batch in self.batches:
            part.run(module, batch)

    def _original(
        self, position: int, part: Part, module: nn.Module, linears: Mapping[str, nn.Linear]
    ) -> dict[str, torch.Tensor] | None:
        """Carry one batch of the original stream past a part; return each linear's input, None without that stream."""
        if self.originals is None:
            return None
        batch = self.originals[position]
        with recording(linears) as seen:
            batch.hidden.copy_(part.run(module, batch))
        return seen


class Visit(NamedTuple):
    """One part of a model on the walk over all of them.

    Attributes:
        part: the part.
        module: its module, with the weights in memory; None where nothing is quantized and nothing passes.
        advances: whether the stream is carried past the part afterwards.
    """

    part: Part
    module: nn.Module | None
    advances: bool


def walk(parts: Sequence[Part], stream: Stream) -> Iterator[Visit]:
    """Visit every part in order, and carry the stream past a part if a later one has linears.

    A stream that records keys and values passes all blocks.

    The weights of a module are in memory until the next part is asked for, and the stream passes the weights that the
    module has then.
    """
    for part in parts:
        wanted = stream.key_values is not None and not part.is_head
        advances = bool(stream) and (wanted or any(later.linears for later in parts[part.index + 1 :]))
        if not (part.linears or advances):
            yield Visit(part, None, False)
            continue
        with part.weights() as module, torch.no_grad():
            yield Visit(part, module, advances)
            if advances:
                stream.advance(part, module)


def hessians_of(stream: Stream, part: Part, module: nn.Module) -> dict[str, InputHessian]:
    """Return linear -> the Hessian of its input; empty where nothing passes through the blocks."""
    hessians = stream.inputs(part, module) if stream else []
    return {name: hessian for hessian in hessians for name in hessian.shared.names}


def samples_per_batch(device: torch.device, tokens: int) -> int:
    """Return how many samples of so many tokens pass through a block at a time."""
    return max(1, (TOKENS_PER_CPU_BATCH if device.type == "cpu" else TOKENS_PER_BATCH) // tokens)


def model_hessians(decoder: Decoder, samples: torch.Tensor) -> Iterator[InputHessian]:
    """Yield the Hessian of every input of a model's blocks, nothing quantized.

    Args:
        decoder: the model.
        samples: token ids int64 [n, tokens].
    """
    stream = Stream(decoder, samples)
    linears = [name for index in range(len(decoder)) for name in decoder.linears(index)]
    for part, module, _ in walk(model_parts(decoder, linears)[:-1], stream):
        if module is not None:
            yield from stream.inputs(part, module)
