"""Measure every method and every addition on a real model: `python -m vllm_latq.quantize.studies.study`.

    python -m vllm_latq.quantize.studies.study MODEL --calibration FILE --text FILE --bits 4 3 2 1.5 [--only 'latq*']

Each row is a whole run: quantize to a checkpoint, read its bits, evaluate it against the original. KL is the judge; the
rows that lose are printed too.
"""

import argparse
import json
import math
import tempfile
import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from vllm_latq.console import print_table
from vllm_latq.errors import ConfigError, LatqError, NumericalError
from vllm_latq.quantize.evaluation.evaluate import evaluate
from vllm_latq.quantize.pipeline import quantize_checkpoint
from vllm_latq.quantize.recipe import HEAD, Recipe

COLUMNS = ("method", "bits", "served", "KL", "perplexity", "log2 error", "seconds")


@dataclass(frozen=True)
class Row:
    """One measured run.

    Attributes:
        name: of the row.
        bits: stored bits per weight, everything counted.
        served: bits per weight in memory, while it is served.
        kl: mean KL(original || quantized) of the next-token distributions, nats per token.
        perplexity: of the quantized model.
        log2_error: mean over layers of log2 of the relative squared output error.
        seconds: wall time of the quantization.
    """

    name: str
    bits: float
    served: float
    kl: float
    perplexity: float
    log2_error: float
    seconds: float

    def cells(self) -> tuple[str, ...]:
        """Texts of the cells of this row of the table."""
        return (
            self.name,
            f"{self.bits:.3f}",
            f"{self.served:.3f}",
            f"{self.kl:.2e}",
            f"{self.perplexity:.3f}",
            f"{self.log2_error:.2f}",
            f"{self.seconds:.0f}",
        )


def recipes(bits: float, num_samples: int, seq_len: int, group_size: int = 128) -> Iterator[tuple[str, Recipe]]:
    """Name and recipe of every row at about `bits` stored bits per weight.

    Packed methods exist at whole widths only and cost 16 / group_size bits more, for scales; coded ones meet `bits`. No
    row quantizes the head.
    """

    def make(method: str, **options: Any) -> Recipe:
        grid: dict[str, Any] = {"group_size": group_size} if method in ("rtn", "gptq", "ssqr") else {}
        return Recipe(method, num_samples=num_samples, seq_len=seq_len, ignore=(HEAD,), **grid, **options)

    together: dict[str, Any] = {"order": "min-pivot", "beam": 4, "sweeps": 4}
    grids: dict[str, dict[str, Any]] = {
        "signed scales": {"scales": "signed"},
        "fitted scales": {"scales": "fitted"},
        "mid-rise grid": {"grid": "midrise"},
        "fitted mid-rise grid": {"scales": "fitted", "grid": "midrise"},
    }
    if bits in (2, 3, 4):
        width = int(bits)
        yield "rtn", make("rtn", bits=width)
        yield "gptq", make("gptq", bits=width)
        yield "gptq, min-pivot", make("gptq", bits=width, order="min-pivot")
        yield "gptq, original target", make("gptq", bits=width, target="original", correction=0.5)
        yield "gptq, residual target", make("gptq", bits=width, target="residual", correction=0.5)
        for name, options in grids.items():
            yield f"gptq, {name}", make("gptq", bits=width, **options)
        yield "gptq, 4 sweeps", make("gptq", bits=width, sweeps=4)
        yield "gptq, beam of 4", make("gptq", bits=width, beam=4)
        for name in ("signed scales", "fitted mid-rise grid"):
            options = {"target": "original", "correction": 0.5, **together, **grids[name]}
            yield f"gptq, all of these, {name}", make("gptq", bits=width, **options)
        yield "ssqr 1%, by overflow", make("ssqr", bits=width, outliers="overflow")
        yield "ssqr 1%", make("ssqr", bits=width)
        yield "ssqr 1%, original target", make("ssqr", bits=width, target="original", correction=0.5)
        yield "ssqr 1%, residual target", make("ssqr", bits=width, target="residual", correction=0.5)
        yield "ssqr 1%, mid-rise grid", make("ssqr", bits=width, grid="midrise")
        yield "ssqr 1%, all of these", make("ssqr", bits=width, **together)
        yield "ssqr 1%, all of these, mid-rise grid", make("ssqr", bits=width, grid="midrise", **together)
    if bits > 1.3:
        yield "hrtn", make("hrtn", bits=bits)
        yield "hptq, natural order", make("hptq", bits=bits, order="natural")
        yield "hptq", make("hptq", bits=bits)
        yield "hptq, min-pivot", make("hptq", bits=bits, order="min-pivot")
        yield "hptq, original target", make("hptq", bits=bits, target="original", correction=0.5)
        yield "hptq, residual target", make("hptq", bits=bits, target="residual", correction=0.5)
        yield "hptq, LLL", make("hptq", bits=bits, reduction="lll")
        yield "hptq, stochastic rounding", make("hptq", bits=bits, rounding="stochastic")
        yield "hptq, beam of 4", make("hptq", bits=bits, beam=4)
    yield "latq", make("latq", bits=bits)
    yield "latq, original target", make("latq", bits=bits, target="original", correction=0.5)
    yield "latq, residual target", make("latq", bits=bits, target="residual", correction=0.5)


