"""Outliers spread over a dense piece of a row tile in shared memory, which tensor cores multiply by x.

A piece has SIZE columns, those of one product of the inliers, so x is in place already. Entries are written to their
places, every thread reads its part of the tensor cores' operand, and the places are set to zero again:

    write | barrier | read, multiply | barrier | erase | barrier

The piece lies in memory as [columns / 16, rows / 16, row % 8, 4 threads, column / 8 % 2, row / 8 % 2, 2 columns]: 16
bytes are the four registers of a thread for one product. Places differ, so no two threads write one, and sums have a
fixed order. Without ASM (Triton's interpreter) the same piece is a product
of two matrices of zeros and ones, with the entries' values.

Many functions share the parameters LANES (threads, each of which has an entry of a turn), SLOTS (entries of a thread
that are written at once) and RANGES (times that the tile repeats its weight rows, each with lanes of its own).
"""

import triton
import triton.language as tl

from vllm_latq.kernels.device.product import multiply
from vllm_latq.kernels.device.registers import halves, opaque_copy


@triton.constexpr_function
def reserve_text(size: int) -> str:
    """Return the assembly that reserves shared memory beside the compiler's own, and returns its address."""
    return f"{{ .shared .align 128 .b8 spread[{size}]; mov.u32 $0, spread; }}"


