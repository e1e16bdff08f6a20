"""Conversations for calibration and evaluation, as the model's chat template renders them.

A source holds conversations if its records have one of these columns; but a model without a chat template reads the
column `text`, where there is one, as plain text. All records of a source have the same:

    messages              objects of `role` and `content` (OpenAI); also `tool_calls` and other keys of a template
    conversations         objects of `from` and `value` (ShareGPT)
    instruction, output   and perhaps `input` (Alpaca): one question and its answer

`tools` and `enable_thinking` of a record are passed to the template; an empty list of tools is none. A record with
`split` "calibration" is not for evaluation, one with "evaluation" is not for calibration, and any other is for both.

Invariant: an answer is what follows the prompt that a server would build from the messages before it. Where the
template renders an earlier answer differently once the conversation goes on (as templates do that drop reasoning), the
rest of the conversation is rendered as a text of its own; so each answer has the context that it has when it is served.
"""

import json
import random
import re
from collections.abc import Iterable, Iterator, Mapping
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from vllm_latq.errors import CalibrationError, summary
from vllm_latq.quantize.calibration.text import (
    BUNDLED,
    KNOWN_DATASETS,
    SHUFFLE_BUFFER,
    SHUFFLE_BUFFER_CHARS,
    dataset_rows,
    read_json_lines,
    resolve,
)

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

CALIBRATION, EVALUATION = "calibration", "evaluation"
# Column that makes a source one of conversations -> the columns that its records have, too.
SHAPES: Mapping[str, tuple[str, ...]] = {
    "messages": ("messages",),
    "conversations": ("conversations",),
    "instruction": ("instruction", "output"),
}
# Names of ShareGPT's speakers -> roles.
_SPEAKERS = {
    **dict.fromkeys(("human", "user"), "user"),
    **dict.fromkeys(("gpt", "assistant", "model", "chatgpt", "function_call"), "assistant"),
    **dict.fromkeys(("tool", "observation", "function_response"), "tool"),
    "system": "system",
}
# Role -> the roles that may come before it; None is the start.
_AFTER: Mapping[str, tuple[str | None, ...]] = {
    "system": (None,),
    "developer": (None,),
    "user": (None, "system", "developer", "assistant"),
    "assistant": ("user", "tool"),
    "tool": ("assistant", "tool"),
}
# Role -> its messages, and the keys of which one must say something.
_SPEAKS = {
    "user": ("a question", ("content",)),
    "assistant": ("an answer", ("content", "tool_calls", "reasoning_content", "reasoning", "thinking")),
}
_MEND = "Remove the record, or mend it."
# A template that marks the answers itself.
_MARKS_ANSWERS = re.compile(r"\{%-?\s*generation\b")


class Conversation(NamedTuple):
    """One conversation.

    Attributes:
        where: the source and the record, for errors.
        messages: objects of `role` and `content`, as a chat template takes them.
        options: further arguments of the template: `tools`, `enable_thinking`.
    """

    where: str
    messages: list[dict[str, Any]]
    options: dict[str, Any]


class Rendered(NamedTuple):
    """A conversation, or a part of it, as the model reads it.

    Attributes:
        text: as the chat template renders it.
        tokens: token ids, int64 [n].
        answers: whether each token belongs to an answer, bool [n].
    """

    text: str
    tokens: Tensor
    answers: Tensor


def conversations(
    tokenizer: "PreTrainedTokenizerBase", source: str, split: str, part: str, seed: int | None = None
) -> Iterator[Conversation] | None:
    """Return the conversations of a source, or None if it is plain text.

    Args:
        tokenizer: of the model.
        source: as in `calibration_text`.
        split: of a dataset.
        part: CALIBRATION or EVALUATION: records that are marked for the other one are left out.
        seed: of the order in which they are drawn; None keeps their order.

    Raises:
        CalibrationError: the source cannot be read, or has conversations alone and the model no chat template. Reading
            on raises it for a record that is no such conversation.
    """
    dataset = None if source in (BUNDLED, *KNOWN_DATASETS) else resolve(source)
    if dataset is None:
        return None
    path = Path(source)
    if path.is_file() and path.suffix.lower() in (".json", ".jsonl"):
        records = read_json_lines(path)
        records = records if seed is None else _drawn(records, seed)
    else:
        # Columns that only other rows have are None in a dataset.
        rows = dataset_rows(source, dataset, split, seed)
        records = ((f"dataset {source} (split {split}), a record", _without_none(row)) for row in rows)
    first = next(records, None)
    if first is None or (shape := _shape(first[1])) is None:
        return None
    if not getattr(tokenizer, "chat_template", None) and isinstance(first[1].get("text"), str):
        return None
    require_template(tokenizer, source)
    return _parsed(chain([first], records), shape, source, part)


