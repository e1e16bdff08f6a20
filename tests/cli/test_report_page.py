"""The report page parses, is self-contained, shows every layer, and runs no code from a checkpoint."""

import json
import shutil
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import pytest

from helpers.checkpoints import SCHEMES, SHAPES, edit_json, write_tiny_checkpoint
from vllm_latq.cli import report_speed
from vllm_latq.cli.inspect import inspect_checkpoint
from vllm_latq.cli.main import main
from vllm_latq.cli.report_cells import Linear, cells, heat_map
from vllm_latq.cli.report_page import ReportPage
from vllm_latq.cli.report_speed import decode_speeds
from vllm_latq.errors import CheckpointError
from vllm_latq.format.reader import CheckpointReader
from vllm_latq.format.report import LayerReport

ATTACK = "</script><script>alert(1)</script><img src=x onerror=alert(2)>$\\frac{&quot;'"
VOID = {"meta", "link", "img", "br", "input", "wbr"}
# HTML allows these tags to stay open.
OPTIONAL_END = {"html", "tr", "td", "th", "li"}
RUN = {
    "date": "2026-01-02T03:04:05+00:00",
    "text": {"name": "held_out.txt", "sha256": "ab"},
    "windows": 4,
    "seq_len": 128,
    "perplexity": 20.5,
    "baseline_perplexity": 20.25,
    "kl": 0.0123,
    "kl_median": 0.0011,
    "kl_p99": 0.123,
    "kl_max": 1.75,
    "on_answers": True,
    "through": "vllm",
    "top1_agreement": 0.875,
    "answers": [{"prompt": "Two and two", "baseline": "is four", "model": "is five"}],
    "tasks": {"arc_easy": {"acc,none": 0.5, "alias": "arc"}},
}


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


def edit_layers(checkpoint: Path, **values: object) -> None:
    """Change the records of all layers in a checkpoint's report."""
    edit_json(checkpoint / "latq_report.json", lambda report: [layer.update(values) for layer in report["layers"]])


@pytest.mark.parametrize("encoding", SCHEMES)
def test_page_shows_every_layer_and_runs_no_script(tmp_path: Path, encoding: str) -> None:
    checkpoint = write_tiny_checkpoint(tmp_path / encoding, encoding)
    text = ReportPage(checkpoint).render()
    page = Page(text)
    assert_inert(page)
    assert "@import" not in text
    for name, (rows, cols) in SHAPES.items():
        assert name in page.text
        assert f"{rows}×{cols}" in page.text
    assert page.tags.count("svg") == 2  # bits, and the used part of the bound: no relative error was measured
    summary = inspect_checkpoint(checkpoint)
    assert ReportPage(checkpoint).bits == pytest.approx(summary["bits_per_weight"])
    assert "How close it is to the original was not measured" in page.text


def test_hostile_names_recipe_report_and_evaluation_stay_text(tmp_path: Path) -> None:
    path = write_tiny_checkpoint(tmp_path / "ssqr", "ssqr")
    hostile = ATTACK.replace(" ", "/")
    for file in ("latq_report.json", "config.json", "model.safetensors.index.json"):
        text = (path / file).read_text()
        (path / file).write_text(text.replace('"ssqr"', json.dumps(ATTACK)))
    report = json.loads((path / "latq_report.json").read_text())
    report["layers"][-1]["note"] = ATTACK
    report |= {"torch": ATTACK, "calibration": {ATTACK: ATTACK}, "model": {"name": ATTACK}}
    (path / "latq_report.json").write_text(json.dumps(report))
    answer = dict.fromkeys(("prompt", "baseline", "model"), ATTACK)
    run = RUN | {"text": {"name": ATTACK}, "answers": [answer], "tasks": {ATTACK: {ATTACK: 1.0}}, "date": ATTACK}
    (path / "latq_evaluation.json").write_text(json.dumps({"runs": [run]}))
    rename_layer(path, "layers.0.up", f"layers.0.{hostile}")
    page = Page(ReportPage(path).render())
    assert_inert(page)
    assert page.text.count(ATTACK) > 12
    assert hostile in page.text


def test_prediction_shares_and_notes_are_shown(tmp_path: Path) -> None:
    path = write_tiny_checkpoint(tmp_path / "huffman", "huffman")
    edit_layers(path, loss=0.0025, loss_bound=0.01, relative_error=0.5, note="3 routed tokens")
    page = Page(ReportPage(path).render())
    count = len(SHAPES)
    assert f"{count} linears, such as layers.0.up: 3 routed tokens." in page.text
    assert ("class", "bad") not in page.attributes  # notes are no violations
    assert f"predicted KL divergence of {0.0025 * count:.2g}" in page.text
    assert "Share of the loss" in page.text
    assert page.text.count("33%") >= count  # of the loss
    assert page.tags.count("svg") == 3
    summary = inspect_checkpoint(path)
    assert (summary["loss"], summary["loss_bound"]) == (0.0025 * count, 0.01 * count)
    assert summary["layers"][0]["note"] == "3 routed tokens"
    edit_json(path / "latq_report.json", lambda report: report["layers"][0].pop("loss"))
    text = Page(ReportPage(path).render()).text
    assert "predicted" not in text
    assert "Relative error" in text
    assert inspect_checkpoint(path)["loss"] is None


