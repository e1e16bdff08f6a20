"""Quantization against the loss of the whole model: statistics, then an allocation of bits, then block after block.

    collect_statistics  one pass forward and one backward  -> OUT.partial/scratch/statistics-*.safetensors
    allocate            one step size for the model         -> bits of every layer
    latq                each linear, from its statistics    -> shard on disk, records

With corrected targets the text then passes through the quantized blocks, as in `run`: inputs and targets are those
after the quantized prefix; gradients, step and bits stay those of the original model.

Invariant: a layer's result depends on the model, the samples, the recipe and, with corrected targets, the weights that
were written before; so an interrupted run continues with the next block.
"""

import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn

from vllm_latq.quantize.allocation.model_lattice import DAMPED_AT_MOST, ModelLattice, after_prefix, full_weight
from vllm_latq.quantize.calibration.fisher import Progress
from vllm_latq.quantize.calibration.hessian import InputHessian
from vllm_latq.quantize.calibration.stream import Stream, hessians_of
from vllm_latq.quantize.lattice.grams import LayerStatistics
from vllm_latq.quantize.lattice.targets import Drift
from vllm_latq.quantize.machine.offload import Place
from vllm_latq.quantize.methods.latq import InputLattice, OutputLattice, Share, latq, targeted
from vllm_latq.quantize.methods.record import layer_record
from vllm_latq.quantize.model.parts import Part
from vllm_latq.quantize.runs.progress import seconds_left
from vllm_latq.quantize.runs.run import Quantized, Session


@dataclass(frozen=True)
class _Rounded:
    """A linear's record, its stored tensors, and its weight, float32 [r, c], if text will pass through it."""

    record: dict[str, Any]
    tensors: dict[str, torch.Tensor]
    dequantized: torch.Tensor | None


@dataclass(frozen=True)
class _Attempt:
    """The linears of one input rounded on one lattice: whether all meet their shares, and the bits they take in all."""

    linears: dict[str, _Rounded]
    feasible: bool
    bits: float


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
    session.emit({"event": "plan", "bits": {name: share.bits for name, share in allocation.items()}})
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
    """

    members: Mapping[str, LayerStatistics]
    seen: InputHessian | None


@dataclass(frozen=True)
class WholeModelQuantizer:
    """Quantizes the linears of one input for the loss of the whole model, with their shares of its bits.

    Attributes:
        session: the run.
        lattice: the lattices of all linears.
        allocation: linear -> its share.
    """

    session: Session
    lattice: ModelLattice
    allocation: Mapping[str, Share]

    def inputs(self, part: Part, module: nn.Module, stream: Stream) -> Sequence[LatqInput]:
        """Return the statistics of each input of the part's linears, and its Hessian after the quantized prefix."""
        seen = hessians_of(stream, part, module)
        return [LatqInput(members, seen.get(next(iter(members)))) for members in self.lattice.groups(part)]

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
        """Quantize the linears of one input, damped as much as their shares need.

        Where H is ill-conditioned, the errors that are fed back can exceed what codes hold, at any scale.
        """
        weights = {name: full_weight(part.linears[name]) for name in one.members}
        members, drift = after_prefix(self.lattice.on_device(one.members), one.seen)
        inputs, outputs = self.lattice.lattices(weights, members, self.allocation[next(iter(one.members))].step)
        found, raised = self._rounded(weights, members, inputs, outputs, drift), 0
        for times in range(1, DAMPED_AT_MOST + 1):
            if found.feasible:
                break
            damped = self.lattice.damped(inputs, members, times)
            other = self._rounded(weights, members, damped, outputs, drift)
            if other.feasible or other.bits < found.bits:
                found, raised = other, times
        records, tensors = {}, {}
        for name, rounded in found.linears.items():
            note = f"damping raised {4**raised}-fold for its share of the bits" if raised else ""
            records[name] = rounded.record | {"note": "; ".join(filter(None, (note, rounded.record["note"])))}
            tensors.update({f"{name}.{suffix}": tensor for suffix, tensor in rounded.tensors.items()})
            if rounded.dequantized is not None:
                part.linears[name].weight.copy_(rounded.dequantized)
            self.session.emit({"event": "layer", **records[name]})
        return Quantized(records, tensors)

    def _rounded(
        self,
        weights: Mapping[str, torch.Tensor],
        members: Mapping[str, LayerStatistics],
        inputs: InputLattice,
        outputs: dict[str, OutputLattice],
        drift: Drift | None,
    ) -> _Attempt:
        """Round the linears of one input on one lattice."""
        inputs, outputs = self.lattice.fitted(weights, inputs, outputs, self.allocation[next(iter(weights))])
        found, feasible, bits = {}, True, 0.0
        for name, weight in weights.items():
            started = time.perf_counter()
            share, target = self.allocation[name], targeted(weight, inputs, drift, self.session.recipe)
            result = latq(target.corrected, inputs, outputs[name], share, self.session.recipe.without, name)
            feasible, bits = feasible and result.spent <= share.bits, bits + result.spent * weight.numel()
            record = layer_record(
                name, target, result, inputs, outputs[name], members[name], self.session.recipe, share.width
            )
            tensors = {suffix: tensor.cpu() for suffix, tensor in result.weight.to_tensors().items()}
            dequantized = None if self.session.recipe.target == "quantized" else result.dequantized
            found[name] = _Rounded(asdict(record) | {"seconds": time.perf_counter() - started}, tensors, dequantized)
        return _Attempt(found, feasible, bits)
