"""Quantize with GPTQModel: a script for that package's own environment, see `peers`.

    python peer_gptqmodel.py JOB.json        JOB: `peers.Job` as JSON; writes a checkpoint, timings, weights

Invariant: nothing of this project is imported, and only `GPTQModel.load`, `quantize` and `save` are called.
"""

import json
import sys
import time
from pathlib import Path


def main(path: str) -> None:
    job = json.loads(Path(path).read_text())
    import torch

    torch.set_num_threads(job["threads"])
    from gptqmodel import GPTQModel
    from gptqmodel.quantization.config import GPTAQConfig, GPTQConfig
    from safetensors.torch import load_file, save_file

    tokens = load_file(job["tokens"])["tokens"].tolist()
    options = dict(job["options"])
    load_options = {"dtype": getattr(torch, options.pop("dtype"))} if "dtype" in options else {}
    if "gptaq" in options:
        options["gptaq"] = GPTAQConfig(**options["gptaq"])
    config = GPTQConfig(bits=job["bits"], group_size=job["group_size"], offload_to_disk=False, device="cpu", **options)
    model = GPTQModel.load(job["model"], config, **load_options)
    data = [{"input_ids": row, "attention_mask": [1] * len(row)} for row in tokens]
    started, busy = time.perf_counter(), time.process_time()
    model.quantize(data, batch_size=job["batch_size"])
    seconds, busy = time.perf_counter() - started, time.process_time() - busy
    packed = {name: module for name, module in model.model.named_modules() if hasattr(module, "dequantize_weight")}
    witness = {name: module.dequantize_weight().T.contiguous() for name, module in packed.items()}
    save_file(witness, job["seconds"] + ".witness")
    model.save(job["output"])
    Path(job["seconds"]).write_text(json.dumps({"quantize": seconds, "quantize_cpu": busy}))


if __name__ == "__main__":
    main(sys.argv[1])