def measure(name: str, recipe: Recipe, options: argparse.Namespace, folder: Path) -> Row:
    """Quantize into `folder`, which must not exist, and evaluate."""
    model, windows = options.model, options.max_windows
    started = time.perf_counter()
    report = quantize_checkpoint(recipe, model, folder, calibration=options.calibration)
    seconds = time.perf_counter() - started
    how = {"seq_len": options.seq_len, "batch_size": 16, "dtype": "float32", "max_windows": windows}
    result = evaluate(folder, options.text, baseline=str(model), **how)
    assert result.kl is not None
    errors = [math.log2(max(layer["relative_error"], 1e-30)) for layer in report["layers"]]
    bits, served = (report["totals"][key] for key in ("bits_per_weight", "served_bits_per_weight"))
    return Row(name, bits, served, result.kl, result.perplexity, sum(errors) / len(errors), seconds)


def summary(measured: Sequence[Mapping[str, Any]]) -> list[str]:
    """The rows of all widths as one Markdown table: KL at each, and everything else at the width most rows have.

    Args:
        measured: as in the JSON file, in the order of the study.
    """
    widths = sorted({row["about_bits"] for row in measured}, reverse=True)
    at = {(row["name"], row["about_bits"]): row for row in measured}
    shown = max(widths, key=lambda width: sum(row["about_bits"] == width for row in measured))
    heads = [f"KL at about {width:g} bits" for width in widths]
    heads += [f"{name} ({shown:g})" for name in ("bits", "perplexity", "log2 error", "seconds")]
    lines = [f"| method | {' | '.join(heads)} |", "|---" * (len(heads) + 1) + "|"]
    for name in dict.fromkeys(row["name"] for row in measured):
        found = [at.get((name, width)) for width in widths]
        cells = ["" if row is None else f"{row['kl']:.2e}" for row in found]
        row = at.get((name, shown))
        cells += [""] * 4 if row is None else _rest(row)
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return lines


def _rest(row: Mapping[str, Any]) -> list[str]:
    return [f"{row['bits']:.3f}", f"{row['perplexity']:.3f}", f"{row['log2_error']:.2f}", f"{row['seconds']:.0f}"]


def main() -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(
        prog="python -m vllm_latq.quantize.studies.study",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("model", type=Path, metavar="MODEL")
    parser.add_argument("--calibration", required=True)
    parser.add_argument("--text", required=True)
    parser.add_argument("--bits", type=float, nargs="+", default=[4.0, 3.0, 2.0, 1.5])
    parser.add_argument("--only", nargs="+", help="rows to run, by name or pattern: hptq, latq*, ...")
    parser.add_argument("--num-samples", type=int, default=256)
    parser.add_argument("--seq-len", type=int, default=256)
    parser.add_argument("--group-size", type=int, default=128, help="inputs to a scale, -1: the whole row")
    parser.add_argument("--max-windows", type=int, help="of the text, to evaluate on (default all)")
    parser.add_argument("-o", "--output", type=Path, help="JSON file, rewritten after each row")
    options = parser.parse_args()
    warnings.simplefilter("once")
    measured: list[dict[str, Any]] = []
    for bits in options.bits:
        rows = []
        for name, recipe in recipes(bits, options.num_samples, options.seq_len, options.group_size):
            if options.only and not any(fnmatchcase(name, only) for only in options.only):
                continue
            with tempfile.TemporaryDirectory() as folder:
                try:
                    row = measure(name, recipe, options, Path(folder) / "checkpoint")
                except (ConfigError, NumericalError) as error:
                    if isinstance(error, ConfigError) and error.where != "recipe.bits":
                        raise
                    print(f"{name}: {error}")
                    continue
            rows.append(row.cells())
            measured.append({"about_bits": bits, "recipe": recipe.to_dict(), **vars(row)})
            print(*row.cells(), sep="  ", flush=True)
            if options.output:
                options.output.write_text(json.dumps(measured, indent=1) + "\n")
        print_table(f"{options.model.name}, about {bits:g} bits", COLUMNS, rows)
    if not measured:
        raise ConfigError("--only", "rows of the study that can be run", repr(options.only), "See `recipes` for names.")
    print(*summary(measured), sep="\n")


if __name__ == "__main__":
    try:
        main()
    except LatqError as error:
        raise SystemExit(f"study: {error}") from None
