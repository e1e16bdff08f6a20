"""How long a run that looks at the whole model will take, and how much memory: its own stages, rehearsed.

    statistics     forward through all blocks, whose inputs are all kept; the head; backward
    allocation     both lattices of every linear, and its rate at a few steps
    quantization   the lattices again, with the damping of the model's step, and the search for the scale

Invariant: as in `prediction`: the run's own functions on one block of a kind and one batch; numbers only multiply.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import nn

from vllm_latq.format.config import SUPPORTED_BITS
from vllm_latq.format.served_size import served_overhead
from vllm_latq.quantize.allocation.model_lattice import ModelLattice, full_weight
from vllm_latq.quantize.calibration.fisher import TOKENS_PER_GRADIENT, block_gradients, head_gradients, label_seeds
from vllm_latq.quantize.calibration.fisher_files import StatisticsFiles
from vllm_latq.quantize.forecast.rehearsal import Cost, Rehearsal, measured, timed
from vllm_latq.quantize.forecast.stages import Kind, Stage, block_kinds, lead_to, stored_bytes
from vllm_latq.quantize.lattice.grams import LayerStatistics
from vllm_latq.quantize.lattice.targets import Drift
from vllm_latq.quantize.methods.latq import InputLattice, OutputLattice, Share, aimed, latq, stored_bits
from vllm_latq.quantize.methods.record import layer_record
from vllm_latq.quantize.model.carried_state import Batch
from vllm_latq.quantize.model.decoder import Decoder
from vllm_latq.quantize.model.shards import shard_linears, shard_weights, untouched_names
from vllm_latq.quantize.recipe import Recipe


def lattice_stages(
    decoder: Decoder, recipe: Recipe, quantized: Mapping[str, nn.Linear], samples: torch.Tensor, folder: Path
) -> dict[str, Stage]:
    """Stages of such a run.

    Args:
        decoder: the model.
        recipe: what to do.
        quantized: full name -> linear of what is quantized.
        samples: token ids int64 [n, tokens].
        folder: an empty one, for the statistics of the blocks that are rehearsed.
    """
    size = max(1, TOKENS_PER_GRADIENT // samples.shape[1])
    few = samples[:size]
    share = len(samples) / len(few)
    batches, embedding = measured(lambda: decoder.embed(few, size))
    one = share * sum(batch.hidden.nbytes for batch in batches)
    outside = stored_bytes(decoder, untouched_names(decoder, len(decoder), quantized))
    rest = (len(decoder) + 1) * one + share * sum(batch.beside for batch in batches)
    collecting = Stage(share * embedding.seconds, one + outside + embedding.peak)
    kinds = block_kinds(decoder, quantized)
    for kind in kinds:
        collecting = _sum(collecting, _statistics(decoder, quantized, batches, kind, recipe, folder, share), rest, kind)
    head = _head(decoder, batches, recipe, folder, share)
    collecting = Stage(collecting.seconds + head.seconds, max(collecting.memory, rest + outside + head.memory))
    # What blocks hand on beside hidden states, and its gradients.
    handed_on = 2 * share * sum(batch.handed_on.nbytes for batch in batches)
    stages = {"statistics": Stage(collecting.seconds, collecting.memory + handed_on)}
    if recipe.method == "latq":
        model = ModelLattice(decoder, quantized, recipe, folder)
        allocation, rounding = Stage(0.0, 0.0), Stage(0.0, 0.0)
        for kind in kinds:
            priced, rounded = _layers(model, kind)
            for _ in range(model.allocations):
                allocation = _sum(allocation, priced, 0, kind)
            rounding = _sum(rounding, rounded, 0, kind)
        stages |= {"allocation": allocation, "quantization": rounding}
    return stages


def _sum(sofar: Stage, one: Stage, rest: float, kind: Kind) -> Stage:
    return Stage(sofar.seconds + kind.count * one.seconds, max(sofar.memory, rest + one.memory))


def _statistics(
    decoder: Decoder,
    quantized: Mapping[str, nn.Linear],
    batches: list[Batch],
    kind: Kind,
    recipe: Recipe,
    folder: Path,
    share: float,
) -> Stage:
    """Of one block of a kind: it is loaded and run forward, then loaded again and run with gradients."""
    files = StatisticsFiles(folder)
    if kind.shard == len(decoder):
        # Costs what any head does; what it leaves is read by the stages that follow.
        _head_gradients(decoder, batches, quantized, files, recipe)
        return Stage(0.0, 0.0)
    lead_to(kind.shard, decoder, batches)
    with decoder.block(kind.shard) as block, torch.no_grad():
        _, seconds = timed(lambda: [decoder.run(kind.shard, block, batch) for batch in batches])
    gradients = [torch.randn_like(batch.hidden) for batch in batches]
    hidden = [batch.hidden for batch in batches]
    # The second time finds the file that the first wrote: writing is not part of what is multiplied.
    _, both = measured(lambda: block_gradients(decoder, kind.shard, batches, hidden, gradients, quantized, files))
    backward = max(0.0, both.seconds - kind.loading)
    return Stage(2 * kind.loading + share * (seconds + backward), kind.pages + both.peak)


def _head(decoder: Decoder, batches: list[Batch], recipe: Recipe, folder: Path, share: float) -> Stage:
    def load() -> None:
        with decoder.head():
            pass

    _, loading = timed(load)
    _, both = measured(lambda: _head_gradients(decoder, batches, {}, StatisticsFiles(folder), recipe))
    return Stage(loading + share * max(0.0, both.seconds - loading), both.peak)


def _head_gradients(
    decoder: Decoder, batches: list[Batch], wanted: Mapping[str, nn.Linear], files: StatisticsFiles, recipe: Recipe
) -> None:
    hidden = [batch.hidden.clone() for batch in batches]
    head_gradients(decoder, hidden, wanted, files, label_seeds(recipe.seed, range(sum(map(len, hidden)))))


@dataclass(frozen=True)
class _Sides:
    """The lattices of the first rows and columns of a linear."""

    weight: torch.Tensor
    statistics: LayerStatistics
    inputs: InputLattice
    outputs: OutputLattice


def _layers(model: ModelLattice, kind: Kind) -> tuple[Stage, Stage]:
    """Allocation and quantization of one block of a kind."""
    linears = shard_linears(model.decoder, model.quantized, kind.shard)
    costs: dict[tuple[int, int], tuple[Cost, Cost, Cost]] = {}
    inputs: dict[int, Cost] = {}
    priced = rounded = largest = grams = stored = 0.0
    with shard_weights(model.decoder, kind.shard), torch.no_grad():
        for members in map(model.moved, model.groups(kind.shard)):
            first = next(iter(members.values()))
            cols = first.inputs.shape[1]
            if cols not in inputs:
                inputs[cols] = _side(model, full_weight(linears[first.group]), first, "inputs")
            kept, peaks = inputs[cols].kept, [inputs[cols].peak]
            priced, rounded = priced + inputs[cols].seconds, rounded + inputs[cols].seconds
            for name, statistics in members.items():
                weight = full_weight(linears[name])
                shape = (weight.shape[0], weight.shape[1])
                if shape not in costs:
                    side = _side(model, weight, statistics, "outputs")
                    costs[shape] = (side, *_rounding(model, weight, statistics, name))
                side, curve, rounding = costs[shape]
                priced, rounded = priced + side.seconds + curve.seconds, rounded + side.seconds + rounding.seconds
                peaks.append(kept + side.peak)
                kept += side.kept
                peaks.append(kept + rounding.peak)
                grams += sum(gram.nbytes for gram in statistics.outputs)
                stored += (model.recipe.target_bits or 0.0) * weight.numel() / 8
            grams += first.inputs.nbytes
            largest = max(largest, *peaks)
    held = kind.held + grams
    return Stage(kind.loading + priced, held + largest), Stage(kind.loading + rounded, held + stored + largest)


def _cut(
    model: ModelLattice, weight: torch.Tensor, statistics: LayerStatistics, rows: int, cols: int
) -> tuple[torch.Tensor, LayerStatistics]:
    outputs, left = [], rows
    for gram in statistics.outputs:
        if left > 0:
            outputs.append(gram[:left, :left])
            left -= len(outputs[-1])
    return weight[:rows, :cols], replace(statistics, inputs=statistics.inputs[:cols, :cols], outputs=outputs)


def _side(model: ModelLattice, weight: torch.Tensor, statistics: LayerStatistics, side: str) -> Cost:
    """One side of a lattice, with the triangle that rounding computes of it."""

    def work(rows: int, cols: int) -> object:
        small, layer = _cut(model, weight, statistics, rows, cols)
        if side == "inputs":
            layer = replace(layer, outputs=[torch.ones(1, 1)])
            small = small[:1]
        else:
            layer = replace(layer, inputs=torch.ones(1, 1))
            small = small[:, :1]
        inputs, outputs = model.lattices({statistics.group: small}, {statistics.group: layer}, None)
        factors = [inputs.factor] if side == "inputs" else outputs[statistics.group].factors
        return inputs, outputs, [factor.unit_triangle32 for factor in factors]

    size = weight.shape[1] if side == "inputs" else weight.shape[0]
    return Rehearsal(1, model.decoder.device).cost(work, size, size, cubic=True)


def _target_alone(recipe: Recipe, rows: int, cols: int) -> float:
    """A target that a linear can meet by itself: on a small one scales weigh more."""
    assert recipe.target_bits is not None
    if recipe.count == "served":
        least = served_overhead(rows, cols, SUPPORTED_BITS[0]) / (rows * cols)
    else:
        least = stored_bits(torch.zeros(rows, cols, dtype=torch.int32))
    return max(recipe.target_bits, least + 0.5)


def _rounding(model: ModelLattice, weight: torch.Tensor, statistics: LayerStatistics, name: str) -> tuple[Cost, Cost]:
    """What prices a linear, and its quantization at the step that meets the target on its own."""
    rehearsal = Rehearsal(1, model.decoder.device)
    sides: dict[tuple[int, int], _Sides] = {}
    for size in rehearsal.sizes(*weight.shape):
        small, layer = _cut(model, weight, statistics, *size)
        inputs, outputs = model.lattices({name: small}, {name: layer}, None)
        sides[size] = _Sides(small, layer, inputs, outputs[name])
        _ = inputs.factor.unit_triangle32, [factor.unit_triangle32 for factor in outputs[name].factors]

    shares: dict[tuple[int, int], Share] = {}

    def curve(rows: int, cols: int) -> None:
        cut = sides[rows, cols]
        prices = model.price({name: cut.weight}, cut.inputs, {name: cut.outputs})
        shares[rows, cols] = model.share_out([prices], _target_alone(model.recipe, rows, cols))[name]

    priced = rehearsal.cost(curve, *weight.shape)

    def work(rows: int, cols: int) -> object:
        cut, share = sides[rows, cols], shares[rows, cols]
        # A correction takes as long wherever it leads: here to the weights themselves.
        drift = None if model.recipe.target == "quantized" else Drift.zeros(cols, cut.weight.device)
        aim = aimed(cut.weight, cut.inputs, drift, model.recipe)
        inputs, outputs = model.fitted({name: cut.weight}, cut.inputs, {name: cut.outputs}, share)
        result = latq(aim.target, inputs, outputs[name], share, model.recipe.without, name)
        layer_record(name, aim, result, cut.inputs, cut.outputs, cut.statistics, model.recipe, share.width)
        return result, result.weight.to_tensors()

    return priced, rehearsal.cost(work, *weight.shape)
