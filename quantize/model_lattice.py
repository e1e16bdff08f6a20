"""The lattices of all linears of a model, and the step they share: from statistics on disk, one input after the other.

    collect     one pass forward and one backward  -> FOLDER/statistics-*.safetensors
    allocation  one step size for the model        -> bits of every layer
    lattices    of the linears of one input, with the damping that this step asks for

Invariant: everything depends on the model, the samples and the recipe only. A quantization and the certificate of its
checkpoint get the same.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from vllm_latq.quantize.allocation import Allocation, RateCurve, allocate, rate_curve
from vllm_latq.quantize.decoder import Decoder
from vllm_latq.quantize.latq import InputLattice, OutputLattice, input_lattice, output_lattice, rate_aware_damping
from vllm_latq.quantize.offload import Place
from vllm_latq.quantize.recipe import Recipe
from vllm_latq.quantize.shards import shard_linears, shard_weights
from vllm_latq.quantize.statistics import LayerStatistics, StatisticsFiles, collect_statistics

# Names of the linears that read one input -> their weights, float32 [r, c], and their statistics.
InputGroup = tuple[dict[str, torch.Tensor], dict[str, LayerStatistics]]


@dataclass(frozen=True)
class ModelLattice:
    """The linears of a model as its loss sees them.

    Attributes:
        decoder: the model.
        quantized: full name -> linear of everything that the recipe quantizes.
        recipe: for order, damping, target and the parts that are switched off.
        folder: where the statistics go.
    """

    decoder: Decoder
    quantized: Mapping[str, nn.Linear]
    recipe: Recipe
    folder: Path

    @property
    def shards(self) -> list[int]:
        """Those with something to quantize; the head is shard `len(decoder)`."""
        every = range(len(self.decoder) + 1)
        return [shard for shard in every if shard_linears(self.decoder, self.quantized, shard)]

    def collect(self, samples: torch.Tensor, place: Place, starting: Callable[[], None] = lambda: None) -> None:
        """Collect the statistics, unless an interrupted run left them all; `starting` is called first if not."""
        files = StatisticsFiles(self.folder)
        if not files.complete(self.shards):
            starting()
            collect_statistics(self.decoder, samples, self.quantized, files, self.recipe.seed, place)

    def groups(self, shard: int) -> Iterator[dict[str, LayerStatistics]]:
        """The statistics of a shard's linears, those of one input together."""
        statistics = StatisticsFiles(self.folder).read(shard)
        names = list(shard_linears(self.decoder, self.quantized, shard))
        for leader in dict.fromkeys(statistics[name].group for name in names):
            members = [name for name in names if statistics[name].group == leader]
            yield {name: statistics[name].to(self.decoder.device) for name in members}

    def inputs(self) -> Iterator[InputGroup]:
        """Weights and statistics of the linears of one input after the other, through the whole model."""
        for shard in self.shards:
            linears = shard_linears(self.decoder, self.quantized, shard)
            with shard_weights(self.decoder, shard):
                for members in self.groups(shard):
                    yield {name: full_weight(linears[name]) for name in members}, members

    def allocation(self) -> Allocation:
        """The model's step, and the bits of each layer."""
        target = self.recipe.target_bits
        assert target is not None
        curves: dict[str, RateCurve] = {}
        for weights, members in self.inputs():
            inputs, outputs = self.lattices(weights, members, None)
            for name, weight in weights.items():
                curves[name] = rate_curve(weight, inputs, outputs[name], target)
        return allocate(curves, target, "allocation" not in self.recipe.without)

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


def full_weight(linear: nn.Linear) -> torch.Tensor:
    """What is quantized: the weight in float32, [r, c]."""
    return linear.weight.detach().to(torch.float32)
