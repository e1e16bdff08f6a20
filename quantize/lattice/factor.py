"""The lattice of a layer: rounding orders and the factor of its damped Hessian.

Invariant of a Factor, with p = order and H the damped Hessian:

    H[p][:, p] = M M^T,   M upper triangular,   upper = U = M^-1,   so  H[p][:, p]^-1 = U^T U
    diagonal[t] = D_t = M_tt^2 = 1 / U_tt^2

D is the diagonal of the LDL decomposition of H in the reverse of the rounding order, which is the order Babai's
algorithm orthogonalises in (Chen, Hoefler, Alistarh, "The Geometry of LLM Quantization: GPTQ as Babai's Nearest Plane
Algorithm", ICLR 2026, Theorems 4 and 5; called "GPTQ as Babai" below, with algorithms numbered as in its
first version).
All of it is computed in float64 on the device of H.
"""

from dataclasses import dataclass
from functools import cached_property

import torch

from vllm_latq.errors import LAYER, ConfigError, NumericalError
from vllm_latq.quantize.lattice.choices import ORDERS

MAX_DAMPING = 1.0
_PIVOT_BLOCK = 64
_ASYMMETRY = 1e-3


@dataclass(frozen=True)
class Factor:
    """Triangular factor of a damped Hessian in a rounding order.

    Attributes:
        order: int64 [c]; order[t] is the column rounded at step t.
        upper: float64 [c, c], U with H[order][:, order]^-1 = U^T U.
        diagonal: float64 [c], D_t = 1 / U_tt^2 in rounding order; sum D_t (w'_t - q_t)^2 is the loss of a row.
        damping: relative damping that was used; larger than asked for if H did not factorise with less.
        ridge: added to the diagonal: damping * mean(diag(H)).
        undamped: float64 [c, c], H in its original column order.
    """

    order: torch.Tensor
    upper: torch.Tensor
    diagonal: torch.Tensor
    damping: float
    ridge: float
    undamped: torch.Tensor

    @property
    def hessian(self) -> torch.Tensor:
        """Damped Hessian, float64 [c, c], in the original column order (a fresh tensor)."""
        damped = self.undamped.clone()
        damped.diagonal().add_(self.ridge)
        return damped

    @property
    def importance(self) -> torch.Tensor:
        """D_t of each column, float64 [c], in the original column order."""
        importance = torch.empty_like(self.diagonal)
        importance[self.order] = self.diagonal
        return importance

    @cached_property
    def propagation32(self) -> torch.Tensor:
        """U with its rows divided by its diagonal, float32 [c, c]; kept because a search rounds many times."""
        return self._propagation().to(torch.float32)

    def propagation(self, dtype: torch.dtype) -> torch.Tensor:
        """Return U with its rows divided by its diagonal, [c, c] in `dtype`.

        Row t says how the error w' - q of step t moves the columns rounded after it.
        """
        return self.propagation32 if dtype == torch.float32 else self._propagation().to(dtype)

    def unit_triangle(self) -> torch.Tensor:
        """Return V, unit upper triangular float64 [c, c], with H[order][:, order] = V diag(D) V^T.

        V is the inverse of U / diag(U). Column t says how the errors w - q of the columns before step t move the column
        of step t.
        """
        identity = torch.eye(len(self.order), dtype=torch.float64, device=self.order.device)
        return torch.linalg.solve_triangular(self._propagation(), identity, upper=True, unitriangular=True)

    def residuals(self, delta: torch.Tensor) -> torch.Tensor:
        """Return sqrt(D_t) (q_t - w'_t), float64 [r, c] in the original column order: squares that sum to the loss.

        Args:
            delta: q - w, [r, c]; the residuals are its product with M, in rounding order.
        """
        residuals = torch.empty(delta.shape, dtype=torch.float64, device=delta.device)
        permuted = delta[:, self.order].to(torch.float64)
        residuals[:, self.order] = torch.linalg.solve_triangular(self.upper, permuted, upper=True, left=False)
        return residuals

    @cached_property
    def spread(self) -> torch.Tensor:
        """sum_k (U_kt / U_tt)^2 of each column, float64 [c], in the original column order.

        The error w - q of an entry is the sum of its own residual and of the residuals fed back to it. Where all
        residuals cost alike, as steps of 1 / sqrt(D) make them, the mean of D_t (w - q)_t^2 is the mean cost of one
        residual times this sum.
        """
        spread = torch.empty_like(self.diagonal)
        spread[self.order] = (self.upper / self.upper.diagonal()).square().sum(0)
        return spread

    def _propagation(self) -> torch.Tensor:
        return self.upper / self.upper.diagonal()[:, None]


