"""The order of the folders, read from their import statements: a module imports from folders before its own.

The order is the one of the map in docs/development.md. Modules that share a folder may import each other.
"""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from helpers.modules import MODULES, OURS, ROOT

# Files at the root of a folder are named without their suffix.
KERNELS = ("errors", "layout", "configs", "device", "decode", "experts", "cpu", "entropy", "bench", "dev")
QUANTIZE = (
    "machine", "lattice", "recipe", "model", "calibration", "methods", "allocation", "evaluation", "runs",
    "certificate", "plan", "gpus", "kv_cache", "fit", "pipeline", "export", "studies",
)  # fmt: skip
RUNTIME = (
    "__init__", "plugin", "errors", "memory", "events", "console", "coding", "format", "models", "serving",
    "integrations",
)  # fmt: skip
ORDER = (
    *(f"{OURS}.{name}" for name in RUNTIME[:9]),
    *(f"{OURS}.kernels.{name}" for name in KERNELS),
    *(f"{OURS}.{name}" for name in RUNTIME[9:]),
    *(f"{OURS}.quantize.{name}" for name in QUANTIZE),
    f"{OURS}.api",
    f"{OURS}.cli",
)
# Entry points of host frameworks, imported by nothing of ours, import what they register when they are called.
LAZY = {f"{OURS}.__init__", f"{OURS}.plugin"}
# Another way round, on purpose: siblings that must not know each other.
STRANGERS = (
    (f"{OURS}.quantize.runs", f"{OURS}.quantize.certificate"),
    (f"{OURS}.quantize", f"{OURS}.kernels"),
    (f"{OURS}.quantize", f"{OURS}.serving"),
    (f"{OURS}.quantize", f"{OURS}.integrations"),
    (f"{OURS}.format", f"{OURS}.kernels"),
)


EVERY_MODULE = pytest.mark.parametrize("name", sorted(MODULES))


def imported(path: Path) -> Iterator[str]:
    """Dotted names of everything a file imports, at any depth of nesting."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: imports are absolute"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def within(name: str, package: str) -> bool:
    """Return whether a dotted name is a package or something in it."""
    return name == package or name.startswith(package + ".")


def position(name: str) -> int | None:
    """Place in the order; None for what is not ours."""
    return next((place for place, folder in enumerate(ORDER) if within(name, folder)), None)


@EVERY_MODULE
def test_a_module_imports_only_from_folders_before_its_own(name: str) -> None:
    own = position(name)
    assert own is not None, f"{name} is in none of the folders of ORDER"
    later = [other for other in imported(MODULES[name]) if (place := position(other)) is not None and place > own]
    assert not later or name in LAZY


@EVERY_MODULE
def test_siblings_that_must_not_know_each_other(name: str) -> None:
    forbidden = [other for folder, other in STRANGERS if within(name, folder)]
    assert not [found for found in imported(MODULES[name]) for other in forbidden if within(found, other)]


@EVERY_MODULE
def test_only_integrations_import_a_host_framework(name: str) -> None:
    """Quantizing and loading need transformers' models; nothing but the plugin, and the benchmark's peers, vLLM."""
    names = list(imported(MODULES[name]))
    if not within(name, f"{OURS}.integrations.vllm") and name != f"{OURS}.kernels.bench.peers":
        assert not [found for found in names if within(found, "vllm")]
    if within(name, f"{OURS}.kernels"):
        assert not [found for found in names if within(found, "transformers")]
        assert not [found for found in names if within(found, OURS) and not within(found, f"{OURS}.kernels")]


@EVERY_MODULE
def test_no_mock_outside_the_developers_folders(name: str) -> None:
    if not within(name, f"{OURS}.kernels.dev"):
        assert not [found for found in imported(MODULES[name]) if within(found, "unittest")]


@pytest.mark.parametrize("folder", sorted({path.parent for path in MODULES.values()}), ids=str)
def test_no_folder_is_crowded(folder: Path) -> None:
    """A folder of the package has few files, so that its docstring describes them all.

    `tests/kernels` and `tests/helpers` have more. A file there has the name of what it tests or builds, and nothing
    imports a test, so a reader finds it by name and needs no list.
    """
    assert len(list(folder.glob("*.py"))) <= 15


def test_folders_that_would_shadow_other_packages_have_no_init() -> None:
    for folder in ("kernels", "quantize", "tests"):
        assert not (ROOT / folder / "__init__.py").exists()