def _drawn(records: Iterator[tuple[str, Any]], seed: int) -> Iterator[tuple[str, Any]]:
    """Yield records in a random order, through a buffer of limited size as `datasets` does."""
    generator, buffer, held = random.Random(seed), [], 0
    for record in records:
        buffer.append(record)
        held += len(str(record[1]))
        if len(buffer) >= SHUFFLE_BUFFER or held >= SHUFFLE_BUFFER_CHARS:
            drawn = buffer.pop(generator.randrange(len(buffer)))
            held -= len(str(drawn[1]))
            yield drawn
    generator.shuffle(buffer)
    yield from buffer


def _without_none(value: Any) -> Any:
    """Return a value without the keys of objects that are None."""
    if isinstance(value, Mapping):
        return {key: _without_none(one) for key, one in value.items() if one is not None}
    return [_without_none(one) for one in value] if isinstance(value, list) else value


def _shape(record: Any) -> str | None:
    """Return the shape of a record of conversations, None for another record."""
    if not isinstance(record, Mapping):
        return None
    return next((shape for shape, columns in SHAPES.items() if all(name in record for name in columns)), None)


def _parsed(records: Iterable[tuple[str, Any]], shape: str, source: str, part: str) -> Iterator[Conversation]:
    """Yield the conversations that are for calibration or for evaluation; CalibrationError if there are none."""
    other = EVALUATION if part == CALIBRATION else CALIBRATION
    found = 0
    for where, record in records:
        if _shape(record) != shape:
            expected = " and ".join(f"`{name}`" for name in SHAPES[shape])
            columns = ", ".join(record) if isinstance(record, Mapping) else type(record).__name__
            raise CalibrationError(where, f"{expected}, as in the first record", columns, _MEND)
        if record.get("split") != other:
            found += 1
            yield _conversation(record, shape, where)
    if not found:
        hint = "Pass another file: `latq trace` writes both halves into one."
        raise CalibrationError(source, f"conversations for {part}", f"only records with split {other!r}", hint)


def _conversation(record: Mapping[str, Any], shape: str, where: str) -> Conversation:
    """Return a record as a conversation; CalibrationError if it is none."""
    if shape == "messages":
        messages = [dict(_object(message, where)) for message in _list(record[shape], where)]
    elif shape == "conversations":
        messages = [_shared(_object(message, where), where) for message in _list(record[shape], where)]
    else:
        question = "\n\n".join(filter(None, (_text(record, name, where) for name in ("instruction", "input"))))
        messages = [
            {"role": "user", "content": question},
            {"role": "assistant", "content": _text(record, "output", where)},
        ]
    if isinstance(system := record.get("system"), str) and system.strip() and shape != "messages":
        messages.insert(0, {"role": "system", "content": system})
    if (last := _checked(messages, where)) != "assistant":
        raise CalibrationError(where, "an answer at the end of the conversation", str(last), _MEND)
    return _readable(Conversation(where, messages, _options(record, where)))


def _readable(conversation: Conversation) -> Conversation:
    """Return a conversation; CalibrationError if a text has half a character, as no tokenizer takes it."""
    try:
        json.dumps(conversation[1:], ensure_ascii=False, default=str).encode()
    except UnicodeEncodeError as error:
        found = f"half of a surrogate pair, {error.object[error.start]!r}"
        raise CalibrationError(conversation.where, "Unicode text", found, _MEND) from error
    return conversation


def _checked(messages: list[dict[str, Any]], where: str) -> str | None:
    """Return the role of the last message; CalibrationError for an empty message, or for roles out of order."""
    previous: str | None = None
    for message in messages:
        role = str(message.get("role"))
        if role not in _AFTER:
            raise CalibrationError(where, f"a role among {', '.join(_AFTER)}", repr(role), _MEND)
        if previous not in _AFTER[role]:
            expected = " or ".join(one or "the start" for one in _AFTER[role])
            raise CalibrationError(where, f"{role} after {expected}", f"it after {previous or 'the start'}", _MEND)
        _check_content(message, where)
        previous = role
    return previous


