"""The Viterbi algorithm: the ring of the trellis code that is nearest to the targets of a tile.

    sum over weights of price * (target - value)^2,   over all rings of `rate` bits per step, see `coding.trellis.code`

A state is a window of 16 bits. A step drops its `rate` highest bits, keeps the others and adds `rate` bits:

    state s     q * kept + m      q: the bits that the step drops, m: the bits that it keeps; kept = 2^16 / 2^rate
    best[m]     cost of the best path whose last state keeps m
    state s'    m * 2^rate + symbol, at a cost of best[m] + the cost of its two values; the next step keeps s' % kept

A ring closes (tail-biting) by two passes. The first starts anywhere and covers only the REACH steps before the seam
and the REACH steps after it: its path tells which bits are kept at the seam. The second starts with these bits and ends
with them. The first pass of QTIP (section 3.2) covers the whole ring: a third more time for 0.1 to 0.6% of distortion.

Everything is float32, in the order written; of equal costs the one with the least q, then with the least m, wins. So
every implementation finds the same ring. On a processor numba compiles it at first use, in a few seconds, and keeps it
in its cache; for a GPU see `gpu`. The tests have the plain form.
"""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache, partial
from itertools import pairwise
from typing import Any

import numba
import numpy as np
import torch

from vllm_latq.coding.trellis.code import RATES, STEPS, TWO_TERMS_FROM, WINDOWS, window_values

Array = np.ndarray[Any, Any]
_Pair = tuple[Any, Any]
_Four = tuple[Any, Any, Any, Any]
# Steps of the first pass on each side of the seam.
REACH = 32
# States that one innermost loop covers: a constant, so that it becomes vector instructions at every rate.
_LANES = 1024
# Cost of a path that does not start as it must.
NEVER = np.float32(1e30)


def nearest_rings(targets: torch.Tensor, prices: torch.Tensor, rate: int) -> torch.Tensor:
    """Return the symbols of the rings nearest to targets, int16 [tiles, STEPS], on the device of the targets.

    Args:
        targets: float32 [tiles, STEPS, 2], in units of a value.
        prices: float32 [tiles, STEPS, 2], of squared errors; not negative.
        rate: bits per step.
    """
    if targets.is_cuda:
        from vllm_latq.quantize.lattice.viterbi.gpu import nearest_rings_on_gpu  # a processor has no Triton

        return nearest_rings_on_gpu(targets, prices, rate, REACH)
    return nearest_rings_on_processor(targets, prices, rate)


def nearest_rings_on_processor(targets: torch.Tensor, prices: torch.Tensor, rate: int) -> torch.Tensor:
    """Return the same of tensors on the CPU, by all its threads; arguments as for `nearest_rings`."""
    symbols = torch.empty(targets.shape[:2], dtype=torch.int16)
    arrays = [tensor.contiguous().numpy() for tensor in (targets, prices, symbols)]
    values = _values(rate >= TWO_TERMS_FROM)
    bounds = np.linspace(0, len(targets), min(torch.get_num_threads(), len(targets)) + 1).astype(int)
    with ThreadPoolExecutor(len(bounds) - 1) as pool:
        shares = [[array[first:last] for array in arrays] for first, last in pairwise(bounds)]
        list(pool.map(lambda share: _encode(*share[:2], values, rate, share[2]), shares))
    return symbols


@lru_cache(2)
def _values(two_terms: bool) -> Array:
    """Return the first and the second values of all windows, float32 [2, WINDOWS]."""
    values = window_values(TWO_TERMS_FROM if two_terms else RATES[0])
    return values.to(torch.float32).T.contiguous().numpy()


def _compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """Compile a function at its first call; without a cache where no folder for one can be written."""
    compiled = partial(numba.njit, nogil=True, error_model="numpy")
    try:
        return compiled(cache=True)(function)
    except RuntimeError:  # numba found no folder for the cache
        return compiled()(function)


@_compiled
def _repeat(source: Array, target: Array) -> None:
    """Put each number of source four times into target; numba makes vector instructions of this form only."""
    for n in range(len(source)):
        target[4 * n] = source[n]
        target[4 * n + 1] = source[n]
        target[4 * n + 2] = source[n]
        target[4 * n + 3] = source[n]


@_compiled
def _repeat_twice(source: Array, target: Array) -> None:
    """Put each number of source twice into target."""
    for n in range(len(source)):
        target[2 * n] = source[n]
        target[2 * n + 1] = source[n]


@_compiled
def _spread(best: Array, rate: int, before: Array) -> None:
    """Put best[s >> rate] at before[WINDOWS + s], for every state s; before[:WINDOWS] is scratch."""
    size = len(best)
    before[size : 2 * size] = best
    if rate % 2:
        _repeat_twice(before[size : 2 * size], before[2 * size : 4 * size])
        size *= 2
    while size < WINDOWS:
        _repeat(before[size : 2 * size], before[4 * size : 8 * size])
        size *= 4


