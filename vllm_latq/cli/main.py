"""The `latq` command: plan, quantize, verify, inspect, report, eval.

Exit status: 0 success, 1 an error that was reported, 2 wrong usage, 130 interrupted.
"""

import argparse
import errno
import os
import sys
import time
import warnings
from collections.abc import Iterator, Sequence
from typing import Any

import vllm_latq
from vllm_latq import console
from vllm_latq.cli import plan as cli_plan
from vllm_latq.cli import quantize as cli_quantize
from vllm_latq.errors import CalibrationError, ConfigError, LatqError, RankError, UsageError

# torchrun starts several processes, and most errors occur in all of them. The first process reports the error and ends,
# and torchrun then ends the others. Another process reports an error only if it is still running after this time.
ERROR_REPORT_GRACE_SECONDS = 30.0


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit status."""
    options = build_parser().parse_args(arguments)
    warnings.showwarning = console.WarnOnce(_is_reporting_rank())
    console.prepare_streams()
    try:
        status: int = options.run(options)
        sys.stdout.flush()  # a write error is raised here, not at exit
        return status
    except LatqError as error:
        # A RankError occurs where the first process may be the one that hangs.
        if not _is_reporting_rank() and not isinstance(error, RankError):
            time.sleep(ERROR_REPORT_GRACE_SECONDS)
        print(f"latq: {_by_option(error, options)}", file=sys.stderr)
        return 1
    except OSError as error:
        if error.errno not in (errno.EPIPE, errno.ENOSPC):
            raise
        # The reader closed the pipe, or the disk is full. Discard buffered output, so that exit does not fail again.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if error.errno == errno.ENOSPC:
            print(f"latq: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt as interrupt:
        print("; ".join(("latq: interrupted", *map(str, interrupt.args))), file=sys.stderr)
        return 130


def _by_option(error: LatqError, options: argparse.Namespace) -> LatqError:
    """Return an error with an option as its `where`, if its `where` is the parameter that the option sets."""
    if not isinstance(error, ConfigError | CalibrationError):
        return error
    # Only `quantize` takes the recipe from its options; `verify` reads it from the checkpoint.
    name = error.where.removeprefix("recipe.") if options.run is cli_quantize.run else error.where
    if name == error.where and name not in vars(options):
        return error
    return LatqError(f"--{name.replace('_', '-')}", error.expected, error.found, error.hint)


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of `latq` and all its commands."""
    parser = argparse.ArgumentParser(prog="latq", description="Lattice quantization with an error guarantee.")
    parser.add_argument("--version", action="version", version=f"vllm-latq {vllm_latq.__version__}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    cli_plan.add_command(commands)
    cli_quantize.add_command(commands)
    _add_verify(commands)
    _add_inspect(commands)
    _add_report(commands)
    _add_eval(commands)
    return parser


def _add_verify(commands: Any) -> None:
    command = commands.add_parser("verify", help="check every invariant of a checkpoint")
    command.set_defaults(run=_verify)
    command.add_argument("checkpoint", metavar="CKPT", help="checkpoint directory")
    certificate = command.add_argument_group("certificate: the errors and bounds in the report")
    certificate.add_argument(
        "--certificate", action="store_true", help="recompute them; requires --model, and --calibration as in the run"
    )
    certificate.add_argument("--model", help="original model: directory or hub name")
    certificate.add_argument("--calibration", help="calibration text of the run, as given to `latq quantize`")
    certificate.add_argument("--tolerance", type=float, help="relative tolerance of each comparison (default 0.01)")
    certificate.add_argument("--device", help="torch device (default: cuda if available, otherwise cpu)")
    command.add_argument("--json", action="store_true", help="print JSON")


def _add_inspect(commands: Any) -> None:
    command = commands.add_parser(
        "inspect", help="list the layers of a checkpoint, or of a running quantization (OUT.partial)"
    )
    command.set_defaults(run=_inspect)
    command.add_argument("checkpoint", metavar="CKPT", help="checkpoint directory, or OUT.partial")
    command.add_argument("--json", action="store_true", help="print JSON")


def _add_report(commands: Any) -> None:
    command = commands.add_parser("report", help="plot sizes, errors and bounds of a checkpoint on one HTML page")
    command.set_defaults(run=_report)
    command.add_argument("checkpoint", metavar="CKPT", help="checkpoint directory")
    command.add_argument("-o", "--output", default="report.html", help="HTML file to write (default report.html)")


def _add_eval(commands: Any) -> None:
    command = commands.add_parser("eval", help="measure perplexity, divergence from a baseline, and zero-shot tasks")
    command.set_defaults(run=_eval)
    command.add_argument("model", metavar="MODEL_OR_CKPT", help="directory or hub name")
    text = command.add_mutually_exclusive_group()
    text.add_argument("--text", help="text file, or documents in .jsonl, .csv or .parquet")
    text.add_argument("--dataset", help="wikitext2, c4, or a hub dataset org/name[:config]")
    command.add_argument("--tasks", nargs="+", help="names of lm-eval tasks, run zero-shot")
    command.add_argument("--include-path", help="folder with more lm-eval task definitions")
    command.add_argument("--limit", type=float, help="documents per task; a number below 1 is a fraction of them")
    command.add_argument("--baseline", help="original model; also measure KL divergence and top-1 agreement with it")
    command.add_argument("--seq-len", type=int, help="tokens per window of the text (default 2048)")
    command.add_argument(
        "--batch-size", type=int, help="text windows (default 1) or task requests (default 8) per forward pass"
    )
    command.add_argument("--device", help="torch device (default: cuda if available, otherwise cpu)")
    command.add_argument(
        "--dtype",
        default="auto",
        help="float32, bfloat16, float16 or auto: float32 on a CPU, otherwise the stored dtype (default auto)",
    )
    command.add_argument("--json", action="store_true", help="print JSON")


def _verify(options: argparse.Namespace) -> int:
    from vllm_latq.format.verify import verify

    for name in ("model", "calibration", "tolerance", "device"):
        if not options.certificate and getattr(options, name) is not None:
            raise UsageError(f"--{name} requires --certificate.")
    problems = [str(problem) for problem in verify(options.checkpoint)]
    if options.certificate and not problems:
        problems = [str(problem) for problem in _certificate(options)]
    if options.json:
        found: dict[str, Any] = {"checkpoint": options.checkpoint, "valid": not problems, "problems": problems}
        console.print_json(found)
    else:
        for problem in problems:
            print(f"latq: {problem}", file=sys.stderr)
        verdict = f"{len(problems)} problem(s)" if problems else "valid"
        if options.certificate and not problems:
            verdict += ", errors and bounds confirmed"
        print(f"{options.checkpoint}: {verdict}")
    return 1 if problems else 0


def _certificate(options: argparse.Namespace) -> Iterator[LatqError]:
    from vllm_latq.quantize.certificate.certificate import verify_certificate
    from vllm_latq.quantize.model.loading import model_directory

    if options.model is None:
        raise UsageError("--certificate requires --model: errors are measured against the original model.")
    model = model_directory(options.model)
    given = {"tolerance": options.tolerance} if options.tolerance is not None else {}
    return verify_certificate(options.checkpoint, model, options.calibration, device=options.device, **given)


def _inspect(options: argparse.Namespace) -> int:
    from vllm_latq.cli.inspect import inspect_checkpoint
    from vllm_latq.quantize.runs.progress import is_partial

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
            console.bits(layer["served_bits"]),
            f"{100 * layer['outlier_density']:.2f}%",
            console.number(layer["relative_error"]),
            console.number(layer["error"]),
            console.claim(layer["bound"], layer["bound_holds"]),
        )
        for layer in summary["layers"]
    ]
    bits, served = (console.bits(summary[key]) for key in ("bits_per_weight", "served_bits_per_weight"))
    size, error = f"{summary['bytes']:,} bytes", console.number(summary["error"])
    rows.append(("total", f"{summary['weights']:,}", size, bits, served, "", "", error, ""))
    columns = ("linear", "shape", "encoding", "bits", "served", "outliers", "relative error", "error", "bound")
    console.print_table(options.checkpoint, columns, rows)
    if summary["loss"] is not None:
        print(console.prediction(summary["loss"], summary["loss_bound"]))
    return 0


