"""The trellis code decoded in registers, straight into operands of the integer tensor cores.

A lane of a warp holds in register r of the first operand of `mma.m16n8k32` the four bytes that the window of step
4 lane + r hashes to, so no lane needs the bits of another's weights: it loads the 32-bit words that end and precede its
own 4 * RATE bits.

ASM: NVIDIA inline assembly; without it, the same in plain operators.
"""

import triton
import triton.language as tl

from vllm_latq.kernels.layout.trellis import FACTORS, MANTISSAS, MULTIPLIERS, RATES, RUN_FIELDS, TWO_TERMS_FROM


@triton.constexpr_function
def rate_count():
    """Return how many rates there are."""
    return len(RATES)


@triton.constexpr_function
def run_fields():
    """Return the fields of a row of `runs`."""
    return RUN_FIELDS


@triton.constexpr_function
def rate_of(index):
    """Return a rate."""
    return RATES[index]


@triton.constexpr_function
def factor_of(index):
    """Return what the values of a rate are multiplied by."""
    return FACTORS[RATES[index]]


@triton.constexpr_function
def is_served(mask, index):
    """Return whether bit `rate` of a mask of rates is set."""
    return bool(mask >> RATES[index] & 1)


@triton.constexpr_function
def terms_of(rate):
    """Return how many hashes are added for a value."""
    return 2 if rate >= TWO_TERMS_FROM else 1


@triton.constexpr_function
def multiplier_of(term):
    """Return the multiplier of a hash, as a signed integer."""
    return MULTIPLIERS[term] - (1 << 32)


@triton.constexpr_function
def twice(byte):
    """Return the selector of `prmt` for bytes `byte` and `byte + 1`, twice."""
    return 0x1010 + 0x1111 * byte


@triton.constexpr_function
def mantissa_of(eighth):
    """Return the 23 bits after the leading one of 2^(eighth / 8), rounded to float32."""
    return MANTISSAS[eighth]


@triton.jit
def octave_eighths(exponent):
    """Return 2^(exponent / 8) of int8, rounded to float32, which `tl.exp2` would approximate."""
    exponent = exponent.to(tl.int32)
    bits = ((exponent >> 3) + 127) << 23
    for eighth in tl.static_range(1, 8):
        bits += tl.where((exponent & 7) == eighth, mantissa_of(eighth), 0)
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def shift_pair(high, low, bits, ASM: tl.constexpr):
    """Return the 32 bits of high:low that begin at bit `bits` (0 to 31) of low."""
    if ASM:
        return tl.inline_asm_elementwise(
            "shf.r.wrap.b32 $0, $1, $2, $3;", "=r,r,r,r", [low, high, bits], dtype=tl.int32, is_pure=True, pack=1
        )
    else:
        both = (high.to(tl.int64) << 32) | (low.to(tl.int64) & 0xFFFFFFFF)
        return (both >> bits).to(tl.int32)


@triton.jit
def bytes_of_pair(high, low, selector):
    """Return four bytes of high:low, which the nibbles of `selector` name."""
    return tl.inline_asm_elementwise(
        "prmt.b32 $0, $1, $2, $3;", "=r,r,r,r", [low, high, selector], dtype=tl.int32, is_pure=True, pack=1
    )


