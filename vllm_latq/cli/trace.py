"""The command `latq trace`: lets a model answer prompts, and writes the conversations."""

import argparse
from typing import Any

from vllm_latq import console
from vllm_latq.cli.parser import FILES, FOLDERS, add_engine_args, complete

EXAMPLES = """examples:
  latq trace MODEL -o trace.jsonl
  latq trace MODEL -o trace.jsonl --prompts prompts.txt --num 1024
  latq quantize MODEL OUT --calibration trace.jsonl
  latq eval OUT --text trace.jsonl --baseline MODEL

quantize takes the half that is for calibration, and eval the half that is for evaluation."""


def add_command(commands: Any) -> None:
    """Add `trace` to the subparsers of `latq`."""
    command = commands.add_parser(
        "trace",
        help="let a model answer prompts, as text for calibration and evaluation",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    command.set_defaults(run=run)
    complete(command.add_argument("model", metavar="MODEL", help="model directory or hub name"), FOLDERS)
    command.add_argument("-o", "--output", required=True, help="file to create, JSON lines of conversations")
    prompts = command.add_argument(
        "--prompts",
        help="text file with a prompt in each line, or JSON lines with `prompt` or `messages` (default: 96 bundled)",
    )
    complete(prompts, FILES)
    command.add_argument("--num", type=int, help="number of answers (default 512)")
    command.add_argument("--max-tokens", type=int, help="tokens of an answer, at most (default 1024)")
    command.add_argument("--seed", type=int, help="seed of the first answer (default 0)")
    add_engine_args(command)
    command.add_argument("--json", action="store_true", help="print JSON")


def run(options: argparse.Namespace) -> int:
    """Run the command and return its exit status."""
    names = ("prompts", "num", "max_tokens", "seed", "engine_args")
    given = {name: value for name in names if (value := getattr(options, name)) is not None}
    with console.ProgressDisplay(header=[f"{options.model}: trace", f"-> {options.output}"]) as display:
        from vllm_latq.api import trace

        found = trace(options.model, options.output, on_event=display, **given)
    if options.json:
        console.print_json({"output": options.output, **found._asdict()})
        return 0
    unfinished = f"{found.unfinished} of them cut off at the longest length"
    console.print_facts({"answers": f"{found.answers}, {unfinished}", "file": options.output})
    return 0
