"""`latq report`: one self-contained HTML page that says how good a checkpoint is, which layer hurts, how to run it.

Invariant: everything that comes from the checkpoint is escaped. The page holds no script, and its content security
policy forbids the browser to run or fetch one. Tensors are not read, only their headers.
"""

import json
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from vllm_latq.cli.report_cells import Cell, HeatMap, Linear, cells, heat_map
from vllm_latq.cli.report_speed import decode_speeds
from vllm_latq.console import number, size
from vllm_latq.errors import ConfigError, refusal
from vllm_latq.format.evaluation import EvaluationRun, evaluation_runs
from vllm_latq.format.reader import REPORT_FILE, CheckpointReader
from vllm_latq.format.report import LayerReport, finite_number, summed
from vllm_latq.quantize.recipe import Recipe
from vllm_latq.quantize.runs.commands import commands

# KL divergences below which a checkpoint is close to its original, or differs from it noticeably. Rules of thumb: on
# the bundled model, a KL of 0.013 changes the most likely token at one of nine positions.
CLOSE, NOTICEABLE = 0.01, 0.1
# A difference in bits per weight that no heat map needs to show.
SAME_BITS = 0.005
ORDERS = {
    "stored": "as stored",
    "harm": "most harm first",
    "used": "nearest to its bound first",
    "bits": "most bits first",
}


@dataclass(frozen=True)
class Note:
    """Remarks of the same kind about linears.

    Attributes:
        texts: a remark for each linear, which begins with its name.
        violation: whether a guarantee is broken.
    """

    texts: tuple[str, ...]
    violation: bool


