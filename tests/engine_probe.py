"""Runs vLLM's engine on one model in a process of its own and prints what it generated, as one JSON line.

    python engine_probe.py '{"model": ..., "prompts": [[ids]], "tokens": 8, "reload": [...], "engine": {LLM arguments}}'

A process per engine keeps thread binding, distributed state and compilation caches out of the tests.
"""

import json
import sys
from typing import Any

RESULT = "ENGINE-PROBE "


def generate(llm: Any, prompts: list[list[int]], tokens: int) -> list[dict[str, Any]]:
    """Greedy token ids and, for each of them, the log-probabilities of the 5 likeliest tokens."""
    from vllm import SamplingParams

    parameters = SamplingParams(temperature=0, max_tokens=tokens, logprobs=5, ignore_eos=True)
    outputs = llm.generate([{"prompt_token_ids": ids} for ids in prompts], parameters, use_tqdm=False)
    return [
        {
            "tokens": list(output.outputs[0].token_ids),
            "logprobs": [
                {str(token): entry.logprob for token, entry in position.items()}
                for position in output.outputs[0].logprobs
            ],
        }
        for output in outputs
    ]


def main() -> None:
    job = json.loads(sys.argv[1])
    from vllm import LLM

    defaults = {
        "max_model_len": 256,
        "max_num_seqs": 4,
        "max_num_batched_tokens": 256,
        "kv_cache_memory_bytes": 1 << 25,
        "enable_prefix_caching": False,
        "seed": 0,
    }
    llm = LLM(job["model"], **(defaults | job.get("engine", {})))
    results = [generate(llm, job["prompts"], job["tokens"])]
    for path in job.get("reload", []):
        llm.collective_rpc("reload_weights", kwargs={"weights_path": path})
        results.append(generate(llm, job["prompts"], job["tokens"]))
    print(RESULT + json.dumps(results), flush=True)


if __name__ == "__main__":
    main()
