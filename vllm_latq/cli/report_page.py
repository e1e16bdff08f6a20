"""`latq report`: sizes, errors and bounds of a checkpoint on one self-contained HTML page.

Invariant: everything that comes from the checkpoint is escaped. The page holds no script, and its content security
policy forbids the browser to run or fetch one.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

import numpy as np

from vllm_latq.cli.report_plots import ROW_BANDS, SCALE_EDGES, LayerView, draw
from vllm_latq.console import number, prediction
from vllm_latq.errors import ConfigError, refusal
from vllm_latq.format.encodings.weight import Weight
from vllm_latq.format.reader import CheckpointReader
from vllm_latq.format.report import LayerReport, summed

_PAGE = """<!DOCTYPE html>
<html lang="en">
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'; img-src data:">
<title>{title}</title>
<style>
:root {{ color-scheme: light dark; --line: color-mix(in srgb, currentColor 20%, transparent); }}
body {{ font: 16px/1.5 system-ui, sans-serif; max-width: 72rem; margin: 0 auto; padding: 1rem; }}
h1 {{ font-size: 1.5rem; overflow-wrap: anywhere; }} h2 {{ font-size: 1.15rem; margin: 0 0 .25rem; }}
.plots {{ display: grid; gap: 1.5rem; grid-template-columns: repeat(auto-fit, minmax(min(100%, 26rem), 1fr)); }}
section {{ margin: 1.5rem 0; }} .plots section {{ margin: 0; }}
svg {{ width: 100%; height: auto; }} svg text {{ fill: currentColor; }}
.wide {{ overflow-x: auto; }}
table {{ border-collapse: collapse; font-variant-numeric: tabular-nums; }}
th, td {{ padding: .2rem .6rem; border-bottom: 1px solid var(--line); text-align: right; white-space: nowrap; }}
th:first-child, td:first-child {{ text-align: left; white-space: normal; overflow-wrap: anywhere; min-width: 9rem; }}
.pairs td:last-child {{ text-align: left; white-space: normal; overflow-wrap: anywhere; }}
.bad {{ color: #c62828; font-weight: 600; }} .note {{ opacity: .75; }}
@media (prefers-color-scheme: dark) {{ .bad {{ color: #ff8a80; }} }}
</style>
<h1>{title}</h1>
{body}
</html>
"""
_LAYER_COLUMNS = ("layer", "#", "shape", "bits", "outliers", "relative error", "error", "bound", "error / bound")


def report_page(directory: str | Path) -> str:
    """Return the report page of a checkpoint as HTML text.

    Raises:
        LatqError: the checkpoint or its report is damaged, or matplotlib is missing.
    """
    reader = CheckpointReader(directory)
    measured = {record.name: record for record in reader.measured()}
    layers = [_view(name, reader.weight(name), measured.get(name)) for name in reader.shapes]
    report = reader.report()
    sections = [
        _section("Summary", _pairs(_summary(layers, report))),
        _section("Notes", _list(list(_notes(layers)))),
        '<div class="plots">',
        *(_section(heading, svg) for heading, svg in draw(layers).items()),
        "</div>",
        _section("Recipe", _pairs(dict(reader.config.recipe))),
        _section("Layers", _table(_LAYER_COLUMNS, [_row(index, layer) for index, layer in enumerate(layers)])),
    ]
    title = f"{Path(directory).resolve().name}: quantization report"
    return _PAGE.format(title=escape(title), body="\n".join(sections))


def write_report_page(directory: str | Path, output: str | Path) -> None:
    """Write the report page of a checkpoint to a file. Raise LatqError, also if the file cannot be written."""
    page = report_page(directory)
    try:
        Path(output).write_text(page, encoding="utf-8", errors="backslashreplace")
    except OSError as error:
        raise ConfigError("output", "a writable file", refusal(error, Path(output)), "Choose another path.") from None


def _view(name: str, weight: Weight, measured: LayerReport | None) -> LayerView:
    """Return what the page shows of one linear."""
    (rows, cols), facts = weight.shape, weight.describe()
    counts = facts.outlier_counts.numpy()
    bands = [band.mean() / cols if band.size else 0.0 for band in np.array_split(counts, ROW_BANDS)]
    log_scales = facts.scales.float().flatten().abs().log2().clamp(SCALE_EDGES[0], SCALE_EDGES[-1]).numpy()
    return LayerView(
        name,
        (rows, cols),
        facts.stored_bits / (rows * cols),
        weight.outlier_density(),
        np.array(bands),
        np.histogram(log_scales, SCALE_EDGES)[0],
        measured or LayerReport(name),
    )


def _summary(layers: Sequence[LayerView], report: Mapping[str, Any]) -> dict[str, str]:
    records = [layer.measured for layer in layers]
    sizes = [layer.shape[0] * layer.shape[1] for layer in layers]
    weights, bits = sum(sizes), sum(layer.bits * size for layer, size in zip(layers, sizes, strict=True))
    served = summed(records, "served_bits", sizes)
    error, loss, loss_bound = (summed(records, key) for key in ("error", "loss", "loss_bound"))
    claims = [record.bound_holds for record in records]
    held, violated, unclaimed = (claims.count(holds) for holds in (True, False, None))
    return {
        "Quantized linears": str(len(layers)),
        "Weights": f"{weights:,}",
        "Stored bits per weight": f"{bits / max(weights, 1):.4f}",
        "Bits per weight in memory while served": "not measured" if served is None else f"{served / weights:.4f}",
        "Bytes": f"{round(bits / 8):,}",
        "Sum of errors": "not measured" if error is None else number(error),
        **({} if loss is None else {"Whole model": prediction(loss, loss_bound)}),
        "Bound": f"holds for {held} layers, violated for {violated}, not claimed for {unclaimed}",
        "Calibration": _plain(report.get("calibration")),
        "Seconds": _plain(report.get("seconds")),
        "Made with": f"vllm-latq {_plain(report.get('vllm_latq'))}, torch {_plain(report.get('torch'))}",
    }


def _notes(layers: Sequence[LayerView]) -> Iterator[str]:
    """Yield one sentence for each problem or remark that affects how far the numbers can be trusted."""
    for layer in layers:
        if layer.measured.bound_holds is False:
            yield f"{layer.name}: the error exceeds its bound."
        if layer.measured.bits is not None and abs(layer.measured.bits - layer.bits) > 1e-6:
            yield f"{layer.name}: the report says {layer.measured.bits:.4f} bits, the files have {layer.bits:.4f}."
        if layer.measured.error is None:
            yield f"{layer.name}: no error was measured (no calibration data)."
        if layer.measured.note:
            yield f"{layer.name}: {layer.measured.note}."


def _row(index: int, layer: LayerView) -> list[str]:
    record = layer.measured
    ratio = record.error / record.bound if record.error is not None and record.bound else None
    return [
        layer.name,
        str(index),
        f"{layer.shape[0]}×{layer.shape[1]}",
        f"{layer.bits:.3f}",
        f"{100 * layer.density:.2f}%",
        number(record.relative_error),
        number(record.error),
        number(record.bound),
        number(ratio, 3),
    ]


def _plain(value: Any) -> str:
    """Return any JSON value as one line of text."""
    if isinstance(value, Mapping):
        return ", ".join(f"{key} {_plain(item)}" for key, item in value.items())
    return "-" if value is None else value if isinstance(value, str) else json.dumps(value)


def _section(heading: str, content: str) -> str:
    return f"<section><h2>{escape(heading)}</h2>\n{content}</section>" if content else ""


def _pairs(values: Mapping[str, Any]) -> str:
    rows = "".join(f"<tr><td>{escape(str(key))}<td>{escape(_plain(value))}" for key, value in values.items())
    return f'<table class="pairs">{rows}</table>' if rows else ""


def _list(items: Sequence[str]) -> str:
    if not items:
        return '<p class="note">None.</p>'
    return "<ul>" + "".join(f'<li class="bad">{escape(item)}' for item in items) + "</ul>"


def _table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    head = "".join(f"<th>{escape(column)}" for column in columns)
    body = "".join("<tr>" + "".join(f"<td>{escape(cell)}" for cell in row) for row in rows)
    return f'<div class="wide"><table><tr>{head}{body}</table></div>'
