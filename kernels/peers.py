"""Other weight-only kernels for the benchmark, where they are installed: vLLM's Marlin (4 bits) and gemlite.

The only file of this folder that imports them, inside the functions. Each peer quantizes a weight its own way, without
outliers, and is held to its own dequantized weight.
"""

import importlib.util
import inspect
from collections.abc import Callable
from typing import Any

import torch

Product = Callable[[torch.Tensor], torch.Tensor]


def installed() -> dict[str, tuple[int, ...]]:
    """The bit widths that each importable peer serves."""
    widths = {"marlin": ("vllm", (4,)), "gemlite": ("gemlite", (2, 4))}
    return {name: bits for name, (module, bits) in widths.items() if importlib.util.find_spec(module)}


def make(name: str, dense: torch.Tensor, bits: int, group_size: int) -> tuple[Product, torch.Tensor, int]:
    """A peer's product x -> y for a weight like `dense` [rows, cols], the weight it stands for, and its bytes."""
    return {"marlin": _marlin, "gemlite": _gemlite}[name](dense, bits, group_size)


def _marlin(dense: torch.Tensor, bits: int, group_size: int) -> tuple[Product, torch.Tensor, int]:
    from vllm.model_executor.layers.quantization.utils import marlin_utils
    from vllm.model_executor.layers.quantization.utils.marlin_utils_test import marlin_quantize
    from vllm.scalar_type import scalar_types

    weight = dense.t().contiguous().bfloat16()
    # Older releases also take and return what act-order needs.
    extra = {"act_order": False} if "act_order" in inspect.signature(marlin_quantize).parameters else {}
    reference, packed, scales = marlin_quantize(weight, scalar_types.uint4b8, group_size, **extra)[:3]
    empty = torch.empty(0, dtype=torch.int32, device=dense.device)
    options: dict[str, Any] = {
        "weight": packed,
        "weight_scale": scales,
        "weight_zp": empty,
        "g_idx": empty,
        "g_idx_sort_indices": empty,
        "workspace": marlin_utils.marlin_make_workspace_new(dense.device),
        "wtype": scalar_types.uint4b8,
        "output_size_per_partition": dense.shape[0],
        "input_size_per_partition": dense.shape[1],
        "is_k_full": True,
    }
    known = inspect.signature(marlin_utils.apply_gptq_marlin_linear).parameters
    options = {key: value for key, value in options.items() if key in known}
    return (
        lambda x: marlin_utils.apply_gptq_marlin_linear(x, **options),
        reference.t().float(),
        packed.nbytes + scales.nbytes,
    )


def _gemlite(dense: torch.Tensor, bits: int, group_size: int) -> tuple[Product, torch.Tensor, int]:
    from gemlite.core import DType, GemLiteLinearTriton

    rows, cols = dense.shape
    zero_point, grouped = 1 << (bits - 1), dense.view(rows, -1, group_size)
    scales = (grouped.abs().amax(2, keepdim=True) / zero_point).bfloat16()
    codes = (grouped / scales.float()).round().clamp(-zero_point, zero_point - 1) + zero_point
    reference = ((codes - zero_point) * scales.float()).view(rows, cols)
    types = {"input_dtype": DType.BF16, "output_dtype": DType.BF16}
    linear = GemLiteLinearTriton(bits, group_size=group_size, in_features=cols, out_features=rows, **types)
    zeros = torch.full_like(scales, zero_point)
    linear.pack(codes.to(torch.uint8).view(rows, cols), scales.view(-1, 1), zeros.view(-1, 1), None)
    return linear, reference, rows * cols * bits // 8 + 2 * scales.nbytes
