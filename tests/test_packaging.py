"""The wheel holds all three folders and imports from anywhere."""

import subprocess
import sys
import zipfile
from pathlib import Path

from helpers.modules import MODULES, ROOT
from helpers.programs import run_program

# Programs for developers only: they emulate a GPU, audit machine code, and compare quantizers.
NOT_SHIPPED = ("vllm_latq.kernels.dev.", "vllm_latq.quantize.studies.")


def shipped_modules() -> list[str]:
    """Return the dotted names of the modules that the wheel holds."""
    return [name for name in MODULES if not name.startswith(NOT_SHIPPED)]


def test_wheel_imports_outside_the_checkout(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(tmp_path), str(ROOT)]
    subprocess.run(command, check=True, capture_output=True, cwd=tmp_path)
    (wheel,) = tmp_path.glob("*.whl")
    site = tmp_path / "site"
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(site)
        names = set(archive.namelist())
    expected = {f"{'/'.join(name.split('.'))}.py" for name in shipped_modules()} | {"vllm_latq/py.typed"}
    data = ("bundled.md", "bundled.txt.xz", "prompts.jsonl", "prompts.md")
    expected |= {f"vllm_latq/quantize/calibration/{name}" for name in data}
    expected |= {"vllm_latq/cli/report.html.jinja", "vllm_latq/kernels/tuned.json"}
    expected |= {f"vllm_latq/kernels/cpu/{name}" for name in ("common.h", "lanes.h", "packed.cpp", "trellis.cpp")}
    assert {name for name in names if ".dist-info/" not in name} == expected
    imported = "vllm_latq, vllm_latq.cli.main, vllm_latq.kernels.configs, vllm_latq.quantize.recipe"
    program = (
        f"import sys; sys.path.insert(0, {str(site)!r}); import {imported}; "
        f"assert vllm_latq.__file__.startswith({str(site)!r}), vllm_latq.__file__"
    )
    subprocess.run([sys.executable, "-c", program], check=True, cwd=tmp_path)


def test_any_module_can_be_imported_first() -> None:
    """All modules except those of the plugin, which vLLM imports itself."""
    modules = [
        name.removesuffix(".__init__")
        for name in MODULES
        if not name.startswith(("vllm_latq.integrations.vllm.", "vllm_latq.quantize.studies.peer_"))
    ]
    assert len(modules) > 130
    done = run_program("import_first.py", *modules, check=True)
    assert done.stdout == "", done.stdout


def test_entry_points_are_installed() -> None:
    from importlib.metadata import entry_points

    (plugin,) = (point for point in entry_points(group="vllm.general_plugins") if point.name == "latq")
    assert plugin.value == "vllm_latq.plugin:register"
    (script,) = (point for point in entry_points(group="console_scripts") if point.name == "latq")
    assert script.value == "vllm_latq.cli.main:main"
