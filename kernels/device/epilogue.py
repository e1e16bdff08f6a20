"""The end of a decode kernel: sums over ranges of columns and over parts of split-K, then y, rounded once."""

import triton
import triton.language as tl


@triton.jit
def sum_ranges(acc, extra, RANGES: tl.constexpr):
    """Return the sums over the ranges of columns, float32 [TILE_ROWS, ROWS], TILE_ROWS = BLOCK_N / RANGES.

    acc: [BLOCK_N, RANGES * ROWS], weight rows of each range times x of each range; equal ranges meet on the diagonal.
    extra: [BLOCK_N, ROWS], added to it.
    """
    TILE_ROWS: tl.constexpr = acc.shape[0] // RANGES
    ROWS: tl.constexpr = acc.shape[1] // RANGES
    weight_range = tl.arange(0, acc.shape[0])[:, None] // TILE_ROWS
    acc = tl.where(weight_range == tl.arange(0, acc.shape[1])[None, :] // ROWS, acc, 0.0)
    acc = tl.sum(tl.reshape(acc, (acc.shape[0], RANGES, ROWS)), 1) + extra
    return tl.sum(tl.reshape(acc, (RANGES, TILE_ROWS, ROWS)), 0)


@triton.jit
def add_parts(acc, partial_ptr, ticket_ptr, tile, part, parts, M):
    """Write this part's sums; return the sum over all parts, added in order, and True to the tile's last program.

    Rows from M up are zero.
    """
    BLOCK_N: tl.constexpr = acc.shape[0]
    BLOCK_M: tl.constexpr = acc.shape[1]
    rn = tl.arange(0, BLOCK_N)
    rm = tl.arange(0, BLOCK_M)
    size: tl.constexpr = BLOCK_N * BLOCK_M
    # Features lie side by side, so M rows write and read whole sectors, however few rows there are.
    at = partial_ptr + tile.to(tl.int64) * parts * size + rm[None, :] * BLOCK_N + rn[:, None]
    live = (rm < M)[None, :] & (rn >= 0)[:, None]
    tl.store(at + part * size, acc, mask=live)
    # All of this program's stores come before its ticket, and the other programs' stores before the loads below.
    tl.debug_barrier()
    last = tl.atomic_add(ticket_ptr + tile, 1, sem="acq_rel", scope="gpu") == parts - 1
    tl.debug_barrier()
    if last:
        AT_ONCE: tl.constexpr = max(1, min(4, 64 // BLOCK_M))  # parts loaded together; more would need registers
        acc = tl.zeros(acc.shape, tl.float32)
        for first in range(0, parts, AT_ONCE):
            loaded = ()
            for u in tl.static_range(AT_ONCE):
                there = live & (tl.full((1, 1), first + u, tl.int32) < parts)
                loaded = loaded + (tl.load(at + (first + u) * size, mask=there, other=0.0, cache_modifier=".cg"),)
            for u in tl.static_range(AT_ONCE):
                acc += loaded[u]
        tl.store(ticket_ptr + tile, 0)  # ready for the next launch: no memset
    return acc, last


@triton.jit
def output_rows(
    order_ptr, row_scale_ptr, tile, TILE_ROWS: tl.constexpr, HAS_ROW_SCALES: tl.constexpr, PERMUTED: tl.constexpr
):
    """Return the row of y of each tile row, int32 [TILE_ROWS], and its scale; loaded before the ticket is taken."""
    rn = tile * TILE_ROWS + tl.arange(0, TILE_ROWS)
    factor = tl.load(row_scale_ptr + rn) if HAS_ROW_SCALES else 1.0
    return tl.load(order_ptr + rn) if PERMUTED else rn, factor


@triton.jit
def store_rows(acc, rows, factor, y_ptr, N, M, HAS_ROW_SCALES: tl.constexpr):
    """Scale the tile's rows, round once and write y [M, N]; rows and factor are from `output_rows`."""
    rm = tl.arange(0, acc.shape[1])
    if HAS_ROW_SCALES:
        acc = acc * factor[:, None]
    at = y_ptr + rm[None, :].to(tl.int64) * N + rows[:, None]
    tl.store(at, acc.to(y_ptr.dtype.element_ty), mask=(rm < M)[None, :] & (rows < N)[:, None])
