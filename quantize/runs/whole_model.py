"""Quantization against the loss of the whole model: statistics, then an allocation of bits, then block after block.

    collect             one pass forward and one backward  -> OUT.partial/scratch/statistics-*.safetensors, or gradients
                                                              from which statistics are made again, part by part
    allocate            one price of a bit for the model   -> width of every unit of weights
    latq                each linear, from its statistics   -> shard on disk, records; then what is left is shared anew

On grid "group", `allocate_widths` chooses a width for each linear, and `latq_on_groups` rounds.

With corrected targets the text then passes through the quantized blocks, as in `run`: inputs and targets are those
after the quantized prefix; gradients, step and bits stay those of the original model.

Invariant: a layer's result depends on the model, the samples, the recipe, the bits of what was written before and, with
corrected targets, its weights; so an interrupted run continues with the next block.
"""

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn

from vllm_latq.events import QUANTIZING, stage_progress
from vllm_latq.format.scheme import LayerScheme
from vllm_latq.quantize.allocation.model_lattice import (
    ALLOCATION,
    ALLOCATIONS,
    Members,
    ModelLattice,
    after_prefix,
    effort,
    full_weight,
    owner,
)
from vllm_latq.quantize.allocation.rates import Allocation
from vllm_latq.quantize.allocation.widths import WidthAllocation, allocate_widths
from vllm_latq.quantize.calibration.fisher import STAGES
from vllm_latq.quantize.calibration.hessian import InputHessian
from vllm_latq.quantize.calibration.recomputed import made_again
from vllm_latq.quantize.calibration.stream import Stream, hessians_of
from vllm_latq.quantize.machine.offload import Place
from vllm_latq.quantize.methods.group_grid import latq_on_groups
from vllm_latq.quantize.methods.latq import latq, targeted
from vllm_latq.quantize.methods.record import layer_record
from vllm_latq.quantize.model.parts import Part, model_parts
from vllm_latq.quantize.recipe import GROUP
from vllm_latq.quantize.runs.run import Quantized, Records, Session

# Expected time of the stages, as multiples of the time of one token in the two passes over a model of the same size:
# measured with the bundled model on a CPU. They only weigh the stages of a run against each other until it has measured
# its own times.
PASS_COSTS, ALLOCATION_COST, SEARCH_COST = (0.2, 0.2, 0.6), 2.5e4, 1e5


def expected_stages(session: Session, samples: torch.Tensor | None) -> list[dict[str, Any]]:
    """Return the stages of a run in order, with their parts and their expected shares of the time."""
    costs = {QUANTIZING: (len(session.quantized), SEARCH_COST)}
    if session.recipe.method == "latq" and samples is not None:
        blocks = len(session.decoder)
        parts = sum(bool(part.linears) for part in model_parts(session.decoder, session.quantized))
        passes = zip(STAGES, (blocks, 1, blocks), PASS_COSTS, strict=True)
        statistics = {stage: (count, samples.numel() * cost) for stage, count, cost in passes}
        # One pass more for each round of the allocation, and one while quantizing.
        again = samples.numel() * sum(PASS_COSTS) * made_again(session.decoder, session.quantized)
        rounds = 1 if session.recipe.grid == GROUP else ALLOCATIONS
        costs = {QUANTIZING: (len(session.quantized), SEARCH_COST + again)}
        costs = statistics | {ALLOCATION: (rounds * parts, ALLOCATION_COST + rounds * again)} | costs
    total = sum(cost for _, cost in costs.values())
    return [{"stage": stage, "parts": count, "share": cost / total} for stage, (count, cost) in costs.items()]


def plan_whole_model(session: Session, samples: torch.Tensor, place: Place) -> "WholeModelQuantizer":
    """Collect the statistics that an interrupted run did not leave, allocate the bits, and emit the plan.

    Args:
        session: the run.
        samples: token ids int64 [n, tokens], of all processes.
        place: moves hidden states to where they wait.
    """
    folder = session.writer.scratch
    own = (session.decoder, session.quantized, session.recipe, folder, session.world, session.counted)
    lattice = ModelLattice(*own)
    stages = partial(stage_progress, session.emit)
    lattice.collect(samples, place, stages)
    allocate = partial(allocate_widths, lattice) if session.recipe.grid == GROUP else lattice.allocation
    allocation = allocate(stages(ALLOCATION))
    session.emit({"event": "plan", "bits": allocation.planned()})
    return WholeModelQuantizer(session, lattice, allocation)


class LatqInput(NamedTuple):
    """One input of a part.

    Attributes:
        members: linear -> its statistics.
        seen: the Hessian of the input after the quantized prefix; None where nothing passes through the blocks.
        shares: linear -> its share of the bits, or its scheme.
    """

    members: Members
    seen: InputHessian | None
    shares: Mapping[str, Any]


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
    allocation: Allocation | WidthAllocation

    @property
    def schemes(self) -> Mapping[str, LayerScheme]:
        """Linear -> its scheme, where that is not the recipe's."""
        return self.allocation.schemes if isinstance(self.allocation, WidthAllocation) else {}

    def inputs(self, part: Part, module: nn.Module, stream: Stream, earlier: Records) -> Sequence[LatqInput]:
        """Return the statistics of each input of the part, its Hessian after the quantized prefix, and its bits."""
        groups = self.lattice.groups(part, module)
        seen = hessians_of(stream, part, module) if self.session.recipe.target != "quantized" else {}
        spent = {layer["name"]: layer["bits"] * math.prod(layer["shape"]) for layer in earlier}
        shares = self.allocation.shares(part.linears, spent)
        return [LatqInput(members, seen.get(next(iter(members))), shares) for members in groups]

    def effort(self, one: LatqInput) -> int:
        """Return the work of an input."""
        return effort(one.members)

    def owner(self, one: LatqInput) -> int | None:
        """Return the process that alone has the statistics of an input; None if all have them."""
        return owner(one.members)

    def quantize(self, one: LatqInput, part: Part) -> Quantized:
        """Quantize the linears of one input."""
        recipe, started = self.session.recipe, time.perf_counter()
        weights = {name: full_weight(part.linears[name]) for name in one.members}
        members, drift = after_prefix(self.lattice.on_device(one.members), one.seen)
        inputs, outputs = self.lattice.lattices(weights, members, self.allocation.step)
        targets = {name: targeted(weight, inputs, drift, recipe) for name, weight in weights.items()}
        corrected = {name: target.corrected for name, target in targets.items()}
        records, tensors = {}, {}
        rounding: Callable[..., Iterator[tuple[str, Any]]] = latq_on_groups if recipe.grid == GROUP else latq
        for name, result in rounding(corrected, inputs, outputs, one.shares):
            record = layer_record(name, targets[name], result, inputs, outputs[name], members[name])
            records[name] = asdict(record) | {"seconds": time.perf_counter() - started}
            tensors.update({f"{name}.{suffix}": tensor.cpu() for suffix, tensor in result.weight.to_tensors().items()})
            if recipe.passes_text:
                part.linears[name].weight.copy_(result.dequantized)
            self.session.emit({"event": "layer", **records[name]})
            started = time.perf_counter()
        return Quantized(records, tensors)
