"""The real launchers without a GPU: inside `emulation`, a launch compiles for an architecture and runs in the emulator.

with emulation("sm_80") as traffic:
    y = ssqr_matmul(x, replace(weight, arch="sm_80", processors=108))   # tensors on the CPU
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from triton.backends.compiler import GPUTarget

from vllm_latq.kernels.decode import prefill as dequantize
from vllm_latq.kernels.decode import simt, spread, ssqr, trellis, trellis_prefill
from vllm_latq.kernels.dev.audit import compile_ahead
from vllm_latq.kernels.dev.emulation.machine import run
from vllm_latq.kernels.dev.emulation.memory import WARP, GlobalMemory, Traffic, address
from vllm_latq.kernels.dev.emulation.ptx import Kernel, parse
from vllm_latq.kernels.entropy import huffman
from vllm_latq.kernels.experts import grouped, grouped_trellis, routing, rows

KERNELS = (
    (spread, "ssqr_spread"),
    (ssqr, "ssqr_tensor_core"), (grouped, "ssqr_grouped"), (routing, "route_pairs"), (rows, "gather_rows"),
    (grouped_trellis, "trellis_grouped_activations"), (grouped_trellis, "trellis_grouped"),
    (rows, "activate_rows"), (rows, "combine_pairs"),
    (trellis, "trellis_activations"), (trellis, "trellis_tensor_core"),
    (trellis_prefill, "dequantize_trellis"), (simt, "ssqr_simt"),
    (dequantize, "dequantize_tiles"), (huffman, "huffman_chunks"),
)  # fmt: skip
ON_NVIDIA = {"ASM": True, "UPCAST": False}  # what the launchers choose by the tensors' device
_TYPES = {
    torch.bfloat16: "*bf16", torch.float16: "*fp16", torch.float32: "*fp32", torch.int32: "*i32", torch.int64: "*i64",
    torch.uint8: "*u8", torch.int16: "*i16", torch.int8: "*i8",
}  # fmt: skip
Order = Callable[[int], list[int]]


class EmulatedKernel:
    """A Triton function that the emulator runs: `kernel[grid](*arguments, **constants)`."""

    def __init__(self, kernel: Any, arch: str, traffic: Traffic, order: Order) -> None:
        self.kernel, self.arch, self.traffic, self.order = kernel, arch, traffic, order
        self.compiled: dict[Any, tuple[Kernel, int]] = {}

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        columns, rows, layers = (*grid, 1, 1)[:3]
        return partial(self._launch, (columns, rows, layers))

    def _launch(self, grid: tuple[int, int, int], *positional: Any, num_warps: int = 4, **named: Any) -> None:
        arguments = dict(zip(self.kernel.arg_names, positional, strict=False)) | named
        arguments |= {name: value for name, value in ON_NVIDIA.items() if name in self.kernel.arg_names}
        types: dict[str, str] = {}
        values: dict[str, Any] = {}
        aligned: set[str] = set()
        given: list[int] = []
        buffers: list[np.ndarray] = []
        for parameter in self.kernel.params:
            name, value = parameter.name, arguments.get(parameter.name, parameter.default)
            if _is_compiled_in(parameter, value):
                values[name] = value
                continue
            types[name] = _type_of(value)
            if isinstance(value, torch.Tensor):
                given.append(address(len(buffers)))
                buffers.append(_bytes(value))
            else:
                given.append(value)
            if not parameter.do_not_specialize and _is_divisible(value):
                aligned.add(name)
        code, shared = self._compile(types, values, aligned, num_warps)
        given += [0] * (len(code.parameters) - len(given))  # scratch that these kernels do not use
        memory = GlobalMemory(buffers, self.traffic)
        programs = grid[0] * grid[1] * grid[2]
        run(code, self.arch, WARP * num_warps, shared, grid, given, memory, self.order(programs))

    def _compile(
        self, types: dict[str, str], values: dict[str, Any], aligned: set[str], warps: int
    ) -> tuple[Kernel, int]:
        key = (tuple(types.items()), tuple(values.items()), tuple(sorted(aligned)), warps)
        if key not in self.compiled:
            target = GPUTarget("cuda", int(self.arch.removeprefix("sm_")), WARP)
            compiled = compile_ahead(self.kernel, target, types, values, aligned, warps)
            self.compiled[key] = parse(compiled.asm["ptx"]), compiled.metadata.shared
        return self.compiled[key]


def _is_compiled_in(parameter: Any, value: Any) -> bool:
    """Return whether Triton makes an argument part of the code: a constexpr, None, or a specialized integer 1."""
    one = isinstance(value, int) and value == 1 and not parameter.do_not_specialize
    return parameter.is_constexpr or value is None or one


def _type_of(value: torch.Tensor | int) -> str:
    """Return the type in the signature of the kernel that Triton compiles for an argument."""
    if isinstance(value, torch.Tensor):
        return _TYPES[value.dtype]
    return "i32" if -(2**31) <= value < 2**31 else "i64"


def _is_divisible(value: torch.Tensor | int) -> bool:
    """Return whether an integer or an address is a multiple of 16, for which Triton compiles code of its own."""
    return (value.data_ptr() if isinstance(value, torch.Tensor) else value) % 16 == 0


def _bytes(tensor: torch.Tensor) -> np.ndarray:
    """Return the memory that a tensor spans, uint8, without copying it."""
    if not tensor.numel():
        return np.zeros(0, np.uint8)
    extent = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return torch.as_strided(tensor, (extent,), (1,)).view(torch.uint8).numpy()


@contextmanager
def emulation(arch: str, order: Order = lambda programs: list(range(programs))) -> Iterator[Traffic]:
    """Run the launches of this package's kernels in the emulator; yield the traffic of all of them, added up.

    Args:
        arch: one of `audit.ARCHITECTURES`.
        order: returns, for a number of programs, the order in which they run.
    """
    traffic = Traffic()
    with ExitStack() as stack:
        for module, name in KERNELS:
            stand_in = EmulatedKernel(getattr(module, name), arch, traffic, order)
            stack.enter_context(patch.object(module, name, stand_in))
        yield traffic
