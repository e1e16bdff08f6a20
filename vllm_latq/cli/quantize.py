"""The command `latq quantize`: its options, and what it shows.

Invariant: defaults of the recipe live in Recipe alone; an option that is not given is not passed on.
"""

import argparse
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vllm_latq import console
from vllm_latq.errors import ConfigError
from vllm_latq.format.config import GRIDS

if TYPE_CHECKING:
    from vllm_latq.quantize.recipe import Recipe

DEFAULT_METHOD = "latq"
DEFAULT_TARGET_BITS = 4.0
INSTEAD = {"bits": "--target-bits", "target_bits": "--bits"}  # no method takes both
NEEDS = {
    "block": "weights of the largest block",
    "outside": "weights of embeddings and head",
    "hessians": "Hessians of the largest block",
    "gradients": "grams of its output gradients",
    "activations": "activations",
    "statistics": "statistics of all linears",
    "checkpoint": "the checkpoint",
}
EXAMPLES = """examples:
  latq quantize MODEL OUT --target-bits 3 --calibration wikitext2
  latq quantize MODEL OUT --method ssqr --bits 3 --outlier-rate 0.01 --calibration wikitext2
  latq quantize MODEL OUT --method hptq --target-bits 3.125 --calibration text.txt --num-samples 256 --seq-len 2048
  latq quantize MODEL OUT --method gptq --bits 4 --group-size 128 --calibration wikitext2 --dry-run"""