def _inspect_partial(options: argparse.Namespace) -> int:
    from vllm_latq.quantize.runs.progress import partial_progress

    progress = partial_progress(options.checkpoint)
    if options.json:
        console.print_json(progress)
        return 0
    rows = [
        (
            layer["name"],
            *(console.number(layer[key]) for key in ("bits", "relative_error", "error")),
            console.claim(layer["bound"], layer["bound_holds"]),
        )
        for layer in progress["layers"]
    ]
    title = (
        f"{options.checkpoint}: {progress['shards_done']} of {progress['shards']} shards, {progress['bytes']:,} bytes"
    )
    console.print_table(title, ("linear", "bits", "relative error", "error", "bound"), rows)
    return 0


def _report(options: argparse.Namespace) -> int:
    from vllm_latq.cli.report_page import write_report_page

    write_report_page(options.checkpoint, options.output)
    print(options.output)
    return 0


def _eval(options: argparse.Namespace) -> int:
    source = options.text or options.dataset
    _check_eval(options, source)
    text = _perplexity(options, source) if source is not None else {}
    tasks = _tasks(options) if options.tasks else {}
    if options.json:
        console.print_json(text | ({"tasks": tasks} if options.tasks else {}))
        return 0
    rows = [(name, console.number(value, 6)) for name, value in text.items()]
    rows += [
        (f"{task} {metric}", console.number(value, 4))
        for task, metrics in tasks.items()
        for metric, value in metrics.items()
        if isinstance(value, float | int)
    ]
    console.print_table(options.model, ("measure", "value"), rows)
    return 0


