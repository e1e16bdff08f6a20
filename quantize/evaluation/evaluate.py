"""How good a model is: perplexity by GPTQ's protocol and divergence from a baseline.

Invariant: perplexity, KL divergence and agreement are means over the same predicted positions, and only one batch of
windows of logits is held at a time.
"""

import dataclasses
import math
import time
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor

from vllm_latq.errors import CalibrationError, CheckpointError, ConfigError, NumericalError
from vllm_latq.events import Listener, Progress, ignore_event, stage_progress
from vllm_latq.quantize.calibration.text import evaluation_text, evaluation_windows
from vllm_latq.quantize.calibration.windows import tokenize
from vllm_latq.quantize.model.loading import load_model, model_directory

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

# Log-softmax is taken in float64 for this many positions at a time: 256 MiB for a vocabulary of 128k.
ROWS_AT_ONCE = 256
# Tokens of a prompt, and of its answer.
PROMPT_TOKENS = ANSWER_TOKENS = 32


@dataclass(frozen=True)
class Evaluation:
    """The result of `evaluate`.

    Attributes:
        perplexity: exp of the mean negative log-likelihood (nats) of the predicted tokens.
        tokens: tokens in the evaluated windows; each window of n tokens has n - 1 predictions.
        windows: number of windows.
        seq_len: tokens per window, after clamping.
        seconds: time in the model's forward passes, the baseline's not counted.
        tokens_per_second: tokens / seconds.
        kl: mean KL(baseline || model) of the next-token distributions, nats; None without a baseline.
        top1_agreement: fraction of positions where both rank the same token first; None without a baseline.
        baseline_perplexity: perplexity of the baseline; None without one.
        answers: what both models continue the beginnings of some windows with, as objects of `prompt`, `baseline` and
            `model`; None without a baseline.
    """

    perplexity: float
    tokens: int
    windows: int
    seq_len: int
    seconds: float
    tokens_per_second: float
    kl: float | None = None
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
    """

    seq_len: int = 2048
    batch_size: int = 1
    max_windows: int | None = None
    answers: int = 0
    device: str | None = None
    dtype: str = "auto"

    def __post_init__(self) -> None:
        for name, least in (("seq_len", 2), ("batch_size", 1), ("max_windows", 1), ("answers", 0)):
            value = getattr(self, name)
            if value is not None and value < least:
                raise ConfigError(name, f"at least {least}", str(value))


@dataclass(frozen=True)
class WindowStatistics:
    """Sums over predicted positions; sums of several windows add up."""

    positions: int = 0
    nll: float = 0.0
    kl: float = 0.0
    agreeing: int = 0
    baseline_nll: float = 0.0

    def __add__(self, other: "WindowStatistics") -> "WindowStatistics":
        return WindowStatistics(
            self.positions + other.positions,
            self.nll + other.nll,
            self.kl + other.kl,
            self.agreeing + other.agreeing,
            self.baseline_nll + other.baseline_nll,
        )


def window_statistics(logits: Tensor, targets: Tensor, baseline: Tensor | None = None) -> WindowStatistics:
    """Sums of negative log-likelihood, KL(baseline || model) and agreement, computed in float64.

    Args:
        logits: next-token logits, any float dtype [n, vocabulary].
        targets: the tokens that came next, int64 [n].
        baseline: the original model's logits at the same positions [n, vocabulary], or None.
    """
    nll = kl = baseline_nll = 0.0
    agreeing = 0
    for start in range(0, len(targets), ROWS_AT_ONCE):
        rows = slice(start, start + ROWS_AT_ONCE)
        log_q = logits[rows].double().log_softmax(-1)
        nll -= log_q.gather(-1, targets[rows, None]).sum().item()
        if baseline is not None:
            log_p = baseline[rows].double().log_softmax(-1)
            baseline_nll -= log_p.gather(-1, targets[rows, None]).sum().item()
            kl += (log_p.exp() * (log_p - log_q)).sum().item()
            agreeing += int((log_p.argmax(-1) == log_q.argmax(-1)).sum())
    return WindowStatistics(len(targets), nll, kl, agreeing, baseline_nll)


def evaluate(
    model_path: str | Path,
    source: str,
    seq_len: int = Options.seq_len,
    baseline: str | Path | None = None,
    on_event: Listener = ignore_event,
    **options: Any,
) -> Evaluation:
    """Perplexity of a model or checkpoint on a text and, given a baseline, how far its predictions moved.

    The protocol is GPTQ's (Frantar et al. 2022, and the papers that follow it): the text is tokenized as one string
    and cut into non-overlapping windows; within each, every token but the first is predicted from those before it.
    The incomplete window at the end is left out; a text shorter than one window makes one short window.

    Args:
        model_path: a Hugging Face directory or hub name; a checkpoint of this package too.
        source: a text file, `wikitext2`, `c4`, a hub dataset `org/name[:config]`, or a dataset folder.
        seq_len: as in `Options`.
        baseline: the original model, to compare the next-token distributions with.
        on_event: called with "stage" events, see `vllm_latq.events`.
        options: the other fields of `Options`.

    Raises:
        CalibrationError: a text that cannot be read or has fewer than two tokens.
        CheckpointError: a model that cannot be loaded, or a baseline with another tokenizer or vocabulary.
        ConfigError: an option out of range.
        NumericalError: logits that are not finite.
    """
    how = Options(seq_len, **options)
    # A wrong name is found before anything large is read.
    for named in (model_path, baseline):
        if named is not None:
            model_directory(named)
    text = evaluation_text(source)
    model, tokenizer = load_model(model_path, how.device, how.dtype)
    ids = tokenize(tokenizer, text)
    models = {str(model_path): model}
    if baseline is not None:
        reference, reference_tokenizer = load_model(baseline, how.device, how.dtype)
        # Under its name, unless it is the same model.
        models |= {f"{baseline} (baseline)" if str(baseline) in models else str(baseline): reference}
        _check_same_vocabulary(model_path, model, ids, baseline, reference, tokenize(reference_tokenizer, text))
    for path, loaded in models.items():
        seq_len = _clamp(seq_len, path, loaded)
    windows = _windows(ids, seq_len, source, how.max_windows or evaluation_windows(source))
    _check_tokens_in_vocabulary(model_path, model, windows)
    found = _measure(models, windows, how.batch_size, stage_progress(on_event, "evaluating"))
    if baseline is None or not how.answers:
        return found
    distant = windows[:: -(-len(windows) // how.answers)]
    return replace(found, answers=_answers(models, tokenizer, distant, stage_progress(on_event, "answering")))


def _answers(
    models: Mapping[str, "PreTrainedModel"], tokenizer: "PreTrainedTokenizerBase", windows: Tensor, progress: Progress
) -> list[dict[str, str]]:
    """Return the beginning of each window, and what the model and the baseline greedily continue it with."""
    prompts = windows[:, :PROMPT_TOKENS]
    texts = [tokenizer.batch_decode(prompts)]
    for done, model in enumerate(models.values()):
        progress(done, len(models))
        ids, generator = prompts.to(model.device), cast(Any, model)
        limit = {"max_new_tokens": ANSWER_TOKENS, "do_sample": False, "pad_token_id": tokenizer.eos_token_id or 0}
        found = generator.generate(input_ids=ids, attention_mask=torch.ones_like(ids), **limit)
        texts.append(tokenizer.batch_decode(found[:, ids.shape[1] :], skip_special_tokens=True))
    return [{"prompt": prompt, "model": ours, "baseline": theirs} for prompt, ours, theirs in zip(*texts, strict=True)]


def _measure(models: Mapping[str, "PreTrainedModel"], windows: Tensor, batch: int, progress: Progress) -> Evaluation:
    """Run the windows, int64 [n, seq_len], through the model and, where there is one, the baseline after it."""
    (name, model), *others = models.items()
    total = WindowStatistics()
    seconds = 0.0
    progress(0, len(windows))
    for start in range(0, len(windows), batch):
        tokens = windows[start : start + batch].to(model.device)
        began = time.perf_counter()
        logits = _next_token_logits(model, tokens, name, start)
        seconds += time.perf_counter() - began
        expected = [_next_token_logits(reference, tokens, path, start) for path, reference in others]
        total += window_statistics(logits, tokens[:, 1:].flatten(), *expected)
        progress(min(start + batch, len(windows)), len(windows))
    compared = bool(others)
    return Evaluation(
        perplexity=_exp(total.nll / total.positions),
        tokens=windows.numel(),
        windows=windows.shape[0],
        seq_len=windows.shape[1],
        seconds=seconds,
        tokens_per_second=windows.numel() / seconds,
        kl=total.kl / total.positions if compared else None,
        top1_agreement=total.agreeing / total.positions if compared else None,
        baseline_perplexity=_exp(total.baseline_nll / total.positions) if compared else None,
    )


def _exp(mean_nll: float) -> float:
    """exp, infinite where float64 overflows: a model that bad still has a report."""
    try:
        return math.exp(mean_nll)
    except OverflowError:
        return math.inf


@torch.inference_mode()
def _next_token_logits(model: "PreTrainedModel", tokens: Tensor, name: str, first_window: int) -> Tensor:
    """Logits [batch * (seq_len - 1), vocabulary] that predict tokens[:, 1:]; the check also waits for CUDA."""
    logits = model(input_ids=tokens, use_cache=False).logits[:, :-1]
    finite = torch.isfinite(logits).flatten(1).all(1)
    if not finite.all():
        window = first_window + int(finite.logical_not().nonzero()[0])
        count = int(torch.isfinite(logits[window - first_window]).logical_not().sum())
        raise NumericalError(
            f"{name}, window {window}",
            "finite logits",
            f"{count} NaN or infinite ones",
            "Check the checkpoint with `latq verify`, or evaluate with dtype float32.",
        )
    return logits.flatten(0, 1)


def _clamp(seq_len: int, path: str, model: "PreTrainedModel") -> int:
    """seq_len, or fewer tokens if the model has not that many positions."""
    limit = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    if limit is None or seq_len <= limit:
        return seq_len
    warnings.warn(f"{path} has {limit} positions: evaluating with seq_len {limit}, not {seq_len}.", stacklevel=3)
    return int(limit)


def _windows(ids: Tensor, seq_len: int, source: str, limit: int | None) -> Tensor:
    """Non-overlapping windows [n, seq_len] of the token ids, or one short window [1, tokens]."""
    if ids.numel() < 2:
        raise CalibrationError(f"evaluation text {source}", "at least 2 tokens", str(ids.numel()), "Use more text.")
    if ids.numel() < seq_len:
        warnings.warn(
            f"evaluation text {source} has {ids.numel()} tokens, fewer than one window of {seq_len}: "
            "evaluating one short window.",
            stacklevel=3,
        )
        return ids[None]
    count = ids.numel() // seq_len
    return ids[: count * seq_len].view(count, seq_len)[:limit]


def _vocabulary(model: "PreTrainedModel") -> int:
    return int(model.config.get_text_config().vocab_size)


def _check_same_vocabulary(
    path: str | Path,
    model: "PreTrainedModel",
    ids: Tensor,
    baseline: str | Path,
    reference: "PreTrainedModel",
    want: Tensor,
) -> None:
    where = f"model {path} against baseline {baseline}"
    hint = "Compare a quantized checkpoint with the model it was made from."
    if _vocabulary(model) != _vocabulary(reference):
        raise CheckpointError(
            where, f"the baseline's vocabulary of {_vocabulary(reference)} tokens", str(_vocabulary(model)), hint
        )
    if not torch.equal(ids, want):
        raise CheckpointError(
            where, "the same tokens for the same text", f"{ids.numel()} tokens, the baseline's {want.numel()}", hint
        )


def _check_tokens_in_vocabulary(path: str | Path, model: "PreTrainedModel", windows: Tensor) -> None:
    highest = int(windows.max())
    if highest >= _vocabulary(model):
        raise CheckpointError(
            f"model {path}",
            f"a tokenizer of at most {_vocabulary(model)} tokens",
            f"token id {highest}",
            "The tokenizer belongs to another model.",
        )
