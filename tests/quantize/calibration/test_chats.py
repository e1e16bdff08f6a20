"""Conversations: every shape of record, the tokens of answers, windows of them, and one error for each fault."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from helpers.chat import TEMPLATE, talk, with_template, write_lines
from vllm_latq.errors import CalibrationError
from vllm_latq.quantize.calibration.chats import CALIBRATION, EVALUATION, Rendered, conversations, render
from vllm_latq.quantize.calibration.windows import load_samples
from vllm_latq.quantize.evaluation.windows import read_windows

# A template that drops the reasoning of all answers but the last, and one that marks answers itself.
FORGETFUL = """{% for message in messages %}<|{{ message.role }}|>
{% if message.role == "assistant" and not loop.last %}{{ message.content.split("</think>")[-1] }}{% else %}{{
message.content }}{% endif %}{{ eos_token }}
{% endfor %}{% if add_generation_prompt %}<|assistant|>
{% endif %}"""
MARKED = """{% for message in messages %}<|{{ message.role }}|>
{% if message.role == "assistant" %}{% generation %}{{ message.content }}{{ eos_token }}{% endgeneration %}{% else %}{{
message.content }}{% endif %}
{% endfor %}"""
END = "<|endoftext|>"


@pytest.fixture(scope="module")
def tokenizer(mini_model: Path) -> PreTrainedTokenizerBase:
    found = AutoTokenizer.from_pretrained(mini_model)
    found.chat_template = TEMPLATE
    return found


def rendered(tokenizer: PreTrainedTokenizerBase, source: str, part: str = CALIBRATION) -> list[Rendered]:
    """Return everything that a source of conversations renders to."""
    talks = conversations(tokenizer, source, "train", part)
    assert talks is not None
    return [one for each in talks for one in render(tokenizer, each)]


def answers(tokenizer: PreTrainedTokenizerBase, one: Rendered) -> str:
    """Return the text of the tokens that belong to answers."""
    return str(tokenizer.decode(one.tokens[one.answers]))


SHARED = {"conversations": [{"from": "human", "value": "Why?"}, {"from": "gpt", "value": "Because."}]}
ALPACA = {"instruction": "Why?", "input": "", "output": "Because."}


@pytest.mark.parametrize("record", [talk("Why?", "Because."), SHARED, ALPACA, {**ALPACA, "text": "### Why?"}])
@pytest.mark.parametrize("suffix", ["jsonl", "json", "parquet"])
def test_every_shape_renders_the_same(
    record: dict[str, Any], suffix: str, tokenizer: PreTrainedTokenizerBase, tmp_path: Path
) -> None:
    source = tmp_path / f"talks.{suffix}"
    if suffix == "parquet":
        from datasets import Dataset

        Dataset.from_list([record, record]).to_parquet(source)
    elif suffix == "json":
        source.write_text(json.dumps([record, record], indent=1))
    else:
        write_lines(source, [record, record])
    found = rendered(tokenizer, str(source))
    assert [one.text for one in found] == 2 * [f"<|user|>\nWhy?{END}\n<|assistant|>\nBecause.{END}\n"]
    assert answers(tokenizer, found[0]) == f"Because.{END}"


def test_system_input_and_parts_are_kept(tokenizer: PreTrainedTokenizerBase, tmp_path: Path) -> None:
    alpaca = {"instruction": "Sum up.", "input": "A text.", "output": "Text."}
    (one,) = rendered(tokenizer, write_lines(tmp_path / "alpaca.jsonl", [alpaca]))
    assert "<|user|>\nSum up.\n\nA text.<" in one.text
    (one,) = rendered(tokenizer, write_lines(tmp_path / "shared.jsonl", [SHARED | {"system": "Be brief."}]))
    assert one.text.startswith("<|system|>\nBe brief.<")
    parts = talk("", "Yes.")
    parts["messages"][0]["content"] = [{"type": "text", "text": "Is "}, {"type": "text", "text": "it?"}]
    (one,) = rendered(tokenizer, write_lines(tmp_path / "parts.jsonl", [parts]))
    assert "<|user|>\nIs it?<" in one.text


def test_tools_and_thinking_reach_the_template(tokenizer: PreTrainedTokenizerBase, tmp_path: Path) -> None:
    tools = [{"name": "clock", "parameters": {"zone": {"type": "string"}}}, {"name": "map"}]
    called = {
        "messages": [
            {"role": "user", "content": "When?"},
            {"role": "assistant", "tool_calls": [{"function": {"name": "clock", "arguments": '{"zone": "UTC"}'}}]},
            {"role": "tool", "content": "noon"},
            {"role": "assistant", "content": "Noon."},
        ],
        "tools": json.dumps(tools),
    }
    first, second = rendered(tokenizer, write_lines(tmp_path / "tools.jsonl", [called, talk("Why?", "So.")]))
    assert first.text.startswith("<|tools|>clock,map\n<|user|>\nWhen?")
    assert answers(tokenizer, first) == f"{END}Noon.{END}"
    assert "tools" not in second.text
    talks = conversations(tokenizer, str(tmp_path / "tools.jsonl"), "train", CALIBRATION)
    assert talks is not None
    assert next(talks).messages[1]["tool_calls"][0]["function"]["arguments"] == {"zone": "UTC"}
    quick = talk("Why?", "(no thoughts)So.", enable_thinking=False)
    (one,) = rendered(tokenizer, write_lines(tmp_path / "quick.jsonl", [quick]))
    assert answers(tokenizer, one) == f"So.{END}"


@pytest.mark.parametrize("tools", [[], "[]", "", "null", None])
def test_empty_tools_are_none(tools: Any, tokenizer: PreTrainedTokenizerBase, tmp_path: Path) -> None:
    source = write_lines(tmp_path / "talks.jsonl", [talk("Why?", "So.", tools=tools)])
    talks = conversations(tokenizer, source, "train", CALIBRATION)
    assert talks is not None
    assert next(talks).options == {}


def test_all_turns_are_answers_of_one_text(tokenizer: PreTrainedTokenizerBase, tmp_path: Path) -> None:
    (one,) = rendered(tokenizer, write_lines(tmp_path / "talk.jsonl", [talk("One?", "Two.", "Three?", "Four.")]))
    assert answers(tokenizer, one) == f"Two.{END}Four.{END}"


def test_answers_that_the_template_changes_later_have_a_text_of_their_own(mini_model: Path, tmp_path: Path) -> None:
    """Each answer follows the prompt that a server builds."""
    forgetful = AutoTokenizer.from_pretrained(mini_model)
    forgetful.chat_template = FORGETFUL
    record = talk("One?", "<think>1+1</think>Two.", "Three?", "<think>2+2</think>Four.")
    first, second = rendered(forgetful, write_lines(tmp_path / "talk.jsonl", [record]))
    assert answers(forgetful, first) == f"<think>1+1</think>Two.{END}"
    assert answers(forgetful, second) == f"<think>2+2</think>Four.{END}"
    assert "1+1" not in second.text
    assert "Two." in second.text


def test_a_template_may_mark_its_answers(mini_model: Path, tmp_path: Path) -> None:
    marked = AutoTokenizer.from_pretrained(mini_model)
    marked.chat_template = MARKED
    source = write_lines(tmp_path / "talk.jsonl", [talk("One?", "Two.", "Three?", "Four.")])
    (one,) = rendered(marked, source)
    assert answers(marked, one) == f"Two.{END}Four.{END}"
    assert one.text == tokenizer_text(marked, source)


def tokenizer_text(tokenizer: PreTrainedTokenizerBase, source: str) -> str:
    messages = json.loads(Path(source).read_text())["messages"]
    return str(tokenizer.apply_chat_template(messages, tokenize=False))


def test_windows_are_cut_from_all_conversations(tokenizer: PreTrainedTokenizerBase, tmp_path: Path) -> None:
    """Every window continues the one before it; a position counts if an answer's token comes next."""
    source = write_lines(tmp_path / "talks.jsonl", [talk(f"Is {n} a number?", f"Yes, {n}.") for n in range(40)])
    samples = load_samples(tokenizer, source, 5, 33, seed=2)
    assert samples.tokens.shape == (5, 33)
    assert samples.counted is not None
    again = load_samples(tokenizer, source, 5, 33, seed=2)
    assert torch.equal(samples.tokens, again.tokens)
    assert samples.digest() == again.digest()
    assert not torch.equal(samples.tokens, load_samples(tokenizer, source, 5, 33, seed=3).tokens)
    assert samples.to_dict()["answer_tokens"] == int(samples.counted.sum())
    predicted = "".join(
        tokenizer.decode(window[1:][counted[:-1]])
        for window, counted in zip(samples.tokens, samples.counted, strict=True)
    )
    assert re.fullmatch(rf"((Yes)?,? ?\d*\.?({re.escape(END)})?)*", predicted)
    assert predicted.count(END) >= 5


