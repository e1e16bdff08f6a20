"""How good a model is: perplexity by GPTQ's protocol and divergence from a baseline.

Invariant: perplexity, KL divergence and agreement are of the same predicted positions, and only one batch of windows of
logits is held at a time.
"""

import dataclasses
import gc
import math
import time
import warnings
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from itertools import repeat
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import torch
from torch import Tensor

from vllm_latq.errors import CheckpointError, ConfigError
from vllm_latq.events import Listener, ignore_event, stage_progress
from vllm_latq.quantize.evaluation.predictions import Compared, Predictions, compare, joined
from vllm_latq.quantize.evaluation.predictors import EngineMaker, Kept, Loaded, Predictor, Served, asked
from vllm_latq.quantize.evaluation.reference import read_reference, save_reference
from vllm_latq.quantize.evaluation.results import described_text
from vllm_latq.quantize.evaluation.windows import Windows, read_windows
from vllm_latq.quantize.machine.durable_files import appearing
from vllm_latq.quantize.model.loading import (
    load_configuration,
    load_model,
    load_tokenizer,
    model_directory,
    torch_device,
)
from vllm_latq.quantize.recipe import DTYPES

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

# Tokens of a prompt of plain text, and of its answer.
PROMPT_TOKENS = ANSWER_TOKENS = 32
# Windows that vLLM gets at a time, at least: it makes batches of its own.
SERVED_WINDOWS = 16


@dataclass(frozen=True)
class Evaluation:
    """The result of `evaluate`.

    Attributes:
        perplexity: exp of the mean negative log-likelihood (nats) of the predicted tokens.
        tokens: tokens in the evaluated windows, without padding.
        windows: number of windows.
        seq_len: tokens of the longest window, after clamping.
        seconds: time in the model's forward passes, the baseline's not counted.
        tokens_per_second: tokens / seconds.
        positions: number of predictions.
        on_answers: whether only tokens of answers are predicted, as in conversations.
        through: the program that ran the model, "transformers" or "vllm".
        baseline: name of the original model; None without a baseline.
        kl: mean KL(baseline || model) of the next-token distributions, nats; None without a baseline.
        kl_median, kl_p99, kl_max: median, 99th percentile and largest KL of a position.
        kl_unseen: mean probability, by the baseline, of tokens that one of the two predictions does not list: `kl` then
            is a lower bound. None where both list all tokens, so that `kl` is exact.
        top1_agreement: fraction of positions where both rank the same token first; None without a baseline.
        baseline_perplexity: perplexity of the baseline; None without one.
        answers: what both models continue some prompts with, as objects of `prompt`, `baseline` and `model`; None
            without a baseline.
    """

    perplexity: float
    tokens: int
    windows: int
    seq_len: int
    seconds: float
    tokens_per_second: float
    positions: int = 0
    on_answers: bool = False
    through: str = "transformers"
    baseline: str | None = None
    kl: float | None = None
    kl_median: float | None = None
    kl_p99: float | None = None
    kl_max: float | None = None
    kl_unseen: float | None = None
    top1_agreement: float | None = None
    baseline_perplexity: float | None = None
    answers: list[dict[str, str]] | None = None

    def to_dict(self) -> dict[str, Any]:
        """All values by their names, for a JSON file."""
        return dataclasses.asdict(self)


@dataclass(frozen=True)
class Options:
    """Options of `evaluate`. ConfigError refuses values that are out of range.

    Attributes:
        seq_len: tokens per window; clamped, with a warning, to the positions the models have.
        batch_size: windows per forward pass.
        max_windows: stop after this many windows; by default all (C4: the 256 of GPTQ's protocol).
        answers: number of windows whose beginnings both models continue; 0 without a baseline.
        device: torch device; by default CUDA where there is one, else the CPU.
        dtype: of both models, see `load_model`.
        save_reference: file for the top predictions of the baseline or, without one, of the model.
        reference: file of `save_reference` that stands for the baseline.
    """

    seq_len: int = 2048
    batch_size: int = 1
    max_windows: int | None = None
    answers: int = 0
    device: str | None = None
    dtype: str = "auto"
    save_reference: str | Path | None = None
    reference: str | Path | None = None

    def __post_init__(self) -> None:
        for name, least in (("seq_len", 2), ("batch_size", 1), ("max_windows", 1), ("answers", 0)):
            value = getattr(self, name)
            if value is not None and value < least:
                raise ConfigError(name, f"at least {least}", str(value))
        if self.dtype not in DTYPES:
            raise ConfigError("dtype", "auto, float32, bfloat16 or float16", repr(self.dtype))
        torch_device(self.device)
        if self.save_reference is not None and self.reference is not None:
            raise ConfigError("save_reference", "none beside a reference", str(self.save_reference), "Leave out one.")


class _Described(NamedTuple):
    """A model before its weights are read.

    Attributes:
        name: as given.
        tokenizer: its tokenizer.
        vocabulary: number of tokens that it predicts.
        positions: tokens that it can take, None for any number.
    """

    name: str
    tokenizer: "PreTrainedTokenizerBase"
    vocabulary: int
    positions: int | None


