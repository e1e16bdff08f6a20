"""The parser of `latq`: errors in one line, with the nearest name for a typo and our name for a peer's option."""

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

from vllm_latq.errors import nearest

# Option of a peer -> our option or argument. llm-compressor, GPTQModel, AutoRound, exllamav3, GPTQ's own program.
PEER_OPTIONS = {
    **dict.fromkeys(("wbits", "w-bits", "num-bits", "weight-bits", "bpw"), "--bits"),
    **dict.fromkeys(("groupsize", "q-group-size"), "--group-size"),
    **dict.fromkeys(("dataset", "data", "calib-data", "calib-dataset", "calibration-dataset", "text"), "--calibration"),
    **dict.fromkeys(("nsamples", "num-calibration-samples", "calib-size", "cal-rows"), "--num-samples"),
    **dict.fromkeys(("seqlen", "max-seq-length", "max-seq-len", "max-length", "cal-cols"), "--seq-len"),
    **dict.fromkeys(("percdamp", "damp-percent", "dampening-frac"), "--damping"),
    **dict.fromkeys(("scheme", "format", "quant-method", "quantization", "algorithm", "qformat"), "--method"),
    **dict.fromkeys(("desc-act", "act-order", "actorder"), "--order act"),
    **dict.fromkeys(("ignore-layers", "fp-layers", "modules-to-not-convert"), "--ignore"),
    **dict.fromkeys(("quant-lm-head",), "--lm-head"),
    **dict.fromkeys(("low-gpu-mem-usage",), "--offload disk"),
    **dict.fromkeys(("device-map", "devices", "gpu"), "--device"),
    **dict.fromkeys(("model", "model-name", "model-id", "model-path", "model-name-or-path", "in-dir"), "MODEL"),
    **dict.fromkeys(("output", "output-dir", "out-dir", "save", "save-dir", "export-dir", "save-path"), "OUT"),
    **dict.fromkeys(("model-args", "pretrained"), "MODEL_OR_CKPT"),
}


def json_object(text: str) -> dict[str, Any]:
    """Return a JSON object; ValueError for any other text."""
    found = json.loads(text)
    if not isinstance(found, dict):
        raise ValueError(text)
    return found


_VALUES: dict[Any, str] = {int: "a whole number", float: "a number", json_object: "a JSON object"}
# Files and folders for the completion of shells, in the form that shtab reads.
FILES = {"bash": "_shtab_compgen_files", "zsh": "_files", "tcsh": "f"}
FOLDERS = {"bash": "_shtab_compgen_dirs", "zsh": "_files -/", "tcsh": "d"}


def complete(action: argparse.Action, kind: Mapping[str, str]) -> None:
    """Let shells complete the values of an option or argument with FILES or FOLDERS."""
    vars(action)["complete"] = kind


def add_engine_args(command: argparse.ArgumentParser) -> None:
    """Add the option for vLLM's engine arguments."""
    command.add_argument(
        "--engine-args",
        type=json_object,
        help="vLLM's engine arguments as a JSON object, such as '{\"tensor_parallel_size\": 2}'",
    )


class Parser(argparse.ArgumentParser):
    """An argument parser that reports a mistake in one line, without a dump of its usage."""

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Parse arguments; an unknown option ends the program with the name that was most likely meant."""
        args = sys.argv[1:] if args is None else list(args)
        for argument in args:
            if argument == "--" or argument in (action.dest for action in self._actions if action.nargs == "..."):
                break
            self._check_option(argument.partition("=")[0])
            if self._commands and not argument.startswith("-"):
                break  # the parser of the command checks the rest
        return super().parse_known_args(args, namespace)

    def error(self, message: str) -> NoReturn:
        """Print a mistake in one line, and exit."""
        if not message.endswith((".", "?")):
            message += "."
        self.exit(2, f"latq: {message.removeprefix('argument ')} See {self.prog} --help.\n")

    @property
    def _commands(self) -> Sequence[Any]:
        return [action for action in self._actions if isinstance(action, argparse._SubParsersAction)]

    def _check_option(self, option: str) -> None:
        known = self._option_string_actions
        if not option.startswith("--") or any(name.startswith(option) for name in known):
            return
        name = option.removeprefix("--").lower().replace("_", "-")
        arguments = {action.metavar for action in self._actions if not action.option_strings}
        ours = f"--{name}" if f"--{name}" in known else PEER_OPTIONS.get(name, "")
        if ours.partition(" ")[0] in known:
            self.error(f"{option} is not an option of {self.prog}; its name here is {ours}.")
        if ours in arguments:
            self.error(f"{option} is not an option of {self.prog}; give {ours} without an option.")
        self.error(f"{option} is not an option of {self.prog}.{nearest(option, known)}")

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        """Raise ArgumentError for a value that is none of the choices."""
        if action.choices is None or value in action.choices:
            return
        choices = list(map(str, action.choices))
        if isinstance(action, argparse._SubParsersAction):
            message = f"{value!r} is not a command.{nearest(str(value), choices)} Commands: {', '.join(choices)}."
            raise argparse.ArgumentError(None, message)
        expected = f"expected one of {', '.join(choices)}, found {value!r}."
        raise argparse.ArgumentError(action, expected + nearest(str(value), choices))

    def _get_value(self, action: argparse.Action, arg_string: str) -> Any:
        """Return the value of a text; raise ArgumentError in our words."""
        try:
            return super()._get_value(action, arg_string)
        except argparse.ArgumentError:
            expected = _VALUES.get(action.type, "a number")
            raise argparse.ArgumentError(action, f"expected {expected}, found {arg_string!r}.") from None


class PrintCompletion(argparse.Action):
    """The option that prints a script which completes commands and options in a shell."""

    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: str | None = None) -> None:
        """Print the script, and exit."""
        try:
            import shtab
        except ImportError:
            parser.error("--print-completion requires shtab: run pip install shtab.")
        print(shtab.complete(parser, shell=values))
        parser.exit()
