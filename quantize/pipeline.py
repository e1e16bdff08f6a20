"""From a model directory to a quantized checkpoint: what is checked before a run, the run, and what closes it.

Invariant: the checkpoint appears complete or not at all, and work that was done is kept for a resumed run.
"""

import hashlib
import os
import shutil
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

import vllm_latq
from vllm_latq.console import size
from vllm_latq.errors import CheckpointError, UnsupportedModelError
from vllm_latq.events import Listener, ignore_event
from vllm_latq.format.files import read_json
from vllm_latq.format.reader import REPORT_FILE
from vllm_latq.format.scheme import LayerScheme
from vllm_latq.quantize.allocation.rates import require_bits_kept
from vllm_latq.quantize.allocation.widths import require_bits
from vllm_latq.quantize.calibration.kv_scales import KeyValueRanges
from vllm_latq.quantize.calibration.windows import Samples, calibration_samples, chosen_text
from vllm_latq.quantize.kv_cache import attending_layers
from vllm_latq.quantize.machine.distributed import World
from vllm_latq.quantize.machine.offload import Place, placer
from vllm_latq.quantize.model.companion_files import companion_files
from vllm_latq.quantize.model.decoder import Decoder
from vllm_latq.quantize.model.loading import compute_dtype, torch_device
from vllm_latq.quantize.model.selection import (
    ignored_modules,
    quantized_linears,
    rounded_matrices,
    suited,
)
from vllm_latq.quantize.plan import disk_bytes
from vllm_latq.quantize.recipe import Recipe
from vllm_latq.quantize.runs.card import model_card
from vllm_latq.quantize.runs.layerwise import LayerwiseQuantizer
from vllm_latq.quantize.runs.run import Quantizer, Run, Session
from vllm_latq.quantize.runs.whole_model import expected_stages, plan_whole_model
from vllm_latq.quantize.runs.writer import CheckpointWriter, free_destination, partial_of


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
        calibration: text file or dataset name, see `load_samples`. None takes the bundled text if the method reads a
            Hessian; other methods then measure no errors.
        device: torch device; None takes CUDA where there is one.
        resume: continue `destination.partial` of an interrupted run.
        offload: where activations wait, "cpu" or "disk" (a mapped file in `destination.partial`).
        on_event: called with the events that `vllm_latq.events` lists.

    Returns:
        The report, as stored in the checkpoint.

    Raises:
        LatqError: anything wrong with recipe, model, calibration data or destination.
    """
    world, started = World.join(torch_device(device)), time.perf_counter()
    emit = on_event if on_event and world.first else ignore_event
    try:
        decoder = Decoder(source, world.device, compute_dtype(recipe.dtype))
        recipe = suited(recipe, decoder)
        quantized = quantized_linears(decoder, recipe)
        require_bits(quantized, recipe)
        rounded = rounded_matrices(decoder, recipe, quantized)
        if recipe.kv_cache_scheme != "none":
            _attending(decoder)
        if os.path.realpath(destination) == os.path.realpath(decoder.source):
            hint = "Choose another directory: the model is read, never written."
            raise CheckpointError(str(destination), "a directory to create", "the model itself", hint)
        # Before data are read, which takes a while.
        world.from_first(lambda: free_destination(destination, resume))
        world.from_first(lambda: companion_files(decoder.source))
        calibration = chosen_text(recipe, calibration)
        samples = None if calibration is None else calibration_samples(decoder, recipe, calibration)
        if samples is not None:
            world.split(samples.tokens)  # where they are too few, before anything is written
        identity = _identity(recipe, decoder, calibration, samples)
        needed = world.from_first(lambda: disk_bytes(decoder, recipe, quantized, samples is not None, offload))
        world.from_first(lambda: _require_room(Path(destination), needed))
        # The other ranks get a copy, which they do not write with.
        writer = world.from_first(lambda: CheckpointWriter(Path(destination), len(decoder) + 1, identity, resume))
        try:
            counted = None if samples is None else samples.counted
            session = Session(recipe, decoder, quantized, rounded, writer, emit, world, counted)
            return _run(session, samples, offload, started)
        finally:
            writer.close()
    finally:
        world.leave()


def _identity(recipe: Recipe, decoder: Decoder, calibration: str | None, samples: Samples | None) -> dict[str, Any]:
    """Return what a run's result depends on: a run with another identity cannot be resumed."""
    source = decoder.source
    return {
        "recipe": recipe.to_dict(),
        "source": str(source.resolve()),
        "config": hashlib.sha256((source / "config.json").read_bytes()).hexdigest(),
        "weights": decoder.store.sampled_digest(),
        "calibration": calibration,
        "tokens": None if samples is None else samples.digest(),
        "version": vllm_latq.__version__,
    }


