"""Calibration windows: exact, reproducible, and a clear error for every unusable source."""

import hashlib
import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from vllm_latq.errors import CalibrationError
from vllm_latq.quantize.calibration import text, windows
from vllm_latq.quantize.calibration.text import evaluation_text as read_text
from vllm_latq.quantize.calibration.windows import tokenize


def load_samples(*arguments: Any, **options: Any) -> torch.Tensor:
    return windows.load_samples(*arguments, **options).tokens


@pytest.fixture(scope="module")
def tokenizer(mini_model: Path) -> PreTrainedTokenizerBase:
    return AutoTokenizer.from_pretrained(mini_model)


@pytest.mark.parametrize("seq_len", [1, 33, 500])
def test_samples_are_distinct_windows_of_the_text(
    tokenizer: PreTrainedTokenizerBase, evaluation_text: Path, seq_len: int
) -> None:
    ids = tokenize(tokenizer, evaluation_text.read_text())
    count = len(ids) // seq_len
    cut = ids[: count * seq_len].view(count, seq_len)
    samples = load_samples(tokenizer, str(evaluation_text), num_samples=count, seq_len=seq_len, seed=3)
    assert samples.dtype == torch.int64
    assert samples.is_contiguous()
    assert not torch.equal(samples, cut)
    # Every window of the text exactly once: equal as multisets.
    assert sorted(samples.tolist()) == sorted(cut.tolist())


def test_same_seed_same_samples(tokenizer: PreTrainedTokenizerBase, calibration_text: Path) -> None:
    source = str(calibration_text)
    first = load_samples(tokenizer, source, 8, 64, seed=1)
    assert first.shape == (8, 64)
    assert torch.equal(first, load_samples(tokenizer, source, 8, 64, seed=1))
    assert not torch.equal(first, load_samples(tokenizer, source, 8, 64, seed=2))


def test_short_text_gives_what_it_has_and_says_so(
    tokenizer: PreTrainedTokenizerBase, evaluation_text: Path, tmp_path: Path
) -> None:
    source = tmp_path / "short.txt"
    source.write_text(evaluation_text.read_text()[:1000])
    available = len(tokenize(tokenizer, source.read_text())) // 64
    assert 1 < available < 256
    with pytest.warns(UserWarning, match=rf"256 windows of 64 tokens were asked for.*make {available};"):
        samples = load_samples(tokenizer, str(source), num_samples=256, seq_len=64)
    assert samples.shape == (available, 64)


def test_less_than_one_window_is_refused(tokenizer: PreTrainedTokenizerBase, tmp_path: Path) -> None:
    source = tmp_path / "word.txt"
    source.write_text("import")
    with pytest.raises(
        CalibrationError, match=r"expected at least one window of 2048 tokens, found \d tokens.*shorter windows"
    ):
        load_samples(tokenizer, str(source), num_samples=1, seq_len=2048)


@pytest.mark.parametrize(
    ("content", "found"),
    [
        (b"", "found none"),
        (b" \n\t\n", "found none"),
        (b"caf\xe9 au lait", "invalid continuation byte at byte 3"),
        (b"text\0\0", "found a NUL at character 4"),
    ],
)
def test_unusable_file(tokenizer: PreTrainedTokenizerBase, tmp_path: Path, content: bytes, found: str) -> None:
    source = tmp_path / "bad.txt"
    source.write_bytes(content)
    with pytest.raises(CalibrationError, match=found) as raised:
        load_samples(tokenizer, str(source), 1, 8)
    assert str(source) in str(raised.value)


