"""The modules of the three folders of the package, which tests of imports, packaging and documentation go through."""

from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
OURS = "vllm_latq"
FOLDERS = {"vllm_latq": OURS, "kernels": f"{OURS}.kernels", "quantize": f"{OURS}.quantize"}


def modules() -> Iterator[tuple[str, Path]]:
    """Yield dotted name and file of every module of the three folders, at any depth."""
    for folder, package in FOLDERS.items():
        for path in sorted((ROOT / folder).rglob("*.py")):
            inside = path.relative_to(ROOT / folder)
            if not (folder == OURS and inside.parts[0] in FOLDERS):  # the links to the other two
                yield ".".join([package, *inside.with_suffix("").parts]), path


MODULES = dict(modules())
