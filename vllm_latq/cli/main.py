"""The `latq` command: quantize, verify, inspect, report, eval.

Exit status: 0 done, 1 a problem that was reported, 2 wrong usage, 130 interrupted.
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
from vllm_latq.cli import quantize as cli_quantize
from vllm_latq.errors import LatqError, UsageError

# How long the other processes of torchrun wait for the first one to report an error that all of them meet. torchrun
# ends them when the first one ends; only an error that no other process meets is reported after this time.
ERROR_REPORT_GRACE_SECONDS = 30.0


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit status."""
    options = build_parser().parse_args(arguments)
    warnings.showwarning = console.WarnOnce(_is_reporting_rank())
    console.prepare_streams()
    try:
        status: int = options.run(options)
        sys.stdout.flush()  # what cannot be written fails here, and not at exit
        return status
    except LatqError as error:
        if not _is_reporting_rank():
            time.sleep(ERROR_REPORT_GRACE_SECONDS)
        print(f"latq: {error}", file=sys.stderr)
        return 1
    except OSError as error:
        if error.errno not in (errno.EPIPE, errno.ENOSPC):
            raise
        # The reader of the output is gone, or the disk is full. Buffered output must not fail again at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if error.errno == errno.ENOSPC:
            print(f"latq: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt as interrupt:
        print("; ".join(("latq: interrupted", *map(str, interrupt.args))), file=sys.stderr)
        return 130


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of `latq` and all its commands."""
    parser = argparse.ArgumentParser(prog="latq", description="Lattice quantization with an error guarantee.")
    parser.add_argument("--version", action="version", version=f"vllm-latq {vllm_latq.__version__}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    cli_quantize.add_command(commands)
    _add_verify(commands)
    _add_inspect(commands)
    _add_report(commands)
    _add_eval(commands)
    return parser


def _add_verify(commands: Any) -> None:
    command = commands.add_parser("verify", help="check every invariant of a checkpoint")
    command.set_defaults(run=_verify)
    command.add_argument("checkpoint", metavar="CKPT")
    certificate = command.add_argument_group("certificate: the errors and bounds that the report claims")
    certificate.add_argument(
        "--certificate", action="store_true", help="recompute them; requires --model and the --calibration of the run"
    )
    certificate.add_argument("--model", help="the original model, directory or hub name")
    certificate.add_argument("--calibration", help="the calibration text that `latq quantize` was given")
    certificate.add_argument("--tolerance", type=float, help="relative tolerance of each number (default 0.01)")
    certificate.add_argument("--device", help="torch device (default: cuda where there is one)")
    command.add_argument("--json", action="store_true")


def _add_inspect(commands: Any) -> None:
    command = commands.add_parser("inspect", help="show the layers of a checkpoint, or of the OUT.partial of a run")
    command.set_defaults(run=_inspect)
    command.add_argument("checkpoint", metavar="CKPT")
    command.add_argument("--json", action="store_true")


def _add_report(commands: Any) -> None:
    command = commands.add_parser("report", help="write a page with plots: sizes, errors and bounds of a checkpoint")
    command.set_defaults(run=_report)
    command.add_argument("checkpoint", metavar="CKPT")
    command.add_argument("-o", "--output", default="report.html", help="HTML file to write (default report.html)")


def _add_eval(commands: Any) -> None:
    command = commands.add_parser("eval", help="perplexity, divergence from a baseline, zero-shot tasks")
    command.set_defaults(run=_eval)
    command.add_argument("model", metavar="MODEL_OR_CKPT")
    text = command.add_mutually_exclusive_group()
    text.add_argument("--text", help="text file, or documents in .jsonl, .csv or .parquet")
    text.add_argument("--dataset", help="wikitext2, c4, or a hub dataset org/name[:config]")
    command.add_argument("--tasks", nargs="+", help="lm-eval tasks, zero-shot")
    command.add_argument("--include-path", help="folder with further lm-eval task definitions")
    command.add_argument("--limit", type=float, help="documents per task (a fraction below 1: share of them)")
    command.add_argument("--baseline", help="original model: adds KL divergence and top-1 agreement")
    command.add_argument("--seq-len", type=int, help="tokens per window of the text (default 2048)")
    command.add_argument(
        "--batch-size", type=int, help="windows of text per forward pass (default 1); for tasks, requests (default 8)"
    )
    command.add_argument("--device", help="torch device (default: cuda where there is one)")
    command.add_argument(
        "--dtype", default="auto", help="float32, bfloat16, float16 or auto (float32 on a CPU, otherwise as stored)"
    )
    command.add_argument("--json", action="store_true")


def _verify(options: argparse.Namespace) -> int:
    from vllm_latq.format.verify import verify

    for name in ("model", "calibration", "tolerance", "device"):
        if not options.certificate and getattr(options, name) is not None:
            raise UsageError(f"--{name} requires --certificate")
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
        raise UsageError("--certificate requires --model, the original model: errors are measured from its weights")
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
    """Raise UsageError if there is nothing to evaluate on, or an option that nothing reads."""
    if source is None and not options.tasks:
        raise UsageError("eval requires --text, --dataset or --tasks")
    for name in ("baseline", "seq_len"):
        if getattr(options, name) is not None and source is None:
            raise UsageError(f"--{name.replace('_', '-')} requires --text or --dataset")
    for name in ("limit", "include_path"):
        if getattr(options, name) is not None and not options.tasks:
            raise UsageError(f"--{name.replace('_', '-')} requires --tasks")


def _perplexity(options: argparse.Namespace, source: str) -> dict[str, Any]:
    """Return what `evaluate` measures on the text; options that are not given keep its defaults."""
    from vllm_latq.quantize.evaluation.evaluate import evaluate

    given = {name: value for name in ("seq_len", "batch_size") if (value := getattr(options, name)) is not None}
    found = evaluate(
        options.model, source, baseline=options.baseline, device=options.device, dtype=options.dtype, **given
    )
    return found.to_dict()


def _tasks(options: argparse.Namespace) -> dict[str, Any]:
    """Return the metrics of lm-eval's tasks."""
    from vllm_latq.quantize.evaluation.tasks import run_tasks

    given = {"batch_size": options.batch_size} if options.batch_size is not None else {}
    shared = {"device": options.device, "dtype": options.dtype, **given}
    return run_tasks(options.model, options.tasks, limit=options.limit, include_path=options.include_path, **shared)


def _is_reporting_rank() -> bool:
    """Whether this process reports errors and warnings: the first of those that torchrun starts."""
    return os.environ.get("RANK", "0") == "0"


if __name__ == "__main__":
    sys.exit(main())
