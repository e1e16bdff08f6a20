"""The command `latq quantize`: its options and its output.

Invariant: choices and defaults come from `Recipe`. An option that the user leaves out is not passed to `Recipe`.
"""

import argparse
import os
import sys
from collections.abc import Mapping
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any

from vllm_latq import console
from vllm_latq.cli.parser import FILES, FOLDERS, complete
from vllm_latq.cli.plan import add_load
from vllm_latq.errors import ConfigError, UsageError
from vllm_latq.format.scheme import SUPPORTED_BITS
from vllm_latq.quantize.recipe import CHOICES, DEFAULT_METHOD, GROUP, HEAD, METHODS, PRESETS, UNUSED, Recipe, unused

EXAMPLES = """examples:
  latq quantize MODEL OUT
  latq quantize MODEL OUT --bits 3 --calibration wikitext2
  latq quantize MODEL OUT --preset fast
  latq quantize MODEL OUT --method ssqr --bits 3 --outlier-rate 0.01 --calibration wikitext2
  latq quantize MODEL OUT --method hptq --bits 3.125 --calibration text.txt --num-samples 256 --seq-len 2048
  latq quantize MODEL OUT --method gptq --bits 4 --group-size 128 --calibration wikitext2 --dry-run"""
# Field of the recipe -> help text of its option. `_add_recipe` adds choices, defaults and methods from the recipe.
HELP = {
    "bits": f"bits per weight; rtn, gptq, ssqr: {', '.join(map(str, SUPPORTED_BITS))}; others: any number, on average,"
    " and for latq in files and in memory, everything counted",
    "group_size": "input channels per scale; -1: one scale per row; for latq with --grid group",
    "outlier_rate": "fraction of the weights to keep as outliers",
    "order": "order in which columns are rounded",
    "damping": "Hessian damping, as a fraction of its mean diagonal",
    "rounding": "nearest: to the nearest integer; stochastic: up with the fractional part as probability",
    "beam": "number of candidate roundings that nearest plane keeps per row (K-best)",
    "sweeps": "maximum coordinate-descent sweeps after nearest plane",
    "reduction": "basis reduction before rounding",
    "scales": "how group scales are chosen (default: fitted for ssqr with --outliers saving, otherwise mse);"
    " signed cannot be combined with --grid midrise",
    "grid": "rtn, gptq, ssqr: midtread: the grid contains zero; midrise: it is shifted by half a step (better at 2"
    " bits). latq: trellis; group: integers on group scales, 2, 3, 4 or 8 bits for each linear, as other servers read"
    " them (default: midtread; latq: trellis)",
    "target": "layer output to match; quantized: of its weights on quantized inputs; original: of the original model;"
    " residual: as original, and the last linear of a block also corrects the residual stream",
    "correction": "fraction of the correction that --target applies",
    "outliers": "saving: keep the weights whose rounding costs most; overflow: keep all beyond the grid (the paper's)",
    "num_samples": "number of calibration windows",
    "seq_len": "tokens per calibration window",
    "dtype": "compute dtype while quantizing; auto: float32 on a CPU, otherwise the model's own",
    "kv_cache_scheme": "fp8: also store scales for a KV cache in 8-bit floats, for vLLM's --kv-cache-dtype fp8",
    "embedding_bits": "bits of the input embedding, rounded to nearest with group scales; 16: leave it unquantized",
    "mtp_bits": "bits of layers that predict further tokens (MTP), rounded to nearest with group scales; 16: leave them"
    " unquantized",
    "seed": "random seed for calibration windows, stochastic rounding and latq's sampled labels",
}
# Contents and costs of the presets. The seconds of latq's search are from docs/trellis-code.md.
PRESET_HELP = (
    "fast: gptq; one pass forward, the least time and memory. balanced (default): latq; also one pass backward, and a"
    " search of 7 to 18 CPU seconds per million weights, which runs on all cores or on a GPU. best: latq, with targets"
    " corrected for the errors of the layers before (--target residual --correction 0.5); two more passes forward, and"
    " more Hessians in memory; not for mixtures of experts"
)

NEEDS = {
    "block": "weights of the largest block",
    "outside": "weights of embeddings and head",
    "hessians": "Hessians of the largest block",
    "gradients": "output-gradient grams of that block",
    "activations": "activations",
    "peak": "most at one time",
    "statistics": "statistics of all linears",
    "checkpoint": "the checkpoint",
    "model": "the model, all passes together",
}


