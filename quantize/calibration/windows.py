"""Calibration samples: equally long windows of token ids, the activations of which make the Hessians.

Conversations are drawn in a random order and rendered, and their tokens follow each other as those of one long text. A
window is cut from this text, so it may begin or end within a conversation, and no token of an answer is left out.

Invariant: the windows do not overlap and are the same for the same text, tokenizer, sizes and seed.
"""

import hashlib
import warnings
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from vllm_latq.errors import CalibrationError, ConfigError
from vllm_latq.quantize.calibration.chats import CALIBRATION, Conversation, conversations, render
from vllm_latq.quantize.calibration.text import BUNDLED, calibration_text
from vllm_latq.quantize.model.decoder import Decoder
from vllm_latq.quantize.model.loading import load_tokenizer
from vllm_latq.quantize.recipe import Recipe

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# English text has about 4 characters per token; reading twice that leaves windows to choose from. More is read where it
# does not make enough windows.
CHARS_READ_PER_TOKEN = 8


class Samples(NamedTuple):
    """Calibration windows, and the text that they are cut from.

    Attributes:
        tokens: token ids, int64 [n, seq_len].
        name: of the text: its file without folders, or the name of its dataset.
        sha256: hex digest of the text that was read, in UTF-8; conversations are rendered.
        counted: whether the token after each token belongs to an answer, bool [n, seq_len]: the positions of which the
            loss is taken. None for plain text, where all are.
    """

    tokens: Tensor
    name: str
    sha256: str
    counted: Tensor | None = None

    def to_dict(self) -> dict[str, Any]:
        """Return the description that events and the report hold, as plain JSON values."""
        count, length = self.tokens.shape
        answers = {} if self.counted is None else {"answer_tokens": int(self.counted.sum())}
        return {"name": self.name, "sha256": self.sha256, "samples": count, "seq_len": length, **answers}

    def digest(self) -> str:
        """Return a digest of the tokens, and of which of them are counted."""
        found = hashlib.sha256(self.tokens.numpy().tobytes())
        if self.counted is not None:
            found.update(self.counted.numpy().tobytes())
        return found.hexdigest()


class _Stream(NamedTuple):
    """Tokens that windows are cut from.

    Attributes:
        tokens: token ids, int64 [n].
        counted: whether the token after each token belongs to an answer, bool [n]; None for plain text.
        text: the text that was read.
    """

    tokens: Tensor
    counted: Tensor | None
    text: str


def tokenize(tokenizer: "PreTrainedTokenizerBase", text: str) -> Tensor:
    """Token ids of the whole text, int64 [n], with the special tokens the tokenizer adds to one text, as in GPTQ."""
    # verbose=False: "longer than the model's maximum length" does not matter for text that is cut into windows.
    return torch.tensor(tokenizer(text, verbose=False)["input_ids"], dtype=torch.int64)


def load_samples(
    tokenizer: "PreTrainedTokenizerBase",
    source: str,
    num_samples: int,
    seq_len: int,
    seed: int = 0,
    special_tokens: bool = False,
) -> Samples:
    """Draw calibration windows from a text.

    The text is tokenized as one string and cut into non-overlapping windows, of which `num_samples` are drawn without
    replacement. A large source is not read whole, see `calibration_text`. A shorter text gives all the windows that it
    has, with a warning that states both numbers. Conversations (see `chats`) are drawn until they have enough tokens.

    Args:
        tokenizer: the tokenizer of the model to be quantized.
        source: `bundled`, a text file, `wikitext2`, `c4`, a hub dataset `org/name[:config]`, or a dataset folder.
        num_samples: number of windows wanted, at least 1.
        seq_len: tokens per window, at least 1.
        seed: of the choice and the order of the windows.
        special_tokens: whether each window is a text of its own, between the tokens that the tokenizer puts around one,
            as encoders are fed. Language models see the middle of a long text.

    Returns:
        n windows with 1 <= n <= num_samples.

    Raises:
        CalibrationError: a size below 1, a source that cannot be read, a text shorter than one window, or
            conversations that the tokenizer's chat template does not take.
    """
    for name, value in (("num_samples", num_samples), ("seq_len", seq_len)):
        if value < 1:
            raise CalibrationError(name, "at least 1", str(value))
    none = torch.empty(0, dtype=torch.int64)
    before, after = _around(tokenizer) if special_tokens else (none, none)
    inner = seq_len - len(before) - len(after)
    if inner < 1:
        raise CalibrationError("seq_len", "room for text between the special tokens", str(seq_len))
    talks = conversations(tokenizer, source, "train", CALIBRATION, seed)
    if talks is None:
        stream = _plain(tokenizer, source, (num_samples, seq_len), seed, (len(before), len(after)))
    else:
        stream = _packed(tokenizer, talks, num_samples * inner + 1)
    ids = stream.tokens
    available = ids.numel() // inner
    if available == 0:
        raise CalibrationError(
            f"calibration text {source}",
            f"at least one window of {seq_len} tokens",
            f"{ids.numel()} tokens",
            "Use more text or shorter windows.",
        )
    if available < num_samples:
        warnings.warn(
            f"calibration text {source}: {num_samples} windows of {seq_len} tokens were asked for, "
            f"its {ids.numel()} tokens make {available}; calibrating on {available * inner} tokens.",
            stacklevel=2,
        )
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.randperm(available, generator=generator)[:num_samples]
    windows = ids[: available * inner].view(available, inner)[drawn]
    tokens = torch.cat([before.expand(len(drawn), -1), windows, after.expand(len(drawn), -1)], dim=1)
    counted = None if stream.counted is None else stream.counted[: available * inner].view(available, inner)[drawn]
    if counted is not None and not counted.any():
        hint = "Use more or longer windows, or more text."
        raise CalibrationError(f"calibration text {source}", "windows with tokens of answers", "none", hint)
    name = Path(source).name if source != BUNDLED and Path(source).exists() else source
    return Samples(tokens, name, hashlib.sha256(stream.text.encode()).hexdigest(), counted)


