"""Cases of the benchmark: layer shapes, random layers with their exact dense weights, and the correctness gate.

The dense weight is built from the integers, never from packed words: it shares nothing with what it checks.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, replace
from functools import partial
from typing import Any

import torch

from vllm_latq.kernels.bench.timing import copies_beyond_cache
from vllm_latq.kernels.configs import FUSED_LAUNCHES, SIMT, max_decode_rows
from vllm_latq.kernels.decode.dispatch import ssqr_matmul
from vllm_latq.kernels.decode.prefill import prefill_matmul
from vllm_latq.kernels.errors import require
from vllm_latq.kernels.layout.codes import codes_to_stream
from vllm_latq.kernels.layout.outliers import OutlierCsr
from vllm_latq.kernels.layout.weight import KernelWeight, prepare

# Merged layers of Qwen3-8B (qkv, o, gate and up, down), and a square one of a larger model.
SHAPES = ((6144, 4096), (4096, 4096), (24576, 4096), (4096, 12288), (8192, 8192))
LARGE = (57344, 8192)  # gate and up of Llama-3-70B
BITS = (2, 3, 4)
OUTLIER_RATES = (0.0, 0.005, 0.01, 0.02, 0.05)
ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 512)
GROUP_SIZE = 128
# Relative to the largest output. Decode rounds once to bfloat16 (2^-9) after float32 sums. Prefill rounds the weights,
# too. A layer of experts rounds between its products, and rounds outputs twice.
DECODE_TOLERANCE, PREFILL_TOLERANCE, EXPERT_TOLERANCE = 2**-8, 2**-7, 2**-6
_CHUNK_ROWS = 4096  # rows of the float64 reference at a time


@dataclass(frozen=True)
class Case:
    """One product: weight [rows, cols] of `bits` with a rate of outliers, times m activation rows."""

    rows: int
    cols: int
    bits: int
    outlier_rate: float
    m: int
    path: str  # "tensor_core", "simt", "prefill" or "experts"

    @property
    def layer(self) -> tuple[int, int, int, float]:
        """Cases that share a weight have this in common."""
        return self.rows, self.cols, self.bits, self.outlier_rate


@dataclass(frozen=True)
class Layer:
    """weight: prepared; dense: the same, float32 [rows, cols], exact."""

    weight: KernelWeight
    dense: torch.Tensor


def paths(m: int, bits: int) -> tuple[str, ...]:
    """Return the kernels that can serve m rows."""
    widest = max_decode_rows(bits)
    if m > FUSED_LAUNCHES * widest:
        return ("prefill",)
    if m > widest:
        return "tensor_core", "prefill"
    return ("tensor_core", "simt") if m == 1 else ("tensor_core",)  # of more rows SIMT takes 6 instructions and more


def all_cases(
    shapes: tuple[tuple[int, int], ...] = (*SHAPES, LARGE),
    bits: tuple[int, ...] = BITS,
    rates: tuple[float, ...] = OUTLIER_RATES,
    rows: tuple[int, ...] = ROWS,
) -> Iterator[Case]:
    """Yield every combination, cases of one layer next to each other."""
    for shape in shapes:
        for width in bits:
            for rate in rates:
                for m in rows:
                    for path in paths(m, width):
                        yield Case(*shape, width, rate, m, path)


def make_layer(case: Case, device: torch.device, seed: int = 0) -> Layer:
    """Return a random layer; outliers are evenly likely everywhere, and most lie far beyond the largest inlier."""
    generator = torch.Generator(device=device).manual_seed(seed)
    shape, zero_point = (case.rows, case.cols), 1 << (case.bits - 1)
    codes = torch.randint(0, 2 * zero_point, shape, generator=generator, device=device, dtype=torch.uint8)
    groups = case.cols // GROUP_SIZE
    scales = (torch.rand(case.rows, groups, generator=generator, device=device) * 0.01 + 0.005).bfloat16()
    dense = ((codes.float() - zero_point).view(case.rows, groups, GROUP_SIZE) * scales.float()[:, :, None]).view(shape)
    outliers = None
    if case.outlier_rate:
        mask = torch.rand(shape, generator=generator, device=device) < case.outlier_rate
        codes[mask] = zero_point
        row_ptr = torch.zeros(case.rows + 1, dtype=torch.int32, device=device)
        row_ptr[1:] = mask.sum(1).cumsum(0)
        values = torch.randn(int(mask.sum()), generator=generator, device=device).mul(0.05 * zero_point).bfloat16()
        outliers = OutlierCsr(row_ptr, mask.nonzero()[:, 1].to(torch.int32), values)
        dense[mask] = values.float()
    packed = codes_to_stream(codes, case.bits)
    return Layer(prepare(packed, case.bits, GROUP_SIZE, case.cols, scales, outliers=outliers), dense)


def activations(m: int, cols: int, device: torch.device) -> torch.Tensor:
    """m random rows, bfloat16 [m, cols], the same each time."""
    generator = torch.Generator(device=device).manual_seed(m)
    return torch.randn(m, cols, generator=generator, device=device).bfloat16()


def rotating(weight: KernelWeight, cache: int) -> list[KernelWeight]:
    """Return the weight and copies of it that together exceed a cache of this many bytes."""
    tensors = {field.name: getattr(weight, field.name) for field in fields(weight)}
    copied: dict[str, Any] = {name: part for name, part in tensors.items() if isinstance(part, torch.Tensor)}
    copies = copies_beyond_cache(weight.storage_bytes(), cache)
    others = (replace(weight, **{name: part.clone() for name, part in copied.items()}) for _ in range(copies - 1))
    return [weight, *others]


def product(case: Case) -> Callable[[torch.Tensor, KernelWeight], torch.Tensor]:
    """Return the function of x and a weight that the case launches."""
    if case.path == "prefill":
        return prefill_matmul
    return partial(ssqr_matmul, config=SIMT if case.path == "simt" else None)


def relative_error(y: torch.Tensor, x: torch.Tensor, dense: torch.Tensor) -> float:
    """Largest deviation of y [m, rows] from the float64 product, over the largest output; infinite for NaN."""
    expected = torch.cat([x.double() @ part.double().t() for part in dense.split(_CHUNK_ROWS)], 1)
    error = float((y.double() - expected).abs().max() / expected.abs().max())
    return error if error == error else float("inf")


def gate(case: Case, error: float, tolerance: float | None = None) -> None:
    """Raise KernelInputError if a product is wrong: it is not timed then. `tolerance`: of peers; None for ours."""
    if tolerance is None:
        tolerance = {"prefill": PREFILL_TOLERANCE, "experts": EXPERT_TOLERANCE}.get(case.path, DECODE_TOLERANCE)
    require(error <= tolerance, f"correctness of {case}", f"a relative error up to {tolerance}", error)
