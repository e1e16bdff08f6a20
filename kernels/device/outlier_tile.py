"""The outliers of a row tile, for the decode kernels: every lane walks the slots of its own rows.

An outlier needs the activations of one column, so for many rows of x they are read from x^T. The launch itself writes
x^T: its first programs do so before they begin with their superblocks, long before the first outlier is added.

A slot is loaded in the layout in which it is used, and sums are kept in that layout, so no slot needs an exchange
between lanes, nor a barrier. For that the compiler must not see which lanes are neighbours, or it would load vectors
and exchange them: a lane's own offset enters an address by `|`. The sums become a tile once, at the end.

Lanes are one-dimensional, and the lanes of an outlier are neighbours, so that a warp reads few lines of x^T: the L1
cache looks up one line per cycle. With two dimensions, Triton 3.6 made neighbours of the weight rows, and read 32 lines
instead of 8.

Many functions share the parameters M (rows of x), ROWS (rows of x for which outliers are added), SLOTS (slots of a row
that a program reads at once) and TRANSPOSED (x^T is read).
"""

import triton
import triton.language as tl

MOST_WRITERS = 2047  # programs that write x^T: their number is the low 11 bits of a counter


@triton.jit
def longest_slice(slice_ptr, tile, TILE_ROWS: tl.constexpr):
    """Return the slots of a tile's longest row.

    This also brings the tile's bounds into the L1 cache (the last one may lie in a sector of its own). It is called
    before the loop over superblocks: after the loop nothing hides the time that memory takes.
    """
    at = slice_ptr + tile * (TILE_ROWS // 16)
    longest = tl.load(at + 1) - tl.load(at)  # the first slice of a row block, or of a part of it, is its longest
    if TILE_ROWS == 128:
        longest = max(longest, tl.load(at + 5) - tl.load(at + 4))
    return longest


@triton.jit
def transpose_pieces(x_ptr, stride_xm, xt_ptr, M, K, first, step, ROWS: tl.constexpr, PIECE: tl.constexpr):
    """Write every `step`-th piece of PIECE columns of x^T [K, ROWS], from piece `first` on; zero from row M on."""
    rows = tl.arange(0, ROWS)[None, :]
    for piece in range(first, tl.cdiv(K, PIECE), step):
        cols = (piece * PIECE + tl.arange(0, PIECE))[:, None]
        x = tl.load(x_ptr + rows * stride_xm + cols, mask=(rows < M) & (cols < K), other=0.0)
        tl.store(xt_ptr + (cols * ROWS + rows), x, mask=(cols < K) & (rows >= 0))


@triton.jit
def begin_transposed(x_ptr, stride_xm, xt_ptr, counter_ptr, M, K, writers, ROWS: tl.constexpr, PIECE: tl.constexpr):
    """Write this program's share of x^T, if it is one of the first `writers`, and count it as done."""
    program = tl.program_id(1) * tl.num_programs(0) + tl.program_id(0)
    if program < writers:
        transpose_pieces(x_ptr, stride_xm, xt_ptr, M, K, program, writers, ROWS, PIECE)
        tl.debug_barrier()
        tl.atomic_add(counter_ptr, 1, sem="release", scope="gpu")


@triton.jit
def finish_transposed(x_ptr, stride_xm, xt_ptr, counter_ptr, M, K, writers, ROWS: tl.constexpr, PIECE: tl.constexpr):
    """Make sure that all of x^T is written; the last program of the launch that comes here sets the counter to zero.

    If a share is missing, the program writes all of x^T, with the same values: it must not wait for a program that may
    not begin before this one ends.
    """
    programs = tl.num_programs(0) * tl.num_programs(1)
    # The counter: writers that are done in its low 11 bits, and above them the programs that came here.
    seen = tl.atomic_add(counter_ptr, 2048, sem="acquire", scope="gpu")
    tl.debug_barrier()
    if seen % 2048 < writers:
        transpose_pieces(x_ptr, stride_xm, xt_ptr, M, K, 0, 1, ROWS, PIECE)
        tl.debug_barrier()
    if seen // 2048 == programs - 1:
        tl.store(counter_ptr, 0)


@triton.jit
def entry_lines(entry_ptr, slice_ptr, tile, part, parts, TILE_ROWS: tl.constexpr):
    """Return the lines of a tile's entries that a part prefetches. A line of 128 bytes has two slots.

    Returns:
        Addresses of the part's first lines, int64 [TILE_ROWS]; the end of the tile's entries; bytes to the part's next
        lines; and how often it has lines.
    """
    bounds = slice_ptr + tile * (TILE_ROWS // 16)
    begin, end = tl.load(bounds) // 2, tl.cdiv(tl.load(bounds + TILE_ROWS // 16), 2)
    line = begin + part * TILE_ROWS + tl.arange(0, TILE_ROWS)
    first = (entry_ptr + line.to(tl.int64) * 32).to(tl.int64)
    last = (entry_ptr + end.to(tl.int64) * 32).to(tl.int64)
    return first, last, parts * (TILE_ROWS * 128), tl.cdiv(end - begin, parts * TILE_ROWS)


@triton.jit
def prefetch_lines(lines, last):
    """Bring the lines at these addresses into L2, except those from `last` on.

    `outlier_tile` loads a turn's entries while it uses those of the turn before, which takes less time than memory.
    """
    tl.inline_asm_elementwise(
        "{ .reg .pred there; setp.ne.b32 there, $2, 0; @there prefetch.global.L2 [$1]; mov.u32 $0, 0; }",
        "=r,l,r", [lines, (lines < last).to(tl.int32)], dtype=tl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@triton.jit
def load_slots(entry_ptr, at, count, slot, SLOTS: tl.constexpr):
    """Return a tuple of the entries of SLOTS slots; zero after a row's last slot."""
    entries = ()
    for u in tl.static_range(SLOTS):
        entries = entries + (tl.load(entry_ptr + (at + (slot + u) * 16), mask=slot + u < count, other=0),)
    return entries


@triton.jit
def outlier_places(
    slice_ptr,  # int32 [padded rows / 16 + 1]: first slot of each slice
    tile,
    M,
    BLOCK_N: tl.constexpr,
    ROWS: tl.constexpr,
    SLOTS: tl.constexpr,
    TRANSPOSED: tl.constexpr,
    RANGES: tl.constexpr,  # times that the tile repeats its weight rows, each time from the next SLOTS slots on
):
    """Return, for each lane of a tile, the offset of its row's first entry and the row's slot count.

    TRANSPOSED: [BLOCK_N * ROWS / 4], with no slots for lanes whose four activation rows are all at or above M. Else
    [BLOCK_N].
    """
    LANES: tl.constexpr = ROWS // 4 if TRANSPOSED else 1  # of a weight row
    TILE_ROWS: tl.constexpr = BLOCK_N // RANGES
    lane = tl.arange(0, BLOCK_N * LANES)
    row = lane // LANES % TILE_ROWS
    bounds = slice_ptr + tile * (TILE_ROWS // 16) + row // 16
    begin = tl.load(bounds)
    count = tl.load(bounds + 1) - begin
    at = begin.to(tl.int64) * 16 | row % 16
    if RANGES > 1:
        ahead = lane // (LANES * TILE_ROWS) * SLOTS
        at += ahead * 16
        count -= ahead
    if TRANSPOSED:
        used = 4 * (lane % LANES) < M
        at = tl.where(used, at, 0)
        count = tl.where(used, count, 0)
    return at, count


@triton.jit
def outlier_tile(
    x_ptr,  # x; with TRANSPOSED x^T, int64 [K, ROWS / 4], four rows of x at a time
    stride_xm,
    entry_ptr,  # int32 [slots, 16]
    entries,  # entries of the first turn, from `load_slots`
    at,  # first entry of each lane's row, from `outlier_places`
    count,  # slots of each lane's row, from `outlier_places`
    longest,  # slots of the tile's longest row, from `longest_slice`
    part,  # parts take turns of SLOTS slots; each repetition of the weight rows in a tile counts as a part
    parts,
    M,
    BLOCK_N: tl.constexpr,
    ROWS: tl.constexpr,
    SLOTS: tl.constexpr,
    TRANSPOSED: tl.constexpr,
    HALF: tl.constexpr,  # x is fp16 instead of bf16
):
    """Return this part's outliers of a row tile times x, float32 [BLOCK_N, ROWS].

    Without TRANSPOSED a lane has all activation rows of a weight row, and gathers x one by one; with it a lane has four
    activation rows.
    """
    if TRANSPOSED:
        LANES: tl.constexpr = ROWS // 4  # of a weight row
        sums = repeated(tl.zeros((BLOCK_N * LANES,), tl.float32), 4)
    else:
        sums = repeated(tl.zeros((BLOCK_N,), tl.float32), ROWS)
    for slot in range(part * SLOTS, longest, parts * SLOTS):
        ahead = load_slots(entry_ptr, at, count, slot + parts * SLOTS, SLOTS)
        # After a row's last slot value and column are zero, and x has a column 0, so no lane needs a mask of its own.
        cols, values = outliers_of(entries)
        found = ()  # all loads come before the first sum, or the compiler would save registers and wait in between
        for u in tl.static_range(len(cols)):
            found = found + (gathered(cols[u], x_ptr, stride_xm, M, ROWS, TRANSPOSED),)
        for u in tl.static_range(len(cols)):
            sums = with_outlier(sums, values[u], found[u], ROWS, TRANSPOSED, HALF)
        entries = ahead
    return tl.reshape(joined(sums, 0, 1, len(sums)), (BLOCK_N, ROWS))


@triton.jit
def outliers_of(entries):
    """Return the columns and the values of a turn's outliers, a tuple each."""
    cols = ()
    values = ()
    for u in tl.static_range(len(entries)):
        cols = cols + (entries[u] & 0xFFFF,)
        values = values + ((entries[u] & -65536).to(tl.float32, bitcast=True),)  # bf16 is the high half of float32
    return cols, values


@triton.jit
def gathered(col, x_ptr, stride_xm, M, ROWS: tl.constexpr, TRANSPOSED: tl.constexpr):
    """Load x in column `col`: four of its rows in an int64, or a tuple of all; arguments as for `outlier_tile`."""
    if TRANSPOSED:
        LANES: tl.constexpr = ROWS // 4
        return tl.load(x_ptr + (col * LANES | tl.arange(0, col.shape[0]) % LANES))
    else:
        found = ()
        for r in tl.static_range(ROWS):
            live = tl.full(col.shape, r, tl.int32) < M  # sums of rows from M on are never used
            found = found + (tl.load(x_ptr + col + r * stride_xm, mask=live),)
        return found


@triton.jit
def with_outlier(sums, value, found, ROWS: tl.constexpr, TRANSPOSED: tl.constexpr, HALF: tl.constexpr):
    """Return each sum plus value times x; found: x, from `gathered`."""
    if TRANSPOSED:
        return add_four(sums, value, found, HALF)
    else:
        added = ()
        for r in tl.static_range(ROWS):
            added = added + (sums[r] + value * found[r].to(tl.float32),)
        return added


@triton.jit
def repeated(value, TIMES: tl.constexpr):
    """Return a tuple of TIMES equal values."""
    values = ()
    for _ in tl.static_range(TIMES):
        values = values + (value,)
    return values


@triton.jit
def add_four(sums, value, four, HALF: tl.constexpr):
    """Return each of four sums plus value times x; four: the four rows of x, side by side in an int64."""
    low, high = four.to(tl.int32), (four >> 32).to(tl.int32)
    return (
        sums[0] + value * half_word(low, 0, HALF),
        sums[1] + value * half_word(low, 1, HALF),
        sums[2] + value * half_word(high, 0, HALF),
        sums[3] + value * half_word(high, 1, HALF),
    )


@triton.jit
def half_word(word, ODD: tl.constexpr, HALF: tl.constexpr):
    """Return the lower (ODD 0) or upper bf16, or fp16, of an int32, as float32."""
    if HALF:
        return (word >> 16 * ODD).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
    elif ODD:
        return (word & -65536).to(tl.float32, bitcast=True)
    else:
        return (word << 16).to(tl.float32, bitcast=True)


@triton.jit
def joined(values, FIRST: tl.constexpr, STEP: tl.constexpr, COUNT: tl.constexpr):
    """Join COUNT values, every STEP-th from FIRST on, to [..., 2, ..., 2] in registers: a `join` adds a fastest bit."""
    if COUNT == 1:
        return values[FIRST]
    else:
        even = joined(values, FIRST, 2 * STEP, COUNT // 2)
        odd = joined(values, FIRST + STEP, 2 * STEP, COUNT // 2)
        return tl.join(even, odd)
