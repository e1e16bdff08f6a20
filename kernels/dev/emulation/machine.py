"""Runs compiled PTX on a CPU, to check on any machine what a GPU would execute: results, bounds, races and traffic.

All threads of a program advance together, an instruction at a time; programs run one after another, in any order that
is asked for. Branches must be taken by all threads of a program alike, which holds for what Triton makes of these
kernels. What this does not show: time, what reordering between running programs could do, and what a missing wait or
fence around warp-group products would, since these finish when they are issued.
"""

from collections.abc import Callable, Iterable

import numpy as np

from vllm_latq.kernels.dev.emulation import arithmetic, matrix, movement
from vllm_latq.kernels.dev.emulation.memory import GlobalMemory, Traffic
from vllm_latq.kernels.dev.emulation.ptx import Instruction, Kernel
from vllm_latq.kernels.dev.emulation.state import Program, Step
from vllm_latq.kernels.errors import require

_IGNORED = ("createpolicy", "fence", "membar", "griddepcontrol", "nanosleep", "ret", "bra")
_TOGETHER = ("shfl", "redux", "ldmatrix", "stmatrix", "mma", "wgmma", "cp.async.commit_group", "cp.async.wait_group")

_MAKERS: dict[str, Callable[[Instruction, list[str], Kernel], Step]] = {
    **dict.fromkeys(
        (*arithmetic.BINARY, "mad", "fma", "dp4a", "bfe", "neg", "abs", "not", "ex2"), arithmetic.arithmetic
    ),
    "lop3": arithmetic.logic,
    "prmt": arithmetic.permute,
    "shf": arithmetic.funnel,
    "setp": arithmetic.compare,
    "selp": arithmetic.select,
    "mov": arithmetic.move,
    "cvt": arithmetic.convert,
    "ld": movement.load,
    "st": movement.store,
    "prefetch": movement.prefetch,
    "atom": movement.atomic,
    "red": movement.atomic,
    "bar": movement.barrier,
    "cp": movement.copy,
    "shfl": movement.shuffle,
    "redux": movement.reduce,
    "ldmatrix": movement.matrices,
    "stmatrix": movement.matrices,
    "mma": matrix.multiply,
    "wgmma": matrix.group_multiply,
}


def run(
    kernel: Kernel,
    arch: str,
    threads: int,
    shared: int,
    grid: tuple[int, int, int],
    arguments: list[int],
    memory: GlobalMemory,
    order: Iterable[int] | None = None,
) -> Traffic:
    """Execute every program of a launch.

    Args:
        threads: per program.
        shared: bytes of shared memory, without those that inline assembly reserves.
        arguments: one number per parameter, addresses included.
        order: program numbers, x fastest, in the order to run them; increasing by default.

    Raises:
        KernelInputError: an access out of bounds, a race, a divergent branch or an unknown instruction.
    """
    require(
        len(arguments) == len(kernel.parameters), kernel.name, f"{len(kernel.parameters)} arguments", len(arguments)
    )
    parameters = dict(zip(kernel.parameters, arguments, strict=True))
    named = {"global_smem": 0}
    for name, (size, align) in kernel.reserved.items():
        named[name] = -(-shared // align) * align
        shared = named[name] + size
    steps = [_translate(instruction, kernel) for instruction in kernel.instructions]
    for number in order if order is not None else range(grid[0] * grid[1] * grid[2]):
        place = (number % grid[0], number // grid[0] % grid[1], number // (grid[0] * grid[1]))
        special = {f"%ctaid.{axis}": at for axis, at in zip("xyz", place, strict=True)}
        special |= {f"%nctaid.{axis}": size for axis, size in zip("xyz", grid, strict=True)}
        special |= {"%ntid.x": threads} | named | parameters
        _run_program(Program(threads, shared, memory, special, arch), kernel, steps)
    return memory.traffic


def _run_program(program: Program, kernel: Kernel, steps: list[Step]) -> None:
    at = 0
    with np.errstate(all="ignore"):
        while True:
            instruction = kernel.instructions[at]
            at += 1
            program.active = _guard(program, instruction) if instruction.guard else program.everyone
            if instruction.opcode == "ret":
                require(bool(program.active.all()), kernel.name, "all threads to return together", instruction.text)
                return
            if instruction.opcode in ("bra", "bra.uni"):
                taken = program.active
                require(bool(taken.all() or not taken.any()), kernel.name, "a branch taken by all or no threads",
                        instruction.text)  # fmt: skip
                if taken[0]:
                    at = kernel.labels[str(instruction.operands[0])]
                continue
            steps[at - 1](program)


def _guard(program: Program, instruction: Instruction) -> np.ndarray:
    held = program.registers[instruction.guard]
    return ~held if instruction.negated else held


def _translate(instruction: Instruction, kernel: Kernel) -> Step:
    """The effect of an instruction on a program."""
    parts = instruction.parts
    require(not (instruction.guard and {parts[0], instruction.opcode} & {*_TOGETHER}), f"PTX of {kernel.name}",
            "an instruction of whole warps without a guard", instruction.text)  # fmt: skip
    if parts[0] in _IGNORED:
        return lambda p: None
    maker = _MAKERS.get(parts[0])
    require(maker is not None, f"PTX of {kernel.name}", "an instruction that the emulator knows", instruction.text)
    assert maker is not None
    return maker(instruction, parts, kernel)
