"""Pages of the documentation: their fences, links, headings and tables."""

import os
import posixpath
import re
import shlex
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

from helpers.modules import ROOT

DOCS = ROOT / "docs"
PAGES = (
    *(ROOT / name for name in ("README.md", "FORMAT.md", "CONTRIBUTING.md", "SECURITY.md", "CHANGELOG.md")),
    *sorted(DOCS.glob("*.md")),
    *sorted(ROOT.glob("*/NOTES.md")),
)
_FENCE = re.compile(r"(?:^<!-- run: (?P<name>[^>]+) -->\n)?^```(?P<kind>\w*)\n(?P<code>.*?)^```$", re.M | re.S)


def without_fences(text: str) -> str:
    """Return a page without its fenced code."""
    return _FENCE.sub("", text)


def code(page: Path, kind: str) -> str:
    """Return the fenced code of a kind (bash, python, ...) on a page."""
    return "".join(fence["code"] for fence in _FENCE.finditer(page.read_text()) if fence["kind"] == kind)


def runnable(page: str, name: str) -> str:
    """Return the code of the fences of docs/`page` below a comment `run: name`."""
    found = [fence["code"] for fence in _FENCE.finditer((DOCS / page).read_text()) if fence["name"] == name]
    assert found, f"docs/{page} has no block `run: {name}`"
    return "".join(found)


def words(command: str, variables: Mapping[str, object]) -> list[str]:
    """Return the words of one shell command, as the shell would split it, with variables expanded."""
    joined = command.replace("\\\n", " ")
    for name, value in variables.items():
        joined = joined.replace(f"${name}", str(value))
    return shlex.split(joined)


def commands(text: str) -> Iterator[list[str]]:
    """Yield the words of each command of a shell script, without comments and continued lines joined."""
    for line in text.replace("\\\n", " ").splitlines():
        if parts := shlex.split(line, comments=True):
            yield parts


def links(page: Path) -> list[tuple[str, str]]:
    """Return path (as seen from the root) and anchor of each link of a page to a file of the repository."""
    found = []
    for target in re.findall(r"\]\(([^)\s]+)\)", without_fences(page.read_text())):
        if "://" not in target:
            path, _, anchor = target.partition("#")
            folder = posixpath.dirname(page.relative_to(ROOT).as_posix())
            here = page.relative_to(ROOT).as_posix()
            found.append((posixpath.normpath(posixpath.join(folder, path)) if path else here, anchor))
    return found


def anchors(page: Path) -> set[str]:
    """Return the anchors of a page's headings, as GitHub and mkdocs make them."""
    titles = re.findall(r"^#+ (.+)$", without_fences(page.read_text()), flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).strip().replace(" ", "-") for title in titles}


def cells(page: Path) -> Iterator[str]:
    """Yield the cells of all tables of a page."""
    for line in without_fences(page.read_text()).splitlines():
        if line.startswith("|"):
            yield from (cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1])


def sentence_lengths(page: Path) -> list[int]:
    """Return the number of words of each sentence of a page's prose: no code, tables or headings."""
    text = re.sub(r"`[^`]*`", "code", without_fences(page.read_text()))
    lines = [line for line in text.splitlines() if not line.startswith(("|", "#", "<!--", "!["))]
    pieces = re.split(r"\n\s*\n|\n(?=\s*[-*>\d]+[.)]? )", "\n".join(lines))
    sentences = [sentence for piece in pieces for sentence in re.split(r"(?<=[.:?!;])\s+", piece)]
    counts = [len(re.findall(r"[\w'][\w'.,/-]*", sentence)) for sentence in sentences]
    return [count for count in counts if count > 2]


def environment(**variables: object) -> dict[str, str]:
    """Return this process's environment with variables and with the programs of its Python environment on the path."""

    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    return os.environ | {"PATH": path, "HF_HUB_OFFLINE": "1"} | {name: str(value) for name, value in variables.items()}