def factorize(hessian: torch.Tensor, order: str | torch.Tensor = "act", damping: float = 0.01) -> Factor:
    """Factorise H + lambda I, lambda = damping * mean(diag(H)).

    If the Cholesky factorisation fails, or loses its digits, the damping is raised tenfold up to MAX_DAMPING; the
    value that worked is recorded in the result.

    Args:
        hessian: float32 or float64 [c, c], X^T X, symmetric. Zero rows (dead inputs) are fine.
        order: one of ORDERS, or the order itself, int64 [c].
        damping: relative, positive.

    Raises:
        NumericalError: H is not finite, not symmetric, all zero, or not positive definite at the largest damping.
    """
    if isinstance(order, str) and order not in ORDERS:
        raise ConfigError("order", f"one of {', '.join(ORDERS)}", repr(order))
    if not 0 < damping < float("inf"):
        raise ConfigError("damping", "a positive number", repr(damping))
    undamped = _checked(hessian)
    mean_diagonal = float(undamped.diagonal().mean()) if undamped.numel() else 1.0
    current = damping
    while True:
        ridge = current * mean_diagonal
        damped = undamped.clone()
        damped.diagonal().add_(ridge)
        columns = rounding_order(damped, order) if isinstance(order, str) else order
        # Unnamed, or the copy would live until the factor is found, beside the copies which that takes.
        damped = damped[columns][:, columns]
        upper = inverse_factor(damped, ridge)
        if upper is not None:
            return Factor(columns, upper, upper.diagonal().pow(-2), current, ridge, undamped)
        if current >= MAX_DAMPING:
            raise NumericalError(
                "hessian",
                f"a positive definite Hessian at a damping of at most {max(MAX_DAMPING, damping):g}",
                f"a Cholesky factorisation that fails at damping {current:g}",
                "Its calibration activations are broken or far too correlated: calibrate on more and other text.",
            )
        current = min(current * 10, MAX_DAMPING)


def rounding_order(hessian: torch.Tensor, name: str) -> torch.Tensor:
    """Return the sequence in which columns are rounded (GPTQ's sense of order), int64 [c].

    natural: 0 .. c-1. act: descending diagonal of H (GPTQ's act_order). min-pivot: the reverse of the order in which
    pivoted Cholesky picks the smallest remaining diagonal ("GPTQ as Babai", Algorithm 4), O(c^3).

    Args:
        hessian: [c, c], symmetric positive (semi-)definite.
        name: one of ORDERS.
    """
    if name == "natural":
        return torch.arange(hessian.shape[0], device=hessian.device)
    if name == "act":
        return torch.argsort(hessian.diagonal(), descending=True, stable=True)
    if name == "min-pivot":
        return _smallest_pivots(hessian).flip(0)
    raise ConfigError("order", f"one of {', '.join(ORDERS)}", repr(name))


def require_finite(tensor: torch.Tensor, what: str) -> None:
    """Raise NumericalError naming the first entry of a 2-d `tensor` that is NaN or infinite."""
    # Cheaper than isfinite().all(): a sum is finite unless an entry is not, or it overflows, which the mask settles.
    if torch.isfinite(tensor.sum(dtype=torch.float64)):
        return
    bad = (~torch.isfinite(tensor)).nonzero()
    if not len(bad):
        return
    row, col = (int(index) for index in bad[0])
    raise NumericalError(
        what,
        f"finite {what}",
        f"{float(tensor[row, col])} at [{row}, {col}] and {len(bad)} such entries in all",
        "The model or its activations overflow: check the source checkpoint and its dtype.",
    )


