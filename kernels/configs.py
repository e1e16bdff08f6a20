"""Launch configurations of the decode kernels: one validated table, chosen by GPU architecture and number of rows.

Hopper's are measured on an H200, the others reasoned: `source` says so, and `bench.py --tune` prints replacements.
"""

from dataclasses import dataclass, replace
from functools import lru_cache

import triton

from vllm_latq.kernels.errors import require
from vllm_latq.kernels.layout.weight import HIP

REGIMES = (8, 16, 32, 64)  # numbers of rows that kernels are made for
GATHER_ROWS = 2  # above, outliers read a transposed copy of x: one vector load per outlier instead of one a row
START, ADD = 6, 4  # `split_k`; measured on an H200 (NOTES.md)
TRITON = tuple(int(part) for part in triton.__version__.split(".")[:2])
COMPILER = {"enable_fp_fusion": True}  # a * b + c is one instruction: from Triton 3.10 on only where asked for
RESERVED_BYTES = 1024  # of shared memory, for each program
STATIC = "instruction counts and roofline arithmetic (NOTES.md), Triton 3.9.0 and 3.6.0, 2026-11; not timed"
H200 = "times on an H200 (NOTES.md), torch 2.11.0, Triton 3.6.0, 2026-11-27"


@dataclass(frozen=True)
class DecodeConfig:
    """One way to launch a decode kernel.

    Attributes:
        max_rows: largest number of activation rows it serves; also BLOCK_M of the tensor-core kernel.
        block_n: output features per program.
        num_warps: warps per program.
        stages: depth of the asynchronous copies, in superblocks.
        bias_dot: remove the bias by a small extra dot (few rows) or on the unpacked floats (many rows).
        paired: take the columns in an order that fills neighbouring registers by one load (`unpack.paired_words`); not
            for Hopper's warp-group instruction, which reads activations from shared memory.
        slots: outliers of a row that a program reads at once, at least where a slot holds two.
        gathers: the same times the rows of x, four at least, where there is no x^T.
        min_group: the smallest groups that it serves, of 8-bit codes twice as large ones: scales take registers.
        programs_per_processor: most programs that are to run on a multiprocessor at once; its registers must hold them.
        shared_kb: shared memory of a multiprocessor, which may hold fewer of them.
        min_superblocks: fewest superblocks that a part of split-K, or a range of columns, is made of.
        kernel: "tensor_core" or "simt".
        source: the measurement or the reasoning behind the entry.
    """

    max_rows: int
    block_n: int
    num_warps: int
    stages: int
    bias_dot: bool
    paired: bool = True
    slots: int = 8
    gathers: int = 32
    min_group: int = 1
    programs_per_processor: int = 4
    shared_kb: int = 164
    min_superblocks: int = 4
    kernel: str = "tensor_core"
    source: str = STATIC

    def __post_init__(self) -> None:
        where = "DecodeConfig"
        require(self.kernel in ("tensor_core", "simt"), f"{where}.kernel", "'tensor_core' or 'simt'", self.kernel)
        require(self.max_rows in REGIMES, f"{where}.max_rows", f"one of {REGIMES}", self.max_rows)
        require(self.block_n in (64, 128), f"{where}.block_n", "64 or 128, which divide the padded rows", self.block_n)
        require(self.num_warps in (1, 2, 4, 8), f"{where}.num_warps", "1, 2, 4 or 8", self.num_warps)
        require(1 <= self.stages <= 8, f"{where}.stages", "1 to 8", self.stages)
        require(self.slots in (1, 2, 4, 8, 16), f"{where}.slots", "1, 2, 4, 8 or 16", self.slots)
        require(self.gathers in (8, 16, 32, 64), f"{where}.gathers", "8, 16, 32 or 64", self.gathers)
        require(self.min_superblocks >= 1, f"{where}.min_superblocks", "1 or more", self.min_superblocks)
        require(self.kernel == "tensor_core" or self.max_rows == 8, f"{where}.max_rows", "8 for the SIMT kernel",
                self.max_rows)  # fmt: skip

    def serves(self, rows: int, bits: int, group_size: int) -> bool:
        """Whether a product of so many activation rows may take it; group size -1 is a whole row."""
        least = self.min_group * (2 if bits == 8 else 1)
        return rows <= self.max_rows and (group_size == -1 or group_size >= least)

    def outlier_rows(self, m: int, ranges: int = 1) -> int:
        """Rows of x for which outliers are added where there are m: one has a kernel of its own."""
        return 1 if m == 1 else self.max_rows // ranges

    def slots_for(self, outlier_rows: int, transposed: bool, ranges: int) -> int:
        """Outliers of a row that a program reads at once, for so many rows of x.

        From x itself all ranges together read no more than 64: a row seldom has more (1% of 4096 columns are 41).
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
        """`stages`, or 2 where 8-bit codes would not leave room in the 99 KB of shared memory of sm_86 and sm_89."""
        return min(self.stages, 2) if bits == 8 else self.stages

    def shared_bytes(self, bits: int, group_size: int) -> int:
        """Shared memory of a program of the tensor-core kernel: what is on its way."""
        stages = self.stages_for(bits)
        scales = 0 if group_size == -1 else 512 // group_size  # bytes, of a feature's superblock
        weights, activations = self.block_n * (32 * bits + scales), self.max_rows * 512
        # Warp-group instructions still read activations when the next are copied: one more buffer.
        return (stages - 1) * weights + (stages - self.paired) * activations

    def programs(self, bits: int, group_size: int) -> int:
        """Programs that run on a multiprocessor at once."""
        fit = (self.shared_kb << 10) // (self.shared_bytes(bits, group_size) + RESERVED_BYTES)
        return max(1, min(self.programs_per_processor, fit))

    def split(
        self, m: int, bits: int, group_size: int, padded_rows: int, superblocks: int, processors: int
    ) -> tuple[int, int]:
        """Parts of split-K, and ranges of columns in a tile, for m rows of x; one of the two is 1."""
        ranges = 1
        if self.kernel == "tensor_core":  # as often as m rows fit into the tile, which has 16 weight rows at least
            ranges = min(self.max_rows >> (m - 1).bit_length(), self.block_n // 16)
        programs = self.programs(bits, group_size)
        return split_k(padded_rows // self.block_n, superblocks, processors, programs, self.min_superblocks, ranges)


@lru_cache(maxsize=1024)
def split_k(
    tiles: int, superblocks: int, processors: int, programs: int, least: int, most_ranges: int
) -> tuple[int, int]:
    """The cheaper way to cut the superblocks of each row tile: (parts, 1), none empty, or (1, ranges) of equal size.

    Ranges are a power of two up to `most_ranges`. None, but perhaps the last part, need be smaller than `least`. A
    multiprocessor runs so many `programs` at once, all of them in waves. One with n programs takes the time of n + 1
    superblocks for one of each, and of START more to begin and end. Parts have to be added, which takes that of ADD.
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
            return share * (n + 1) + START + (ADD if parts > 1 else 0)

        return waves * wave(programs) + (wave(-(-rest // processors)) if rest else 0)

    return min(ways, key=time)


def slots_of(outliers: int, beyond: bool) -> int:
    """Slots that hold so many outliers of a row, at least one: two each if their entries are of that form."""
    return max(1, outliers // 2) if beyond else outliers


def small_groups(config: DecodeConfig) -> DecodeConfig:
    """The same with tiles of 64 features: where the scales of small groups would spill registers."""
    return replace(config, block_n=64, min_group=1)


# Two warps share a tile of 128 features at 8 rows, so every activation fragment serves four fragments of weights; at 16
# rows registers suffice for that on Ampere only. From 32 rows on the extra dot would cost tensor cores more time than
# subtracting the bias on the floats costs the schedulers. Slots: as many as leave next to no spill in the loop. The
# first entry of a table that serves a product is taken.
AMPERE_8 = DecodeConfig(max_rows=8, block_n=128, num_warps=2, stages=3, bias_dot=True, slots=2, min_superblocks=2)
AMPERE_16 = DecodeConfig(max_rows=16, block_n=128, num_warps=2, stages=3, bias_dot=True, slots=2, min_group=64)
AMPERE_32 = DecodeConfig(
    max_rows=32, block_n=128, num_warps=4, stages=3, bias_dot=False, slots=2, min_group=32, programs_per_processor=2
)
AMPERE_64 = DecodeConfig(
    max_rows=64, block_n=128, num_warps=4, stages=2, bias_dot=False, slots=1, min_group=128, programs_per_processor=2
)
AMPERE_64_SMALL = replace(AMPERE_64, num_warps=8, stages=3, slots=2, min_group=1, programs_per_processor=1)
AMPERE = (
    AMPERE_8, AMPERE_16, small_groups(AMPERE_16), AMPERE_32, small_groups(AMPERE_32), AMPERE_64, AMPERE_64_SMALL
)  # fmt: skip
# Elsewhere 8 bits in groups of 32 would spill in the loop.
OTHERS_8 = (replace(AMPERE_8, min_group=32), small_groups(AMPERE_8))
# sm_86 and sm_89: 100 KB of shared memory, 99 for one program. At 64 rows, 4 bits and groups of 32, three stages of 128
# features would take 100, and in two stages registers spill.
ADA = tuple(
    replace(config, shared_kb=100)
    for config in (
        *OTHERS_8, replace(AMPERE_16, num_warps=4, slots=4, min_group=1), AMPERE_32, small_groups(AMPERE_32),
        AMPERE_64, replace(AMPERE_64_SMALL, min_group=64), replace(small_groups(AMPERE_64), stages=3),
    )
)  # fmt: skip
# Of what was timed on an H200, the least geometric mean over Qwen3-8B's merged layers and 8192x8192, at 3 and 4 bits
# with 1% outliers. From 3.8 on, Triton takes warp-group products for four warps and eight rows, too, which was not
# timed: of two warps, of which all versions make the same, the best is 5% slower.
HOPPER_8 = (
    replace(AMPERE_8, num_warps=4, slots=8, gathers=64, programs_per_processor=3)
    if TRITON < (3, 8)
    else replace(AMPERE_8, block_n=64, slots=4, gathers=64, programs_per_processor=6)
)
HOPPER_MORE = tuple(
    replace(config, block_n=64, num_warps=4, paired=False)
    for config in (
        replace(AMPERE_16, slots=8, min_group=64),
        replace(AMPERE_32, slots=4, stages=2, programs_per_processor=3),
        replace(AMPERE_64, slots=4, stages=3, min_group=64),
    )
)
HOPPER_TIMED = tuple(
    replace(config, shared_kb=228, source=H200) for config in (replace(HOPPER_8, min_group=32), *HOPPER_MORE)
)
# In smaller groups scales take registers, so fewer programs fit, and 64 rows would spill.
HOPPER_SMALL = tuple(
    replace(config, min_group=1, programs_per_processor=2, source=STATIC) for config in HOPPER_TIMED[:3]
)
HOPPER = (
    *(config for pair in zip(HOPPER_TIMED, HOPPER_SMALL, strict=False) for config in pair),
    HOPPER_TIMED[3],
    replace(AMPERE_64_SMALL, paired=False, shared_kb=228),
)
# From four warps on, the compiler takes sm_100's tcgen05. That wants weights in shared memory and an answer after each
# group, and at 64 rows in groups of 32 Triton 3.9 makes an empty kernel of it. Products of two warps are Ampere's. In
# small groups registers spill (NOTES.md), but two launches of half the rows would issue as much.
TWO_WARPS = (
    *OTHERS_8, AMPERE_16, small_groups(AMPERE_16), replace(AMPERE_32, block_n=64, num_warps=2, min_group=1),
    replace(AMPERE_64, block_n=64, num_warps=2, min_group=1),
)  # fmt: skip
BLACKWELL = tuple(replace(config, shared_kb=228, programs_per_processor=4) for config in TWO_WARPS)
# sm_120 has what sm_89 has; with a slot less, next to nothing spills.
BLACKWELL_RTX = tuple(replace(config, slots=1) if config.max_rows in (8, 32) else config for config in ADA)
# 64 KB of shared memory on gfx90a and gfx942. Compiled for these only, and neither run nor tuned. In small groups eight
# rows would get no matrix instructions.
AMD = tuple(
    replace(config, stages=2 if config.max_rows > 16 else 3, shared_kb=64, min_group=64 if config.max_rows == 8 else 1)
    for config in (AMPERE_8, AMPERE_16, replace(AMPERE_32, bias_dot=True), AMPERE_64_SMALL)
)
SIMT = DecodeConfig(max_rows=8, block_n=64, num_warps=2, stages=2, bias_dot=False, slots=4, kernel="simt")
TABLE: dict[str, tuple[DecodeConfig, ...]] = {
    "sm_80": AMPERE, "sm_86": ADA, "sm_87": ADA, "sm_89": ADA, "sm_90": HOPPER, "sm_100": BLACKWELL,
    "sm_103": BLACKWELL, "sm_110": BLACKWELL, "sm_120": BLACKWELL_RTX, "sm_121": BLACKWELL_RTX,
}  # fmt: skip
CPU = ADA  # in the interpreter
FUSED_LAUNCHES = 2  # of the widest kernel, that a product takes at most; above, the prefill path (NOTES.md)
# Of other GPUs nothing is known: what compiles to Ampere's products, and the least shared memory that any has.
DEFAULT = tuple(replace(config, shared_kb=100) for config in TWO_WARPS)


def max_decode_rows(bits: int) -> int:
    """Rows up to which one launch of the fused kernel serves: 8-bit codes spill at 64."""
    return REGIMES[-2] if bits == 8 else REGIMES[-1]


@lru_cache(maxsize=1024)
def decode_config(rows: int, bits: int, arch: str = "", group_size: int = 128) -> DecodeConfig:
    """The table's entry for `rows` activation rows (1 to max_decode_rows).

    arch: "sm_90" and the like, or HIP; empty on a CPU.
    """
    require(rows <= max_decode_rows(bits), "decode_config", f"at most {max_decode_rows(bits)} rows", rows,
            "Use the prefill path.")  # fmt: skip
    table = {HIP: AMD, "": CPU}.get(arch) or TABLE.get(arch, DEFAULT)
    return next(config for config in table if config.serves(rows, bits, group_size))
