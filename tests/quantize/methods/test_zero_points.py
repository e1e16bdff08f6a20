"""Why the format has mid-rise grids, and no zero point for each group: on trained layers one buys what it costs."""

import math
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from vllm_latq.quantize.calibration.stream import model_hessians
from vllm_latq.quantize.calibration.windows import calibration_samples
from vllm_latq.quantize.lattice.factor import factorize
from vllm_latq.quantize.lattice.nearest_plane import nearest_plane
from vllm_latq.quantize.lattice.outliers import Grid
from vllm_latq.quantize.model.decoder import Decoder
from vllm_latq.quantize.recipe import Recipe

GROUP = 128
KINDS = ("q_proj", "o_proj", "gate_proj", "down_proj")
# Offsets of the grid, in steps.
MIDTREAD, MIDRISE = (0.0,), (0.5,)
# Zero points at multiples of half a step: three bits for each group at least.
ANY = (-1.0, -0.5, 0.0, 0.5, 1.0, 1.5)
COST = 3 / GROUP


@pytest.fixture(scope="module")
def layers(mini_model: Path, calibration_text: Path) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Weight and Hessian of four linears of the bundled model's second block."""
    decoder = Decoder(mini_model, "cpu")
    samples = calibration_samples(decoder, Recipe("gptq", num_samples=32, seq_len=128), str(calibration_text)).tokens
    hessians = {name: found.matrix for found in model_hessians(decoder, samples) for name in found.shared.names}

    def chosen() -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        with decoder.block(1):
            for name, linear in decoder.linears(1).items():
                if name.endswith(KINDS):
                    yield linear.weight.detach().float().clone(), hessians[name]

    return list(chosen())


def steps_and_offsets(weight: torch.Tensor, bits: int, offsets: tuple[float, ...]) -> tuple[torch.Tensor, torch.Tensor]:
    """For each group the scale and the offset of the grid, in steps, with the least squared error: [r, groups] each."""
    low, high = Grid.of_bits(bits).low, Grid.of_bits(bits).high
    grouped = weight.reshape(len(weight), -1, GROUP)
    largest = grouped.abs().amax(2) / high
    scale, offset, least = largest.clone(), torch.zeros_like(largest), torch.full_like(largest, math.inf)
    for shrink in torch.linspace(0.3, 1.15, 50):
        step = (largest * shrink).bfloat16().float()
        for tried in offsets:
            points = (grouped / step[..., None] - tried).round_().clamp_(low, high) + tried
            error = (points * step[..., None] - grouped).square_().sum(2)
            better = error < least
            scale, least = torch.where(better, step, scale), torch.where(better, error, least)
            offset.masked_fill_(better, tried)
    return scale, offset


def loss(weight: torch.Tensor, hessian: torch.Tensor, bits: int, offsets: tuple[float, ...]) -> float:
    """Return the loss of GPTQ on these grids: a coset of the lattice for each row."""
    scale, offset = steps_and_offsets(weight, bits, offsets)
    shifted = weight - (scale * offset).repeat_interleave(GROUP, 1)
    found = nearest_plane(shifted, factorize(hessian), scale, Grid.of_bits(bits), group_size=GROUP)
    return float(found.loss.sum())


@pytest.mark.parametrize("bits", [2, 3])
def test_zero_points_do_not_pay(layers, bits: int) -> None:
    ratios = {offsets: 0.0 for offsets in (MIDRISE, ANY)}
    for weight, hessian in layers:
        plain = loss(weight, hessian, bits, MIDTREAD)
        for offsets in ratios:
            ratios[offsets] += math.log2(loss(weight, hessian, bits, offsets) / plain) / len(layers)
    # A bit is worth a factor of four in the squared error.
    assert ratios[ANY] > ratios[MIDRISE] - 2 * COST - 0.02
    assert ratios[MIDRISE] < (-0.4 if bits == 2 else -0.05)
