"""Decode kernel without tensor cores: y = x W^T for at most 8 rows of x, one fused multiply-add per weight and row.

The alternative to `ssqr.ssqr_tensor_core` for the smallest batches; same tile words, outliers, split-K and epilogue.
A lane keeps some words of some rows; a field becomes a float32 by one `lop3`, because bf16 bits are the high half of a
float32's. The bias of a field leaves once per group and word column, as a product with the activations:

    for each group:   p[row, word, m] = sum over fields and halves of (bias + integer) * x
                      acc += scale * (p - sum of bias * x)
"""

import torch
import triton
import triton.language as tl

from vllm_latq.kernels.configs import COMPILER, DecodeConfig, slots_of
from vllm_latq.kernels.decode.ssqr import add_parts, output_rows, store_rows
from vllm_latq.kernels.device.fields import (
    field_bias,
    field_exponent,
    field_mask,
    field_offset,
    field_plane,
    field_shift,
    planes_of,
    spare_shift,
    words_of,
)
from vllm_latq.kernels.device.outlier_tile import load_slots, longest_slice, outlier_places, outlier_tile
from vllm_latq.kernels.device.tiles import load_planes, load_scale, plane, tile_scale_pairs, tile_words
from vllm_latq.kernels.device.unpack import mask_xor, shifted
from vllm_latq.kernels.layout.weight import KernelWeight


@triton.jit
def wide_field(
    a, b, c, d, F: tl.constexpr, H: tl.constexpr, BITS: tl.constexpr, DIGIT: tl.constexpr, ASM: tl.constexpr
):
    """float32 [R, words]: bias + integer of half H of field F (the low or high digit of it, for 8 bits)."""
    down: tl.constexpr = 0 if H == 1 else 16  # the low half is moved up to where the high half is
    high: tl.constexpr = -65536
    exponent: tl.constexpr = field_exponent(BITS, F, False, DIGIT) & high
    if BITS == 3 and F == 15:
        first: tl.constexpr = 1 << (16 + field_offset(3, 15, False))
        v = mask_xor(shifted(a, spare_shift(0, False) - down), first, exponent, ASM)
        v = mask_xor(shifted(b, spare_shift(1, False) - down), 2 * first, v, ASM)
        v = mask_xor(shifted(c, spare_shift(2, False) - down), 4 * first, v, ASM)
    else:
        v = shifted(plane(a, b, c, d, field_plane(BITS, F, DIGIT)), field_shift(BITS, F, False) - down)
        v = mask_xor(v, field_mask(BITS, F, False) & high, exponent, ASM)
    return v.to(tl.float32, bitcast=True)


@triton.jit
def add_field(
    p, q, a, b, c, d, x_ptr, at, live, F: tl.constexpr, BITS: tl.constexpr, DIGIT: tl.constexpr, MIDRISE: tl.constexpr,
    ASM: tl.constexpr,
):  # fmt: skip
    """p + (bias + integer) * x and q + bias * x over the two halves of field F.

    p: float32 [R, words, ROWS]; q: float32 [words, ROWS], the same for all weight rows.
    at: int32 [words, ROWS], offset in x of the superblock's first column of each word, per activation row.
    """
    columns: tl.constexpr = 2 * words_of(BITS)
    low = tl.load(x_ptr + at + F * columns, mask=live, other=0.0).to(tl.float32)
    high = tl.load(x_ptr + at + F * columns + 1, mask=live, other=0.0).to(tl.float32)
    p += wide_field(a, b, c, d, F, 0, BITS, DIGIT, ASM)[:, :, None] * low[None, :, :]
    p += wide_field(a, b, c, d, F, 1, BITS, DIGIT, ASM)[:, :, None] * high[None, :, :]
    half: tl.constexpr = 0.5 if MIDRISE and DIGIT == 0 else 0.0
    q += (field_bias(BITS, F, False, DIGIT) - half) * (low + high)
    return p, q


