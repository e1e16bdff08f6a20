"""Quantize with AutoRound: a script for that package's own environment, see `peers`.

    python peer_autoround.py JOB.json        JOB: `peers.Job` as JSON; writes a checkpoint, timings, weights

Options become arguments of `AutoRound`. Invariant: nothing of this project is imported, and only its public entry
point `AutoRound` is called.
"""

import json
import sys
import time
from pathlib import Path

# Windows in a tuning step: AutoRound's default, and that of all its recipes. It changes the result.
TUNING_BATCH = 8


def main(path: str) -> None:
    """Quantize with AutoRound as the JSON file `path` says."""
    job = json.loads(Path(path).read_text())
    import torch

    torch.set_num_threads(job["threads"])
    from auto_round import AutoRound
    from safetensors.torch import load_file, save_file
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokens = load_file(job["tokens"])["tokens"]
    model = AutoModelForCausalLM.from_pretrained(job["model"], dtype="auto")
    tokenizer = AutoTokenizer.from_pretrained(job["model"])
    rounder = AutoRound(
        model,
        tokenizer,
        # The scheme is symmetric, with groups of 128.
        scheme=f"W{job['bits']}A16",
        group_size=job["group_size"],
        dataset=list(tokens.split(TUNING_BATCH)),
        nsamples=len(tokens),
        seqlen=tokens.shape[1],
        batch_size=TUNING_BATCH,
        device_map="cpu",
        **job["options"],
    )
    started, busy = time.perf_counter(), time.process_time()
    quantized, _ = rounder.quantize()
    seconds, busy = time.perf_counter() - started, time.process_time() - busy
    # Until they are packed, the quantized linears hold their weights dequantized.
    linears = {name: module for name, module in quantized.named_modules() if isinstance(module, torch.nn.Linear)}
    witness = {name: module.weight.detach().clone() for name, module in linears.items() if name != "lm_head"}
    save_file(witness, job["seconds"] + ".witness")
    rounder.save_quantized(job["output"], format="auto_round")
    Path(job["seconds"]).write_text(json.dumps({"quantize": seconds, "quantize_cpu": busy}))


if __name__ == "__main__":
    main(sys.argv[1])
