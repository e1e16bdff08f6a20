"""The wheel holds all three folders and imports from anywhere."""

import subprocess
import sys
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def test_wheel_imports_outside_the_checkout(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(tmp_path), str(ROOT)]
    subprocess.run(command, check=True, capture_output=True, cwd=tmp_path)
    (wheel,) = tmp_path.glob("*.whl")
    site = tmp_path / "site"
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(site)
        names = set(archive.namelist())
    expected = {
        f"vllm_latq/{path.relative_to(ROOT)}"
        for folder in ("kernels", "quantize")
        for path in (ROOT / folder).rglob("*.py")
    }
    assert expected <= names
    assert "vllm_latq/py.typed" in names
    program = (
        f"import sys; sys.path.insert(0, {str(site)!r}); import vllm_latq, vllm_latq.cli, vllm_latq.quantize.recipe; "
        f"assert vllm_latq.__file__.startswith({str(site)!r}), vllm_latq.__file__"
    )
    subprocess.run([sys.executable, "-c", program], check=True, cwd=tmp_path)


def test_any_module_can_be_imported_first() -> None:
    """But for those of vLLM, which it imports itself."""
    folders = {"vllm_latq": "vllm_latq", "quantize": "vllm_latq.quantize", "kernels": "vllm_latq.kernels"}
    modules = [f"{package}.{file.stem}" for folder, package in folders.items() for file in (ROOT / folder).glob("*.py")]
    modules = [name for name in modules if not name.startswith(("vllm_latq.vllm_", "vllm_latq.quantize.peer_"))]
    assert len(modules) > 100
    program = Path(__file__).parent / "helpers" / "import_first.py"
    done = subprocess.run([sys.executable, program, *modules], capture_output=True, text=True, check=True)
    assert done.stdout == "", done.stdout


def test_entry_points_are_installed() -> None:
    from importlib.metadata import entry_points

    (plugin,) = (point for point in entry_points(group="vllm.general_plugins") if point.name == "latq")
    assert plugin.value == "vllm_latq.plugin:register"
    (script,) = (point for point in entry_points(group="console_scripts") if point.name == "latq")
    assert script.value == "vllm_latq.cli:main"
