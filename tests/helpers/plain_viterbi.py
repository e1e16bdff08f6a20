"""The Viterbi search of `quantize.lattice.viterbi.search` in a few lines of numpy."""

from collections.abc import Iterable

import numpy as np
import torch

from vllm_latq.coding.trellis.code import STEPS, WINDOWS, window_values
from vllm_latq.quantize.lattice.viterbi.search import NEVER, REACH, Array


def plain_rings(targets: torch.Tensor, prices: torch.Tensor, rate: int) -> torch.Tensor:
    """Return the symbols of the rings nearest to targets, int16 [tiles, STEPS]; arguments as of `nearest_rings`."""
    rings = [_plain_ring(*tile, rate) for tile in zip(targets.numpy(), prices.numpy(), strict=True)]
    return torch.from_numpy(np.array(rings, np.int16))


def _plain_ring(targets: Array, prices: Array, rate: int) -> Array:
    kept = WINDOWS >> rate
    values = window_values(rate).numpy().astype(np.float32)

    def search(best: Array, steps: Iterable[int]) -> tuple[Array, Array]:
        """Return the costs by kept bits after some steps, and what each step dropped on the way there."""
        back = []
        for t in steps:
            a, b = (targets[t] - values).T
            costs = np.repeat(best, 1 << rate) + (prices[t, 0] * a * a + prices[t, 1] * b * b)
            rows = costs.reshape(1 << rate, kept)
            back.append(rows.argmin(0))
            best = rows.min(0)
        assert best.dtype == np.float32
        return best, np.array(back)

    def trace(back: Array, m: int) -> Array:
        """Return the states of the path that ends with kept bits m."""
        states = []
        for dropped in back[::-1]:
            states.append(int(dropped[m]) * kept + m)
            m = states[-1] >> rate
        return np.array(states[::-1])

    best, back = search(np.zeros(kept, np.float32), range(-REACH, REACH))
    seam = trace(back, int(best.argmin()))[REACH] >> rate
    start = np.full(kept, NEVER)
    start[seam] = 0
    states = trace(search(start, range(STEPS))[1], int(seam))
    assert states[0] >> rate == states[-1] & (kept - 1)
    return states & ((1 << rate) - 1)