def test_only_a_violated_bound_is_red(tmp_path: Path) -> None:
    path = write_tiny_checkpoint(tmp_path / "packed", "packed")
    edit_json(path / "latq_report.json", lambda report: report["layers"][1].update(bound_holds=False, error=2.0))
    page = Page(ReportPage(path).render())
    assert ("class", "bad") in page.attributes
    assert page.attributes.count(("class", "violated")) == 2  # in both heat maps
    assert "layers.0.down: the error exceeds its bound." in page.text
    assert "violated for 1 of 3 linears" in page.text


def test_evaluation_is_shown_beside_the_answers(tmp_path: Path) -> None:
    path = write_tiny_checkpoint(tmp_path / "packed", "packed")
    (path / "latq_evaluation.json").write_text(json.dumps({"runs": [RUN, {"kl": None, "tasks": None}]}))
    edit_json(path / "latq_report.json", lambda report: report.update(calibration={"name": "a", "sha256": "ab"}))
    text = Page(ReportPage(path).render()).text
    for shown in (
        "0.0123",
        "0.0011",
        "0.123",
        "1.75",
        "held_out.txt, answers, through vLLM",
        "87.5%",
        "20.25",
        "Two and two",
        "is four",
        "is five",
        "acc,none 0.5",
        "noticeably",
    ):
        assert shown in text
    assert "on the text of the calibration" in text
    for broken in ({"runs": 3}, {"runs": [{"kl": "low"}]}, {"runs": [{"answers": [3]}]}, {"runs": [{"text": "a"}]}):
        (path / "latq_evaluation.json").write_text(json.dumps(broken))
        with pytest.raises(CheckpointError, match="Remove the file"):
            ReportPage(path)


def test_commands_and_origin_are_shown(tmp_path: Path) -> None:
    path = write_tiny_checkpoint(tmp_path / "packed", "packed")
    edit_json(path / "latq_report.json", lambda report: report.update(model={"name": "org/m", "bytes": 40_000}))
    edit_json(
        path / "config.json", lambda config: config["quantization_config"]["recipe"].update(method="gptq", bits=3)
    )
    text = Page(ReportPage(path).render()).text
    assert "latq quantize org/m packed --method gptq --bits 3\n" in text
    assert "vllm serve packed --quantization latq" in text
    assert "smaller than the original" in text
    edit_json(path / "config.json", lambda config: config["quantization_config"]["recipe"].update(method="awq"))
    assert "latq quantize" not in Page(ReportPage(path).render()).text


def linear(name: str, loss: float | None = None) -> Linear:
    return Linear(name, (64, 32), 4.0, LayerReport(name, error=1.0, relative_error=0.1, loss=loss))


def test_experts_share_a_cell_and_every_linear_has_one() -> None:
    experts = [f"model.layers.10.mlp.experts.{index}.up_proj" for index in range(128)]
    names = ["lm_head", *experts, "model.layers.10.mlp.shared_expert.up_proj", "model.layers.2.mlp.up_proj"]
    found = cells([linear(name, loss=float(name == experts[77])) for name in names])
    assert [cell.name for cell in found] == [
        "model.layers.2.mlp.up_proj",
        "model.layers.10.mlp.experts.*.up_proj",
        "model.layers.10.mlp.shared_expert.up_proj",
        "lm_head",
    ]
    assert found[1].worst == experts[77]
    assert found[1].relative_error == pytest.approx(0.1)
    assert sorted(each.name for cell in found for each in cell.linears) == sorted(names)
    drawn = heat_map("", "", found, lambda cell: cell.bits, str, lambda value: value)
    assert drawn is not None
    assert [label for label, _ in drawn.rows] == ["2", "10", "lm_head"]
    assert [label for label, _ in drawn.columns] == ["mlp.up_proj", "experts.*.up_proj", "shared_expert.up_proj"]
    assert drawn.squares[-1].width > drawn.squares[0].width  # the head has the whole row


def test_rows_of_two_stacks_are_told_apart() -> None:
    found = cells([linear("model.vision.blocks.0.qkv"), linear("model.layers.0.q_proj")])
    drawn = heat_map("", "", found, lambda cell: cell.bits, str, lambda value: value)
    assert drawn is not None
    assert [label for label, _ in drawn.rows] == ["layers.0", "vision.blocks.0"]


def test_decode_reads_the_chosen_experts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_tiny_checkpoint(tmp_path / "packed", "packed")
    monkeypatch.setattr(report_speed, "FASTEST", 10**18)
    edit_json(path / "config.json", lambda config: config.update(num_experts_per_tok=2))
    reader = CheckpointReader(path)
    dense = [Linear(f"layers.0.up.{index}", (1024, 1024), 4.0, LayerReport("")) for index in range(64)]
    routed = [replace(each, name=each.name.replace("up", "experts") + ".up") for each in dense]
    h200 = [next(gpu for gpu in decode_speeds(each, reader) if gpu["name"] == "H200") for each in (dense, routed)]
    all_read, some_read = (float(gpu["quantized"].replace(",", "")) for gpu in h200)
    assert all_read == pytest.approx(4800e9 / (64 * 2**20 / 2), rel=0.05)
    assert some_read == pytest.approx(32 * all_read, rel=0.1)
    huge = [replace(each, shape=(2**19, 2**14)) for each in dense]
    l4 = decode_speeds(huge, reader)[0]
    assert (l4["quantized"], l4["original"]) == (None, None)


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
