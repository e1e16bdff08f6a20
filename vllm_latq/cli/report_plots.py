"""Draw the plots of a report page as inline SVG, with matplotlib. Layers are numbered as stored and coloured by kind.

Invariant: a plot holds no script, no outside reference and no mathtext, whatever the names of the layers. Its text and
axes take the colour of the surrounding text, so that it is readable on light and dark pages.
"""

import io
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np

from vllm_latq.errors import ConfigError
from vllm_latq.format.report import LayerReport

# Bins for log2 of the scales: a quarter of an octave each.
SCALE_EDGES = np.linspace(-30, 10, 161)
ROW_BANDS = 32
_INK = "#010203"  # replaced by currentColor
_STYLE: Any = {
    "svg.fonttype": "none",
    "svg.hashsalt": "latq",
    "text.parse_math": False,
    "font.size": 9,
    "figure.facecolor": "none",
    "axes.facecolor": "none",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.alpha": 0.25,
    **dict.fromkeys(
        ("text.color", "axes.edgecolor", "axes.labelcolor", "xtick.color", "ytick.color", "grid.color"), _INK
    ),
}


@dataclass(frozen=True)
class LayerView:
    """The numbers that the page shows for one linear.

    Attributes:
        name: name of the module.
        shape: (rows, cols).
        bits: stored bits per weight, counted from the tensors.
        density: fraction of the weights stored as outliers.
        row_density: density in each of ROW_BANDS bands of consecutive rows, float [ROW_BANDS].
        scales: histogram of log2|scale| over SCALE_EDGES, int [len(SCALE_EDGES) - 1].
        measured: record of the linear in the report.
    """

    name: str
    shape: tuple[int, int]
    bits: float
    density: float
    row_density: np.ndarray
    scales: np.ndarray
    measured: LayerReport

    @property
    def kind(self) -> str:
        """The last part of the name: q_proj, down_proj, ..."""
        return self.name.rpartition(".")[2][:24]


def draw(layers: Sequence[LayerView]) -> dict[str, str]:
    """Return heading -> SVG text of every plot that the layers have numbers for.

    Raises:
        ConfigError: matplotlib is not installed.
    """
    try:
        import matplotlib
    except ImportError:
        hint = "Run pip install matplotlib."
        raise ConfigError("latq report", "matplotlib to draw the plots", "no such package", hint) from None
    with matplotlib.rc_context(_STYLE):
        plots = {
            "Error and bound of each layer": _errors(layers),
            "Where the error is": _shares(layers),
            "Stored bits per weight": _bits(layers),
            "Outlier density by layer and row": _densities(layers),
            "Scales": _scales(layers),
        }
    return {heading: svg for heading, svg in plots.items() if svg}


def _errors(layers: Sequence[LayerView]) -> str:
    if not any(layer.measured.error for layer in layers):
        return ""
    with _figure("layer", "||X (Q - W)ᵀ||²") as (axes, svg):
        bounds = [(i, layer.measured.bound) for i, layer in enumerate(layers) if layer.measured.bound]
        if bounds:
            axes.plot(*zip(*bounds, strict=True), "_", color="tab:red", markersize=7, label="bound (worst case)")
        _dots(axes, layers, [layer.measured.error or None for layer in layers])
        axes.set_yscale("log")
        _plain_ticks(axes)
    return svg[0]


def _shares(layers: Sequence[LayerView]) -> str:
    errors = np.array([layer.measured.error or 0.0 for layer in layers])
    if not errors.sum() > 0:
        return ""
    with _figure("layer", "share of the summed error, %") as (axes, svg):
        colors = _colors(layers)
        axes.bar(range(len(layers)), 100 * errors / errors.sum(), color=[colors[layer.kind] for layer in layers])
    return svg[0]


def _bits(layers: Sequence[LayerView]) -> str:
    with _figure("layer", "bits per weight") as (axes, svg):
        _dots(axes, layers, [layer.bits for layer in layers])
    return svg[0]


