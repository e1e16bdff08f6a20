"""PTX instructions that compute: each function here returns the step that its instruction does in a program."""

from collections.abc import Callable
from functools import partial, reduce
from typing import Any

import numpy as np

from vllm_latq.kernels.dev.emulation.numbers import from_bf16, from_pairs, to_bf16, to_pairs
from vllm_latq.kernels.dev.emulation.ptx import Instruction, Kernel
from vllm_latq.kernels.dev.emulation.state import TYPES, WORDS, Program, Step, assign, value_of
from vllm_latq.kernels.errors import require


def _fused(a: np.ndarray, b: np.ndarray, c: np.ndarray) -> np.ndarray:
    """a b + c: the product of float32s is exact in float64; the sum is rounded to float64, then to float32."""
    return (a.astype(np.float64) * b.astype(np.float64) + c.astype(np.float64)).astype(np.float32)


def _shift(values: np.ndarray, amounts: np.ndarray, left: bool) -> np.ndarray:
    bits = values.dtype.itemsize * 8
    if amounts.max() < bits:  # amounts are unsigned
        kept = amounts.astype(values.dtype)
        return values << kept if left else values >> kept
    amounts = np.minimum(amounts.astype(np.int64), bits)
    all_out = amounts >= bits
    kept = np.where(all_out, 0, amounts).astype(values.dtype)
    shifted = values << kept if left else values >> kept
    rest = np.where(values < 0, -1, 0) if not left and values.dtype.kind == "i" else 0
    return np.where(all_out, rest, shifted).astype(values.dtype)


