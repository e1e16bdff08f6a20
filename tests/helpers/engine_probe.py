"""Ask vLLM engines, in a process of their own, what they generate, and compare two answers."""

import json
import math
from importlib import metadata
from itertools import combinations
from typing import Any

from packaging.version import Version

from helpers import warm_vllm
from helpers.programs import program

# The tests are written for vLLM 0.32 and run with 0.25, too; a test that 0.25 cannot pass is skipped with the reason.
# Without vLLM, the other tests of the same files can still be collected.
OLD_VLLM = any(Version(found.version) < Version("0.32") for found in metadata.distributions(name="vllm"))
NO_EXPERTS = "the CPU build of vLLM 0.25 has no operator that chooses experts"
RESULT = "ENGINE-PROBE "
TOKENS = 8
PROMPTS = [list(range(5, 45)), [7], [90, 17, 300, 2000, 45, 6, 7, 8, 1024]]
# Small and quick on a CPU; float32, so that only the order of additions differs between two ways to multiply.
ENGINE = {
    "dtype": "float32",
    "enforce_eager": True,
    "max_model_len": 256,
    "max_num_seqs": 4,
    "max_num_batched_tokens": 256,
    "kv_cache_memory_bytes": 1 << 25,
    "enable_prefix_caching": False,
    "seed": 0,
}


def probe(jobs: list[dict[str, Any]], **environment: str) -> list[list[Any]]:
    """Return what `programs/run_engines.py` answers to the jobs; what it printed is shown if it fails."""
    path, asked = program("run_engines.py"), json.dumps(jobs, default=str)
    status, printed = warm_vllm.run(path, asked, **warm_vllm.QUICK, **environment)
    assert status == 0, printed[-6000:]
    return json.loads(next(line for line in printed.splitlines() if line.startswith(RESULT)).removeprefix(RESULT))


def assert_same(got: list[dict[str, Any]], expected: list[dict[str, Any]], tolerance: float) -> None:
    """Assert equal tokens, and log-probabilities within `tolerance` of each other."""
    assert len(got) == len(expected) > 0
    for ours, theirs in zip(got, expected, strict=True):
        assert ours["tokens"] == theirs["tokens"]
        for position, reference in zip(ours["logprobs"], theirs["logprobs"], strict=True):
            common = position.keys() & reference.keys()
            assert len(common) >= 4  # the fifth may tie
            for token in common:
                assert abs(position[token] - reference[token]) <= tolerance


def assert_plausible(answers: list[dict[str, Any]]) -> None:
    """Assert greedy tokens and log-probabilities of a working model, where there is no reference to compare with."""
    assert len(answers) == len(PROMPTS)
    for answer in answers:
        assert len(answer["tokens"]) == len(answer["logprobs"]) == TOKENS
        for token, position in zip(answer["tokens"], answer["logprobs"], strict=True):
            assert position[str(token)] == max(position.values()), "greedy"
            assert sum(math.exp(logprob) for logprob in position.values()) <= 1 + 1e-5
            assert all(math.isfinite(logprob) for logprob in position.values())
    first = [answer["logprobs"][0] for answer in answers]
    assert all(one != other for one, other in combinations(first, 2)), "each prompt has an answer of its own"
