"""Reading a row tile superblock by superblock, for the decode kernels: addresses, packed words and scales.

Invariant: a tile covers whole row blocks of 64 rows, so no word of the weight is ever masked. Layout: `layout.py`.
"""

import triton
import triton.language as tl

from vllm_latq.kernels.fields import planes_of, words_of


@triton.jit
def tile_words(word_ptr, tile, supers, sb, BITS: tl.constexpr, BLOCK_N: tl.constexpr):
    """Addresses [BLOCK_N, words] of plane 0 of superblock `sb` in row tile `tile`."""
    WORDS: tl.constexpr = words_of(BITS)
    SIZE: tl.constexpr = planes_of(BITS) * 64 * WORDS  # of one row block's part of a superblock
    rn = tl.arange(0, BLOCK_N)
    rw = tl.arange(0, WORDS)
    block = (tile * (BLOCK_N // 64)).to(tl.int64) * supers + sb
    words = word_ptr + block * SIZE
    words += ((rn // 64) * (supers * SIZE) + (rn % 64) * WORDS)[:, None] + rw[None, :]
    return words


@triton.jit
def tile_scale_pairs(scale_ptr, tile, supers, sb, GROUP: tl.constexpr, BLOCK_N: tl.constexpr):
    """Addresses [BLOCK_N] of the first pair of group scales of superblock `sb` in row tile `tile`."""
    PAIRS: tl.constexpr = 128 // GROUP
    rn = tl.arange(0, BLOCK_N)
    block = (tile * (BLOCK_N // 64)).to(tl.int64) * supers + sb
    return scale_ptr + block * (PAIRS * 64) + (rn // 64) * (supers * PAIRS * 64) + rn % 64


@triton.jit
def activation_places(SIZE: tl.constexpr, BLOCK_M: tl.constexpr, PAIRED: tl.constexpr):
    """Row and column of each activation of a piece: a tile [SIZE, BLOCK_M], or PAIRED [SIZE / 16 * BLOCK_M, 16].

    In the latter the eight rows of a matrix fragment lie side by side in shared memory, and in different banks.
    """
    if PAIRED:
        block = tl.arange(0, SIZE // 16 * BLOCK_M)[:, None]
        col = block // BLOCK_M * 16 + tl.arange(0, 16)[None, :]
        row = block % BLOCK_M
    else:
        col = tl.arange(0, SIZE)[:, None]
        row = tl.arange(0, BLOCK_M)[None, :]
    return row, col


@triton.jit
def load_planes(words, BITS: tl.constexpr):
    """int32 [BLOCK_N, words] of each plane at the addresses of plane 0; the first stands in for missing ones."""
    PLANES: tl.constexpr = planes_of(BITS)
    PLANE: tl.constexpr = 64 * words_of(BITS)
    a = tl.load(words, eviction_policy="evict_first")
    b = tl.load(words + PLANE, eviction_policy="evict_first") if PLANES > 1 else a
    c = tl.load(words + 2 * PLANE, eviction_policy="evict_first") if PLANES > 2 else a
    d = tl.load(words + 3 * PLANE, eviction_policy="evict_first") if PLANES > 3 else a
    return a, b, c, d


@triton.jit
def plane(a, b, c, d, PLANE: tl.constexpr):
    """One of the planes that `load_planes` returned."""
    return a if PLANE == 0 else b if PLANE == 1 else c if PLANE == 2 else d


@triton.jit
def load_scale(pairs, G: tl.constexpr):
    """float32 [rows]: the scales of group G of a superblock, from the addresses of its first pair."""
    pair = tl.load(pairs + (G // 2) * 64)
    bits = (pair << 16) if G % 2 == 0 else (pair & -65536)  # bf16 bits are the high half of float32's
    return bits.to(tl.float32, bitcast=True)
