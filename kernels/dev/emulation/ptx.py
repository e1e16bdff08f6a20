"""PTX text of one kernel, read into instructions. The subset is what Triton emits for the kernels here.

A register's width follows from its declaration; values are arrays with one element per thread (see `state.py`).
"""

import re
from dataclasses import dataclass

from vllm_latq.kernels.errors import require

_COMMENT = re.compile(r"//[^\n]*")
_DECLARATION = re.compile(r"\.reg\s+\.(\w+)\s+(%?\w+)(<\d+>)?")
_SHARED = re.compile(r"\.shared\s+\.align\s+(\d+)\s+\.b8\s+(\w+)\[(\d+)\]")
_STATEMENT = re.compile(r"(?:@(!?)(%?\w+)\s+)?([a-z][\w.:]*)\s*(.*)", re.DOTALL)
_LABEL = re.compile(r"(\$?\w+):")
_OPERAND = re.compile(r"\{[^}]*\}|\[[^\]]*\]|[^,\s][^,]*")
_PARAMETER = re.compile(r"\.param\s[^,)]*?(\w+)\s*(?=[,)])")
_WIDTHS = {"pred": 1, "b8": 8, "b16": 16, "b32": 32, "b64": 64, "f32": 32, "s32": 32, "u32": 32, "u64": 64, "s64": 64}


@dataclass(frozen=True)
class Instruction:
    """One statement: `@!guard opcode operands`. A vector operand is a tuple, an address keeps its brackets."""

    opcode: str
    operands: tuple[str | tuple[str, ...], ...]
    guard: str
    negated: bool
    text: str

    @property
    def parts(self) -> list[str]:
        """The opcode, split at its dots."""
        return self.opcode.split(".")


@dataclass(frozen=True)
class Kernel:
    """One kernel.

    Attributes:
        labels: index of the instruction after each.
        widths: bits of each register, 1 for predicates.
        prefixes: the same of registers that are declared by number.
        reserved: bytes of each piece of shared memory that inline assembly reserves, with its alignment.
    """

    name: str
    parameters: list[str]
    instructions: list[Instruction]
    labels: dict[str, int]
    widths: dict[str, int]
    prefixes: dict[str, int]
    reserved: dict[str, tuple[int, int]]

    def is_register(self, operand: str) -> bool:
        """Return whether it is declared."""
        return operand in self.widths or operand.rstrip("0123456789") in self.prefixes

    def width(self, register: str) -> int:
        """Bits of a register, by its declaration."""
        found = self.widths.get(register)
        if found is None:
            found = self.widths[register] = self.prefixes[register.rstrip("0123456789")]
        return found


def _operand(text: str) -> str | tuple[str, ...]:
    text = text.strip()
    if text.startswith("{"):
        return tuple(part.strip() for part in text[1:-1].split(","))
    return text


def parse(text: str) -> Kernel:
    """The only `.entry` of `text`.

    Raises:
        KernelInputError: there is no entry, or a statement is not understood.
    """
    text = _COMMENT.sub("", text)
    entry = re.search(r"\.entry\s+(\w+)\s*\((.*?)\)[^{]*\{", text, re.DOTALL)
    require(entry is not None, "PTX", "one .entry", "none")
    assert entry is not None
    depth, end = 1, entry.end()
    while depth:
        depth += {"{": 1, "}": -1}.get(text[end], 0)
        end += 1
    body = text[entry.end() : end - 1]
    instructions: list[Instruction] = []
    labels: dict[str, int] = {}
    widths: dict[str, int] = {}
    prefixes: dict[str, int] = {}
    reserved: dict[str, tuple[int, int]] = {}
    body = re.sub(r"^\s*\.loc[^\n]*$", "", body, flags=re.MULTILINE)
    for statement in body.split(";"):
        # A scope's braces stand alone or before a statement; a vector's are inside its operands.
        statement = re.sub(r"^(\s*[{}])+", "", statement).strip()
        while match := _LABEL.match(statement):
            labels[match[1]] = len(instructions)
            statement = re.sub(r"^(\s*[{}])+", "", statement[match.end() :]).strip()
        if not statement:
            continue
        if statement.startswith("."):
            for kind, name, count in _DECLARATION.findall(statement):
                (prefixes if count else widths)[name] = _WIDTHS[kind]
            for align, name, size in _SHARED.findall(statement):
                reserved[name] = int(size), int(align)
            continue
        match = _STATEMENT.fullmatch(statement)
        require(match is not None, "PTX", "a statement", statement)
        assert match is not None
        operands = tuple(_operand(part) for part in _OPERAND.findall(match[4]))
        instructions.append(
            Instruction(match[3], operands, match[2] or "", bool(match[1]), " ".join(statement.split()))
        )
    parameters = _PARAMETER.findall(entry[2] + ")")
    return Kernel(entry[1], parameters, instructions, labels, widths, prefixes, reserved)
