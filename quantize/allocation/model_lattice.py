"""The lattices of all linears of a model, and the step they share: from statistics, one input after the other.

    collect     one pass forward and one backward  -> FOLDER/statistics-*.safetensors; or, of a model whose statistics
                would not fit a disk, gradients, from which the statistics of one part at a time are made again
    allocation  what each price of a bit would take -> rates and bits; twice, as damping goes by the price
    lattices    of the linears of one input, with the damping that this step asks for

Invariant: everything depends on the model, the samples and the recipe only. A quantization and the certificate of its
checkpoint get the same, and so do the processes that share a run.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import nn

from vllm_latq.errors import ConfigError, naming
from vllm_latq.events import Progress, ignore_progress
from vllm_latq.quantize.allocation.kept_losses import FILE as LOSSES_FILE
from vllm_latq.quantize.allocation.kept_losses import KeptLosses, read_kept, write_kept
from vllm_latq.quantize.allocation.rates import Allocation
from vllm_latq.quantize.calibration.fisher import Backpropagation, Stages, collect_statistics, ignore_stages
from vllm_latq.quantize.calibration.fisher_files import StatisticsFiles
from vllm_latq.quantize.calibration.gram_sums import LayerSums
from vllm_latq.quantize.calibration.hessian import InputHessian
from vllm_latq.quantize.calibration.recomputed import RecomputedStatistics, made_again
from vllm_latq.quantize.lattice.factor import require_finite
from vllm_latq.quantize.lattice.grams import LayerStatistics
from vllm_latq.quantize.lattice.targets import Drift
from vllm_latq.quantize.machine.distributed import ALONE, World
from vllm_latq.quantize.machine.offload import Place
from vllm_latq.quantize.methods.latq import UnitLosses, unit_losses
from vllm_latq.quantize.methods.lattices import (
    InputLattice,
    OutputLattice,
    input_lattice,
    output_lattice,
    rate_aware_damping,
)
from vllm_latq.quantize.model.decoder import Decoder
from vllm_latq.quantize.model.parts import Part, model_parts
from vllm_latq.quantize.model.selection import unreached
from vllm_latq.quantize.recipe import Recipe

# Damping depends on the price of a bit, and the price on the damped lattices: the second allocation settles both.
ALLOCATIONS = 2
# Name of the stage.
ALLOCATION = "allocation"

# Statistics of the linears of one input; `on_device` makes them ready.
Members = Mapping[str, LayerStatistics | LayerSums]
T = TypeVar("T")


@dataclass(frozen=True)
class _Priced:
    """Losses of the linears of one input; without losses, the names of the linears that nothing reaches.

    Every process gets these from all others before one of them raises an error.
    """

    losses: Mapping[str, UnitLosses]
    unreached: tuple[str, ...] = ()


@dataclass
class ModelLattice:
    """The linears of a model as its loss sees them.

    Attributes:
        decoder: the model.
        quantized: full name -> linear of everything that the recipe quantizes.
        recipe: for bits and damping.
        folder: where the statistics go; all processes see it.
        world: the processes that share the work.
        counted: positions of the samples whose loss is taken, bool [n, tokens]; None for all.
    """

    decoder: Decoder
    quantized: Mapping[str, nn.Linear]
    recipe: Recipe
    folder: Path
    world: World = ALONE
    counted: torch.Tensor | None = None
    _again: RecomputedStatistics | None = field(default=None, init=False)

    @cached_property
    def parts(self) -> list[Part]:
        """The parts of the model with something to quantize."""
        return [part for part in model_parts(self.decoder, self.quantized) if part.linears]

    def collect(self, samples: torch.Tensor, place: Place, stages: Stages = ignore_stages) -> None:
        """Collect the statistics, unless an interrupted run left them all; ConfigError if it left another model's."""
        own = (self.decoder, samples, self.quantized, self.recipe.seed, place, self.world)
        run = Backpropagation(*own, counted=self.counted)
        if made_again(self.decoder, self.quantized):
            self._again = RecomputedStatistics(replace(run, scattered=True), stages)
            return
        files, parts = StatisticsFiles(self.folder), [part.index for part in self.parts]
        self._require_everywhere(self.folder.parent.is_dir)
        if not self.world.from_first(lambda: files.complete(parts)):
            collect_statistics(run, files, stages)
        self._require_everywhere(lambda: files.complete(parts))
        files.read(parts[0])
        for part in model_parts(self.decoder, self.quantized):
            if not part.linears:  # `groups` checks the others, once their tensors are read
                self._require_same(part, files.noted[parts[0]])

    def _require_everywhere(self, there: Callable[[], bool]) -> None:
        """Raise ConfigError on all processes if one does not see in the folder what is there."""

        def check() -> None:
            if not there():
                expected, found = "a folder that all processes see", f"nothing there for process {self.world.rank}"
                raise ConfigError(str(self.folder), expected, found, "Put OUT where all machines of the run mount it.")

        self.world.gather(check)

    def _require_same(self, part: Part, noted: Sequence[str]) -> None:
        """Raise ConfigError unless a part has the tensors of which statistics note the digests."""
        part.require_same(noted[part.index], self.decoder.digest(part.own_tensors()), self.folder)

    def groups(self, part: Part, module: nn.Module) -> list[Members]:
        """Return the statistics of a part's linears, with the linears of one input together.

        Args:
            part: the part. All processes ask for the same parts, in the order of the model.
            module: the part's module, with its own weights in memory.
        """
        if not part.linears:
            return []
        statistics: Members = self._again.of(part, module) if self._again else self._stored(part)
        leaders = dict.fromkeys(statistics[name].leader for name in part.linears)
        return [
            {name: statistics[name] for name in part.linears if statistics[name].leader == leader} for leader in leaders
        ]

    def _stored(self, part: Part) -> dict[str, LayerStatistics]:
        """Return the statistics of a part from its file."""
        files = StatisticsFiles(self.folder)
        statistics = files.read(part.index)
        self._require_same(part, files.noted[part.index])
        return statistics

    def on_device(self, members: Members) -> dict[str, LayerStatistics]:
        """Return the statistics of the linears of one input on the device of the model."""
        found: dict[str, LayerStatistics] = {}
        for name, layer in members.items():
            found[name] = layer.to(self.decoder.device)
            found[name] = replace(found[name], inputs=next(iter(found.values())).inputs)
        return found

    def of_inputs(
        self,
        make: Callable[[dict[str, torch.Tensor], dict[str, LayerStatistics]], T],
        progress: Progress = ignore_progress,
    ) -> list[T]:
        """Return `make(weights, statistics)` of every input, in the model's order.

        The processes share the inputs of each part, and all get everything. Weights are [r, c] in float32, and tensors
        are on the model's device.
        """
        made: list[T] = []
        for done, part in enumerate(self.parts):
            progress(done, len(self.parts))
            with part.weights() as module:
                made += self._of_part(part, self.groups(part, module), make)
        progress(len(self.parts), len(self.parts))
        return made

    def _of_part(
        self,
        part: Part,
        groups: list[Members],
        make: Callable[[dict[str, torch.Tensor], dict[str, LayerStatistics]], T],
    ) -> list[T]:
        """Return `make(weights, statistics)` of every input of a part, in the order of `groups`."""

        def make_mine() -> dict[str, T]:
            return {
                next(iter(members)): make(
                    {name: full_weight(part.linears[name]) for name in members}, self.on_device(members)
                )
                for members in self.world.mine(groups, effort, owner)
            }

        made = {leader: one for share in self.world.gather(make_mine) for leader, one in share.items()}
        return [made[next(iter(members))] for members in groups]

    def allocation(self, progress: Progress = ignore_progress) -> Allocation:
        """Return the allocation of the model's bits; ConfigError if the lowest rates take more."""
        if kept := self.kept():
            return self._allocated(_unit_losses(kept))
        step = None
        for round_ in range(ALLOCATIONS):

            def advance(done: int, parts: int, before: int = round_) -> None:
                progress(before * parts + done, ALLOCATIONS * parts)

            priced = self.of_inputs(partial(self._priced, step=step), advance)
            if names := [name for one in priced for name in one.unreached]:
                raise unreached(names, self.quantized, "activations and gradients of the loss")
            losses = {name: one for part in priced for name, one in part.losses.items()}
            allocation = self._allocated(losses)
            step = allocation.step
        layers: dict[str, Any] = {}
        tensors: dict[str, torch.Tensor] = {}
        for name, one in losses.items():
            layers[name] = one.weights, one.fixed_bits, one.outlying
            tensors |= {f"{name}.worth": one.worth.contiguous(), f"{name}.sizes": one.sizes.contiguous()}
        self.keep(layers, tensors)
        return allocation

    def _allocated(self, losses: Mapping[str, UnitLosses]) -> Allocation:
        """Return the allocation of the bits at these losses; ConfigError if the lowest rates take more."""
        allocation = Allocation(losses, self.recipe.bits * sum(one.weights for one in losses.values()))
        allocation.require_possible()
        return allocation

    def keep(self, layers: Mapping[str, Any], tensors: Mapping[str, torch.Tensor]) -> None:
        """Keep the losses of all linears for a resumed run, where statistics are made again."""
        if self._again:
            path = self.folder / LOSSES_FILE
            self.world.from_first(lambda: write_kept(path, KeptLosses(layers, tensors, self._digests())))

    def kept(self) -> KeptLosses | None:
        """Return what an interrupted run kept, if anything; ConfigError if it quantized another model."""
        path = self.folder / LOSSES_FILE
        if not self._again or not self.world.from_first(path.exists):
            return None
        return self.world.from_first(lambda: self._read(path))

    def _read(self, path: Path) -> KeptLosses:
        kept = read_kept(path)
        parts = model_parts(self.decoder, self.quantized)
        for part, noted, digest in zip(parts, kept.source, self._digests(), strict=True):
            part.require_same(noted, digest, self.folder)
        return kept

    def _digests(self) -> list[str]:
        """Return the digests of the tensors of each part; all of them were read before."""
        return [self.decoder.digest(part.own_tensors()) for part in model_parts(self.decoder, ())]

    def _priced(
        self, weights: Mapping[str, torch.Tensor], members: Mapping[str, LayerStatistics], step: float | None
    ) -> _Priced:
        if names := tuple(name for name, layer in members.items() if not layer.reached):
            return _Priced({}, names)
        return _Priced(unit_losses(weights, *self.lattices(weights, members, step)))

    def lattices(
        self, weights: Mapping[str, torch.Tensor], members: Mapping[str, LayerStatistics], step: float | None
    ) -> tuple[InputLattice, dict[str, OutputLattice]]:
        """Return both sides of the lattices of one input's linears; without a step, damping does not depend on it."""
        damping = self.recipe.damping
        outputs = {name: output_lattice(layer, name) for name, layer in members.items()}
        leader, first = next(iter(members.items()))
        if step is not None:
            damping = rate_aware_damping(step, list(weights.values()), first.inputs, list(outputs.values()))
        return input_lattice(first, damping, leader), outputs


