"""A trace: answers that a model itself generates, as conversations for calibration and evaluation.

A quantized model is to answer as the original does. Its own answers, reasoning included, are the text that it reads and
writes when it is served. Special tokens are no text: an answer with one before its end is left out.

Invariant: the file appears complete or not at all. All answers to one prompt are in one half, so the halves have no
prompt in common.
"""

import json
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple, Protocol

from vllm_latq.errors import CalibrationError, CheckpointError, ConfigError
from vllm_latq.events import Listener, ignore_event, stage_progress
from vllm_latq.quantize.calibration.chats import (
    CALIBRATION,
    EVALUATION,
    Conversation,
    prompt_text,
    prompts_of,
    render,
    require_template,
    token_ids,
)
from vllm_latq.quantize.calibration.text import read_json_lines, read_text_file
from vllm_latq.quantize.machine.durable_files import appearing
from vllm_latq.quantize.model.loading import load_configuration, load_tokenizer, model_directory

# Prompts that come with this package; `prompts.md` says what they are.
BUNDLED_PROMPTS = Path(__file__).with_name("prompts.jsonl")
NUM_ANSWERS, MAX_TOKENS = 512, 1024
# Prompts that the engine gets at a time.
PROMPTS_AT_ONCE = 256
STAGE = "generating"


class Engine(Protocol):
    """An inference engine, such as vLLM's."""

    def generate(
        self, prompts: Sequence[Sequence[int]], max_tokens: int, seeds: Sequence[int]
    ) -> list[tuple[str, Sequence[int], bool]]:
        """Return an answer to each prompt of token ids.

        Returns:
            Text without special tokens, token ids, and whether the model ended the answer, with the last of these ids.
        """


class Traced(NamedTuple):
    """The result of `trace`.

    Attributes:
        answers: number of conversations.
        unfinished: how many answers were cut off at `max_tokens`.
    """

    answers: int
    unfinished: int


def trace(
    model: str | Path,
    output: str | Path,
    engine: Callable[[int], Engine],
    prompts: str | Path | None = None,
    num: int = NUM_ANSWERS,
    max_tokens: int = MAX_TOKENS,
    seed: int = 0,
    on_event: Listener = ignore_event,
) -> Traced:
    """Let a model answer prompts, and write the conversations as JSON lines.

    A record has `messages`, `split` ("calibration" for every other prompt, "evaluation" for the rest) and `finished`.

    Args:
        model: directory or hub name of a model with a chat template.
        output: file to create.
        engine: makes the engine, given how many tokens a conversation may have.
        prompts: a text file with a prompt in each line, or JSON lines with `prompt` or `messages`; None takes those of
            this package.
        num: number of answers. If there are fewer prompts, each is answered several times, with other seeds.
        max_tokens: tokens of an answer.
        seed: seed of the first answer; answer n has `seed` + n.
        on_event: called with "stage" events, see `vllm_latq.events`.

    Raises:
        CalibrationError: prompts that cannot be read, a model without a chat template that can be used, or one whose
            answers all have special tokens in them.
        CheckpointError: no such model, or a file that exists or cannot be written.
        ConfigError: an option out of range.
    """
    for name, value, least in (("num", num, 1), ("max_tokens", max_tokens, 1), ("seed", seed, 0)):
        if value < least:
            raise ConfigError(name, f"at least {least}", str(value))
    path = Path(output)
    if path.exists():
        raise CheckpointError(str(output), "a file to create", "one that exists", "Remove it, or choose another name.")
    tokenizer = load_tokenizer(model_directory(model))
    require_template(tokenizer, f"model {model}")
    asked = read_prompts(BUNDLED_PROMPTS if prompts is None else Path(prompts))
    # A template whose answers could not be found again is refused before hours of work.
    for _ in render(tokenizer, _answered(asked[0], "An answer.")):
        pass
    ids = [token_ids(tokenizer, prompt_text(tokenizer, one)) for one in asked]
    longest = max(map(len, ids)) + max_tokens
    positions = getattr(load_configuration(model).get_text_config(), "max_position_embeddings", None)
    if positions is not None and longest > positions:
        most = f"at most {positions - longest + max_tokens}, beside the longest prompt"
        raise ConfigError("max_tokens", most, str(max_tokens), f"The model has {positions} positions.")
    with appearing(path) as temporary:
        # Not `all_special_ids`: these are only of the tokens that have a role, such as the end.
        special = {number: str(token) for number, token in tokenizer.added_tokens_decoder.items() if token.special}
        return _write(temporary, asked, ids, engine(longest), special, (num, max_tokens, seed), on_event)


