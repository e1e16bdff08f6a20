"""Stochastic rounding: up with the fractional part as probability, so without bias.

Zhang et al., "Provable Post-Training Quantization: Theoretical Analysis of OPTQ and Qronos", Theorem 4.7, bound the
largest error of it over all outputs. A residual may be as long as the scale, instead of half of it.

Invariant: the draws of a layer depend on the recipe's seed and the layer's name, not on what was rounded before.
"""

import torch

# Largest residual, in scales; nearest rounding leaves at most 1/2.
REACH = 1.0
# Ratio of the bound s^2 on a squared residual to its mean s^2/6 over residuals that are uniform.
BOUND_TO_MEAN = 6


class Dither:
    """Random draws of one pass over a layer, one per weight, in rounding order."""

    def __init__(self, seed: int, device: torch.device) -> None:
        self.generator = torch.Generator(device).manual_seed(seed)

    def round_(self, values: torch.Tensor) -> torch.Tensor:
        """Round `values` in place, each up with its fractional part as probability."""
        draws = torch.rand(values.shape, generator=self.generator, dtype=values.dtype, device=values.device)
        return values.add_(draws).floor_()
