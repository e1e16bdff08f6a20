"""Models that predict the next tokens of windows: loaded by transformers, run by an engine, or kept in a file."""

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

from vllm_latq.errors import NumericalError
from vllm_latq.quantize.evaluation.predictions import TOP_TOKENS, Predictions, slices
from vllm_latq.quantize.evaluation.windows import Windows

if TYPE_CHECKING:
    from transformers import PreTrainedModel

# An engine is asked for all tokens of a vocabulary of at most so many: Python lists of them take 36 bytes each.
WHOLE_VOCABULARY = 4096


class Predictor(Protocol):
    """A model that predicts the next tokens of windows."""

    def predict(self, windows: Windows, first: int) -> Iterator[Predictions]:
        """Run the model, and return its predictions at the counted positions, ROWS_AT_ONCE at a time.

        Args:
            windows: the windows of a batch.
            first: number of the first of them, for errors.
        """


class Engine(Protocol):
    """An inference engine, such as vLLM's, that returns log-probabilities of prompts."""

    def prompt_logprobs(self, prompts: Sequence[Sequence[int]], top: int) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """Yield for each prompt of n tokens the log-probabilities of each token but the first.

        Yields:
            Ids of the likeliest tokens, int64 [n - 1, top], their log-probabilities [n - 1, top], and those of the
            prompt's own tokens [n - 1].
        """


# Takes the longest window and how many log-probabilities are asked for.
EngineMaker = Callable[[int, int], Engine]


class Loaded:
    """A model that transformers runs.

    Args:
        name: of the model, for errors.
        model: the model, in evaluation mode.
    """

    def __init__(self, name: str, model: "PreTrainedModel") -> None:
        self.name, self.model = name, model

    def predict(self, windows: Windows, first: int) -> Iterator[Predictions]:
        """Run the model; NumericalError for logits that are not finite."""
        tokens, counted = windows.tokens.to(self.model.device), windows.counted.to(self.model.device)
        logits = self._logits(tokens, first)
        targets = tokens[:, 1:]
        if counted.all():  # without a copy
            logits, targets = logits.flatten(0, 1), targets.flatten()
        else:
            logits, targets = logits[counted], targets[counted]
        return (Predictions.of(logits[rows], targets[rows]) for rows in slices(len(targets)))

    @torch.inference_mode()
    def _logits(self, tokens: Tensor, first: int) -> Tensor:
        """Return the logits [windows, seq_len - 1, vocabulary] of tokens[:, 1:]; the check also waits for CUDA."""
        logits: Tensor = self.model(input_ids=tokens, use_cache=False).logits[:, :-1]
        finite = torch.isfinite(logits).flatten(1).all(1)
        if not finite.all():
            window = int(finite.logical_not().nonzero()[0])
            count = int(torch.isfinite(logits[window]).logical_not().sum())
            raise NumericalError(
                f"{self.name}, window {first + window}",
                "finite logits",
                f"{count} NaN or infinite ones",
                "Check the checkpoint with `latq verify`, or evaluate with dtype float32.",
            )
        return logits


class Kept:
    """Predictions that were made before, at all counted positions in order."""

    def __init__(self, predictions: Predictions) -> None:
        self.predictions, self.done = predictions, 0

    def predict(self, windows: Windows, first: int) -> Iterator[Predictions]:
        """Return the next predictions."""
        start = self.done
        self.done += windows.positions
        found = self.predictions[start : self.done]
        return (found[rows] for rows in slices(windows.positions))


class Served:
    """A model that an engine runs.

    Args:
        engine: the engine.
        top: how many log-probabilities it is asked for, see `asked`.
    """

    def __init__(self, engine: Engine, top: int) -> None:
        self.engine, self.top = engine, top

    def predict(self, windows: Windows, first: int) -> Iterator[Predictions]:
        """Run the engine."""
        prompts = [ids[:length].tolist() for ids, length in zip(windows.tokens, windows.lengths, strict=True)]
        found = []
        for answer, counted in zip(self.engine.prompt_logprobs(prompts, self.top), windows.counted, strict=True):
            found.append([column[counted[: len(column)]] for column in answer])
        ids, logprobs, targets = (torch.cat(columns) for columns in zip(*found, strict=True))
        if not torch.isfinite(logprobs).all():
            hint = "Check the checkpoint with `latq verify`."
            raise NumericalError(f"engine, window {first} or later", "finite log-probabilities", "others", hint)
        rest = (1 - logprobs.double().exp().sum(-1)).clamp(min=0)
        predictions = Predictions(targets.double(), logprobs, ids, rest)
        return (predictions[rows] for rows in slices(len(targets)))


def asked(vocabulary: int) -> int:
    """Return how many log-probabilities an engine is asked for: all of a small vocabulary, or TOP_TOKENS."""
    return vocabulary if vocabulary <= WHOLE_VOCABULARY else TOP_TOKENS
