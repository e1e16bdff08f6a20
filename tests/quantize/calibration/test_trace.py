"""Traces: halves without a common prompt, a file that is complete or not there, and an error for each fault."""

import json
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import pytest
from transformers import AutoTokenizer, PreTrainedTokenizerBase

import vllm_latq
from helpers.chat import talk, with_template, write_lines
from vllm_latq.errors import CalibrationError, CheckpointError, ConfigError
from vllm_latq.events import ignore_event
from vllm_latq.quantize.calibration.trace import BUNDLED_PROMPTS, Engine, Traced, read_prompts, trace
from vllm_latq.quantize.calibration.windows import load_samples
from vllm_latq.quantize.evaluation.windows import read_windows


@pytest.fixture(scope="module")
def model(mini_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return with_template(mini_model, tmp_path_factory.mktemp("chat") / "model")


class Parrot:
    """An engine whose answer to a prompt is its text and the seed; of every fifth seed it is empty.

    Answers whose text has a mark have a special token there, which the text does not show.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, fails_at: int | None = None, mark: str = "\0") -> None:
        self.tokenizer, self.fails_at, self.mark = tokenizer, fails_at, mark

    def generate(
        self, prompts: Sequence[Sequence[int]], max_tokens: int, seeds: Sequence[int]
    ) -> list[tuple[str, list[int], bool]]:
        if self.fails_at in seeds:
            raise RuntimeError("out of memory")
        texts = [self.tokenizer.decode(prompt, skip_special_tokens=True) for prompt in prompts]
        return [
            self.answer(" " if seed % 5 == 4 else f"{text.splitlines()[1]} {seed}", seed % 3 > 0)
            for text, seed in zip(texts, seeds, strict=True)
        ]

    def answer(self, text: str, finished: bool) -> tuple[str, list[int], bool]:
        end = str(self.tokenizer.eos_token)
        whole = text.replace(self.mark, end) + end * finished
        return text.replace(self.mark, ""), self.tokenizer.encode(whole, add_special_tokens=False), finished


def run(
    model: Path,
    output: Path,
    prompts: Path | None = None,
    fails_at: int | None = None,
    mark: str = "\0",
    **options: int,
) -> Traced:
    tokenizer = AutoTokenizer.from_pretrained(model)

    def make(longest: int) -> Engine:
        assert longest > options.get("max_tokens", 1024)
        return Parrot(tokenizer, fails_at, mark)

    return trace(model, output, make, prompts, **options)


def test_halves_have_no_prompt_in_common(model: Path, tmp_path: Path) -> None:
    prompts, output = tmp_path / "prompts.txt", tmp_path / "trace.jsonl"
    prompts.write_text("One?\nTwo?\n\nThree?\nOne?\n")
    with pytest.warns(UserWarning, match="2 of 10 answers were empty"):
        assert run(model, output, prompts, num=10) == Traced(8, 3)
    records = [json.loads(line) for line in output.read_text().splitlines()]
    halves = {(record["messages"][0]["content"], record["split"]) for record in records}
    assert halves == {("One?", "calibration"), ("Two?", "evaluation"), ("Three?", "calibration")}
    assert records[0] == talk("One?", "One? 0", split="calibration", finished=False)
    tokenizer = AutoTokenizer.from_pretrained(model)
    assert load_samples(tokenizer, str(output), 2, 16).counted is not None
    assert len(read_windows(tokenizer, str(output), 64)) == sum(record["split"] == "evaluation" for record in records)


def test_answers_with_special_tokens_before_their_end_are_left_out(model: Path, tmp_path: Path) -> None:
    """Models that mark reasoning by special tokens write no text that could be rendered again."""
    prompts, output = tmp_path / "prompts.txt", tmp_path / "trace.jsonl"
    prompts.write_text("One?\nTwo!\nThree?\n")
    with pytest.warns(UserWarning, match=r"1 of 4 answers had special tokens before their end, such as <\|endoftext"):
        assert run(model, output, prompts, mark="!", num=4) == Traced(3, 2)
    assert "Two" not in output.read_text()
    refused = r"expected answers without special tokens before their end, found <\|endoftext\|> in an answer"
    for mark in ("?", "3"):  # also the last token of an answer that was cut off
        with pytest.raises(CalibrationError, match=refused):
            run(model, tmp_path / "none.jsonl", prompts, mark=mark, num=1, seed=3)
    assert not list(tmp_path.glob("none*"))


def test_bundled_prompts_are_varied_and_halved_by_kind(model: Path, tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match="answers were empty"):
        found = run(model, tmp_path / "trace.jsonl", num=96)
    assert found.answers == 77
    kinds = [json.loads(line)["kind"] for line in BUNDLED_PROMPTS.read_text(encoding="utf-8").splitlines()]
    assert set(Counter(kinds[::2]).values()) == set(Counter(kinds[1::2]).values()) == {6}
    assert len(read_prompts(BUNDLED_PROMPTS)) == 96


def test_prompts_may_be_conversations(model: Path, tmp_path: Path) -> None:
    source = write_lines(tmp_path / "p.jsonl", [talk("One?", "Yes."), {"prompt": "Two?", "enable_thinking": False}])
    assert [one.messages[-1]["content"] for one in read_prompts(Path(source))] == ["One?", "Two?"]
    run(model, tmp_path / "trace.jsonl", Path(source), num=2)
    second = json.loads((tmp_path / "trace.jsonl").read_text().splitlines()[1])
    assert second["enable_thinking"] is False


def test_a_run_that_fails_leaves_nothing(model: Path, tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="out of memory"):
        run(model, tmp_path / "trace.jsonl", num=300, fails_at=299)
    assert list(tmp_path.iterdir()) == []
    run(model, tmp_path / "trace.jsonl", num=1)
    with pytest.raises(CheckpointError, match="expected a file to create, found one that exists"):
        run(model, tmp_path / "trace.jsonl", num=1)
    with pytest.raises(CheckpointError, match="expected a directory that can be written to"):
        run(model, tmp_path / "nowhere" / "trace.jsonl", num=1)


def test_what_cannot_be_traced_is_an_error(model: Path, mini_model: Path, tmp_path: Path) -> None:
    output = tmp_path / "trace.jsonl"
    for options, message in (
        ({"num": 0}, "num: expected at least 1, found 0"),
        ({"max_tokens": 0}, "max_tokens: expected at least 1, found 0"),
        ({"seed": -1}, "seed: expected at least 0, found -1"),
        ({"max_tokens": 2048}, r"max_tokens: expected at most \d+, beside the longest prompt, found 2048"),
    ):
        with pytest.raises(ConfigError, match=message):
            run(model, output, **options)
    with pytest.raises(CalibrationError, match="a model with a chat template"):
        run(mini_model, output)
    for name, content, message in (
        ("empty.txt", "\n \n", "expected some text, found none"),
        ("other.jsonl", '{"question": "Why?"}\n', "expected a record with `prompt` or `messages`"),
        ("half.jsonl", '{"prompt": "Why \\ud800?"}', "line 1: expected Unicode text, found half of a surrogate pair"),
        (
            "answer.jsonl",
            '{"messages": [{"role": "system", "content": "x"}]}',
            "expected a question at the end, found system",
        ),
    ):
        (tmp_path / name).write_text(content)
        with pytest.raises(CalibrationError, match=message):
            run(model, output, tmp_path / name)
    with pytest.raises(CalibrationError, match="expected answers, found empty ones only"):
        run(model, output, num=1, seed=4)


def test_without_vllm_there_is_one_error(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "vllm", None)
    source = write_lines(tmp_path / "talks.jsonl", [talk("Why?", "So.")])
    for call in (
        lambda: vllm_latq.trace(model, tmp_path / "trace.jsonl", on_event=ignore_event),
        lambda: vllm_latq.evaluate(model, source, through="vllm", seq_len=64, on_event=ignore_event),
    ):
        with pytest.raises(ConfigError, match=r"vLLM: expected vLLM's offline engine, found it is not installed .*pip"):
            call()
    assert [path.name for path in tmp_path.iterdir()] == ["talks.jsonl"]