def _require_room(destination: Path, needed: int) -> None:
    """Raise CheckpointError if the disk of the destination has no room for a run; an interrupted run's files count."""
    partial = partial_of(Path(os.path.realpath(destination)))
    written = sum(path.stat().st_size for path in partial.rglob("*") if path.is_file())
    place = next(folder for folder in (partial, *partial.parents) if folder.is_dir())
    free = shutil.disk_usage(place).free
    if needed - written > free:
        expected, found = f"{size(needed - written)} of free disk space, which this run writes", f"{size(free)} free"
        raise CheckpointError(str(destination), expected, found, "Make room, or choose a directory on another disk.")


def _run(session: Session, samples: Samples | None, offload: str, started: float) -> dict[str, Any]:
    """Quantize every part of the model, and turn `destination.partial` into the checkpoint; return the report."""
    recipe, decoder, writer, emit = session.recipe, session.decoder, session.writer, session.emit
    world = session.world
    if writer.complete:
        world.from_first(lambda: writer.seal(decoder.source))
        report = read_json(writer.destination / REPORT_FILE)
        emit(_done(session, report))
        return report
    calibration = None if samples is None else samples.to_dict()
    tokens = None if samples is None else samples.tokens
    start = {"blocks": len(decoder), "linears": len(session.quantized), "samples": calibration}
    emit({"event": "start", **start, "device": str(world.device), "stages": expected_stages(session, tokens)})
    run = _planned(session, tokens, placer(offload, writer.partial))
    run.parts()
    report = run.report(calibration, time.perf_counter() - started)
    if recipe.method == "latq":
        require_bits_kept(report["totals"]["bits_per_weight"], recipe)
    config = run.config(ignored_modules(decoder, recipe))
    card = model_card(decoder.source, recipe, report, writer.destination.name)
    untied = decoder.unties(session.quantized)
    world.from_first(lambda: writer.finish(decoder.source, config, report, card, untied))
    emit(_done(session, report))
    return report


def _done(session: Session, report: dict[str, Any]) -> dict[str, Any]:
    """Return the last event of a run."""
    destination = session.writer.destination
    return {
        "event": "done",
        "destination": str(destination),
        "model": str(session.decoder.source),
        "seconds": report["seconds"],
        "checkpoint_bytes": _weight_bytes(destination),
        "model_bytes": _weight_bytes(session.decoder.source),
        "notes": sum(bool(layer["note"]) for layer in report["layers"]),
        **report["totals"],
    }


def _weight_bytes(directory: Path) -> int:
    return sum(path.stat().st_size for path in directory.glob("*.safetensors"))


def _planned(session: Session, samples: torch.Tensor | None, place: Place) -> Run:
    """Return the run, with everything that comes before the first part done."""
    recipe, passing = session.recipe, samples
    schemes: Mapping[str, LayerScheme] = {}
    quantizer: Quantizer[Any] = LayerwiseQuantizer(session)
    if recipe.method == "latq" and samples is not None:
        quantizer = whole = plan_whole_model(session, samples, place)
        schemes = whole.schemes
        # With its own targets, nothing has to pass through the quantized blocks.
        passing = samples if recipe.passes_text else None
    stream = session.stream(passing, place)
    if recipe.kv_cache_scheme != "none":
        stream.key_values = KeyValueRanges(session.decoder, _attending(session.decoder))
    return Run(session, quantizer, stream, schemes)


def _attending(decoder: Decoder) -> list[bool]:
    """Return for each block whether it has a KV cache; raise UnsupportedModelError where scales make no sense."""
    if decoder.encoder:
        hint = "Leave out --kv-cache-scheme."
        raise UnsupportedModelError(str(decoder.source), "a language model, which has a KV cache", "an encoder", hint)
    return attending_layers(decoder.config, str(decoder.source))