def evaluate(
    model_path: str | Path,
    source: str,
    seq_len: int = Options.seq_len,
    baseline: str | Path | None = None,
    on_event: Listener = ignore_event,
    engine: EngineMaker | None = None,
    **options: Any,
) -> Evaluation:
    """Perplexity of a model or checkpoint on a text and, given a baseline, how far its predictions moved.

    The protocol is GPTQ's (Frantar et al. 2022, and the papers that follow it): the text is tokenized as one string
    and cut into non-overlapping windows; within each, every token but the first is predicted from those before it.
    The incomplete window at the end is left out; a text shorter than one window makes one short window. In
    conversations only tokens of answers are predicted, see `windows`.

    Args:
        model_path: a Hugging Face directory or hub name; a checkpoint of this package too.
        source: a text file, `wikitext2`, `c4`, a hub dataset `org/name[:config]`, a dataset folder, or conversations.
        seq_len: as in `Options`.
        baseline: the original model, to compare the next-token distributions with.
        on_event: called with "stage" events, see `vllm_latq.events`.
        engine: makes an engine that runs the model in place of transformers. The baseline is run before, by
            transformers, and its top predictions are kept.
        options: the other fields of `Options`.

    Raises:
        CalibrationError: a text that cannot be read or has fewer than two tokens.
        CheckpointError: a model that cannot be loaded, or a baseline or reference of another tokenizer, vocabulary or
            text, or a reference that cannot be written.
        ConfigError: an option out of range.
        NumericalError: logits that are not finite.
    """
    how = Options(seq_len, **options)
    if baseline is not None and how.reference is not None:
        raise ConfigError("reference", "none beside a baseline", str(how.reference), "Leave out one of them.")
    # A wrong name is found before anything large is read.
    for named in (model_path, baseline):
        if named is not None:
            model_directory(named)
    model, *others = (_described(named) for named in (model_path, baseline) if named is not None)
    for one in (model, *others):
        seq_len = _clamp(seq_len, one, 0 if engine is None else 1)
    windows = read_windows(model.tokenizer, source, seq_len, how.max_windows)
    for other in others:
        _check_same_vocabulary(model, windows, other, read_windows(other.tokenizer, source, seq_len, how.max_windows))
    _check_tokens_in_vocabulary(model, windows)
    text = described_text(source)
    run = _Run(windows, model.vocabulary, how.batch_size, on_event)
    original = None if baseline is None else str(baseline)
    with nullcontext() if how.save_reference is None else appearing(Path(how.save_reference)) as file:
        theirs: Predictor | None = None
        if how.reference is not None:
            original, predictions = read_reference(how.reference, text, windows, model.vocabulary)
            theirs = Kept(predictions)
        elif baseline is not None:
            # Under its name, unless it is the same model.
            name = f"{baseline} (baseline)" if str(baseline) == model.name else str(baseline)
            theirs = Loaded(name, load_model(baseline, how.device, how.dtype)[0])
            if engine is not None:
                theirs = Kept(run.record(theirs))
                free_memory()
        ours: Predictor = (
            Loaded(model.name, load_model(model_path, how.device, how.dtype)[0])
            if engine is None
            else Served(engine(windows.tokens.shape[1], asked(model.vocabulary)), asked(model.vocabulary))
        )
        found = replace(run.measure(ours, theirs, file is not None), baseline=original)
        if file is not None:
            save_reference(file, joined(run.kept), original or model.name, text, windows)
    if not how.answers or not isinstance(ours, Loaded) or not isinstance(theirs, Loaded):
        return found
    models = (ours.model, theirs.model)
    return replace(found, answers=_answers(models, model.tokenizer, windows, how.answers, on_event))


@dataclass
class _Run:
    """An evaluation at work.

    Attributes:
        windows: to predict.
        vocabulary: number of tokens that the models know.
        batch: windows per forward pass.
        on_event: called with "stage" events.
        kept: top predictions of the original model, where they are wanted.
    """

    windows: Windows
    vocabulary: int
    batch: int
    on_event: Listener
    kept: list[Predictions] = field(default_factory=list)

    def record(self, model: Predictor) -> Predictions:
        """Run the baseline alone, and return its top predictions."""
        for batch, start in self._batches("evaluating the baseline", self.batch):
            self.kept += [part.top() for part in model.predict(batch, start)]
        return joined(self.kept)

    def measure(self, model: Predictor, baseline: Predictor | None, keep: bool) -> Evaluation:
        """Run the windows through the model and, where there is one, the baseline after it."""
        parts: list[Compared] = []
        seconds = 0.0
        keep = keep and not self.kept
        served = isinstance(model, Served)
        for batch, start in self._batches("evaluating", max(self.batch, SERVED_WINDOWS) if served else self.batch):
            began = time.perf_counter()
            ours = model.predict(batch, start)
            seconds += time.perf_counter() - began
            theirs = repeat(None) if baseline is None else baseline.predict(batch, start)
            for prediction, expected in zip(ours, theirs, strict=False):
                parts.append(compare(prediction, expected, self.vocabulary))
                if keep:
                    self.kept.append((expected or prediction).top())
        total, tokens = joined(parts), sum(self.windows.lengths)
        return Evaluation(
            perplexity=_exp(total.nll),
            tokens=tokens,
            windows=len(self.windows),
            seq_len=self.windows.tokens.shape[1],
            seconds=seconds,
            tokens_per_second=tokens / seconds,
            positions=self.windows.positions,
            on_answers=self.windows.of_answers,
            through="vllm" if served else "transformers",
            **_divergence(total),
        )

    def _batches(self, stage: str, size: int) -> Iterator[tuple[Windows, int]]:
        """Yield windows, with the number of the first of them, and report the progress of a stage."""
        progress = stage_progress(self.on_event, stage)
        progress(0, len(self.windows))
        for number, batch in enumerate(self.windows.batches(size)):
            yield batch, number * size
            progress(min((number + 1) * size, len(self.windows)), len(self.windows))


