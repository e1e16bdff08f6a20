"""Count what an outlier costs in either order of entries: `python -m vllm_latq.kernels.dev.outlier_cost`.

Nothing is timed. Instructions are those of the compiled loops, per thread; L1 lines, cycles of shared memory and bytes
are counted in the PTX emulator, as what a second row tile adds with outliers, less what it adds without: so x^T, which
a launch writes once, is left out.
"""

import argparse
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from triton.backends.compiler import GPUTarget

from vllm_latq.kernels.bench.cases import Case, make_layer
from vllm_latq.kernels.configs import DecodeConfig, decode_config
from vllm_latq.kernels.decode.dispatch import decode_matmul
from vllm_latq.kernels.decode.launch import Variant
from vllm_latq.kernels.decode.spread import WARP, spread_constants, ssqr_spread
from vllm_latq.kernels.decode.ssqr import ssqr_constants, ssqr_tensor_core
from vllm_latq.kernels.dev.audit import ARCHITECTURES, compile_kernel
from vllm_latq.kernels.dev.emulation.launch import emulation
from vllm_latq.kernels.dev.emulation.memory import SECTOR, Traffic
from vllm_latq.kernels.dev.sass import MachineCode, disassemble
from vllm_latq.kernels.errors import require
from vllm_latq.kernels.layout.weight import KernelWeight

BITS, COLS, TILE = 3, 1024, 128  # of the emulated layer; the largest tile has so many rows
ROWS = (1, 8, 64)


@dataclass(frozen=True)
class Cost:
    """The cost of an outlier.

    Attributes:
        instructions: per thread, unfilled slots included.
        lines: lines of 128 bytes that the L1 cache looks up, one per cycle.
        wavefronts: cycles of shared memory.
        moved: bytes in sectors that are loaded for the first time.
        registers: per thread.
        spilled: bytes per thread.
    """

    instructions: float
    lines: float
    wavefronts: float
    moved: float
    registers: int
    spilled: int


def outlier_loop(code: MachineCode) -> int:
    """Return the instructions of the loop that adds outliers by rows: most loads, no products and no stores."""
    found = []
    for first, last in code.loops():
        names = [opcode for _, opcode, _ in code.instructions[first : last + 1]]
        if not any(name.startswith(("HMMA", "HGMMA", "STG")) for name in names):
            found.append((sum(name.startswith("LDG") for name in names), len(names)))
    require(bool(found), "machine code", "a loop over outliers", "none")
    return max(found)[1]


def instructions(arch: str, config: DecodeConfig, variant: Variant, weight: KernelWeight) -> tuple[float, MachineCode]:
    """Return the instructions per outlier of this weight and thread, and the kernel's code."""

    def code_of(chosen: Variant) -> MachineCode:
        spread = config.spread and chosen.outliers
        kernel = ssqr_spread if spread else ssqr_tensor_core
        values = spread_constants(config, chosen, rate) if spread else ssqr_constants(config, chosen)
        target = GPUTarget("cuda", int(arch.removeprefix("sm_")), WARP)
        return disassemble(compile_kernel(kernel, target, values, config.num_warps).asm["cubin"])

    assert weight.list_ptr is not None
    assert weight.spread is not None
    assert weight.slice_ptr is not None
    size, count = weight.padded_rows * weight.superblocks * 256, int(weight.list_ptr[-1])
    rate = weight.spread.numel() / size
    code, lanes = code_of(variant), WARP * config.num_warps
    if config.spread:
        more = code.main_loop().total() - code_of(variant._replace(outliers=False)).main_loop().total()
        return more * lanes * size / (config.block_n * 256 * count), code
    # A program's lanes take turns until the longest row of the tile ends.
    slots = config.slots_for(config.outlier_rows(variant.m, variant.ranges), variant.transposed, variant.ranges)
    longest = weight.slice_ptr.diff().view(-1, config.block_n // variant.ranges // 16).amax(1)
    turns = int((-(-longest // (slots * variant.ranges))).sum())
    return turns * outlier_loop(code) * lanes / count, code


def emulate(arch: str, config: DecodeConfig, m: int, rows: int, rate: float) -> tuple[Traffic, int]:
    """Return the traffic of a product of m rows with `rows` rows of weights, and how many outliers these have."""
    weight = replace(
        make_layer(Case(rows, COLS, BITS, rate, m, ""), torch.device("cpu"), spread=True).weight, arch=arch
    )
    x = torch.randn(m, COLS, generator=torch.Generator().manual_seed(0)).bfloat16()
    with emulation(arch) as traffic:
        decode_matmul(x, weight, config, torch.empty(m, rows, dtype=x.dtype))
    return traffic, 0 if weight.list_ptr is None else int(weight.list_ptr[-1])


def cost(arch: str, m: int, rate: float, spread: bool) -> Cost:
    """Return the cost of an outlier in a product of m rows, by superblock (`spread`) or by row."""
    config = replace(decode_config(m, BITS, arch), spread=spread, min_superblocks=COLS // 256)
    wide = make_layer(Case(TILE, 4 * COLS, BITS, rate, m, ""), torch.device("cpu"), spread=True).weight
    ranges = config.split(m, BITS, wide.group_size, TILE, wide.superblocks, 1)[1]
    count, code = instructions(arch, config, Variant(BITS, m, split=False, ranges=ranges), wide)
    (less, few), (more, many) = (emulate(arch, config, m, rows, rate) for rows in (TILE, 2 * TILE))
    (plain, _), (plain_more, _) = (emulate(arch, config, m, rows, 0.0) for rows in (TILE, 2 * TILE))

    def of(name: str) -> float:
        one, two, three, four = (getattr(part, name) for part in (more, less, plain_more, plain))
        return (one - two - (three - four)) / (many - few)

    moved = SECTOR * of("distinct_sectors")
    return Cost(count, of("lines"), of("wavefronts"), moved, code.registers, code.spill_bytes())


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m vllm_latq.kernels.dev.outlier_cost", description=__doc__.splitlines()[0]
    )
    parser.add_argument("--arch", nargs="+", choices=ARCHITECTURES, default=("sm_80", "sm_90"))
    parser.add_argument("--outliers", type=float, default=0.01, help="rate, 0 to 1")
    options = parser.parse_args(arguments)
    print(f"{BITS} bits, groups of 128, {100 * options.outliers:g}% outliers, per outlier.\n")
    print("| GPU | rows | order | instructions | L1 lines | shared-memory cycles | bytes | registers | bytes spilled |")
    print("|---|---|---|---|---|---|---|---|---|")
    for arch in options.arch:
        for m in ROWS:
            for spread in (False, True):
                row = cost(arch, m, options.outliers, spread)
                print(
                    f"| {arch} | {m} | {'superblocks' if spread else 'rows'} | {row.instructions:.0f} | "
                    f"{row.lines:.2f} | {row.wavefronts:.2f} | {row.moved:.1f} | {row.registers} | {row.spilled} |",
                    flush=True,
                )


if __name__ == "__main__":
    main()
