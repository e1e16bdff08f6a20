"""Machine code of a compiled kernel, and the instructions of its main loop. Needs Triton's own tools, no GPU."""

import re
import subprocess
import tempfile
from collections import Counter
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path

import triton

_INSTRUCTION = re.compile(r"^\s*/\*([0-9a-f]{4,6})\*/\s+(?:@!?U?P\w+\s+)?(.*?);")
_TARGET = re.compile(r"0x([0-9a-f]+)")
_REGISTERS = re.compile(r"REG:(\d+)")


@dataclass(frozen=True)
class MachineCode:
    """The machine code of one kernel.

    Attributes:
        instructions: (address, opcode with modifiers, operands) of each.
        registers: per thread.
    """

    instructions: list[tuple[int, str, str]]
    registers: int

    def loops(self) -> list[tuple[int, int]]:
        """Return the innermost loops as index ranges (first, last) of `instructions`."""
        index = {address: i for i, (address, _, _) in enumerate(self.instructions)}
        found = []
        for i, (address, opcode, operands) in enumerate(self.instructions):
            target = _TARGET.search(operands) if opcode.startswith("BRA") else None
            if target and int(target[1], 16) < address and int(target[1], 16) in index:
                found.append((index[int(target[1], 16)], i))
        return [a for a in found if not any(b != a and a[0] <= b[0] and b[1] <= a[1] for b in found)]

    def main_loop(self) -> Counter[str]:
        """Count the opcodes (with modifiers) of the main loop.

        It is the innermost loop with the most matrix instructions, then with the most `LOP3`.
        """

        def weight(loop: tuple[int, int]) -> tuple[int, int]:
            names = [opcode for _, opcode, _ in self.instructions[loop[0] : loop[1] + 1]]
            return sum(name.startswith(("HMMA", "HGMMA", "IMMA")) for name in names), sum(
                name.startswith("LOP3") for name in names
            )

        loops = self.loops()
        first, last = max(loops, key=weight) if loops else (0, len(self.instructions) - 1)
        return Counter(o for _, o, _ in self.instructions[first : last + 1] if not o.startswith("NOP"))

    def count(self, prefix: str) -> int:
        """Return how many instructions of the kernel have an opcode that starts with `prefix`."""
        return sum(opcode.startswith(prefix) for _, opcode, _ in self.instructions)

    def memory_before(self, prefix: str) -> Counter[str]:
        """Count the accesses of global memory before the first instruction with such an opcode; of all without one."""
        opcodes = takewhile(lambda opcode: not opcode.startswith(prefix), (o for _, o, _ in self.instructions))
        return Counter(
            o for o in opcodes if o.startswith(("ATOM", "CCTL", "LD.", "LDG.", "LDGSTS", "RED", "ST.", "STG"))
        )

    def spill_bytes(self) -> int:
        """Return the bytes per thread written to local memory."""
        widths = {"64": 8, "128": 16}
        stores = [opcode for _, opcode, _ in self.instructions if opcode.startswith("STL")]
        return sum(next((widths[part] for part in opcode.split(".") if part in widths), 4) for opcode in stores)


def disassemble(cubin: bytes) -> MachineCode:
    """Return the machine code of a cubin that holds one kernel."""
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        listing = subprocess.run([tool, "-sass", file.name], capture_output=True, text=True, check=True).stdout
        usage = subprocess.run([tool, "-res-usage", file.name], capture_output=True, text=True, check=True)
    instructions = []
    for line in listing.splitlines():
        match = _INSTRUCTION.match(line)
        if match:
            opcode, _, operands = match[2].strip().partition(" ")
            instructions.append((int(match[1], 16), opcode, operands))
    registers = _REGISTERS.search(usage.stdout + usage.stderr)
    return MachineCode(instructions, int(registers[1]) if registers else 0)