def _options(record: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Return what a record asks of the template beside its messages."""
    options = {name: record[name] for name in ("tools", "enable_thinking") if record.get(name) is not None}
    if "tools" in options and (tools := _from_json(options.pop("tools"))):
        options["tools"] = _list(tools, where)
    return options


def prompts_of(records: Iterable[tuple[str, Any]]) -> Iterator[Conversation]:
    """Yield the prompts of records with `prompt`, or with `messages` of which answers at the end are left out.

    Raises:
        CalibrationError: another record, or messages that are no conversation.
    """
    for where, record in records:
        if isinstance(record, Mapping) and isinstance(record.get("prompt"), str):
            messages = [{"role": "user", "content": record["prompt"]}]
        elif isinstance(record, Mapping) and "messages" in record:
            messages = [dict(_object(message, where)) for message in _list(record["messages"], where)]
        else:
            raise CalibrationError(where, "a record with `prompt` or `messages`", repr(record)[:60], _MEND)
        while messages and messages[-1].get("role") == "assistant":
            messages.pop()
        if (last := _checked(messages, where)) not in ("user", "tool"):
            raise CalibrationError(where, "a question at the end", str(last), _MEND)
        yield _readable(Conversation(where, messages, _options(record, where)))


def _shared(message: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Return a message of ShareGPT with a role."""
    speaker = message.get("from")
    if not isinstance(speaker, str) or speaker not in _SPEAKERS:
        raise CalibrationError(where, f"`from` among {', '.join(_SPEAKERS)}", repr(speaker), _MEND)
    return {"role": _SPEAKERS[speaker], "content": message.get("value")}


def _check_content(message: dict[str, Any], where: str) -> None:
    """Join the parts of a content, read arguments of tools, and raise CalibrationError for an empty message."""
    if message.get("content") is None:
        message["content"] = ""  # templates print what they are given
    content = message["content"]
    if isinstance(content, list):
        parts = [_object(part, where) for part in content]
        message["content"] = content = "".join(_text(part, "text", where) for part in parts)
    if not isinstance(content, str):
        raise CalibrationError(where, "a content that is text", repr(content), _MEND)
    calls = message.get("tool_calls") or []
    if not isinstance(calls, list):
        raise CalibrationError(where, "`tool_calls` that are a list of objects", repr(calls)[:60], _MEND)
    for call in calls:
        function = _object(call, where).get("function")
        if isinstance(function, dict) and "arguments" in function:
            function["arguments"] = _from_json(function["arguments"])  # templates take an object
    if message["role"] in _SPEAKS:
        kind, keys = _SPEAKS[message["role"]]
        said = [message.get(key) for key in keys]
        if not any(one.strip() if isinstance(one, str) else one for one in said):
            raise CalibrationError(where, kind, "an empty one", _MEND)


def _object(value: Any, where: str) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise CalibrationError(where, "a list of objects", f"a {type(value).__name__} in it", _MEND)
    return value


def _list(value: Any, where: str) -> list[Any]:
    if not isinstance(value, list) or not value:
        raise CalibrationError(where, "a list of objects", repr(value)[:60], _MEND)
    return value


def _text(record: Mapping[str, Any], name: str, where: str) -> str:
    value = record.get(name) or ""
    if not isinstance(value, str):
        raise CalibrationError(where, f"`{name}` that is text", repr(value)[:60], _MEND)
    return value


def _from_json(value: Any) -> Any:
    """Return the value of a JSON text, and anything else as it is."""
    try:
        return json.loads(value) if isinstance(value, str) else value
    except ValueError:
        return value


def require_template(tokenizer: "PreTrainedTokenizerBase", source: str) -> None:
    """Raise CalibrationError if a tokenizer has no chat template."""
    if not getattr(tokenizer, "chat_template", None):
        hint = "Use the chat version of the model, copy its chat_template.jinja beside the weights, or pass plain text."
        raise CalibrationError(source, "a model with a chat template, as the text is of conversations", "none", hint)


def prompt_text(tokenizer: "PreTrainedTokenizerBase", conversation: Conversation) -> str:
    """Return the prompt that a server builds from the messages: with the beginning of an answer."""
    prompt: str = _template(tokenizer, conversation, tokenize=False, add_generation_prompt=True)
    return prompt


def _template(tokenizer: "PreTrainedTokenizerBase", conversation: Conversation, **options: Any) -> Any:
    """Return what the chat template makes of a conversation."""
    from jinja2 import TemplateError

    try:
        return tokenizer.apply_chat_template(conversation.messages, **conversation.options, **options)
    except (TemplateError, AttributeError, KeyError, TypeError, ValueError) as error:
        expected = "a conversation that the model's chat template accepts"
        raise CalibrationError(conversation.where, expected, summary(error), _MEND) from error


def render(tokenizer: "PreTrainedTokenizerBase", conversation: Conversation) -> Iterator[Rendered]:
    """Yield a conversation as the model reads it: one text, or several where the template changes earlier answers.

    Raises:
        CalibrationError: the template refuses the conversation, or its answers cannot be found in what it renders.
    """
    template = tokenizer.get_chat_template(tools=conversation.options.get("tools"))
    if _MARKS_ANSWERS.search(template):
        encoded = _template(tokenizer, conversation, return_dict=True, return_assistant_tokens_mask=True)
        answers = torch.tensor(encoded["assistant_masks"], dtype=torch.bool)
        if not answers.any():
            expected = "answers between the template's `generation` tags"
            raise CalibrationError(conversation.where, expected, "none", _MEND)
        text = _template(tokenizer, conversation, tokenize=False)
        yield Rendered(text, torch.tensor(encoded["input_ids"], dtype=torch.int64), answers)
        return
    for text, spans in _texts(tokenizer, conversation):
        tokens = torch.tensor(token_ids(tokenizer, text), dtype=torch.int64)
        answers = torch.zeros(len(tokens), dtype=torch.bool)
        for start, end in spans:
            answers[_boundary(tokenizer, text[:start], tokens) : _boundary(tokenizer, text[:end], tokens)] = True
        yield Rendered(text, tokens, answers)


def _texts(
    tokenizer: "PreTrainedTokenizerBase", conversation: Conversation
) -> Iterator[tuple[str, list[tuple[int, int]]]]:
    """Yield texts, and where answers begin and end in each, found by rendering the beginnings of the conversation."""
    ends = tuple(tokenizer.all_special_tokens)
    text, ended, spans = "", "", list[tuple[int, int]]()
    for index, message in enumerate(conversation.messages):
        if message["role"] != "assistant":
            continue
        before = conversation._replace(messages=conversation.messages[:index])
        with_answer = conversation._replace(messages=conversation.messages[: index + 1])
        prompt, answered = prompt_text(tokenizer, before), _template(tokenizer, with_answer, tokenize=False)
        if not answered.startswith(prompt) or answered == prompt:
            expected = "a chat template that puts an answer after its prompt"
            hint = "Add `{% generation %}` and `{% endgeneration %}` around the answers in the template."
            found = f"another beginning with message {index + 1}: {_difference(prompt, answered)}"
            raise CalibrationError(conversation.where, expected, found, hint)
        if spans and not prompt.startswith(ended):
            yield text, spans
            spans = []
        # A model ends an answer with a special token; blanks that the template adds are not generated.
        text, stripped = answered, answered.rstrip()
        ended = stripped if stripped.endswith(ends) and len(stripped) > len(prompt) else answered
        spans.append((len(prompt), len(ended)))
    yield text, spans


def _difference(prompt: str, answered: str) -> str:
    """Return where a text does not go on as a prompt does."""
    at = next((place for place, pair in enumerate(zip(prompt, answered, strict=False)) if pair[0] != pair[1]), 0)
    return f"{prompt[at : at + 20]!r} became {answered[at : at + 20]!r}"


def token_ids(tokenizer: "PreTrainedTokenizerBase", text: str) -> list[int]:
    """Return the token ids of a rendered text, whose special tokens stand in it."""
    ids: list[int] = tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
    return ids


def _boundary(tokenizer: "PreTrainedTokenizerBase", beginning: str, tokens: Tensor) -> int:
    """Return how many of the tokens are those of a beginning of the text."""
    ids = torch.tensor(token_ids(tokenizer, beginning), dtype=torch.int64)[: len(tokens)]
    differing = (ids != tokens[: len(ids)]).nonzero()
    return int(differing[0]) if len(differing) else len(ids)