def _write(
    path: Path,
    prompts: Sequence[Conversation],
    ids: Sequence[list[int]],
    engine: Engine,
    special: Mapping[int, str],
    sizes: tuple[int, int, int],
    on_event: Listener,
) -> Traced:
    """Write the conversations; CalibrationError if the first answers, or all, are empty or have special tokens.

    Args:
        path: the file.
        prompts: conversations without their last answer.
        ids: tokens of each prompt.
        engine: that answers.
        special: special tokens, by their ids.
        sizes: number of answers, tokens of each, and the first seed.
        on_event: called with "stage" events.
    """
    num, max_tokens, seed = sizes
    progress, kept, unfinished, within = stage_progress(on_event, STAGE), 0, 0, list[str]()
    progress(0, num)
    with path.open("w", encoding="utf-8") as file:
        for start in range(0, num, PROMPTS_AT_ONCE):
            numbers = range(start, min(start + PROMPTS_AT_ONCE, num))
            places = [number % len(prompts) for number in numbers]
            answers = engine.generate([ids[place] for place in places], max_tokens, [seed + one for one in numbers])
            for place, (text, tokens, finished) in zip(places, answers, strict=True):
                marks = [special[one] for one in tokens[: len(tokens) - finished] if one in special]
                within += marks[:1]
                if text.strip() and not marks:
                    half = (CALIBRATION, EVALUATION)[place % 2]
                    answered = _answered(prompts[place], text)
                    record = {"messages": answered.messages, **answered.options, "split": half, "finished": finished}
                    file.write(json.dumps(record, ensure_ascii=False) + "\n")
                    kept += 1
                    unfinished += not finished
            if not kept and within:
                hint = "Text cannot hold these tokens, so the answers of models that write them cannot be traced."
                found = f"{within[0]} in an answer, and no answer without such a token"
                raise CalibrationError("trace", "answers without special tokens before their end", found, hint)
            if not kept:
                raise CalibrationError("trace", "answers", "empty ones only", "Is it a model that answers?")
            progress(numbers.stop, num)
    if within:
        found = f"{len(within)} of {num} answers had special tokens before their end, such as {within[0]}"
        warnings.warn(f"trace: {found}, and are left out.", stacklevel=3)
    if empty := num - kept - len(within):
        warnings.warn(f"trace: {empty} of {num} answers were empty, and are left out.", stacklevel=3)
    return Traced(kept, unfinished)


def _answered(prompt: Conversation, text: str) -> Conversation:
    """Return a prompt with an answer."""
    return prompt._replace(messages=[*prompt.messages, {"role": "assistant", "content": text}])


def read_prompts(path: Path) -> list[Conversation]:
    """Return the prompts of a file, each once, in order.

    Args:
        path: JSON lines (.jsonl, .json) with `prompt` or `messages`, of which answers at the end are left out; or text
            with a prompt in each line.

    Raises:
        CalibrationError: the file cannot be read, or has no prompts.
    """
    if path.suffix.lower() in (".json", ".jsonl") and path.is_file():
        found: Iterator[Conversation] = prompts_of(read_json_lines(path))
    else:
        lines = enumerate(read_text_file(path).splitlines(), 1)
        texts = ((f"text file {path}, line {number}", {"prompt": line}) for number, line in lines if line.strip())
        found = prompts_of(texts)
    once = {json.dumps([one.messages, one.options]): one for one in found}
    if not once:
        raise CalibrationError(f"text file {path}", "prompts", "none", "Write a prompt in each line.")
    return list(once.values())
