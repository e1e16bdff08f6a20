"""Corrected targets: the weights to round when a layer's inputs already come from a quantized prefix.

With X the inputs of the original model, Y those of the quantized prefix and W the layer, the quantized layer Q should
give Y Q^T = X W^T. The lattice is that of Y; the target, in the coordinates of the weights, is

    W' = argmin_V ||Y V^T - X W^T||^2 + lambda ||V - W||^2 = W + ((Y^T Y + lambda I)^-1 Y^T (X - Y) W^T)^T

(Birnick, "The Lattice Geometry of Neural Network Quantization", section 3; Remark 5.3 of Zhang et al., "Provable
Post-Training Quantization: Theoretical Analysis of OPTQ and Qronos").

The linear that writes last to the residual stream of its block can do more: with R the block's outputs in the original
model, and S the outputs of the block with its own weights after the quantized prefix, Y Q^T should give Y W^T + R - S.
Then Y^T (R - S) takes the place of Y^T (X - Y) W^T: the change that the prefix made to the stream is taken back, as far
as Y tells. (The block's other linears are corrected, too, after S is seen: correcting all of them by half does better
than by the whole.)

Invariant: only Y and the difference X - Y enter, never a difference of large Gram matrices; without drift W' is W.
"""

from dataclasses import dataclass

import torch

from vllm_latq.quantize.lattice.factor import Factor, require_finite

_ROWS_AT_ONCE = 1024


@dataclass
class Drift:
    """Difference X - Y of the inputs of a linear: sums over calibration tokens, float32 [c, c].

    Attributes:
        cross: Y^T (X - Y).
        energy: (X - Y)^T (X - Y).
        residual: Y^T (R - S), [c, r], of the one linear that reads this input and writes last to the residual stream;
            None for a linear whose outputs should be X W^T.
        missed: ||R - S||^2, a scalar; None where `residual` is.
    """

    cross: torch.Tensor
    energy: torch.Tensor
    residual: torch.Tensor | None = None
    missed: torch.Tensor | None = None

    @classmethod
    def zeros(cls, channels: int, device: torch.device) -> "Drift":
        """Return the drift of no tokens."""
        return cls(*(torch.zeros(channels, channels, dtype=torch.float32, device=device) for _ in range(2)))

    def add(self, inputs: torch.Tensor, original: torch.Tensor) -> None:
        """Accumulate tokens of both streams, float32 [n, c]."""
        delta = original - inputs
        self.cross.addmm_(inputs.T, delta)
        self.energy.addmm_(delta.T, delta)

    def add_residual(self, inputs: torch.Tensor, missed: torch.Tensor) -> None:
        """Accumulate tokens of Y, float32 [n, c], and of R - S, [n, r]."""
        if self.residual is None or self.missed is None:
            self.residual, self.missed = inputs.new_zeros(inputs.shape[1], missed.shape[1]), inputs.new_zeros(())
        self.residual.addmm_(inputs.T, missed)
        self.missed += missed.square().sum()

    @property
    def sums(self) -> list[torch.Tensor]:
        """Tensors that were accumulated."""
        return [part for part in (self.cross, self.energy, self.residual, self.missed) if part is not None]

    def mean(self, tokens: int) -> "Drift":
        """Return the means over so many tokens."""
        return Drift(*(part / tokens for part in self.sums))

    def pull(self, weight: torch.Tensor, rows: slice = slice(None)) -> torch.Tensor:
        """Return M^T Y, float64 [r, c]; M, (X - Y) W^T or R - S, is what the linear's own outputs lack.

        Args:
            weight: W, or some of its rows.
            rows: the rows of `weight` in W.
        """
        if self.residual is not None:
            return self.residual[:, rows].to(torch.float64).T
        return weight.to(torch.float64) @ self.cross.to(torch.float64).T

    def missing(self, weight: torch.Tensor) -> float:
        """Return ||M||^2, float64, for all rows of W."""
        if self.missed is not None:
            return float(self.missed)
        energy = self.energy.to(torch.float64)
        return sum(float((w.double() @ energy * w.double()).sum()) for w in weight.split(_ROWS_AT_ONCE))


def corrected_target(weight: torch.Tensor, factor: Factor, drift: Drift, correction: float = 1.0) -> torch.Tensor:
    """Return W + correction * (W' - W), in the dtype of the weight.

    Args:
        weight: [r, c].
        factor: of Y^T Y, with its damping.
        drift: of the same inputs.
        correction: 1 for the minimiser W', 0 for W; in between guards against fitting the calibration tokens.
    """
    pull = drift.pull(weight)
    # H[order][:, order]^-1 = U^T U.
    delta = torch.empty_like(pull)
    delta[:, factor.order] = pull[:, factor.order] @ factor.upper.T @ factor.upper
    return weight + (correction * delta).to(weight.dtype)


def output_error(quantized: torch.Tensor, weight: torch.Tensor, gram: torch.Tensor, drift: Drift | None) -> float:
    """Return ||Y Q^T - X W^T||^2 summed over outputs and tokens, float64; Y = X where there is no drift.

    For a linear that writes last to the residual stream: ||Y Q^T - (Y W^T + R - S)||^2.

    Args:
        quantized, weight: Q and W, [r, c].
        gram: Y^T Y, [c, c].
        drift: of the same inputs.
    """
    gram = gram.to(torch.float64)
    total = 0.0 if drift is None else drift.missing(weight)
    for start in range(0, len(weight), _ROWS_AT_ONCE):
        rows = slice(start, start + _ROWS_AT_ONCE)
        delta = quantized[rows].to(torch.float64) - weight[rows].to(torch.float64)
        total += float((delta @ gram * delta).sum())
        if drift is not None:
            # Y Q^T - Y W^T - M
            total -= 2 * float((delta * drift.pull(weight[rows], rows)).sum())
    return max(total, 0.0)


def output_energy(weight: torch.Tensor, gram: torch.Tensor, drift: Drift | None = None) -> float:
    """Return ||X W^T||^2, or ||Y W^T + R - S||^2, float64, for weight [r, c]; arguments as for `output_error`."""
    return output_error(torch.zeros_like(weight), weight, gram, drift)


@dataclass(frozen=True)
class LayerErrors:
    """Errors of a quantized layer, as in LayerRecord.

    Attributes:
        total: ||Y Q^T - X W^T||^2, or with the residual's target ||Y Q^T - (Y W^T + R - S)||^2.
        relative: total, relative to the squared norm of the outputs that should be reached.
        rounding: ||Y (Q - W')^T||^2, which the bound covers.
    """

    total: float
    relative: float
    rounding: float


def measure_errors(
    quantized: torch.Tensor,
    weight: torch.Tensor,
    target: torch.Tensor,
    gram: torch.Tensor,
    drift: Drift | None,
) -> LayerErrors:
    """Measure the errors of Q against W, and against the rounded target W'; arguments as for `output_error`."""
    require_finite(gram, "Hessian")
    total = output_error(quantized, weight, gram, drift)
    energy = output_energy(weight, gram, drift)
    rounding = total if drift is None else output_error(quantized, target, gram, None)
    return LayerErrors(total, total / energy if energy else 0.0, rounding)
