"""Random weights of any scheme, with the cases that cutting and decoding must get right."""

import torch

from vllm_latq.coding.huffman.encoder import encode
from vllm_latq.format.coded import HuffmanWeight, RansWeight, Weight
from vllm_latq.format.config import LayerScheme
from vllm_latq.format.packed import PackedWeight

RANS = LayerScheme("rans")
RANS_MIDRISE = LayerScheme("rans", grid="midrise")


def random_weight(scheme: LayerScheme, rows: int, cols: int, seed: int) -> Weight:
    """Random weights with an empty and a full row of outliers."""
    generator = torch.Generator().manual_seed(seed)
    if scheme.encoding != "packed":
        integers = (torch.randn(rows, cols, generator=generator) * 3).round().to(torch.int32)
        integers[-1] = 20 + torch.arange(cols, dtype=torch.int32) % 23
        if scheme.encoding == "rans":
            exponents = ((torch.arange(size) * 7 % 17 - 8).to(torch.int8) for size in (rows, cols))
            scale = torch.rand(1, generator=generator) + 0.1
            return RansWeight.from_integers(integers, scale, *exponents, scheme.grid == "midrise")
        return HuffmanWeight(torch.rand(1, generator=generator) + 0.1, encode(integers))
    half, midrise = 1 << (scheme.bits - 1), scheme.grid == "midrise"
    integers = torch.randint(-half, half, (rows, cols), generator=generator, dtype=torch.int32)
    scales = (torch.rand(rows, scheme.groups(cols), generator=generator) + 0.1).bfloat16()
    if not scheme.outliers:
        return PackedWeight.from_integers(integers, scales, scheme.bits, scheme.group_size, midrise=midrise)
    mask = torch.rand(rows, cols, generator=generator) < 0.03
    mask[0], mask[-1] = False, True
    values = torch.randn(rows, cols, generator=generator)
    return PackedWeight.from_integers(integers, scales, scheme.bits, scheme.group_size, mask, values, midrise)


def heavy_tailed_layer(rows: int, cols: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Weight float32 [rows, cols] and the Hessian float32 [cols, cols] of correlated inputs."""
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(rows, cols, generator=generator)
    weight *= 0.02 * (1 + 3 * torch.rand(rows, cols, generator=generator).pow(12))
    inputs = torch.randn(3 * cols, cols, generator=generator)
    inputs = inputs + 0.5 * inputs.roll(1, 1) + 0.3 * inputs[:, :1]
    return weight, inputs.T @ inputs
