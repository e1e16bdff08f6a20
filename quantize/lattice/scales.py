"""Static scales: computed on the original weights, before any update, for groups in the original column order.

Invariant: returned scales are the stored scales. They are rounded to bfloat16 before they are compared or used, are
finite and not zero, and an all-zero group has scale 1, unless its grid has no zero.
"""

import math
from functools import partial

import torch

from vllm_latq.errors import ConfigError, NumericalError
from vllm_latq.format.scheme import LayerScheme
from vllm_latq.quantize.lattice.choices import SCALE_METHODS
from vllm_latq.quantize.lattice.factor import Factor, require_finite
from vllm_latq.quantize.lattice.nearest_plane import nearest_plane
from vllm_latq.quantize.lattice.outliers import Grid

SCALE_DTYPE = torch.bfloat16
SHRINK_STEPS = 100
# Largest factor a search may apply; scale * factor * integer must stay finite.
_HEADROOM = 8
SMALLEST_SHRINK = 0.3
# Elements searched at once: on a CPU a chunk and its temporaries stay in cache (8M weights on 2 cores: 0.48 s, against
# 0.63 s with 2^17 and 0.72 s all at once); elsewhere the chunk only bounds memory.
_CPU_CHUNK, _DEVICE_CHUNK = 1 << 18, 1 << 25
# On 14 layers of a trained model, act-order, g128, without signs: the summed layer error falls to 0.85 (3 bits) and
# 0.90 (4 bits) of what plain MSE scales give. In 2 bits rows take the larger multiples, too.
MULTIPLES = (0.95, 0.975, 1.0, 1.025, 1.05, 1.075, 1.1, 1.15, 1.2, 1.25, 1.3, 1.4, 1.5, 1.6)
# Rows at a time, on all multiples in one pass, which on narrow layers costs little more than one multiple.
_FITTED_ROWS = 512


