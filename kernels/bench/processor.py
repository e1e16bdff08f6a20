"""Limits of a multiprocessor by architecture: how many warps of a kernel it holds, and how fast its pipes issue.

The numbers come from NVIDIA's CUDA C++ Programming Guide ("Technical Specifications per Compute Capability",
"Throughput of Native Arithmetic Instructions") and, for tensor cores, from the data sheets' peak rates.
"""

from collections import Counter
from dataclasses import dataclass

REGISTERS = 65536  # of a multiprocessor
REGISTER_UNIT = 8  # registers of a thread are given out in eights
SCHEDULERS = 4  # each has a quarter of the registers
RESERVED_BYTES = 1024  # of shared memory, for each program
# A pipe of 16 lanes takes a warp's instruction in two cycles. One such pipe serves logic, shifts, permutations, integer
# sums and comparisons; another serves integer products. On sm_80 the second also serves float32 and pairs of bfloat16.
ALU = (
    "BMSK", "CSEL", "F2FP", "FMNMX", "FSEL", "FSET", "IABS", "IADD", "ICMP", "IMNMX", "ISETP", "LEA", "LOP", "MOV",
    "P2R", "PLOP", "PRMT", "R2P", "SEL", "SGXT", "SHF", "VABSDIFF", "VIADD", "VIMNMX",
)  # fmt: skip
INTEGER_PRODUCTS = ("IDP", "IMAD", "IMUL")
FLOATS = ("FADD", "FFMA", "FMUL")
HALF_RATE = 2
# A warp's matrix instruction, in products of 16 x 8 x 16 floats that take as long.
SHAPES = {"HMMA.16816": 1.0, "HMMA.1688": 0.5, "IMMA.16832": 1.0, "IMMA.16816": 0.5}


@dataclass(frozen=True)
class Multiprocessor:
    """Limits of one multiprocessor.

    Attributes:
        shared_kb: shared memory.
        warps: most warps.
        programs: most programs.
        product_cycles: for which a product of 16 x 8 x 16 occupies one tensor core.
        floats_at_half_rate: whether sums and products of float32 take two cycles per warp.
    """

    shared_kb: int
    warps: int
    programs: int
    product_cycles: float
    floats_at_half_rate: bool = False

    def resident_programs(self, num_warps: int, registers: int, shared_bytes: int) -> int:
        """Return how many programs it holds at once, from a compiled kernel's registers and shared memory."""
        given = -(-registers // REGISTER_UNIT) * REGISTER_UNIT * 32
        by_registers = SCHEDULERS * (REGISTERS // SCHEDULERS // given) // num_warps
        by_shared = (self.shared_kb << 10) // (shared_bytes + RESERVED_BYTES)
        return min(by_registers, by_shared, self.warps // num_warps, self.programs)

    def cycles(self, opcodes: Counter[str]) -> float:
        """Return the least cycles of a scheduler for a warp's instructions: of its issue slots or its busiest pipe."""
        alu = multiply = tensor = 0.0
        for opcode, count in opcodes.items():
            name, *modifiers = opcode.split(".")
            if name.startswith(ALU):
                alu += count
            elif name.startswith(INTEGER_PRODUCTS) or (self.floats_at_half_rate and _is_float(name, modifiers)):
                multiply += count
            else:
                tensor += count * self.product_cycles * _products(name, modifiers)
        return max(opcodes.total(), HALF_RATE * alu, HALF_RATE * multiply, tensor)


def _is_float(name: str, modifiers: list[str]) -> bool:
    return name.startswith(FLOATS) or (
        name in ("HADD2", "HFMA2", "HMUL2") and any("BF16" in part for part in modifiers)
    )


def _products(name: str, modifiers: list[str]) -> float:
    """Return how many products of 16 x 8 x 16 floats take as long as a warp's matrix instruction.

    The shape is its first modifier. A warp's share of `HGMMA.64xNx16` has 16 rows. Products of bytes are twice as fast.
    """
    if name in ("HMMA", "IMMA"):
        return SHAPES[f"{name}.{modifiers[0]}"]
    return int(modifiers[0].split("x")[1]) / 8 if name == "HGMMA" else 0.0


# Tensor cores: sm_86 is an A6000 and sm_89 an RTX 6000 Ada; a GeForce takes twice as long for sums in float32. On
# Blackwell the pipes are taken to be Hopper's.
MULTIPROCESSORS = {
    "sm_80": Multiprocessor(164, 64, 32, 8, floats_at_half_rate=True),
    "sm_86": Multiprocessor(100, 48, 16, 16),
    "sm_87": Multiprocessor(164, 48, 16, 16),
    "sm_89": Multiprocessor(100, 48, 24, 16),
    "sm_90": Multiprocessor(228, 64, 32, 4),
    "sm_100": Multiprocessor(228, 64, 32, 2),
    "sm_103": Multiprocessor(228, 64, 32, 2),
    "sm_110": Multiprocessor(228, 48, 24, 4),
    "sm_120": Multiprocessor(100, 48, 24, 16),
    "sm_121": Multiprocessor(100, 48, 24, 16),
}
