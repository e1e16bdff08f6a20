"""From a model directory to a quantized checkpoint, one decoder block after another.

    for each block:  run it on the activations of the quantized prefix, one Hessian per shared input
                     quantize its linears       -> shard on disk, records
                     run it again, quantized    -> activations of the next block

Invariant: what the next block sees is computed with the weights that were written, so a resumed run, which reads them
back, goes on exactly where an uninterrupted one would be.
"""

import time
import warnings
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import nn

import vllm_latq
from vllm_latq.checkpoint import REPORT_FILE
from vllm_latq.config import CheckpointConfig
from vllm_latq.errors import ConfigError, NumericalError
from vllm_latq.quantize.calibration import load_samples
from vllm_latq.quantize.card import model_card
from vllm_latq.quantize.decoder import Decoder
from vllm_latq.quantize.distributed import World
from vllm_latq.quantize.hessian import InputHessian
from vllm_latq.quantize.lattice import Factor
from vllm_latq.quantize.loading import default_device
from vllm_latq.quantize.methods import layer_factor, quantize_layer
from vllm_latq.quantize.offload import Place, placer
from vllm_latq.quantize.recipe import Recipe
from vllm_latq.quantize.shards import dense_weight, stored_tensors, untouched_tensors
from vllm_latq.quantize.stream import Stream
from vllm_latq.quantize.totals import totals
from vllm_latq.quantize.writer import CheckpointWriter
from vllm_latq.spec import tensor_specs
from vllm_latq.store import read_json

Listener = Callable[[Mapping[str, Any]], None]


def quantize_checkpoint(
    recipe: Recipe,
    source: str | Path,
    destination: str | Path,
    *,
    calibration: str | None = None,
    device: str | None = None,
    resume: bool = False,
    offload: str = "cpu",
    on_event: Listener | None = None,
) -> dict[str, Any]:
    """Quantize a Hugging Face model directory.

    Args:
        recipe: what to do.
        source: model directory (config.json, safetensors, tokenizer) of a supported family.
        destination: directory to create. It appears complete or not at all; until then `destination.partial` holds
            the finished blocks.
        calibration: text file or dataset name, see `load_samples`; not needed by methods without a Hessian.
        device: torch device; None takes CUDA where there is one.
        resume: go on with `destination.partial` of an interrupted run.
        offload: where activations wait, "cpu" or "disk" (a mapped file in `destination.partial`).
        on_event: called with plain dicts: one "start", one "layer" per linear, one "block" per block, one "done".

    Returns:
        The report, as stored in the checkpoint.

    Raises:
        LatqError: anything wrong with recipe, model, calibration data or destination.
    """
    chosen = torch.device(device or default_device())
    world = World.join(chosen)
    emit = on_event if on_event and world.first else (lambda event: None)
    try:
        decoder = Decoder(source, world.device(chosen))
        return _quantize_checkpoint(recipe, decoder, Path(destination), calibration, resume, emit, world, offload)
    finally:
        world.leave()


def _quantize_checkpoint(
    recipe: Recipe,
    decoder: Decoder,
    destination: Path,
    calibration: str | None,
    resume: bool,
    emit: Listener,
    world: World,
    offload: str,
) -> dict[str, Any]:
    started, source = time.perf_counter(), decoder.source
    quantized = quantized_linears(decoder, recipe)
    identity = {
        "recipe": recipe.to_dict(),
        "source": str(source.resolve()),
        "calibration": calibration,
        "version": vllm_latq.__version__,
    }
    samples = calibration_samples(decoder, recipe, calibration)
    # The other ranks get a copy, which they do not write with.
    writer = world.from_first(lambda: CheckpointWriter(destination, len(decoder) + 1, identity, resume))
    if writer.complete:
        world.from_first(writer.seal)
        return read_json(destination / REPORT_FILE)
    emit({"event": "start", "blocks": len(decoder), "linears": len(quantized), "samples": _sizes(samples)})
    run = _Run(decoder, recipe, quantized, writer, emit, world)
    run.blocks(world.split(samples), placer(offload, writer.partial))
    report = run.report(samples, time.perf_counter() - started)
    config = CheckpointConfig(recipe.scheme, ignored_modules(decoder, recipe), recipe=recipe.to_dict())
    world.from_first(lambda: writer.finish(source, config, report, model_card(source, recipe, report)))
    emit({"event": "done", "destination": str(destination), **report["totals"]})
    return report


def quantized_linears(decoder: Decoder, recipe: Recipe) -> dict[str, nn.Linear]:
    """Full name -> (meta) linear of everything that the recipe quantizes; raises if a scheme does not fit a shape."""
    linears = {name: linear for index in range(len(decoder)) for name, linear in decoder.linears(index).items()}
    linears[decoder.head_name] = decoder.head_linear
    config = CheckpointConfig(recipe.scheme, ignored_modules(decoder, recipe))
    chosen = {name: linear for name, linear in linears.items() if not config.is_ignored(name)}
    if decoder.head_name in chosen and decoder.tied:
        hint = f"Add {decoder.head_name} to --ignore: it shares its weight with the embedding."
        expected, found = f"{decoder.head_name} among the ignored modules", "a tied head to be quantized"
        raise ConfigError("ignore", expected, found, hint)
    if not chosen:
        raise ConfigError("ignore", "some linear left to quantize", "all of them ignored")
    for name, linear in chosen.items():
        tensor_specs(recipe.scheme, linear.out_features, linear.in_features, where=name)
    return chosen


