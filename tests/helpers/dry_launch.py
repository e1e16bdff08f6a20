"""Launch kernels on a missing sm_80: Triton compiles the specialization of the arguments and launches nothing.

Tensors are fake (FakeTensorMode), so they have no memory; their addresses are their offsets. Use it in a process of
its own: after `pretend_driver`, Triton knows no other GPU.
"""

import contextlib
import dataclasses
from typing import Any, TypeVar

import torch
import triton
from torch._subclasses.fake_tensor import FakeTensorMode
from triton.backends.compiler import GPUTarget
from triton.runtime.jit import JITFunction, MockTensor

from vllm_latq.kernels.layout.outliers import OutlierCsr
from vllm_latq.kernels.layout.trellis import TrellisOperands
from vllm_latq.kernels.layout.weight import KernelWeight, prepare

W = TypeVar("W", bound=KernelWeight | TrellisOperands)
launch = JITFunction.run
launched: list[bool] = []  # for each launch, whether it was a warm-up


class _Driver:
    get_current_device = get_current_stream = lambda self, *_: 0

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 80, 32)


class _Pointer(MockTensor):
    def __init__(self, tensor: torch.Tensor) -> None:
        super().__init__(tensor.dtype)
        self.offset = int(tensor.storage_offset()) * tensor.itemsize

    def data_ptr(self) -> int:
        return self.offset


def _pointer(value: Any) -> Any:
    """Return what stands for a tensor; any other value as it is."""
    return _Pointer(value) if isinstance(value, torch.Tensor) else value


def _dry(self: JITFunction, *arguments: Any, grid: Any, warmup: bool, **options: Any) -> Any:
    launched.append(warmup)
    positional = [_pointer(value) for value in arguments]
    named = {name: _pointer(value) for name, value in options.items()}
    return launch(self, *positional, grid=grid, warmup=True, **named)


def pretend_driver() -> None:
    """Make Triton compile for an sm_80 and launch nothing, from now on in this process."""
    triton.runtime.driver.set_active(_Driver())
    JITFunction.run = _dry
    cuda: Any = torch.cuda
    cuda.device_of = contextlib.nullcontext


def empty(dtype: torch.dtype, *shape: int) -> torch.Tensor:
    """Return a tensor on the GPU."""
    return torch.empty(shape, dtype=dtype, device="cuda")


def on_gpu(rows: int, cols: int, coded: bool = False) -> KernelWeight:
    """Return a weight of 2 bits with an outlier in every row; `coded`: without group scales, as of hptq."""
    columns, values = torch.zeros(rows, dtype=torch.int32), torch.full((rows,), 5.0)
    csr = OutlierCsr(torch.arange(rows + 1, dtype=torch.int32), columns, values)
    words, scales = torch.zeros(rows, cols // 16, dtype=torch.int32), torch.ones(rows, cols // 128).bfloat16()
    return without_memory(prepare(words, 2, 128, cols, None if coded else scales, None, csr))


def without_memory(weight: W) -> W:
    """Return a weight whose tensors are on the GPU."""
    tensors = {name: tensor for name, tensor in vars(weight).items() if isinstance(tensor, torch.Tensor)}
    with FakeTensorMode():
        fake: dict[str, Any] = {name: empty(tensor.dtype, *tensor.shape) for name, tensor in tensors.items()}
        return dataclasses.replace(weight, **fake)
