"""How long a run will take and how much memory: its steps, rehearsed on one block and one batch, and added up.

    at rest      calibration activations, as many of them as the method keeps
    at work      one block's weights, the Hessians of its inputs, and the largest of what is done with them
    baseline     what this process holds when everything it needs is loaded

Blocks with the same linears count as one kind, of which one is rehearsed; likewise linears of the same shape. Not
counted: writing, which depends on the disk.

Invariant: the steps are the run's own functions on the model's own weights; numbers of samples, blocks and linears only
multiply.
"""

import tempfile
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from vllm_latq.errors import ConfigError
from vllm_latq.format.config import WHOLE_ROW
from vllm_latq.memory import peak_memory, resident_memory
from vllm_latq.quantize.calibration.hessian import InputHessian
from vllm_latq.quantize.calibration.stream import Stream, samples_per_batch
from vllm_latq.quantize.calibration.windows import calibration_samples, check_seq_len
from vllm_latq.quantize.forecast.predicted_lattice import lattice_stages
from vllm_latq.quantize.forecast.rehearsal import Cost, Rehearsal, measured, timed
from vllm_latq.quantize.forecast.stages import Kind, Stage, block_kinds, lead_to, stored_bytes
from vllm_latq.quantize.lattice.targets import Drift
from vllm_latq.quantize.machine.distributed import world_size
from vllm_latq.quantize.machine.offload import return_freed_memory
from vllm_latq.quantize.methods.layer import layer_factor, quantize_layer
from vllm_latq.quantize.model.decoder import Decoder
from vllm_latq.quantize.model.loading import torch_device
from vllm_latq.quantize.model.selection import quantized_linears
from vllm_latq.quantize.model.shards import shard_linears, shard_weights, untouched_names
from vllm_latq.quantize.recipe import Recipe


@dataclass(frozen=True)
class Prediction:
    """What a run will take.

    Attributes:
        seconds: wall time, from the calibration text to the last block.
        peak_memory: bytes at most, the baseline included, of the host and the device together.
        baseline: bytes resident when nothing of the model is, the libraries in use.
        rehearsal: seconds that this prediction took.
        stages: name -> seconds and bytes beyond the baseline, of each part of the run.
    """

    seconds: float
    peak_memory: int
    baseline: int
    rehearsal: float
    stages: Mapping[str, Stage]

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        return asdict(self)


def predict_run(
    recipe: Recipe, source: str | Path, calibration: str | None = None, device: str | None = None
) -> Prediction:
    """Predict what `quantize_checkpoint` takes in one process; random tokens stand in for calibration data.

    Raises:
        LatqError: whatever the run would raise on the first block, and torchrun's several processes.
    """
    if world_size() > 1:
        raise ConfigError("--dry-run", "one process", str(world_size()), "Start it without torchrun.")
    decoder = Decoder(source, torch_device(device), recipe.compute_dtype)
    quantized = quantized_linears(decoder, recipe)
    if calibration is None and recipe.needs_calibration:
        check_seq_len(decoder, recipe)
        samples = torch.randint(decoder.vocabulary, (recipe.num_samples, recipe.seq_len))
        return predict(decoder, recipe, quantized, samples, 0.0)
    drawn, seconds = timed(lambda: calibration_samples(decoder, recipe, calibration))
    return predict(decoder, recipe, quantized, drawn, seconds)


def predict(
    decoder: Decoder, recipe: Recipe, quantized: Mapping[str, nn.Linear], samples: torch.Tensor | None, seconds: float
) -> Prediction:
    """Rehearse the steps of a run.

    Args:
        decoder: the model.
        recipe: what to do.
        quantized: full name -> linear of what is quantized.
        samples: token ids int64 [n, tokens], or as many random ones; None for none.
        seconds: what it took to get them.

    Raises:
        LatqError: whatever the run would raise on the first block.
    """
    # Tokenizing a long text takes more than most blocks; it was just done.
    started, tokenizing = time.perf_counter(), peak_memory()
    stages: dict[str, Stage] = {}
    if recipe.method == "latq":
        assert samples is not None
        with tempfile.TemporaryDirectory() as folder:
            stages |= lattice_stages(decoder, recipe, quantized, samples, Path(folder))
    if recipe.method != "latq" or recipe.target != "quantized":
        passing = _stages(decoder, recipe, quantized, samples)
        for name, stage in passing.items():
            lattice = stages.get(name, Stage(0.0, 0.0))
            stages[name] = Stage(lattice.seconds + stage.seconds, lattice.memory + stage.memory)
    stages["writing"] = Stage(0.0, stored_bytes(decoder, untouched_names(decoder, len(decoder), quantized)))
    return_freed_memory()
    baseline = resident_memory()
    stages = {"calibration text": Stage(seconds, max(0, tokenizing - baseline)), **stages}
    peak = baseline + round(max(stage.memory for stage in stages.values()))
    total = sum(stage.seconds for stage in stages.values())
    return Prediction(total, peak, baseline, time.perf_counter() - started, stages)


