"""Random weights of the trellis code, whose rings are random bits."""

from collections.abc import Sequence

import torch

from vllm_latq.coding.trellis.code import RATES, tile_words
from vllm_latq.coding.trellis.layout import tile_rates, units
from vllm_latq.format.encodings.trellis import TrellisWeight
from vllm_latq.kernels.layout.trellis import TrellisOperands, TrellisTensors, prepare_trellis


def random_trellis_weight(
    rows: int, cols: int, rates: Sequence[int] = RATES, kept: float = 0.001, seed: int = 0
) -> TrellisWeight:
    """Return a weight with units of the given rates, in turns at random, and a share of kept weights."""
    generator = torch.Generator().manual_seed(seed)
    choice = torch.randint(len(rates), units(rows, cols), generator=generator)
    unit_rates = torch.tensor(rates)[choice].to(torch.uint8)
    words = int(tile_rates(unit_rates, rows, cols).sum()) * tile_words(1)
    positions = (torch.rand(rows * cols, generator=generator) < kept).nonzero()[:, 0]

    def integers(least: int, most: int, *shape: int) -> torch.Tensor:
        return torch.randint(least, most + 1, shape, generator=generator)

    return TrellisWeight(
        scale=torch.rand(1, generator=generator) * 0.02 + 0.01,
        row_exponents=integers(-16, 15, rows).to(torch.int8),
        column_exponents=integers(-16, 15, cols).to(torch.int8),
        column_importance=integers(-50, 50, cols).to(torch.int8),
        rates=unit_rates,
        trellis=integers(-(2**31), 2**31 - 1, words).to(torch.int32),
        kept_positions=positions.to(torch.int32),
        kept_values=(torch.randn(len(positions), generator=generator) * 0.2).to(torch.bfloat16),
    )


def operands_of(weights: Sequence[TrellisWeight], device: torch.device | str = "cpu") -> TrellisOperands:
    """Return weights of one input, which share what belongs to their columns, as the kernels read them."""
    names = TrellisTensors.__dataclass_fields__
    linears = [TrellisTensors(**{name: getattr(weight, name).to(device) for name in names}) for weight in weights]
    return prepare_trellis(linears, weights[0].column_exponents.to(device), weights[0].order.to(device))
