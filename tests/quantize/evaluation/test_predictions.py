"""Divergence of predictions: exact where all tokens are known, and a lower bound of it where some are not."""

import pytest
import torch

from vllm_latq.quantize.evaluation.predictions import (
    ROWS_AT_ONCE,
    Compared,
    Predictions,
    compare,
    joined,
    slices,
)

# Sums over some hundred positions in float32 here, float64 there.
FLOAT32_TOLERANCE = 1e-5
VOCABULARY = 63


def drawn(positions: int, spread: float = 1.0) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return logits of a model, those of a baseline, and the tokens that came next."""
    generator = torch.Generator().manual_seed(positions)
    logits, baseline = (spread * torch.randn(2, positions, VOCABULARY, generator=generator)).unbind()
    return logits, baseline, torch.randint(VOCABULARY, (positions,), generator=generator)


@pytest.mark.parametrize("positions", [1, 33, ROWS_AT_ONCE + 1])
def test_measurements_against_torch(positions: int) -> None:
    logits, baseline, targets = drawn(positions)
    model, original = (Predictions.of(one, targets) for one in (logits, baseline))
    got = joined([compare(model[rows], original[rows], VOCABULARY) for rows in slices(positions)])
    log_q, log_p = logits.log_softmax(-1), baseline.log_softmax(-1)
    expected = torch.nn.functional.kl_div(log_q, log_p, reduction="none", log_target=True).sum(-1)
    assert got.kl is not None
    assert got.agreeing is not None
    assert got.unseen is not None
    torch.testing.assert_close(got.kl.float(), expected, rtol=FLOAT32_TOLERANCE, atol=FLOAT32_TOLERANCE)
    nll = torch.nn.functional.nll_loss(log_q, targets, reduction="none")
    torch.testing.assert_close(got.nll.float(), nll, rtol=FLOAT32_TOLERANCE, atol=FLOAT32_TOLERANCE)
    assert torch.equal(got.agreeing, logits.argmax(-1) == baseline.argmax(-1))
    assert not got.unseen.any()


def test_equal_logits_do_not_diverge() -> None:
    logits, targets = torch.randn(5, 17).to(torch.bfloat16), torch.zeros(5, dtype=torch.int64)
    model = Predictions.of(logits, targets)
    for one in (model, model.top(3)):
        got = compare(one, one, 17)
        assert got.kl is not None
        assert got.agreeing is not None
        assert got.kl.abs().max() == 0
        assert got.agreeing.all()


def test_a_model_alone_has_its_likelihood() -> None:
    logits, _, targets = drawn(4)
    got = compare(Predictions.of(logits, targets), None, VOCABULARY)
    assert joined([got, got]).nll.shape == (8,)
    assert (got.kl, got.baseline_nll) == (None, None)


@pytest.mark.parametrize("truncated", ["baseline", "model", "both"])
def test_tokens_that_are_not_listed_are_one_event(truncated: str) -> None:
    """The divergence is that of the distributions in which the tokens that not both list are one token."""
    logits, baseline, targets = drawn(33, spread=3.0)
    model, original = (Predictions.of(one, targets) for one in (logits, baseline))
    ours = model.top(20) if truncated != "baseline" else model
    theirs = original.top(10) if truncated != "model" else original
    got, exact = compare(ours, theirs, VOCABULARY), compare(model, original, VOCABULARY)
    assert got.kl is not None
    assert got.unseen is not None
    assert exact.kl is not None
    for row in range(33):
        listed = set(range(VOCABULARY))
        for one in (ours, theirs):
            if one.ids is not None:
                listed &= set(one.ids[row].tolist())
        tokens = sorted(listed)
        p, q = original.logprobs[row].exp(), model.logprobs[row].exp()
        lumped = [torch.cat([one[tokens], 1 - one[tokens].sum().view(1)]) for one in (p, q)]
        expected = (lumped[0] * (lumped[0] / lumped[1]).log()).sum()
        assert got.kl[row] == pytest.approx(float(expected), abs=1e-6)
        assert got.unseen[row] == pytest.approx(float(lumped[0][-1]), abs=1e-9)
    assert (got.kl <= exact.kl + 1e-9).all()
    assert torch.equal(got.nll, exact.nll)


def test_top_tokens_of_top_tokens() -> None:
    logits, _, targets = drawn(5)
    once, twice = (one.top(7) for one in (Predictions.of(logits, targets), Predictions.of(logits, targets).top(30)))
    assert once.ids is not None
    assert once.rest is not None
    assert twice.ids is not None
    assert torch.equal(once.ids, twice.ids)
    torch.testing.assert_close(once.rest, twice.rest)
    torch.testing.assert_close(once.logprobs.exp().sum(-1) + once.rest, torch.ones(5, dtype=torch.float64))


def test_measurements_are_joined_in_order() -> None:
    parts = [Compared(torch.tensor([1.0])), Compared(torch.tensor([2.0, 3.0]))]
    assert joined(parts).nll.tolist() == [1, 2, 3]