def _plain(
    tokenizer: "PreTrainedTokenizerBase", source: str, sizes: tuple[int, int], seed: int, around: tuple[int, int]
) -> _Stream:
    """Return the tokens of enough text for windows, or of the whole text of a smaller source.

    Args:
        tokenizer, source, seed: as in `load_samples`.
        sizes: number of windows, and tokens of each.
        around: how many special tokens stand before and after the text; they are left out.
    """
    num_samples, seq_len = sizes
    before, after = around
    chars = num_samples * seq_len * CHARS_READ_PER_TOKEN
    while True:
        text, whole = calibration_text(source, chars, seed)
        ids = tokenize(tokenizer, text)
        ids = ids[before : len(ids) - after]
        if whole or ids.numel() // (seq_len - before - after) >= num_samples:
            return _Stream(ids, None, text)
        chars = 2 * max(chars, len(text))


def _packed(tokenizer: "PreTrainedTokenizerBase", talks: Iterable[Conversation], wanted: int) -> _Stream:
    """Return the tokens of conversations one after the other: at least as many as wanted, or all that there are."""
    texts, tokens, answers = [], [], []
    total = 0
    for talk in talks:
        for rendered in render(tokenizer, talk):
            texts.append(rendered.text)
            tokens.append(rendered.tokens)
            answers.append(rendered.answers)
            total += len(rendered.tokens)
        if total >= wanted:
            break
    following = torch.cat([*answers, torch.zeros(1, dtype=torch.bool)])[1:]
    return _Stream(torch.cat(tokens), following, "".join(texts))


def _around(tokenizer: "PreTrainedTokenizerBase") -> tuple[Tensor, Tensor]:
    """The special tokens before and behind one text, int64."""
    encoded = tokenizer("a", return_special_tokens_mask=True)
    ids, special = torch.tensor(encoded["input_ids"]), encoded["special_tokens_mask"]
    first, last = special.index(0), len(special) - special[::-1].index(0)
    return ids[:first], ids[last:]


def chosen_text(recipe: Recipe, calibration: str | None) -> str | None:
    """Return the name of the text to calibrate on: the bundled text if none is given and the method needs one."""
    return BUNDLED if calibration is None and recipe.needs_text else calibration


def calibration_samples(decoder: Decoder, recipe: Recipe, calibration: str) -> Samples:
    """Return windows of a text file or a dataset; raise ConfigError if the model cannot take them."""
    check_seq_len(decoder, recipe)
    tokenizer = load_tokenizer(decoder.source)
    sizes = (recipe.num_samples, recipe.seq_len, recipe.seed)
    samples = load_samples(tokenizer, calibration, *sizes, special_tokens=decoder.encoder)
    if (highest := int(samples.tokens.max())) >= decoder.vocabulary:
        raise ConfigError("tokenizer", f"token ids below {decoder.vocabulary}", str(highest), "Is it the model's?")
    widest = max(linear.in_features for index in range(len(decoder)) for linear in decoder.linears(index).values())
    if (tokens := samples.tokens.numel()) < widest and recipe.needs_calibration:
        warnings.warn(
            f"calibration: {tokens} tokens for layers of up to {widest} input channels make singular "
            "Hessians; damping alone decides there. Use more or longer samples.",
            stacklevel=2,
        )
    return samples


def check_seq_len(decoder: Decoder, recipe: Recipe) -> None:
    """Raise ConfigError if the model has no positions for calibration samples as long as the recipe's."""
    if decoder.longest is not None and recipe.seq_len > decoder.longest:
        expected = f"at most {decoder.longest}, the positions of the model"
        raise ConfigError("recipe.seq_len", expected, str(recipe.seq_len), f"Use --seq-len {decoder.longest} or less.")
