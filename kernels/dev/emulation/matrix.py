"""PTX instructions of the tensor cores: which register of which lane holds what."""

import numpy as np

from vllm_latq.kernels.dev.emulation.numbers import from_pairs
from vllm_latq.kernels.dev.emulation.ptx import Instruction, Kernel
from vllm_latq.kernels.dev.emulation.state import Program, Step, Value, assign, value_of
from vllm_latq.kernels.dev.emulation.tensor_core import multiply_add
from vllm_latq.kernels.errors import require


def _fragment(p: Program, values: list[Value], kind: str) -> np.ndarray:
    """float32 [warps, registers, 8 groups, 4 lanes, 2]: the halves of some registers, by lane = 4 group + place."""
    return from_pairs(np.stack([value(p).reshape(-1, 8, 4) for value in values], 1), kind)


def _left(p: Program, values: list[Value], kind: str) -> np.ndarray:
    """[warps, 16, 16]: A of m16n8k16. Registers: rows 0-7 and 8-15 of columns 0-7, then of columns 8-15."""
    halves = _fragment(p, values, kind).reshape(-1, 2, 2, 8, 8)  # warp, column half, row half, row, column
    return halves.transpose(0, 2, 3, 1, 4).reshape(-1, 16, 16)


def _bytes_of(p: Program, values: list[Value]) -> np.ndarray:
    """int64 [warps, 8 groups, registers, 4 lanes, 4]: the signed bytes of some registers, by lane = 4 group + place."""
    words = np.stack([value(p).reshape(-1, 8, 4) for value in values], 2).astype(np.uint32)
    return np.ascontiguousarray(words).view(np.int8).reshape(*words.shape, 4).astype(np.int64)


def _multiply_bytes(instruction: Instruction, kernel: Kernel) -> Step:
    """mma.sync.aligned.m16n8k32.row.col.satfinite.s32.s8.s8.s32"""
    targets, *sources = instruction.operands
    a, b, c = ([value_of(name, "s32" if i == 2 else "b32", kernel) for name in s] for i, s in enumerate(sources))

    def step(p: Program) -> None:
        # A: registers of rows 0-7 and 8-15 for columns 0-15, then for columns 16-31. B: rows 0-15, then 16-31.
        left = _bytes_of(p, a).reshape(-1, 8, 2, 2, 4, 4).transpose(0, 3, 1, 2, 4, 5).reshape(-1, 16, 32)
        right = _bytes_of(p, b).reshape(-1, 8, 32).transpose(0, 2, 1)
        before = np.stack([value(p).reshape(-1, 8, 4) for value in c], 3).astype(np.int64).reshape(-1, 8, 4, 2, 2)
        after = left @ right + before.transpose(0, 3, 1, 2, 4).reshape(-1, 16, 8)
        limits = np.iinfo(np.int32)
        after = after.clip(limits.min, limits.max).astype(np.int32).reshape(-1, 2, 8, 4, 2)
        for place, name in enumerate(targets):
            assign(p, kernel, name, np.ascontiguousarray(after[:, place // 2, :, :, place % 2]).reshape(-1))

    return step


def multiply(instruction: Instruction, parts: list[str], kernel: Kernel) -> Step:
    """mma.sync.aligned.m16n8k16.row.col.f32.T.T.f32, or of bytes."""
    if parts[-2:] == ["s8", "s32"] and "m16n8k32" in parts:
        return _multiply_bytes(instruction, kernel)
    require("m16n8k16" in parts, f"PTX of {kernel.name}", "mma of m16n8k16", instruction.text)
    kind = parts[-2]
    targets, *sources = instruction.operands
    a, b, c = ([value_of(name, "f32" if i == 2 else "b32", kernel) for name in s] for i, s in enumerate(sources))

    def step(p: Program) -> None:
        # B: register r holds k = 8 r + 2 place + half of column `group`. C: rows group and group + 8, two columns each.
        right = _fragment(p, b, kind).transpose(0, 1, 3, 4, 2).reshape(-1, 16, 8)
        before = np.stack([value(p).reshape(-1, 8, 4) for value in c], 3).reshape(-1, 8, 4, 2, 2)
        before = before.transpose(0, 3, 1, 2, 4).reshape(-1, 16, 8)
        after = multiply_add(_left(p, a, kind), right, before, p.core).reshape(-1, 2, 8, 4, 2)
        for place, name in enumerate(targets):
            values = after[:, place // 2, :, :, place % 2]
            assign(p, kernel, name, np.ascontiguousarray(values).reshape(-1))

    return step


def _swizzled(p: Program, descriptor: int, columns: int, text: str) -> np.ndarray:
    """uint16 [columns, 16]: K-major B of a warp-group product, read from shared memory.

    The descriptor holds the address, the stride between groups of eight columns (bytes / 16) and the swizzle: 1, 2 or 3
    for rows of 128, 64 or 32 bytes, whose 16-byte pieces are xor-ed with the row's number.
    """
    start, stride, mode = (descriptor & 0x3FFF) << 4, (descriptor >> 32 & 0x3FFF) << 4, descriptor >> 62
    require(mode in (1, 2, 3), text, "a swizzled operand", f"mode {mode}")
    row, column = 128 >> (mode - 1), np.arange(columns)[:, None]
    at = start + column // 8 * stride + column % 8 * row + 2 * np.arange(16)[None, :]
    at ^= (at >> 7 & (row // 16 - 1)) << 4
    return p.shared.load_for_all(at.reshape(-1), 2, text).view(np.uint16).reshape(columns, 16)


def group_multiply(instruction: Instruction, parts: list[str], kernel: Kernel) -> Step:
    """wgmma.mma_async with A in registers and B in shared memory; four warps own 16 rows each."""
    if parts[1] != "mma_async":
        return lambda p: None  # fences and waits: here a product is done when it is issued
    shape = next(part for part in parts if part.startswith("m64n"))
    columns, kind = int(shape[4:].partition("k")[0]), parts[-1]
    targets, left, descriptor, keep, *signs = instruction.operands
    require(isinstance(left, tuple) and signs == ["1", "1", "0"], f"PTX of {kernel.name}",
            "wgmma with A in registers and K-major B", instruction.text)  # fmt: skip
    a, at = [value_of(name, "b32", kernel) for name in left], value_of(descriptor, "u64", kernel)
    c, kept = [value_of(name, "f32", kernel) for name in targets], value_of(keep, "pred", kernel)

    def step(p: Program) -> None:
        described = at(p)
        require(p.threads % 128 == 0 and bool((described == described[0]).all()), instruction.text,
                "one operand B for whole warp groups", "several")  # fmt: skip
        right = from_pairs(_swizzled(p, int(described[0]), columns, instruction.text).view(np.uint32), kind)
        right = right.reshape(columns, 16).T
        nothing = np.zeros(p.threads, np.float32)
        before = np.stack([(value(p) if kept(p).all() else nothing).reshape(-1, 8, 4) for value in c], 3)
        # Registers: for each eight columns, rows group and group + 8, two columns each.
        before = before.reshape(-1, 8, 4, columns // 8, 2, 2).transpose(0, 4, 1, 3, 2, 5).reshape(-1, 16, columns)
        after = multiply_add(_left(p, a, kind), right, before, p.core).reshape(-1, 2, 8, columns // 8, 4, 2)
        after = after.transpose(0, 2, 4, 3, 1, 5).reshape(p.threads, -1)
        for place, name in enumerate(targets):
            assign(p, kernel, name, np.ascontiguousarray(after[:, place]))

    return step
