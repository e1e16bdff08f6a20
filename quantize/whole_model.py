"""Quantization against the loss of the whole model: statistics, then an allocation of bits, then block after block.

    collect_statistics  one pass forward and one backward  -> OUT.partial/scratch/statistics-*.safetensors
    allocate            one step size for the model         -> bits of every layer
    latq                each linear, from its statistics    -> shard on disk, records

Invariant: a layer's result depends on the model, the samples and the recipe only, not on other layers' results; so an
interrupted run goes on with the next block.
"""

import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict, replace
from typing import Any

import torch
from torch import nn

from vllm_latq.errors import ConfigError, UnsupportedModelError
from vllm_latq.quantize.allocation import Allocation, RateCurve, allocate, rate_curve
from vllm_latq.quantize.budget import choose, price
from vllm_latq.quantize.latq import (
    InputLattice,
    LatqResult,
    OutputLattice,
    input_lattice,
    latq,
    output_lattice,
    rate_aware_damping,
)
from vllm_latq.quantize.methods import BOUND_SLACK, LayerRecord
from vllm_latq.quantize.offload import Place
from vllm_latq.quantize.recipe import Recipe
from vllm_latq.quantize.run import Run
from vllm_latq.quantize.statistics import LayerStatistics, StatisticsFiles, collect_statistics
from vllm_latq.quantize.stream import Stream
from vllm_latq.quantize.target import output_energy


class StatisticsRun(Run):
    """A run that knows what the loss of the model sees of each linear before it quantizes the first."""

    def collect(self, samples: torch.Tensor | None) -> None:
        """Collect what is not there from an interrupted run."""
        assert samples is not None
        if self.world.size > 1:
            expected, found = "one process for a run that looks at the whole model", f"{self.world.size}"
            raise ConfigError("torchrun", expected, found, "Start it without torchrun, or use ssqr or hptq.")
        if self.decoder.routers:
            hint = "Use ssqr, hptq or gptq, which know how to treat experts."
            raise UnsupportedModelError(self.decoder.routers[0], "a model without routed experts", "a router", hint)
        self.files = StatisticsFiles(self.writer.scratch)
        shards = [shard for shard in range(len(self.decoder) + 1) if self._linears(shard)]
        if not self.files.complete(shards):
            self.emit({"event": "stage", "stage": "statistics", "samples": len(samples)})
            collect_statistics(self.decoder, samples, self.quantized, self.files, self.recipe.seed)

    def inputs(self) -> Iterator[tuple[dict[str, torch.Tensor], dict[str, LayerStatistics]]]:
        """Weights and statistics of the linears of one input after the other, through the whole model."""
        for shard in range(len(self.decoder) + 1):
            linears = self._linears(shard)
            if linears:
                with self._context(shard):
                    for members in self.groups(shard):
                        yield {name: _weight(linears[name]) for name in members}, members

    def groups(self, shard: int) -> Iterator[dict[str, LayerStatistics]]:
        """The statistics of a shard's linears, those of one input together."""
        statistics = self.files.read(shard)
        for leader in dict.fromkeys(statistics[name].group for name in self._linears(shard)):
            members = [name for name in self._linears(shard) if statistics[name].group == leader]
            yield {name: statistics[name].to(self.decoder.device) for name in members}


class WholeModelRun(StatisticsRun):
    """A run of the method `latq`."""

    def prepare(self, samples: torch.Tensor | None, place: Place) -> Stream:
        self.collect(samples)
        self.emit({"event": "stage", "stage": "allocation"})
        self.allocation = self._allocate()
        self.emit({"event": "plan", "step": self.allocation.step, "bits": dict(self.allocation.bits)})
        return Stream(self.decoder, None)

    def _allocate(self) -> Allocation:
        target = self.recipe.target_bits
        assert target is not None
        curves: dict[str, RateCurve] = {}
        for weights, members in self.inputs():
            outputs = self._output_lattices(members)
            inputs = self._input_lattice(members, self.recipe.damping)
            for name, weight in weights.items():
                curves[name] = rate_curve(weight, inputs, outputs[name], target)
        return allocate(curves, target, "allocation" not in self.recipe.without)

    def _output_lattices(self, members: Mapping[str, LayerStatistics]) -> dict[str, OutputLattice]:
        order, without = self.recipe.order, self.recipe.without
        return {name: output_lattice(layer, order, without, name) for name, layer in members.items()}

    def _input_lattice(self, members: Mapping[str, LayerStatistics], damping: float) -> InputLattice:
        leader, first = next(iter(members.items()))
        return input_lattice(first, self.recipe.order, damping, self.recipe.without, leader)

    def _quantize(
        self, shard: int, block: nn.Module, linears: Mapping[str, nn.Linear], stream: Stream
    ) -> tuple[list[dict[str, Any]], dict[str, torch.Tensor]]:
        records, tensors = {}, {}
        for members in self.groups(shard):
            weights = {name: _weight(linears[name]) for name in members}
            outputs, damping = self._output_lattices(members), self.recipe.damping
            if "rate-damping" not in self.recipe.without:
                gram = next(iter(members.values())).inputs
                damping = rate_aware_damping(self.allocation.step, list(weights.values()), gram, list(outputs.values()))
            inputs = self._input_lattice(members, damping)
            for name, weight in weights.items():
                started = time.perf_counter()
                step, bits = self.allocation.step, self.allocation.bits[name]
                result = latq(weight, inputs, outputs[name], step, bits, self.recipe.without, name)
                record = _record(name, weight, result, inputs, outputs[name], members[name])
                records[name] = asdict(record) | {"seconds": time.perf_counter() - started}
                tensors.update({f"{name}.{suffix}": tensor for suffix, tensor in result.weight.to_tensors().items()})
                self.emit({"event": "layer", **records[name]})
        return [records[name] for name in linears], tensors


