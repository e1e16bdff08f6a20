"""The commands that make, check, measure and serve a checkpoint, as its card and its report page print them.

Invariant: a shell reads each argument as one word, whatever characters it has.
"""

import shlex
from collections.abc import Iterator, Mapping
from typing import Any

from vllm_latq.quantize.recipe import HEAD, Recipe


def commands(recipe: Recipe | None, model: str, output: str, calibration: Mapping[str, Any] | None) -> dict[str, str]:
    """Return what a command does -> the command.

    Args:
        recipe: of the checkpoint; None leaves out the command that makes it.
        model: name of the original model.
        output: name of the checkpoint.
        calibration: `calibration` of the report.
    """
    made = {} if recipe is None else {"Quantize": shlex.join(_quantize(recipe, model, output, calibration))}
    return made | {
        "Verify": shlex.join(["latq", "verify", output]),
        "Measure": shlex.join(["latq", "eval", output, "--dataset", "wikitext2", "--baseline", model]),
        "Serve": shlex.join(["vllm", "serve", output, "--quantization", "latq"]),
    }


def _quantize(recipe: Recipe, model: str, output: str, calibration: Mapping[str, Any] | None) -> Iterator[str]:
    """Yield the words of `latq quantize`, with every option whose value is not the default."""
    values, default = recipe.to_dict(), Recipe(recipe.method).to_dict()
    yield from ("latq", "quantize", model, output, "--method", recipe.method, "--bits", str(recipe.bits))
    for name, value in values.items():
        if name not in ("method", "bits", "ignore") and value != default.get(name):
            yield from (f"--{name.replace('_', '-')}", str(value))
    if calibration is not None:
        yield from ("--calibration", str(calibration.get("name") or "TEXT"))
    if (HEAD in recipe.ignored) != (HEAD in default["ignore"]):
        yield "--keep-lm-head" if HEAD in recipe.ignored else "--lm-head"
    if others := [name for name in recipe.ignored if name != HEAD]:
        yield from ("--ignore", *others)
