"""Random weights of every scheme and shape, the only place in the tests where they are made.

Tests of single kernels prepare their layers in tests/kernels/conftest.py; whole checkpoints are in `checkpoints`.
"""

from functools import cache

import torch

from helpers.trellis import greedy_trellis, random_trellis
from vllm_latq.coding.huffman.encoder import encode
from vllm_latq.format.encodings.huffman import HuffmanWeight
from vllm_latq.format.encodings.packed import PackedWeight
from vllm_latq.format.encodings.weight import Weight
from vllm_latq.format.scheme import LayerScheme


def poisoned(
    shape: int | tuple[int, ...],
    *more: int,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
) -> torch.Tensor:
    """Return, in place of `torch.empty`, a tensor of NaN, or of an integer that no index may be."""
    sizes = (shape, *more) if isinstance(shape, int) else shape
    return torch.full(sizes, float("nan") if dtype.is_floating_point else 2**31 - 1, dtype=dtype, device=device)


def gaussian_integers(shape: tuple[int, int], deviation: float, seed: int = 0) -> torch.Tensor:
    """Return rounded Gaussian numbers, int32 of the given shape."""
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(shape, generator=generator) * deviation).round().to(torch.int32)


def heavy_tailed_layer(rows: int, cols: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a layer as hard to quantize as trained ones, with heavy tails and correlated inputs.

    Returns:
        Its weight, float32 [rows, cols], and the Hessian of its inputs, float32 [cols, cols].
    """
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(rows, cols, generator=generator)
    weight *= 0.02 * (1 + 3 * torch.rand(rows, cols, generator=generator).pow(12))
    inputs = torch.randn(3 * cols, cols, generator=generator)
    inputs = inputs + 0.5 * inputs.roll(1, 1) + 0.3 * inputs[:, :1]
    return weight, inputs.T @ inputs


def packed_weight(
    bits: int,
    group_size: int,
    rows: int,
    cols: int,
    rate: float | None,
    seed: int = 0,
    midrise: bool = False,
    edges: bool = False,
) -> PackedWeight:
    """Return a packed weight of random codes; the scales of every third row are negative.

    Args:
        bits: of a code.
        group_size: columns that share a scale; -1 for one scale per row.
        rows: of the weight.
        cols: of the weight.
        rate: share of outliers; None for a weight that has no outlier arrays, 0 for one whose arrays are empty.
        seed: of all random numbers.
        midrise: codes stand for halves between integers.
        edges: the first row has no outlier, the last nothing else.
    """
    generator = torch.Generator().manual_seed(seed)
    half = 1 << (bits - 1)
    integers = torch.randint(-half, half, (rows, cols), generator=generator, dtype=torch.int32)
    groups = 1 if group_size == -1 else cols // group_size
    scales = (torch.rand(rows, groups, generator=generator) + 0.1).bfloat16()
    scales[::3] *= -1
    if rate is None:
        return PackedWeight.from_integers(integers, scales, bits, group_size, midrise=midrise)
    mask = torch.rand(rows, cols, generator=generator) < rate
    if edges:
        mask[0], mask[-1] = False, True
    values = torch.randn(rows, cols, generator=generator)
    return PackedWeight.from_integers(integers, scales, bits, group_size, mask, values, midrise)


def bits_and_group(scheme: LayerScheme) -> tuple[int, int]:
    """Return the bits and the group size of a packed scheme."""
    assert scheme.bits is not None
    assert scheme.group_size is not None
    return scheme.bits, scheme.group_size


def coded_weight(rows: int, cols: int, seed: int) -> HuffmanWeight:
    """Return a coded weight of Gaussian integers, the last row of which needs more than 4 bits."""
    generator = torch.Generator().manual_seed(seed)
    integers = (torch.randn(rows, cols, generator=generator) * 3).round().to(torch.int32)
    integers[-1] = 20 + torch.arange(cols, dtype=torch.int32) % 23
    scale = torch.rand(1, generator=generator) + 0.1
    return HuffmanWeight(scale, encode(integers))


def random_weight(scheme: LayerScheme, rows: int, cols: int, seed: int) -> Weight:
    """Return a random weight of any scheme; one with outliers has an empty and a full row of them."""
    if scheme.encoding == "trellis":
        return random_trellis(rows, cols, seed)
    if scheme.encoding != "packed":
        return coded_weight(rows, cols, seed)
    rate = 0.03 if scheme.outliers else None
    bits, group_size = bits_and_group(scheme)
    return packed_weight(bits, group_size, rows, cols, rate, seed, scheme.grid == "midrise", edges=scheme.outliers)


@cache
def tiny_weight(scheme: LayerScheme, shape: tuple[int, int], seed: int) -> Weight:
    """Return a random weight for a tiny checkpoint; a tenth are outliers where the scheme has them."""
    if scheme.encoding == "trellis":
        return random_trellis(*shape, seed, kept=0.1)
    generator = torch.Generator().manual_seed(seed)
    integers = (2 * torch.randn(shape, generator=generator)).round().to(torch.int32)
    if scheme.encoding == "huffman":
        integers[0, 0] = 2**24 + 1  # coded with ESCAPE; float32 cannot hold it
        return HuffmanWeight(torch.tensor([0.01]), encode(integers))
    bits, group_size = bits_and_group(scheme)
    half = 1 << (bits - 1)
    mask: torch.Tensor | None = torch.rand(shape, generator=generator) < 0.1
    values: torch.Tensor | None = torch.randn(shape, generator=generator)
    scales = (torch.rand(shape[0], scheme.groups(shape[1]), generator=generator) + 0.1).to(torch.bfloat16)
    integers = integers.clamp(-half, half - 1)
    if not scheme.outliers:
        mask = values = None
    return PackedWeight.from_integers(integers, scales, bits, group_size, mask, values, scheme.grid == "midrise")


def round_to_nearest(weight: torch.Tensor, scheme: LayerScheme) -> Weight:
    """Quantize a weight by rounding to nearest on scales of the largest magnitude in each group.

    A scheme with outliers keeps the largest 1% as they are.

    Args:
        weight: float32 [rows, cols].
        scheme: any.
    """
    if scheme.encoding == "trellis":
        return greedy_trellis(weight)
    if scheme.encoding == "huffman":
        scale = weight.std() / 3
        return HuffmanWeight(scale.reshape(1), encode((weight / scale).round().to(torch.int32)))
    bits, group_size = bits_and_group(scheme)
    half, midrise = 1 << (bits - 1), scheme.grid == "midrise"
    mask = weight.abs() > weight.abs().flatten().kthvalue(int(0.99 * weight.numel())).values
    inliers = weight.masked_fill(mask, 0) if scheme.outliers else weight
    grouped = inliers.view(weight.shape[0], scheme.groups(weight.shape[1]), -1)
    scales = (grouped.abs().amax(-1) / (half - 1)).clamp(min=1e-6).to(torch.bfloat16)
    steps = scales.float().repeat_interleave(grouped.shape[2], 1)
    offset = 0.5 * midrise
    integers = (weight / steps - offset).round().clamp(-half, half - 1).to(torch.int32)
    if not scheme.outliers:
        return PackedWeight.from_integers(integers, scales, bits, group_size, midrise=midrise)
    return PackedWeight.from_integers(integers, scales, bits, group_size, mask, weight - offset * steps, midrise)
