"""The API reference that `make api` generates."""

from pathlib import Path

import pdoc
from pdoc.extract import walk_specs

ROOT = Path(__file__).parents[1]
PACKAGES = {"vllm_latq": "vllm_latq", "quantize": "vllm_latq.quantize", "kernels": "vllm_latq.kernels"}


def test_every_module_is_in_it() -> None:
    named = set(walk_specs(list(PACKAGES.values())))
    for folder, package in PACKAGES.items():
        modules = {f"{package}.{path.stem}" for path in (ROOT / folder).glob("[!_]*.py")}
        assert modules <= named


def test_a_page_holds_the_docstrings(tmp_path: Path) -> None:
    pdoc.pdoc("vllm_latq.quantize.rounding", output_directory=tmp_path)
    page = (tmp_path / "vllm_latq" / "quantize" / "rounding.html").read_text()
    assert "GPTQ with lazy batch updates" in page
    assert "nearest_plane" in page
