"""Workflows, templates and the pages for contributors parse, and name only targets and files that exist."""

import re
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).resolve().parent.parent
HOOKS = ROOT / ".pre-commit-config.yaml"
WORKFLOW = ROOT / ".github" / "workflows" / "test.yml"
YAML_FILES = [HOOKS, *sorted((ROOT / ".github").rglob("*.yml"))]
PAGES = [*YAML_FILES, *(ROOT / name for name in ("CONTRIBUTING.md", "SECURITY.md", ".github/pull_request_template.md"))]
# A path has a folder or an extension.
PATH = re.compile(r"(?<![\w/.-])((?:[\w.-]+/)+[\w.-]*|[A-Z]+\.md|\w[\w-]*\.(?:py|toml|yaml))(?!\w)")
# Repositories of other projects, and what commands write.
OUTSIDE = ("actions/", "pre-commit/", "astral-sh/", "github.com/", "dist/", ".venv/")


def relative(path: Path) -> str:
    """Return a path as seen from the root of the repository."""
    return str(path.relative_to(ROOT))


def named_paths(text: str) -> set[str]:
    """Return the paths in this repository that a text names."""
    paths = {path.rstrip("/.") for path in PATH.findall(re.sub(r"https?://\S+", "", text))}
    return {path for path in paths if not f"{path}/".startswith(OUTSIDE)}


def pinned_ruff() -> str:
    """Return the version of ruff in the dev extra."""
    development = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]["dev"]
    return next(requirement for requirement in development if requirement.startswith("ruff==")).removeprefix("ruff==")


def steps(job: dict[str, Any]) -> list[str]:
    """Return what each step of a job runs: its command, or the name of its action."""
    return [step.get("run") or step["uses"].split("@")[0] for step in job["steps"]]


@pytest.mark.parametrize("path", YAML_FILES, ids=relative)
def test_file_is_one_yaml_object(path: Path) -> None:
    assert isinstance(yaml.safe_load(path.read_text()), dict)


@pytest.mark.parametrize("path", PAGES, ids=relative)
def test_named_targets_and_paths_exist(path: Path) -> None:
    text = path.read_text()
    targets = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), flags=re.MULTILINE))
    assert set(re.findall(r"(?:run: |`)make ([a-z]+)", text)) <= targets
    assert [name for name in sorted(named_paths(text)) if not (ROOT / name).exists()] == []


def test_named_paths_are_found() -> None:
    text = "See `tests/test_x.py`, FORMAT.md, `kernels/`; (.ci/run) and docs/a.md. Not https://a.b/c.py, actions/x."
    assert named_paths(text) == {"tests/test_x.py", "FORMAT.md", "kernels", ".ci/run", "docs/a.md"}


def test_workflow_runs_the_tests_and_uploads_the_wheel() -> None:
    workflow = yaml.safe_load(WORKFLOW.read_text())
    assert set(workflow[True]) == {"push", "pull_request"}  # YAML 1.1 reads the key `on` as true
    assert steps(workflow["jobs"]["test"])[-1] == "make test"
    assert steps(workflow["jobs"]["wheel"])[-2:] == ["python -m build --wheel", "actions/upload-artifact"]


@pytest.mark.parametrize("name", ["bug", "feature"])
def test_issue_form_has_what_its_schema_requires(name: str) -> None:
    form = yaml.safe_load((ROOT / ".github" / "ISSUE_TEMPLATE" / f"{name}.yml").read_text())
    assert form["name"]
    assert form["description"]
    fields = [field for field in form["body"] if field["type"] != "markdown"]
    assert all(field["attributes"]["label"] for field in fields)
    assert len({field["id"] for field in fields}) == len(fields) > 0
    assert any(field["validations"]["required"] for field in fields if "validations" in field)


def test_hooks_pin_the_ruff_of_the_project() -> None:
    (ruff,) = (each for each in yaml.safe_load(HOOKS.read_text())["repos"] if "ruff" in each["repo"])
    assert ruff["rev"] == f"v{pinned_ruff()}"


@pytest.mark.parametrize(
    ("line", "refused"),
    [
        ('    """Of each row: its entries."""', True),
        ('"""What a reader refuses."""', True),
        ('    r"""Whether it fits."""', True),
        ('    """Return the entries of each row."""', False),
        ('    """Offset of the first entry."""', False),
        ('    """Whatever follows is kept."""', False),
    ],
)
def test_hook_refuses_banned_openings(line: str, refused: bool) -> None:
    local = next(each for each in yaml.safe_load(HOOKS.read_text())["repos"] if each["repo"] == "local")
    assert bool(re.search(local["hooks"][0]["entry"], line)) == refused


def test_changelog_has_known_sections() -> None:
    text = (ROOT / "CHANGELOG.md").read_text()
    assert re.findall(r"^## (.+)", text, flags=re.MULTILINE)[0] == "[Unreleased]"
    kinds = set(re.findall(r"^### (.+)", text, flags=re.MULTILINE))
    assert kinds <= {"Added", "Changed", "Deprecated", "Removed", "Fixed", "Security"}


def test_no_docstring_or_comment_opens_with_a_clause_instead_of_a_noun() -> None:
    clause = re.compile(r'^\s*(?:"""|# )(?:Of|What|Those|That|Whether)\b.*', flags=re.MULTILINE)
    opened = {str(path.relative_to(ROOT)): clause.findall(path.read_text()) for path in sources()}
    assert {path: lines for path, lines in opened.items() if lines} == {}


def sources() -> Iterator[Path]:
    """Yield every Python file of the project."""
    for folder in ("vllm_latq", "kernels", "quantize", "tests", "serving_examples", "docs", ".ci"):
        yield from sorted((ROOT / folder).rglob("*.py"))
