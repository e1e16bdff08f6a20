"""The `latq` command: plan, trace, quantize, eval, inspect, report, verify, export.

Exit status: 0 success, 1 an error that was reported, 2 wrong usage, 130 interrupted.
"""

import argparse
import errno
import os
import sys
import time
import warnings
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import vllm_latq
from vllm_latq import console
from vllm_latq.cli import evaluate as cli_evaluate
from vllm_latq.cli import export as cli_export
from vllm_latq.cli import inspect as cli_inspect
from vllm_latq.cli import plan as cli_plan
from vllm_latq.cli import quantize as cli_quantize
from vllm_latq.cli import trace as cli_trace
from vllm_latq.cli.parser import FILES, FOLDERS, Parser, PrintCompletion, complete
from vllm_latq.errors import CalibrationError, ConfigError, LatqError, RankError, UsageError

# torchrun starts several processes, and most errors occur in all of them. The first process reports the error and ends,
# and torchrun then ends the others. Another process reports an error only if it is still running after this time.
ERROR_REPORT_GRACE_SECONDS = 30.0
EXAMPLES = """examples:
  latq quantize Qwen/Qwen3-8B OUT --bits 3 --calibration wikitext2
  latq eval OUT --dataset wikitext2 --baseline Qwen/Qwen3-8B
  latq inspect OUT
  vllm serve OUT --quantization latq

`latq COMMAND --help` lists the options of a command. `latq --print-completion bash` prints completions for a shell."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit status."""
    console.prepare_streams()
    warnings.showwarning = console.WarnOnce(console.is_reporting_rank())
    options = argparse.Namespace(run=None)
    try:
        parser = build_parser()
        options = parser.parse_args(arguments)
        if options.run is None:
            parser.print_help()
        status: int = options.run(options) if options.run else 0
        sys.stdout.flush()  # a write error is raised here, not at exit
        return status
    except LatqError as error:
        # A RankError occurs where the first process may be the one that hangs.
        if not console.is_reporting_rank() and not isinstance(error, RankError):
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
    parser = Parser(
        prog="latq",
        description="Lattice quantization with an error guarantee.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.set_defaults(run=None)
    parser.add_argument("--version", action="version", version=f"vllm-latq {vllm_latq.__version__}")
    parser.add_argument(
        "--print-completion",
        action=PrintCompletion,
        choices=("bash", "zsh", "tcsh"),
        help="print a script that completes commands and options in a shell",
    )
    commands = parser.add_subparsers(metavar="COMMAND")
    cli_plan.add_command(commands)
    cli_trace.add_command(commands)
    cli_quantize.add_command(commands)
    cli_evaluate.add_command(commands)
    cli_inspect.add_command(commands)
    _add_report(commands)
    _add_verify(commands)
    cli_export.add_command(commands)
    return parser


def _add_verify(commands: Any) -> None:
    command = commands.add_parser("verify", help="check every invariant of a checkpoint")
    command.set_defaults(run=_verify)
    complete(command.add_argument("checkpoint", metavar="CKPT", help="checkpoint directory"), FOLDERS)
    certificate = command.add_argument_group("certificate: the errors and bounds in the report")
    certificate.add_argument(
        "--certificate", action="store_true", help="recompute them; requires --model, and --calibration as in the run"
    )
    certificate.add_argument("--model", help="original model: directory or hub name")
    text = certificate.add_argument("--calibration", help="calibration text of the run, as given to `latq quantize`")
    complete(text, FILES)
    certificate.add_argument("--tolerance", type=float, help="relative tolerance of each comparison (default 0.01)")
    certificate.add_argument("--device", help="torch device (default: cuda if available, otherwise cpu)")
    command.add_argument("--json", action="store_true", help="print JSON")


def _add_report(commands: Any) -> None:
    command = commands.add_parser("report", help="plot sizes, errors and bounds of a checkpoint on one HTML page")
    command.set_defaults(run=_report)
    complete(command.add_argument("checkpoint", metavar="CKPT", help="checkpoint directory"), FOLDERS)
    command.add_argument("-o", "--output", default="report.html", help="HTML file to write (default report.html)")


def _verify(options: argparse.Namespace) -> int:
    for name in ("model", "calibration", "tolerance", "device"):
        if not options.certificate and getattr(options, name) is not None:
            raise UsageError(f"--{name} requires --certificate.")
    checks = "files, linears and fingerprint" + ("; then errors and bounds" if options.certificate else "")
    with console.ProgressDisplay(header=[f"{options.checkpoint}: {checks}"]) as display:
        from vllm_latq.events import stage_progress
        from vllm_latq.format.verify import verify

        problems = [str(problem) for problem in verify(options.checkpoint, stage_progress(display, "checking"))]
        if options.certificate and not problems:
            display.progress.status = "  reading the original model and the calibration text"
            problems = [str(problem) for problem in _certificate(options, display)]
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


def _certificate(options: argparse.Namespace, display: console.ProgressDisplay) -> Iterator[LatqError]:
    from vllm_latq.events import stage_progress
    from vllm_latq.quantize.certificate.certificate import verify_certificate
    from vllm_latq.quantize.model.loading import model_directory

    if options.model is None:
        raise UsageError("--certificate requires --model: errors are measured against the original model.")
    model = model_directory(options.model)
    given = {"tolerance": options.tolerance} if options.tolerance is not None else {}
    stages = partial(stage_progress, display)
    return verify_certificate(
        options.checkpoint, model, options.calibration, device=options.device, stages=stages, **given
    )


def _report(options: argparse.Namespace) -> int:
    with console.ProgressDisplay(header=[f"{options.checkpoint} -> {options.output}"], waiting="reading and drawing"):
        from vllm_latq.cli.report_page import write_report_page

        write_report_page(options.checkpoint, options.output)
    print(options.output)
    return 0


if __name__ == "__main__":
    sys.exit(main())
