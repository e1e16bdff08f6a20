"""The API reference that `make api` generates."""

from pathlib import Path

import pdoc
from pdoc.extract import walk_specs

from helpers.modules import MODULES

PACKAGES = ("vllm_latq", "vllm_latq.kernels")  # vllm_latq imports the package quantize


def test_every_module_is_in_the_reference() -> None:
    named = set(walk_specs(PACKAGES))
    assert {name.removesuffix(".__init__") for name in MODULES if not name.endswith("__main__")} <= named


def test_page_holds_the_docstrings(tmp_path: Path) -> None:
    pdoc.pdoc("vllm_latq.quantize.lattice.nearest_plane", output_directory=tmp_path)
    page = (tmp_path / "vllm_latq" / "quantize" / "lattice" / "nearest_plane.html").read_text()
    assert "GPTQ with lazy batch updates" in page
    assert "nearest_plane" in page
