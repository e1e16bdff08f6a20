"""Quantization against the loss of the whole model: statistics, then an allocation of bits, then block after block.

    collect_statistics  one pass forward and one backward  -> OUT.partial/scratch/statistics-*.safetensors
    allocate            one step size for the model         -> bits of every layer
    latq                each linear, from its statistics    -> shard on disk, records

With corrected targets the text then passes through the quantized blocks, as in `run`: inputs, and targets, are those
behind the quantized prefix; gradients, step and bits stay those of the original model.

Invariant: a layer's result depends on the model, the samples, the recipe and, with corrected targets, the weights that
were written before; so an interrupted run goes on with the next block.
"""

import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import nn

from vllm_latq.quantize.allocation.model_lattice import DAMPED_AT_MOST, ModelLattice, behind_prefix, full_weight
from vllm_latq.quantize.calibration.fisher import Progress
from vllm_latq.quantize.calibration.hessian import InputHessian
from vllm_latq.quantize.calibration.stream import Stream, hessians_of
from vllm_latq.quantize.lattice.grams import LayerStatistics
from vllm_latq.quantize.lattice.targets import Drift
from vllm_latq.quantize.machine.offload import Place
from vllm_latq.quantize.methods.latq import InputLattice, OutputLattice, aimed, latq
from vllm_latq.quantize.methods.record import layer_record
from vllm_latq.quantize.runs.progress import seconds_left
from vllm_latq.quantize.runs.run import Quantized, Run


@dataclass(frozen=True)
class _Rounded:
    """A linear's record, its stored tensors, and its weight, float32 [r, c], where text will pass through it."""

    record: dict[str, Any]
    tensors: dict[str, torch.Tensor]
    dequantized: torch.Tensor | None


@dataclass(frozen=True)
class _Attempt:
    """The linears of one input on one lattice: whether all meet their shares, and the bits that they count in all."""

    linears: dict[str, _Rounded]
    feasible: bool
    bits: float


class WholeModelRun(Run):
    """A run of the method `latq`: it knows what the loss sees of each linear before it quantizes the first."""

    def prepare(self, samples: torch.Tensor | None, place: Place) -> Stream:
        """Collect the statistics that an interrupted run did not leave, and allocate the bits."""
        assert samples is not None
        self.model = ModelLattice(self.decoder, self.quantized, self.recipe, self.writer.scratch, self.world)
        self.model.collect(samples, place, self.progress)
        self.allocation = self.model.allocation(self.progress("allocation"))
        self.emit({"event": "plan", "bits": {name: share.bits for name, share in self.allocation.items()}})
        return Stream(self.decoder, None) if self.recipe.target == "quantized" else super().prepare(samples, place)

    def progress(self, stage: str) -> Progress:
        """Return a function that emits how much of a stage is done, and the seconds that the rest of it takes."""
        started = time.perf_counter()

        def emit(done: int, parts: int) -> None:
            nonlocal started
            now = time.perf_counter()
            started = started if done else now
            left = seconds_left(now - started, done, parts - done)
            self.emit({"event": "stage", "stage": stage, "done": done, "parts": parts, "seconds_left": left})

        return emit

    def _quantize(
        self, shard: int, block: nn.Module, linears: Mapping[str, nn.Linear], stream: Stream
    ) -> tuple[list[dict[str, Any]], dict[str, torch.Tensor]]:
        seen = hessians_of(stream, shard, block, linears)
        return self._shared(
            lambda: self.model.groups(shard),
            _effort,
            lambda group: self._quantize_group(group, linears, seen),
            linears,
            stream,
        )

    def _quantize_group(
        self,
        group: Mapping[str, LayerStatistics],
        linears: Mapping[str, nn.Linear],
        seen: Mapping[str, InputHessian],
    ) -> Quantized:
        """Quantize the linears that read one input, damped as much as their shares need.

        Where H is ill-conditioned, what errors feed back can be more than codes take, whatever the scale.
        """
        weights = {name: full_weight(linears[name]) for name in group}
        members, drift = behind_prefix(self.model.moved(group), seen)
        inputs, outputs = self.model.lattices(weights, members, self.allocation[next(iter(group))].step)
        found, raised = self._rounded(weights, members, inputs, outputs, drift), 0
        for times in range(1, DAMPED_AT_MOST + 1):
            if found.feasible:
                break
            damped = self.model.damped(inputs, members, times)
            other = self._rounded(weights, members, damped, outputs, drift)
            if other.feasible or other.bits < found.bits:
                found, raised = other, times
        records, tensors = {}, {}
        for name, one in found.linears.items():
            note = f"damping raised {4**raised}-fold for its share of the bits" if raised else ""
            records[name] = one.record | {"note": "; ".join(filter(None, (note, one.record["note"])))}
            tensors.update({f"{name}.{suffix}": tensor for suffix, tensor in one.tensors.items()})
            if one.dequantized is not None:
                linears[name].weight.copy_(one.dequantized)
            self.emit({"event": "layer", **records[name]})
        return records, tensors

    def _rounded(
        self,
        weights: Mapping[str, torch.Tensor],
        members: Mapping[str, LayerStatistics],
        inputs: InputLattice,
        outputs: dict[str, OutputLattice],
        drift: Drift | None,
    ) -> _Attempt:
        """The linears of one input, on one lattice."""
        inputs, outputs = self.model.fitted(weights, inputs, outputs, self.allocation[next(iter(weights))])
        found, feasible, bits = {}, True, 0.0
        for name, weight in weights.items():
            started = time.perf_counter()
            share, aim = self.allocation[name], aimed(weight, inputs, drift, self.recipe)
            result = latq(aim.target, inputs, outputs[name], share, self.recipe.without, name)
            feasible, bits = feasible and result.spent <= share.bits, bits + result.spent * weight.numel()
            record = layer_record(name, aim, result, inputs, outputs[name], members[name], self.recipe, share.width)
            tensors = {suffix: tensor.cpu() for suffix, tensor in result.weight.to_tensors().items()}
            dequantized = None if self.recipe.target == "quantized" else result.dequantized
            found[name] = _Rounded(asdict(record) | {"seconds": time.perf_counter() - started}, tensors, dequantized)
        return _Attempt(found, feasible, bits)


def _effort(group: Mapping[str, LayerStatistics]) -> int:
    # Rounding takes outputs * channels * (outputs + channels), of outputs those whose gradients are correlated.
    efforts = []
    for layer in group.values():
        channels = len(layer.inputs)
        efforts += [len(gram) * channels * (len(gram) + channels) for gram in layer.outputs]
    return sum(efforts)
