"""The documentation: pages, links, generated parts, commands and style, without a network."""

import ast
import importlib
import re
import runpy
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import yaml

from helpers.documentation import (
    DOCS,
    PAGES,
    anchors,
    cells,
    code,
    commands,
    environment,
    links,
    sentence_lengths,
)
from helpers.modules import ROOT
from vllm_latq.cli.main import build_parser

README = ROOT / "README.md"
WRITTEN = [README, *sorted(DOCS.glob("*.md"))]
WORDS_PER_SENTENCE = 13.0
LONGER = {"trellis-code.md": 16.0, "peers.md": 15.0}  # mathematics, definitions


def relative(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


def test_readme_is_short() -> None:
    assert len(README.read_text().splitlines()) <= 200


@pytest.mark.parametrize("page", PAGES, ids=relative)
def test_links_lead_somewhere(page: Path) -> None:
    broken = []
    for path, anchor in links(page):
        target = ROOT / path
        if not target.exists() or (anchor and anchor not in anchors(target)):
            broken.append(f"{path}#{anchor}")
    assert broken == []


def test_every_page_is_in_the_navigation_once() -> None:
    named = []
    pending = [yaml.safe_load((ROOT / "mkdocs.yml").read_text())["nav"]]
    while pending:
        match pending.pop():
            case list(entries):
                pending += entries
            case dict(entry):
                pending += entry.values()
            case page:
                named.append(page)
    outside = runpy.run_path(str(DOCS / "scripts" / "site.py"))["OUTSIDE"]
    assert sorted(named) == sorted([*(page.name for page in DOCS.glob("*.md")), *outside.values()])


def test_site_is_built_without_a_warning(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path / "site")]
    done = subprocess.run(command, cwd=ROOT, env=environment(), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    first = (tmp_path / "site" / "index.html").read_text()
    assert "quickstart.html" in first
    assert (tmp_path / "site" / "figures" / "kl_over_bits.svg").exists()


@pytest.mark.parametrize("name", ["options", "models", "mixtures"])
def test_generated_page_is_current(name: str) -> None:
    script = DOCS / "scripts" / f"{name}.py"
    assert runpy.run_path(str(script))["page"]() == (DOCS / f"{name}.md").read_text(), f"run python {relative(script)}"


def test_sizes_of_common_models_are_current() -> None:
    script = runpy.run_path(str(DOCS / "scripts" / "sizes.py"))
    text = (DOCS / "choose.md").read_text()
    assert script["sizes"]() in text
    assert script["fitting"]() in text


def test_figure_shows_its_data() -> None:
    script = runpy.run_path(str(DOCS / "figures" / "kl_over_bits.py"))
    with (DOCS / "figures" / "kl_over_bits.csv").open(newline="") as data:
        rows = list(script["csv"].DictReader(data))
    assert script["draw"](rows) == (DOCS / "figures" / "kl_over_bits.svg").read_text()
    assert {row["series"] for row in rows} == set(script["SERIES"])
    stated = "".join((DOCS / page).read_text() for page in ("accuracy.md", "peers.md")).replace("*", "")
    assert [row for row in rows if f"| {row['bits_read']} | {row['kl']} |" not in stated] == []


@pytest.mark.parametrize("page", WRITTEN, ids=relative)
def test_commands_have_the_options_that_exist(page: Path) -> None:
    """In fences, and in tables."""
    parser = build_parser()
    in_cells = [cell.strip("`") for cell in cells(page) if cell.startswith("`latq ") and "..." not in cell]
    for words in commands(code(page, "bash") + "\n".join(in_cells)):
        if "latq" in words and words[0] in ("latq", "torchrun"):
            parser.parse_args(words[words.index("latq") + 1 :])  # exits with an error if it does not know an option


@pytest.mark.parametrize("page", WRITTEN, ids=relative)
def test_names_in_python_exist(page: Path) -> None:
    """Whatever a fence imports from this package, and the dotted names in tables."""
    dotted = [cell.strip("`") for cell in cells(page) if re.fullmatch(r"`vllm_latq(\.\w+)+`", cell)]
    for statement in ast.walk(ast.parse(code(page, "python"))):
        if isinstance(statement, ast.ImportFrom) and str(statement.module).startswith("vllm_latq"):
            dotted += [f"{statement.module}.{name.name}" for name in statement.names]
    for name in dotted:
        module, _, attribute = name.rpartition(".")
        assert hasattr(importlib.import_module(module), attribute), name


def test_readme_names_every_extra() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    named = {cell.strip("`") for cell in cells(README)}
    assert set(extras) - {"dev"} <= named


@pytest.mark.parametrize("page", WRITTEN, ids=relative)
def test_a_cell_holds_one_number(page: Path) -> None:
    assert [cell for cell in cells(page) if re.search(r"\d\s*[;/]\s*\d", cell)] == []


@pytest.mark.parametrize("page", WRITTEN, ids=relative)
def test_sentences_are_short(page: Path) -> None:
    lengths = sentence_lengths(page)
    mean = sum(lengths) / max(len(lengths), 1)
    assert mean <= LONGER.get(page.name, WORDS_PER_SENTENCE), f"{mean:.1f} words on average"
