"""Launches on an sm_80 that is not there: Triton compiles what its arguments ask for, and launches nothing.

Tensors are fake (FakeTensorMode), so they have no memory; their addresses are their offsets. For a process of its own:
Triton knows no other GPU in it from `pretend_driver` on.
"""

import contextlib
import dataclasses
from typing import Any

import torch
import triton
from torch._subclasses.fake_tensor import FakeTensorMode
from triton.backends.compiler import GPUTarget
from triton.runtime.jit import JITFunction, MockTensor

from vllm_latq.kernels.layout.weight import KernelWeight, prepare

launch = JITFunction.run
launched: list[bool] = []  # whether what would have been launched was to be compiled only


class _Driver:
    get_current_device = get_current_stream = lambda self, *_: 0

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 80, 32)


class _Pointer(MockTensor):
    def __init__(self, tensor: torch.Tensor) -> None:
        super().__init__(tensor.dtype)
        self.offset = tensor.storage_offset() * tensor.itemsize

    def data_ptr(self) -> int:
        return self.offset


def _dry(self: JITFunction, *arguments: Any, grid: Any, warmup: bool, **options: Any) -> Any:
    launched.append(warmup)
    pointers = [_Pointer(value) if isinstance(value, torch.Tensor) else value for value in arguments]
    return launch(self, *pointers, grid=grid, warmup=True, **options)


def pretend_driver() -> None:
    triton.runtime.driver.set_active(_Driver())
    JITFunction.run = _dry
    torch.cuda.device_of = contextlib.nullcontext


def empty(dtype: torch.dtype, *shape: int) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="cuda")


def on_gpu(rows: int, cols: int, coded: bool = False) -> KernelWeight:
    """A weight of 2 bits with an outlier in every row; coded: as hptq and latq have it."""
    csr = torch.arange(rows + 1, dtype=torch.int32), torch.zeros(rows, dtype=torch.int32), torch.full((rows,), 5.0)
    words, scales = torch.zeros(rows, cols // 16, dtype=torch.int32), torch.ones(rows, cols // 128).bfloat16()
    weight = prepare(words, 2, 128, cols, None if coded else scales, None, *csr)
    tensors = {field.name: getattr(weight, field.name) for field in dataclasses.fields(weight)}
    tensors = {name: tensor for name, tensor in tensors.items() if isinstance(tensor, torch.Tensor)}
    with FakeTensorMode():
        return dataclasses.replace(weight, **{name: empty(t.dtype, *t.shape) for name, t in tensors.items()})
