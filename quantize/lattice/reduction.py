"""Lattice reduction before nearest plane: LLL on the basis of a layer's damped Hessian, for HPTQ.

With one scale and no clipping all rows of a layer share one lattice, so one unimodular T serves them all:

    H' = T^T H T,   w' = T^-1 w,   z' = nearest plane of w' on H',   z = T z'   have the loss (sz - w)^T H (sz - w)

An exchange of neighbours lowers the trace of D if and only if they violate Lovasz' condition with delta = 1: LLL
descends on the very trace that the bound is made of and may be stopped at any time. It starts from the min-pivot order.

Invariant: T is unimodular, checked in exact integer arithmetic; integers that are returned, coded and counted are
integers on the original basis.
"""

import dataclasses
import math
from dataclasses import dataclass

import numpy as np
import torch

from vllm_latq.errors import NumericalError
from vllm_latq.quantize.lattice.factor import Factor, inverse_factor, rounding_order
from vllm_latq.quantize.lattice.nearest_plane import Plane, Rounding, nearest_plane

# Below 1, so that rounding errors cannot exchange two columns for ever.
DELTA = 0.999
# Above 1/2, for the same reason.
SIZE = 0.51
# Entries of T, its inverse and their products must be exact in float64, with room for c products.
LARGEST_ENTRY = 2.0**20
# Each exchange costs about 30 microseconds at c = 384 (one CPU core), and every prefix of them is a valid basis.
EXCHANGES_PER_COLUMN = 200


@dataclass(frozen=True)
class Reduction:
    """Better basis of the same lattice.

    Attributes:
        transform: float64 [c, c] with integer entries: column t is the basis vector rounded at step t.
        inverse: of the transform, float64 with integer entries.
        factor: of T^T H T, in its own (natural) order.
    """

    transform: torch.Tensor
    inverse: torch.Tensor
    factor: Factor

    def nearest_plane(self, weight: torch.Tensor, scale: torch.Tensor, plane: Plane = nearest_plane) -> Rounding:
        """Round with a scalar scale and no end of the grid, on the reduced basis, in float64.

        Integers are on the original basis; loss and bound are those of the reduced basis.
        """
        transformed = weight.to(torch.float64) @ self.inverse.T
        rounding = plane(transformed, self.factor, scale)
        integers = rounding.z.to(torch.float64) @ self.transform.T
        largest = float(integers.abs().max()) if integers.numel() else 0.0
        if largest >= 1 << 31:
            hint = "Round without --reduction, or raise the damping."
            raise NumericalError("reduction", "integers below 2^31", f"{largest:g}", hint)
        return dataclasses.replace(rounding, z=integers.to(torch.int32))


def reduce_lattice(factor: Factor) -> Reduction | None:
    """Return a reduced basis of the lattice of `factor`; None if LLL finds none with a smaller trace of D."""
    if not factor.diagonal.numel():
        return None
    hessian = factor.hessian
    columns = rounding_order(hessian, "min-pivot").flip(0)
    basis = torch.linalg.cholesky(hessian[columns][:, columns], upper=True)
    reduced, _ = lll(basis.cpu().numpy())
    # Back to the original columns, and to the order of rounding: last basis vector first.
    transform = torch.zeros_like(hessian)
    transform[columns] = torch.from_numpy(reduced).to(hessian)
    transform = transform.flip(1).contiguous()
    inverse = torch.linalg.inv(transform).round()
    identity = torch.eye(len(transform), dtype=transform.dtype, device=transform.device)
    small = float(transform.abs().max()) < LARGEST_ENTRY and float(inverse.abs().max()) < LARGEST_ENTRY
    if not small or not torch.equal(transform @ inverse, identity):
        return None
    gram = transform.T @ hessian @ transform
    gram = (gram + gram.T) / 2
    upper = inverse_factor(gram, 0.0)
    if upper is None:
        return None
    diagonal = upper.diagonal().pow(-2)
    if float(diagonal.sum()) >= float(factor.diagonal.sum()):
        return None
    order = torch.arange(len(gram), device=gram.device)
    on_basis = Factor(order, upper, diagonal, factor.damping, 0.0, gram)
    return Reduction(transform, inverse, on_basis)


def lll(basis: np.ndarray) -> tuple[np.ndarray, int]:
    """Lenstra, Lenstra, Lovasz: size-reduce a column, then advance or exchange it with the one before.

    Args:
        basis: float64 [c, c], upper triangular; its columns are the basis vectors.

    Returns:
        T float64 [c, c] with integer entries, such that basis @ T is reduced, and the number of exchanges.
    """
    # Columns are contiguous: most of the work is on them.
    work = np.asfortranarray(basis.copy())
    size = len(work)
    transform = np.asfortranarray(np.eye(size))
    exchanges, k = 0, 1
    while k < size and exchanges < EXCHANGES_PER_COLUMN * size:
        _size_reduce(work, transform, k)
        length = math.hypot(work[k - 1, k], work[k, k])
        if length**2 >= DELTA * work[k - 1, k - 1] ** 2:
            k += 1
            continue
        _exchange(work, transform, k, length)
        exchanges, k = exchanges + 1, max(k - 1, 1)
    for column in range(k, size):
        _size_reduce(work, transform, column)
    return transform, exchanges


def _exchange(work: np.ndarray, transform: np.ndarray, k: int, length: float) -> None:
    """Exchange columns k - 1 and k; a rotation of rows k - 1 and k makes `work` triangular again."""
    cosine, sine = work[k - 1, k] / length, work[k, k] / length
    for matrix, rows in ((work, k + 1), (transform, len(transform))):
        matrix[:rows, [k - 1, k]] = matrix[:rows, [k, k - 1]]
    above, below = work[k - 1, k - 1 :].copy(), work[k, k - 1 :].copy()
    work[k - 1, k - 1 :] = cosine * above + sine * below
    work[k, k - 1 :] = cosine * below - sine * above
    work[k, k - 1] = 0.0
    if work[k, k] < 0:
        work[k, k:] *= -1


def _size_reduce(work: np.ndarray, transform: np.ndarray, k: int) -> None:
    """Take multiples of earlier columns off column k until it is within SIZE of every diagonal entry before it.

    Without it, entries overflow float64 on Hessians of nearly low rank; mostly there is nothing to do.
    """
    limits, i = SIZE * np.abs(work.diagonal()[:k]), k
    while len(far := np.nonzero(np.abs(work[:i, k]) > limits[:i])[0]):
        i = int(far[-1])
        multiple = np.rint(work[i, k] / work[i, i])
        work[: i + 1, k] -= multiple * work[: i + 1, i]
        transform[:, k] -= multiple * transform[:, i]