@_compiled
def _better(x: _Pair, w: _Pair, value: _Pair, before: float, q: int, low: float, pick: int) -> tuple[float, int]:
    """Return low and pick, or the cost of a state and its q if that is less."""
    a, b = x[0] - value[0], x[1] - value[1]
    cost = before + (w[0] * a * a + w[1] * b * b)
    return min(cost, low), q if cost < low else pick


@_compiled
def _scan(x: _Pair, w: _Pair, values: _Pair, before: Array, q: int, low: Array, pick: Array) -> None:
    """Take the costs of _LANES states into account, which drop q: low is the least cost of a lane, pick its q."""
    first, second = values
    for n in range(_LANES):
        low[n], pick[n] = _better(x, w, (first[n], second[n]), before[n], q, low[n], pick[n])


@_compiled
def _scan_sixteens(
    x: _Pair, w: _Pair, values: _Four, before: _Four, shift: int, q: _Four, low: Array, pick: Array
) -> None:
    """Do the same for four q at once, where 16 << shift states in a row share one cost before the step.

    Args:
        x, w: targets and prices of the step.
        values: first and second values of the states, for each q.
        before: their costs before the step, one for 16 << shift states, for each q.
        shift: see above.
        q: the four.
        low, pick: [_LANES].
    """
    (a0, b0), (a1, b1), (a2, b2), (a3, b3) = values
    c0, c1, c2, c3 = before
    for sixteen in range(_LANES // 16):
        at = sixteen >> shift
        d0, d1, d2, d3 = c0[at], c1[at], c2[at], c3[at]
        for lane in range(16):
            n = 16 * sixteen + lane
            cost, best = low[n], pick[n]
            cost, best = _better(x, w, (a0[n], b0[n]), d0, q[0], cost, best)
            cost, best = _better(x, w, (a1[n], b1[n]), d1, q[1], cost, best)
            cost, best = _better(x, w, (a2[n], b2[n]), d2, q[2], cost, best)
            cost, best = _better(x, w, (a3[n], b3[n]), d3, q[3], cost, best)
            low[n], pick[n] = cost, best


@_compiled
def _values_at(values: Array, s: int) -> _Pair:
    """Return the two values of the states from s on."""
    return values[0, s:], values[1, s:]


@_compiled
def _step(x: Array, w: Array, values: Array, rate: int, best: Array, back: Array, before: Array) -> None:
    """Replace best by that of the next step; back[m] is the q of the state that the best path to m comes through."""
    kept = WINDOWS >> rate
    low, pick = np.empty(_LANES, np.float32), np.empty(_LANES, np.int32)
    targets, prices = (x[0], x[1]), (w[0], w[1])
    # Where a step keeps fewer bits than there are lanes, a row of lanes covers several q, from the one given on.
    width, stride = min(_LANES, kept), max(_LANES, kept)
    if rate < 4:
        _spread(best, rate, before)
    else:
        before[:kept] = best
    for m in range(0, kept, width):
        low[:] = np.float32(np.inf)
        pick[:] = 0
        if rate < 4:
            for s in range(m, WINDOWS, kept):
                here = _values_at(values, s)
                _scan(targets, prices, here, before[WINDOWS + s :], np.int32(s // kept), low, pick)
        else:
            for s in range(m, WINDOWS, 4 * stride):
                t, u, v = s + stride, s + 2 * stride, s + 3 * stride
                here = _values_at(values, s), _values_at(values, t), _values_at(values, u), _values_at(values, v)
                costs = before[s >> rate :], before[t >> rate :], before[u >> rate :], before[v >> rate :]
                q = np.int32(s // kept), np.int32(t // kept), np.int32(u // kept), np.int32(v // kept)
                _scan_sixteens(targets, prices, here, costs, rate - 4, q, low, pick)
        for lane in range(width):
            best[m + lane] = low[lane]
            back[m + lane] = pick[lane]
        for row in range(1, _LANES // width):
            for lane in range(width):
                cost, drop = low[row * width + lane], pick[row * width + lane] + row
                if cost < best[lane] or (cost == best[lane] and drop < back[lane]):
                    best[lane] = cost
                    back[lane] = drop


@_compiled
def _encode(targets: Array, prices: Array, values: Array, rate: int, symbols: Array) -> None:
    """Find the rings of tiles."""
    kept = WINDOWS >> rate
    best, before = np.empty(kept, np.float32), np.empty(2 * WINDOWS, np.float32)
    back = np.empty((STEPS, kept), np.uint16)
    for tile in range(len(targets)):
        best[:] = np.float32(0)
        for t in range(-REACH, REACH):
            _step(targets[tile, t], prices[tile, t], values, rate, best, back[t], before)
        m = np.argmin(best)
        for t in range(REACH - 1, -1, -1):
            m = (np.int64(back[t, m]) * kept + m) >> rate
        best[:] = NEVER
        best[m] = np.float32(0)
        for t in range(STEPS):
            _step(targets[tile, t], prices[tile, t], values, rate, best, back[t], before)
        for t in range(STEPS - 1, -1, -1):
            state = np.int64(back[t, m]) * kept + m
            symbols[tile, t] = state & ((1 << rate) - 1)
            m = state >> rate