def group_scales(
    weight: torch.Tensor,
    grid: Grid,
    group_size: int,
    how: str = "mse",
    *,
    importance: torch.Tensor | None = None,
    power: int = 2,
    price: float = math.inf,
) -> torch.Tensor:
    """Choose one scale per row and group of input channels.

    absmax: s = max|w| / (2^(b-1) - 1 + offset). mse: the absmax scale times the factor in (0.3, 1] which minimises the
    squared (or cubed) error of rounding the group to the clipped grid, the best of 100 factors. signed: as mse, with a
    sign, which says on which side of zero the grid has its extra integer; it costs no bit and matters at 2 bits, where
    the grid is -2, -1, 0, 1.

    Args:
        weight: float32 or float64 [r, c].
        grid: bounded. With an offset of 1/2 no point is zero, so an all-zero group takes the smallest scale of its
            row, an all-zero row a millionth of the smallest elsewhere.
        group_size: input channels per group, a divisor of c; -1 for the whole row.
        how: one of SCALE_METHODS.
        importance: weights of the columns' squared errors, non-negative [c]; None for equal weights.
        power: 2 or 3; the errors are raised to it before they are summed. Where the recursion feeds errors back, the
            values that it rounds spread wider than the group's, and clipping costs more than the squared errors of the
            group's own weights say.
        price: of an outlier: largest cost of a weight. Squared errors, times their importance, are capped at it.

    Returns:
        bfloat16 [r, groups], finite and not zero; positive unless signed.
    """
    if how not in SCALE_METHODS:
        raise ConfigError("scales", f"one of {', '.join(SCALE_METHODS)}", repr(how))
    require_finite(weight, "weight")
    rows, cols = weight.shape
    groups = LayerScheme("packed", grid.bits, group_size).groups(cols)
    if weight.numel() == 0:
        return torch.ones(rows, groups, dtype=SCALE_DTYPE, device=weight.device)
    grouped = weight.reshape(rows, groups, cols // groups)
    largest = grouped.abs().amax(2) / (grid.high + grid.offset)
    if grid.offset:
        largest = _without_zeros(largest)
    if how == "absmax":
        scales = _storable(largest)
    else:
        chunk = max(1, _chunk_size(weight) // cols)
        amplitudes = None if importance is None else importance.to(weight).sqrt().reshape(groups, -1)
        pieces = zip(grouped.split(chunk), largest.split(chunk), strict=True)
        signs = (1, -1) if how == "signed" else (1,)
        search = partial(_best_shrink, grid=grid, signs=signs, amplitudes=amplitudes, power=power, price=price)
        scales = torch.cat([search(piece, absmax) for piece, absmax in pieces])
    if not torch.isfinite(scales * (1 << grid.bits) * _HEADROOM).all():
        found, hint = f"weights up to {float(grouped.abs().max()):g}", "Is the model damaged?"
        raise NumericalError("scales", "scales that bfloat16 can hold", found, hint)
    return scales


def scaled(base: torch.Tensor, multiplier: float) -> torch.Tensor:
    """Return scales times a positive multiplier, rounded to bfloat16 as they will be stored, and never zero."""
    scales = (base.abs().to(torch.float32) * multiplier).to(SCALE_DTYPE)
    return scales.clamp(min=torch.finfo(SCALE_DTYPE).tiny).copysign(base)


def fitted_scales(
    weight: torch.Tensor,
    factor: Factor,
    grid: Grid,
    group_size: int,
    block_size: int = 128,
) -> torch.Tensor:
    """Return signed MSE scales, squared errors weighted by D_t, times the multiple at which each row loses least.

    Scales that minimise the error of the weights themselves are too small for GPTQ: errors fed back spread the values
    that are rounded, and a clipped value costs more than the search of the scales has seen. Rows do not influence each
    other, so each row chooses freely, and no multiple of its scales loses less.

    Args:
        weight: float32 or float64 [r, c].
        factor: of the layer's Hessian.
        grid: bounded. A mid-rise grid is symmetric: its scales need no signs.
        group_size: input channels per scale, -1 for the whole row.
        block_size: columns per lazy batch.

    Returns:
        bfloat16 [r, G], finite and not zero.
    """
    how = "mse" if grid.offset else "signed"
    base = group_scales(weight, grid, group_size, how, importance=factor.importance)
    chosen = []
    for rows, own in zip(weight.split(_FITTED_ROWS), base.split(_FITTED_ROWS), strict=True):
        candidates = torch.stack([scaled(own, multiple) for multiple in MULTIPLES])
        tried = nearest_plane(
            rows.repeat(len(MULTIPLES), 1),
            factor,
            candidates.flatten(0, 1),
            grid,
            group_size=group_size,
            block_size=block_size,
        )
        best = tried.loss.view(len(MULTIPLES), -1).argmin(0)
        chosen.append(candidates[best, torch.arange(len(own), device=own.device)])
    return torch.cat(chosen)


def _best_shrink(
    grouped: torch.Tensor,
    absmax: torch.Tensor,
    grid: Grid,
    signs: tuple[int, ...],
    amplitudes: torch.Tensor | None,
    power: int,
    price: float,
) -> torch.Tensor:
    """Return bfloat16 [n, G] for weights [n, G, group], absmax scales [n, G] and `amplitudes` [G, group] of errors."""
    root = grouped.new_tensor(math.sqrt(price))
    best_scale, best_error = _storable(absmax)[None], torch.full_like(absmax[None], torch.inf)
    # From the largest factor down, so that of equal errors the least clipped is found first.
    steps = torch.arange(SHRINK_STEPS, 0, -1, dtype=torch.float64, device=absmax.device)[:, None]
    factors = (SMALLEST_SHRINK + (1 - SMALLEST_SHRINK) * steps / SHRINK_STEPS).to(absmax.dtype).expand(-1, len(signs))
    mirrors = torch.tensor(signs, dtype=SCALE_DTYPE, device=absmax.device).expand(SHRINK_STEPS, -1)
    several = max(1, _chunk_size(grouped) // grouped.numel())
    room = torch.empty((several, *grouped.shape), dtype=grouped.dtype, device=grouped.device)
    parts = zip(factors.reshape(-1, 1, 1).split(several), mirrors.reshape(-1, 1, 1).split(several), strict=True)
    for factor, mirror in parts:
        candidates = mirror * _storable(absmax * factor)
        scales = candidates.to(grouped.dtype)[..., None]
        # One buffer: integers, then points, then errors.
        integers = torch.div(grouped, scales, out=room[: len(scales)]).sub_(grid.offset).round_()
        points = integers.clamp_(grid.low, grid.high).add_(grid.offset).mul_(scales)
        errors = points.sub_(grouped)
        if amplitudes is not None:
            errors.mul_(amplitudes)
        if price < math.inf:
            errors.clamp_(-root, root)
        if power == 2:
            error = torch.linalg.vector_norm(errors, dim=3)
        else:  # in units of the scale, so that cubes neither overflow nor vanish
            scales = scales.abs()
            error = errors.div_(scales).abs_().pow_(power).sum(3).pow_(1 / power).mul_(scales[..., 0])
        candidate = candidates
        if several > 1:
            error, first = error.min(0, keepdim=True)
            candidate = candidates.gather(0, first)
        better = error < best_error
        best_scale = torch.where(better, candidate, best_scale)
        best_error = torch.where(better, error, best_error)
    return best_scale[0]


def _chunk_size(weight: torch.Tensor) -> int:
    return _CPU_CHUNK if weight.device.type == "cpu" else _DEVICE_CHUNK


def _without_zeros(largest: torch.Tensor) -> torch.Tensor:
    """Replace zeros of [r, G] by the smallest other number of their row, or by next to nothing in rows of zeros."""
    tiny = torch.finfo(SCALE_DTYPE).tiny
    smallest = largest.masked_fill(largest < tiny, math.inf).amin(1, keepdim=True)
    nothing = (smallest.amin() * 2.0**-20).nan_to_num(posinf=tiny).clamp(min=tiny)
    return torch.where(largest < tiny, torch.where(smallest.isinf(), nothing, smallest), largest)


def _storable(scales: torch.Tensor) -> torch.Tensor:
    """Round scales to bfloat16; 1 where the group is zero, or so small that its scale would round to zero."""
    stored = scales.to(SCALE_DTYPE)
    return torch.where(stored < torch.finfo(SCALE_DTYPE).tiny, torch.ones_like(stored), stored)