def test_halves_are_disjoint(tokenizer: PreTrainedTokenizerBase, tmp_path: Path) -> None:
    records = [talk(f"Is {n}?", "Yes.", split=(CALIBRATION, EVALUATION)[n % 2]) for n in range(6)] + [
        talk("Is 6?", "No.")
    ]
    source = write_lines(tmp_path / "trace.jsonl", records)
    halves = {part: {one.text[9:14] for one in rendered(tokenizer, source, part)} for part in (CALIBRATION, EVALUATION)}
    assert halves == {
        CALIBRATION: {"Is 0?", "Is 2?", "Is 4?", "Is 6?"},
        EVALUATION: {"Is 1?", "Is 3?", "Is 5?", "Is 6?"},
    }
    assert len(read_windows(tokenizer, source, 64)) == 4
    only = write_lines(tmp_path / "half.jsonl", [talk("Is?", "Yes.", split=CALIBRATION)])
    with pytest.raises(CalibrationError, match="expected conversations for evaluation, found only records with split"):
        read_windows(tokenizer, only, 64)


def test_evaluation_windows_have_a_conversation_each(tokenizer: PreTrainedTokenizerBase, tmp_path: Path) -> None:
    source = write_lines(
        tmp_path / "talks.jsonl", [talk("Short?", "Yes."), talk("A longer question?", "A longer answer.")]
    )
    windows = read_windows(tokenizer, source, 64)
    assert windows.of_answers
    for tokens, counted, length in zip(windows.tokens, windows.counted, windows.lengths, strict=True):
        assert tokenizer.decode(tokens[:length]).startswith("<|user|>\n")
        assert counted[length - 2]
        assert not counted[length - 1 :].any()
        assert tokenizer.decode(tokens[1:][counted]) in (f"Yes.{END}", f"A longer answer.{END}")
    assert windows.positions == int(windows.counted.sum())
    (first, second) = windows.batches(1)
    assert first.tokens.shape[1] < second.tokens.shape[1] == windows.tokens.shape[1]
    with pytest.warns(UserWarning, match="1 conversations are longer than a window of"):
        cut = read_windows(tokenizer, source, second.tokens.shape[1] - 2)
    assert cut.tokens.shape[1] == second.tokens.shape[1] - 2
    with pytest.raises(CalibrationError, match="expected answers within 2 tokens, found none"):
        read_windows(tokenizer, source, 2)


