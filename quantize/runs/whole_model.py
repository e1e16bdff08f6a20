"""Quantization against the loss of the whole model: statistics, then an allocation of bits, then block after block.

    collect_statistics  one pass forward and one backward  -> OUT.partial/scratch/statistics-*.safetensors
    allocate            one price of a bit for the model    -> width of every unit of weights
    latq                each linear, from its statistics    -> shard on disk, records; then what is left is shared anew

With corrected targets the text then passes through the quantized blocks, as in `run`: inputs and targets are those
after the quantized prefix; gradients, step and bits stay those of the original model.

Invariant: a layer's result depends on the model, the samples, the recipe, the bits of what was written before and, with
corrected targets, its weights; so an interrupted run continues with the next block.
"""

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import NamedTuple

import torch
from torch import nn

from vllm_latq.quantize.allocation.model_lattice import ModelLattice, after_prefix, full_weight
from vllm_latq.quantize.allocation.rates import Allocation
from vllm_latq.quantize.calibration.fisher import Progress
from vllm_latq.quantize.calibration.hessian import InputHessian
from vllm_latq.quantize.calibration.stream import Stream, hessians_of
from vllm_latq.quantize.lattice.grams import LayerStatistics
from vllm_latq.quantize.machine.offload import Place
from vllm_latq.quantize.methods.latq import Share, latq, targeted
from vllm_latq.quantize.methods.record import layer_record
from vllm_latq.quantize.model.parts import Part
from vllm_latq.quantize.runs.progress import seconds_left
from vllm_latq.quantize.runs.run import Quantized, Records, Session


def plan_whole_model(session: Session, samples: torch.Tensor, place: Place) -> "WholeModelQuantizer":
    """Collect the statistics that an interrupted run did not leave, allocate the bits, and emit the plan.

    Args:
        session: the run.
        samples: token ids int64 [n, tokens], of all processes.
        place: moves hidden states to where they wait.
    """
    folder = session.writer.scratch
    lattice = ModelLattice(session.decoder, session.quantized, session.recipe, folder, session.world)
    lattice.collect(samples, place, partial(_progress, session))
    allocation = lattice.allocation(_progress(session, "allocation"))
    session.emit({"event": "plan", "bits": allocation.planned()})
    return WholeModelQuantizer(session, lattice, allocation)


def _progress(session: Session, stage: str) -> Progress:
    """Return a function that emits how much of a stage is done, and the seconds that the rest of it takes."""
    started = time.perf_counter()

    def emit(done: int, parts: int) -> None:
        nonlocal started
        now = time.perf_counter()
        started = started if done else now
        left = seconds_left(now - started, done, parts - done)
        session.emit({"event": "stage", "stage": stage, "done": done, "parts": parts, "seconds_left": left})

    return emit


class LatqInput(NamedTuple):
    """One input of a part.

    Attributes:
        members: linear -> its statistics.
        seen: the Hessian of the input after the quantized prefix; None where nothing passes through the blocks.
        shares: linear -> its share of the bits.
    """

    members: Mapping[str, LayerStatistics]
    seen: InputHessian | None
    shares: Mapping[str, Share]


@dataclass(frozen=True)
class WholeModelQuantizer:
    """Quantizes the linears of one input for the loss of the whole model, with their shares of its bits.

    Attributes:
        session: the run.
        lattice: the lattices of all linears.
        allocation: of the bits.
    """

    session: Session
    lattice: ModelLattice
    allocation: Allocation

    def inputs(self, part: Part, module: nn.Module, stream: Stream, earlier: Records) -> Sequence[LatqInput]:
        """Return the statistics of each input of the part, its Hessian after the quantized prefix, and its bits."""
        seen = hessians_of(stream, part, module)
        spent = {layer["name"]: layer["bits"] * math.prod(layer["shape"]) for layer in earlier}
        shares = self.allocation.shares(part.linears, spent)
        return [LatqInput(members, seen.get(next(iter(members))), shares) for members in self.lattice.groups(part)]

    def effort(self, one: LatqInput) -> int:
        """Return the work of an input: outputs * channels * (outputs + channels).

        The outputs are those whose gradients are correlated.
        """
        efforts = []
        for layer in one.members.values():
            channels = len(layer.inputs)
            efforts += [len(gram) * channels * (len(gram) + channels) for gram in layer.outputs]
        return sum(efforts)

    def quantize(self, one: LatqInput, part: Part) -> Quantized:
        """Quantize the linears of one input."""
        recipe, started = self.session.recipe, time.perf_counter()
        weights = {name: full_weight(part.linears[name]) for name in one.members}
        members, drift = after_prefix(self.lattice.on_device(one.members), one.seen)
        inputs, outputs = self.lattice.lattices(weights, members, self.allocation.step)
        targets = {name: targeted(weight, inputs, drift, recipe) for name, weight in weights.items()}
        corrected = {name: target.corrected for name, target in targets.items()}
        records, tensors = {}, {}
        for name, result in latq(corrected, inputs, outputs, one.shares):
            record = layer_record(name, targets[name], result, inputs, outputs[name], members[name])
            records[name] = asdict(record) | {"seconds": time.perf_counter() - started}
            tensors.update({f"{name}.{suffix}": tensor.cpu() for suffix, tensor in result.weight.to_tensors().items()})
            if recipe.target != "quantized":
                part.linears[name].weight.copy_(result.dequantized)
            self.session.emit({"event": "layer", **records[name]})
            started = time.perf_counter()
        return Quantized(records, tensors)
