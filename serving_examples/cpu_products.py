"""Measure on a CPU how long the products of one block take: unquantized, ssqr's codes, latq's trellis.

    python serving_examples/cpu_products.py
    python serving_examples/cpu_products.py --bits 8 --tokens 1 512
    ATEN_CPU_CAPABILITY=avx2 ONEDNN_MAX_CPU_ISA=AVX2 python serving_examples/cpu_products.py   # without AVX512

The block has the shape of Qwen3-0.6B's, and random weights: codes in groups of 128 with 1% outliers, and a trellis of
as many bits. `invariant` are the codes with LATQ_BATCH_INVARIANT=1. A time is the least processor time of one thread,
of `--repeats` runs of each kind in turn, over as many copies of the block as do not fit a cache.
"""

import argparse
import time
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch.nn.functional import linear

from vllm_latq.coding.trellis.code import RATES
from vllm_latq.console import print_table
from vllm_latq.format.encodings.packed import PackedWeight
from vllm_latq.format.scheme import LayerScheme
from vllm_latq.integrations.vllm.dummy import dummy_weight
from vllm_latq.serving.layouts.checkpoint import CheckpointOperands
from vllm_latq.serving.layouts.cpu import CpuOperands
from vllm_latq.serving.layouts.int4 import Int4Operands
from vllm_latq.serving.operands import make_operands

SHAPES = ((4096, 1024), (1024, 2048), (6144, 1024), (1024, 3072))  # q/k/v, o, gate and up, down
GROUP, OUTLIER_RATE = 128, 0.01
COPIES = 6  # of the block
Block = list[Callable[[torch.Tensor], torch.Tensor]]


def random_weight(bits: int, rows: int, cols: int) -> PackedWeight:
    """Return random codes on a scale per group, with outliers at random places."""
    half = 1 << (bits - 1)
    integers = torch.randint(-half, half, (rows, cols), dtype=torch.int32)
    scales = torch.rand(rows, cols // GROUP).add(0.1).bfloat16()
    mask, values = torch.rand(rows, cols) < OUTLIER_RATE, torch.randn(rows, cols)
    return PackedWeight.from_integers(integers, scales, bits, GROUP, mask, values)


def make_blocks(bits: int, dtype: torch.dtype) -> dict[str, list[Block]]:
    """Return copies of the block of each kind, and print the layouts."""
    trellis = LayerScheme("trellis")
    blocks: dict[str, list[Block]] = {"unquantized": [], "ssqr": [], "invariant": []}
    if 2 * bits in RATES:
        blocks["latq"] = []
    for _ in range(COPIES):
        dense = [torch.randn(shape).to(dtype) for shape in SHAPES]
        blocks["unquantized"].append([lambda x, weight=weight: linear(x, weight) for weight in dense])
        made = [make_operands(random_weight(bits, *shape), dtype, "layer") for shape in SHAPES]
        for name, invariant in (("ssqr", False), ("invariant", True)):
            kinds = [replace(part, invariant=invariant) for part in made
                     if isinstance(part, CpuOperands | Int4Operands | CheckpointOperands)]  # fmt: skip
            blocks[name].append([part.product for part in kinds])
        if "latq" in blocks:
            rings = [dummy_weight(trellis, *shape, {"bits": bits}) for shape in SHAPES]
            blocks["latq"].append([make_operands(part, dtype, "layer").product for part in rings])
    print(f"layout of the codes: {made[0].layout}")
    return blocks


def main(arguments: Sequence[str] | None = None) -> None:
    """Print, for each number of tokens, the time of each kind."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bits", type=int, default=3, choices=(2, 3, 4, 8))
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float16", "float32"))
    parser.add_argument("--tokens", type=int, nargs="+", default=[1, 4, 8, 64, 128, 256, 512])
    parser.add_argument("--repeats", type=int, default=7)
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    dtype = getattr(torch, options.dtype)
    blocks = make_blocks(options.bits, dtype)
    rows = []
    for tokens in options.tokens:
        inputs = [torch.randn(tokens, cols).to(dtype) for _, cols in SHAPES]
        least = dict.fromkeys(blocks, float("inf"))
        for _ in range(options.repeats):
            for kind, copies in blocks.items():
                started = time.thread_time()
                for block in copies:
                    for product, x in zip(block, inputs, strict=True):
                        product(x)
                least[kind] = min(least[kind], 1e3 * (time.thread_time() - started) / COPIES)
        rows.append((str(tokens), *(f"{time:.2f}" for time in least.values())))
    print_table(f"ms for the block, {options.bits} bits", ("tokens", *blocks), rows)


if __name__ == "__main__":
    main()
