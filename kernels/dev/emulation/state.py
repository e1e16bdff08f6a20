"""One program of a launch while it runs: its registers, and how instructions read and write them.

A register is an array with one element per thread, of the unsigned type of its width; predicates are booleans.
"""

from collections.abc import Callable
from typing import Any

import numpy as np

from vllm_latq.kernels.dev.emulation.memory import GlobalMemory, SharedMemory
from vllm_latq.kernels.dev.emulation.ptx import Kernel
from vllm_latq.kernels.dev.emulation.tensor_core import GENERATIONS
from vllm_latq.kernels.errors import require

Step = Callable[["Program"], None]
Value = Callable[["Program"], np.ndarray]

WORDS: dict[int, Any] = {1: np.bool_, 8: np.uint8, 16: np.uint16, 32: np.uint32, 64: np.uint64}
TYPES: dict[str, Any] = {
    "pred": np.bool_, "b8": np.uint8, "u8": np.uint8, "s8": np.int8,
    "b16": np.uint16, "u16": np.uint16, "s16": np.int16,
    "f16": np.float16, "bf16": np.uint16, "b32": np.uint32, "u32": np.uint32, "s32": np.int32, "f32": np.float32,
    "f16x2": np.uint32, "bf16x2": np.uint32, "f32x2": np.uint64, "b64": np.uint64, "u64": np.uint64, "s64": np.int64,
    "f64": np.float64,
}  # fmt: skip
_SIZES = {word: np.dtype(word).itemsize for word in WORDS.values()}
SPECIAL = ("%ntid.x", *(f"%{kind}.{axis}" for kind in ("ctaid", "nctaid") for axis in "xyz"))
_UNDEFINED = 0xDEADBEEFDEADBEEF


class Program:
    """One thread block while it runs."""

    def __init__(self, threads: int, shared: int, memory: GlobalMemory, special: dict[str, int], arch: str) -> None:
        self.threads, self.memory, self.core = threads, memory, GENERATIONS[arch]
        self.shared = SharedMemory(shared, threads, memory.traffic)
        self.registers: dict[str, np.ndarray] = {}
        self.special = special
        self.everyone = np.ones(threads, bool)
        self.active = self.everyone
        self.copies: list[list[tuple[np.ndarray, ...]]] = [[]]


def value_of(operand: Any, kind: str, kernel: Kernel) -> Value:
    """Return how to read an operand as an array of `kind`, one element per thread."""
    dtype = np.dtype(TYPES[kind])
    bits = 1 if kind == "pred" else 8 * dtype.itemsize
    if isinstance(operand, tuple):
        return _joined(operand, dtype, kernel)
    constant = _constant(operand, dtype)
    if constant is not None:
        return _for_all(lambda threads: np.repeat(constant, threads))
    if operand == "%tid.x":
        return _for_all(lambda threads: np.arange(threads).astype(dtype))
    if not kernel.is_register(operand):
        require(operand in SPECIAL or not operand.startswith("%"), f"PTX of {kernel.name}",
                "an operand that the emulator knows", operand)  # fmt: skip
        return lambda p: np.full(p.threads, p.special[operand]).astype(dtype)
    width = kernel.width(operand)
    if width == 1:
        return lambda p: p.registers[operand]
    if width == bits:
        return lambda p: p.registers[operand].view(dtype)
    return lambda p: p.registers[operand].astype(WORDS[bits]).view(dtype)  # the low bits, as PTX does


def _joined(names: tuple[str, ...], dtype: np.dtype, kernel: Kernel) -> Value:
    """Return how to read several registers as one value, the first in the lowest bits."""
    word = {4: "b16", 8: "b32"}[dtype.itemsize]
    parts = [value_of(name, word, kernel) for name in names]
    unwritten = np.array([_UNDEFINED], np.uint64).astype(TYPES[word])

    def read(p: Program) -> np.ndarray:
        # The compiler computes with one number as a pair and never writes the other half.
        halves = [
            np.repeat(unwritten, p.threads) if kernel.is_register(name) and name not in p.registers else part(p)
            for name, part in zip(names, parts, strict=True)
        ]
        return np.stack(halves, 1).view(dtype)[:, 0]

    return read


def _for_all(make: Callable[[int], np.ndarray]) -> Value:
    """Return how to read a value that depends only on the number of threads, made once for each number.

    The array is shared: no instruction writes into an array that it has read.
    """
    made: dict[int, np.ndarray] = {}

    def read(p: Program) -> np.ndarray:
        found = made.get(p.threads)
        if found is None:
            found = made[p.threads] = make(p.threads)
            found.setflags(write=False)
        return found

    return read


def _constant(operand: str, dtype: np.dtype) -> np.ndarray | None:
    """Return an immediate as an array of one element; None for another operand."""
    if operand[:2].lower() == "0f":
        return np.array([int(operand[2:], 16)], np.uint32).view(dtype)
    if not (operand[0].isdigit() or operand[0] == "-"):
        return None
    word = np.array([int(operand.rstrip("U"), 0) & 0xFFFF_FFFF_FFFF_FFFF], np.uint64)
    return word.astype(bool) if dtype == np.bool_ else word.astype(WORDS[8 * dtype.itemsize]).view(dtype)


def assign(program: Program, kernel: Kernel, name: str, values: np.ndarray) -> None:
    """Write a register where the instruction is active."""
    if name == "_":
        return
    word = WORDS[kernel.width(name)]
    if word is not np.bool_:
        values = values.view(word) if values.itemsize == _SIZES[word] else values.astype(word)
    if program.active is not program.everyone:
        old = program.registers.get(name)
        if old is None:
            old = np.full(program.threads, _UNDEFINED, np.uint64).astype(word)
        values = np.where(program.active, values, old)
    program.registers[name] = values


def address_of(operand: str, kernel: Kernel, kind: str) -> Value:
    """Return how to read the address [register + offset] or [symbol + offset]."""
    base, _, offset = operand.strip("[]").replace(" ", "").partition("+")
    start, shift = value_of(base, kind, kernel), int(offset or 0)
    return lambda p: (start(p).astype(np.int64) + shift).astype(TYPES[kind])
