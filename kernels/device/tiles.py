"""Addresses, packed words and scales of a row tile, superblock by superblock, for the decode kernels.

Invariant: a tile covers whole row blocks of 64 rows, or a whole part of one, so no word of the weight is ever masked.
The layout is that of `layout/codes.py`.
"""

import triton
import triton.language as tl

from vllm_latq.kernels.device.fields import planes_of, words_of


@triton.jit
def tile_rows(tile, supers, share, BLOCK_N: tl.constexpr, RANGES: tl.constexpr):
    """Return where the rows of a tile lie, for the tile's first superblock.

    RANGES > 1: the tile repeats its BLOCK_N / RANGES weight rows RANGES times, each time `share` superblocks further.

    Returns:
        The superblock of the first row, int64; how many superblocks further each row's lies, int32 [BLOCK_N]; and
        each row's number in its row block, int32 [BLOCK_N].
    """
    ROWS: tl.constexpr = BLOCK_N // RANGES
    rn = tl.arange(0, BLOCK_N)
    if RANGES > 1:
        return (tile // (64 // ROWS)).to(tl.int64) * supers, rn // ROWS * share, tile % (64 // ROWS) * ROWS + rn % ROWS
    else:
        return (tile * (BLOCK_N // 64)).to(tl.int64) * supers, rn // 64 * supers, rn % 64


@triton.jit
def tile_words(word_ptr, tile, supers, sb, share, BITS: tl.constexpr, BLOCK_N: tl.constexpr, RANGES: tl.constexpr):
    """Return the addresses of plane 0 of superblock `sb` in a row tile, [BLOCK_N, words]; RANGES as in `tile_rows`."""
    WORDS: tl.constexpr = words_of(BITS)
    SIZE: tl.constexpr = planes_of(BITS) * 64 * WORDS  # of one row block's part of a superblock
    block, further, row = tile_rows(tile, supers, share, BLOCK_N, RANGES)
    rw = tl.arange(0, WORDS)
    words = word_ptr + (block + sb) * SIZE
    words += (further * SIZE + row * WORDS)[:, None] + rw[None, :]
    return words


@triton.jit
def prefetch_tile(word_ptr, tile, supers, sb, share, BITS: tl.constexpr, BLOCK_N: tl.constexpr, RANGES: tl.constexpr):
    """Bring the words of superblock `sb` of a row tile into L2; arguments as in `tile_words`. NVIDIA only.

    A row has 32 bytes in each plane, a sector; rows of 8-bit codes have 64.
    """
    WORDS: tl.constexpr = words_of(BITS)
    SIZE: tl.constexpr = planes_of(BITS) * 64 * WORDS
    block, further, row = tile_rows(tile, supers, share, BLOCK_N, RANGES)
    first = word_ptr + (block + sb) * SIZE + further * SIZE + row * WORDS
    for sector in tl.static_range(planes_of(BITS) * WORDS // 8):
        at = sector // (WORDS // 8) * 64 * WORDS + sector % (WORDS // 8) * 8
        tl.inline_asm_elementwise(
            "prefetch.global.L2 [$1]; mov.u32 $0, 0;", "=r,l", [first + at], dtype=tl.int32, is_pure=False, pack=1
        )


@triton.jit
def tile_scale_pairs(
    scale_ptr, tile, supers, sb, share, GROUP: tl.constexpr, BLOCK_N: tl.constexpr, RANGES: tl.constexpr
):
    """Return the addresses of the first pair of group scales of superblock `sb` in a row tile, [BLOCK_N]."""
    PAIRS: tl.constexpr = 128 // GROUP
    block, further, row = tile_rows(tile, supers, share, BLOCK_N, RANGES)
    return scale_ptr + (block + sb) * (PAIRS * 64) + further * (PAIRS * 64) + row


@triton.jit
def activation_places(SIZE: tl.constexpr, BLOCK_M: tl.constexpr, PAIRED: tl.constexpr):
    """Return row and column of each activation of a piece: [SIZE, BLOCK_M], or with PAIRED [SIZE / 16 * BLOCK_M, 16].

    With PAIRED the eight rows of a matrix fragment lie side by side in shared memory, and in different banks.
    """
    if PAIRED:
        block = tl.arange(0, SIZE // 16 * BLOCK_M)[:, None]
        within = by_four(tl.arange(0, 16)) if BLOCK_M == 8 else tl.arange(0, 16)
        col = block // BLOCK_M * 16 + within[None, :]
        row = block % BLOCK_M
    else:
        col = tl.arange(0, SIZE)[:, None]
        row = tl.arange(0, BLOCK_M)[None, :]
    return row, col


@triton.jit
def by_four(col):
    """Return the same columns in a form that shows the compiler runs of four neighbours, and no longer ones.

    The compiler then copies 8 bytes of x at a time, which pass through the L1 cache. Copies of 16 bytes bypass it, so
    all programs would ask L2 for the same few lines at once.
    """
    return tl.multiple_of(col // 8 * 8 | col // 4 % 2 * 4, 4) + col % 4


@triton.jit
def load_planes(words, BITS: tl.constexpr):
    """Load each plane, int32 [BLOCK_N, words], from the addresses of plane 0, which replaces missing planes."""
    PLANES: tl.constexpr = planes_of(BITS)
    PLANE: tl.constexpr = 64 * words_of(BITS)
    a = tl.load(words, eviction_policy="evict_first")
    b = tl.load(words + PLANE, eviction_policy="evict_first") if PLANES > 1 else a
    c = tl.load(words + 2 * PLANE, eviction_policy="evict_first") if PLANES > 2 else a
    d = tl.load(words + 3 * PLANE, eviction_policy="evict_first") if PLANES > 3 else a
    return a, b, c, d


@triton.jit
def plane(a, b, c, d, PLANE: tl.constexpr):
    """Return one of the planes that `load_planes` returned."""
    return a if PLANE == 0 else b if PLANE == 1 else c if PLANE == 2 else d


@triton.jit
def load_scale(pairs, G: tl.constexpr):
    """Load the scales of group G of a superblock, float32 [rows], from the addresses of its first pair."""
    pair = tl.load(pairs + (G // 2) * 64)
    bits = (pair << 16) if G % 2 == 0 else (pair & -65536)  # bf16 bits are the high half of float32's
    return bits.to(tl.float32, bitcast=True)