class BudgetRun(StatisticsRun):
    """A run of `ssqr` under a budget of bits for the whole model: width and outlier rate per input."""

    def prepare(self, samples: torch.Tensor | None, place: Place) -> Stream:
        self.collect(samples)
        assert self.recipe.budget is not None
        offers = [price(weights, members, self.recipe) for weights, members in self.inputs()]
        self.chosen = choose(offers, self.recipe.budget)
        self.emit({"event": "plan", "bits": {name: choice.bits for name, choice in self.chosen.items()}})
        return super().prepare(samples, place)

    def recipe_for(self, name: str) -> Recipe:
        choice = self.chosen[name]
        return replace(self.recipe, budget=None, bits=choice.width, outlier_rate=choice.outlier_rate)


def _weight(linear: nn.Linear) -> torch.Tensor:
    return linear.weight.detach().to(torch.float32)


def _record(
    name: str,
    weight: torch.Tensor,
    result: LatqResult,
    inputs: InputLattice,
    outputs: OutputLattice,
    statistics: LayerStatistics,
) -> LayerRecord:
    """Measured on what is stored, with the undamped grams, in float64.

    `bound` is that of the loss, divided by the smallest eigenvalue that the damped G can have: with E H E^T >= 0,
    tr(E H E^T) <= tr(G E H E^T) / min eig(G). `expected_error` is exact for uniformly distributed residuals.
    """
    rows, cols = result.weight.row_scales.to(weight.device), result.weight.column_scales.to(weight.device)
    moved = result.rounding.z.to(torch.float32) * rows[:, None] * cols - weight
    error = output_energy(moved, statistics.inputs) * statistics.tokens
    energy = output_energy(weight, statistics.inputs) * statistics.tokens
    loss, start = 0.0, 0
    for gram in statistics.outputs:
        part = moved[start : start + len(gram)].to(torch.float64)
        loss += float(((gram.to(torch.float64) @ part @ statistics.inputs.to(torch.float64)) * part).sum()) / 2
        start += len(gram)
    loss_bound = result.rounding.bound / 2
    return LayerRecord(
        name=name,
        shape=(weight.shape[0], weight.shape[1]),
        bits=result.bits,
        outlier_density=0.0,
        error=error,
        relative_error=error / energy if energy else 0.0,
        rounding_error=error,
        bound=result.rounding.bound / outputs.ridge * statistics.tokens,
        expected_error=_expected_error(rows, cols, inputs, outputs) * statistics.tokens,
        bound_holds=loss <= loss_bound * (1 + BOUND_SLACK),
        damping=inputs.factor.damping,
        seconds=0.0,
        note=result.note,
        loss=loss,
        loss_bound=loss_bound,
    )


def _expected_error(rows: torch.Tensor, cols: torch.Tensor, inputs: InputLattice, outputs: OutputLattice) -> float:
    """Mean of tr(E H E^T) over residuals uniform in their steps: rows of V_G^-1 spread each residual over outputs."""
    columns = float(inputs.factor.diagonal @ cols[inputs.factor.order].to(torch.float64).square())
    spread, start = 0.0, 0
    for factor in outputs.factors:
        norms = factor.propagation(torch.float64).square().sum(1)
        spread += float(norms @ rows[start + factor.order].to(torch.float64).square())
        start += len(factor.order)
    return columns * spread / 12
