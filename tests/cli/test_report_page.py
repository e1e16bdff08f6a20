"""The report page parses, is self-contained, shows every layer, and runs no code from a checkpoint."""

import json
import re
import shutil
from html.parser import HTMLParser
from pathlib import Path

import pytest
import torch

from helpers.checkpoints import SCHEMES, SHAPES, write_tiny_checkpoint
from vllm_latq.cli.inspect import inspect_checkpoint
from vllm_latq.cli.main import main
from vllm_latq.cli.report_page import _view, report_page
from vllm_latq.format.encodings.packed import PackedWeight

ATTACK = "</script><script>alert(1)</script><img src=x onerror=alert(2)>$\\frac{&quot;'"
VOID = {"meta", "link", "img", "br"}
# HTML allows these tags to stay open.
OPTIONAL_END = {"html", "tr", "td", "th", "li"}


class Page(HTMLParser):
    """Tags, attributes and text of a page; fails on a tag closed out of order."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str]] = []
        self.text, self.stack = "", list[str]()
        self.feed(text)
        self.close()
        assert not set(self.stack) - OPTIONAL_END

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += [(name, value or "") for name, value in attrs]
        if tag not in VOID:
            self.stack.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += [(name, value or "") for name, value in attrs]

    def handle_endtag(self, tag: str) -> None:
        while self.stack[-1] != tag and self.stack[-1] in OPTIONAL_END:
            self.stack.pop()
        assert self.stack.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data


def assert_inert(page: Page) -> None:
    assert not {"script", "iframe", "object", "embed", "link", "base", "form"} & set(page.tags)
    for name, value in page.attributes:
        assert not name.startswith("on"), name
        if name in ("src", "href", "xlink:href", "srcset", "action"):
            assert value.startswith(("#", "data:image/png")), value
        assert "url(http" not in value


@pytest.mark.parametrize("encoding", SCHEMES)
def test_page_shows_every_layer_and_runs_no_script(tmp_path: Path, encoding: str) -> None:
    text = report_page(write_tiny_checkpoint(tmp_path / encoding, encoding))
    page = Page(text)
    assert_inert(page)
    assert "@import" not in text
    for name, (rows, cols) in SHAPES.items():
        assert name in page.text
        assert f"{rows}×{cols}" in page.text
    assert page.tags.count("svg") == (5 if SCHEMES[encoding].outliers or encoding == "trellis" else 4)
    assert not re.search(r"\\math|\$", page.text)


def test_hostile_names_recipe_and_report_stay_text(tmp_path: Path) -> None:
    path = write_tiny_checkpoint(tmp_path / "ssqr", "ssqr")
    hostile = ATTACK.replace(" ", "/")
    for file in ("latq_report.json", "config.json", "model.safetensors.index.json"):
        text = (path / file).read_text()
        (path / file).write_text(text.replace('"ssqr"', json.dumps(ATTACK)))
    report = json.loads((path / "latq_report.json").read_text())
    report["layers"][-1]["note"] = ATTACK
    report |= {"torch": ATTACK, "calibration": {ATTACK: ATTACK}}
    (path / "latq_report.json").write_text(json.dumps(report))
    rename_layer(path, "layers.0.up", f"layers.0.{hostile}")
    page = Page(report_page(path))
    assert_inert(page)
    assert page.text.count(ATTACK) == 5
    assert hostile in page.text


def test_notes_and_prediction_are_shown(tmp_path: Path) -> None:
    path = write_tiny_checkpoint(tmp_path / "huffman", "huffman")
    report = json.loads((path / "latq_report.json").read_text())
    report["layers"][0]["note"] = "3 routed tokens"
    for layer in report["layers"]:
        layer |= {"loss": 0.25, "loss_bound": 1.0}
    (path / "latq_report.json").write_text(json.dumps(report))
    text = Page(report_page(path)).text
    count = len(report["layers"])
    assert f"{report['layers'][0]['name']}: 3 routed tokens." in text
    assert f"second-order loss on the calibration text {count / 4:g} nats per token, at most {count};" in text
    summary = inspect_checkpoint(path)
    assert (summary["loss"], summary["loss_bound"]) == (count / 4, count)
    assert summary["layers"][0]["note"] == "3 routed tokens"
    del report["layers"][0]["loss"]
    (path / "latq_report.json").write_text(json.dumps(report))
    assert "predicted" not in Page(report_page(path)).text
    assert inspect_checkpoint(path)["loss"] is None


def rename_layer(path: Path, old: str, new: str) -> None:
    from safetensors.torch import load_file, save_file

    index = json.loads((path / "model.safetensors.index.json").read_text())
    for shard in path.glob("*.safetensors"):
        tensors = {name.replace(old, new): tensor for name, tensor in load_file(shard).items()}
        save_file(tensors, shard)
    index["weight_map"] = {name.replace(old, new): file for name, file in index["weight_map"].items()}
    (path / "model.safetensors.index.json").write_text(json.dumps(index))


def test_report_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write_tiny_checkpoint(tmp_path / "packed", "packed")
    assert main(["report", str(path), "-o", str(tmp_path / "page.html")]) == 0
    assert (tmp_path / "page.html").read_text().startswith("<!DOCTYPE html>")
    assert main(["report", str(path), "-o", str(tmp_path / "no" / "page.html")]) == 1
    assert (
        f"latq: --output: expected a writable file, found no such directory {tmp_path / 'no'}. Choose another path."
        in capsys.readouterr().err
    )
    assert main(["report", str(path), "-o", str(tmp_path)]) == 1
    assert "expected a writable file, found is a directory. Choose another path." in capsys.readouterr().err
    shutil.rmtree(path)
    assert main(["report", str(path)]) == 1


def test_negative_scales_are_counted_by_magnitude() -> None:
    scales = torch.tensor([[-0.25], [0.25]], dtype=torch.bfloat16)
    weight = PackedWeight.from_integers(torch.zeros(2, 8, dtype=torch.int32), scales, 2, -1)
    assert _view("mirrored", weight, None).scales.max() == 2