def add_command(commands: Any) -> None:
    """Add `quantize` to the subparsers of `latq`."""
    command = commands.add_parser(
        "quantize",
        help="quantize a model into a checkpoint",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    command.set_defaults(run=run)
    complete(command.add_argument("model", metavar="MODEL", help="model directory or hub name"), FOLDERS)
    command.add_argument("destination", metavar="OUT", help="directory to create")
    command.add_argument("--preset", choices=tuple(PRESETS), help=PRESET_HELP)
    _add_recipe(command)
    command.add_argument(
        "--fit", help="memory of the GPU that is to serve the model, such as 24GiB: choose the bits as `latq plan` does"
    )
    add_load(command)
    calibration = command.add_argument(
        "--calibration",
        help="text file; documents or conversations in .jsonl, .csv or .parquet; wikitext2; c4; hub dataset"
        " org/name[:config]; folder. Default: bundled, 2.4 million characters of English prose, Python documentation"
        " and Python code (rtn, hrtn: none). Give text of your own for other languages, other code, mathematics, or"
        " chats (`latq trace`)",
    )
    complete(calibration, FILES)
    command.add_argument("--device", help="torch device (default: cuda if available, otherwise cpu)")
    command.add_argument(
        "--offload",
        choices=("cpu", "disk"),
        default="cpu",
        help="where activations are kept between blocks (default cpu)",
    )
    command.add_argument("--resume", action="store_true", help="continue an interrupted run")
    command.add_argument(
        "--dry-run", action="store_true", help="print shapes, bits, bytes and what the run needs; write nothing"
    )
    command.add_argument("-v", "--verbose", action="store_true", help="print a line for every linear")
    command.add_argument(
        "--json", action="store_true", help="print one JSON object per event; with --dry-run, print the plan"
    )


def _add_recipe(command: argparse.ArgumentParser) -> None:
    group = command.add_argument_group("recipe", argument_default=argparse.SUPPRESS)
    methods = sorted(METHODS, key=lambda method: method != DEFAULT_METHOD)
    group.add_argument("--method", choices=methods, help=f"quantization method (default {DEFAULT_METHOD})")
    defaults = {field.name: field.default for field in fields(Recipe)}
    for name, text in HELP.items():
        default = defaults[name]
        shown = [] if default in (None, MISSING) else [f"default {default}"]
        takers = _takers(name)
        if len(takers) < len(METHODS):
            shown.insert(0, ", ".join(takers))
        note = f" ({'; '.join(shown)})" if shown else ""
        kind = _number if name == "bits" else type(default) if default is not None else str
        group.add_argument(_option(name), type=kind, choices=CHOICES.get(name), help=f"{text}{note}")
    head = group.add_mutually_exclusive_group()
    head.add_argument(
        "--lm-head",
        action="store_true",
        help="quantize the head, as latq does by default; a head tied to the embedding gets its own matrix",
    )
    head.add_argument(
        "--keep-lm-head", action="store_true", help="leave the head unquantized, as all other methods do by default"
    )
    group.add_argument(
        "--ignore",
        nargs="*",
        action="extend",
        help="linears (full names or dotted suffixes) and modules (full names) to leave unquantized",
    )


def _takers(field: str) -> list[str]:
    """Return the methods that read a field of the recipe."""
    return [method for method, unused in UNUSED.items() if field not in unused]


def _recipe(options: argparse.Namespace) -> Recipe:
    """Return the recipe of the options that were given. Raise ConfigError, which names the option."""
    names = Recipe.__dataclass_fields__.keys()
    given = {name: value for name, value in vars(options).items() if name in names}
    if options.fit is None and (options.context, options.concurrency) != (None, None):
        raise UsageError("--context and --concurrency require --fit.")
    if options.preset and "method" in given:
        raise UsageError("--preset sets the method: give either --preset or --method.")
    method = PRESETS[options.preset]["method"] if options.preset else given.get("method", DEFAULT_METHOD)
    for name in given:
        if name in unused(method, given.get("grid")):
            problem = f"{_option(name)} does not apply to --method {method}"
            takers = (f"{taker} --grid {GROUP}" if name in unused(taker, None) else taker for taker in _takers(name))
            raise UsageError(f"{problem}; leave it out ({_option(name)} is for {', '.join(takers)}).")
    return Recipe.of(options.preset, given | {"ignore": _ignored(options, method, given.get("ignore", []))})


def _fitted(recipe: Recipe, options: argparse.Namespace) -> Recipe:
    """Return a recipe with the bits that fit a GPU, and print the bits."""
    from vllm_latq.quantize.fit import fitted

    if hasattr(options, "bits"):
        raise UsageError("--fit chooses the bits: leave out --bits.")
    try:
        recipe = fitted(recipe, options.model, options.fit, options.context, options.concurrency)
    except ConfigError as error:
        raise ConfigError(error.where.replace("memory", "fit"), error.expected, error.found, error.hint) from None
    _say(f"{recipe.bits:g} bits fit {options.fit}")
    return recipe


def _say(line: str) -> None:
    """Print what was chosen, in the first process of torchrun alone."""
    if os.environ.get("RANK", "0") == "0":
        print(f"latq: {line}", file=sys.stderr)


def _ignored(options: argparse.Namespace, method: str, named: list[str]) -> list[str]:
    """Return the names to leave unquantized: those of --ignore, and the head as the method or an option says."""
    if hasattr(options, "lm_head") and HEAD in named:
        raise UsageError(f"--lm-head contradicts --ignore {HEAD}: give only one of them.")
    keeps = hasattr(options, "keep_lm_head") or HEAD in Recipe(method).ignored
    if hasattr(options, "lm_head") or not keeps:
        return named
    return [*(name for name in named if name != HEAD), HEAD]


def _number(text: str) -> float:
    """Return a whole number as int, as Recipe takes the widths of codes."""
    number = float(text)
    return int(number) if number.is_integer() else number


def _option(field: str) -> str:
    return f"--{field.replace('_', '-')}"


def run(options: argparse.Namespace) -> int:
    """Run the command and return its exit status."""
    recipe = _recipe(options)
    if options.fit is not None:
        recipe = _fitted(recipe, options)
    if options.dry_run:
        return _dry_run(recipe, options)
    if options.calibration is None and recipe.needs_text:
        _say("calibrating on the bundled text, English prose and Python; --calibration takes your own")
    config = Path(options.destination) / "config.json"  # appears when the checkpoint is complete
    existed = os.path.exists(config)  # False for a name that is too long, which the run refuses
    try:
        with _display(recipe, options) as display:
            # Imports take seconds: the header comes first.
            from vllm_latq.quantize.model.loading import model_directory
            from vllm_latq.quantize.pipeline import quantize_checkpoint

            quantize_checkpoint(
                recipe,
                model_directory(options.model),
                options.destination,
                calibration=options.calibration,
                device=options.device,
                resume=options.resume,
                offload=options.offload,
                on_event=display,
            )
    except KeyboardInterrupt:
        finished = os.path.exists(config) and not existed
        done = "the checkpoint is complete" if finished else "finished blocks are kept: continue with --resume"
        raise KeyboardInterrupt(done) from None
    return 0


def _display(recipe: Recipe, options: argparse.Namespace) -> console.JsonEvents | console.ProgressDisplay:
    if options.json:
        return console.JsonEvents()
    names = (options.model, options.destination, options.calibration, options.device)
    return console.ProgressDisplay(header=console.quantize_header(recipe.to_dict(), *names), verbose=options.verbose)


def _show(planned: Mapping[str, Any]) -> None:
    """Print the answer of `quantize.plan.plan`: the linears that a recipe quantizes, and what stays unquantized."""
    rows = [
        (
            console.short_name(layer["name"]),
            "x".join(map(str, layer["shape"])),
            f"{layer['bits']:.3f}",
            f"{layer['bytes']:,}",
        )
        for layer in planned["layers"]
    ]
    total = planned["totals"]
    rows.append(("total", f"{total['weights']:,}", f"{total['bits_per_weight']:.3f}", f"{total['bytes']:,}"))
    title = f"{planned['recipe']['method']}: linears to quantize"
    console.print_table(title, ("linear", "shape", "bits", "bytes"), rows)
    for name, nbytes in planned["rounded"].items():
        print(f"rounded to nearest: {name}  {nbytes:,} bytes")
    for left in planned["unquantized"]:
        print(f"unquantized: {left['name']}  {'x'.join(map(str, left['shape']))}")
    for module in planned["beside"]:
        print(f"unquantized: {module['name']}  {module['matrices']} matrices, {module['weights']:,} weights")


def _dry_run(recipe: Any, options: argparse.Namespace) -> int:
    with console.ProgressDisplay(waiting="reading the shapes of the model"):
        from vllm_latq.quantize.model.loading import model_directory
        from vllm_latq.quantize.plan import plan

        calibrated = options.calibration is not None
        planned = plan(recipe, model_directory(options.model), options.device, options.offload, calibrated)
    if options.json:
        console.print_json(planned)
        return 0
    _show(planned)
    needs = [
        (NEEDS[name], place, f"{size / 1e6:,.1f}")
        for place, sizes in planned["needs"].items()
        for name, size in sizes.items()
        if size
    ]
    console.print_table("what the run needs, computed from shapes", ("", "where", "MB"), needs)
    return 0