def _check_eval(options: argparse.Namespace, source: str | None) -> None:
    """Raise UsageError if there is neither text nor task, or if an option would have no effect."""
    if source is None and not options.tasks:
        raise UsageError("eval requires --text, --dataset or --tasks.")
    for name in ("baseline", "seq_len"):
        if getattr(options, name) is not None and source is None:
            raise UsageError(f"--{name.replace('_', '-')} requires --text or --dataset.")
    for name in ("limit", "include_path"):
        if getattr(options, name) is not None and not options.tasks:
            raise UsageError(f"--{name.replace('_', '-')} requires --tasks.")


def _perplexity(options: argparse.Namespace, source: str) -> dict[str, Any]:
    """Return the measurements of `evaluate` on the text. Options that are not given keep its defaults."""
    from vllm_latq.quantize.evaluation.evaluate import evaluate

    given = {name: value for name in ("seq_len", "batch_size") if (value := getattr(options, name)) is not None}
    found = evaluate(
        options.model, source, baseline=options.baseline, device=options.device, dtype=options.dtype, **given
    )
    return found.to_dict()


def _tasks(options: argparse.Namespace) -> dict[str, Any]:
    """Return the metrics of the lm-eval tasks."""
    from vllm_latq.quantize.evaluation.tasks import run_tasks

    given = {"batch_size": options.batch_size} if options.batch_size is not None else {}
    shared = {"device": options.device, "dtype": options.dtype, **given}
    return run_tasks(options.model, options.tasks, limit=options.limit, include_path=options.include_path, **shared)


def _is_reporting_rank() -> bool:
    """Return whether this process reports errors and warnings. Only the first process of torchrun does."""
    return os.environ.get("RANK", "0") == "0"


if __name__ == "__main__":
    sys.exit(main())
