"""Compare answers of the engine with log-probabilities that transformers computes for the same model."""

from typing import Any

import torch


def assert_agrees(model: Any, prompt: list[int], answer: dict[str, Any], tolerance: float, **inputs: Any) -> None:
    """Assert that each token is the model's likeliest next one, with the model's log-probabilities.

    Args:
        model: of transformers.
        prompt: token ids.
        answer: `tokens` and `logprobs`, as `engine_probe.probe` returns them.
        tolerance: of a log-probability; tokens may tie within it.
        inputs: of the model, beside token ids.
    """
    tokens = torch.tensor([prompt + answer["tokens"]])
    with torch.no_grad():
        logits = model(tokens, attention_mask=torch.ones_like(tokens), **inputs).logits
    expected = logits[0, len(prompt) - 1 : -1].log_softmax(-1)
    for row, token, found in zip(expected, answer["tokens"], answer["logprobs"], strict=True):
        assert row[token] >= row.max() - tolerance
        for number, logprob in found.items():
            assert abs(row[int(number)] - logprob) <= tolerance
