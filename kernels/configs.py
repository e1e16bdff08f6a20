"""Launch configurations of the decode kernels: a table of literal rows, chosen by architecture, rows and group size.

Hopper's rows are measured on an H200, the others are reasoned: `source` says which. `bench --tune` writes the rows that
it times on a GPU into `tuned.json`, and these go before the table's.
"""

import json
from dataclasses import MISSING, dataclass, fields
from functools import lru_cache
from pathlib import Path
from typing import Any

import triton

from vllm_latq.kernels.errors import KernelInputError, require
from vllm_latq.kernels.layout.weight import HIP

REGIMES = (8, 16, 32, 64)  # numbers of activation rows for which there are tensor-core kernels
# Activation rows of every launch, and of every batch of an expert, for an invariant weight. On an H200 16 rows take 1.6
# times as long as one row, and 64 rows in four launches 2.1 times as long as in one (NOTES.md).
INVARIANT_ROWS = 16
GATHER_ROWS = 2  # up to so many rows outliers gather x; above, they read x^T: one vector load instead of one per row
FUSED_LAUNCHES = 2  # of the widest kernel, that a product takes at most; more rows take the prefill path (NOTES.md)
# Numbers of activation rows for which there are kernels of trellis codes; 32 rows would spill. A product takes at most
# so many launches of the widest.
TRELLIS_REGIMES, TRELLIS_LAUNCHES = (4, 8, 16), 4
WAVE_COST, ADDING_COST = 6, 4  # of `split_k`, in superblocks; measured on an H200 (NOTES.md)
TRITON = tuple(int(part) for part in triton.__version__.split(".")[:2])
COMPILER = {"enable_fp_fusion": True}  # a * b + c is one instruction; from Triton 3.10 on that must be asked for
RESERVED_BYTES = 1024  # of shared memory, for each program
STATIC = "instruction counts and roofline arithmetic (NOTES.md), Triton 3.9.0 and 3.6.0, 2026-11; not timed"
RESIDENCY = "most warps per multiprocessor, of the compiled kernels without spills in the loop (NOTES.md); not timed"
H200 = "times on an H200 (NOTES.md), torch 2.11.0, Triton 3.6.0, 2026-11-27"