def turns(*roles: str) -> dict[str, Any]:
    return {"messages": [{"role": role, "content": "x"} for role in roles]}


def called(calls: Any) -> dict[str, Any]:
    """Return a conversation whose answer calls tools."""
    record = talk("When?", "Now.")
    record["messages"][1]["tool_calls"] = calls
    return record


@pytest.mark.parametrize(
    ("record", "message"),
    [
        (turns("user", "user", "assistant"), r"line 2: expected user after the start or .* found it after user"),
        (turns("assistant"), "line 2: expected assistant after user or tool, found it after the start"),
        (turns("user", "assistant", "system"), "expected system after the start, found it after assistant"),
        (turns("user", "assistant", "user"), "expected an answer at the end of the conversation, found user"),
        (turns("poet"), "expected a role among system, .* found 'poet'"),
        (talk("Why?", " "), "line 2: expected an answer, found an empty one"),
        (talk("", "Because."), "expected a question, found an empty one"),
        ({"messages": []}, "expected a list of objects"),
        ({"messages": ["x"]}, "expected a list of objects, found a str in it"),
        ({"messages": [{"role": "user", "content": 3}]}, "expected a content that is text, found 3"),
        ({"text": "words"}, "line 2: expected `messages`, as in the first record, found text"),
        (SHARED, "expected `messages`, as in the first record, found conversations"),
        ([1], "expected `messages`, as in the first record, found list"),
        (talk("Why \ud800?", "So."), r"line 2: expected Unicode text, found half of a surrogate pair, '\\ud800'"),
        (talk("Why?", "So.", tools=[{"name": "\udc00"}]), "line 2: expected Unicode text, found half of"),
        (called(5), "line 2: expected `tool_calls` that are a list of objects, found 5"),
        (called("clock"), "line 2: expected `tool_calls` that are a list of objects, found 'clock'"),
        (called([5]), "line 2: expected a list of objects, found a int in it"),
        (talk("Why?", "So.", tools="none"), "expected a list of objects, found 'none'"),
    ],
)
def test_a_record_that_is_no_conversation_is_named(
    record: Any, message: str, tokenizer: PreTrainedTokenizerBase, tmp_path: Path
) -> None:
    source = write_lines(tmp_path / "talks.jsonl", [talk("Why?", "Because."), record])
    with pytest.raises(CalibrationError, match=message):
        rendered(tokenizer, source)