def ignored_modules(decoder: Decoder, recipe: Recipe) -> tuple[str, ...]:
    """What stays unquantized: what the recipe names, and routers of experts. `lm_head` stands for any model's head."""
    head = (decoder.head_name,) if "lm_head" in recipe.ignore and decoder.head_name != "lm_head" else ()
    return (*recipe.ignore, *head, *decoder.routers)


def calibration_samples(decoder: Decoder, recipe: Recipe, calibration: str | None) -> torch.Tensor | None:
    """Token ids int64 [n, seq_len]; None where the method needs no data."""
    if calibration is None:
        if recipe.needs_calibration:
            hint = "Give a text file or a dataset: --calibration FILE, --calibration wikitext2."
            raise ConfigError("calibration", f"calibration data for method {recipe.method}", "none", hint)
        return None
    from transformers import AutoTokenizer

    limit = getattr(decoder.config, "max_position_embeddings", None)
    if limit is not None and recipe.seq_len > limit:
        raise ConfigError("seq_len", f"at most {limit}, the model's max_position_embeddings", str(recipe.seq_len))
    tokenizer = AutoTokenizer.from_pretrained(decoder.source, trust_remote_code=False)
    samples = load_samples(tokenizer, calibration, recipe.num_samples, recipe.seq_len, recipe.seed)
    if int(samples.max()) >= decoder.vocabulary:
        raise ConfigError(
            "tokenizer", f"token ids below {decoder.vocabulary}", str(int(samples.max())), "Is it the model's?"
        )
    widest = max(linear.in_features for index in range(len(decoder)) for linear in decoder.linears(index).values())
    if samples.numel() < widest and recipe.needs_calibration:
        warnings.warn(
            f"calibration: {samples.numel()} tokens for layers of up to {widest} input channels make singular "
            "Hessians; damping alone decides there. Use more samples or a longer seq_len.",
            stacklevel=2,
        )
    return samples


class _Run:
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

    def blocks(self, samples: torch.Tensor | None, place: Place) -> None:
        stream = Stream(self.decoder, samples, self.recipe.target == "original", self.world, place)
        for index in range(len(self.decoder)):
            linears = {name: linear for name, linear in self.decoder.linears(index).items() if name in self.quantized}
            self._shard(index, linears, self.decoder.block(index), stream, advance=True)
        head = {self.decoder.head_name: self.decoder.head_linear}
        linears = head if self.decoder.head_name in self.quantized else {}
        self._shard(len(self.decoder), linears, self.decoder.head(), stream, advance=False)

    def _shard(
        self,
        shard: int,
        linears: Mapping[str, nn.Linear],
        context: AbstractContextManager[nn.Module],
        stream: Stream,
        advance: bool,
    ) -> None:
        """Quantize, or read back, the linears of one shard, and carry the activations past its block."""
        earlier = self.world.from_first(lambda: self.writer.records(shard))
        tensors = untouched_tensors(self.decoder, shard, linears) if earlier is None else {}
        if linears or (advance and stream):
            with context as block, torch.no_grad():
                if earlier is None:
                    records, quantized = self._quantize(stream.inputs(shard, block, linears), linears)
                    tensors.update(quantized)
                else:
                    stream.skip(shard, block)
                    self._read_back(shard, linears)
                    records = earlier["layers"]
                if advance:
                    stream.advance(shard, block)
        else:
            records = []
        if earlier is None:
            self.world.from_first(lambda: self.writer.add(shard, tensors, {"layers": records}))
        self.layers.extend(records)
        self.emit({"event": "block", "block": shard, "linears": len(records), "resumed": earlier is not None})

    def _quantize(
        self, hessians: list[InputHessian], linears: Mapping[str, nn.Linear]
    ) -> tuple[list[dict[str, Any]], dict[str, torch.Tensor]]:
        parts = self.world.gather(
            lambda: [self._quantize_input(hessian, linears) for hessian in self.world.mine(hessians)]
        )
        records, tensors = {}, {}
        for rank, part in enumerate(parts):
            for found, stored in part:
                for name, record in found.items():
                    records[name] = record
                    if rank != self.world.rank:
                        linears[name].weight.copy_(dense_weight(stored, self.recipe.scheme, name, linears[name]))
                        self.emit({"event": "layer", **record})
                tensors.update(stored)
        return [records[name] for name in linears], tensors

    def _quantize_input(
        self, hessian: InputHessian, linears: Mapping[str, nn.Linear]
    ) -> tuple[dict[str, dict[str, Any]], dict[str, torch.Tensor]]:
        """Quantize the linears that read one input: their records, and the tensors to be stored."""
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
        return layer_factor(hessian.matrix, self.recipe, where)

    def _read_back(self, shard: int, linears: Mapping[str, nn.Linear]) -> None:
        """Put the weights that an earlier run wrote into the block."""
        path = self.writer.partial / self.writer.shard_name(shard)
        wanted = {name: (linear.out_features, linear.in_features) for name, linear in linears.items()}
        stored = self.world.from_first(lambda: stored_tensors(path, self.recipe.scheme, wanted))
        for name, linear in linears.items():
            linear.weight.copy_(dense_weight(stored, self.recipe.scheme, name, linear))

    def report(self, samples: torch.Tensor | None, seconds: float) -> dict[str, Any]:
        """Everything that was measured, as stored in the checkpoint."""
        return {
            "vllm_latq": vllm_latq.__version__,
            "torch": torch.__version__,
            "recipe": self.recipe.to_dict(),
            "calibration": _sizes(samples),
            "device": str(self.decoder.device.type),
            "seconds": round(seconds, 3),
            "totals": totals(self.layers),
            "layers": self.layers,
        }


def _sizes(samples: torch.Tensor | None) -> dict[str, int] | None:
    return None if samples is None else {"samples": samples.shape[0], "seq_len": samples.shape[1]}