@dataclass(frozen=True)
class DecodeConfig:
    """One way to launch a decode kernel.

    Attributes:
        max_rows: largest number of activation rows it serves; also BLOCK_M of the tensor-core kernel. 1 or 8 for the
            SIMT kernel.
        min_group: the smallest group size it serves; for 8-bit codes twice as large: their scales take more registers.
        block_n: output features per program.
        num_warps: warps per program.
        stages: depth of the asynchronous copies, in superblocks.
        bias_dot: remove the bias by a small extra dot (few rows) or on the unpacked floats (many rows).
        paired: take the columns in an order that fills neighbouring registers by one load: `registers.paired_words`.
            Not for Hopper's warp-group instruction, which reads activations from shared memory.
        slots: outliers of a row that a program reads at once, at least where a slot holds two.
        gathers: outliers of a row that a program reads at once, times the rows of x (at least four), without x^T.
        programs_per_processor: most programs that are to run on a multiprocessor at once; its registers must hold them.
        shared_kb: shared memory of a multiprocessor, which may hold fewer of them.
        min_superblocks: fewest superblocks in a part of split-K, or in a range of columns.
        dependent: begin before the kernel before it ends, ask for the first words, and only then wait for it
            (programmatic dependent launch, from sm_90 on). No row of the table does; not timed.
        kernel: "tensor_core" or "simt", which does not serve experts.
        spread: whether bf16 activations take the kernel that spreads outliers over dense pieces (`decode/spread.py`),
            where a weight has them by row tile and superblock. Serving prepares that for weights that such a row may
            serve. Not timed on any GPU, so no row of the table has it; `bench --tune` tries it.
        source: the measurement or the reasoning for the row.
    """

    max_rows: int
    min_group: int
    block_n: int
    num_warps: int
    stages: int
    bias_dot: bool
    paired: bool = True
    slots: int = 8
    gathers: int = 32
    programs_per_processor: int = 4
    shared_kb: int = 164
    min_superblocks: int = 4
    dependent: bool = False
    kernel: str = "tensor_core"
    spread: bool = False
    source: str = STATIC

    def __post_init__(self) -> None:
        where = "DecodeConfig"
        require(self.kernel in ("tensor_core", "simt"), f"{where}.kernel", "'tensor_core' or 'simt'", self.kernel)
        served = REGIMES if self.kernel == "tensor_core" else (1, 8)
        require(self.max_rows in served, f"{where}.max_rows", f"one of {served}", self.max_rows)
        require(self.block_n in (64, 128), f"{where}.block_n", "64 or 128, which divide the padded rows", self.block_n)
        require(self.num_warps in (1, 2, 4, 8), f"{where}.num_warps", "1, 2, 4 or 8", self.num_warps)
        require(1 <= self.stages <= 8, f"{where}.stages", "1 to 8", self.stages)
        require(self.slots in (1, 2, 4, 8, 16), f"{where}.slots", "1, 2, 4, 8 or 16", self.slots)
        require(self.gathers in (8, 16, 32, 64), f"{where}.gathers", "8, 16, 32 or 64", self.gathers)
        for name in ("min_group", "programs_per_processor", "shared_kb", "min_superblocks"):
            require(getattr(self, name) >= 1, f"{where}.{name}", "1 or more", getattr(self, name))
        require(
            not (self.spread and self.kernel == "simt"), f"{where}.spread", "false for the SIMT kernel", self.spread
        )

    def serves(self, rows: int, bits: int, group_size: int) -> bool:
        """Return whether it serves so many activation rows of this weight; group size -1 is a whole row."""
        least = self.min_group * (2 if bits == 8 else 1)
        return rows <= self.max_rows and (group_size == -1 or group_size >= least)

    def outlier_rows(self, m: int, ranges: int = 1) -> int:
        """Return for how many rows of x the kernel for m rows adds outliers: one row has a kernel of its own."""
        return 1 if m == 1 else self.max_rows // ranges

    def slots_for(self, outlier_rows: int, transposed: bool, ranges: int) -> int:
        """Return how many outliers of a row a program reads at once, for so many rows of x.

        Without x^T all ranges together read no more than 64: a row seldom has more (1% of 4096 columns are 41).
        """
        return self.slots if transposed else max(1, min(self.gathers // max(4, outlier_rows), 64 // ranges))

    @property
    def bias_rows(self) -> int:
        """Rows of the constant operand of the bias dot: the smallest tile that keeps every warp busy once."""
        return min(self.block_n, 16 * self.num_warps)

    @property
    def piece(self) -> int:
        """Columns of x^T that a program writes at once: 16 values a thread; more would take registers from the loop."""
        return 16 * 32 * self.num_warps // self.max_rows

    def stages_for(self, bits: int) -> int:
        """Return `stages`, or 2 where 8-bit codes would not fit into the 99 KB of shared memory of sm_86 and sm_89."""
        return min(self.stages, 2) if bits == 8 else self.stages

    def shared_bytes(self, bits: int, group_size: int) -> int:
        """Return the shared memory of a program of the tensor-core kernel: its copies, and a piece of outliers."""
        stages = self.stages_for(bits)
        scales = 0 if group_size == -1 else 512 // group_size  # bytes per feature and superblock
        weights, activations = self.block_n * (32 * bits + scales), self.max_rows * 512
        # Warp-group instructions still read activations when the next are copied: one more buffer.
        spread = self.block_n * 2 * (128 if group_size == -1 else group_size) if self.spread else 0
        return (stages - 1) * weights + (stages - self.paired) * activations + spread

    def programs(self, bits: int, group_size: int) -> int:
        """Return how many programs run on a multiprocessor at once."""
        fit = (self.shared_kb << 10) // (self.shared_bytes(bits, group_size) + RESERVED_BYTES)
        return max(1, min(self.programs_per_processor, fit))

    def split(
        self, m: int, bits: int, group_size: int, padded_rows: int, superblocks: int, processors: int
    ) -> tuple[int, int]:
        """Return the parts of split-K, and the ranges of columns in a tile, for m rows of x; one of the two is 1."""
        ranges = 1
        if self.kernel == "tensor_core":  # as often as m rows fit into the tile, which has 16 weight rows at least
            ranges = min(self.max_rows >> (m - 1).bit_length(), self.block_n // 16)
        programs = self.programs(bits, group_size)
        return split_k(padded_rows // self.block_n, superblocks, processors, programs, self.min_superblocks, ranges)


@dataclass(frozen=True)
class TrellisConfig:
    """One way to launch the kernel of trellis codes, for any number of rows that it serves.

    Attributes:
        stages: units of 64 rows x 128 columns that are copied ahead.
        programs_per_processor: programs of two warps that are to run on a multiprocessor at once.
        least_units: fewest units in a part of split-K.
    """

    stages: int
    programs_per_processor: int
    least_units: int


TRELLIS = TrellisConfig(3, 4, 2)  # counted, not timed


@lru_cache(maxsize=1024)
def split_k(
    tiles: int, superblocks: int, processors: int, programs: int, least: int, most_ranges: int
) -> tuple[int, int]:
    """Return the cheaper way to cut the superblocks of each row tile: (parts, 1) or (1, ranges).

    No part is empty, and all ranges are equally long. Ranges are a power of two up to `most_ranges`. Each part and each
    range has at least `least` superblocks, except perhaps the last part.

    Cost model: a multiprocessor runs so many `programs` at once, in waves. A wave of n programs takes
    (n + 1) * superblocks + WAVE_COST; adding the parts of split-K costs ADDING_COST more.
    """
    least = min(least, superblocks)
    ranges = (1 << i for i in range(most_ranges.bit_length()))
    ways = [(1, cut) for cut in ranges if superblocks % cut == 0 and superblocks // cut >= least]
    ways += sorted({(-(-superblocks // share), 1) for share in range(least, superblocks + 1)})

    def time(way: tuple[int, int]) -> int:
        parts, ranges = way
        share = -(-superblocks // (parts * ranges))
        waves, rest = divmod(tiles * parts * ranges, processors * programs)

        def wave(n: int) -> int:
            return share * (n + 1) + WAVE_COST + (ADDING_COST if parts > 1 else 0)

        return waves * wave(programs) + (wave(-(-rest // processors)) if rest else 0)

    return min(ways, key=time)


# fmt: off
# The first row of a table that serves a product is taken; its columns are the first fields of DecodeConfig, in order.
# Where two warps share a tile of 128 features at 8 rows, every activation fragment serves four fragments of weights;
# four warps take more instructions and fewer registers, so that more warps run (NOTES.md, "Residency on Ampere"). From
# 32 rows on the extra dot would cost tensor cores more time than subtracting the bias on the floats costs the
# schedulers. Slots: as many as leave next to no spill in the loop. Tiles of 64 features, or fewer slots or programs,
# serve small groups, whose scales take registers.
#   rows  group  features  warps  stages  bias dot  paired  slots  gathers  programs  shared KB  superblocks
AMPERE = (
    DecodeConfig(8,   64,  128,  4,  2,  True,   True,   2,  32,  4,  164,  2, source=RESIDENCY),
    DecodeConfig(8,    1,  128,  4,  2,  True,   True,   2,  32,  3,  164,  2, source=RESIDENCY),
    DecodeConfig(16,   1,  128,  4,  2,  True,   True,   4,  32,  3,  164,  4, source=RESIDENCY),
    DecodeConfig(32,  32,  128,  4,  2,  False,  True,   2,  32,  2,  164,  4, source=RESIDENCY),
    DecodeConfig(32,   1,   64,  4,  3,  False,  True,   2,  32,  2,  164,  4),
    DecodeConfig(64, 128,  128,  4,  2,  False,  True,   1,  32,  2,  164,  4),
    DecodeConfig(64,   1,  128,  8,  3,  False,  True,   2,  32,  1,  164,  4),
)
# sm_86 and sm_89: 100 KB of shared memory, 99 for one program. At 64 rows, 4 bits and groups of 32, three stages of 128
# features would take 100, and in two stages registers spill. 8 bits in groups of 32 would spill in the loop.
ADA = (
    DecodeConfig(8,  128,  128,  2,  2,  True,   True,   2,  32,  5,  100,  2, source=RESIDENCY),
    DecodeConfig(8,   32,  128,  2,  2,  True,   True,   2,  32,  4,  100,  2, source=RESIDENCY),
    DecodeConfig(8,    1,   64,  2,  3,  True,   True,   2,  32,  4,  100,  2),
    DecodeConfig(16,   1,  128,  4,  2,  True,   True,   4,  32,  3,  100,  4, source=RESIDENCY),
    DecodeConfig(32,  64,  128,  4,  2,  False,  True,   2,  32,  2,  100,  4, source=RESIDENCY),
    DecodeConfig(32,  32,  128,  4,  2,  False,  True,   1,  32,  2,  100,  4, source=RESIDENCY),
    DecodeConfig(32,   1,   64,  4,  3,  False,  True,   2,  32,  2,  100,  4),
    DecodeConfig(64, 128,  128,  4,  2,  False,  True,   1,  32,  2,  100,  4),
    DecodeConfig(64,  64,  128,  8,  3,  False,  True,   2,  32,  1,  100,  4),
    DecodeConfig(64,   1,   64,  4,  3,  False,  True,   1,  32,  2,  100,  4),
)
# The least geometric mean of the times on an H200 over Qwen3-8B's merged layers and 8192x8192, at 3 and 4 bits with 1%
# outliers. In smaller groups scales take registers, so fewer programs fit, and 64 rows would spill. From 3.8 on, Triton
# takes warp-group products for four warps and eight rows, too, which was not timed: of two warps, which all versions
# compile to the same products, the best is 5% slower.
HOPPER_8 = (
    DecodeConfig(8,   32,  128,  4,  3,  True,   True,   8,  64,  3,  228,  2, source=H200),
    DecodeConfig(8,    1,  128,  4,  3,  True,   True,   8,  64,  2,  228,  2),
) if TRITON < (3, 8) else (
    DecodeConfig(8,   32,   64,  2,  3,  True,   True,   4,  64,  6,  228,  2, source=H200),
    DecodeConfig(8,    1,   64,  2,  3,  True,   True,   4,  64,  2,  228,  2),
)
HOPPER_MORE = (
    DecodeConfig(16,  64,   64,  4,  3,  True,   False,  8,  32,  4,  228,  4, source=H200),
    DecodeConfig(16,   1,   64,  4,  3,  True,   False,  8,  32,  2,  228,  4),
    DecodeConfig(32,  32,   64,  4,  2,  False,  False,  4,  32,  3,  228,  4, source=H200),
    DecodeConfig(32,   1,   64,  4,  2,  False,  False,  4,  32,  2,  228,  4),
    DecodeConfig(64,  64,   64,  4,  3,  False,  False,  4,  32,  2,  228,  4, source=H200),
    DecodeConfig(64,   1,  128,  8,  3,  False,  False,  2,  32,  1,  228,  4),
)
# From four warps on, the compiler takes sm_100's tcgen05. That wants weights in shared memory and an answer after each
# group, and at 64 rows in groups of 32 Triton 3.9 makes an empty kernel of it. Products of two warps are Ampere's. In
# small groups registers spill (NOTES.md), but two launches of half the rows would issue as much.
BLACKWELL = (
    DecodeConfig(8,   32,  128,  2,  3,  True,   True,   2,  32,  4,  228,  2),
    DecodeConfig(8,    1,   64,  2,  3,  True,   True,   2,  32,  4,  228,  2),
    DecodeConfig(16,  64,  128,  2,  3,  True,   True,   2,  32,  4,  228,  4),
    DecodeConfig(16,   1,   64,  2,  3,  True,   True,   2,  32,  4,  228,  4),
    DecodeConfig(32,   1,   64,  2,  3,  False,  True,   2,  32,  4,  228,  4),
    DecodeConfig(64,   1,   64,  2,  2,  False,  True,   1,  32,  4,  228,  4),
)
# sm_120 has what sm_89 has; with a slot less, next to nothing spills.
BLACKWELL_RTX = (
    DecodeConfig(8,   32,  128,  2,  3,  True,   True,   1,  32,  4,  100,  2),
    DecodeConfig(8,    1,   64,  2,  3,  True,   True,   1,  32,  4,  100,  2),
    DecodeConfig(16,   1,  128,  4,  3,  True,   True,   4,  32,  4,  100,  4),
    DecodeConfig(32,  32,  128,  4,  3,  False,  True,   1,  32,  2,  100,  4),
    DecodeConfig(32,   1,   64,  4,  3,  False,  True,   1,  32,  2,  100,  4),
    DecodeConfig(64, 128,  128,  4,  2,  False,  True,   1,  32,  2,  100,  4),
    DecodeConfig(64,  64,  128,  8,  3,  False,  True,   2,  32,  1,  100,  4),
    DecodeConfig(64,   1,   64,  4,  3,  False,  True,   1,  32,  2,  100,  4),
)
# 64 KB of shared memory on gfx90a and gfx942. Compiled for these only, and neither run nor tuned. In small groups eight
# rows would get no matrix instructions, so the 16-row kernel serves them.
AMD = (
    DecodeConfig(8,   64,  128,  2,  3,  True,   True,   2,  32,  4,   64,  2),
    DecodeConfig(16,   1,  128,  2,  3,  True,   True,   2,  32,  4,   64,  4),
    DecodeConfig(32,   1,  128,  4,  2,  True,   True,   2,  32,  2,   64,  4),
    DecodeConfig(64,   1,  128,  8,  2,  False,  True,   2,  32,  1,   64,  4),
)
# Other GPUs, about which nothing is known: tiles that compile to Ampere's products, and the least shared memory that
# any GPU has.
DEFAULT = (
    DecodeConfig(8,   32,  128,  2,  3,  True,   True,   2,  32,  4,  100,  2),
    DecodeConfig(8,    1,   64,  2,  3,  True,   True,   2,  32,  4,  100,  2),
    DecodeConfig(16,  64,  128,  2,  3,  True,   True,   2,  32,  4,  100,  4),
    DecodeConfig(16,   1,   64,  2,  3,  True,   True,   2,  32,  4,  100,  4),
    DecodeConfig(32,   1,   64,  2,  3,  False,  True,   2,  32,  2,  100,  4),
    DecodeConfig(64,   1,   64,  2,  2,  False,  True,   1,  32,  2,  100,  4),
)
# fmt: on
# In no row of the table: one row of x takes it where `bench --tune` found it faster than tensor cores.
SIMT = DecodeConfig(8, 1, block_n=64, num_warps=2, stages=2, bias_dot=False, slots=4, kernel="simt")
# Rows that were timed, by architecture: a JSON object of lists of the fields of DecodeConfig.
TUNED = Path(__file__).with_name("tuned.json")
TABLE: dict[str, tuple[DecodeConfig, ...]] = {
    "sm_80": AMPERE,
    "sm_86": ADA,
    "sm_87": ADA,
    "sm_89": ADA,
    "sm_90": HOPPER_8 + HOPPER_MORE,
    "sm_100": BLACKWELL,
    "sm_103": BLACKWELL,
    "sm_110": BLACKWELL,
    "sm_120": BLACKWELL_RTX,
    "sm_121": BLACKWELL_RTX,
    HIP: AMD,
    "": ADA,  # a CPU: Triton's interpreter
}


def max_decode_rows(bits: int) -> int:
    """Return how many rows one launch of the fused kernel serves: 8-bit codes spill at 64."""
    return REGIMES[-2] if bits == 8 else REGIMES[-1]


@lru_cache(maxsize=64)
def table_of(arch: str) -> tuple[DecodeConfig, ...]:
    """Return the rows of an architecture in the order in which they are tried: timed rows before the table's."""
    rows = (*timed_rows(TUNED).get(arch, ()), *TABLE.get(arch, DEFAULT))
    return tuple(sorted(rows, key=lambda row: (row.max_rows, -row.min_group)))


def timed_rows(path: Path) -> dict[str, list[DecodeConfig]]:
    """Return the rows of a file of timed rows, by architecture.

    Raises:
        KernelInputError: the file cannot be read, or a row is not one.
    """
    hint = "Mend it, or write `{}` into it to go without timed rows."
    try:
        found = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise KernelInputError(str(path), "timed rows, in JSON", str(error), hint) from error
    lists = isinstance(found, dict) and all(isinstance(rows, list) for rows in found.values())
    require(lists, str(path), "an object of lists of rows", type(found).__name__, hint)
    return {
        arch: [_timed_row(row, f"{path}: {arch!r}, row {n}", hint) for n, row in enumerate(rows, 1)]
        for arch, rows in found.items()
    }


def _timed_row(row: Any, where: str, hint: str) -> DecodeConfig:
    """Return a row that was read from a file."""
    require(isinstance(row, dict), where, "an object", type(row).__name__, hint)
    kinds = {field.name: field for field in fields(DecodeConfig)}
    for name in (*kinds, *row):
        require(name in kinds, where, f"the fields {', '.join(kinds)}", repr(name), hint)
        field = kinds[name]
        require(name in row or field.default is not MISSING, where, f"a field {name!r}", "none", hint)
        if name in row:
            kind = type(row[name])
            require(kind is field.type, f"{where}, {name}", getattr(field.type, "__name__", ""), kind.__name__, hint)
    try:
        return DecodeConfig(**row)
    except KernelInputError as error:
        raise KernelInputError(f"{where}, {error.where}", error.expected, error.found, hint) from error


@lru_cache(maxsize=1024)
def decode_config(
    rows: int, bits: int, arch: str = "", group_size: int = 128, tensor_core: bool = False
) -> DecodeConfig:
    """Return the first row of the table that serves so many activation rows (1 to max_decode_rows).

    arch: "sm_90" and the like, or HIP; empty on a CPU. tensor_core: no other kernel will do.
    """
    require(rows <= max_decode_rows(bits), "decode_config", f"at most {max_decode_rows(bits)} rows", rows,
            "Use the prefill path.")  # fmt: skip
    serving = (config for config in table_of(arch) if config.serves(rows, bits, group_size))
    return next(config for config in serving if config.kernel == "tensor_core" or not tensor_core)


def spreads(bits: int, arch: str, group_size: int, invariant: bool = False) -> bool:
    """Return whether some number of activation rows of such a weight takes the kernel that spreads outliers.

    None does on AMD GPUs, for which it has no instructions.
    """
    launched = (INVARIANT_ROWS,) if invariant else (1, *REGIMES)
    served = (rows for rows in launched if rows <= max_decode_rows(bits))
    return arch != HIP and any(decode_config(rows, bits, arch, group_size).spread for rows in served)
