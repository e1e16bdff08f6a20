"""One quantization run: the state that passes from block to block.

    for each block:  run it on the activations of the quantized prefix, one Hessian per shared input
                     quantize its linears       -> shard on disk, records
                     run it again, quantized    -> activations of the next block

Invariant: what the next block sees is computed with the weights that were written, so a resumed run, which reads them
back, goes on exactly where an uninterrupted one would be.
"""

import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict
from typing import Any, TypeVar

import torch
from torch import nn

import vllm_latq
from vllm_latq.errors import NumericalError
from vllm_latq.format.tensors import tensor_specs
from vllm_latq.memory import peak_memory
from vllm_latq.quantize.calibration.hessian import InputHessian
from vllm_latq.quantize.calibration.stream import Stream
from vllm_latq.quantize.calibration.windows import sizes
from vllm_latq.quantize.lattice.factor import Factor
from vllm_latq.quantize.machine.distributed import World
from vllm_latq.quantize.machine.offload import Place, return_freed_memory
from vllm_latq.quantize.methods.layer import layer_factor, quantize_layer
from vllm_latq.quantize.methods.record import totals
from vllm_latq.quantize.model.decoder import Decoder
from vllm_latq.quantize.model.selection import unreached
from vllm_latq.quantize.model.shards import (
    all_shard_linears,
    dense_weight,
    shard_weights,
    stored_tensors,
    untouched_tensors,
)
from vllm_latq.quantize.recipe import Recipe
from vllm_latq.quantize.runs.progress import seconds_left
from vllm_latq.quantize.runs.writer import CheckpointWriter

Listener = Callable[[Mapping[str, Any]], None]
# Of the linears of one input: name -> record, and the tensors to be stored, on the CPU.
Quantized = tuple[dict[str, dict[str, Any]], dict[str, torch.Tensor]]
T = TypeVar("T")


