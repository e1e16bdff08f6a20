"""Other weight-only kernels for the benchmark, where they are installed: vLLM's Marlin (4 bits), gemlite and Humming.

The only file of this folder that imports them, inside the functions. Each peer quantizes a weight its own way, without
outliers, and is held to its own dequantized weight. Each runs as its release does by default. gemlite: 0.6.0 or newer,
because older ones fail inside the autotuner of Triton 3.9 (`object of type 'generator' has no len()`). Humming: the
package `humming-kernels`, with a CUDA toolkit's NVRTC, because it compiles its kernels when they are first launched. It
is called as vLLM calls it for packed integers.
"""

import copy
import importlib.metadata
import importlib.util
import inspect
import json
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from vllm_latq.kernels.bench.timing import copies_beyond_cache
from vllm_latq.kernels.layout.codes import codes_to_stream

Product = Callable[[torch.Tensor], torch.Tensor]
MARLIN_BLOCKS_PER_PROCESSOR = 4  # of the locks that vLLM itself allocates
HUMMING_ROWS, HUMMING_COLS = 256, 128  # to multiples of which vLLM pads a weight for Humming
HUMMING_LOCKS = 8  # of a multiprocessor, that vLLM allocates
# The module, the package that has it, and bit widths. Humming serves 2 to 8 bits.
PEERS = {
    "marlin": ("vllm", "vllm", (4,)),
    "gemlite": ("gemlite", "gemlite", (2, 4)),
    "humming": ("humming", "humming-kernels", (2, 3, 4, 8)),
}
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
    return {name: bits for name, (module, _, bits) in PEERS.items() if importlib.util.find_spec(module)}


def versions() -> dict[str, str]:
    """Versions of the packages that the importable peers are part of."""
    found = {package: "unknown" for module, package, _ in PEERS.values() if importlib.util.find_spec(module)}
    for package in found:
        with suppress(importlib.metadata.PackageNotFoundError):
            found[package] = importlib.metadata.version(package)
    return found


def make(name: str, dense: torch.Tensor, bits: int, group_size: int, cache: int) -> Peer:
    """A peer for a weight like `dense` [rows, cols], with enough copies for a cache of so many bytes."""
    return {"marlin": _marlin, "gemlite": _gemlite, "humming": _humming}[name](dense, bits, group_size, cache)


@dataclass(frozen=True)
class Rounded:
    """A weight rounded to the multiples of its groups' scales.

    Attributes:
        codes: uint8 [rows, cols], integers plus half their range.
        scales: bfloat16 [rows, groups].
        dense: float32 [rows, cols], what they stand for.
    """

    codes: torch.Tensor
    scales: torch.Tensor
    dense: torch.Tensor


def rounded(dense: torch.Tensor, bits: int, group_size: int) -> Rounded:
    """Round a weight [rows, cols] for the peers that leave this to their caller."""
    zero_point, grouped = 1 << (bits - 1), dense.view(dense.shape[0], -1, group_size)
    scales = (grouped.abs().amax(2, keepdim=True) / zero_point).bfloat16()
    integers = (grouped / scales.float()).round().clamp(-zero_point, zero_point - 1)
    codes = (integers + zero_point).to(torch.uint8).view_as(dense)
    return Rounded(codes, scales[..., 0], (integers * scales.float()).view_as(dense))


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
    weight = rounded(dense, bits, group_size)
    types = {"input_dtype": DType.BF16, "output_dtype": DType.BF16}
    linear = GemLiteLinearTriton(bits, group_size=group_size, in_features=cols, out_features=rows, **types)
    zeros = torch.full_like(weight.scales, 1 << (bits - 1))  # one number for all would cost it a seventh more
    linear.pack(weight.codes, weight.scales.reshape(-1, 1), zeros.view(-1, 1), None)
    size = sum(part.nbytes for part in (linear.W_q, linear.scales, linear.zeros))
    products = [linear, *(copy.deepcopy(linear) for _ in range(copies_beyond_cache(size, cache) - 1))]
    # Up to 4 rows each 16 to 128 columns are a part, and from Hopper on the parts are added in bfloat16: for 768 parts
    # that is wrong by 6% to 9% (simulated).
    coarse = dense.is_cuda and torch.cuda.get_device_capability(dense.device) >= (9, 0)
    return Peer(products, weight.dense, size, 2**-3 if coarse else TOLERANCE)


def _humming(dense: torch.Tensor, bits: int, group_size: int, cache: int) -> Peer:
    from humming.forward import humming_forward
    from humming.schema import HummingWeightSchema
    from humming.transform import prepare_and_transform_humming_tensors

    rows, cols = dense.shape
    weight = rounded(dense, bits, group_size)
    stored = {"weight": codes_to_stream(weight.codes, bits), "weight_scale": weight.scales}
    # Its schema can turn the integers into another type; then its transformation brings them into the kernel's order.
    schema, tensors = HummingWeightSchema(b_dtype=f"uint{bits}", weight_scale_group_size=group_size).convert_humming(
        tensors=stored,
        shape_n_stacks=[rows],
        shape_k_stacks=[cols],
        param_dtype=torch.bfloat16,
        device=dense.device,
    )
    config, tensors = prepare_and_transform_humming_tensors(
        tensors=tensors,
        shape_n=rows,
        shape_k=cols,
        weight_schema=schema,
        pad_n_to_multiple=HUMMING_ROWS,
        pad_k_to_multiple=HUMMING_COLS,
        torch_dtype=torch.bfloat16,
        device=dense.device,
    )
    size = sum(part.nbytes for part in tensors.values())
    processors = torch.cuda.get_device_properties(dense.device).multi_processor_count
    options: dict[str, Any] = {
        "locks": torch.zeros(HUMMING_LOCKS * processors, dtype=torch.int32, device=dense.device),
        "compute_config": json.dumps({"use_batch_invariant": False, "use_f16_accum": False, "gemm_type": "dense"}),
    }
    copies = [{name: part.clone() for name, part in tensors.items()} for _ in range(copies_beyond_cache(size, cache))]
    products: list[Product] = [partial(humming_forward, config, **copied, **options) for copied in copies]
    return Peer(products, weight.dense, size)