def _divergence(total: Compared) -> dict[str, Any]:
    """Return the measurements against a baseline; empty without one."""
    if total.kl is None or total.agreeing is None or total.baseline_nll is None or total.unseen is None:
        return {}
    in_order = total.kl.sort().values
    median, p99 = (float(in_order[math.ceil(share * len(in_order)) - 1]) for share in (0.5, 0.99))
    return {
        "kl": float(total.kl.mean()),
        "kl_median": median,
        "kl_p99": p99,
        "kl_max": float(in_order[-1]),
        "kl_unseen": float(total.unseen.mean()) if total.unseen.any() else None,
        "top1_agreement": float(total.agreeing.double().mean()),
        "baseline_perplexity": _exp(total.baseline_nll),
    }


def _answers(
    models: Sequence["PreTrainedModel"],
    tokenizer: "PreTrainedTokenizerBase",
    windows: Windows,
    count: int,
    on_event: Listener,
) -> list[dict[str, str]]:
    """Return prompts, and what the model and the baseline greedily continue them with.

    The prompts are beginnings of windows: PROMPT_TOKENS of plain text, and all before the first answer of a
    conversation.
    """
    distant = range(0, len(windows), -(-len(windows) // count))
    ends = [int(windows.counted[index].nonzero()[0]) + 1 if windows.of_answers else PROMPT_TOKENS for index in distant]
    prompts = [windows.tokens[index, :end] for index, end in zip(distant, ends, strict=True)]
    texts = [[tokenizer.decode(prompt) for prompt in prompts]]
    progress = stage_progress(on_event, "answering")
    limit = {"max_new_tokens": ANSWER_TOKENS, "do_sample": False, "pad_token_id": tokenizer.eos_token_id or 0}
    for done, model in enumerate(models):
        progress(done, len(models))
        generator, answers = cast(Any, model), []
        for prompt in prompts:
            ids = prompt[None].to(model.device)
            found = generator.generate(input_ids=ids, attention_mask=torch.ones_like(ids), **limit)
            answers.append(tokenizer.decode(found[0, ids.shape[1] :], skip_special_tokens=True))
        texts.append(answers)
    return [{"prompt": prompt, "model": ours, "baseline": theirs} for prompt, ours, theirs in zip(*texts, strict=True)]


def free_memory() -> None:
    """Give back the memory of models that are no longer needed."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def _exp(nll: Tensor) -> float:
    """Return exp of the mean, infinite where float64 overflows: a model that bad still has a report."""
    try:
        return math.exp(float(nll.mean()))
    except OverflowError:
        return math.inf


def _described(path: str | Path) -> _Described:
    """Return what is known of a model before its weights are read."""
    text = load_configuration(path).get_text_config()
    positions = getattr(text, "max_position_embeddings", None)
    return _Described(str(path), load_tokenizer(model_directory(path)), int(text.vocab_size), positions)


def _clamp(seq_len: int, model: _Described, room: int) -> int:
    """Return seq_len, or fewer tokens if the model has not that many positions, with room for some more."""
    if model.positions is None or seq_len <= model.positions - room:
        return seq_len
    fitting = model.positions - room
    warnings.warn(
        f"{model.name} has {model.positions} positions: evaluating with seq_len {fitting}, not {seq_len}.", stacklevel=3
    )
    return fitting


def _check_same_vocabulary(model: _Described, windows: Windows, baseline: _Described, theirs: Windows) -> None:
    where = f"model {model.name} against baseline {baseline.name}"
    hint = "Compare a quantized checkpoint with the model it was made from."
    if model.vocabulary != baseline.vocabulary:
        expected = f"the baseline's vocabulary of {baseline.vocabulary} tokens"
        raise CheckpointError(where, expected, str(model.vocabulary), hint)
    if windows.digest() != theirs.digest():
        found = f"{sum(windows.lengths)} tokens, the baseline's {sum(theirs.lengths)}"
        raise CheckpointError(where, "the same tokens for the same text", found, hint)


def _check_tokens_in_vocabulary(model: _Described, windows: Windows) -> None:
    if (highest := int(windows.tokens.max())) >= model.vocabulary:
        raise CheckpointError(
            f"model {model.name}",
            f"a tokenizer of at most {model.vocabulary} tokens",
            f"token id {highest}",
            "The tokenizer belongs to another model.",
        )
