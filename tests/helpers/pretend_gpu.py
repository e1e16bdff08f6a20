"""A pretend CUDA device for machines without one: its tensors say "cuda", lie in the CPU's memory and refuse others.

It works at the level of torch functions and computes what the CPU computes, so a run on it must give the same bits as
one on the CPU, or it has mixed devices, which a real GPU refuses. What a torch function does inside is not seen.
"""

import contextlib
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map

from vllm_latq.quantize.lattice.viterbi.search import nearest_rings_on_processor

DEVICE = torch.device("cuda", 0)
PROPERTIES = {"device": DEVICE, "is_cuda": True, "is_cpu": False}
MOVES = ("to", "cpu")
# nn.Module asks before it moves a parameter in place; a copy between devices is what copy_ is for.
ANY_DEVICE = {"copy_", "_has_compatible_shallow_copy_type"}


class OnGpu(torch.Tensor):
    """A tensor on the pretend GPU. Its values, `host`, are reached by torch functions only."""

    host: torch.Tensor

    @staticmethod
    def __new__(cls, host: torch.Tensor) -> "OnGpu":
        layout: dict[str, Any] = {
            "strides": host.stride(),
            "storage_offset": host.storage_offset(),
            "dtype": host.dtype,
        }
        made = torch.Tensor._make_wrapper_subclass(cls, host.size(), **layout, device=DEVICE)
        made.host = host
        return made

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return compute(func, args, kwargs or {})

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # torch's stub is that of a function
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        raise NotImplementedError(f"{func} on the pretend GPU")


def host(value: Any) -> Any:
    """Return what the CPU computes with: the values of a pretend tensor, or the CPU in place of the GPU."""
    if isinstance(value, OnGpu):
        return value.host
    return "cpu" if names_gpu(value) else value


def names_gpu(value: Any) -> bool:
    """Return whether a value is the name of the GPU."""
    return isinstance(value, (str, torch.device)) and str(value).startswith("cuda")


def compute(func: Any, args: tuple, kwargs: dict) -> Any:
    """Compute a torch function on the CPU. Its results are where its tensors are, or where it was told to put them."""
    name, owner = getattr(func, "__name__", ""), getattr(getattr(func, "__self__", None), "__name__", "")
    if name == "__get__" and owner in PROPERTIES:
        return PROPERTIES[owner]
    if name in ("numpy", "__array__"):
        raise TypeError("can't convert cuda:0 device type tensor to numpy")
    tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
    gpu = [tensor for tensor in tensors if isinstance(tensor, OnGpu)]
    others = [t for t in tensors if not isinstance(t, OnGpu) and t.dim() and t.device.type != "meta"]
    if name in ("__getitem__", "__setitem__") and isinstance(args[0], OnGpu):
        others = [t for t in others if t.dtype not in (torch.int64, torch.bool)]  # indices may be on the CPU
    if gpu and others and name not in (*MOVES, *ANY_DEVICE):
        raise RuntimeError(f"{name}: tensors on cuda:0 and cpu, {[tuple(t.shape) for t in tensors]}")
    if name == "_has_compatible_shallow_copy_type":
        return False
    told = [kwargs.get("device"), *(args[1:] if name == "to" else ())]
    devices = [device for device in told if isinstance(device, (str, torch.device))]
    on_gpu = names_gpu(devices[0]) if devices else bool(gpu) and name != "cpu"
    values = tree_map(host, args), tree_map(host, kwargs)
    result = func(*values[0], **values[1])
    if name in MOVES and on_gpu != isinstance(args[0], OnGpu) and result is values[0][0]:
        result = result.clone()  # a move between devices never returns a view
    known = {id(host(tensor)): tensor for tensor in tensors}  # in place, the result is the argument
    return tree_map(lambda value: known[id(value)] if id(value) in known else _placed(value, on_gpu), result)


def _placed(value: Any, on_gpu: bool) -> Any:
    plain = isinstance(value, torch.Tensor) and not isinstance(value, OnGpu) and value.device.type == "cpu"
    return OnGpu(value) if on_gpu and plain else value


class _Factories(TorchFunctionMode):
    """Computes functions that make tensors on the GPU or move tensors to it."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        leaves = tree_leaves((args, kwargs))
        if func is not torch.device and any(isinstance(leaf, OnGpu) or names_gpu(leaf) for leaf in leaves):
            return compute(func, args, kwargs)
        return func(*args, **kwargs)


class _Generator(torch.Generator):
    """A generator of the CPU, whichever device it is asked for."""

    def __new__(cls, device: Any = "cpu") -> "_Generator":
        return super().__new__(cls, "cpu")  # type: ignore[call-arg]  # unknown to torch's stubs


@contextlib.contextmanager
def pretend_gpu(major: int = 9, minor: int = 0) -> Iterator[None]:
    """Give `torch.cuda` one device of this compute capability; device "cuda" works as the module says."""
    facts = SimpleNamespace(multi_processor_count=4, major=major, minor=minor, total_memory=80 << 30, name="pretended")
    answers = {
        "_lazy_init": None, "is_available": True, "device_count": 1, "current_device": 0, "synchronize": None,
        "get_device_properties": facts, "get_device_capability": (major, minor), "get_device_name": facts.name,
        "device_of": contextlib.nullcontext(), "is_current_stream_capturing": False, "set_device": None,
        "empty_cache": None, "mem_get_info": (80 << 30, 80 << 30), "max_memory_allocated": 0,
        "reset_peak_memory_stats": None,
    }  # fmt: skip
    with contextlib.ExitStack() as stack:
        for name, answer in answers.items():
            stack.enter_context(patch(f"torch.cuda.{name}", lambda *_, answer=answer: answer))
        stack.enter_context(patch("torch.Generator", _Generator))
        stack.enter_context(patch("vllm_latq.quantize.lattice.trellis_plane.nearest_rings", _nearest_rings))
        stack.enter_context(_Factories())
        yield


def _nearest_rings(targets: torch.Tensor, prices: torch.Tensor, rate: int) -> torch.Tensor:
    """Search on the processor: the pretend GPU runs no kernel, and a test compares both searches."""
    return nearest_rings_on_processor(targets.cpu(), prices.cpu(), rate).to(targets.device)