def _stages(
    decoder: Decoder, recipe: Recipe, quantized: Mapping[str, nn.Linear], samples: torch.Tensor | None
) -> dict[str, Stage]:
    """Of a run that goes from block to block."""
    few, share = None, 0.0
    if samples is not None:
        few = samples[: samples_per_batch(decoder.device, samples.shape[1])]
        share = len(samples) / len(few)
    stream, embedding = measured(lambda: Stream(decoder, few, recipe.target))
    streams = 1 if recipe.target == "quantized" else 2
    rest = share * sum(batch.hidden.nbytes * streams + batch.beside for batch in stream.batches)
    embedded = stored_bytes(decoder, untouched_names(decoder, len(decoder), quantized)) if few is not None else 0
    stages = {"embedding": Stage(share * embedding.seconds, rest + embedded + embedding.peak)}
    forward, rounding = Stage(0.0, 0.0), Stage(0.0, 0.0)
    for kind in block_kinds(decoder, quantized):
        seen, rounded = _kind(decoder, recipe, quantized, stream, kind, share)
        forward, rounding = (
            Stage(sofar.seconds + kind.count * one.seconds, max(sofar.memory, rest + one.memory))
            for sofar, one in ((forward, seen), (rounding, rounded))
        )
    for batch in stream.batches:
        # What a block returns for the next alone waits no longer than for that one.
        for index in range(len(decoder) - 1):
            batch.handed_on.forget(index)
    handed_on = share * streams * sum(batch.handed_on.nbytes for batch in stream.batches)
    both = {"passes through the blocks": forward, "quantization": rounding}
    return stages | {name: Stage(stage.seconds, stage.memory + handed_on) for name, stage in both.items()}


def _kind(
    decoder: Decoder, recipe: Recipe, quantized: Mapping[str, nn.Linear], stream: Stream, kind: Kind, share: float
) -> tuple[Stage, Stage]:
    """One block of a kind: its two passes, and its quantization."""
    shard = kind.shard
    linears = shard_linears(decoder, quantized, shard)
    lead_to(shard, decoder, (*stream.batches, *(stream.originals or ())))
    with shard_weights(decoder, shard) as block, torch.no_grad():
        held = kind.held
        hessians, seeing = measured(lambda: stream.inputs(shard, block, linears))
        advancing = 0.0
        if kind.advanced:
            _, seconds = timed(lambda: [decoder.run(shard, block, batch) for batch in stream.batches])
            advancing = seconds * kind.advanced / kind.count
        passes = Stage(kind.loading + share * (seeing.seconds + advancing), held + seeing.peak)
        rehearsal = Rehearsal(recipe.group_size if recipe.group_size != WHOLE_ROW else 1, decoder.device)
        costs: dict[tuple[int, int, bool], Cost] = {}
        seconds = largest = 0.0
        stored = sum(recipe.planned_bits(*linear.weight.shape) / 8 for linear in linears.values())
        # What latq does was rehearsed where its statistics were.
        for hessian in hessians if recipe.method != "latq" else ():
            factor = _factor(recipe, hessian, linears, rehearsal) if hessian.tokens else Cost(0.0, 0.0, 0.0)
            seconds += factor.seconds
            largest = max(largest, factor.peak)
            for name in hessian.linears:
                shape = (*linears[name].weight.shape, hessian.drift is not None)
                if shape not in costs:
                    costs[shape] = _layer(recipe, hessian, linears[name].weight, name, rehearsal)
                seconds += costs[shape].seconds
                largest = max(largest, factor.kept + costs[shape].peak)
        sums = [hessian.matrix for hessian in hessians]
        sums += [part for hessian in hessians if hessian.drift is not None for part in hessian.drift.sums]
        grams = sum(part.nbytes for part in sums)
        return passes, Stage(seconds, held + grams + stored + largest)


def _factor(recipe: Recipe, hessian: InputHessian, linears: Mapping[str, nn.Linear], rehearsal: Rehearsal) -> Cost:
    if not recipe.needs_calibration:
        return Cost(0.0, 0.0, 0.0)

    def work(_: int, cols: int) -> object:
        factor = layer_factor(hessian.matrix[:cols, :cols], recipe, hessian.linears[0])
        # What the first linear computes, and the factor keeps.
        return factor, factor.propagation32

    cols = hessian.matrix.shape[1]
    return rehearsal.cost(work, cols, cols, cubic=True)


def _layer(recipe: Recipe, hessian: InputHessian, weight: torch.Tensor, name: str, rehearsal: Rehearsal) -> Cost:
    known: dict[int, Any] = {}
    for cols in {size[1] for size in rehearsal.sizes(*weight.shape)} if hessian.tokens else ():
        known[cols] = hessian.matrix[:cols, :cols]
        if recipe.needs_calibration:
            known[cols] = layer_factor(known[cols], recipe, name)
            assert known[cols].propagation32 is not None

    def work(rows: int, cols: int) -> object:
        drift = hessian.drift and Drift(*(part[:cols, :cols] for part in hessian.drift.sums[:2]))
        result = quantize_layer(weight[:rows, :cols], known.get(cols), recipe, name, drift)
        return result, result.weight.to_tensors()

    return rehearsal.cost(work, *weight.shape)