class ReportPage:
    """The facts that the page shows of one checkpoint.

    Args:
        directory: of the checkpoint.

    Raises:
        LatqError: the checkpoint, its report or its evaluation is damaged.
    """

    def __init__(self, directory: str | Path) -> None:
        self.reader = CheckpointReader(directory)
        self.name = Path(directory).resolve().name
        self.report = self.reader.report()
        self.runs = evaluation_runs(directory)
        measured = {record.name: record for record in self.reader.measured()}
        self.linears = [
            Linear(
                name,
                shape,
                self._stored_bits(name) / max(1, shape[0] * shape[1]),
                measured.get(name, LayerReport(name)),
            )
            for name, shape in self.reader.linears.items()
        ]
        self.cells = cells(self.linears)
        records = [linear.record for linear in self.linears]
        self.loss, self.loss_bound = summed(records, "loss"), summed(records, "loss_bound")

    def render(self) -> str:
        """Return the page as HTML text."""
        loader = FileSystemLoader(Path(__file__).parent)
        environment = Environment(
            loader=loader, autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
        )
        environment.filters |= {"number": number, "percent": _percent, "size": _size, "plain": _plain, "dots": _dots}
        return environment.get_template("report.html.jinja").render(page=self, orders=ORDERS)

    @property
    def weights(self) -> int:
        """Number of quantized weights."""
        return sum(linear.weights for linear in self.linears)

    @property
    def beside(self) -> str:
        """The quantized matrices beside the linears, in words; empty without any."""
        names, shapes = self.reader.config.beside, self.reader.shapes
        if not names:
            return ""
        kinds = f"{len(names)} matrices" if len(names) > 1 else next(iter(names))
        return f"{kinds}, {sum(math.prod(shapes[name]) for name in names):,} weights, {size(self.reader.beside_bytes)}"

    @property
    def bits(self) -> float:
        """Stored bits per quantized weight."""
        return sum(linear.bits * linear.weights for linear in self.linears) / max(1, self.weights)

    @property
    def served_bits(self) -> float:
        """Bits per quantized weight in memory while served."""
        return sum(linear.served_bits * linear.weights for linear in self.linears) / max(1, self.weights)

    @cached_property
    def bytes(self) -> int:
        """Bytes of all tensors."""
        return sum(self.reader.store.header(name).nbytes for name in self.reader.store.names())

    @property
    def method(self) -> str:
        """Name of the method; empty where the recipe does not say."""
        return str(self.reader.config.recipe.get("method", ""))

    @property
    def model(self) -> str | None:
        """Name of the original model; None where the report does not say."""
        name = self._model.get("name")
        return name if isinstance(name, str) else None

    @property
    def model_bytes(self) -> float | None:
        """Bytes of the original model's weights."""
        return finite_number(self._model.get("bytes"), f"{REPORT_FILE}: model.bytes")

    @property
    def _model(self) -> Mapping[str, Any]:
        model = self.report.get("model")
        return model if isinstance(model, Mapping) else {}

    @property
    def run(self) -> EvaluationRun | None:
        """The latest evaluation that compared the checkpoint with the original."""
        return next((run for run in reversed(self.runs) if run.kl is not None), None)

    @property
    def answers(self) -> tuple[tuple[str, str, str], ...]:
        """Prompts with the answers of original and checkpoint, of the latest evaluation that has any."""
        return next((run.answers for run in reversed(self.runs) if run.answers), ())

    @property
    def verdict(self) -> str:
        """A sentence that says how close the checkpoint is to the original."""
        kl = self.run.kl if self.run else self.loss
        if kl is None:
            return "How close it is to the original was not measured: the command `Measure` below does it."
        measured = "measured" if self.run else "predicted"
        word = "close to" if kl < CLOSE else "noticeably different from" if kl < NOTICEABLE else "far from"
        return f"By its {measured} KL divergence of {number(kl, 2)}, the checkpoint is {word} the original."

    @property
    def calibration(self) -> Mapping[str, Any] | None:
        """Description of the calibration text; None without one."""
        found = self.report.get("calibration")
        return found if isinstance(found, Mapping) else None

    @property
    def evaluated_on_calibration(self) -> bool:
        """True if the divergence was measured on the text of the calibration."""
        known = (self.calibration or {}).get("sha256")
        return bool(known) and self.run is not None and self.run.text_sha256 == known

    @property
    def speeds(self) -> list[dict[str, Any]]:
        """Bounds of the decoding speed on some GPUs."""
        return decode_speeds(self.linears, self.reader)

    @cached_property
    def commands(self) -> dict[str, str]:
        """Purpose -> command; without the one that makes the checkpoint if its recipe is not readable."""
        try:
            recipe = Recipe.from_dict(self.reader.config.recipe)
        except (TypeError, ValueError):
            recipe = None
        return commands(recipe, self.model or "MODEL", self.name, self.calibration)

    @cached_property
    def maps(self) -> list[HeatMap]:
        """The heat maps."""
        bits = [cell.bits for cell in self.cells]
        least, most = min(bits, default=0.0), max(bits, default=0.0)
        found = [self._harm_map()]
        if most - least > SAME_BITS:
            found.append(
                heat_map(
                    "Bits per weight",
                    "Stored, everything counted. Stronger colour: more bits.",
                    self.cells,
                    lambda cell: cell.bits,
                    lambda value: f"{value:.2f}",
                    lambda value: (value - least) / (most - least),
                )
            )
        note = "Loss over its bound." if self.loss is not None else "Rounding error over its worst case."
        found.append(
            heat_map("Used part of the bound", note, self.cells, lambda cell: cell.used, _percent, lambda value: value)
        )
        return [each for each in found if each is not None]

    def harm(self, cell: Cell) -> float | None:
        """Return the share of a cell in the model's loss; its relative error where there are no losses."""
        if self.loss:
            return None if cell.loss is None else cell.loss / self.loss
        return cell.relative_error

    @property
    def worst(self) -> list[tuple[str, str]]:
        """Names of the three cells that hurt most, with how much."""
        ranked = sorted(self.cells, key=lambda cell: -(self.harm(cell) or 0.0))[:3]
        return [(cell.name, _percent(self.harm(cell))) for cell in ranked if self.harm(cell)]

    def _harm_map(self) -> HeatMap | None:
        values = [value for cell in self.cells if (value := self.harm(cell))]
        least, most = min(values, default=1.0), max(values, default=1.0)
        if self.loss:
            note = "Stronger colour: more of the divergence comes from here."
            return heat_map(
                "Share of the loss", note, self.cells, self.harm, _percent, lambda value: value / max(most, 1e-30)
            )
        span = max(math.log(most / least), 1.0)
        note = "Squared error of the outputs over the squared outputs. Stronger colour: larger, on a logarithmic scale."
        return heat_map(
            "Relative error",
            note,
            self.cells,
            self.harm,
            _percent,
            lambda value: 1 - math.log(most / value) / span if value > 0 else 0.0,
        )

    def order(self, by: str) -> list[int]:
        """Return the place of each cell when the largest come first: by harm, used part of the bound, or bits."""
        keys = {"harm": self.harm, "used": lambda cell: cell.used, "bits": lambda cell: cell.bits}
        ranked = sorted(range(len(self.cells)), key=lambda index: -(keys[by](self.cells[index]) or 0.0))
        places = [0] * len(ranked)
        for place, index in enumerate(ranked):
            places[index] = place
        return places

    @cached_property
    def notes(self) -> list[Note]:
        """Remarks that affect how far the numbers can be trusted, violations first, those of one kind together."""
        kinds: dict[tuple[bool, str], list[str]] = {}
        for linear in self.linears:
            for violation, remark in _remarks(linear):
                kind = re.sub(r"\d+([.,]\d+)?(e[+-]\d+)?", "0", remark)
                kinds.setdefault((violation, kind), []).append(f"{linear.name}: {remark}.")
        ordered = sorted(kinds.items(), key=lambda item: not item[0][0])
        return [Note(tuple(texts), violation) for (violation, _), texts in ordered]

    @property
    def claims(self) -> tuple[int, int, int]:
        """Numbers of linears whose bound holds, is violated, and is not claimed."""
        found = [linear.record.bound_holds for linear in self.linears]
        return found.count(True), found.count(False), found.count(None)

    @property
    def facts(self) -> dict[str, str]:
        """How the checkpoint was made."""
        seconds = finite_number(self.report.get("seconds"), f"{REPORT_FILE}: seconds")
        versions = f"vllm-latq {_plain(self.report.get('vllm_latq'))}, torch {_plain(self.report.get('torch'))}"
        device, text = self.report.get("device"), self.calibration
        found = {
            "Original model": self.model,
            "Made": self.report.get("date"),
            "Made with": f"{versions}, on {device}" if isinstance(device, str) else versions,
            "Time": None if seconds is None else f"{seconds:,.0f} seconds",
            "Calibration": None if text is None else _plain({k: v for k, v in text.items() if k != "sha256"}),
            "SHA-256 of the text": None if text is None else text.get("sha256"),
            "Recipe": _plain(self.reader.config.recipe),
            "Fingerprint": self.reader.config.fingerprint,
        }
        return {name: _plain(value) for name, value in found.items() if value is not None}

    def _stored_bits(self, name: str) -> int:
        return 8 * sum(header.nbytes for header in self.reader.headers(name).values())


