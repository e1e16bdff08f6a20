"""Count the bytes that a product moves, in the PTX emulator, without a GPU: `python -m vllm_latq.kernels.dev.traffic`.

Nothing is timed. Bytes are per weight of one layer; `floor` is what it stores plus activations and outputs, once.
"""

import argparse
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from vllm_latq.kernels.bench.cases import GROUP_SIZE, Case, make_layer, paths
from vllm_latq.kernels.configs import decode_config, max_decode_rows
from vllm_latq.kernels.decode.dispatch import ssqr_matmul
from vllm_latq.kernels.dev.audit import ARCHITECTURES
from vllm_latq.kernels.dev.emulation.launch import emulation
from vllm_latq.kernels.dev.emulation.memory import SECTOR

BITS = (2, 3, 4)
ROWS = (1, 8, 16, 32, 64, 128, 129)
SHAPE = (128, 2048)  # one tile of features, by one program: more only repeat it


@dataclass(frozen=True)
class Row:
    """One product.

    Attributes:
        floor: bytes per weight that must move: the stored weight, x and y.
        memory: bytes per weight in distinct sectors loaded, plus those stored.
        lanes: bytes per weight that loads ask for, most of which hit caches where they exceed `memory`.
        conflicts: shared-memory cycles lost to bank conflicts, as a part of the others.
        barriers: of a program, per superblock of 256 columns.
    """

    bits: int
    rows: int
    floor: float
    memory: float
    lanes: float
    conflicts: float
    barriers: float


def measure(arch: str, bits: int, rows: int, outlier_rate: float) -> Row:
    """The product of `rows` activation rows with a random layer of SHAPE."""
    layer = make_layer(Case(*SHAPE, bits, outlier_rate, rows, ""), torch.device("cpu"))
    weight = replace(layer.weight, arch=arch, processors=1)
    x = torch.randn(rows, SHAPE[1], generator=torch.Generator().manual_seed(0)).bfloat16()
    config = None
    if paths(rows, bits)[0] != "prefill":
        fused = decode_config(min(rows, max_decode_rows(bits)), bits, arch, weight.group_size)
        config = replace(fused, min_superblocks=weight.superblocks)
    with emulation(arch) as traffic:
        y = ssqr_matmul(x, weight, config)
    weights = SHAPE[0] * SHAPE[1]
    return Row(
        bits,
        rows,
        (weight.storage_bytes() + x.nbytes + y.nbytes) / weights,
        SECTOR * (traffic.distinct_sectors + traffic.store_sectors) / weights,
        traffic.loaded / weights,
        traffic.wavefronts / max(traffic.ideal_wavefronts, 1) - 1,
        traffic.barriers / weight.superblocks,
    )


def print_table(arch: str, outlier_rate: float) -> None:
    """Markdown."""
    weight = f"group size {GROUP_SIZE}, a layer of {SHAPE[0]}x{SHAPE[1]}"
    print(f"{arch}, {100 * outlier_rate:g}% outliers, {weight}, bf16.\n")
    print("| bits | rows | floor | memory | lanes | bank conflicts | barriers |")
    print("|---|---|---|---|---|---|---|")
    for bits in BITS:
        for rows in ROWS:
            row = measure(arch, bits, rows, outlier_rate)
            path = f"{rows} (prefill, without the library's matmul)" if paths(rows, bits)[0] == "prefill" else f"{rows}"
            print(
                f"| {bits} | {path} | {row.floor:.3f} | {row.memory:.3f} | {row.lanes:.3f} | {row.conflicts:.1%} | "
                f"{row.barriers:.1f} |"
            )


def main(arguments: Sequence[str] | None = None) -> None:
    """Command line."""
    parser = argparse.ArgumentParser(
        prog="python -m vllm_latq.kernels.dev.traffic", description=__doc__.splitlines()[0]
    )
    parser.add_argument("--arch", choices=ARCHITECTURES, default="sm_80")
    parser.add_argument("--outliers", type=float, default=0.01, help="rate, 0 to 1")
    options = parser.parse_args(arguments)
    print_table(options.arch, options.outliers)


if __name__ == "__main__":
    main()
