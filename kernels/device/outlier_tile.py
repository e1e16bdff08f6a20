"""The outliers of a row tile, for the decode kernels: every lane walks the slots of its own rows.

An outlier needs the activations of one column, so for many rows they are read from x^T. The launch itself writes that:
the first programs before they begin with their superblocks, and they are long done when the first outlier is added.

A slot is loaded in the very layout in which it is used, and sums are kept in that layout: no slot needs an exchange
between lanes, nor a barrier. To that end the compiler must not see which lanes are neighbours, or it would load vectors
and exchange them: where a lane's own offset enters an address, it is by `|`. The sums become a tile once, at the end.

Lanes are one-dimensional, those of an outlier next to each other, so that a warp reads few lines of x^T: the L1 cache
looks up one line per cycle. Of two dimensions Triton 3.6 made neighbours of the weight rows, and read 32 lines for 8.
"""

import triton
import triton.language as tl

MOST_WRITERS = 2047  # of x^T: their number is the low 11 bits of a counter


@triton.jit
def longest_slice(slice_ptr, tile, TILE_ROWS: tl.constexpr):
    """Slots of a tile's longest row. Loaded before the superblocks, it brings the tile's bounds into the L1 cache, too
    (the last one may lie in a sector of its own): behind them, nothing hides the time that memory takes.
    """
    at = slice_ptr + tile * (TILE_ROWS // 16)
    longest = tl.load(at + 1) - tl.load(at)  # the first slice of a row block, or of a part of it, is its longest
    if TILE_ROWS == 128:
        longest = max(longest, tl.load(at + 5) - tl.load(at + 4))
    return longest


@triton.jit
def transpose_pieces(x_ptr, stride_xm, xt_ptr, M, K, first, step, ROWS: tl.constexpr, PIECE: tl.constexpr):
    """Write every `step`-th piece of PIECE columns of x^T [K, ROWS], from number `first` on; zero from row M on."""
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
    """Return when all of x^T is written; the launch's last program that is here leaves the counter at zero.

    Where a share is missing, the program writes all of it, the same values: to wait could be for a program that does
    not begin before this one ends.
    """
    programs = tl.num_programs(0) * tl.num_programs(1)
    # Programs that came here, in units of 2048, and below that the writers that are done.
    seen = tl.atomic_add(counter_ptr, 2048, sem="acquire", scope="gpu")
    tl.debug_barrier()
    if seen % 2048 < writers:
        transpose_pieces(x_ptr, stride_xm, xt_ptr, M, K, 0, 1, ROWS, PIECE)
        tl.debug_barrier()
    if seen // 2048 == programs - 1:
        tl.store(counter_ptr, 0)


@triton.jit
def entry_lines(entry_ptr, slice_ptr, tile, part, parts, TILE_ROWS: tl.constexpr):
    """Addresses of a part's first lines of a tile's entries, int64 [TILE_ROWS], and where the tile's end; how far it is
    to the part's next lines, and how often it has some. A line of 128 bytes has two slots."""
    bounds = slice_ptr + tile * (TILE_ROWS // 16)
    begin, end = tl.load(bounds) // 2, tl.cdiv(tl.load(bounds + TILE_ROWS // 16), 2)
    line = begin + part * TILE_ROWS + tl.arange(0, TILE_ROWS)
    first = (entry_ptr + line.to(tl.int64) * 32).to(tl.int64)
    last = (entry_ptr + end.to(tl.int64) * 32).to(tl.int64)
    return first, last, parts * (TILE_ROWS * 128), tl.cdiv(end - begin, parts * TILE_ROWS)


@triton.jit
def prefetch_lines(lines, last):
    """Bring the lines at these addresses into L2, those before `last`.

    A turn's entries are loaded while those of the turn before it are used, which takes less time than memory does.
    """
    tl.inline_asm_elementwise(
        "{ .reg .pred there; setp.ne.b32 there, $2, 0; @there prefetch.global.L2 [$1]; mov.u32 $0, 0; }",
        "=r,l,r", [lines, (lines < last).to(tl.int32)], dtype=tl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@triton.jit
def load_slots(entry_ptr, at, count, slot, SLOTS: tl.constexpr):
    """A tuple of the entries of SLOTS slots; zero behind a row's last."""
    entries = ()
    for u in tl.static_range(SLOTS):
        entries = entries + (tl.load(entry_ptr + (at + (slot + u) * 16), mask=slot + u < count, other=0),)
    return entries


@triton.jit
def outlier_places(
    slice_ptr, tile, M, BLOCK_N: tl.constexpr, ROWS: tl.constexpr, SLOTS: tl.constexpr, TRANSPOSED: tl.constexpr,
    RANGES: tl.constexpr,
):  # fmt: skip
    """Of each row of a tile: where its entries begin, and how many slots it has.

    TRANSPOSED: [BLOCK_N * ROWS / 4], and none for lanes whose four activation rows are M and beyond; else [BLOCK_N].
    RANGES: how many times the tile has its weight rows; each time it begins with the next SLOTS slots.
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
    x_ptr, stride_xm, entry_ptr, entries, at, count, longest, part, parts, M, BLOCK_N: tl.constexpr,
    ROWS: tl.constexpr, SLOTS: tl.constexpr, TRANSPOSED: tl.constexpr, BEYOND: tl.constexpr, HALF: tl.constexpr,
):  # fmt: skip
    """float32 [BLOCK_N, ROWS]: this part's outliers of a row tile times x. Parts take turns of SLOTS slots: where rows
    are in the tile more than once, each time is a part.

    entries: of the first turn, from `load_slots`; at, count: from `outlier_places`; longest: from `longest_slice`.
    Not TRANSPOSED: a lane has all activation rows of a weight row, and gathers x one by one. TRANSPOSED: it has four of
    them, and x_ptr is x^T [K, ROWS] as int64 [K, ROWS / 4].
    BEYOND: entries are of that form, of up to two outliers each (`entries.py`); HALF: x is fp16 instead of bf16.
    """
    if TRANSPOSED:
        LANES: tl.constexpr = ROWS // 4  # of a weight row
        sums = repeated(tl.zeros((BLOCK_N * LANES,), tl.float32), 4)
    else:
        sums = repeated(tl.zeros((BLOCK_N,), tl.float32), ROWS)
    for slot in range(part * SLOTS, longest, parts * SLOTS):
        ahead = load_slots(entry_ptr, at, count, slot + parts * SLOTS, SLOTS)
        # Behind the last slot of a row value and column are zero, which x has, so no lane needs a mask of its own.
        cols, values = outliers_of(entries, BEYOND)
        found = ()  # all of it asked for before any is added, or the compiler would save registers and wait in between
        for u in tl.static_range(len(cols)):
            found = found + (gathered(cols[u], x_ptr, stride_xm, M, ROWS, TRANSPOSED),)
        for u in tl.static_range(len(cols)):
            sums = with_outlier(sums, values[u], found[u], ROWS, TRANSPOSED, HALF)
        entries = ahead
    return tl.reshape(joined(sums, 0, 1, len(sums)), (BLOCK_N, ROWS))


@triton.jit
def first_outlier(entry, BEYOND: tl.constexpr):
    """Column, int32, and value, float32, of an entry, or of the first of its two."""
    if BEYOND:
        # Its digit, in bits 8 to 11, becomes the last of a float between 2^15 and 2^16: 2^15 + 8 more than it is.
        digit = ((entry & 0xF00) ^ 0x47000800).to(tl.float32, bitcast=True) - 32776.0
        # Alone, it is multiplied by a power of 4: twice bits 12 to 15 are added to the float's exponent.
        power = tl.where((entry & 0xFF) == 0, (entry & 0xF000) << 12, 0)
        value = (digit.to(tl.int32, bitcast=True) + power).to(tl.float32, bitcast=True)
        return (entry.to(tl.uint32, bitcast=True) >> 16).to(tl.int32, bitcast=True), value
    else:
        return entry & 0xFFFF, (entry & -65536).to(tl.float32, bitcast=True)  # bf16 is the high half of float32


@triton.jit
def second_outlier(entry, col):
    """The same of the second of its two, zero if there is none; col: of the first."""
    # In bits 12 to 15, so of a float between 2^11 and 2^12.
    digit = ((entry & 0xF000) ^ 0x45008000).to(tl.float32, bitcast=True) - 2056.0
    return col + (entry & 0xFF), tl.where((entry & 0xFF) == 0, 0.0, digit)


@triton.jit
def outliers_of(entries, BEYOND: tl.constexpr):
    """Tuples of the columns and the values of a turn's outliers."""
    cols = ()
    values = ()
    for u in tl.static_range(len(entries)):
        col, value = first_outlier(entries[u], BEYOND)
        cols = cols + (col,)
        values = values + (value,)
        if BEYOND:
            col, value = second_outlier(entries[u], col)
            cols = cols + (col,)
            values = values + (value,)
    return cols, values


@triton.jit
def gathered(col, x_ptr, stride_xm, M, ROWS: tl.constexpr, TRANSPOSED: tl.constexpr):
    """x in column col: four of its rows in an int64, or a tuple of all; arguments as of `outlier_tile`."""
    if TRANSPOSED:
        LANES: tl.constexpr = ROWS // 4
        return tl.load(x_ptr + (col * LANES | tl.arange(0, col.shape[0]) % LANES))
    else:
        found = ()
        for r in tl.static_range(ROWS):
            live = tl.full(col.shape, r, tl.int32) < M  # what is added from row M on is never used
            found = found + (tl.load(x_ptr + col + r * stride_xm, mask=live),)
        return found


@triton.jit
def with_outlier(sums, value, found, ROWS: tl.constexpr, TRANSPOSED: tl.constexpr, HALF: tl.constexpr):
    """Each sum plus value times x, which is `gathered`."""
    if TRANSPOSED:
        return add_four(sums, value, found, HALF)
    else:
        added = ()
        for r in tl.static_range(ROWS):
            added = added + (sums[r] + value * found[r].to(tl.float32),)
        return added


@triton.jit
def repeated(value, TIMES: tl.constexpr):
    """A tuple of equal values."""
    values = ()
    for _ in tl.static_range(TIMES):
        values = values + (value,)
    return values


@triton.jit
def add_four(sums, value, four, HALF: tl.constexpr):
    """Each of four sums plus value times x, the four rows of x side by side in an int64."""
    low, high = four.to(tl.int32), (four >> 32).to(tl.int32)
    return (
        sums[0] + value * half_word(low, 0, HALF),
        sums[1] + value * half_word(low, 1, HALF),
        sums[2] + value * half_word(high, 0, HALF),
        sums[3] + value * half_word(high, 1, HALF),
    )


@triton.jit
def half_word(word, ODD: tl.constexpr, HALF: tl.constexpr):
    """float32: the lower (ODD 0) or upper bf16, or fp16, of an int32."""
    if HALF:
        return (word >> 16 * ODD).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
    elif ODD:
        return (word & -65536).to(tl.float32, bitcast=True)
    else:
        return (word << 16).to(tl.float32, bitcast=True)


@triton.jit
def joined(values, FIRST: tl.constexpr, STEP: tl.constexpr, COUNT: tl.constexpr):
    """[..., 2, ..., 2] of COUNT values, every STEP-th from FIRST: in registers, a `join` being a new fastest bit."""
    if COUNT == 1:
        return values[FIRST]
    else:
        even = joined(values, FIRST, 2 * STEP, COUNT // 2)
        odd = joined(values, FIRST + STEP, 2 * STEP, COUNT // 2)
        return tl.join(even, odd)
