"""The Viterbi algorithm of `search` on a GPU: a program for each tile, the same ring to the bit.

A program has scratch of its own in global memory, most of which the caches hold: the costs before and after a step, and
for every step the bits that each best path drops. Products and sums must not be fused (`enable_fp_fusion`), because the
processor does not fuse them, either.
"""

from typing import Any

import torch
import triton
import triton.language as tl

from vllm_latq.coding.trellis.code import STEPS, WINDOWS, window_values

# Values are whole numbers below 2^11, which float16 holds exactly.
OPTIONS = {"num_warps": 16, "num_stages": 1, "maxnreg": 128, "enable_fp_fusion": False}
LANES = 4096
_PROGRAMS_PER_PROCESSOR = 2


@triton.jit
def _step(
    x_ptr, w_ptr, value_ptr, before_ptr, after_ptr, back_ptr, RATE: tl.constexpr, LANES: tl.constexpr
):  # fmt: skip
    """Put the costs after a step into `after`, and the bits that each best path drops into `back`."""
    STATES: tl.constexpr = 65536
    KEPT: tl.constexpr = STATES >> RATE
    WIDTH: tl.constexpr = min(LANES, KEPT)
    ROWS: tl.constexpr = LANES // WIDTH
    x0, x1, w0, w1 = tl.load(x_ptr), tl.load(x_ptr + 1), tl.load(w_ptr), tl.load(w_ptr + 1)
    row, lane = tl.arange(0, ROWS)[:, None], tl.arange(0, WIDTH)
    for start in range(0, KEPT, WIDTH):
        low = tl.full([ROWS, WIDTH], float("inf"), tl.float32)
        pick = tl.zeros([ROWS, WIDTH], tl.int32)
        for q in range(0, STATES // KEPT, ROWS):
            state = (q + row) * KEPT + start + lane[None, :]
            a = x0 - tl.load(value_ptr + state).to(tl.float32)
            b = x1 - tl.load(value_ptr + STATES + state).to(tl.float32)
            cost = tl.load(before_ptr + (state >> RATE)) + (w0 * a * a + w1 * b * b)
            pick = tl.where(cost < low, q + row, pick)
            low = tl.minimum(cost, low)
        least = tl.min(low, 0)
        dropped = tl.min(tl.where(low == least[None, :], pick, STATES), 0)
        tl.store(after_ptr + start + lane, least)
        tl.store(back_ptr + start + lane, dropped.to(back_ptr.dtype.element_ty))
    tl.debug_barrier()


@triton.jit
def _fill(cost_ptr, seam, RATE: tl.constexpr, LANES: tl.constexpr):
    """Let paths start anywhere at no cost if seam < 0, or only with the kept bits `seam`."""
    KEPT: tl.constexpr = 65536 >> RATE
    WIDTH: tl.constexpr = min(LANES, KEPT)
    lane = tl.arange(0, WIDTH)
    for start in range(0, KEPT, WIDTH):
        free = (seam < 0) | (start + lane == seam)
        tl.store(cost_ptr + start + lane, tl.where(free, 0.0, 1e30))
    tl.debug_barrier()


@triton.jit
def _least(cost_ptr, RATE: tl.constexpr, LANES: tl.constexpr):
    """Return the first place of the least cost."""
    KEPT: tl.constexpr = 65536 >> RATE
    WIDTH: tl.constexpr = min(LANES, KEPT)
    lane = tl.arange(0, WIDTH)
    low = tl.full([WIDTH], float("inf"), tl.float32)
    place = tl.zeros([WIDTH], tl.int32)
    for start in range(0, KEPT, WIDTH):
        cost = tl.load(cost_ptr + start + lane)
        place = tl.where(cost < low, start + lane, place)
        low = tl.minimum(cost, low)
    return tl.min(tl.where(low == tl.min(low, 0), place, KEPT), 0)


@triton.jit
def search_rings(
    target_ptr, price_ptr, value_ptr, cost_ptr, back_ptr, symbol_ptr, tiles,
    STEPS: tl.constexpr, REACH: tl.constexpr, RATE: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    """Find the rings of the tiles program_id, program_id + num_programs, ..."""
    KEPT: tl.constexpr = 65536 >> RATE
    cost_ptr += tl.program_id(0) * 2 * KEPT
    back_ptr += tl.program_id(0).to(tl.int64) * STEPS * KEPT
    for tile in range(tl.program_id(0), tiles, tl.num_programs(0)):
        x_ptr, w_ptr = target_ptr + tile * 2 * STEPS, price_ptr + tile * 2 * STEPS
        _fill(cost_ptr, -1, RATE, LANES)
        for n in range(2 * REACH):
            t = (STEPS - REACH + n) % STEPS
            before, after = cost_ptr + n % 2 * KEPT, cost_ptr + (1 - n % 2) * KEPT
            _step(x_ptr + 2 * t, w_ptr + 2 * t, value_ptr, before, after, back_ptr + t * KEPT, RATE, LANES)
        m = _least(cost_ptr, RATE, LANES)
        for n in range(REACH):
            m = (tl.load(back_ptr + (REACH - 1 - n) * KEPT + m).to(tl.int32) * KEPT + m) >> RATE
        tl.debug_barrier()
        _fill(cost_ptr, m, RATE, LANES)
        for t in range(STEPS):
            before, after = cost_ptr + t % 2 * KEPT, cost_ptr + (1 - t % 2) * KEPT
            _step(x_ptr + 2 * t, w_ptr + 2 * t, value_ptr, before, after, back_ptr + t * KEPT, RATE, LANES)
        for n in range(STEPS):
            t = STEPS - 1 - n
            state = tl.load(back_ptr + t * KEPT + m).to(tl.int32) * KEPT + m
            tl.store(symbol_ptr + tile * STEPS + t, (state & ((1 << RATE) - 1)).to(tl.int16))
            m = state >> RATE
        tl.debug_barrier()


def search_constants(rate: int, reach: int, lanes: int = LANES) -> dict[str, Any]:
    """Return the kernel's constants for one rate; a first pass covers `reach` steps on each side of the seam."""
    return {"STEPS": STEPS, "REACH": reach, "RATE": rate, "LANES": lanes}


def nearest_rings_on_gpu(
    targets: torch.Tensor, prices: torch.Tensor, rate: int, reach: int, lanes: int = LANES
) -> torch.Tensor:
    """Return the symbols of the rings nearest to targets, int16 [tiles, STEPS], as `search.nearest_rings`.

    Args:
        targets, prices: float32 [tiles, STEPS, 2].
        rate: bits per step.
        reach: steps of the first pass on each side of the seam.
        lanes: states that the innermost loop covers, a power of two.
    """
    device, tiles, kept = targets.device, len(targets), WINDOWS >> rate
    programs = tiles
    if targets.is_cuda:
        programs = min(tiles, _PROGRAMS_PER_PROCESSOR * torch.cuda.get_device_properties(device).multi_processor_count)
    values = window_values(rate).T.to(device, torch.float16).contiguous()
    costs = torch.empty(programs, 2, kept, device=device)
    back = torch.empty(programs, STEPS, kept, dtype=torch.uint8 if rate <= 8 else torch.int16, device=device)
    symbols = torch.empty(tiles, STEPS, dtype=torch.int16, device=device)
    arguments = (targets.contiguous(), prices.contiguous(), values, costs, back, symbols, tiles)
    search_rings[(programs,)](*arguments, **search_constants(rate, reach, lanes), **OPTIONS)
    return symbols
