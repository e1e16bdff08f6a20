"""Lower bounds on the time of a product, from public specifications: `python -m vllm_latq.kernels.bench.roofline`.

Nothing is measured.

A product has to read every stored byte, to issue every instruction, and to pass each through its pipe. So it takes at
least

    max(bytes / memory bandwidth, weights * cycles per weight / rate of the schedulers)
    cycles = max(instructions, 2 * logic and shifts, 2 * integer products, cycles of the tensor core)

Two pipes take two cycles for a warp's instruction (`processor.py`). Counts come from `audit` (compiled code), the rest
from data sheets.
"""

import argparse
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from vllm_latq.kernels.bench.cases import BITS, GROUP_SIZE, KEPT_RATE, SHAPES

# Main loops for up to 8 rows: the largest count of sm_80 to sm_90. Packed codes are in groups of 128.
INSTRUCTIONS = {2: 1.49, 3: 1.61, 4: 1.70}
TRELLIS_INSTRUCTIONS = {2: 2.47, 3: 3.55, 4: 3.14}
# The cycles of the same loops, by architecture: of A6000 (sm_86), A100 (sm_80), H100 and H200 (sm_90).
CYCLES = {
    "sm_80": {2: 1.50, 3: 1.61, 4: 1.90},
    "sm_86": {2: 2.50, 3: 2.50, 4: 2.50},
    "sm_90": {2: 1.49, 3: 1.65, 4: 1.94},
}
TRELLIS_CYCLES = {
    "sm_80": {2: 2.39, 3: 4.00, 4: 4.00},
    "sm_86": {2: 4.00, 3: 8.00, 4: 8.00},
    "sm_90": {2: 2.46, 3: 3.55, 4: 3.13},
}
SCHEMES = ((2, 0.0), (2, 0.01), (3, 0.0), (3, 0.01), (4, 0.0), (4, 0.01))  # bits, rate of outliers
SLOT_PADDING = 1.06  # outliers are stored in slots of 16 rows; tests/kernels/test_outliers.py holds them below this
OUTLIER_BYTES = 4
KEPT_BYTES = 6  # of a kept weight of a trellis: its place and its value


@dataclass(frozen=True)
class Gpu:
    """Data-sheet numbers: architecture, memory GB/s, peak fp32 TFLOPS, multiprocessors, fp32 lanes of each.

    A multiprocessor issues 4 warp instructions of 32 threads a clock; the boost clock follows from the peak rate.
    """

    name: str
    arch: str
    gb_per_s: float
    fp32_tflops: float
    processors: int
    fp32_lanes: int

    @property
    def instructions_per_second(self) -> float:
        """Thread instructions that all schedulers issue, at the boost clock that the peak rate implies."""
        clock = self.fp32_tflops * 1e12 / (2 * self.fp32_lanes * self.processors)
        return clock * self.processors * 4 * 32

    def budget(self, bytes_per_weight: float) -> float:
        """Cycles per weight of a scheduler and lane while its bytes arrive: as many instructions can be issued."""
        return self.instructions_per_second / (self.gb_per_s * 1e9 / bytes_per_weight)


GPUS = (
    Gpu("RTX A6000", "sm_86", 768, 38.7, 84, 128),
    Gpu("A100 80GB SXM", "sm_80", 2039, 19.5, 108, 64),
    Gpu("H100 SXM", "sm_90", 3350, 67, 132, 128),
    Gpu("H200 SXM", "sm_90", 4800, 67, 132, 128),
)


def bytes_per_weight(bits: int, outlier_rate: float) -> float:
    """Codes, one bf16 scale per group, and outliers in the kernels' layout; what a row has one of is left out."""
    return bits / 8 + 2 / GROUP_SIZE + outlier_rate * OUTLIER_BYTES * SLOT_PADDING


def trellis_bytes_per_weight(bits: int) -> float:
    """Rings and kept weights; what a row or a column has one of is left out."""
    return bits / 8 + KEPT_RATE * KEPT_BYTES


def least_microseconds(gpu: Gpu, weights: int, size: float, cycles: float) -> float:
    """Lower bound of one product at batch 1 to 8 by so many weights, of so many bytes and cycles each."""
    return 1e6 * weights * max(size / (gpu.gb_per_s * 1e9), cycles / gpu.instructions_per_second)


def print_tables(write: Callable[[str], None] = print) -> None:
    """Cycles per weight beside those that its bytes leave, then the lower bounds per layer, as Markdown."""
    names = [gpu.name for gpu in GPUS]
    schemes = [
        (f"{bits} bits, {100 * rate:g}%", bytes_per_weight(bits, rate), INSTRUCTIONS[bits], CYCLES, bits)
        for bits, rate in SCHEMES
    ]
    schemes += [
        (f"{bits} bits, trellis", trellis_bytes_per_weight(bits), TRELLIS_INSTRUCTIONS[bits], TRELLIS_CYCLES, bits)
        for bits in BITS
    ]
    write("Cycles per weight that fit into the time its bytes take; of the kernel, its instructions and cycles:\n")
    write(f"| scheme | bytes per weight | instructions | {' | '.join(f'{name}: fit | needed' for name in names)} |")
    write("|---|---|---|" + "---|---|" * len(GPUS))
    for scheme, size, issued, needed, bits in schemes:
        cells = " | ".join(f"{gpu.budget(size):.1f} | {needed[gpu.arch][bits]:.2f}" for gpu in GPUS)
        write(f"| {scheme} | {size:.3f} | {issued:.2f} | {cells} |")
    write("\nLeast time of a product at batch 1 to 8, microseconds; packed weights have 1% outliers:\n")
    write(f"| layer | scheme | {' | '.join(names)} |")
    write("|---|---|" + "---|" * len(GPUS))
    shown = [scheme for scheme in schemes if not scheme[0].endswith(" 0%")]
    for rows, cols in SHAPES:
        times = (f"{least_microseconds(gpu, rows * cols, 2.0, 0.0):.1f}" for gpu in GPUS)
        write(f"| {rows}x{cols} | bf16 | {' | '.join(times)} |")
        for scheme, size, _, needed, bits in shown:
            times = (f"{least_microseconds(gpu, rows * cols, size, needed[gpu.arch][bits]):.1f}" for gpu in GPUS)
            write(f"| {rows}x{cols} | {scheme.removesuffix(', 1%')} | {' | '.join(times)} |")
    write("\nMeasured: docs/performance.md, and `results/`.")


def main(arguments: Sequence[str] | None = None) -> None:
    """Command line."""
    argparse.ArgumentParser(
        prog="python -m vllm_latq.kernels.bench.roofline", description=__doc__.splitlines()[0]
    ).parse_args(arguments)
    print_tables()


if __name__ == "__main__":
    main()
