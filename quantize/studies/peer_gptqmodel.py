"""Quantize with GPTQModel: a script for that package's own environment, see `peers`.

    python peer_gptqmodel.py JOB.json        JOB: `peers.Job` as JSON; writes a checkpoint, timings, weights

Invariant: nothing of this project is imported, and only its public entry points are called.
"""

import json
import sys
import time
from pathlib import Path


def main(path: str) -> None:
    """Quantize with GPTQModel as the JSON file `path` says."""
    job = json.loads(Path(path).read_text())
    import torch

    torch.set_num_threads(job["threads"])
    from gptqmodel import GPTQModel
    from gptqmodel.quantization.config import GPTQConfig
    from gptqmodel.utils.model_dequant import dequantize_model
    from safetensors.torch import load_file, save_file

    tokens = load_file(job["tokens"])["tokens"].tolist()
    grid = {"bits": job["bits"], "group_size": job["group_size"]}
    config = GPTQConfig(**grid, offload_to_disk=False, device="cpu", **job["options"])
    model = GPTQModel.load(job["model"], config)
    data = [{"input_ids": row, "attention_mask": [1] * len(row)} for row in tokens]
    started, busy = time.perf_counter(), time.process_time()
    model.quantize(data, batch_size=job["batch_size"])
    seconds, busy = time.perf_counter() - started, time.process_time() - busy
    model.save(job["output"])

    # The quantized weights, as GPTQModel itself reads them back.
    dense = Path(job["seconds"] + ".dense")
    dequantize_model(job["output"], dense, target_dtype=torch.float32)

    def tensors(folder: Path | str) -> dict[str, torch.Tensor]:
        return {name: tensor for file in Path(folder).glob("*.safetensors") for name, tensor in load_file(file).items()}

    packed = [name.removesuffix(".qweight") for name in tensors(job["output"]) if name.endswith(".qweight")]
    weights = tensors(dense)
    save_file({name: weights[f"{name}.weight"] for name in packed}, job["seconds"] + ".witness")
    Path(job["seconds"]).write_text(json.dumps({"quantize": seconds, "quantize_cpu": busy}))


if __name__ == "__main__":
    main(sys.argv[1])