@triton.jit(do_not_specialize=("M", "supers", "supers_per_part"))
def ssqr_simt(
    x_ptr, word_ptr, scale_ptr, flat_scale_ptr, row_scale_ptr, order_ptr, entry_ptr, slice_ptr,
    partial_ptr, ticket_ptr, y_ptr, M, N, stride_xm, supers, supers_per_part,
    BITS: tl.constexpr, GROUP: tl.constexpr, MIDRISE: tl.constexpr, BLOCK_N: tl.constexpr, ROWS: tl.constexpr,
    STAGES: tl.constexpr, OUTLIERS: tl.constexpr, BEYOND: tl.constexpr, SLOTS: tl.constexpr, SPLIT: tl.constexpr,
    HAS_FLAT_SCALES: tl.constexpr, HAS_ROW_SCALES: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """Grid (padded rows / BLOCK_N, parts). x is [M, superblocks * 256], zero in the padding."""
    tile, part, parts = tl.program_id(0), tl.program_id(1), tl.num_programs(1)
    WORDS: tl.constexpr = words_of(BITS)
    SIZE: tl.constexpr = 128 if GROUP == -1 else GROUP
    PER_GROUP: tl.constexpr = SIZE // (2 * WORDS)  # fields in a group
    rn = tl.arange(0, BLOCK_N)
    rm = tl.arange(0, ROWS)
    rw = tl.arange(0, WORDS)
    begin = part * supers_per_part
    end = min(begin + supers_per_part, supers)
    words = tile_words(word_ptr, tile, supers, begin, 0, BITS, BLOCK_N, 1)
    if GROUP != -1:
        pairs = tile_scale_pairs(scale_ptr, tile, supers, begin, 0, GROUP, BLOCK_N, 1)
    live = (rm < M)[None, :] & (rw >= 0)[:, None]
    if OUTLIERS:
        longest = longest_slice(slice_ptr, tile, BLOCK_N)
    acc = tl.zeros((BLOCK_N, WORDS, ROWS), tl.float32)
    for sb in tl.range(begin, end, num_stages=STAGES):
        a, b, c, d = load_planes(words, BITS)
        at = (sb * 256 + 2 * rw)[:, None] + rm[None, :] * stride_xm
        for i in tl.static_range(256 // SIZE):
            p = tl.zeros((BLOCK_N, WORDS, ROWS), tl.float32)
            q = tl.zeros((WORDS, ROWS), tl.float32)
            for f in tl.static_range(i * PER_GROUP, (i + 1) * PER_GROUP):
                p, q = add_field(p, q, a, b, c, d, x_ptr, at, live, f, BITS, 0, MIDRISE, ASM)
                if BITS == 8:
                    p, q = add_field(p, q, a, b, c, d, x_ptr, at, live, f, BITS, 1, MIDRISE, ASM)
            p -= q[None, :, :]
            if GROUP == -1:
                acc += p
            else:
                acc += p * load_scale(pairs, i)[:, None, None]
        words += planes_of(BITS) * 64 * WORDS
        if GROUP != -1:
            pairs += 64 * (128 // GROUP)
    total = tl.sum(acc, 1)
    if HAS_FLAT_SCALES:
        total *= tl.load(flat_scale_ptr + tile * BLOCK_N + rn)[:, None]
    if OUTLIERS:
        HALF: tl.constexpr = x_ptr.dtype.element_ty == tl.float16
        at, count = outlier_places(slice_ptr, tile, M, BLOCK_N, ROWS, SLOTS, False, 1)
        entries = load_slots(entry_ptr, at, count, part * SLOTS, SLOTS)
        total += outlier_tile(
            x_ptr, stride_xm, entry_ptr, entries, at, count, longest, part, parts, M, BLOCK_N, ROWS, SLOTS, False,
            BEYOND, HALF,
        )  # fmt: skip
    rows, factor = output_rows(order_ptr, row_scale_ptr, tile, BLOCK_N, HAS_ROW_SCALES, OUTLIERS)
    last = True
    if SPLIT:
        total, last = add_parts(total, partial_ptr, ticket_ptr, tile, part, parts, M)
    if last:
        store_rows(total, rows, factor, y_ptr, N, M, HAS_ROW_SCALES)


def launch_simt(
    x: torch.Tensor,
    weight: KernelWeight,
    y: torch.Tensor,
    partials: torch.Tensor | None,
    config: DecodeConfig,
    parts: int,
) -> None:
    """Run the SIMT kernel. Allocates nothing, checks nothing: see `dispatch.ssqr_matmul`.

    Args:
        x: [m, superblocks * 256], bfloat16 or float16, last dimension contiguous, zero beyond `cols`, m <= 8.
        y: [m, rows], contiguous.
        partials: float32, at least parts * padded rows * row_tile(m) elements; None when parts is 1.
        parts: split-K factor.
    """
    m = x.shape[0]
    ssqr_simt[(weight.padded_rows // config.block_n, parts)](
        x, weight.words, weight.scale_pairs, weight.flat_scales, weight.row_scales, weight.order, weight.entries,
        weight.slice_ptr, partials, weight.tickets, y, m, weight.rows, x.stride(0), weight.superblocks,
        -(-weight.superblocks // parts),
        BITS=weight.bits, GROUP=weight.group_size, MIDRISE=weight.midrise, BLOCK_N=config.block_n, ROWS=row_tile(m),
        STAGES=config.stages_for(weight.bits), OUTLIERS=weight.entries is not None, BEYOND=weight.beyond,
        SLOTS=slots_of(config.slots, weight.beyond), SPLIT=parts > 1,
        HAS_FLAT_SCALES=weight.flat_scales is not None, HAS_ROW_SCALES=weight.row_scales is not None,
        ASM=x.is_cuda and torch.version.hip is None, num_warps=warps_of(config, weight.bits, row_tile(m)), **COMPILER,
    )  # fmt: skip


def warps_of(config: DecodeConfig, bits: int, rows: int) -> int:
    """Warps of a program: with fewer, the sums of the tile's rows would not fit in registers."""
    return min(8, max(config.num_warps, rows * (2 if bits == 8 else 1)))


def row_tile(m: int) -> int:
    """Activation rows of the kernel's tile: the next power of two."""
    return 1 << (m - 1).bit_length()
