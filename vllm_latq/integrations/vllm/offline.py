"""vLLM's offline engine, for `latq trace` and `latq eval --through vllm`.

Invariant: vLLM is imported when an engine is made, and an engine that cannot be made is one error.
"""

import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from vllm_latq.errors import ConfigError, summary


class OfflineEngine:
    """A model that vLLM runs in this process or in processes that vLLM starts.

    Args:
        model: directory or hub name.
        arguments: engine arguments of vLLM.

    Raises:
        ConfigError: vLLM is not installed, or does not start an engine with these arguments.
    """

    def __init__(self, model: str | Path, **arguments: Any) -> None:
        # vLLM reads it when it is imported; its log must not be among what a command prints.
        os.environ.setdefault("VLLM_LOGGING_STREAM", "ext://sys.stderr")
        try:
            from vllm import LLM
        except ImportError as error:
            hint = "Run pip install 'vllm-latq[vllm]', or install vLLM's CPU build."
            raise ConfigError("vLLM", "vLLM's offline engine", f"it is not installed ({error})", hint) from error
        try:
            self._llm = LLM(str(model), **arguments)
        except (AttributeError, ImportError, OSError, RuntimeError, TypeError, ValueError) as error:
            hint = "vLLM's log above says more; --engine-args takes its engine arguments."
            raise ConfigError("vLLM", f"an engine for {model}", summary(error), hint) from error

    def prompt_logprobs(self, prompts: Sequence[Sequence[int]], top: int) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """Yield for each prompt of n tokens the log-probabilities of each token but the first.

        Args:
            prompts: token ids.
            top: how many of the likeliest tokens are wanted, at most `max_logprobs` of the engine.

        Yields:
            Ids of the likeliest tokens, int64 [n - 1, top], their log-probabilities [n - 1, top], and those of the
            prompt's own tokens [n - 1].
        """
        from vllm import SamplingParams

        # Flat lists, because an object for each log-probability takes ten times the memory and the time.
        how = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=top, flat_logprobs=True, detokenize=False)
        for answer in self._llm.generate(_tokens(prompts), how, use_tqdm=False):
            found: Any = answer.prompt_logprobs
            shape = (len(answer.prompt_token_ids or ()) - 1, top + 1)  # the prompt's own token, then the likeliest
            ids = torch.tensor(found.token_ids, dtype=torch.int64).view(shape)
            logprobs = torch.tensor(found.logprobs, dtype=torch.float32).view(shape)
            yield ids[:, 1:], logprobs[:, 1:], logprobs[:, 0]

    def generate(
        self, prompts: Sequence[Sequence[int]], max_tokens: int, seeds: Sequence[int]
    ) -> list[tuple[str, Sequence[int], bool]]:
        """Return an answer to each prompt, drawn as the model's generation config says.

        Args:
            prompts: token ids.
            max_tokens: the longest answer.
            seeds: a seed for each prompt.

        Returns:
            Text without special tokens, token ids, and whether the model ended the answer, with the last of these ids.
        """
        sampling = []
        for seed in seeds:
            how = self._llm.get_default_sampling_params()
            how.max_tokens, how.seed = max_tokens, seed
            sampling.append(how)
        answers = self._llm.generate(_tokens(prompts), sampling, use_tqdm=False)
        found = [answer.outputs[0] for answer in answers]
        return [(one.text, list(one.token_ids), one.finish_reason == "stop") for one in found]

    def close(self) -> None:
        """Stop the engine, and give back its memory."""
        from vllm.distributed import cleanup_dist_env_and_memory

        del self._llm
        cleanup_dist_env_and_memory()


def _tokens(prompts: Sequence[Sequence[int]]) -> Any:
    """Return prompts in vLLM's form."""
    return [{"prompt_token_ids": list(ids)} for ids in prompts]
