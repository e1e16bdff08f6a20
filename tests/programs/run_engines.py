"""Runs vLLM engines, one after another, in a process of its own and prints what they generated, as one JSON line.

    python run_engines.py '[{"model": ..., "engine": {LLM arguments}, "reload": [checkpoints], "adapter": path,
                            "images": [...], "fails": bool, "layouts": bool, "pooling": bool, "tokens": n,
                             "alone": bool, "measure": {...}, "nodes": bool, "drafts": bool, "environment": {...}},
                            ...]'

A process of its own keeps thread binding, distributed state and compilation caches out of the tests, which start it by
`helpers.engine_probe.probe`.
"""

import json
import os
import signal
import socket
import sys
from functools import partial
from typing import Any
from unittest.mock import patch

from helpers.engine_probe import ENGINE, PROMPTS, RESULT, TOKENS
from helpers.quick_interpreter import patch_once_per_launch
from helpers.warm_vllm import fork_workers

CROWD = 5  # times that all prompts are in a crowded batch


def generate(llm: Any, adapter: str | None = None, prompts: Any = None, tokens: int = TOKENS) -> list[dict[str, Any]]:
    """Return greedy token ids for each prompt and, for each id, the log-probabilities of the 5 likeliest tokens."""
    from vllm import SamplingParams
    from vllm.lora.request import LoRARequest

    parameters = SamplingParams(temperature=0, max_tokens=tokens, logprobs=5, ignore_eos=True)
    request = adapter and LoRARequest("adapter", 1, adapter)
    prompts = prompts or [{"prompt_token_ids": ids} for ids in PROMPTS]
    outputs = llm.generate(prompts, parameters, use_tqdm=False, lora_request=request)
    return [
        {
            "prompt": list(output.prompt_token_ids),
            "tokens": list(output.outputs[0].token_ids),
            "logprobs": [
                {str(token): entry.logprob for token, entry in position.items()}
                for position in output.outputs[0].logprobs
            ],
        }
        for output in outputs
    ]


def embed(llm: Any) -> list[list[list[float]]]:
    """Return the normalized hidden state of every token of each prompt, by an engine of the pooling runner."""
    prompts = [{"prompt_token_ids": ids} for ids in PROMPTS]
    outputs = llm.encode(prompts, pooling_task="token_embed", use_tqdm=False)
    return [output.outputs.data.tolist() for output in outputs]


def layouts(model: Any) -> list[str]:
    """Return the layouts in which the quantized linears of a model multiply."""
    methods = (getattr(module, "quant_method", None) for module in model.modules())
    return sorted({method.layout for method in methods if hasattr(method, "layout")})


def record_drafts(worker: Any) -> None:
    """Keep the tokens that the drafter of a worker proposes from now on."""
    drafter = worker.model_runner.drafter
    propose, drafter.proposed = drafter.propose, []

    def recording(*args: Any, **options: Any) -> Any:
        tokens = propose(*args, **options)
        drafter.proposed += tokens.tolist()
        return tokens

    drafter.propose = recording


def drafts(worker: Any) -> dict[str, Any]:
    """Return the tokens that were proposed, and the layouts in which the drafting layers multiply."""
    drafter = worker.model_runner.drafter
    return {"tokens": drafter.proposed, "layouts": layouts(drafter.model)}


def make_room(worker: Any) -> None:
    """Allocate the tensors that a later worker of a pipeline receives: vLLM 0.32 forgets this on a CPU."""
    runner = worker.model_runner
    sizes = {"batch_size": runner.max_num_tokens, "dtype": runner.model_config.dtype, "device": runner.device}
    runner.intermediate_tensors = runner.model.make_empty_intermediate_tensors(**sizes)


