"""Cases of the benchmark: layer shapes, random layers with their exact dense weights, and the correctness gate.

The dense weight of packed codes is built from the integers, never from words, and that of a trellis bit by bit: it
shares nothing with what it checks.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial
from typing import Any, Generic, TypeVar

import torch

from vllm_latq.kernels.bench.timing import copies_beyond_cache
from vllm_latq.kernels.configs import (
    FUSED_LAUNCHES,
    SIMT,
    TRELLIS_LAUNCHES,
    TRELLIS_REGIMES,
    decode_config,
    max_decode_rows,
    spreads,
)
from vllm_latq.kernels.decode.dispatch import ssqr_matmul, trellis_matmul
from vllm_latq.kernels.decode.prefill import prefill_matmul
from vllm_latq.kernels.decode.trellis_prefill import prefill_trellis
from vllm_latq.kernels.errors import require
from vllm_latq.kernels.layout.codes import codes_to_stream
from vllm_latq.kernels.layout.outliers import SLICE_ROWS, OutlierCsr, bucket, with_headroom
from vllm_latq.kernels.layout.trellis import (
    FACTORS,
    MULTIPLIERS,
    TILE,
    TILE_ROWS,
    TWO_TERMS_FROM,
    UNIT_COLUMNS,
    TrellisOperands,
    TrellisTensors,
    prepare_trellis,
)
from vllm_latq.kernels.layout.weight import KernelWeight, device_facts, prepare, with_spread

# Merged layers of Qwen3-8B (qkv, o, gate and up, down), and a square one of a larger model.
SHAPES = ((6144, 4096), (4096, 4096), (24576, 4096), (4096, 12288), (8192, 8192))
LARGE = (57344, 8192)  # gate and up of Llama-3-70B
BITS = (2, 3, 4)
OUTLIER_RATES = (0.0, 0.005, 0.01, 0.02, 0.05)
ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 512)
GROUP_SIZE = 128
KEPT_RATE = 3e-4  # of a trellis: weights that are kept exactly
# Relative to the largest output. Decode rounds once to bfloat16 (2^-9) after float32 sums. Prefill rounds the weights,
# too. A layer of experts rounds between its products, and rounds outputs twice.
DECODE_TOLERANCE, PREFILL_TOLERANCE, EXPERT_TOLERANCE = 2**-8, 2**-7, 2**-6
_CHUNK_ROWS = 4096  # rows of the float64 reference at a time
_CHUNK_TILES = 1 << 14  # tiles of a trellis that are decoded at a time

W = TypeVar("W", bound=KernelWeight | TrellisOperands)


@dataclass(frozen=True)
class Case:
    """One product: weight [rows, cols] of `bits` with a rate of outliers, times m activation rows."""

    rows: int
    cols: int
    bits: int
    outlier_rate: float
    m: int
    path: (
        str  # "tensor_core", "simt", "spread", "prefill", "experts"; "trellis", "trellis_prefill" or "trellis_experts"
    )

    @property
    def is_trellis(self) -> bool:
        """True for a weight in a trellis code."""
        return self.path.startswith("trellis")

    @property
    def is_spread(self) -> bool:
        """True for the kernel that takes outliers by row tile and superblock."""
        return self.path == "spread"

    @property
    def layer(self) -> tuple[int, int, int, float, bool, bool]:
        """Cases that share a weight have this in common."""
        return self.rows, self.cols, self.bits, self.outlier_rate, self.is_trellis, self.is_spread


@dataclass(frozen=True)
class Layer(Generic[W]):
    """weight: prepared; dense: the same, float32 [rows, cols], exact."""

    weight: W
    dense: torch.Tensor


def trellis_paths(m: int) -> tuple[str, ...]:
    """Return the kernels of trellis codes that can serve m rows."""
    widest = TRELLIS_REGIMES[-1]
    if m > TRELLIS_LAUNCHES * widest:
        return ("trellis_prefill",)
    return ("trellis", "trellis_prefill") if m > widest else ("trellis",)


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
    spread: bool = False,
) -> Iterator[Case]:
    """Yield every combination, cases of one layer next to each other; a trellis has KEPT_RATE in place of `rates`.

    spread: with the other kernel for outliers, too.
    """
    for shape in shapes:
        for width in bits:
            for rate in rates:
                for m in rows:
                    for path in paths(m, width):
                        yield Case(*shape, width, rate, m, path)
                for m in rows if spread and rate else ():
                    if m <= FUSED_LAUNCHES * max_decode_rows(width):
                        yield Case(*shape, width, rate, m, "spread")
            for m in rows:
                for path in trellis_paths(m):
                    yield Case(*shape, width, KEPT_RATE, m, path)


def layer_of(case: Case, device: torch.device, seed: int = 0) -> Layer[Any]:
    """Return a random layer for a case, with what serving prepares for a weight like it."""
    if case.is_trellis:
        return make_trellis(case, device, seed)
    _, arch = device_facts(device)
    return make_layer(case, device, seed, case.is_spread or spreads(case.bits, arch, GROUP_SIZE))


def make_layer(case: Case, device: torch.device, seed: int = 0, spread: bool = False) -> Layer[KernelWeight]:
    """Return a random layer; outliers are evenly likely everywhere, and most lie far beyond the largest inlier.

    spread: lay outliers out by row tile and superblock, too, with as much room as serving gives them.
    """
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
    weight = prepare(packed, case.bits, GROUP_SIZE, case.cols, scales, outliers=outliers)
    if spread and outliers is not None:
        assert weight.slice_ptr is not None, "of a weight with outliers"
        # The kernel is compiled for the room.
        room = SLICE_ROWS * bucket(with_headroom(int(weight.slice_ptr[-1])))
        weight = with_spread(weight, outliers, room)
    return Layer(weight, dense)


def make_trellis(case: Case, device: torch.device, seed: int = 0) -> Layer[TrellisOperands]:
    """Return a random layer in a trellis code: units of three rates around its bits, columns in a random order."""
    generator = torch.Generator(device=device).manual_seed(seed)

    def integers(low: int, high: int, *shape: int) -> torch.Tensor:
        return torch.randint(low, high, shape, generator=generator, device=device)

    rows, cols = case.rows, case.cols
    rates = integers(2 * case.bits - 1, 2 * case.bits + 2, -(-rows // TILE_ROWS), -(-cols // UNIT_COLUMNS))
    spread = rates.repeat_interleave(TILE_ROWS // TILE, 0).repeat_interleave(UNIT_COLUMNS // TILE, 1)
    spread = spread[: -(-rows // TILE), : -(-cols // TILE)]
    words = integers(-(2**31), 2**31, 4 * int(spread.sum())).to(torch.int32)
    row_exponents, column_exponents = integers(-8, 8, rows), integers(-8, 8, cols)
    order = torch.randperm(cols, generator=generator, device=device)
    dense = torch.empty(rows, cols, device=device)
    dense[:, order] = _decoded(words, spread)[:rows, :cols]
    dense *= 0.02 * 2 ** (row_exponents[:, None] / 8) * 2 ** (column_exponents / 8)
    kept = (torch.rand(rows * cols, generator=generator, device=device) < case.outlier_rate).nonzero()[:, 0]
    values = torch.randn(len(kept), generator=generator, device=device).mul(0.1).bfloat16()
    dense.view(-1)[kept] += values.float()
    tensors = TrellisTensors(
        scale=torch.full((1,), 0.02, device=device),
        row_exponents=row_exponents.to(torch.int8),
        rates=rates.to(torch.uint8),
        trellis=words,
        kept_positions=kept.to(torch.int32),
        kept_values=values,
    )
    return Layer(prepare_trellis([tensors], column_exponents.to(torch.int8), order), dense)


def _decoded(words: torch.Tensor, rates: torch.Tensor) -> torch.Tensor:
    """Return the weights of tiles of these rates, without scales, float32 [16 row tiles, 16 column tiles]."""
    tiles = torch.empty(rates.numel(), TILE, TILE, device=words.device)
    flat = rates.flatten()
    starts = 4 * (flat.cumsum(0) - flat)
    for rate in flat.unique().tolist():
        for chosen in (flat == rate).nonzero()[:, 0].split(_CHUNK_TILES):
            rings = words[starts[chosen][:, None] + torch.arange(4 * rate, device=words.device)]
            integers = _ring_integers(rings, rate, MULTIPLIERS[: 1 + (rate >= TWO_TERMS_FROM)])
            tiles[chosen] = integers * FACTORS[rate]
    return tiles.view(*rates.shape, TILE, TILE).transpose(1, 2).reshape(TILE * rates.shape[0], -1)


def _ring_integers(words: torch.Tensor, rate: int, multipliers: Sequence[int]) -> torch.Tensor:
    """Return the integers of tiles of a trellis code, int32 [tiles, 16, 16].

    Args:
        words: int32 [tiles, 4 * rate], the rings of 128 steps, the first bit of a word its highest.
        rate: bits per step.
        multipliers: of the hashes that are added.
    """
    device = words.device
    bits = (words[:, :, None] >> torch.arange(31, -1, -1, device=device) & 1).to(torch.uint8).flatten(1)
    before = torch.cat((bits[:, -16:], bits), 1)
    ends = torch.arange(rate, 128 * rate + 1, rate, device=device)
    window = torch.zeros(len(words), 128, dtype=torch.int64, device=device)
    for place in range(16):
        window = 2 * window + before[:, ends + place]
    first, second = torch.zeros_like(window), torch.zeros_like(window)
    for multiplier in multipliers:
        hashed = window * 0x10001 * multiplier
        of_bytes = [(hashed >> shift & 255) - 2 * (hashed >> shift & 128) for shift in (0, 8, 16, 24)]
        first, second = first + of_bytes[0] + of_bytes[2], second + of_bytes[1] + of_bytes[3]
    lane, register = torch.arange(128, device=device) // 4, torch.arange(128, device=device) % 4
    row, column = lane // 4 + 8 * (register % 2), 4 * (lane % 4) + 2 * (register // 2)
    tiles = torch.empty(len(words), 16, 16, dtype=torch.int32, device=device)
    tiles[:, row, column], tiles[:, row, column + 1] = first.to(torch.int32), second.to(torch.int32)
    return tiles


def activations(m: int, cols: int, device: torch.device) -> torch.Tensor:
    """m random rows, bfloat16 [m, cols], the same each time."""
    generator = torch.Generator(device=device).manual_seed(m)
    return torch.randn(m, cols, generator=generator, device=device).bfloat16()


def rotating(weight: W, cache: int) -> list[W]:
    """Return the weight and copies of it that together exceed a cache of this many bytes."""
    tensors = {field.name: getattr(weight, field.name) for field in fields(weight)}
    copied: dict[str, Any] = {name: part for name, part in tensors.items() if isinstance(part, torch.Tensor)}
    copies = copies_beyond_cache(weight.storage_bytes(), cache)
    others = (replace(weight, **{name: part.clone() for name, part in copied.items()}) for _ in range(copies - 1))
    return [weight, *others]


def spread_matmul(x: torch.Tensor, weight: KernelWeight) -> torch.Tensor:
    """Return x W^T by the kernel that spreads outliers, with the launch configuration of the other one."""
    rows = min(x.shape[0], max_decode_rows(weight.bits))
    config = replace(decode_config(rows, weight.bits, weight.arch, weight.group_size), spread=True)
    return ssqr_matmul(x, weight, config)


def product(case: Case) -> Callable[[torch.Tensor, Any], torch.Tensor]:
    """Return the function of x and a weight that the case launches."""
    fixed: dict[str, Callable[[torch.Tensor, Any], torch.Tensor]] = {
        "tensor_core": tensor_core_matmul,
        "simt": partial(ssqr_matmul, config=SIMT),
        "prefill": prefill_matmul,
        "spread": spread_matmul,
        "trellis": trellis_matmul,
        "trellis_prefill": prefill_trellis,
    }
    return fixed[case.path]


def tensor_core_matmul(x: torch.Tensor, weight: KernelWeight) -> torch.Tensor:
    """Return x W^T as dispatched, but by tensor cores where a row of the table would take the SIMT kernel."""
    if len(x) > 1 or weight.invariant:
        return ssqr_matmul(x, weight)
    return ssqr_matmul(x, weight, decode_config(1, weight.bits, weight.arch, weight.group_size, tensor_core=True))


def relative_error(y: torch.Tensor, x: torch.Tensor, dense: torch.Tensor) -> float:
    """Largest deviation of y [m, rows] from the float64 product, over the largest output; infinite for NaN."""
    expected = torch.cat([x.double() @ part.double().t() for part in dense.split(_CHUNK_ROWS)], 1)
    error = float((y.double() - expected).abs().max() / expected.abs().max())
    return error if error == error else float("inf")


def gate(case: Case, error: float, tolerance: float | None = None) -> None:
    """Raise KernelInputError if a product is wrong: it is not timed then. `tolerance`: of peers; None for ours."""
    if tolerance is None:
        others = {"prefill": PREFILL_TOLERANCE, "experts": EXPERT_TOLERANCE}
        tolerance = others.get(case.path.removeprefix("trellis_"), DECODE_TOLERANCE)
    require(error <= tolerance, f"correctness of {case}", f"a relative error up to {tolerance}", error)
