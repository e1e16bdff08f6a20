"""The `latq` command: quantize, verify, inspect, report, eval.

Exit status: 0 done, 1 a problem that was reported, 2 wrong usage.
"""

import argparse
import os
import sys
import time
import warnings
from collections.abc import Iterator, Sequence
from typing import Any

import vllm_latq
from vllm_latq import console
from vllm_latq.config import OUTLIER_CODINGS
from vllm_latq.errors import ConfigError, LatqError

# How long a process that torchrun started leaves it to the first one to report an error of all. It is spent only where
# the error is this process's own: else torchrun ends it, seconds later on a crowded machine, when the first one ends.
SECONDS_TO_SPEAK = 30.0
DEFAULT_METHOD = "latq"
DEFAULT_TARGET_BITS = 4.0


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; returns its exit status."""
    options = build_parser().parse_args(arguments)
    warnings.showwarning = _show_warning
    try:
        return options.run(options)
    except LatqError as error:
        if not _speaks():
            # The first process meets the same error, says it and ends, upon which torchrun ends this one.
            time.sleep(SECONDS_TO_SPEAK)
        print(f"latq: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("latq: interrupted; finished blocks are kept", file=sys.stderr)
        return 130


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="latq", description="Lattice quantization with an error guarantee.")
    parser.add_argument("--version", action="version", version=f"vllm-latq {vllm_latq.__version__}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    _add_quantize(commands)
    _add_verify(commands)
    _add_inspect(commands)
    _add_report(commands)
    _add_eval(commands)
    return parser


def _add_quantize(commands: Any) -> None:
    command = commands.add_parser("quantize", help="quantize a model into a checkpoint")
    command.set_defaults(run=_quantize)
    command.add_argument("model", metavar="MODEL", help="model directory or hub name")
    command.add_argument("destination", metavar="OUT", help="directory to create")
    # Defaults live in Recipe alone: an option that is not given is not passed on.
    recipe = command.add_argument_group("recipe", argument_default=argparse.SUPPRESS)
    methods = ("latq", "ssqr", "hptq", "gptq", "rtn", "hrtn")
    recipe.add_argument("--method", default=DEFAULT_METHOD, choices=methods, help=f"default {DEFAULT_METHOD}")
    recipe.add_argument("--bits", type=int, help="code width: 2, 3, 4 or 8 (rtn, gptq, ssqr; default 4)")
    recipe.add_argument("--group-size", type=int, help="input channels per scale, -1 for a whole row (default 128)")
    recipe.add_argument("--outlier-rate", type=float, help="share of weights kept as outliers (ssqr; default 0.01)")
    recipe.add_argument(
        "--target-bits",
        type=float,
        help="stored bits per weight to meet, of the model (latq; default 4) or of each layer",
    )
    recipe.add_argument("--order", choices=("natural", "act", "min-pivot"), help="rounding order (default act)")
    recipe.add_argument("--damping", type=float, help="of the Hessian, relative to its mean diagonal (default 0.01)")
    recipe.add_argument(
        "--condition", type=float, help="choose each damping to bring the condition number down to this"
    )
    recipe.add_argument("--rounding", choices=("nearest", "stochastic", "rate"), help="default nearest; rate: hptq")
    recipe.add_argument("--beam", type=int, help="survivors per row of nearest plane, K-best (default 1)")
    recipe.add_argument("--sweeps", type=int, help="of coordinate descent after nearest plane (gptq, ssqr; default 0)")
    recipe.add_argument(
        "--reduction", choices=("none", "lll"), help="of the lattice before rounding (hptq; default none)"
    )
    recipe.add_argument("--scales", choices=("absmax", "mse", "signed", "fitted"), help="of the groups (default mse)")
    recipe.add_argument(
        "--target", choices=("quantized", "original"), help="whose layer outputs to match (default quantized)"
    )
    recipe.add_argument(
        "--correction", type=float, help="share of the correction that --target original makes (default 1)"
    )
    recipe.add_argument("--budget", type=float, help="stored bits per weight of the model, which ssqr plans for")
    recipe.add_argument("--outliers", help="which weights ssqr keeps: overflow (default) or saving")
    recipe.add_argument(
        "--outlier-coding",
        choices=OUTLIER_CODINGS,
        help="how ssqr stores them (default bfloat16, 32 bits; integer: 16)",
    )
    recipe.add_argument("--without", nargs="+", help="parts of latq to switch off: allocation, columns, rows, ...")
    recipe.add_argument("--num-samples", type=int, help="calibration windows (default 256)")
    recipe.add_argument("--seq-len", type=int, help="tokens per calibration window (default 2048)")
    recipe.add_argument("--dtype", help="of the model meanwhile: auto (float32 on a CPU), float32, bfloat16, float16")
    recipe.add_argument("--seed", type=int, help="of the choice of windows and of stochastic rounding (default 0)")
    recipe.add_argument("--ignore", nargs="*", help="modules to leave unquantized (default lm_head)")
    command.add_argument("--calibration", help="text file, wikitext2, c4, or a hub dataset org/name[:config]")
    command.add_argument("--device", help="torch device (default: cuda where there is one)")
    command.add_argument(
        "--offload", choices=("cpu", "disk"), default="cpu", help="where activations wait (default cpu)"
    )
    command.add_argument("--resume", action="store_true", help="go on with an interrupted run")
    command.add_argument("--dry-run", action="store_true", help="show shapes, bits and bytes; compute nothing")
    command.add_argument("--json", action="store_true", help="one JSON object per event (with --dry-run: the plan)")


def _add_verify(commands: Any) -> None:
    command = commands.add_parser("verify", help="check every invariant of a checkpoint")
    command.set_defaults(run=_verify)
    command.add_argument("checkpoint", metavar="CKPT")
    certificate = command.add_argument_group("certificate: recompute the errors and bounds that the report claims")
    certificate.add_argument("--certificate", action="store_true", help="needs --model and the same --calibration")
    certificate.add_argument("--model", help="the original model, directory or hub name")
    certificate.add_argument("--calibration", help="what `latq quantize` was given")
    certificate.add_argument("--tolerance", type=float, default=0.01, help="relative, of each number (default 0.01)")
    certificate.add_argument("--device", help="torch device (default: cuda where there is one)")
    command.add_argument("--json", action="store_true")


def _add_inspect(commands: Any) -> None:
    command = commands.add_parser("inspect", help="show what a checkpoint, or OUT.partial of a run, holds")
    command.set_defaults(run=_inspect)
    command.add_argument("checkpoint", metavar="CKPT")
    command.add_argument("--json", action="store_true")


def _add_report(commands: Any) -> None:
    command = commands.add_parser("report", help="write a page with plots of what a checkpoint holds and lost")
    command.set_defaults(run=_report)
    command.add_argument("checkpoint", metavar="CKPT")
    command.add_argument("-o", "--output", default="report.html", help="HTML file to write (default report.html)")


def _add_eval(commands: Any) -> None:
    command = commands.add_parser("eval", help="perplexity, divergence from a baseline, zero-shot tasks")
    command.set_defaults(run=_eval)
    command.add_argument("model", metavar="MODEL_OR_CKPT")
    text = command.add_mutually_exclusive_group()
    text.add_argument("--text", help="text file")
    text.add_argument("--dataset", help="wikitext2, c4, or a hub dataset org/name[:config]")
    command.add_argument("--tasks", nargs="+", help="lm-eval tasks, zero-shot")
    command.add_argument("--include-path", help="folder with further lm-eval task definitions")
    command.add_argument("--limit", type=float, help="documents per task")
    command.add_argument("--baseline", help="original model: adds KL divergence and top-1 agreement")
    command.add_argument("--seq-len", type=int, default=2048)
    command.add_argument("--batch-size", type=int, default=1)
    command.add_argument("--device")
    command.add_argument(
        "--dtype", default="auto", help="float32, bfloat16, float16 or auto: float32 on a CPU, else as stored"
    )
    command.add_argument("--json", action="store_true")


def _quantize(options: argparse.Namespace) -> int:
    from vllm_latq.quantize.loading import model_directory
    from vllm_latq.quantize.pipeline import quantize_checkpoint
    from vllm_latq.quantize.plan import plan
    from vllm_latq.quantize.recipe import Recipe

    names = Recipe.__dataclass_fields__.keys()
    given = {name: value for name, value in vars(options).items() if name in names}
    if given["method"] == DEFAULT_METHOD:
        given.setdefault("target_bits", DEFAULT_TARGET_BITS)
    recipe = Recipe(**given)
    source = model_directory(options.model)
    if options.dry_run:
        planned = plan(recipe, source)
        if options.json:
            console.print_json(planned)
            return 0
        rows = [
            (layer["name"], f"{layer['shape'][0]}x{layer['shape'][1]}", f"{layer['bits']:.3f}", f"{layer['bytes']:,}")
            for layer in planned["layers"]
        ]
        total = planned["totals"]
        rows.append(("total", f"{total['weights']:,}", f"{total['bits_per_weight']:.3f}", f"{total['bytes']:,}"))
        console.print_table(f"{recipe.method}: what would be quantized", ("linear", "shape", "bits", "bytes"), rows)
        for left in planned["unquantized"]:
            print(f"stays as it is: {left['name']}  {'x'.join(map(str, left['shape']))}")
        return 0
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
    return 0


def _verify(options: argparse.Namespace) -> int:
    from vllm_latq.checkpoint import verify

    problems = [str(problem) for problem in verify(options.checkpoint)]
    if options.certificate and not problems:
        problems = [str(problem) for problem in _certificate(options)]
    if options.json:
        console.print_json({"checkpoint": options.checkpoint, "valid": not problems, "problems": problems})
    else:
        for problem in problems:
            print(f"latq: {problem}", file=sys.stderr)
        sound = "valid, errors and bounds confirmed" if options.certificate else "valid"
        print(f"{options.checkpoint}: {f'{len(problems)} problem(s)' if problems else sound}")
    return 1 if problems else 0


def _certificate(options: argparse.Namespace) -> Iterator[LatqError]:
    from vllm_latq.quantize.certificate import verify_certificate
    from vllm_latq.quantize.loading import model_directory

    if options.model is None:
        raise ConfigError("--model", "the original model", "none", "Its weights are what the errors are measured from.")
    model = model_directory(options.model)
    tolerance, device = options.tolerance, options.device
    return verify_certificate(options.checkpoint, model, options.calibration, tolerance=tolerance, device=device)


def _inspect(options: argparse.Namespace) -> int:
    from vllm_latq.inspection import inspect_checkpoint
    from vllm_latq.quantize.progress import is_partial

    if is_partial(options.checkpoint):
        return _inspect_partial(options)
    summary = inspect_checkpoint(options.checkpoint)
    if options.json:
        console.print_json(summary)
        return 0
    rows = [
        (
            layer["name"],
            f"{layer['shape'][0]}x{layer['shape'][1]}",
            layer["encoding"],
            f"{layer['bits']:.3f}",
            f"{100 * layer['outlier_density']:.2f}%",
            console.number(layer["relative_error"]),
            console.number(layer["error"]),
            console.number(layer["bound"]),
        )
        for layer in summary["layers"]
    ]
    weights, bits = f"{summary['weights']:,}", f"{summary['bits_per_weight']:.3f}"
    rows.append(("total", weights, f"{summary['bytes']:,} bytes", bits, "", "", "", ""))
    columns = ("linear", "shape", "encoding", "bits", "outliers", "relative error", "error", "bound")
    console.print_table(options.checkpoint, columns, rows)
    return 0


def _inspect_partial(options: argparse.Namespace) -> int:
    from vllm_latq.quantize.progress import partial_progress

    progress = partial_progress(options.checkpoint)
    if options.json:
        console.print_json(progress)
        return 0
    rows = [
        (layer["name"], *(console.number(layer[key]) for key in ("bits", "relative_error", "error", "bound")))
        for layer in progress["layers"]
    ]
    title = (
        f"{options.checkpoint}: {progress['shards_done']} of {progress['shards']} shards, {progress['bytes']:,} bytes"
    )
    console.print_table(title, ("linear", "bits", "relative error", "error", "bound"), rows)
    return 0


def _report(options: argparse.Namespace) -> int:
    from vllm_latq.report_page import write_report_page

    write_report_page(options.checkpoint, options.output)
    print(options.output)
    return 0


def _eval(options: argparse.Namespace) -> int:
    source = options.text or options.dataset
    if source is None and not options.tasks:
        raise ConfigError("eval", "--text, --dataset or --tasks", "none of them")
    result: dict[str, Any] = {}
    if source is not None:
        from vllm_latq.quantize.evaluate import evaluate

        evaluation = evaluate(
            options.model,
            source,
            seq_len=options.seq_len,
            baseline=options.baseline,
            device=options.device,
            batch_size=options.batch_size,
            dtype=options.dtype,
        )
        result |= evaluation.to_dict()
    if options.tasks:
        from vllm_latq.quantize.tasks import run_tasks

        result["tasks"] = run_tasks(
            options.model,
            options.tasks,
            limit=options.limit,
            include_path=options.include_path,
            device=options.device,
            dtype=options.dtype,
        )
    if options.json:
        console.print_json(result)
        return 0
    tasks = result.pop("tasks", {})
    rows = [(name, console.number(value, 6)) for name, value in result.items()]
    rows += [
        (f"{task} {metric}", console.number(value, 4))
        for task, metrics in tasks.items()
        for metric, value in metrics.items()
        if isinstance(value, float | int)
    ]
    console.print_table(options.model, ("measure", "value"), rows)
    return 0


def _speaks() -> bool:
    """Whether this process reports: of those that torchrun starts, the first."""
    return os.environ.get("RANK", "0") == "0"


def _show_warning(message: Warning | str, *_: Any, **__: Any) -> None:
    if _speaks():
        print(f"latq: warning: {message}", file=sys.stderr)


if __name__ == "__main__":
    sys.exit(main())