@pytest.mark.parametrize(
    "source", ["missing.txt", "data/missing.txt", "data/missing.jsonl", "/no/such/file", "wikitext9", "", "../up/side"]
)
def test_missing_source(
    tokenizer: PreTrainedTokenizerBase, source: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(
        CalibrationError, match="expected an existing text file, bundled, wikitext2, c4, or a hub dataset"
    ):
        load_samples(tokenizer, source, 1, 8)


@pytest.mark.parametrize(("num_samples", "seq_len", "name"), [(0, 8, "num_samples"), (1, 0, "seq_len"), (-3, 8, "num")])
def test_sizes_below_one(
    tokenizer: PreTrainedTokenizerBase, evaluation_text: Path, num_samples: int, seq_len: int, name: str
) -> None:
    with pytest.raises(CalibrationError, match=f"{name}.*expected at least 1"):
        load_samples(tokenizer, str(evaluation_text), num_samples, seq_len)


def test_bundled_text(tokenizer: PreTrainedTokenizerBase, evaluation_text: Path) -> None:
    """It makes the 256 windows of 2048 tokens that are asked for by default, of no text that models are judged by."""
    samples = windows.load_samples(tokenizer, "bundled", 256, 2048)
    read, whole = text.calibration_text("bundled", 1)
    assert whole
    described = samples.to_dict()
    assert described == {"name": "bundled", "sha256": described["sha256"], "samples": 256, "seq_len": 2048}
    assert f"`{described['sha256']}`" in Path(text.__file__).with_name("bundled.md").read_text()
    assert hashlib.sha256(read.encode()).hexdigest() == described["sha256"]
    shared = {line.strip() for line in read.splitlines()} & {
        line.strip() for line in evaluation_text.read_text().splitlines()
    }
    assert not [line for line in shared if len(line) > 60]
    with pytest.raises(CalibrationError, match="found the bundled text for calibration"):
        read_text("bundled")


def test_name_and_digest_of_a_file(tokenizer: PreTrainedTokenizerBase, evaluation_text: Path) -> None:
    found = windows.load_samples(tokenizer, str(evaluation_text), 1, 8)
    assert (found.name, found.sha256) == ("evaluation.txt", hashlib.sha256(evaluation_text.read_bytes()).hexdigest())


def test_byte_order_mark_is_no_text(tokenizer: PreTrainedTokenizerBase, tmp_path: Path) -> None:
    plain, marked = tmp_path / "plain.txt", tmp_path / "marked.txt"
    plain.write_text("import os", encoding="utf-8")
    marked.write_text("import os", encoding="utf-8-sig")
    assert torch.equal(load_samples(tokenizer, str(plain), 1, 2), load_samples(tokenizer, str(marked), 1, 2))


def test_a_large_file_is_read_in_pieces(
    tokenizer: PreTrainedTokenizerBase, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whole lines of every part of the file are read."""
    monkeypatch.setattr(text, "READ_WHOLE", 1 << 16)
    line = "line {:06} of a text with é and 字, which are cut nowhere\n"
    source, lines = tmp_path / "large.txt", [line.format(number) for number in range(10_000)]
    source.write_text("".join(lines))
    found, whole = text.calibration_text(str(source), 1000)
    assert not whole
    assert 0.9 * text.READ_WHOLE < len(found.encode()) <= text.READ_WHOLE
    assert {read for read in found.splitlines(keepends=True) if read != "\n"} <= set(lines)
    assert found.startswith(lines[0])
    assert found.endswith(lines[-1])
    read = {int(word) // 100 for word in found.split() if word.isdigit()}
    assert len(read) > 60
    samples = load_samples(tokenizer, str(source), 2, 16)
    assert torch.equal(samples, load_samples(tokenizer, str(source), 2, 16))
    # As much as is wanted, up to the whole file.
    assert len(text.calibration_text(str(source), 1 << 18)[0].encode()) > 0.9 * (1 << 18)
    assert text.calibration_text(str(source), 1 << 20) == ("".join(lines), True)


@pytest.mark.parametrize("character", ["a", "é", "字", "𝕏"])
def test_a_large_file_of_one_line(character: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(text, "READ_WHOLE", 64 * 33)
    (tmp_path / "line.txt").write_text(character * 5000)
    found, whole = text.calibration_text(str(tmp_path / "line.txt"), 1)
    assert not whole
    assert set(found) == {character, "\n"}
    assert found.count("\n") == text.EXCERPTS - 1
    assert len(found.encode()) > 64 * 25


def test_a_large_file_that_is_no_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(text, "READ_WHOLE", 6400)
    source = tmp_path / "bad.txt"
    source.write_bytes(b"word\r\n" * 2000)
    assert set(text.calibration_text(str(source), 1)[0].split("\n")) == {"word", ""}
    for last, found in ((b"\xe9\n", "invalid continuation byte at byte 12000"), (b"\0\n", "a NUL at character")):
        source.write_bytes(b"word\r\n" * 2000 + last)
        with pytest.raises(CalibrationError, match=rf"bad\.txt.*found {found}"):
            text.calibration_text(str(source), 1)


def test_a_large_document_is_cut(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(text, "READ_WHOLE", 1000)
    source = _dataset_folder(tmp_path / "corpus", [{"text": "word " * 1000}])
    assert text.calibration_text(source, 10) == (("word " * 1000)[:1000], False)
    assert text.calibration_text(source, 6000) == ("word " * 1000, True)


def test_documents_are_drawn_as_before_through_a_buffer_that_fits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import datasets

    source = _dataset_folder(tmp_path / "corpus", [{"text": f"document {i:04}"} for i in range(500)])
    rows = datasets.load_dataset(source, split="train", streaming=True)
    for chars, documents in ((13 * 40, 40), (1 << 26, 10_000), (1, 1)):
        monkeypatch.setattr(text, "SHUFFLE_BUFFER_CHARS", chars)
        drawn = [row["text"] for row in rows.shuffle(seed=3, buffer_size=documents)]
        assert text.calibration_text(source, 1 << 20, seed=3) == ("\n\n".join(drawn), True)
        assert text.calibration_text(source, 14, seed=3) == ("\n\n".join(drawn[:2]), False)


def test_more_is_read_where_tokens_are_long(
    tokenizer: PreTrainedTokenizerBase, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A text in other tokens than English has: windows are not fewer than the source has."""
    monkeypatch.setattr(windows, "CHARS_READ_PER_TOKEN", 1)
    source = _dataset_folder(tmp_path / "corpus", [{"text": f"document {i} about modules"} for i in range(500)])
    assert load_samples(tokenizer, source, 20, 16).shape == (20, 16)


def _dataset_folder(folder: Path, rows: list[dict[str, str]]) -> str:
    folder.mkdir()
    (folder / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(folder)


def test_dataset_folder(tokenizer: PreTrainedTokenizerBase, tmp_path: Path) -> None:
    source = _dataset_folder(tmp_path / "corpus", [{"text": f"document {i} about modules"} for i in range(50)])
    samples = load_samples(tokenizer, source, 4, 16, seed=0)
    assert samples.shape == (4, 16)
    assert torch.equal(samples, load_samples(tokenizer, source, 4, 16, seed=0))
    assert not torch.equal(samples, load_samples(tokenizer, source, 4, 16, seed=1))
    assert "document" in tokenizer.decode(samples.flatten())


@pytest.mark.parametrize("kind", ["jsonl", "json", "csv", "parquet"])
def test_file_of_documents(tokenizer: PreTrainedTokenizerBase, tmp_path: Path, kind: str) -> None:
    """Read as a folder of such a file is: its texts, not its syntax."""
    rows = [{"id": i, "text": f'"document" {i}\nof modules'} for i in range(50)]
    source = tmp_path / f"corpus.{kind}"
    if kind in ("json", "jsonl"):
        source.write_text("".join(json.dumps(row) + "\n" for row in rows) if kind == "jsonl" else json.dumps(rows))
    else:
        import datasets

        getattr(datasets.Dataset.from_list(rows), f"to_{kind}")(str(source))
    (tmp_path / "corpus.txt").write_text("\n\n".join(row["text"] for row in rows))
    assert read_text(str(source)) == read_text(str(tmp_path / "corpus.txt"))
    drawn = tokenizer.decode(load_samples(tokenizer, str(source), 4, 16).flatten())
    assert "document" in drawn
    assert "{" not in drawn
    assert "id" not in drawn


def test_file_of_documents_is_a_name_and_no_pattern(tmp_path: Path) -> None:
    for name in ("a?b", "axb", "corpus[2024]"):
        (tmp_path / f"{name}.jsonl").write_text(json.dumps({"text": name}) + "\n")
    for name in ("a?b", "corpus[2024]"):
        assert read_text(str(tmp_path / f"{name}.jsonl")) == name


def test_file_of_documents_without_text(tokenizer: PreTrainedTokenizerBase, tmp_path: Path) -> None:
    for content, found in (
        ('{"prose": "words"}\n', "found the columns prose"),
        ("{not json", "a dataset that can be read"),
        ("", "found no(ne| rows)"),
        ('{"text": null}\n', "found a row whose text is None"),
        ('{"text": "a\\u0000b"}\n', "found a NUL at character 1"),
        (f'{{"text": "a", "more": {"[" * 3000 + "]" * 3000}}}\n', "a dataset that can be read"),
    ):
        (tmp_path / "bad.jsonl").write_text(content)
        with pytest.raises(CalibrationError, match=rf"bad\.jsonl.*{found}"):
            load_samples(tokenizer, str(tmp_path / "bad.jsonl"), 1, 1)


@pytest.mark.parametrize("kind", ["jsonl", "json", "csv", "parquet"])
def test_damaged_file_is_one_error(tmp_path: Path, kind: str, caplog: pytest.LogCaptureFixture) -> None:
    """The library `datasets` would log the error, too."""
    source = tmp_path / f"bad.{kind}"
    source.write_bytes(b'{"text": "a"}\n{"text": \xff\xff\n')
    with pytest.raises(CalibrationError) as caught:
        read_text(str(source))
    assert caught.value.hint.endswith("write it again, or pass a text file.")
    assert not caplog.records


def test_dataset_without_a_text_column(tokenizer: PreTrainedTokenizerBase, tmp_path: Path) -> None:
    source = _dataset_folder(tmp_path / "corpus", [{"prose": "words"}])
    with pytest.raises(CalibrationError, match=r"corpus.*expected a column `text` of strings, found the columns prose"):
        load_samples(tokenizer, source, 1, 1)


def test_folder_that_is_no_dataset(tokenizer: PreTrainedTokenizerBase, tmp_path: Path) -> None:
    with pytest.raises(CalibrationError, match="expected a dataset that can be read"):
        load_samples(tokenizer, str(tmp_path), 1, 1)


@pytest.mark.parametrize("source", ["wikitext2", "c4", "org/name", "org/name:config"])
def test_hub_out_of_reach(
    tokenizer: PreTrainedTokenizerBase, source: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import datasets

    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(CalibrationError, match=rf"dataset {source} \(split train\).*or pass a text file"):
        load_samples(tokenizer, source, 1, 8)


def test_datasets_library_absent(tokenizer: PreTrainedTokenizerBase, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(CalibrationError, match=r"not installed.*pip install datasets"):
        load_samples(tokenizer, "wikitext2", 1, 8)