def _densities(layers: Sequence[LayerView]) -> str:
    if not any(layer.density for layer in layers):
        return ""
    with _figure("layer", "rows, first to last (%)") as (axes, svg):
        grid = 100 * np.stack([layer.row_density for layer in layers], axis=1)
        image = axes.pcolormesh(
            np.arange(len(layers) + 1) - 0.5, np.linspace(0, 100, ROW_BANDS + 1), grid, cmap="viridis", vmin=0
        )
        axes.figure.colorbar(image, label="outliers, %")
        axes.grid(False)
    return svg[0]


def _scales(layers: Sequence[LayerView]) -> str:
    total = np.sum([layer.scales for layer in layers], axis=0)
    if not np.any(total):
        return ""
    used = np.nonzero(total)[0]
    window = slice(max(used[0] - 1, 0), used[-1] + 2)
    with _figure("log2 of the absolute scale", "number of scales") as (axes, svg):
        for kind, color in _colors(layers).items():
            counts = np.sum([layer.scales for layer in layers if layer.kind == kind], axis=0)
            edges = SCALE_EDGES[window.start : window.start + len(counts[window]) + 1]
            axes.stairs(counts[window], edges, color=color, label=_label(kind))
        axes.set_yscale("symlog", linthresh=1)
        _plain_ticks(axes, linthresh=1)
        axes.figure.legend(loc="outside lower center", fontsize=7, frameon=False, ncols=4)
    return svg[0]


def _dots(axes: Any, layers: Sequence[LayerView], values: Sequence[float | None]) -> None:
    """Draw one dot per layer that has a value, coloured by kind, and a legend."""
    for kind, color in _colors(layers).items():
        points = [
            (i, value)
            for i, (layer, value) in enumerate(zip(layers, values, strict=True))
            if layer.kind == kind and value is not None
        ]
        if points:
            axes.plot(*zip(*points, strict=True), ".", color=color, label=_label(kind))
    axes.figure.legend(loc="outside lower center", fontsize=7, frameon=False, ncols=4)


def _colors(layers: Sequence[LayerView]) -> dict[str, str]:
    kinds = dict.fromkeys(layer.kind for layer in layers)
    return {kind: f"C{index % 10}" for index, kind in enumerate(kinds)}


def _plain_ticks(axes: Any, linthresh: float | None = None) -> None:
    """Label a logarithmic axis with plain numbers; matplotlib's default formatters write mathtext."""
    from matplotlib.ticker import LogFormatter

    axes.yaxis.set_major_formatter(LogFormatter(linthresh=linthresh))
    axes.yaxis.set_minor_formatter(LogFormatter(minor_thresholds=(1, 0.4), linthresh=linthresh))


def _label(kind: str) -> str:
    # matplotlib omits labels that begin with an underscore from the legend.
    return kind.lstrip("_") or "-"


@contextmanager
def _figure(xlabel: str, ylabel: str) -> Iterator[tuple[Any, list[str]]]:
    """Yield axes to draw on, and a list that holds the SVG once the context ends. Use no pyplot, so no global state."""
    from matplotlib.backends.backend_svg import FigureCanvasSVG
    from matplotlib.figure import Figure

    # About the width of a phone in points, so that text is not scaled down there.
    figure = Figure(figsize=(5, 3.1), layout="constrained")
    axes, svg = figure.add_subplot(), list[str]()
    axes.set_xlabel(xlabel)
    axes.set_ylabel(ylabel)
    yield axes, svg
    text = io.StringIO()
    FigureCanvasSVG(figure).print_svg(text, metadata={"Date": None, "Creator": None, "Format": None, "Type": None})
    svg.append(_inline(text.getvalue()))


def _inline(svg: str) -> str:
    """Return an SVG document as an element of a page: no prologue, no group ids (figures repeat them), our ink."""
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg[svg.index("<svg") :], flags=re.DOTALL)
    svg = re.sub(r'<g id="[^"]*"', "<g", svg)
    svg = re.sub(r'<svg ([^>]*?)width="[^"]*"', r"<svg \1", svg)
    return re.sub(r'(<svg [^>]*?)height="[^"]*"', r"\1", svg, count=1).replace(_INK, "currentColor")
