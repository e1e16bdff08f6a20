"""Random layers that are as hard to quantize as trained ones: heavy tails, correlated inputs."""

import torch


def heavy_tailed_layer(rows: int, cols: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Weight float32 [rows, cols] and the Hessian float32 [cols, cols] of correlated inputs."""
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(rows, cols, generator=generator)
    weight *= 0.02 * (1 + 3 * torch.rand(rows, cols, generator=generator).pow(12))
    inputs = torch.randn(3 * cols, cols, generator=generator)
    inputs = inputs + 0.5 * inputs.roll(1, 1) + 0.3 * inputs[:, :1]
    return weight, inputs.T @ inputs
