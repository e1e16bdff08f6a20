"""Error bounds of OPTQ in terms of the calibration inputs, for nearest and for stochastic rounding.

Zhang et al., "Provable Post-Training Quantization: Theoretical Analysis of OPTQ and Qronos": Theorem 3.3, Corollary 3.6
and Theorem 4.7, for an unbounded grid of one step, X [m, N] with its columns in rounding order, H = X^T X + lambda I.
Both theorems bound the same quantity, max_t D_t, by the conditioning of X; with the factor at hand, `Factor.diagonal`
itself gives the sharper constant.

Invariant: every bound is for one output channel (l2) or for all of them with the stated probability (l-infinity).
"""

import math
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class ErrorBounds:
    """Bounds of the error in one norm.

    Attributes:
        output: of X (w - q).
        weight: of w - q.
    """

    output: float
    weight: float


def projection_constant(inputs: torch.Tensor, ridge: float) -> float:
    """Return C_infinity(X, lambda)^2 of Theorem 4.7, an upper bound of max_t D_t, from Lemma B.1.

    Column j <= N - m is nearly spanned by the columns after it, which gives the factor lambda / (sigma_min^2 + lambda).
    The text of Theorem 3.3 takes the smallest *non-zero* singular value there; its proof (Lemma B.1) needs the smallest
    of all m. For inputs of deficient row rank that is zero, and the wording would promise too little error.

    Args:
        inputs: float64 [m, N], columns in rounding order.
        ridge: lambda, positive.
    """
    tokens, channels = inputs.shape
    norms = inputs.square().sum(0)
    for j in range(channels - tokens):
        later = inputs[:, j + 1 :]
        smallest = max(float(torch.linalg.eigvalsh(later @ later.T)[0]), 0.0)
        norms[j] *= ridge / (smallest + ridge)
    return float(norms.max()) + ridge


def l2_bounds(inputs: torch.Tensor, ridge: float, step: float, stochastic: bool = False) -> ErrorBounds:
    """Return the bounds of Theorem 3.3: sqrt(N) step / 2 C_2, and over sqrt(lambda); twice both if stochastic."""
    channels = inputs.shape[1]
    mean = float(inputs.square().sum()) / channels + ridge
    constant = min(projection_constant(inputs, ridge), mean)
    output = math.sqrt(channels * constant) * step * (1.0 if stochastic else 0.5)
    return ErrorBounds(output, output / math.sqrt(ridge))


def trace_bounds(gram: torch.Tensor, ridge: float, step: float, stochastic: bool = False) -> ErrorBounds:
    """Return the bounds of Corollary 3.6, which takes only the trace and the largest eigenvalue of X^T X [N, N]."""
    channels = gram.shape[0]
    mean = float(gram.diagonal().mean())
    largest = float(torch.linalg.eigvalsh(gram)[-1])
    half = math.sqrt(channels) * step * (1.0 if stochastic else 0.5)
    return ErrorBounds(half * math.sqrt(min(mean + ridge, largest)), half * math.sqrt(mean / ridge + 1))


def stochastic_bounds(
    constant: float, ridge: float, step: float, shape: tuple[int, int, int], failure: float
) -> ErrorBounds:
    """Return the l-infinity bounds of stochastic rounding over all outputs (Theorem 4.7 in the form of Remark 4.5).

    Args:
        constant: C_infinity^2 from `projection_constant`, or the largest D_t, which it bounds.
        ridge: lambda.
        step: of the grid.
        shape: tokens m, input channels N, output channels N'.
        failure: probability with which either bound may be exceeded.
    """
    tokens, channels, rows = shape
    spread = step * math.sqrt(2 * math.pi * math.log(math.sqrt(2) * (tokens + channels) * rows / failure) * constant)
    return ErrorBounds(spread, spread / math.sqrt(ridge))
