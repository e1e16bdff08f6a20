"""The command `latq eval`: measures a model or checkpoint, and keeps the results beside the checkpoint."""

import argparse
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from vllm_latq import console
from vllm_latq.cli.parser import FILES, FOLDERS, add_engine_args, complete
from vllm_latq.errors import UsageError, refusal

EXAMPLES = """examples:
  latq eval OUT --dataset wikitext2 --baseline MODEL
  latq eval OUT --text other.txt --baseline MODEL --max-windows 32
  latq eval OUT --text trace.jsonl --baseline MODEL
  latq eval MODEL --text trace.jsonl --save-reference model.ref
  latq eval OUT --text trace.jsonl --reference model.ref --through vllm
  latq eval OUT --tasks arc_easy hellaswag --limit 200

The results are added to OUT/latq_evaluation.json, which `latq report` shows."""
ANSWERS = 3
# Measurement -> how it is shown.
_SHOWN = {
    "perplexity": "perplexity",
    "baseline_perplexity": "perplexity of the baseline",
    "kl": "KL divergence from the baseline",
    "kl_median": "KL, median",
    "kl_p99": "KL, 99th percentile",
    "kl_max": "KL, largest",
    "kl_unseen": "probability not listed",
    "top1_agreement": "top-1 agreement",
    "tokens_per_second": "tokens per second",
}