def test_unknown_speakers_and_damaged_lines_are_named(tokenizer: PreTrainedTokenizerBase, tmp_path: Path) -> None:
    for speaker, named in (("alien", "'alien'"), (["human"], r"\['human'\]"), (None, "None")):
        source = write_lines(tmp_path / "shared.jsonl", [{"conversations": [{"from": speaker, "value": "x"}]}])
        with pytest.raises(CalibrationError, match=rf"line 1: expected `from` among human, .* found {named}"):
            rendered(tokenizer, source)
    (tmp_path / "torn.jsonl").write_text(json.dumps(talk("Why?", "So.")) + '\n{"messages": [')
    with pytest.raises(CalibrationError, match="line 2: expected a JSON object, found JSONDecodeError"):
        rendered(tokenizer, str(tmp_path / "torn.jsonl"))


def test_a_model_without_a_chat_template_is_named(mini_model: Path, tmp_path: Path) -> None:
    source = write_lines(tmp_path / "talks.jsonl", [talk("Why?", "Because.")])
    without = AutoTokenizer.from_pretrained(mini_model)
    for read in (lambda: load_samples(without, source, 1, 8), lambda: read_windows(without, source, 8)):
        with pytest.raises(CalibrationError, match=r"expected a model with a chat template, .* found none"):
            read()


def test_a_model_without_a_chat_template_reads_the_column_text(mini_model: Path, tmp_path: Path) -> None:
    """Each record of Alpaca has its prompt and answer as a text, too, which base models are quantized with."""
    both = write_lines(tmp_path / "both.jsonl", 9 * [ALPACA | {"text": "### Why? Because.\n"}])
    without = AutoTokenizer.from_pretrained(mini_model)
    samples, windows = load_samples(without, both, 1, 8), read_windows(without, both, 16)
    assert samples.counted is None
    assert not windows.of_answers
    assert without.decode(windows.tokens[0]).startswith("### Why?")


def test_templates_that_cannot_be_used_are_refused(mini_model: Path, tmp_path: Path) -> None:
    source = write_lines(tmp_path / "talks.jsonl", [talk("Why?", "Because.")])
    tokenizer = AutoTokenizer.from_pretrained(mini_model)
    tokenizer.chat_template = "{{ raise_exception('no chats today') }}"
    with pytest.raises(
        CalibrationError, match=r"a conversation that the model's chat template accepts, .*no chats today"
    ):
        rendered(tokenizer, source)
    shown = "{% for m in messages %}{{ m.role }}:{{ m.content }}{% endfor %}"
    tokenizer.chat_template = shown + "{% if add_generation_prompt %}bot>{% endif %}"
    expected = "a chat template that puts an answer after its prompt, found another beginning with message 2: 'bot>'"
    with pytest.raises(CalibrationError, match=expected):
        rendered(tokenizer, source)


def test_the_template_of_a_model_directory_is_read(mini_model: Path, tmp_path: Path) -> None:
    from vllm_latq.quantize.model.loading import load_tokenizer

    model = with_template(mini_model, tmp_path / "chat")
    assert len(rendered(load_tokenizer(model), write_lines(tmp_path / "a.jsonl", [talk("Why?", "So.")]))) == 1