def _divide(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Divide integers and round towards zero, as a GPU does."""
    quotient = np.abs(a.astype(np.int64)) // np.maximum(np.abs(b.astype(np.int64)), 1)
    return (quotient * np.sign(a.astype(np.int64)) * np.sign(b.astype(np.int64))).astype(a.dtype)


def _field(values: np.ndarray, start: np.ndarray, length: np.ndarray) -> np.ndarray:
    """Bit field extract; sign-extended for signed types."""
    moved = _shift(values, start, False)
    bits = values.dtype.itemsize * 8
    rest = bits - np.minimum(length.astype(np.int64), bits)
    return _shift(_shift(moved, rest, True), rest, False)


def _products(lut: int) -> list[int]:
    """A table of three inputs as an exclusive or of products: each a set of inputs as bits, a the highest."""
    outputs = [lut >> index & 1 for index in range(8)]
    for place in (1, 2, 4):
        for index in range(8):
            if index & place:
                outputs[index] ^= outputs[index ^ place]
    return [index for index in range(8) if outputs[index]]


def _table(inputs: tuple[np.ndarray, ...], products: list[int]) -> np.ndarray:
    """lop3: bit i of the table is the result for a, b, c = the bits of i, a the highest."""
    result = np.zeros_like(inputs[0])
    for product in products:
        factors = [values for place, values in zip((4, 2, 1), inputs, strict=True) if product & place]
        result ^= reduce(np.bitwise_and, factors) if factors else ~np.uint32(0)
    return result


BINARY: dict[str, Callable[..., Any]] = {
    "add": lambda a, b: a + b, "sub": lambda a, b: a - b, "mul": lambda a, b: a * b, "and": lambda a, b: a & b,
    "or": lambda a, b: a | b, "xor": lambda a, b: a ^ b, "min": np.fmin, "max": np.fmax,
    "min.NaN": np.minimum, "max.NaN": np.maximum, "div": _divide,
    "shl": lambda a, b: _shift(a, b, True), "shr": lambda a, b: _shift(a, b, False),
}  # fmt: skip
# Right to two units in the last place on a GPU, to half a one here.
APPROXIMATE = {"ex2.approx.f32": np.exp2, "div.full.f32": np.divide, "div.approx.f32": np.divide}
_COMPARE: dict[str, Callable[..., Any]] = {
    "eq": np.equal, "lt": np.less, "le": np.less_equal, "gt": np.greater, "ge": np.greater_equal,
    "ne": lambda a, b: (a < b) | (a > b),  # false where either is NaN, as the others are
    "neu": np.not_equal,  # true there
}  # fmt: skip
_FLOATS = {
    "f32": tuple({*BINARY, "fma", "neg", "abs"} - {"div"}), "f64": (),
    "f16": ("add", "sub", "mul", "min.NaN", "max.NaN", "neg"),
    "f32x2": ("add", "sub", "mul", "fma"),
}  # fmt: skip
# bf16 and pairs are computed in float64 and rounded to float32, then to their format; a GPU rounds once.
_ROUNDED: dict[str, Callable[..., Any]] = {
    "add": lambda a, b: a + b, "mul": lambda a, b: a * b, "fma": lambda a, b, c: a * b + c, "min.NaN": np.minimum,
    "max.NaN": np.maximum,
}  # fmt: skip
_NARROW = {"bf16": ("mul", "fma", "min.NaN", "max.NaN"), **dict.fromkeys(("bf16x2", "f16x2"), tuple(_ROUNDED))}


# Instructions whose operands and result have one type. `_fused` is of float32.
_PLAIN: dict[str, Callable[..., Any]] = BINARY | {
    "mad": lambda a, b, c: a * b + c, "fma": _fused, "bfe": _field, "neg": lambda a: -a, "abs": np.abs,
    "not": lambda a: ~a,
}  # fmt: skip


def arithmetic(instruction: Instruction, parts: list[str], kernel: Kernel) -> Step:
    """One result from one to three operands of one type."""
    name, kind = ".".join(part for part in parts if part in (parts[0], "NaN")), parts[-1]
    if instruction.opcode in APPROXIMATE:
        return _apply(APPROXIMATE[instruction.opcode], instruction, kind, kernel)
    if parts[-2:] in (["f32", "bf16"], ["f32", "f16"]):
        return _widened(instruction, name, kind, kernel)
    if parts == ["mul", "hi", "u32"]:
        return _apply(
            lambda a, b: (a.astype(np.uint64) * b >> np.uint64(32)).astype(np.uint32), instruction, kind, kernel
        )
    if parts == ["dp4a", "s32", "s32"]:
        return _apply(_dot_bytes, instruction, kind, kernel)
    require({*parts[1:-1]} <= {"lo", "wide", "rn", "NaN"} and name in (_FLOATS | _NARROW).get(kind, (name,)),
            f"PTX of {kernel.name}", "arithmetic that the emulator knows", instruction.text)  # fmt: skip
    if "wide" in parts:
        return _wide(instruction, name, kind, kernel)
    if kind in _NARROW:
        return _apply(_narrow(name, kind), instruction, kind, kernel)
    require(name in _PLAIN, f"PTX of {kernel.name}", "an instruction that the emulator knows", instruction.text)
    if kind == "f32x2":
        return _apply(_pairwise(_PLAIN[name]), instruction, kind, kernel)
    return _apply(_PLAIN[name], instruction, kind, kernel)


def _apply(function: Callable[..., Any], instruction: Instruction, kind: str, kernel: Kernel) -> Step:
    """Return the step that assigns function(operands), all of type `kind` except amounts of bits, which are u32."""
    target, *operands = instruction.operands
    amounts = instruction.parts[0] in ("shl", "shr", "bfe")
    sources = [
        value_of(operand, "u32" if amounts and place else kind, kernel) for place, operand in enumerate(operands)
    ]
    return lambda p: assign(p, kernel, str(target), function(*(source(p) for source in sources)))


def _dot_bytes(a: np.ndarray, b: np.ndarray, c: np.ndarray) -> np.ndarray:
    """dp4a: c plus the products of the four signed bytes of a and b."""
    first, second = (np.ascontiguousarray(each)[..., None].view(np.int8).astype(np.int32) for each in (a, b))
    return c + (first * second).sum(-1, dtype=np.int32)


def _pairwise(function: Callable[..., Any]) -> Callable[..., np.ndarray]:
    """Return `function` of float32s for pairs of them in uint64s."""
    return lambda *pairs: function(*(pair.view(np.float32) for pair in pairs)).view(np.uint64)


def _narrow(name: str, kind: str) -> Callable[..., np.ndarray]:
    """Return an instruction on bf16, or on pairs of bf16 or fp16, that is computed in float64."""
    read, write = (from_bf16, to_bf16) if kind == "bf16" else (partial(f, kind=kind) for f in (from_pairs, to_pairs))
    return lambda *words: write(_ROUNDED[name](*(read(word).astype(np.float64) for word in words)).astype(np.float32))


def _wide(instruction: Instruction, name: str, kind: str, kernel: Kernel) -> Step:
    """mul.wide and mad.wide: a product, and an addend, of integers of twice the width of the factors."""
    wide = {"s32": "s64", "u32": "u64", "s16": "s32", "u16": "u32"}[kind]
    left, right = (value_of(operand, kind, kernel) for operand in instruction.operands[1:3])
    addend = value_of(instruction.operands[3], wide, kernel) if name == "mad" else None

    def step(p: Program) -> None:
        product = left(p).astype(TYPES[wide]) * right(p).astype(TYPES[wide])
        assign(p, kernel, str(instruction.operands[0]), product if addend is None else product + addend(p))

    return step


def _widened(instruction: Instruction, name: str, kind: str, kernel: Kernel) -> Step:
    """add.f32.KIND and sub.f32.KIND d, a, c: a is bf16 or f16, c and d are float32."""
    require(name in ("add", "sub"), f"PTX of {kernel.name}", "a sum or difference", instruction.text)
    target, left, right = instruction.operands
    a, c = value_of(left, kind, kernel), value_of(right, "f32", kernel)
    widen = from_bf16 if kind == "bf16" else np.float32
    return lambda p: assign(p, kernel, str(target), BINARY[name](widen(a(p)), c(p)))


def logic(instruction: Instruction, parts: list[str], kernel: Kernel) -> Step:
    """lop3.b32 d, a, b, c, table"""
    target, *rest = instruction.operands
    products = _products(int(str(rest[3]), 0))
    sources = [value_of(operand, "b32", kernel) for operand in rest[:3]]
    return lambda p: assign(p, kernel, str(target), _table(tuple(source(p) for source in sources), products))


def permute(instruction: Instruction, parts: list[str], kernel: Kernel) -> Step:
    """prmt: byte i of the result is the one of the eight of (b, a) that nibble i of c names, or its sign where bit 3 is
    set."""
    require(parts == ["prmt", "b32"], f"PTX of {kernel.name}", "prmt in its default mode", instruction.text)
    target, *rest = instruction.operands
    a, b, c = (value_of(operand, "b32", kernel) for operand in rest)

    def step(p: Program) -> None:
        source = a(p).astype(np.uint64) | b(p).astype(np.uint64) << np.uint64(32)
        result = np.zeros(p.threads, np.uint32)
        for place in range(4):
            nibble = (c(p) >> np.uint32(4 * place)) & np.uint32(15)
            byte = (source >> (nibble & 7).astype(np.uint64) * np.uint64(8)).astype(np.uint32) & np.uint32(255)
            byte = np.where(nibble & 8, np.where(byte & 128, np.uint32(255), np.uint32(0)), byte)
            result |= byte << np.uint32(8 * place)
        assign(p, kernel, str(target), result)

    return step


def funnel(instruction: Instruction, parts: list[str], kernel: Kernel) -> Step:
    """shf.r.wrap.b32 d, a, b, c: the 32 bits of b:a from bit c modulo 32 on."""
    require(parts == ["shf", "r", "wrap", "b32"], f"PTX of {kernel.name}", "shf.r.wrap", instruction.text)
    target, *rest = instruction.operands
    low, high, bits = (value_of(operand, "b32", kernel) for operand in rest)

    def step(p: Program) -> None:
        both = high(p).astype(np.uint64) << np.uint64(32) | low(p).astype(np.uint64)
        assign(p, kernel, str(target), (both >> (bits(p) & np.uint32(31)).astype(np.uint64)).astype(np.uint32))

    return step


def compare(instruction: Instruction, parts: list[str], kernel: Kernel) -> Step:
    """setp.COMPARISON.type p, a, b"""
    require(len(parts) == 3 and parts[1] in _COMPARE and "bf16" not in parts[2], f"PTX of {kernel.name}",
            "a comparison that the emulator knows", instruction.text)  # fmt: skip
    target, left, right = instruction.operands
    test, a, b = _COMPARE[parts[1]], value_of(left, parts[2], kernel), value_of(right, parts[2], kernel)
    return lambda p: assign(p, kernel, str(target), test(a(p), b(p)))


def select(instruction: Instruction, parts: list[str], kernel: Kernel) -> Step:
    """selp.type d, a, b, p"""
    target, yes, no, which = instruction.operands
    a, b, test = value_of(yes, parts[1], kernel), value_of(no, parts[1], kernel), value_of(which, "pred", kernel)
    return lambda p: assign(p, kernel, str(target), np.where(test(p), a(p), b(p)))


def move(instruction: Instruction, parts: list[str], kernel: Kernel) -> Step:
    """mov.type d, a; of a register into several parts, or of several into one"""
    target, source = instruction.operands
    value = value_of(source, parts[1], kernel)
    if isinstance(target, tuple):
        word = WORDS[kernel.width(next(name for name in target if name != "_"))]

        def unpack(p: Program) -> None:
            pieces = np.ascontiguousarray(value(p)).view(word).reshape(p.threads, len(target))
            for place, name in enumerate(target):
                assign(p, kernel, name, np.ascontiguousarray(pieces[:, place]))

        return unpack
    return lambda p: assign(p, kernel, target, value(p))


def convert(instruction: Instruction, parts: list[str], kernel: Kernel) -> Step:
    """cvt[.rounding].to.from"""
    to, kind = parts[-2], parts[-1]
    down = parts[1] == "rmi" and {*parts[2:]} <= {"ftz", "f32"}
    truncated = parts[1] == "rzi" and kind == "f32" and to == "s32"
    require(({*parts[1:-2]} <= {"rn"} or down or truncated) and (kind == "f32" or not to.startswith(("bf16", "f16x2"))),
            f"PTX of {kernel.name}", "a conversion that the emulator knows", instruction.text)  # fmt: skip
    target = str(instruction.operands[0])
    sources = [value_of(operand, kind, kernel) for operand in instruction.operands[1:]]
    if to in ("bf16x2", "f16x2"):  # the first source goes to the high half
        return lambda p: assign(p, kernel, target, to_pairs(np.stack([sources[1](p), sources[0](p)], 1), to))

    def step(p: Program) -> None:
        value = from_bf16(sources[0](p)) if kind == "bf16" else sources[0](p)
        if down:
            value = np.floor(value)
        assign(p, kernel, target, to_bf16(value) if to == "bf16" else value.astype(TYPES[to]))

    return step
