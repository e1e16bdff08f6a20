"""Other weight-only kernels for the benchmark, where they are installed: vLLM's Marlin (4 bits) and gemlite.

The only file of this folder that imports them, inside the functions. Each peer quantizes a weight its own way, without
outliers, and is held to its own dequantized weight. Each runs as its release does by default. gemlite: 0.6.0 or newer,
because older ones fail inside the autotuner of Triton 3.9 (`object of type 'generator' has no len()`).
"""

import copy
import importlib.metadata
import importlib.util
import inspect
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from vllm_latq.kernels.bench.timing import copies_beyond_cache

Product = Callable[[torch.Tensor], torch.Tensor]
MARLIN_BLOCKS_PER_PROCESSOR = 4  # of the locks that vLLM itself allocates
PEERS = {"marlin": ("vllm", (4,)), "gemlite": ("gemlite", (2, 4))}  # the package, and bit widths
TOLERANCE = 2**-6  # of the largest output: peers round their scaled weights, and gemlite sums, to bfloat16


@dataclass(frozen=True)
class Peer:
    """products: x -> y, each with a copy of the weight; reference: float32 [rows, cols]; bytes: of one copy.

    tolerance: of its error against float64, over the largest output.
    """

    products: list[Product]
    reference: torch.Tensor
    bytes: int
    tolerance: float = TOLERANCE


def installed() -> dict[str, tuple[int, ...]]:
    """The bit widths that each importable peer serves."""
    return {name: bits for name, (module, bits) in PEERS.items() if importlib.util.find_spec(module)}


def versions() -> dict[str, str]:
    """Versions of the packages that the importable peers are part of."""
    found = {module: "unknown" for module, _ in PEERS.values() if importlib.util.find_spec(module)}
    for module in found:
        with suppress(importlib.metadata.PackageNotFoundError):
            found[module] = importlib.metadata.version(module)
    return found


def make(name: str, dense: torch.Tensor, bits: int, group_size: int, cache: int) -> Peer:
    """A peer for a weight like `dense` [rows, cols], with enough copies for a cache of so many bytes."""
    return {"marlin": _marlin, "gemlite": _gemlite}[name](dense, bits, group_size, cache)


def _marlin(dense: torch.Tensor, bits: int, group_size: int, cache: int) -> Peer:
    from vllm.model_executor.layers.quantization.utils import marlin_utils
    from vllm.model_executor.layers.quantization.utils.marlin_utils_test import marlin_quantize
    from vllm.scalar_type import scalar_types

    weight = dense.t().contiguous().bfloat16()
    # Older releases also take and return what act-order needs.
    extra: dict[str, Any] = {"act_order": False} if "act_order" in inspect.signature(marlin_quantize).parameters else {}
    reference, packed, scales = marlin_quantize(weight, scalar_types.uint4b8, group_size, **extra)[:3]
    empty = torch.empty(0, dtype=torch.int32, device=dense.device)
    options: dict[str, Any] = {
        "weight_zp": empty,
        "g_idx": empty,
        "g_idx_sort_indices": empty,
        # A workspace of our own: without one, a launch outside of an engine would allocate and clear it each time.
        "workspace": marlin_utils.marlin_make_workspace_new(dense.device, MARLIN_BLOCKS_PER_PROCESSOR),
        "wtype": scalar_types.uint4b8,
        "output_size_per_partition": dense.shape[0],
        "input_size_per_partition": dense.shape[1],
        "is_k_full": True,
    }
    known = inspect.signature(marlin_utils.apply_gptq_marlin_linear).parameters
    options = {key: value for key, value in options.items() if key in known}
    size = packed.nbytes + scales.nbytes
    products: list[Product] = [
        partial(marlin_utils.apply_gptq_marlin_linear, weight=packed.clone(), weight_scale=scales.clone(), **options)
        for _ in range(copies_beyond_cache(size, cache))
    ]
    return Peer(products, reference.t().float(), size)


def _gemlite(dense: torch.Tensor, bits: int, group_size: int, cache: int) -> Peer:
    from gemlite.core import DType, GemLiteLinearTriton

    rows, cols = dense.shape
    zero_point, grouped = 1 << (bits - 1), dense.view(rows, -1, group_size)
    scales = (grouped.abs().amax(2, keepdim=True) / zero_point).bfloat16()
    codes = (grouped / scales.float()).round().clamp(-zero_point, zero_point - 1) + zero_point
    reference = ((codes - zero_point) * scales.float()).view(rows, cols)
    types = {"input_dtype": DType.BF16, "output_dtype": DType.BF16}
    linear = GemLiteLinearTriton(bits, group_size=group_size, in_features=cols, out_features=rows, **types)
    zeros = torch.full_like(scales, zero_point)  # one number for all would cost it a seventh more instructions
    linear.pack(codes.to(torch.uint8).view(rows, cols), scales.view(-1, 1), zeros.view(-1, 1), None)
    size = sum(part.nbytes for part in (linear.W_q, linear.scales, linear.zeros))
    products = [linear, *(copy.deepcopy(linear) for _ in range(copies_beyond_cache(size, cache) - 1))]
    # Up to 4 rows each 16 to 128 columns are a part, and from Hopper on the parts are added in bfloat16: for 768 parts
    # that is wrong by 6% to 9% (simulated).
    coarse = dense.is_cuda and torch.cuda.get_device_capability(dense.device) >= (9, 0)
    return Peer(products, reference, size, 2**-3 if coarse else TOLERANCE)
