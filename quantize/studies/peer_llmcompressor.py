"""Quantize with llm-compressor: a script for that package's own environment, see `peers`.

    python peer_llmcompressor.py JOB.json        JOB: `peers.Job` as JSON; writes a checkpoint, timings, weights

Invariant: nothing of this project is imported, and only its public entry point `oneshot` is called.
"""

import json
import sys
import time
from pathlib import Path


def main(path: str) -> None:
    """Quantize with llm-compressor as the JSON file `path` says."""
    job = json.loads(Path(path).read_text())
    import torch

    torch.set_num_threads(job["threads"])
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
    from datasets import Dataset
    from llmcompressor import oneshot
    from llmcompressor.modifiers.gptq import GPTQModifier
    from safetensors.torch import load_file, save_file
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokens = load_file(job["tokens"])["tokens"].tolist()
    model = AutoModelForCausalLM.from_pretrained(job["model"], dtype="auto")
    tokenizer = AutoTokenizer.from_pretrained(job["model"])
    grid = {"num_bits": job["bits"], "type": "int", "strategy": "group", "group_size": job["group_size"]}
    weights = QuantizationArgs(**grid, symmetric=True, **job["options"])
    scheme = QuantizationScheme(targets=["Linear"], weights=weights)
    modifier = GPTQModifier(config_groups={"group_0": scheme}, ignore=["lm_head"])
    data = Dataset.from_dict({"input_ids": tokens, "attention_mask": [[1] * len(row) for row in tokens]})
    started, busy = time.perf_counter(), time.process_time()
    oneshot(
        model=model,
        tokenizer=tokenizer,
        dataset=data,
        recipe=modifier,
        batch_size=job["batch_size"],
        num_calibration_samples=len(tokens),
        max_seq_length=len(tokens[0]),
        shuffle_calibration_samples=False,
    )
    seconds, busy = time.perf_counter() - started, time.process_time() - busy
    linears = {name: module for name, module in model.named_modules() if isinstance(module, torch.nn.Linear)}
    witness = {name: module.weight.detach().clone() for name, module in linears.items() if name != "lm_head"}
    save_file(witness, job["seconds"] + ".witness")
    model.save_pretrained(job["output"], save_compressed=True)
    tokenizer.save_pretrained(job["output"])
    Path(job["seconds"]).write_text(json.dumps({"quantize": seconds, "quantize_cpu": busy}))


if __name__ == "__main__":
    main(sys.argv[1])
