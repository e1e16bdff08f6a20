"""Write docs/options.md: every option of every command, from the parser of `latq` and from `Recipe`.

python docs/scripts/options.py
"""

import argparse
import re
from collections.abc import Iterator
from dataclasses import MISSING, fields
from pathlib import Path

from vllm_latq.cli.main import build_parser
from vllm_latq.quantize.recipe import METHODS, UNUSED, Recipe

PAGE = Path(__file__).parents[1] / "options.md"
HEAD = """# Options
`docs/scripts/options.py` writes this page from the parser of `latq` and from `Recipe`. A test compares the two.

The options of the recipe have the same names in Python, with `_` instead of `-`: `--group-size 64` is
`vllm_latq.quantize(..., group_size=64)`. A method refuses an option that it does not use. [Choose](choose.md) says
which options to try first. `latq --print-completion bash` prints completions for a shell.
"""


def page() -> str:
    """Return the text of the page."""
    return (
        "\n".join([HEAD, *(line for name, command in _commands() for line in _section(name, command))]).rstrip() + "\n"
    )


def _commands() -> Iterator[tuple[str, argparse.ArgumentParser]]:
    """Yield the name and the parser of each command."""
    for action in build_parser()._actions:
        if isinstance(action, argparse._SubParsersAction):
            yield from action.choices.items()


def _section(name: str, command: argparse.ArgumentParser) -> Iterator[str]:
    """Yield the lines of a command: a table for each group of its options."""
    positional = [action for action in command._actions if not action.option_strings]
    usage = " ".join(str(action.metavar or action.dest) for action in positional)
    yield f"## latq {name}\n"
    yield f"`latq {name} {usage} [OPTIONS]`\n"
    for group in command._action_groups:
        actions = [action for action in group._group_actions if action.option_strings and action.dest != "help"]
        if not actions:
            continue
        if group.title not in ("options", "positional arguments"):
            yield f"### {name}: {group.title}\n"
        recipe = name == "quantize" and any(action.dest in _DEFAULTS for action in actions)
        yield "| option | default | choices |" + (" methods |" if recipe else "") + " meaning |"
        yield "|---" * (5 if recipe else 4) + "|"
        for action in actions:
            cells = [f"`{action.option_strings[-1]}`", _default(action, recipe), _choices(action)]
            cells += [_methods(action)] if recipe else []
            yield f"| {' | '.join([*cells, _meaning(action)])} |"
        yield ""


_DEFAULTS = {field.name: field.default for field in fields(Recipe)}


def _default(action: argparse.Action, recipe: bool) -> str:
    """Return the default of an option; empty where leaving the option out lets the program choose."""
    default = action.default
    if recipe and default in (None, argparse.SUPPRESS):
        default = _DEFAULTS.get(action.dest)
    if isinstance(default, bool):
        return ""
    if default in (None, MISSING, argparse.SUPPRESS):
        stated = re.search(r"default:? ([^();]+)", action.help or "")
        return stated[1] if stated else ""
    return f"`{default}`"


def _choices(action: argparse.Action) -> str:
    return ", ".join(f"`{choice}`" for choice in action.choices or ())


def _methods(action: argparse.Action) -> str:
    """Return the methods that read a field of the recipe."""
    takers = [method for method in METHODS if action.dest not in UNUSED[method]]
    return "all" if len(takers) == len(METHODS) else ", ".join(takers)


def _meaning(action: argparse.Action) -> str:
    """Return the help text without the note of defaults and methods, which have columns of their own."""
    text = re.sub(r"%\(\w+\)s", "", action.help or "")
    note = re.search(r" \(([^()]*)\)$", text)
    if note and ("default" in note[1] or set(note[1].split(", ")) <= set(METHODS)):
        text = text[: note.start()]
    return text.replace("|", "\\|")


if __name__ == "__main__":
    PAGE.write_text(page())
