"""PTX instructions that move data: to and from memory, between threads, and between programs."""

import numpy as np

from vllm_latq.kernels.dev.emulation.arithmetic import BINARY
from vllm_latq.kernels.dev.emulation.memory import WARP
from vllm_latq.kernels.dev.emulation.ptx import Instruction, Kernel
from vllm_latq.kernels.dev.emulation.state import TYPES, Program, Step, address_of, assign, value_of
from vllm_latq.kernels.errors import require


def _space(parts: list[str]) -> str:
    return next(part.split("::")[0] for part in parts if part.split("::")[0] in ("global", "shared", "param"))


def load(instruction: Instruction, parts: list[str], kernel: Kernel) -> Step:
    """ld.space[.modifiers].type d, [a]; d may be several registers"""
    target, where = instruction.operands[:2]
    space, kind = _space(parts), parts[-1]
    if space == "param":
        value = value_of(str(where).strip("[]"), kind, kernel)
        return lambda p: assign(p, kernel, str(target), value(p))
    at = address_of(str(where), kernel, "u64" if space == "global" else "u32")
    names, word = target if isinstance(target, tuple) else (target,), TYPES[kind]
    size = len(names) * np.dtype(word).itemsize

    def step(p: Program) -> None:
        memory = p.memory if space == "global" else p.shared
        found = memory.load(at(p), size, p.active, instruction.text).view(word)
        for place, name in enumerate(names):
            assign(p, kernel, name, np.ascontiguousarray(found[:, place]))

    return step


def store(instruction: Instruction, parts: list[str], kernel: Kernel) -> Step:
    """st.space[.modifiers].type [a], b; b may be several registers"""
    where, source = instruction.operands[:2]
    space, kind = _space(parts), parts[-1]
    at = address_of(str(where), kernel, "u64" if space == "global" else "u32")
    values = [value_of(part, kind, kernel) for part in (source if isinstance(source, tuple) else (source,))]

    def step(p: Program) -> None:
        data = np.stack([value(p) for value in values], 1)
        memory = p.memory if space == "global" else p.shared
        memory.store(at(p), data.view(np.uint8), p.active, instruction.text)

    return step


def prefetch(instruction: Instruction, parts: list[str], kernel: Kernel) -> Step:
    """prefetch.global.L2 [a]"""
    at = address_of(str(instruction.operands[0]), kernel, "u64")
    return lambda p: p.memory.prefetch(at(p), p.active, instruction.text)


def atomic(instruction: Instruction, parts: list[str], kernel: Kernel) -> Step:
    """atom.global.add, and red, which returns nothing: the threads one after another."""
    kind = parts[-1]
    require("add" in parts and _space(parts) == "global" and kind in ("u32", "s32", "u64", "f32"),
            f"PTX of {kernel.name}", "an atomic addition of a word", instruction.text)  # fmt: skip
    *target, where, addend = instruction.operands
    at, amount = address_of(str(where), kernel, "u64"), value_of(addend, kind, kernel)

    def step(p: Program) -> None:
        before = np.zeros(p.threads, TYPES[kind])
        addresses, amounts = at(p), amount(p)
        for thread in p.active.nonzero()[0]:
            alone = np.zeros(p.threads, bool)
            alone[thread] = True
            found = p.memory.load(addresses, before.itemsize, alone, instruction.text).view(TYPES[kind])[:, 0]
            before[thread] = found[thread]
            p.memory.store(addresses, (found + amounts)[:, None].view(np.uint8), alone, instruction.text)
        for name in target:
            assign(p, kernel, str(name), before)

    return step


def barrier(instruction: Instruction, parts: list[str], kernel: Kernel) -> Step:
    """bar.sync 0 of all threads, bar.warp.sync of those of a warp"""
    if "warp" in parts:
        return lambda p: None  # the threads of a warp advance together anyway
    require(parts[1] == "sync" and instruction.operands == ("0",), f"PTX of {kernel.name}", "bar.sync 0 of all threads",
            instruction.text)  # fmt: skip

    def wait(p: Program) -> None:
        require(bool(p.active.all()), kernel.name, "all threads at a barrier", instruction.text)
        p.shared.barrier()

    return wait