def add_command(commands: Any) -> None:
    """Add `eval` to the subparsers of `latq`."""
    command = commands.add_parser(
        "eval",
        help="measure perplexity, divergence from a baseline, and zero-shot tasks",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    command.set_defaults(run=run)
    complete(command.add_argument("model", metavar="MODEL_OR_CKPT", help="directory or hub name"), FOLDERS)
    text = command.add_mutually_exclusive_group()
    complete(
        text.add_argument("--text", help="text file; documents or conversations in .jsonl, .csv or .parquet"), FILES
    )
    text.add_argument("--dataset", help="wikitext2, c4, or a hub dataset org/name[:config]")
    command.add_argument("--max-windows", type=int, help="windows of the text to evaluate (default: all)")
    command.add_argument("--tasks", nargs="+", help="names of lm-eval tasks, run zero-shot")
    complete(command.add_argument("--include-path", help="folder with more lm-eval task definitions"), FOLDERS)
    command.add_argument("--limit", type=float, help="documents per task; a number below 1 is a fraction of them")
    baseline = "original model; also measure KL divergence and top-1 agreement with it"
    complete(command.add_argument("--baseline", help=baseline), FOLDERS)
    reference = "file of --save-reference, in place of --baseline"
    complete(command.add_argument("--reference", help=reference), FILES)
    command.add_argument(
        "--save-reference",
        help="file for the likeliest tokens of the original model: of --baseline or, without it, of the model",
    )
    command.add_argument(
        "--through",
        choices=("transformers", "vllm"),
        help="program that runs the model: vllm measures what is served (default transformers)",
    )
    add_engine_args(command)
    command.add_argument("--seq-len", type=int, help="tokens per window of the text (default 2048)")
    command.add_argument(
        "--answers", type=int, help=f"prompts that both models continue, with --baseline (default {ANSWERS})"
    )
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


def run(options: argparse.Namespace) -> int:
    """Run the command and return its exit status."""
    source = options.text or options.dataset
    _check(options, source)
    header = [f"{options.model}: evaluation", _described(options, source)]
    with console.ProgressDisplay(header=header) as display:
        from transformers.utils.logging import disable_progress_bar

        from vllm_latq.format.evaluation import evaluation_runs
        from vllm_latq.quantize.evaluation.results import add_run, is_checkpoint
        from vllm_latq.quantize.runs.card import update_card

        disable_progress_bar()  # it would break into ours

        keeps = is_checkpoint(options.model)
        if keeps:
            evaluation_runs(options.model)  # a damaged file is refused before hours of work
        text = _text(options, source, display) if source is not None else {}
        display.progress.status = "  running lm-eval"
        tasks = _tasks(options) if options.tasks else {}
    if options.json:
        console.print_json(text | ({"tasks": tasks} if options.tasks else {}))
    else:
        _show(text, tasks)
    if keeps:
        given = {name: getattr(options, name) for name in ("batch_size", "max_windows", "dtype", "device", "limit")}
        try:
            add_run(options.model, {**text, "tasks": tasks or None, "options": given})
            update_card(options.model)
        except OSError as error:
            warnings.warn(f"not kept in {options.model}: {refusal(error, Path(options.model))}", stacklevel=2)
    return 0


def _described(options: argparse.Namespace, source: str | None) -> str:
    """Return what is measured, in one line."""
    parts = [] if source is None else [f"perplexity on {source}"]
    if original := options.baseline or options.reference:
        parts.append(f"divergence from {original}")
    if options.tasks:
        parts.append(f"tasks {', '.join(options.tasks)}")
    return "; ".join(parts)


def _check(options: argparse.Namespace, source: str | None) -> None:
    """Raise UsageError if there is neither text nor task, or if an option would have no effect."""
    if source is None and not options.tasks:
        raise UsageError("eval requires --text, --dataset or --tasks.")
    for name in ("baseline", "seq_len", "max_windows", "answers", "reference", "save_reference", "through"):
        if getattr(options, name) is not None and source is None:
            raise UsageError(f"--{name.replace('_', '-')} requires --text or --dataset.")
    for name in ("limit", "include_path"):
        if getattr(options, name) is not None and not options.tasks:
            raise UsageError(f"--{name.replace('_', '-')} requires --tasks.")
    if options.answers is not None and options.baseline is None:
        raise UsageError("--answers requires --baseline.")
    if options.through == "vllm":
        for name in ("answers", "device", "tasks"):
            if getattr(options, name) is not None:
                raise UsageError(f"--{name} does not apply to --through vllm; leave it out.")
    elif options.engine_args is not None:
        raise UsageError("--engine-args requires --through vllm.")
    if options.reference is not None:
        for name in ("baseline", "save_reference"):
            if getattr(options, name) is not None:
                raise UsageError(f"--reference and --{name.replace('_', '-')} exclude each other: give one of them.")


def _text(options: argparse.Namespace, source: str, display: console.ProgressDisplay) -> dict[str, Any]:
    """Return the measurements of `evaluate` on the text. Options that are not given keep its defaults."""
    from vllm_latq.api import evaluate
    from vllm_latq.quantize.evaluation.results import described_text

    names = ("seq_len", "batch_size", "max_windows", "reference", "save_reference", "through")
    given = {name: value for name in names if (value := getattr(options, name)) is not None}
    given["answers"] = ANSWERS if options.answers is None else options.answers
    shared = {"device": options.device, "dtype": options.dtype, "engine_args": options.engine_args}
    found = evaluate(options.model, source, baseline=options.baseline, on_event=display, **shared, **given)
    return {"text": described_text(source), **found.to_dict()}


def _tasks(options: argparse.Namespace) -> dict[str, Any]:
    """Return the metrics of the lm-eval tasks."""
    from vllm_latq.quantize.evaluation.tasks import run_tasks

    given = {"batch_size": options.batch_size} if options.batch_size is not None else {}
    shared = {"device": options.device, "dtype": options.dtype, **given}
    return run_tasks(options.model, options.tasks, limit=options.limit, include_path=options.include_path, **shared)


def _show(text: Mapping[str, Any], tasks: Mapping[str, Any]) -> None:
    """Print what was measured, one fact a line."""
    facts = {shown: console.number(text[name], 6) for name, shown in _SHOWN.items() if text.get(name) is not None}
    if text.get("baseline_perplexity"):
        change = 100 * (text["perplexity"] / text["baseline_perplexity"] - 1)
        facts[_SHOWN["perplexity"]] += f" ({change:+.2f}% against the baseline)"
        facts[_SHOWN["kl"]] += " nats per token" + (", or more" if text["kl_unseen"] is not None else "")
        facts[_SHOWN["top1_agreement"]] = f"{100 * text['top1_agreement']:.2f}%"
    if text:
        facts["text"] = f"{text['text']['name']}, {text['windows']} windows of {text['seq_len']} tokens"
        if text["on_answers"]:
            facts["text"] += f"; {text['positions']} tokens of answers"
    for task, metrics in tasks.items():
        numbers = {metric: value for metric, value in metrics.items() if isinstance(value, float | int)}
        facts |= {f"{task} {metric}": console.number(value) for metric, value in numbers.items()}
    console.print_facts(facts)
