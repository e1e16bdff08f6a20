"""The calibration text on its way through the blocks: what each linear is fed, and what the next block will see.

    hidden:    after the blocks quantized so far           -> Y, the inputs that the quantized model will have
    original:  after the same blocks with their own weights -> X, kept only for corrected targets

Invariant: inputs are always seen with the block's own weights in place; `advance` runs with those that were written.
"""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import partial

import torch
from torch import nn

from vllm_latq.errors import CalibrationError
from vllm_latq.models.experts import Experts
from vllm_latq.quantize.calibration.experts import complete_experts
from vllm_latq.quantize.calibration.hessian import HessianCollector, InputHessian, recording, reduce_hessians
from vllm_latq.quantize.calibration.last_writer import LastWriter, last_writer
from vllm_latq.quantize.machine.distributed import ALONE, World
from vllm_latq.quantize.machine.offload import Place
from vllm_latq.quantize.model.carried_state import Batch
from vllm_latq.quantize.model.decoder import Decoder

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
    """

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

    def inputs(self, shard: int, block: nn.Module, linears: Mapping[str, nn.Linear]) -> list[InputHessian]:
        """Hessians of the linears' inputs; carries the original stream past the block."""
        if not self.batches:
            return [InputHessian([name], torch.empty(0)) for name in linears]
        collector, routed = HessianCollector(), any(isinstance(module, Experts) for module in block.modules())
        writer = self._last_writer(shard, block, linears)
        last = {writer.name: linears[writer.name]} if writer else {}
        for position, batch in enumerate(self.batches):
            seen = self._original(position, shard, block, linears)
            with collector.watching(linears, seen), recording(last) as inputs:
                behind = self._run(shard, block, batch)
            if writer:
                assert self.originals is not None
                away = self.originals[position].hidden.float() - behind.float()
                collector.of(writer.name).add_residual(inputs[writer.name], away / writer.factor)
            elif not routed and position == 0:
                collector.stop_early()
        hessians = reduce_hessians(self.world, collector.hessians)
        hessians = complete_experts(
            block, linears, hessians, lambda: self._all(shard, block), partial(reduce_hessians, self.world)
        )
        reached = {name for hessian in hessians for name in hessian.linears}
        if missed := [name for name in linears if name not in reached]:
            hint = f"Its block does not call it on this text: leave it out, with --ignore {missed[0]}"
            raise CalibrationError(missed[0], "a linear that calibration tokens reach", "one that none reached", hint)
        return hessians

    def skip(self, shard: int, block: nn.Module) -> None:
        """Carry the original stream past a block whose inputs need not be seen again."""
        for position in range(len(self.batches)):
            self._original(position, shard, block, {})

    def advance(self, shard: int, block: nn.Module) -> None:
        """Carry the quantized stream past a block that holds its quantized weights."""
        for batch in self.batches:
            batch.hidden.copy_(self._run(shard, block, batch))
            batch.arguments[shard] = {}
        for batch in (*self.batches, *(self.originals or ())):
            batch.handed_on.forget(shard)

    def _last_writer(self, shard: int, block: nn.Module, linears: Mapping[str, nn.Linear]) -> LastWriter | None:
        if self.target != "residual" or shard == len(self.decoder) or not linears:
            return None
        # Found by the first process for all: it is a matter of a tolerance.
        return self.world.from_first(lambda: last_writer(linears, lambda: self._run(shard, block, self.batches[0])))

    def _all(self, shard: int, block: nn.Module) -> None:
        for batch in self.batches:
            self._run(shard, block, batch)

    def _original(
        self, position: int, shard: int, block: nn.Module, linears: Mapping[str, nn.Linear]
    ) -> dict[str, torch.Tensor] | None:
        """One batch of the original stream past the block: what each linear was fed, None without that stream."""
        if self.originals is None:
            return None
        batch = self.originals[position]
        with recording(linears) as seen:
            batch.hidden.copy_(self._run(shard, block, batch))
        return seen

    def _run(self, shard: int, block: nn.Module, batch: Batch) -> torch.Tensor:
        if shard < len(self.decoder):
            return self.decoder.run(shard, block, batch)
        # Nothing follows the head: its logits are not kept.
        block(batch.hidden.to(self.decoder.device))
        return batch.hidden


def hessians_of(
    stream: Stream, shard: int, block: nn.Module, linears: Mapping[str, nn.Linear]
) -> dict[str, InputHessian]:
    """Linear -> the Hessian of its input; none where nothing passes through the blocks."""
    hessians = stream.inputs(shard, block, linears) if stream else []
    return {name: hessian for hessian in hessians for name in hessian.linears}


def samples_per_batch(device: torch.device, tokens: int) -> int:
    """How many samples of so many tokens pass through a block at a time."""
    return max(1, (TOKENS_PER_CPU_BATCH if device.type == "cpu" else TOKENS_PER_BATCH) // tokens)


def model_hessians(decoder: Decoder, samples: torch.Tensor) -> Iterator[InputHessian]:
    """The Hessian of every input of a model's blocks, nothing quantized.

    Args:
        decoder: the model.
        samples: token ids int64 [n, tokens].
    """
    stream = Stream(decoder, samples)
    for index in range(len(decoder)):
        with decoder.block(index) as block, torch.no_grad():
            yield from stream.inputs(index, block, decoder.linears(index))
            if index + 1 < len(decoder):
                stream.advance(index, block)