def copy(instruction: Instruction, parts: list[str], kernel: Kernel) -> Step:
    """cp.async: bytes arrive when their group is waited for, as late as they may."""
    if parts[2] == "commit_group":
        return lambda p: p.copies.append([])
    if parts[2] == "wait_group":
        left = int(str(instruction.operands[0]))

        def wait(p: Program) -> None:
            done = len(p.copies) - 1 - left
            for group in p.copies[: max(done, 0)]:
                for to, values, active in group:
                    p.shared.end_copy(to, values, active, instruction.text)
            del p.copies[: max(done, 0)]

        return wait
    to, source, size = instruction.operands[:3]
    width = int(str(size), 0)
    # A fourth operand is the number of bytes to read, the rest being zero; before a cache policy, which is 64 bits.
    limited = len(instruction.operands) > 3 and not str(instruction.operands[3]).startswith("%rd")
    amount_of = str(instruction.operands[3]) if limited else str(width)
    require(not kernel.is_register(amount_of) or kernel.width(amount_of) == 32, f"PTX of {kernel.name}",
            "a number of bytes, not a predicate", instruction.text)  # fmt: skip
    limit = value_of(amount_of, "u32", kernel)
    target, start = address_of(str(to), kernel, "u32"), address_of(str(source), kernel, "u64")

    def step(p: Program) -> None:
        amount = limit(p)
        require(bool(np.isin(amount[p.active], (0, width)).all()), instruction.text, f"0 or {width} bytes", "others")
        values = p.memory.load(start(p), width, p.active & (amount > 0), instruction.text)
        p.shared.begin_copy(target(p), width, p.active, instruction.text)
        p.copies[-1].append((target(p), values, p.active))

    return step


def shuffle(instruction: Instruction, parts: list[str], kernel: Kernel) -> Step:
    """shfl.sync.{bfly,idx,up}.b32 among the 32 threads of each warp."""
    target, source, lane = instruction.operands[:3]
    last = {"bfly": "31", "idx": "31", "up": "0"}  # of the lanes that a thread may read: the whole warp
    require(last.get(parts[2]) == str(instruction.operands[3]), f"PTX of {kernel.name}",
            "shfl.sync.bfly, .idx or .up over whole warps", instruction.text)  # fmt: skip
    value, which = value_of(source, "b32", kernel), value_of(lane, "u32", kernel)

    def step(p: Program) -> None:
        thread = np.arange(p.threads)
        own, chosen = thread % WARP, which(p).astype(np.int64)
        if parts[2] == "up":
            lanes = np.where(chosen > own, own, own - chosen)
        else:
            lanes = own ^ chosen if parts[2] == "bfly" else chosen % WARP
        assign(p, kernel, str(target), value(p)[thread // WARP * WARP + lanes])

    return step


def reduce(instruction: Instruction, parts: list[str], kernel: Kernel) -> Step:
    """redux.sync over each warp."""
    target, source = instruction.operands[:2]
    combine, value = BINARY[parts[2]], value_of(source, parts[3], kernel)

    def step(p: Program) -> None:
        total = value(p).reshape(-1, WARP)
        while total.shape[1] > 1:
            total = combine(total[:, ::2], total[:, 1::2])
        assign(p, kernel, str(target), np.repeat(total[:, 0], WARP))

    return step


def matrices(instruction: Instruction, parts: list[str], kernel: Kernel) -> Step:
    """ldmatrix and stmatrix of matrices of 8x8 16-bit numbers.

    Thread t of each eight gives the address of row t of a matrix; lane l has pair l % 4 of row l // 4 of each matrix.
    """
    loads = parts[0] == "ldmatrix"
    names, where = instruction.operands if loads else instruction.operands[::-1]
    count, turned = int(next(part for part in parts if part in ("x1", "x2", "x4"))[1:]), "trans" in parts
    at = address_of(str(where), kernel, "u32")
    values = [value_of(name, "b32", kernel) for name in names]

    def load(p: Program) -> None:
        rows = p.shared.load(at(p), 16, np.arange(p.threads) % WARP < 8 * count, instruction.text).view(np.uint16)
        matrices = rows.reshape(-1, 4, 8, 8)  # warp, matrix, row, column
        pairs = np.ascontiguousarray(matrices.swapaxes(2, 3) if turned else matrices).view(np.uint32)
        for place, name in enumerate(names):
            assign(p, kernel, name, np.ascontiguousarray(pairs[:, place].reshape(-1)))

    def store(p: Program) -> None:
        matrices = np.zeros((p.threads // WARP, 4, 8, 8), np.uint16)
        for place, value in enumerate(values):
            matrices[:, place] = np.ascontiguousarray(value(p)).view(np.uint16).reshape(-1, 8, 8)
        rows = np.ascontiguousarray(matrices.swapaxes(2, 3) if turned else matrices).reshape(p.threads, 8)
        p.shared.store(at(p), rows.view(np.uint8), np.arange(p.threads) % WARP < 8 * count, instruction.text)

    return load if loads else store