def pictures(prompts: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return prompts with an image each, made of the given numbers."""
    import numpy as np
    from PIL import Image

    return [
        {"prompt": prompt["text"], "multi_modal_data": {"image": Image.fromarray(np.array(prompt["image"], "uint8"))}}
        for prompt in prompts
    ]


def start_second_node(model: str, options: dict[str, Any]) -> int:
    """Run `vllm serve --node-rank 1 --headless` in a process forked from this one; return the process's number."""
    from vllm.entrypoints.cli.main import main

    if number := os.fork():
        return number
    flags = {name.replace("_", "-"): value for name, value in options.items() if name != "node_rank"}
    sys.argv = ["vllm", "serve", model, "--node-rank", "1", "--headless"]
    for name, value in flags.items():
        sys.argv += [f"--{name}" if value else f"--no-{name}"] if isinstance(value, bool) else [f"--{name}", str(value)]
    try:
        main()
    finally:
        os._exit(0)


def nodes(job: dict[str, Any]) -> dict[str, Any]:
    """Return the options of the first of two nodes on this machine, which a job asks for; start the second one."""
    if not job.get("nodes"):
        return {}
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    group = {"tensor_parallel_size": 2, "nnodes": 2, "node_rank": 0, "master_addr": "127.0.0.1", "master_port": port}
    job["second"] = start_second_node(job["model"], ENGINE | group)
    return group


def measure(model: str, job: dict[str, str]) -> dict[str, Any]:
    """Return what `latq trace` wrote of an original, and how far the engine's predictions of a model are from it."""
    import vllm_latq

    options: dict[str, Any] = {"engine_args": ENGINE, "on_event": lambda _: None}
    traced = vllm_latq.trace(job["original"], job["output"], num=6, max_tokens=8, **options)
    with open(job["output"], encoding="utf-8") as file:
        records = [json.loads(line) for line in file]
    text = {"source": job["output"], "dtype": "float32", "on_event": options["on_event"]}
    exact = vllm_latq.evaluate(model, baseline=job["original"], **text)
    served = vllm_latq.evaluate(model, baseline=job["original"], through="vllm", engine_args=ENGINE, **text)
    return {"traced": traced, "records": records, "exact": exact.to_dict(), "served": served.to_dict()}


def run(job: dict[str, Any]) -> Any:
    """Return what a model generates, and what each checkpoint generates when it is loaded after it.

    If a checkpoint cannot be loaded, the error comes before what is generated then.
    A `pooling` job returns hidden states instead. A job that names a LoRA adapter returns first what the model
    generates with the adapter. Generations of prompts with images, and the layouts of the engine, follow if the job
    asks for them. So do generations of each prompt `alone`, and of all prompts in a crowded batch. A job that `fails`
    may return its error. A job that `measure`s returns the results of `measure` alone. A job of `drafts` returns last
    what speculative decoding proposed. A job of `nodes` runs on two nodes, which are two processes of this machine.
    """
    from vllm import LLM
    from vllm.distributed import cleanup_dist_env_and_memory

    try:
        if "measure" in job:
            return measure(job["model"], job["measure"])
        pooling = {"runner": "pooling", "pooler_config": {"task": "token_embed"}} if job.get("pooling") else {}
        answer = embed if pooling else partial(generate, tokens=job.get("tokens", TOKENS))
        llm = LLM(job["model"], **(ENGINE | pooling | nodes(job) | job.get("engine", {})))
        if job.get("engine", {}).get("pipeline_parallel_size"):
            llm.collective_rpc(make_room)
        if job.get("drafts"):
            llm.collective_rpc(record_drafts)
        adapter = job.get("adapter")
        results = [answer(llm)] if adapter is None else [answer(llm, adapter), answer(llm)]
        for path in job.get("reload", []):
            try:
                llm.collective_rpc("reload_weights", kwargs={"weights_path": path})
            except Exception as error:
                results.append(f"{type(error).__name__}: {error}")
            results.append(answer(llm))
        if job.get("alone"):
            prompts = [{"prompt_token_ids": ids} for ids in PROMPTS]
            results.append([generate(llm, prompts=[prompt])[0] for prompt in prompts])
            results.append(generate(llm, prompts=prompts * CROWD))
        if job.get("images"):
            results.append(generate(llm, prompts=pictures(job["images"])))
        if job.get("drafts"):
            results += llm.collective_rpc(drafts)
        if job.get("layouts"):
            results.append(llm.apply_model(layouts)[0])
        del llm
    except Exception as error:
        if not job.get("fails"):
            raise
        return f"{type(error).__name__}: {error}"
    finally:
        cleanup_dist_env_and_memory()
        if "second" in job:
            os.kill(job["second"], signal.SIGKILL)
            os.waitpid(job["second"], 0)
    return results


if __name__ == "__main__":
    fork_workers()
    if os.environ.get("TRITON_INTERPRET") == "1":
        patch_once_per_launch()
    answers = []
    for job in json.loads(sys.argv[1]):
        with patch.dict(os.environ, job.get("environment", {})):
            answers.append(run(job))
    print("\n" + RESULT + json.dumps(answers), flush=True)
