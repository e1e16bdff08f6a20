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
from vllm_latq.kernels.decode import simt, ssqr
from vllm_latq.kernels.dev.audit import compile_ahead
from vllm_latq.kernels.dev.emulation.machine import run
from vllm_latq.kernels.dev.emulation.memory import WARP, GlobalMemory, Traffic, address
from vllm_latq.kernels.dev.emulation.ptx import Kernel, parse
from vllm_latq.kernels.entropy import huffman, rans
from vllm_latq.kernels.experts import grouped, routing, rows

KERNELS = (
    (ssqr, "ssqr_tensor_core"), (grouped, "ssqr_grouped"), (routing, "route_pairs"), (rows, "gather_rows"),
    (rows, "activate_rows"), (rows, "combine_pairs"),
    (simt, "ssqr_simt"), (dequantize, "dequantize_tiles"),
    (dequantize, "scatter_outliers"), (dequantize, "write_beyond"), (huffman, "huffman_chunks"), (rans, "rans_chunks"),
)  # fmt: skip
ON_NVIDIA = {"ASM": True, "UPCAST": False}  # what the launchers choose by the tensors' device
_TYPES = {
    torch.bfloat16: "*bf16", torch.float16: "*fp16", torch.float32: "*fp32", torch.int32: "*i32", torch.int64: "*i64",
    torch.uint8: "*u8", torch.int16: "*i16", torch.int8: "*i8",
}  # fmt: skip
Order = Callable[[int], list[int]]


class EmulatedKernel:
    """Stands in for a compiled Triton function: `kernel[grid](*arguments, **constants)`."""

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
            name, value = parameter.name, arguments[parameter.name]
            special = not parameter.do_not_specialize
            if parameter.is_constexpr or value is None or (special and isinstance(value, int) and value == 1):
                values[name] = value
                continue
            if isinstance(value, torch.Tensor):
                types[name] = _TYPES[value.dtype]
                given.append(address(len(buffers)))
                buffers.append(_bytes(value))
                divisible = value.data_ptr() % 16 == 0
            else:
                types[name] = "i32" if -(2**31) <= value < 2**31 else "i64"
                given.append(value)
                divisible = value % 16 == 0
            if special and divisible:
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


def _bytes(tensor: torch.Tensor) -> np.ndarray:
    """What a tensor spans, as uint8 that shares its memory."""
    if not tensor.numel():
        return np.zeros(0, np.uint8)
    extent = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return torch.as_strided(tensor, (extent,), (1,)).view(torch.uint8).numpy()


@contextmanager
def emulation(arch: str, order: Order = lambda programs: list(range(programs))) -> Iterator[Traffic]:
    """Launches of this package's kernels run in the emulator; yields what they move, added up.

    Args:
        arch: one of `audit.ARCHITECTURES`.
        order: the order in which to run so many programs.
    """
    traffic = Traffic()
    with ExitStack() as stack:
        for module, name in KERNELS:
            stand_in = EmulatedKernel(getattr(module, name), arch, traffic, order)
            stack.enter_context(patch.object(module, name, stand_in))
        yield traffic
