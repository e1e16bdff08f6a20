"""From a model directory to a quantized checkpoint: what is checked before a run, the run, and what closes it.

Invariant: the checkpoint appears complete or not at all, and work that was done is kept for a resumed run.
"""

import hashlib
import time
import warnings
from collections.abc import Collection
from pathlib import Path
from typing import Any

import torch
from torch import nn

import vllm_latq
from vllm_latq.checkpoint import REPORT_FILE
from vllm_latq.config import CheckpointConfig, covers
from vllm_latq.errors import ConfigError, UnsupportedModelError
from vllm_latq.experts import Experts
from vllm_latq.quantize.budget import check_budget
from vllm_latq.quantize.calibration import load_samples
from vllm_latq.quantize.card import model_card
from vllm_latq.quantize.decoder import Decoder
from vllm_latq.quantize.distributed import World
from vllm_latq.quantize.left_alone import merged_with, never_quantized
from vllm_latq.quantize.loading import load_tokenizer, torch_device
from vllm_latq.quantize.offload import placer
from vllm_latq.quantize.recipe import Recipe
from vllm_latq.quantize.run import Listener, Run, sizes
from vllm_latq.quantize.whole_model import BudgetRun, WholeModelRun
from vllm_latq.quantize.writer import CheckpointWriter, free_destination
from vllm_latq.spec import tensor_specs
from vllm_latq.store import read_json


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
        on_event: called with plain dicts: one "start", one "layer" per linear, one "block" per block, one "done";
            where the whole model is looked at, a "stage" before and after each part of it, and one "plan".

    Returns:
        The report, as stored in the checkpoint.

    Raises:
        LatqError: anything wrong with recipe, model, calibration data or destination.
    """
    world = World.join(torch_device(device))
    emit = on_event if on_event and world.first else (lambda event: None)
    try:
        decoder = Decoder(source, world.device, recipe.compute_dtype)
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
    check_budget(quantized.values(), recipe)
    world.from_first(lambda: free_destination(destination, resume))  # before data are read, which takes a while
    samples = calibration_samples(decoder, recipe, calibration)
    if samples is not None:
        world.split(samples)  # where they are too few, before anything is written
    identity = {
        "recipe": recipe.to_dict(),
        "source": str(source.resolve()),
        "config": hashlib.sha256((source / "config.json").read_bytes()).hexdigest(),
        "weights": decoder.store.sampled_digest(),
        "calibration": calibration,
        "tokens": None if samples is None else hashlib.sha256(samples.cpu().numpy().tobytes()).hexdigest(),
        "version": vllm_latq.__version__,
    }
    # The other ranks get a copy, which they do not write with.
    writer = world.from_first(lambda: CheckpointWriter(destination, len(decoder) + 1, identity, resume))
    try:
        return _write(recipe, decoder, quantized, samples, writer, emit, world, offload, started)
    finally:
        writer.close()


def _write(
    recipe: Recipe,
    decoder: Decoder,
    quantized: dict[str, nn.Linear],
    samples: torch.Tensor | None,
    writer: CheckpointWriter,
    emit: Listener,
    world: World,
    offload: str,
    started: float,
) -> dict[str, Any]:
    destination = writer.destination
    if writer.complete:
        world.from_first(writer.seal)
        report = read_json(destination / REPORT_FILE)
        emit({"event": "done", "destination": str(destination), **report["totals"]})
        return report
    emit({"event": "start", "blocks": len(decoder), "linears": len(quantized), "samples": sizes(samples)})
    run = _run_class(recipe)(decoder, recipe, quantized, writer, emit, world)
    run.blocks(samples, placer(offload, writer.partial))
    report = run.report(samples, time.perf_counter() - started)
    _warn_of_excess(recipe, report["totals"])
    config = CheckpointConfig(recipe.scheme, ignored_modules(decoder, recipe), run.overrides(), recipe=recipe.to_dict())
    card, untied = model_card(decoder.source, recipe, report), decoder.unties(quantized)
    world.from_first(lambda: writer.finish(decoder.source, config, report, card, untied))
    emit({"event": "done", "destination": str(destination), **report["totals"]})
    return report


def _warn_of_excess(recipe: Recipe, totals: dict[str, Any]) -> None:
    """Of more served bits than were asked for, where not even damping lets every layer meet its share."""
    target, found = recipe.target_bits, totals["served_bits_per_weight"]
    if recipe.method == "latq" and recipe.count == "served" and target is not None and found > target:
        warnings.warn(
            f"target_bits: {found:.4f} served bits per weight, more than {target:g}: the notes of the report name the "
            "layers whose lattice is too ill-conditioned. Calibrate on more text, or raise target_bits.",
            stacklevel=4,
        )


def _run_class(recipe: Recipe) -> type[Run]:
    if recipe.method == "latq":
        return WholeModelRun
    return Run if recipe.budget is None else BudgetRun


def quantized_linears(decoder: Decoder, recipe: Recipe) -> dict[str, nn.Linear]:
    """Full name -> (meta) linear of everything that the recipe quantizes; raises if a scheme does not fit a shape."""
    if decoder.encoder and (recipe.method == "latq" or recipe.budget is not None):
        expected = "a language model: method latq and budgets look at its loss on the next token"
        raise UnsupportedModelError(str(decoder.source), expected, "an encoder", "Use --method ssqr, hptq or gptq.")
    if recipe.target != "quantized" and any(isinstance(module, Experts) for module in decoder.model.modules()):
        expected, found = "a model whose linears see the same tokens as the original's", "routed experts"
        raise ConfigError("recipe.target", expected, found, 'Use target "quantized".')
    linears = {name: linear for index in range(len(decoder)) for name, linear in decoder.linears(index).items()}
    linears |= decoder.head_linears
    ignored = ignored_modules(decoder, recipe)
    config = CheckpointConfig(recipe.scheme, ignored)
    chosen = {name: linear for name, linear in linears.items() if not config.is_ignored(name)}
    _check_ignored(recipe.ignore, ignored[len(recipe.ignore) :], linears.keys(), str(decoder.source))
    if not chosen:
        raise ConfigError("recipe.ignore", "some linear left to quantize", "all of them ignored", "Ignore fewer.")
    for name, linear in chosen.items():
        tensor_specs(recipe.scheme, linear.out_features, linear.in_features, where=name)
    _warn_of_parts(chosen, linears)
    return chosen


def _warn_of_parts(chosen: Collection[str], linears: Collection[str]) -> None:
    """Of what is merged into one matrix, and would be quantized in part."""
    for name in chosen:
        if left := [part for part in merged_with(name, linears) if part not in chosen]:
            warnings.warn(
                f"{name} is quantized, {', '.join(left)} not: vLLM merges them in most models, and refuses to then. "
                "Quantize or ignore them alike, unless transformers is to read the checkpoint.",
                stacklevel=3,
            )
            return


def ignored_modules(decoder: Decoder, recipe: Recipe) -> tuple[str, ...]:
    """What stays unquantized: what the recipe names, and what never is quantized.

    `lm_head` stands for any language model's head.
    """
    head = [name for name in decoder.head_linears if "lm_head" in recipe.ignore and name != "lm_head"]
    return (*recipe.ignore, *head, *never_quantized(decoder))


def _check_ignored(given: tuple[str, ...], kept: tuple[str, ...], linears: Collection[str], source: str) -> None:
    """Refuse to ignore what is not there, and a model of which more would be ignored than is meant.

    Args:
        given: entries of the recipe.
        kept: modules that are not quantized whatever the recipe.
        linears: names of those that could be.
        source: of the model, for errors.
    """
    for entry in given:
        inside = entry.startswith(tuple(f"{module}." for module in kept))
        if entry != "lm_head" and not inside and not any(covers(entry, name) for name in (*linears, *kept)):
            expected = "names of linears, their endings after a dot, or names of modules"
            raise ConfigError("recipe.ignore", expected, repr(entry), "Take names from `latq quantize --dry-run`.")
    for entry in kept:
        found = [name for name in linears if name != entry and covers(entry, name)]
        if found and entry not in given:
            expected = f"no linear in the blocks that ends as {entry}, which is not quantized"
            raise UnsupportedModelError(source, expected, found[0], f"Add {entry} to --ignore if neither should be.")


def check_seq_len(decoder: Decoder, recipe: Recipe) -> None:
    """Raise ConfigError if the model has no positions for calibration samples as long as the recipe's."""
    if decoder.longest is not None and recipe.seq_len > decoder.longest:
        expected = f"at most {decoder.longest}, the positions of the model"
        raise ConfigError("recipe.seq_len", expected, str(recipe.seq_len), f"Use --seq-len {decoder.longest} or less.")


def calibration_samples(decoder: Decoder, recipe: Recipe, calibration: str | None) -> torch.Tensor | None:
    """Token ids int64 [n, seq_len]; None where the method needs no data."""
    if calibration is None:
        if recipe.needs_calibration:
            hint = "Give a text file or a dataset: --calibration FILE, --calibration wikitext2."
            raise ConfigError("calibration", f"calibration data for method {recipe.method}", "none", hint)
        return None
    check_seq_len(decoder, recipe)
    tokenizer = load_tokenizer(decoder.source)
    sizes = (recipe.num_samples, recipe.seq_len, recipe.seed)
    samples = load_samples(tokenizer, calibration, *sizes, special_tokens=decoder.encoder)
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
