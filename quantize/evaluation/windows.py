"""Windows of an evaluation text: tokens, and the positions whose predictions are counted.

Plain text is tokenized as one string and cut into non-overlapping windows; every token but a window's first is
predicted. Of conversations each window has one from its start, as a server sees it, and only tokens of answers count; a
conversation that is longer than a window is cut off.

Invariant: windows are padded on the right to one length. Padding is after the last counted token of its window, so a
model that predicts next tokens gives the same predictions without it.
"""

import hashlib
import warnings
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from vllm_latq.errors import CalibrationError
from vllm_latq.quantize.calibration.chats import EVALUATION, Conversation, conversations, render
from vllm_latq.quantize.calibration.text import evaluation_split, evaluation_text, evaluation_windows
from vllm_latq.quantize.calibration.windows import tokenize

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

PADDING = 0


@dataclass(frozen=True)
class Windows:
    """Windows of an evaluation text.

    Attributes:
        tokens: token ids, int64 [n, seq_len].
        counted: whether the prediction of the token after each token counts, bool [n, seq_len - 1].
        of_answers: whether only tokens of answers count.
    """

    tokens: Tensor
    counted: Tensor
    of_answers: bool = False

    @property
    def lengths(self) -> list[int]:
        """Tokens of each window, without padding."""
        places = torch.arange(2, self.tokens.shape[1] + 1)
        return [int(length) for length in (self.counted * places).amax(1)]

    @property
    def positions(self) -> int:
        """Number of predictions that count."""
        return int(self.counted.sum())

    def __len__(self) -> int:
        return len(self.tokens)

    def batches(self, size: int) -> Iterator["Windows"]:
        """Yield so many windows at a time, without the padding that all of them have."""
        lengths = self.lengths
        for start in range(0, len(self), size):
            longest = max(lengths[start : start + size])
            rows = slice(start, start + size)
            yield Windows(self.tokens[rows, :longest], self.counted[rows, : longest - 1], self.of_answers)

    def digest(self) -> str:
        """Return a digest of the tokens, and of the predictions that count."""
        found = hashlib.sha256(f"{tuple(self.tokens.shape)}".encode())
        found.update(self.tokens.numpy().tobytes())
        found.update(self.counted.numpy().tobytes())
        return found.hexdigest()


def read_windows(tokenizer: "PreTrainedTokenizerBase", source: str, seq_len: int, limit: int | None = None) -> Windows:
    """Return the windows of a text or of conversations.

    Args:
        tokenizer: of the model.
        source: as in `evaluation_text`, or a source of conversations (see `chats`).
        seq_len: tokens of a window, at most.
        limit: number of windows; None takes all (of C4, the 256 of GPTQ's protocol).

    Raises:
        CalibrationError: a source that cannot be read, or that has nothing to predict.
    """
    talks = conversations(tokenizer, source, evaluation_split(source), EVALUATION)
    if talks is not None:
        return _of_answers(tokenizer, talks, seq_len, limit, source)
    ids = tokenize(tokenizer, evaluation_text(source))
    if ids.numel() < 2:
        raise CalibrationError(f"evaluation text {source}", "at least 2 tokens", str(ids.numel()), "Use more text.")
    if ids.numel() < seq_len:
        warnings.warn(
            f"evaluation text {source} has {ids.numel()} tokens, fewer than one window of {seq_len}: "
            "evaluating one short window.",
            stacklevel=3,
        )
        windows = ids[None]
    else:
        count = ids.numel() // seq_len
        windows = ids[: count * seq_len].view(count, seq_len)[: limit or evaluation_windows(source)]
    return Windows(windows, torch.ones(len(windows), windows.shape[1] - 1, dtype=torch.bool))


def _of_answers(
    tokenizer: "PreTrainedTokenizerBase", talks: Iterable[Conversation], seq_len: int, limit: int | None, source: str
) -> Windows:
    """Return a window for each conversation, cut off after its last answer or at `seq_len` tokens."""
    found: list[tuple[Tensor, Tensor]] = []
    shortened = 0
    for talk in talks:
        for one in render(tokenizer, talk):
            shortened += bool(one.answers[seq_len:].any())
            tokens, counted = one.tokens[:seq_len], one.answers[1:seq_len]
            if counted.any():
                end = int(counted.nonzero()[-1]) + 1
                found.append((tokens[: end + 1], counted[:end]))
        if limit is not None and len(found) >= limit:
            break
    if not found:
        hint = "Use longer windows."
        raise CalibrationError(f"evaluation text {source}", f"answers within {seq_len} tokens", "none", hint)
    if shortened:
        warnings.warn(
            f"evaluation text {source}: {shortened} conversations are longer than a window of {seq_len} tokens; "
            "the rest of them is left out.",
            stacklevel=3,
        )
    pad = torch.nn.utils.rnn.pad_sequence
    kept = found[:limit]
    tokens = pad([one for one, _ in kept], batch_first=True, padding_value=PADDING)
    return Windows(tokens, pad([one for _, one in kept], batch_first=True), of_answers=True)