def _checked(hessian: torch.Tensor) -> torch.Tensor:
    if hessian.dim() != 2 or hessian.shape[0] != hessian.shape[1]:
        raise NumericalError("hessian", "a square Hessian", f"shape {tuple(hessian.shape)}")
    require_finite(hessian, "Hessian")
    hessian = hessian.to(torch.float64)
    diagonal = hessian.diagonal()
    if not hessian.numel():
        return hessian
    if float(diagonal.min()) < 0 or float(diagonal.max()) == 0:
        raise NumericalError(
            "hessian",
            "a Hessian X^T X with a non-negative diagonal that is not all zero",
            f"a diagonal between {float(diagonal.min()):g} and {float(diagonal.max()):g}",
            "No calibration activation reached this layer, or H is not a Gram matrix. Calibrate on other text, or "
            f"leave the layer out, with --ignore {LAYER}",
        )
    skew = float((hessian - hessian.T).abs().max())
    if skew > _ASYMMETRY * float(diagonal.max()):
        raise NumericalError("hessian", "a symmetric Hessian", f"entries that differ by {skew:g} across it")
    return hessian


def inverse_factor(permuted: torch.Tensor, ridge: float) -> torch.Tensor | None:
    """Return U = M^-1 for M M^T = permuted, M upper triangular, float64 [c, c]; None if that fails numerically.

    Args:
        permuted: float64 [c, c], the damped Hessian in rounding order.
        ridge: lower bound of its smallest eigenvalue.
    """
    # Cholesky gives lower triangles; of the matrix with both axes reversed, it gives M with both axes reversed.
    triangle, info = torch.linalg.cholesky_ex(permuted.flip(0, 1))
    if int(info) != 0:
        return None
    triangle = triangle.flip(0, 1)
    # In exact arithmetic no D_t is below the smallest eigenvalue, hence below the ridge. A D_t below half of
    # the ridge consists of rounding errors.
    pivots = triangle.diagonal().square()
    if pivots.numel() and not float(pivots.min()) >= ridge / 2:
        return None
    # In place of the identity. Column by column, as LAPACK wants it, or it would work on copies.
    upper = torch.eye(len(triangle), dtype=triangle.dtype, device=triangle.device).T
    return torch.linalg.solve_triangular(triangle, upper, upper=True, out=upper)


def _smallest_pivots(hessian: torch.Tensor) -> torch.Tensor:
    """Return columns in the order in which Cholesky with the smallest remaining diagonal picks them, int64 [c].

    Blocked as LAPACK's pstrf: inside a block of pivots only the diagonal and the pivots' own rows are brought up to
    date; the rest of the matrix takes the whole block in one matmul and loses the picked columns.

        schur: [remaining, remaining]     panel: [block, remaining], the rows of the factor picked in this block
    """
    schur = hessian.to(torch.float64)
    names = torch.arange(len(schur), device=schur.device)
    picked = []
    # A semi-definite matrix runs out of pivots: its remaining diagonal is rounding error, never to be divided by.
    largest = float(schur.diagonal().max()) if len(names) else 0.0
    floor = torch.finfo(torch.float64).eps * largest or 1.0
    while len(names):
        remaining = schur.diagonal().clone()
        panel = schur.new_empty(min(_PIVOT_BLOCK, len(names)), len(names))
        pivots = []
        for step in range(len(panel)):
            pivot = int(remaining.argmin())
            pivots.append(pivot)
            row = torch.addmv(schur[pivot], panel[:step].T, panel[:step, pivot], alpha=-1)
            panel[step] = row / row[pivot].clamp(min=floor).sqrt()
            remaining -= panel[step].square()
            remaining[pivots] = torch.inf
        picked.append(names[pivots])
        keep = torch.ones(len(names), dtype=torch.bool, device=names.device)
        keep[pivots] = False
        names, panel = names[keep], panel[:, keep]
        schur = schur[keep][:, keep].addmm_(panel.T, panel, alpha=-1)
    return torch.cat(picked) if picked else names