class Run:
    """One quantization run: the state that passes from block to block."""

    def __init__(
        self,
        decoder: Decoder,
        recipe: Recipe,
        quantized: Mapping[str, nn.Linear],
        writer: CheckpointWriter,
        emit: Listener,
        world: World,
    ) -> None:
        self.world = world
        self.decoder, self.recipe, self.quantized, self.writer, self.emit = decoder, recipe, quantized, writer, emit
        self.layers: list[dict[str, Any]] = []

    def prepare(self, samples: torch.Tensor | None, place: Place) -> Stream:
        """Whatever comes before the first block; returns what passes through the blocks. Samples of all processes."""
        mine = None if samples is None else self.world.split(samples)
        return Stream(self.decoder, mine, self.recipe.target, self.world, place)

    def blocks(self, samples: torch.Tensor | None, place: Place) -> None:
        """Quantize everything: a shard per block, and one for the rest."""
        stream = self.prepare(samples, place)
        shards = all_shard_linears(self.decoder, self.quantized)
        seconds, quantized = 0.0, 0
        for shard, linears in enumerate(shards):
            started = time.perf_counter()
            resumed = self._shard(shard, linears, stream, advance=any(shards[shard + 1 :]))
            if linears and not resumed:
                seconds, quantized = seconds + time.perf_counter() - started, quantized + 1
            # The last shard is not a block: its head takes another time.
            left = seconds_left(seconds, quantized, sum(map(bool, shards[shard + 1 : -1])))
            done = {"block": shard, "linears": len(linears), "resumed": resumed, "seconds_left": left}
            self.emit({"event": "block", **done})
            return_freed_memory()

    def _shard(self, shard: int, linears: Mapping[str, nn.Linear], stream: Stream, advance: bool) -> bool:
        """Quantize, or read back, the linears of one shard, and carry the activations past its block if needed.

        Returns:
            Whether they were read back.
        """
        earlier = self.world.from_first(lambda: self.writer.records(shard))
        tensors = untouched_tensors(self.decoder, shard, linears) if earlier is None else {}
        if linears or (advance and stream):
            with shard_weights(self.decoder, shard) as block, torch.no_grad():
                if earlier is None:
                    records, quantized = self._quantize(shard, block, linears, stream)
                    tensors.update(quantized)
                else:
                    if advance:
                        stream.skip(shard, block)
                    self._read_back(shard, linears, earlier["digests"])
                    records = earlier["layers"]
                if advance:
                    stream.advance(shard, block)
        else:
            records = []
            if earlier is not None:
                self._read_back(shard, {}, earlier["digests"])
        if earlier is None:
            self.world.from_first(lambda: self.writer.add(shard, tensors, {"layers": records}))
        self.layers.extend(records)
        return earlier is not None

    def _quantize(
        self, shard: int, block: nn.Module, linears: Mapping[str, nn.Linear], stream: Stream
    ) -> tuple[list[dict[str, Any]], dict[str, torch.Tensor]]:
        """Records in the order of the linears, and the tensors to store; leaves the quantized weights in the block."""
        hessians = stream.inputs(shard, block, linears)
        return self._shared(lambda: hessians, _effort, lambda one: self._quantize_input(one, linears), linears, stream)

    def _shared(
        self,
        work: Callable[[], Sequence[T]],
        effort: Callable[[T], int],
        quantize: Callable[[T], Quantized],
        linears: Mapping[str, nn.Linear],
        stream: Stream,
    ) -> tuple[list[dict[str, Any]], dict[str, torch.Tensor]]:
        """Quantize the inputs of a shard's linears, shared out over the processes; `quantize` tells of its layers, and
        leaves their weights in the block if anything passes through it."""
        records, tensors = {}, {}
        parts = self.world.gather(lambda: [quantize(one) for one in self.world.mine(work(), effort)])
        for rank, part in enumerate(parts):
            for found, stored in part:
                records.update(found)
                tensors.update(stored)
                for name, record in found.items() if rank != self.world.rank else ():
                    if stream:
                        scheme = self.recipe.scheme
                        linears[name].weight.copy_(dense_weight(stored, scheme, name, linears[name]))
                    self.emit({"event": "layer", **record})
        return [records[name] for name in linears], tensors

    def _quantize_input(self, hessian: InputHessian, linears: Mapping[str, nn.Linear]) -> Quantized:
        """Quantize the linears that read one input."""
        records, tensors = {}, {}
        known = self._factorized(hessian)
        for name in hessian.linears:
            result = quantize_layer(linears[name].weight, known, self.recipe, name, hessian.drift)
            linears[name].weight.copy_(result.dequantized)
            stored = result.weight.to_tensors()
            tensors.update({f"{name}.{suffix}": tensor.cpu() for suffix, tensor in stored.items()})
            note = "; ".join(filter(None, (result.record.note, hessian.note)))
            records[name] = asdict(result.record) | {"note": note}
            self.emit({"event": "layer", **records[name]})
        return records, tensors

    def _factorized(self, hessian: InputHessian) -> torch.Tensor | Factor | None:
        """What the linears of one input are quantized with: its factor, or just the Hessian to measure errors."""
        if not hessian.tokens:
            return None
        where = hessian.linears[0]
        if not torch.isfinite(hessian.matrix).all():
            hint = "The model overflows on this text, or its weights are damaged."
            raise NumericalError(where, "finite calibration activations", "NaN or infinity", hint)
        if not self.recipe.needs_calibration:
            return hessian.matrix
        if not hessian.matrix.diagonal().any():
            raise unreached(hessian.linears, self.quantized, "activations")
        return layer_factor(hessian.matrix, self.recipe, where)

    def _read_back(self, shard: int, linears: Mapping[str, nn.Linear], digests: Collection[str]) -> None:
        """Put the weights that an earlier run wrote into the block."""
        path = self.writer.partial / self.writer.shard_name(shard)
        wanted = {
            name: tensor_specs(self.recipe.scheme, linear.out_features, linear.in_features, name)
            for name, linear in linears.items()
        }
        stored = self.world.from_first(lambda: stored_tensors(path, wanted, digests))
        for name, linear in linears.items():
            linear.weight.copy_(dense_weight(stored, self.recipe.scheme, name, linear))

    def report(self, samples: torch.Tensor | None, seconds: float) -> dict[str, Any]:
        """Everything that was measured, as stored in the checkpoint."""
        return {
            "vllm_latq": vllm_latq.__version__,
            "torch": torch.__version__,
            "recipe": self.recipe.to_dict(),
            "run": self.writer.run,
            "calibration": sizes(samples),
            "device": str(self.decoder.device.type),
            "seconds": round(seconds, 3),
            "peak_memory": peak_memory(),
            "totals": totals(self.layers),
            "layers": self.layers,
        }


def _effort(hessian: InputHessian) -> int:
    # Rounding takes outputs * channels^2; the outputs do not matter for who gets what as much as the channels do.
    return len(hessian.linears) * max(1, len(hessian.matrix)) ** 2
