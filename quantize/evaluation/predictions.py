"""Log-probabilities of next tokens, of all tokens or of the likeliest, and how far two models' are apart.

Invariant: a token is known or not known to a prediction; the tokens that are not known have the mass `rest` together.
Where both predictions know a token, the divergence has its term; all other tokens are one event. So the divergence is
exact if both know every token, and otherwise a lower bound of it: it lacks how the mass of that event is shared out.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from typing import Any, TypeVar

import torch
from torch import Tensor

# Log-softmax is taken in float64 for this many positions at a time: 256 MiB for a vocabulary of 128k.
ROWS_AT_ONCE = 256
# Tokens that are kept of a prediction.
TOP_TOKENS = 256
# Log-probabilities are float32, so a mass that they leave over is known to this.
LEAST_REST = 1e-9


@dataclass(frozen=True)
class Predictions:
    """The predictions of a model at n positions.

    Attributes:
        targets: log-probability of the tokens that came next, float64 [n].
        logprobs: log-probabilities of the known tokens, [n, k].
        ids: the known tokens, int64 [n, k], each once; None for the whole vocabulary in order.
        rest: probability of all other tokens together, [n]; None where there are none.
    """

    targets: Tensor
    logprobs: Tensor
    ids: Tensor | None = None
    rest: Tensor | None = None

    @classmethod
    def of(cls, logits: Tensor, targets: Tensor) -> "Predictions":
        """Return the predictions of logits [n, vocabulary] for the tokens int64 [n] that came next."""
        logprobs = logits.double().log_softmax(-1)
        return cls(logprobs.gather(-1, targets[:, None])[:, 0], logprobs)

    def top(self, count: int = TOP_TOKENS) -> "Predictions":
        """Return the predictions with only the likeliest tokens known, the likeliest first, on the CPU."""
        kept = self.logprobs.topk(min(count, self.logprobs.shape[1]))
        ids = kept.indices if self.ids is None else self.ids.gather(-1, kept.indices)
        lost = self.logprobs.exp().sum(-1) - kept.values.exp().sum(-1)
        rest = lost if self.rest is None else lost + self.rest
        return Predictions(self.targets.cpu(), kept.values.cpu(), ids.cpu(), rest.clamp(min=0).cpu())

    def __getitem__(self, rows: slice) -> "Predictions":
        ids, rest = self.ids, self.rest
        kept = (None if ids is None else ids[rows], None if rest is None else rest[rows])
        return Predictions(self.targets[rows], self.logprobs[rows], *kept)

    def dense(self, vocabulary: int) -> Tensor:
        """Return the log-probabilities of all tokens, float64 [n, vocabulary]: NaN where they are not known."""
        if self.ids is None:
            return self.logprobs.double()
        missing = torch.full(
            (len(self.targets), vocabulary), torch.nan, dtype=torch.float64, device=self.logprobs.device
        )
        return missing.scatter(-1, self.ids.to(torch.int64), self.logprobs.double())


@dataclass(frozen=True)
class Compared:
    """Measurements at n positions.

    Attributes:
        nll: negative log-likelihood of the tokens that came next, nats, float64 [n].
        baseline_nll: the same of the baseline; None without one.
        kl: KL(baseline || model), nats, float64 [n]; None without a baseline.
        agreeing: whether both rank the same token first, bool [n]; None without a baseline.
        unseen: probability, by the baseline, of the tokens that not both know, [n]: zero where both know all; None
            without a baseline.
    """

    nll: Tensor
    baseline_nll: Tensor | None = None
    kl: Tensor | None = None
    agreeing: Tensor | None = None
    unseen: Tensor | None = None


def compare(model: Predictions, baseline: Predictions | None, vocabulary: int) -> Compared:
    """Measure the predictions of a model at some positions, ROWS_AT_ONCE at most, against those of a baseline."""
    nll = -model.targets.cpu()
    if baseline is None:
        return Compared(nll)
    log_q, log_p = model.dense(vocabulary), baseline.dense(vocabulary)
    log_p = log_p.to(log_q.device)
    if model.ids is None and baseline.ids is None:
        kl = (log_p.exp() * (log_p - log_q)).sum(-1)
        unseen = torch.zeros_like(kl)
    else:
        known = ~(log_q.isnan() | log_p.isnan())
        kl = torch.where(known, log_p.exp() * (log_p - log_q), 0).sum(-1)
        unseen = _unshared(baseline, log_p, known)
        if not known.all():
            other = _unshared(model, log_q, known)
            kl += unseen * (unseen.clamp(min=LEAST_REST) / other.clamp(min=LEAST_REST)).log()
        kl = kl.clamp(min=0)  # rounding
    first = (one.nan_to_num(nan=-torch.inf).argmax(-1) for one in (log_p, log_q))
    agreeing = torch.eq(*first)
    return Compared(nll, -baseline.targets.cpu(), kl.cpu(), agreeing.cpu(), unseen.cpu())


def _unshared(predictions: Predictions, logprobs: Tensor, shared: Tensor) -> Tensor:
    """Return the mass of the tokens that are not known to both predictions."""
    own = torch.where(shared, 0, logprobs.exp()).nansum(-1)
    return own if predictions.rest is None else own + predictions.rest.to(own)


T = TypeVar("T", Predictions, Compared)


def joined(parts: Sequence[T]) -> T:
    """Return the predictions or measurements of all positions, in order."""
    columns: dict[str, Any] = {}
    for field in fields(parts[0]):
        values = [getattr(part, field.name) for part in parts]
        columns[field.name] = None if values[0] is None else torch.cat(values)
    return type(parts[0])(**columns)


def slices(count: int) -> Iterator[slice]:
    """Yield slices of ROWS_AT_ONCE positions, one after the other."""
    for start in range(0, count, ROWS_AT_ONCE):
        yield slice(start, min(start + ROWS_AT_ONCE, count))
