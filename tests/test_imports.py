"""The layering of the three folders, read from their import statements."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
VLLM_SIDE = {"plugin", "vllm_config", "vllm_linear", "vllm_moe"}
KERNEL_SIDE = {"kernel_path"}
COMMANDS = {"cli", "cli_quantize"}
OURS = "vllm_latq"


def imported(path: Path) -> Iterator[str]:
    """Dotted names of everything a file imports, at any depth of nesting."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: imports are absolute"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def within(name: str, package: str) -> bool:
    return name == package or name.startswith(package + ".")


@pytest.mark.parametrize("path", sorted((ROOT / "kernels").rglob("*.py")), ids=lambda path: path.name)
def test_kernels_import_nothing_of_ours_but_kernels(path: Path) -> None:
    names = list(imported(path))
    assert not [name for name in names if within(name, OURS) and not within(name, f"{OURS}.kernels")]
    others = [name for name in names if within(name, "vllm") or within(name, "transformers")]
    # The benchmark's peers, one of which is vLLM's Marlin, are imported where they run.
    assert path.stem == "peers" or not others


@pytest.mark.parametrize("path", sorted((ROOT / "quantize").glob("*.py")), ids=lambda path: path.name)
def test_quantize_imports_neither_vllm_nor_kernels(path: Path) -> None:
    names = list(imported(path))
    assert not [name for name in names if within(name, "vllm") or within(name, f"{OURS}.kernels")]


@pytest.mark.parametrize("path", sorted((ROOT / OURS).glob("*.py")), ids=lambda path: path.name)
def test_format_modules_import_no_upper_layer(path: Path) -> None:
    names = list(imported(path))
    if path.stem not in VLLM_SIDE:
        assert not [name for name in names if within(name, "vllm")]
    if path.stem not in KERNEL_SIDE:
        assert not [name for name in names if within(name, f"{OURS}.kernels")]
    if path.stem not in COMMANDS:
        assert not [name for name in names if within(name, f"{OURS}.quantize")]


def test_folders_that_would_shadow_other_packages_have_no_init() -> None:
    for folder in ("kernels", "quantize", "tests"):
        assert not (ROOT / folder / "__init__.py").exists()
