"""Scales in eighths of an octave."""

from collections.abc import Iterator, Mapping

import torch

from vllm_latq.errors import CheckpointError
from vllm_latq.format.problems import problem

OCTAVE = 8  # exponents count eighths of an octave
# Between these limits every product with a value of the trellis code is a normal number of float32, or zero.
LEAST_SCALE, MOST_SCALE = 2.0**-116, 2.0**116


def octave_eighths(exponents: torch.Tensor) -> torch.Tensor:
    """Return 2^(e / 8) for int8 [n], [n] on the CPU: the power in float64, rounded to float32, on any machine."""
    powers = torch.tensor(
        [2.0 ** (exponent / OCTAVE) for exponent in range(-128, 128)], dtype=torch.float64, device="cpu"
    )
    return powers.to(torch.float32)[exponents.cpu().to(torch.int64) + 128]


def scale_problem(tensors: Mapping[str, torch.Tensor], where: str) -> Iterator[CheckpointError]:
    """Check that the scale is finite and positive, and in range with the powers of rows and columns."""
    scale = tensors["scale"]
    if not torch.isfinite(scale).all() or not (scale > 0).all():
        yield problem(f"{where}.scale", "a finite, positive scale", str(scale.tolist()))
        return
    row, column = (tensors[name].to(torch.float64) / OCTAVE for name in ("row_exponents", "column_exponents"))
    largest = float(scale.double() * row.max().exp2() * column.max().exp2().clamp(min=1))
    smallest = float(scale.double() * row.min().exp2() * column.min().exp2().clamp(max=1))
    if not LEAST_SCALE <= smallest <= largest <= MOST_SCALE:
        expected = f"a scale of {LEAST_SCALE:.9g} to {MOST_SCALE:.9g} with every exponent"
        yield problem(f"{where}.scale", expected, f"{smallest:.9g} to {largest:.9g}")