@triton.jit
def even_window(top, high, low, after, BIT: tl.constexpr):
    """Return the 16 bits of top:high:low that begin at bit `after` + BIT, in both halves of a word.

    `after` is a multiple of 8 below 32, as it is at even rates. So one shift brings all windows whose BIT has one rest
    modulo 8 to whole bytes, and those of rest 0 need none.
    """
    WITHIN: tl.constexpr = BIT % 8
    if WITHIN == 0:
        return bytes_of_pair(high, low, (after + BIT) // 8 * 0x1111 + 0x1010)
    shifted = shift_pair(high, low, after + WITHIN, True)
    further = shifted
    if BIT >= 24:
        further = shift_pair(top, high, after + WITHIN, True)
    return bytes_of_pair(further, shifted, twice(BIT // 8))


@triton.jit
def aligned_window(high, low, BIT: tl.constexpr, ASM: tl.constexpr):
    """Return the 16 bits of high:low that begin at bit BIT, in both halves of a word."""
    WITHIN: tl.constexpr = BIT % 8
    if not ASM:
        both = (high.to(tl.int64) << 32) | (low.to(tl.int64) & 0xFFFFFFFF)
        bits = (both >> BIT) & 0xFFFF
        return (bits | (bits << 16)).to(tl.int32)
    shifted = low
    further = high
    if WITHIN > 0 and BIT < 32:
        shifted = shift_pair(high, low, WITHIN, ASM)
    if WITHIN > 0 and BIT >= 24:
        further = (high.to(tl.uint32, bitcast=True) >> WITHIN).to(tl.int32, bitcast=True)
    if BIT < 24:
        further = shifted
    if BIT >= 32:
        shifted = further
    return bytes_of_pair(further, shifted, twice(BIT // 8))


@triton.jit
def unit_windows(words, RATE: tl.constexpr, ASM: tl.constexpr):
    """Load a unit; return the doubled windows of registers 0 to 3 of each lane, int32 [2, 4, 8, 4, 4] each.

    Dimensions: group, tile row, lane (2), tile.
    """
    COUNT: tl.constexpr = 4 * RATE
    groups = tl.arange(0, 2)[:, None, None, None, None]
    rows = tl.arange(0, 4)[None, :, None, None, None]
    lane = tl.arange(0, 8)[None, None, :, None, None] * 4 + tl.arange(0, 4)[None, None, None, :, None]
    tiles = tl.arange(0, 4)[None, None, None, None, :]
    end = (lane + 1) * COUNT
    last = (end - 1) // 32
    after = (last + 1) * 32 - end  # bits after the lane's in the word in which they end
    unit = (groups * 4 + rows) * (COUNT * 4) + tiles
    low = tl.load(words + (unit + last * 4), eviction_policy="evict_first", cache_modifier=".ca")
    before = unit + (last + COUNT - 1) % COUNT * 4
    high = tl.load(words + before, eviction_policy="evict_first", cache_modifier=".ca")
    top = high
    if RATE == 7 or RATE > 8:  # the lane's windows may begin two words before the last
        first = unit + (last + COUNT - 2) % COUNT * 4
        top = tl.load(words + first, eviction_policy="evict_first", cache_modifier=".ca")
    if ASM and RATE % 2 == 0:
        a = even_window(top, high, low, after, 3 * RATE)
        b = even_window(top, high, low, after, 2 * RATE)
        c = even_window(top, high, low, after, RATE)
        d = even_window(top, high, low, after, 0)
    else:
        low = shift_pair(high, low, after, ASM)
        if 3 * RATE + 16 > 32:
            high = shift_pair(top, high, after, ASM)
        a = aligned_window(high, low, 3 * RATE, ASM)
        b = aligned_window(high, low, 2 * RATE, ASM)
        c = aligned_window(high, low, RATE, ASM)
        d = aligned_window(high, low, 0, ASM)
    return a, b, c, d


@triton.jit
def tile_bytes(a, b, c, d):
    """Arrange registers 0 to 3, int32 [2, R, 8, 4, T], as an operand int8 [R * 16, T * 64], without moving anything.

    Columns: group, tile, place of the lane (4), pair of weights (2), byte.
    """
    v = tl.join(tl.join(a, b), tl.join(c, d))  # group, tile row, row, place, tile, row half, pair
    v = tl.reshape(tl.permute(v, (1, 5, 2, 0, 4, 3, 6)), (v.shape[1] * 16, v.shape[4] * 16))
    h = tl.reshape(tl.join(v.to(tl.int16), (v >> 16).to(tl.int16)), (v.shape[0], 2 * v.shape[1]))
    return tl.reshape(tl.join(h.to(tl.int8), (h >> 8).to(tl.int8)), (v.shape[0], 4 * v.shape[1]))


@triton.jit
def activation_bytes(x, COLUMNS: tl.constexpr):
    """Arrange activations int8 [tiles / 2 * COLUMNS, 64] as [tiles * 32, COLUMNS], in the order of `tile_bytes`.

    In memory the 16 bytes of two tiles that a lane multiplies are side by side: place (4), pair, tile (2), byte.
    """
    v = tl.reshape(x, (x.shape[0] // COLUMNS, COLUMNS, 4, 2, 2, 4))
    return tl.reshape(tl.permute(v, (0, 4, 2, 3, 5, 1)), (x.shape[0] // COLUMNS * 64, COLUMNS))


@triton.jit
def opaque_bytes(v):
    """Return a copy of bytes that Triton cannot recognise as v: see `registers.opaque_copy`."""
    bits = v.to(tl.uint8, bitcast=True)
    return (bits | (bits >> 4 >> 4)).to(tl.int8, bitcast=True)


@triton.jit
def unit_products(words, x, RATE: tl.constexpr, ASM: tl.constexpr):
    """Return the products of the unit at `words` with x, int32 [64, COLUMNS]."""
    a, b, c, d = unit_windows(words, RATE, ASM)
    m: tl.constexpr = multiplier_of(0)
    sums = tl.dot(tile_bytes(a * m, b * m, c * m, d * m), x, out_dtype=tl.int32)
    if terms_of(RATE) == 2:
        m2: tl.constexpr = multiplier_of(1)
        sums = tl.dot(tile_bytes(a * m2, b * m2, c * m2, d * m2), opaque_bytes(x), sums, out_dtype=tl.int32)
    return sums
