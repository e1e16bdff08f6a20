"""The lattices of all linears of a model, and the step they share: from statistics on disk, one input after the other.

    collect     one pass forward and one backward  -> FOLDER/statistics-*.safetensors
    allocation  what each step would take          -> step and bits of every layer; twice, as damping goes by the step
    lattices    of the linears of one input, with the damping that this step asks for

Invariant: everything depends on the model, the samples and the recipe only. A quantization and the certificate of its
checkpoint get the same, and so do the processes that share a run.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import nn

from vllm_latq.errors import ConfigError
from vllm_latq.quantize.allocation.served_allocation import allocate_served, served_curves, served_lattices
from vllm_latq.quantize.allocation.stored_allocation import allocate, rate_curve
from vllm_latq.quantize.calibration.experts import expert_stacks
from vllm_latq.quantize.calibration.fisher import Progress, Stages, collect_statistics, unseen, unseen_stages
from vllm_latq.quantize.calibration.fisher_files import StatisticsFiles
from vllm_latq.quantize.calibration.hessian import InputHessian
from vllm_latq.quantize.lattice.factor import require_finite
from vllm_latq.quantize.lattice.grams import LayerStatistics
from vllm_latq.quantize.lattice.targets import Drift
from vllm_latq.quantize.machine.distributed import ALONE, World
from vllm_latq.quantize.machine.offload import Place
from vllm_latq.quantize.methods.latq import (
    InputLattice,
    OutputLattice,
    Share,
    input_lattice,
    output_lattice,
    rate_aware_damping,
)
from vllm_latq.quantize.model.decoder import Decoder
from vllm_latq.quantize.model.selection import unreached
from vllm_latq.quantize.model.shards import shard_linears, shard_weights
from vllm_latq.quantize.recipe import Recipe

# Enough for any lattice that was seen, twice over: next to nothing is fed back between inputs then.
DAMPED_AT_MOST = 8

# Names of the linears that read one input -> their weights, float32 [r, c], and their statistics.
InputGroup = tuple[dict[str, torch.Tensor], dict[str, LayerStatistics]]
T = TypeVar("T")
# Names of the linears that read one input -> a RateCurve, or where served bits are counted a ServedCurve per width.
Prices = Mapping[str, Any]


@dataclass(frozen=True)
class ModelLattice:
    """The linears of a model as its loss sees them.

    Attributes:
        decoder: the model.
        quantized: full name -> linear of everything that the recipe quantizes.
        recipe: for order, damping, target and the parts that are switched off.
        folder: where the statistics go; all processes see it.
        world: the processes that share the work.
    """

    decoder: Decoder
    quantized: Mapping[str, nn.Linear]
    recipe: Recipe
    folder: Path
    world: World = ALONE

    @property
    def shards(self) -> list[int]:
        """Those with something to quantize; the head is shard `len(decoder)`."""
        every = range(len(self.decoder) + 1)
        return [shard for shard in every if shard_linears(self.decoder, self.quantized, shard)]

    def collect(self, samples: torch.Tensor, place: Place, stages: Stages = unseen_stages) -> None:
        """Collect the statistics, unless an interrupted run left them all."""
        files, shards = StatisticsFiles(self.folder), self.shards
        self._require_everywhere(self.folder.parent.is_dir)
        if not self.world.from_first(lambda: files.complete(shards)):
            run = (self.decoder, samples, self.quantized, files, self.recipe.seed)
            collect_statistics(*run, place, self.world, stages)
        self._require_everywhere(lambda: files.complete(shards))

    def _require_everywhere(self, there: Callable[[], bool]) -> None:
        """Raise ConfigError on all processes if one does not see in the folder what is there."""

        def check() -> None:
            if not there():
                expected, found = "a folder that all processes see", f"nothing there for process {self.world.rank}"
                raise ConfigError(str(self.folder), expected, found, "Put OUT where all machines of the run mount it.")

        self.world.gather(check)

    def groups(self, shard: int) -> list[dict[str, LayerStatistics]]:
        """The statistics of a shard's linears, those of one input together."""
        names = list(shard_linears(self.decoder, self.quantized, shard))
        statistics = StatisticsFiles(self.folder).read(shard) if names else {}
        leaders = dict.fromkeys(statistics[name].group for name in names)
        return [{name: statistics[name] for name in names if statistics[name].group == leader} for leader in leaders]

    def inputs(self, shard: int) -> Iterator[InputGroup]:
        """Weights and statistics of a shard's linears, one input after the other, where the model computes."""
        linears = shard_linears(self.decoder, self.quantized, shard)
        with shard_weights(self.decoder, shard):
            for members in self.groups(shard):
                yield {name: full_weight(linears[name]) for name in members}, self.moved(members)

    def moved(self, members: Mapping[str, LayerStatistics]) -> dict[str, LayerStatistics]:
        """Statistics where the model computes."""
        return {name: layer.to(self.decoder.device) for name, layer in members.items()}

    def of_inputs(
        self, make: Callable[[dict[str, torch.Tensor], dict[str, LayerStatistics]], T], progress: Progress = unseen
    ) -> list[T]:
        """What `make` makes of the weights and statistics of every input, in the model's order; the processes share
        the shards, and all get everything; each one's progress is that of its own."""
        mine = self.shards[self.world.rank :: self.world.size]

        def make_mine() -> dict[int, list[T]]:
            made = {}
            for done, shard in enumerate(mine):
                progress(done, len(mine))
                made[shard] = [make(*group) for group in self.inputs(shard)]
            progress(len(mine), len(mine))
            return made

        made = {shard: of_shard for part in self.world.gather(make_mine) for shard, of_shard in part.items()}
        return [one for shard in self.shards for one in made[shard]]

    @property
    def allocations(self) -> int:
        """How many are made: damping goes by the step, and the step by what damped lattices take."""
        return 1 if "rate-damping" in self.recipe.without else 2

    def allocation(self, progress: Progress = unseen) -> dict[str, Share]:
        """Layer name -> what it gets of the model's bits."""
        step, shares = None, {}
        for round_ in range(self.allocations):

            def advance(done: int, parts: int, before: int = round_) -> None:
                progress(before * parts + done, self.allocations * parts)

            priced = self.of_inputs(partial(self._priced, step=step), advance)
            if names := [name for one in priced if isinstance(one, list) for name in one]:
                raise unreached(names, self.quantized, "activations and gradients of the loss")
            shares = self.share_out([one for one in priced if not isinstance(one, list)])
            step = next(iter(shares.values())).step
        return shares

    def _priced(
        self, weights: Mapping[str, torch.Tensor], members: Mapping[str, LayerStatistics], step: float | None
    ) -> Prices | list[str]:
        """Of the linears of one input, or the names of those that are not reached."""
        if names := [name for name, layer in members.items() if not layer.reached]:
            return names
        return self.price(weights, *self.lattices(weights, members, step))

    def price(
        self, weights: Mapping[str, torch.Tensor], inputs: InputLattice, outputs: Mapping[str, OutputLattice]
    ) -> Prices:
        """What the linears of one input would take at some steps."""
        target = self.recipe.target_bits
        assert target is not None
        if self.recipe.count == "served":
            return served_curves(weights, inputs, outputs, target)
        return {name: rate_curve(weight, inputs, outputs[name], target) for name, weight in weights.items()}

    def share_out(self, inputs: Sequence[Prices]) -> dict[str, Share]:
        """Share the recipe's target out over the linears of all inputs: layer name -> its share."""
        target = self.recipe.target_bits
        assert target is not None
        if self.recipe.count == "served":
            return allocate_served(inputs, expert_stacks(self.decoder.model, self.quantized), target)
        curves = {name: curve for linears in inputs for name, curve in linears.items()}
        return allocate(curves, target, "allocation" not in self.recipe.without)

    def fitted(
        self,
        weights: Mapping[str, torch.Tensor],
        inputs: InputLattice,
        outputs: dict[str, OutputLattice],
        share: Share,
    ) -> tuple[InputLattice, dict[str, OutputLattice]]:
        """The lattices with the steps that the linears of one input, which have one share, are rounded with."""
        return (inputs, outputs) if share.width is None else served_lattices(weights, inputs, outputs, share)

    def lattices(
        self, weights: Mapping[str, torch.Tensor], members: Mapping[str, LayerStatistics], step: float | None
    ) -> tuple[InputLattice, dict[str, OutputLattice]]:
        """Both sides of the lattices of one input's linears; no step, no damping that depends on it."""
        order, without, damping = self.recipe.order, self.recipe.without, self.recipe.damping
        outputs = {name: output_lattice(layer, order, without, name) for name, layer in members.items()}
        leader, first = next(iter(members.items()))
        if step is not None and "rate-damping" not in without:
            damping = rate_aware_damping(step, list(weights.values()), first.inputs, list(outputs.values()))
        return input_lattice(first, order, damping, without, leader), outputs

    def damped(self, inputs: InputLattice, members: Mapping[str, LayerStatistics], times: int) -> InputLattice:
        """The lattice of an input whose damping is quadrupled so many times."""
        leader, first = next(iter(members.items()))
        damping = inputs.factor.damping * 4.0**times
        return input_lattice(first, self.recipe.order, damping, self.recipe.without, leader)


def behind_prefix(
    members: Mapping[str, LayerStatistics], seen: Mapping[str, InputHessian]
) -> tuple[dict[str, LayerStatistics], Drift | None]:
    """The statistics of the linears of one input, with what the quantized prefix gives for it, and how far that is from
    the original model's, means over tokens; as they were, and None, where it was not seen.

    Raises:
        NumericalError: the original model's activations are not finite.
    """
    hessian = seen.get(next(iter(members)))
    if hessian is None or hessian.drift is None:
        return dict(members), None
    inputs, drift = hessian.matrix / hessian.tokens, hessian.drift.mean(hessian.tokens)
    for part in drift.sums:
        require_finite(part, "drift of the activations", hessian.linears[0])
    return {name: replace(layer, inputs=inputs) for name, layer in members.items()}, drift


def full_weight(linear: nn.Linear) -> torch.Tensor:
    """What is quantized: the weight in float32, [r, c]."""
    return linear.weight.detach().to(torch.float32)
