"""The command `latq export`: a checkpoint for servers that have no plugin for it."""

import argparse
from typing import Any

from vllm_latq import console
from vllm_latq.cli.parser import FOLDERS, complete
from vllm_latq.format.scheme import EXPORT_FORMATS


def add_command(commands: Any) -> None:
    """Add `export` to the subparsers of `latq`."""
    command = commands.add_parser("export", help="write a checkpoint that vLLM and transformers load without a plugin")
    command.set_defaults(run=run)
    complete(
        command.add_argument(
            "checkpoint", metavar="CKPT", help="checkpoint of rtn, gptq, or latq with --grid group; without outliers"
        ),
        FOLDERS,
    )
    command.add_argument("--to", choices=EXPORT_FORMATS, required=True, help="format to write")
    output = command.add_argument("-o", "--output", help="directory to create (default: CKPT-compressed-tensors)")
    complete(output, FOLDERS)


def run(options: argparse.Namespace) -> int:
    """Run the command and return its exit status."""
    checkpoint = options.checkpoint.rstrip("/")
    output = options.output or f"{checkpoint}-{options.to}"
    with console.ProgressDisplay(header=[f"{checkpoint} -> {output}"]) as display:
        from vllm_latq.events import stage_progress
        from vllm_latq.quantize.export import export_checkpoint

        export_checkpoint(checkpoint, output, options.to, stage_progress(display, "exporting"))
    print(output)
    return 0
