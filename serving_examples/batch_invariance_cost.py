"""Measure on a CPU how much longer the products of one block take when they do not depend on the batch.

    python serving_examples/batch_invariance_cost.py
    python serving_examples/batch_invariance_cost.py --bits 8 --dtype float32 --tokens 1 512

The block has the shape of Qwen3-0.6B's, random codes in groups of 128, and 1% outliers. A time is the least processor
time of one thread, of `--repeats` runs of each kind in turn.
"""

import argparse
import time
from collections.abc import Sequence
from dataclasses import replace

import torch

from vllm_latq.console import print_table
from vllm_latq.format.encodings.packed import PackedWeight
from vllm_latq.serving.layouts.checkpoint import CheckpointOperands
from vllm_latq.serving.layouts.cpu import CpuOperands
from vllm_latq.serving.layouts.int4 import Int4Operands
from vllm_latq.serving.operands import make_operands

SHAPES = ((4096, 1024), (1024, 2048), (6144, 1024), (1024, 3072))  # q/k/v, o, gate and up, down
GROUP, OUTLIER_RATE = 128, 0.01


def random_weight(bits: int, rows: int, cols: int) -> PackedWeight:
    """Return random codes on a scale per group, with outliers at random places."""
    half = 1 << (bits - 1)
    integers = torch.randint(-half, half, (rows, cols), dtype=torch.int32)
    scales = torch.rand(rows, cols // GROUP).add(0.1).bfloat16()
    mask, values = torch.rand(rows, cols) < OUTLIER_RATE, torch.randn(rows, cols)
    return PackedWeight.from_integers(integers, scales, bits, GROUP, mask, values)


def main(arguments: Sequence[str] | None = None) -> None:
    """Print, for each number of tokens, both times and their ratio."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bits", type=int, default=4, choices=(2, 3, 4, 8))
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float16", "float32"))
    parser.add_argument("--tokens", type=int, nargs="+", default=[1, 8, 64, 128, 256, 512])
    parser.add_argument("--repeats", type=int, default=11)
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    dtype, kinds = getattr(torch, options.dtype), {}
    made = [make_operands(random_weight(options.bits, *shape), dtype, "layer") for shape in SHAPES]
    for invariant in (False, True):
        kinds[invariant] = [
            replace(operands, invariant=invariant)
            for operands in made
            if isinstance(operands, CpuOperands | Int4Operands | CheckpointOperands)
        ]
    rows = []
    for tokens in options.tokens:
        inputs = [torch.randn(tokens, cols).to(dtype) for _, cols in SHAPES]
        least = dict.fromkeys(kinds, float("inf"))
        for _ in range(options.repeats):
            for invariant, block in kinds.items():
                started = time.process_time()
                for operands, x in zip(block, inputs, strict=True):
                    operands.product(x)
                least[invariant] = min(least[invariant], 1e3 * (time.process_time() - started))
        rows.append((str(tokens), f"{least[False]:.2f}", f"{least[True]:.2f}", f"{least[True] / least[False]:.2f}"))
    print_table(f"layout {made[0].layout}", ("tokens", "ms", "ms, batch-invariant", "ratio"), rows)


if __name__ == "__main__":
    main()
