"""The rounding of one linear within its share of the bits."""

import torch

from vllm_latq.quantize.lattice.grams import LayerStatistics
from vllm_latq.quantize.methods import latq
from vllm_latq.quantize.methods.latq import KEPT_BITS, Share, fitted_scales, input_lattice, output_lattice, unit_losses


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