def _unit_losses(kept: KeptLosses) -> dict[str, UnitLosses]:
    """Return the losses of units that `ModelLattice.allocation` kept."""
    return {
        name: UnitLosses(kept.tensors[f"{name}.worth"], kept.tensors[f"{name}.sizes"], *numbers)
        for name, numbers in kept.layers.items()
    }


def after_prefix(
    members: Mapping[str, LayerStatistics], hessian: InputHessian | None
) -> tuple[dict[str, LayerStatistics], Drift | None]:
    """Return the statistics of the linears of one input on what the quantized prefix gives, and the drift from the
    original model's input, means over tokens. Without a Hessian after the prefix they are unchanged, and None.

    Raises:
        NumericalError: the original model's activations are not finite.
    """
    if hessian is None or hessian.drift is None:
        return dict(members), None
    inputs, drift = hessian.matrix / hessian.tokens, hessian.drift.mean(hessian.tokens)
    with naming(hessian.shared.leader):
        for part in drift.sums:
            require_finite(part, "drift of the activations")
    return {name: replace(layer, inputs=inputs) for name, layer in members.items()}, drift


def effort(members: Members) -> int:
    """Return the work of an input: outputs * channels * (outputs + channels), summed over its linears.

    The outputs are those whose gradients are correlated.
    """
    efforts = []
    for layer in members.values():
        channels = layer.channels
        efforts += [len(gram) * channels * (len(gram) + channels) for gram in layer.outputs]
    return sum(efforts)


def owner(members: Members) -> int | None:
    """Return the process that alone has the statistics of an input; None if all have them."""
    return next(iter(members.values())).owner


def full_weight(linear: nn.Linear) -> torch.Tensor:
    """Return the weight to quantize, in float32, [r, c]."""
    return linear.weight.detach().to(torch.float32)
