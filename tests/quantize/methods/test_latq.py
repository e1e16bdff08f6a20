"""The rounding of one linear within its share of the bits."""

import math

import torch

from vllm_latq.quantize.lattice.grams import LayerStatistics
from vllm_latq.quantize.methods import latq
from vllm_latq.quantize.methods.latq import KEPT_BITS, Share, fitted_scales, unit_losses
from vllm_latq.quantize.methods.lattices import input_lattice, output_lattice


def test_a_linear_that_runs_short_keeps_fewer_weights() -> None:
    """One weight in 200 is at 5 scales. There is room for a quarter of them, and none was foreseen."""
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(64, 256, generator=generator)
    weight[torch.rand(weight.shape, generator=generator) < 0.005] = 5.4
    statistics = LayerStatistics(torch.eye(256), [torch.eye(64)], 1000, "linear")
    inputs, outputs = input_lattice(statistics, 0.01, "linear"), output_lattice(statistics, "linear")
    losses = unit_losses({"linear": weight}, inputs, {"linear": outputs})["linear"]
    share = Share(losses, losses.bits(losses.price(1.3 * weight.numel(), 0), 0) + KEPT_BITS * 20)
    rounding = latq._Rounding("linear", weight, inputs, outputs, fitted_scales({"linear": weight}))
    found = rounding.within(share, 0)
    assert found.weight.storage_bits() <= share.bits
    assert torch.equal(found.weight.rates, share.rates(0))
    assert len(found.weight.kept_positions) <= 20 < losses.outlying / 2
    assert found.loss / 2 <= found.loss_bound


def test_a_linear_spends_what_was_reserved_for_weights_that_it_does_not_keep() -> None:
    """8 % of the weights are equal, the others zero. Of those, 904 are beyond 4 scales: too many to keep."""
    generator = torch.Generator().manual_seed(0)
    weight = (torch.rand(128, 512, generator=generator) < 0.08).float()
    statistics = LayerStatistics(torch.eye(512), [torch.eye(128)], 1000, "linear")
    inputs, outputs = input_lattice(statistics, 0.01, "linear"), output_lattice(statistics, "linear")
    losses = unit_losses({"linear": weight}, inputs, {"linear": outputs})["linear"]
    share = Share(losses, 1.8 * weight.numel())
    assert losses.bits(math.inf, losses.outlying) > share.bits
    rounding = latq._Rounding("linear", weight, inputs, outputs, fitted_scales({"linear": weight}))
    found = rounding.within(share, losses.outlying)
    # A unit is an eighth of the weights: a step of its rate is 3.5 % of the share.
    assert 0.93 * share.bits < found.weight.storage_bits() <= share.bits
    assert len(found.weight.kept_positions) < losses.outlying / 2
    assert found.loss / 2 <= found.loss_bound
