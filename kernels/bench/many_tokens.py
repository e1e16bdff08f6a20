"""Estimates of products of many tokens: `python -m vllm_latq.kernels.bench.many_tokens`.

Nothing is measured here. Flops and bytes are exact. The rates are those of data sheets, times the parts of them that
an H200 reached; other GPUs are assumed to reach the same parts. Ways to multiply a packed weight by m tokens:

    bf16       the matmul of an unquantized weight: max(flops / its rate, bytes / memory's rate)
    dense      dequantize, then the same matmul: the packed weight is read, 2 bytes per weight written and read again
    overlapped the same, dequantization beside the matmul without any loss: what a second stream could give at best
    fused      a kernel that unpacks while it multiplies, such as Humming: max(flops / the same rate, packed bytes)
    apart      the same for inliers, and then a kernel that gathers the column of x of every outlier
"""

import argparse
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from vllm_latq.kernels.bench.cases import SHAPES
from vllm_latq.kernels.bench.roofline import GPUS, Gpu, bytes_per_weight

TOKENS = (64, 512, 2048)
BITS, OUTLIER_RATE = 3, 0.01
# Data sheets: TFLOPS of bf16 with float32 sums, dense.
TENSOR_TFLOPS = {"RTX A6000": 154.8, "A100 80GB SXM": 312, "H100 SXM": 989, "H200 SXM": 989}
# Parts of the data sheet's rates that an H200 reached (results/nvidia-h200.json): bf16's matmul of 512 rows took 72% to
# 77% of the peak; a copy ran at 4,269 GB/s.
MATMUL_PART, MEMORY_PART = 0.74, 0.89
LAUNCH = 1.0  # microseconds; an empty launch in a graph took 0.96
# Bytes of x^T per second that outliers gathered from L2 on that H200: 16 us for 1% of 8192x8192 at 64 rows. The rate of
# other GPUs is unknown, so `apart` is estimated for an H200 only.
GATHER_GB_PER_S = {"H200 SXM": 5400}


@dataclass(frozen=True)
class Estimate:
    """Microseconds of one product, or of several; `apart` is NaN for a GPU whose rate of gathering is unknown."""

    bf16: float
    dense: float
    overlapped: float
    fused: float
    apart: float


def estimate(gpu: Gpu, shapes: Sequence[tuple[int, int]], m: int, bits: int, outlier_rate: float) -> Estimate:
    """Return the time of m tokens by layers of these shapes, one after another."""
    parts = [_of_layer(gpu, rows * cols, m * (rows + cols), m, bits, outlier_rate) for rows, cols in shapes]
    return Estimate(*(sum(times) for times in zip(*(vars(part).values() for part in parts), strict=True)))


def _of_layer(gpu: Gpu, weights: int, values: int, m: int, bits: int, outlier_rate: float) -> Estimate:
    """Return the time of one layer; values: elements of x and y."""
    memory = MEMORY_PART * gpu.gb_per_s * 1e3  # bytes per microsecond
    flops = 2 * weights * m / (MATMUL_PART * TENSOR_TFLOPS[gpu.name] * 1e6)
    packed, inliers = (bytes_per_weight(bits, rate) for rate in (outlier_rate, 0.0))
    bf16 = max(flops, 2 * (weights + values) / memory) + LAUNCH
    dequantize = weights * (packed + 2) / memory + LAUNCH
    fused = max(flops, (weights * inliers + 2 * values) / memory) + LAUNCH
    gathered = weights * outlier_rate * 2 * m / (GATHER_GB_PER_S.get(gpu.name, float("nan")) * 1e3) + LAUNCH
    return Estimate(bf16, dequantize + bf16, max(dequantize, bf16), fused, fused + gathered)


def print_tables(write: Callable[[str], None] = print) -> None:
    """Print the ways on an H200 in microseconds, then how many times as fast as bf16 `dense` is, as Markdown."""
    h200 = next(gpu for gpu in GPUS if gpu.name in GATHER_GB_PER_S)
    layers = {"a block of Qwen3-8B": SHAPES[:4], "8192x8192": SHAPES[4:]}
    write(f"{h200.name}, {BITS} bits, {100 * OUTLIER_RATE:g}% outliers, microseconds (estimates):\n")
    write("| layers | tokens | bf16 | dense | overlapped | fused, no outliers | fused, outliers apart |")
    write("|---|---|---|---|---|---|---|")
    for name, shapes in layers.items():
        for m in TOKENS:
            found = estimate(h200, shapes, m, BITS, OUTLIER_RATE)
            times = [found.bf16, found.dense, found.overlapped, found.fused, found.apart]
            write(f"| {name} | {m} | {' | '.join(f'{time:.0f}' for time in times)} |")
    write("\nA block of Qwen3-8B, dense, times as fast as bf16 (estimates):\n")
    write(f"| tokens | {' | '.join(gpu.name for gpu in GPUS)} |")
    write("|---|" + "---|" * len(GPUS))
    for m in TOKENS[1:]:
        each = [estimate(gpu, SHAPES[:4], m, BITS, OUTLIER_RATE) for gpu in GPUS]
        write(f"| {m} | {' | '.join(f'{one.bf16 / one.dense:.2f}' for one in each)} |")


def main(arguments: Sequence[str] | None = None) -> None:
    """Command line."""
    argparse.ArgumentParser(
        prog="python -m vllm_latq.kernels.bench.many_tokens", description=__doc__.splitlines()[0]
    ).parse_args(arguments)
    print_tables()


if __name__ == "__main__":
    main()
