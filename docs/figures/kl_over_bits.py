"""Draw kl_over_bits.svg from kl_over_bits.csv: KL divergence over the bits per weight that decoding reads.

    python docs/figures/kl_over_bits.py

The file is written by hand, not by matplotlib, so that equal numbers give equal bytes: a test compares them.
"""

import csv
import math
from collections.abc import Iterable
from pathlib import Path
from xml.sax.saxutils import escape

FOLDER = Path(__file__).parent
WIDTH, HEIGHT = 760, 430
LEFT, RIGHT, TOP, BOTTOM = 70, 640, 54, 370
BITS = (2.0, 6.5)
KL = (3e-5, 1e-1)
# Series, in the order in which they are drawn -> colour on a light and on a dark page. Peers are dashed.
SERIES = {
    "rtn": ("#8a8a8a", "#9a9a9a"),
    "hptq": ("#2e7d32", "#66bb6a"),
    "ssqr": ("#00798c", "#3fb8cc"),
    "gptq": ("#d1495b", "#f0788a"),
    "GPTQModel": ("#7a5195", "#b58bd0"),
    "llm-compressor": ("#b8860b", "#e0b040"),
    "latq": ("#1746a2", "#7aa2ff"),
}
PEERS = ("GPTQModel", "llm-compressor")
STYLE = """
text { font: 13px system-ui, sans-serif; fill: #333 }
.title { font-size: 15px; font-weight: 600 }
.grid { stroke: #ddd }
polyline { fill: none; stroke-width: 2 }
.dashed { stroke-dasharray: 6 4 }
.latq { stroke-width: 3.5 } text.latq { font-weight: 700 }
"""
DARK = "text { fill: #ddd } .grid { stroke: #444 }"


def draw(rows: Iterable[dict[str, str]]) -> str:
    """Return the figure as SVG."""
    points: dict[str, list[tuple[float, float, str]]] = {name: [] for name in SERIES}
    for row in rows:
        note = f"{row['label']}: {row['bits_read']} bits read, KL {row['kl']}"
        points[row["series"]].append((_x(float(row["bits_read"])), _y(float(row["kl"])), note))
    light = "".join(f".{name} {{ color: {colours[0]} }} " for name, colours in SERIES.items())
    dark = "".join(f".{name} {{ color: {colours[1]} }} " for name, colours in SERIES.items())
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" role="img">',
        "<title>KL divergence from the original model over bits read per weight; lower and further left is better"
        "</title>",
        f"<style>{STYLE}{light}@media (prefers-color-scheme: dark) {{ {DARK} {dark} }}</style>",
        f'<text class="title" x="{LEFT}" y="24">KL divergence from the original (lower is better)</text>',
        *_axes(),
    ]
    for place, (name, series) in enumerate(points.items()):
        lines += _series(name, sorted(series), TOP + 22 + 21 * place)
    return "\n".join([*lines, "</svg>"]) + "\n"


def _x(bits: float) -> float:
    return LEFT + (bits - BITS[0]) / (BITS[1] - BITS[0]) * (RIGHT - LEFT)


def _y(kl: float) -> float:
    low, high = map(math.log10, KL)
    return BOTTOM - (math.log10(kl) - low) / (high - low) * (BOTTOM - TOP)


def _axes() -> list[str]:
    lines = []
    for kl in (1e-4, 1e-3, 1e-2, 1e-1):
        lines.append(f'<line class="grid" x1="{LEFT}" y1="{_y(kl):.1f}" x2="{RIGHT}" y2="{_y(kl):.1f}"/>')
        lines.append(f'<text x="{LEFT - 8}" y="{_y(kl) + 4:.1f}" text-anchor="end">{kl:g}</text>')
    for half in range(round(2 * (BITS[1] - BITS[0])) + 1):
        bits = BITS[0] + half / 2
        lines.append(f'<text x="{_x(bits):.1f}" y="{BOTTOM + 20}" text-anchor="middle">{bits:g}</text>')
    middle = (LEFT + RIGHT) / 2
    lines.append(
        f'<text x="{middle:.1f}" y="{BOTTOM + 44}" text-anchor="middle">bits per weight that decoding reads</text>'
    )
    return lines


def _series(name: str, points: list[tuple[float, float, str]], height: float) -> list[str]:
    """Return a line through points, its marks, and its entry of the legend at a height."""
    path, kind = " ".join(f"{x:.1f},{y:.1f}" for x, y, _ in points), f"{name} dashed" if name in PEERS else name
    start = RIGHT - 110
    return [
        f'<polyline class="{kind}" stroke="currentColor" points="{path}"/>',
        *(_mark(name, x, y, f"<title>{escape(note)}</title>") for x, y, note in points),
        f'<polyline class="{kind}" stroke="currentColor" points="{start},{height} {start + 28},{height}"/>',
        _mark(name, start + 14, height),
        f'<text class="{name}" x="{start + 36}" y="{height + 4}">{name}</text>',
    ]


def _mark(name: str, x: float, y: float, title: str = "") -> str:
    return f'<circle class="{name}" fill="currentColor" cx="{x:.1f}" cy="{y:.1f}" r="4">{title}</circle>'


def main() -> None:
    """Write the figure beside its data."""
    with (FOLDER / "kl_over_bits.csv").open(newline="") as data:
        (FOLDER / "kl_over_bits.svg").write_text(draw(csv.DictReader(data)))


if __name__ == "__main__":
    main()