def add_command(commands: Any) -> None:
    """Add `quantize` to the subparsers of `latq`."""
    command = commands.add_parser(
        "quantize",
        help="quantize a model into a checkpoint",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    command.set_defaults(run=_quantize)
    command.add_argument("model", metavar="MODEL", help="model directory or hub name")
    command.add_argument("destination", metavar="OUT", help="directory to create")
    _add_recipe(command)
    command.add_argument(
        "--calibration",
        help="text file, documents in .jsonl, .csv or .parquet, wikitext2, c4, hub dataset org/name[:config], folder",
    )
    command.add_argument("--device", help="torch device (default: cuda where there is one)")
    command.add_argument(
        "--offload", choices=("cpu", "disk"), default="cpu", help="where activations wait (default cpu)"
    )
    command.add_argument("--resume", action="store_true", help="go on with an interrupted run")
    command.add_argument(
        "--dry-run", action="store_true", help="show shapes, bits, and bytes in memory and on disk; write nothing"
    )
    command.add_argument("--json", action="store_true", help="one JSON object per event (with --dry-run: the plan)")


def _add_recipe(command: argparse.ArgumentParser) -> None:
    recipe = command.add_argument_group("recipe", argument_default=argparse.SUPPRESS)
    methods = ("latq", "ssqr", "hptq", "gptq", "rtn", "hrtn")
    recipe.add_argument("--method", default=DEFAULT_METHOD, choices=methods, help=f"default {DEFAULT_METHOD}")
    recipe.add_argument("--bits", type=int, help="code width: 2, 3, 4 or 8 (rtn, gptq, ssqr; default 4)")
    recipe.add_argument("--group-size", type=int, help="input channels per scale, -1 for a whole row (default 128)")
    recipe.add_argument("--outlier-rate", type=float, help="share of weights kept as outliers (ssqr; default 0.01)")
    recipe.add_argument(
        "--target-bits",
        type=float,
        help="bits per weight to meet, of the model (latq; default 4) or of each layer",
    )
    recipe.add_argument(
        "--count",
        choices=("stored", "served"),
        help="which bits --target-bits are (latq): of the files (default), or of memory while served",
    )
    recipe.add_argument("--order", choices=("natural", "act", "min-pivot"), help="rounding order (default act)")
    recipe.add_argument("--damping", type=float, help="of the Hessian, relative to its mean diagonal (default 0.01)")
    recipe.add_argument("--rounding", choices=("nearest", "stochastic"), help="default nearest")
    recipe.add_argument("--beam", type=int, help="survivors per row of nearest plane, K-best (default 1)")
    recipe.add_argument("--sweeps", type=int, help="of coordinate descent after nearest plane (gptq, ssqr; default 0)")
    recipe.add_argument(
        "--reduction", choices=("none", "lll"), help="of the lattice before rounding (hptq; default none)"
    )
    recipe.add_argument(
        "--scales",
        choices=("absmax", "mse", "signed", "fitted"),
        help="of the groups (default mse): signed not of mid-rise grids, fitted of gptq and, always, of ssqr by saving",
    )
    recipe.add_argument(
        "--grid",
        choices=GRIDS,
        help="of packed methods (default midtread; midrise: better for dense weights in 2 bits)",
    )
    recipe.add_argument(
        "--target",
        choices=("quantized", "original", "residual"),
        help="whose layer outputs to match (default quantized), or those and the residual stream",
    )
    recipe.add_argument("--correction", type=float, help="share of the correction that --target makes (default 1)")
    recipe.add_argument(
        "--outliers",
        choices=("saving", "overflow"),
        help="which weights ssqr keeps: those that cost most (default), or all that overflow, as in the paper",
    )
    recipe.add_argument("--num-samples", type=int, help="calibration windows (default 256)")
    recipe.add_argument("--seq-len", type=int, help="tokens per calibration window (default 2048)")
    recipe.add_argument("--dtype", help="of the model meanwhile: auto (float32 on a CPU), float32, bfloat16, float16")
    recipe.add_argument(
        "--seed", type=int, help="of the choice of windows, of stochastic rounding and of latq's labels (default 0)"
    )
    recipe.add_argument(
        "--lm-head", action="store_true", help="quantize the head, too, apart from an embedding that it is tied to"
    )
    recipe.add_argument(
        "--ignore",
        nargs="*",
        action="extend",
        help="linears (names or endings) and modules (names) to leave alone, beside lm_head",
    )


def _recipe(options: argparse.Namespace) -> "Recipe":
    """The recipe of the options that were given; raises ConfigError, which names them."""
    from vllm_latq.quantize.recipe import UNUSED, Recipe

    names = Recipe.__dataclass_fields__.keys()
    given = {name: value for name, value in vars(options).items() if name in names}
    for name, value in given.items():
        if name in UNUSED[options.method]:
            methods = ", ".join(method for method, unused in UNUSED.items() if name not in unused)
            instead = f" For {options.method} say {INSTEAD[name]}." if name in INSTEAD else ""
            expected, hint = f"no such option with --method {options.method}", f"It is for {methods}.{instead}"
            raise ConfigError(_option(name), expected, str(value), hint)
    if hasattr(options, "lm_head") and "lm_head" in given.get("ignore", []):
        raise ConfigError(
            "--ignore", "no lm_head with --lm-head, which quantizes it", "lm_head", "Leave one of them out."
        )
    others = [name for name in given.get("ignore", []) if name != "lm_head"]
    given["ignore"] = others if hasattr(options, "lm_head") else [*others, "lm_head"]
    if given["method"] == DEFAULT_METHOD:
        given.setdefault("target_bits", DEFAULT_TARGET_BITS)
    return Recipe(**given)


def _option(field: str) -> str:
    return f"--{field.replace('_', '-')}"


def _quantize(options: argparse.Namespace) -> int:
    try:
        return _run(options)
    except ConfigError as error:
        if not error.where.startswith("recipe."):
            raise
        option = _option(error.where.removeprefix("recipe."))
        raise ConfigError(option, error.expected, error.found, error.hint) from None


def _run(options: argparse.Namespace) -> int:
    from vllm_latq.quantize.model.loading import model_directory
    from vllm_latq.quantize.pipeline import quantize_checkpoint

    recipe = _recipe(options)
    source = model_directory(options.model)
    if options.dry_run:
        return _dry_run(recipe, source, options)
    made = Path(options.destination) / "config.json"  # it appears with the rest, at the very end
    before = made.exists()
    try:
        with console.JsonEvents() if options.json else console.ProgressDisplay() as display:
            quantize_checkpoint(
                recipe,
                source,
                options.destination,
                calibration=options.calibration,
                device=options.device,
                resume=options.resume,
                offload=options.offload,
                on_event=display,
            )
    except KeyboardInterrupt:
        complete = made.exists() and not before
        done = "the checkpoint is complete" if complete else "finished blocks are kept: go on with --resume"
        raise KeyboardInterrupt(done) from None
    return 0


def _show(planned: Mapping[str, Any]) -> None:
    """What a recipe would make of a model: `quantize.plan.plan`'s answer."""
    rows = [
        (layer["name"], f"{layer['shape'][0]}x{layer['shape'][1]}", f"{layer['bits']:.3f}", f"{layer['bytes']:,}")
        for layer in planned["layers"]
    ]
    total = planned["totals"]
    rows.append(("total", f"{total['weights']:,}", f"{total['bits_per_weight']:.3f}", f"{total['bytes']:,}"))
    served = planned["recipe"].get("count") == "served"
    title = f"{planned['recipe']['method']}: what would be quantized" + (", in memory" if served else "")
    console.print_table(title, ("linear", "shape", "bits", "bytes"), rows)
    for left in planned["unquantized"]:
        print(f"stays as it is: {left['name']}  {'x'.join(map(str, left['shape']))}")
    for module in planned["beside"]:
        print(f"stays as it is: {module['name']}  {module['matrices']} matrices, {module['weights']:,} weights")


def _dry_run(recipe: Any, source: Any, options: argparse.Namespace) -> int:
    from vllm_latq.quantize.plan import plan

    calibrated = options.calibration is not None
    planned = plan(recipe, source, options.device, options.offload, calibrated)
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
    console.print_table("what the run needs, from shapes", ("", "where", "MB"), needs)
    return 0
