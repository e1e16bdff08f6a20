"""A decode kernel without tensor cores: y = x W^T for at most 8 rows of x, by one multiply-add per weight and row.

A row of the configuration table can name it, and `bench --tune` writes such a row where the kernel is faster at one row
of x than tensor cores (NOTES.md: "SIMT beyond one row"). It shares tile words, outliers, split-K and epilogue with
`ssqr.ssqr_tensor_core`.

A lane keeps some words of some rows; a field becomes a float32 by one `lop3`, because bf16 bits are the high half of a
float32's. The bias of a field leaves once per group and word column, as a product with the activations:

    for each group:   p[row, word, m] = sum over fields and halves of (bias + integer) * x
                      acc += scale * (p - sum of bias * x)
"""

import torch
import triton
import triton.language as tl

from vllm_latq.kernels.configs import COMPILER, DecodeConfig
from vllm_latq.kernels.decode.launch import Scratch, Variant, variant_of, weight_arguments
from vllm_latq.kernels.device.epilogue import add_parts, output_rows, store_rows
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
    """Return bias + integer of half H of field F, float32 [R, words]; for 8 bits, its low or high digit."""
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
    p,  # float32 [R, words, ROWS]
    q,  # float32 [words, ROWS], the same for all weight rows
    a,  # int32 [R, words]: the planes of the tile, from `load_planes`
    b,
    c,
    d,
    x_ptr,
    at,  # int32 [words, ROWS]: offset in x of the superblock's first column of each word, per activation row
    live,  # bool [words, ROWS]
    F: tl.constexpr,
    BITS: tl.constexpr,
    DIGIT: tl.constexpr,
    MIDRISE: tl.constexpr,
    ASM: tl.constexpr,
):
    """Return p + (bias + integer) * x and q + bias * x, over the two halves of field F."""
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
    x_ptr,  # bf16 or fp16 [M, superblocks * 256], zero in the padding
    word_ptr,  # int32 [row blocks, superblocks, planes, 64, words]: packed codes
    scale_ptr,  # int32 [row blocks, superblocks, 128 / GROUP, 64]: pairs of bf16 group scales; None without groups
    flat_scale_ptr,  # float32 [padded rows]: the scale of a whole row; None unless HAS_FLAT_SCALES
    row_scale_ptr,  # float32 [padded rows]; None unless HAS_ROW_SCALES
    order_ptr,  # int32 [padded rows]: the row of y that each tile row computes
    entry_ptr,  # int32 [slots, 16]: outliers; None without
    slice_ptr,  # int32 [padded rows / 16 + 1]: first slot of each slice; None without outliers
    partial_ptr,  # float32 [tiles, parts, ROWS, BLOCK_N]; None unless SPLIT
    ticket_ptr,  # int32 [row blocks]: zeros before and after
    y_ptr,  # [M, N], contiguous
    M,  # rows of x
    N,  # rows of the weight
    stride_xm,  # elements from one row of x to the next
    supers,  # superblocks
    supers_per_part,  # superblocks of a part of split-K
    BITS: tl.constexpr,  # 2, 3, 4 or 8
    GROUP: tl.constexpr,  # 32, 64 or 128; -1 without group scales
    MIDRISE: tl.constexpr,  # the grid lies half a step above the multiples of the scale
    BLOCK_N: tl.constexpr,  # weight rows of a tile
    ROWS: tl.constexpr,  # activation rows of a tile, 1 to 8
    STAGES: tl.constexpr,  # superblocks that are copied ahead
    OUTLIERS: tl.constexpr,  # the weight has outlier entries
    SLOTS: tl.constexpr,  # slots of a row that are read at once
    SPLIT: tl.constexpr,  # several parts share a tile
    HAS_FLAT_SCALES: tl.constexpr,
    HAS_ROW_SCALES: tl.constexpr,
    ASM: tl.constexpr,  # NVIDIA inline assembly
):
    """Grid (padded rows / BLOCK_N, parts)."""
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
            HALF,
        )  # fmt: skip
    rows, factor = output_rows(order_ptr, row_scale_ptr, tile, BLOCK_N, HAS_ROW_SCALES, OUTLIERS)
    last = True
    if SPLIT:
        total, last = add_parts(total, partial_ptr, ticket_ptr, tile, part, parts, M)
    if last:
        store_rows(total, rows, factor, y_ptr, N, M, HAS_ROW_SCALES)


def launch_simt(x: torch.Tensor, weight: KernelWeight, y: torch.Tensor, config: DecodeConfig, scratch: Scratch) -> None:
    """Run the SIMT kernel. Allocates nothing, checks nothing: see `dispatch.ssqr_matmul`.

    Args:
        x: [m, superblocks * 256], bfloat16 or float16, last dimension contiguous, zero beyond `cols`, m <= 8.
        weight: see `KernelWeight`.
        y: [m, rows], contiguous.
        config: of kernel "simt".
        scratch: for m rows of x.
    """
    m, parts = x.shape[0], scratch.parts
    arguments = {
        "x_ptr": x,
        "partial_ptr": scratch.partials,
        "y_ptr": y,
        "M": m,
        "stride_xm": x.stride(0),
        "supers_per_part": -(-weight.superblocks // parts),
    }
    constants = simt_constants(config, variant_of(x, weight, m, parts))
    warps = warps_of(config, weight.bits, row_tile(m))
    grid = (weight.padded_rows // config.block_n, parts)
    ssqr_simt[grid](**weight_arguments(weight), **arguments, **constants, num_warps=warps, **COMPILER)


def simt_constants(config: DecodeConfig, variant: Variant) -> dict[str, int | bool]:
    """Return the compile-time arguments of `ssqr_simt`, by name."""
    return {
        "BITS": variant.bits,
        "GROUP": variant.group_size,
        "MIDRISE": variant.midrise,
        "BLOCK_N": config.block_n,
        "ROWS": row_tile(variant.m),
        "STAGES": config.stages_for(variant.bits),
        "OUTLIERS": variant.outliers,
        "SLOTS": config.slots,
        "SPLIT": variant.split,
        "HAS_FLAT_SCALES": variant.flat_scales,
        "HAS_ROW_SCALES": variant.row_scales,
        "ASM": variant.asm,
    }


def warps_of(config: DecodeConfig, bits: int, rows: int) -> int:
    """Return the warps of a program: with fewer, the sums of the tile's rows would not fit in registers."""
    return min(8, max(config.num_warps, rows * (2 if bits == 8 else 1)))


def row_tile(m: int) -> int:
    """Return the activation rows of the kernel's tile: the next power of two."""
    return 1 << (m - 1).bit_length()
