"""Quantizes a model in less address space than it takes, and prints why it cannot be loaded whole.

    quantize_in_small_address_space.py FIRST MODEL OUT TEXT BYTES

FIRST is a tiny model, which is quantized before the limit is set: all that is loaded on first use is then there. BYTES
is what the process may map beyond that.
"""

import resource
import sys
from pathlib import Path

import torch

from vllm_latq.errors import CheckpointError
from vllm_latq.quantize.model.loading import load_model
from vllm_latq.quantize.pipeline import quantize_checkpoint
from vllm_latq.quantize.recipe import Recipe

RECIPE = Recipe("gptq", 4, group_size=64, scales="absmax", num_samples=4, seq_len=32)


def limit_address_space(more: int) -> None:
    """Let this process map so many bytes more than it does now."""
    status = Path("/proc/self/status").read_text().splitlines()
    (now,) = (int(line.split()[1]) * 1024 for line in status if line.startswith("VmSize"))
    resource.setrlimit(resource.RLIMIT_AS, (now + more, now + more))


def main(first: str, model: str, out: str, text: str, more: str) -> None:
    """Quantize the tiny model, set the limit, fail to load the large model, and quantize it."""
    torch.set_num_threads(1)
    load_model(first, "cpu")
    quantize_checkpoint(RECIPE, first, out + "-first", calibration=text, offload="disk")
    limit_address_space(int(more))
    try:
        load_model(model, "cpu")
    except CheckpointError as error:
        print(error)
    quantize_checkpoint(RECIPE, model, out, calibration=text, offload="disk")


if __name__ == "__main__":
    main(*sys.argv[1:])