@triton.jit
def reserve(BLOCK_N: tl.constexpr, SIZE: tl.constexpr):
    """Return the address of shared memory for a piece, all zeros."""
    base = tl.inline_asm_elementwise(
        reserve_text(2 * BLOCK_N * SIZE), "=r,r", [0], dtype=tl.int32, is_pure=False, pack=1
    )
    tl.inline_asm_elementwise(
        "{ .reg .b32 nil; mov.u32 nil, 0; st.shared.v4.b32 [$1], {nil, nil, nil, nil}; mov.u32 $0, 0; }",
        "=r,r", [base + tl.arange(0, BLOCK_N * SIZE // 8) * 16], dtype=tl.int32, is_pure=False, pack=1,
    )  # fmt: skip
    wait_for_all()
    return base


@triton.jit
def wait_for_all():
    """Wait for all threads of the program. Loops with the compiler's own barriers would not be pipelined."""
    tl.inline_asm_elementwise("bar.sync 0; mov.u32 $0, 0;", "=r,r", [0], dtype=tl.int32, is_pure=False, pack=1)


@triton.jit
def load_bounds(lists, ahead, left, LISTS: tl.constexpr, LISTED: tl.constexpr):
    """Return where the entries of a tile begin and end, in half a superblock; no entries if none is left there.

    Args:
        lists: address of the tile's first list in that half of a superblock; it has LISTED.
        ahead: superblocks to go, LISTS lists each.
        left: superblocks from there on.
    """
    there = min(max(left - ahead, 0), 1)
    lists += there * ahead * LISTS
    return tl.load(lists), tl.load(lists + LISTED) * there


@triton.jit
def load_turn(entry_ptr, first, end, LANES: tl.constexpr, SLOTS: tl.constexpr, RANGES: tl.constexpr):
    """Return a tuple of entries, int32 [LANES] each, from `first` up to `end`; zero from there on."""
    SHARE: tl.constexpr = LANES // RANGES
    at = first + tl.arange(0, LANES) % SHARE
    left = end - at
    entries = ()
    for u in tl.static_range(SLOTS):
        entries = entries + (tl.load(entry_ptr + at + u * SHARE, mask=u * SHARE < left, other=0),)
    return entries


@triton.jit
def place_of(entry, sub, BLOCK_N: tl.constexpr, SIZE: tl.constexpr, RANGES: tl.constexpr, PAIRED: tl.constexpr):
    """Return the place of an entry in its piece, in 16-bit numbers; and the entry, zero if it is of another piece.

    sub: number of the piece in its half of the superblock.
    """
    TILE_ROWS: tl.constexpr = BLOCK_N // RANGES
    LANES: tl.constexpr = entry.shape[0]
    if SIZE < 128:
        entry = tl.where((entry >> 12 & 3) // (SIZE // 32) == sub, entry, 0)
    place = entry
    if not PAIRED:  # columns in their own order
        place = place & -29 | place << 1 & 24 | place >> 2 & 4
    if TILE_ROWS == 128:
        place = place & (SIZE * 128 - 1)
    else:
        place = place & (TILE_ROWS * 16 - 1) | (place >> 11 & (SIZE // 16 - 1)) * (BLOCK_N * 16)
    if RANGES > 1:
        place += tl.arange(0, LANES) // (LANES // RANGES) * (TILE_ROWS * 16)
    return place, entry


@triton.jit
def write_entry(at, entry, ERASE: tl.constexpr):
    """Write the value of an entry, with ERASE zero, at its address in shared memory; nothing if the entry is zero."""
    tl.inline_asm_elementwise(
        "{ .reg .pred there; .reg .b16 low; .reg .b16 value; setp.ne.b32 there, $2, 0; mov.b32 {low, value}, $3; "
        "@there st.shared.b16 [$1], value; mov.u32 $0, 0; }",
        "=r,r,r,r", [at, entry, 0 if ERASE else entry], dtype=tl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@triton.jit
def read_piece(base, BLOCK_N: tl.constexpr, SIZE: tl.constexpr, WARPS: tl.constexpr):
    """Return the piece, bf16 [BLOCK_N, SIZE], each thread its 16 bytes at a time."""
    # All reads depend on this number, which is made after the barrier: otherwise the compiler could read before.
    now = tl.inline_asm_elementwise("mov.u32 $0, $1;", "=r,r", [base], dtype=tl.int32, is_pure=False, pack=1)
    row, col = tl.arange(0, BLOCK_N // 2)[:, None], tl.arange(0, SIZE // 4)[None, :]
    # The part that differs between threads comes first: the rest is a constant in the instruction that reads.
    at = now + (row // 8 % WARPS * 512 + row % 8 * 64 + col % 4 * 16)
    at += row // 8 // WARPS * (WARPS * 512) + col // 4 * (BLOCK_N * 32)
    a, b, c, d = tl.inline_asm_elementwise(
        "ld.shared.v4.b32 {$0, $1, $2, $3}, [$4];", "=r,=r,=r,=r,r", [at], dtype=(tl.int32,) * 4, is_pure=True, pack=1
    )
    words = tl.reshape(tl.join(tl.join(a, c), tl.join(b, d)), (BLOCK_N // 16, 8, SIZE // 16, 4, 2, 2))
    return halves(tl.reshape(tl.permute(words, (0, 5, 1, 2, 4, 3)), (BLOCK_N, SIZE // 2)), False, False)


@triton.jit
def after(v):
    """Return v, which the compiler has to have computed here: what made it was read before the next barrier."""
    return tl.inline_asm_elementwise("mov.b32 $0, $1;", "=f,f", [v], dtype=tl.float32, is_pure=False, pack=1)


@triton.jit
def as_pairs(x):
    """Put [columns, rows], from `paired_columns`, in an order in which this product uses registers as those before it.

    They give a thread four of 16 columns side by side, and four that are 16 further, and pair the first halves of both.
    This one gives it two, and two that are 8 further. So of 32 columns (h, t, j as in `paired_words`) j comes first.
    """
    fours = tl.reshape(x, (x.shape[0] // 32, 2, 4, 2, 2, x.shape[1]))
    return tl.reshape(tl.permute(fours, (0, 3, 1, 2, 4, 5)), (x.shape[0], x.shape[1]))


@triton.jit
def composed(place, entry, BLOCK_N: tl.constexpr, SIZE: tl.constexpr):
    """Return the piece of some entries, float32 [BLOCK_N, SIZE], without shared memory."""
    row = (place >> 8) % (BLOCK_N // 16) * 16 + (place >> 1 & 1) * 8 + (place >> 5 & 7)
    col = place // (16 * BLOCK_N) * 16 + (place >> 2 & 1) * 8 + (place >> 3 & 3) * 2 + (place & 1)
    value = (entry & -65536).to(tl.float32, bitcast=True)
    left = tl.where(row[None, :] == tl.arange(0, BLOCK_N)[:, None], value[None, :], 0.0)
    right = tl.where(col[:, None] == tl.arange(0, SIZE)[None, :], 1.0, 0.0)
    return tl.dot(left, right, input_precision="ieee")


@triton.jit
def spread_product(
    acc,  # float32 [BLOCK_N, BLOCK_M]
    x,  # bf16 [SIZE, BLOCK_M]
    entries,  # from `load_turn`
    sub,  # number of the piece in its half of the superblock
    base,  # from `reserve`
    SIZE: tl.constexpr,
    RANGES: tl.constexpr,
    PAIRED: tl.constexpr,
    ASM: tl.constexpr,
    UPCAST: tl.constexpr,
):
    """Return acc plus a turn's outliers times x."""
    BLOCK_N: tl.constexpr = acc.shape[0]
    if PAIRED:
        x = as_pairs(opaque_copy(x, 2, PAIRED))
    places = ()
    placed = ()
    for u in tl.static_range(len(entries)):
        place, entry = place_of(entries[u], sub, BLOCK_N, SIZE, RANGES, PAIRED)
        if ASM:
            place = base + 2 * place
            write_entry(place, entry, False)
            places = places + (place,)
            placed = placed + (entry,)
        else:
            acc = multiply(composed(place, entry, BLOCK_N, SIZE), x, acc, UPCAST)
    if ASM:
        wait_for_all()
        acc = after(multiply(read_piece(base, BLOCK_N, SIZE, entries[0].shape[0] // 32), x, acc, UPCAST))
        wait_for_all()
        for u in tl.static_range(len(places)):
            write_entry(places[u], placed[u], True)
        wait_for_all()
    return acc