def write_report_page(directory: str | Path, output: str | Path) -> None:
    """Write the report page of a checkpoint to a file. Raise LatqError, also if the file cannot be written."""
    page = ReportPage(directory).render()
    try:
        Path(output).write_text(page, encoding="utf-8", errors="backslashreplace")
    except OSError as error:
        raise ConfigError("output", "a writable file", refusal(error, Path(output)), "Choose another path.") from None


def _remarks(linear: Linear) -> Iterator[tuple[bool, str]]:
    """Yield whether a guarantee is broken, and in which words, for each remark about a linear."""
    record = linear.record
    if record.bound_holds is False:
        yield True, "the error exceeds its bound"
    if record.bits is not None and abs(record.bits - linear.bits) > 1e-6:
        yield True, f"the report says {record.bits:.4f} bits, the files have {linear.bits:.4f}"
    if record.error is None:
        yield False, "no error was measured (no calibration text)"
    if record.note:
        yield False, record.note.rstrip(".")


def _dots(name: str) -> Markup:
    """Return a dotted name that a browser may break after its dots."""
    return Markup("<wbr>").join(f"{part}." for part in name.split("."))[:-1]


def _percent(share: float | None) -> str:
    """Return a share in percent, with one or two digits; a dash for None."""
    if share is None:
        return "-"
    digits = 0 if share >= 0.1 or not share else 1 if share >= 0.001 else None
    return f"{number(100 * share, 1)}%" if digits is None else f"{100 * share:.{digits}f}%"


def _size(count: float | None) -> str:
    """Return a number of bytes in the largest unit that fits; a dash for None."""
    return "-" if count is None else size(count)


def _plain(value: Any) -> str:
    """Return any JSON value as one line of text."""
    if isinstance(value, Mapping):
        return ", ".join(f"{key} {_plain(item)}" for key, item in value.items())
    return "-" if value is None else value if isinstance(value, str) else json.dumps(value)
