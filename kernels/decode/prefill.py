"""Prefill: tile words -> a dense chunk of W in bf16 or fp16, for the library's matmul.

Two launches per chunk. The first writes every code times its scale, rounded once. The second adds every outlier. The
chunk is bounded, so a layer of any size needs the same scratch and the dense weights stay in or near the L2 cache.
"""

import torch
import triton
import triton.language as tl

from vllm_latq.kernels.configs import COMPILER
from vllm_latq.kernels.device.fields import field_segment, segment_count, words_of
from vllm_latq.kernels.device.tiles import load_planes, load_scale, plane, tile_scale_pairs, tile_words
from vllm_latq.kernels.layout.codes import ROW_ALIGN, ROW_BLOCK
from vllm_latq.kernels.layout.outliers import SLICE_ROWS
from vllm_latq.kernels.layout.weight import KernelWeight

CHUNK_BYTES = 32 << 20  # dense weights at a time: below the L2 cache of an H100 or H200 (50 MB), and enough to fill it
SLICE_SLOTS, SLICE_PROGRAMS = 16, 8  # slots of a slice at a time, and programs that take turns with them


@triton.jit
def integer_field(a, b, c, d, F: tl.constexpr, H: tl.constexpr, BITS: tl.constexpr):
    """Return the integers (code - zero point) of half H of field F of a tile's planes, int32 [rows, words]."""
    code = tl.zeros(a.shape, tl.int32)
    for s in tl.static_range(segment_count(BITS, F)):
        word = plane(a, b, c, d, field_segment(BITS, F, s, 0))
        bits = (word >> (field_segment(BITS, F, s, 1) + 16 * H)) & ((1 << field_segment(BITS, F, s, 3)) - 1)
        code |= bits << field_segment(BITS, F, s, 2)
    return code - (1 << (BITS - 1))


@triton.jit(do_not_specialize=("first_block", "first_row", "N", "supers"))
def dequantize_tiles(
    word_ptr,  # int32 [row blocks, superblocks, planes, 64, words]: packed codes
    scale_ptr,  # int32 [row blocks, superblocks, 128 / GROUP, 64]: pairs of bf16 group scales; None without groups
    flat_scale_ptr,  # float32 [padded rows]: the scale of a whole row; None unless HAS_FLAT_SCALES
    row_scale_ptr,  # float32 [padded rows]; None unless HAS_ROW_SCALES
    order_ptr,  # int32 [padded rows]: the row of W that each tile row holds
    w_ptr,  # [chunk rows, K], contiguous
    first_block,  # first row block of the chunk
    first_row,  # first row of the chunk
    N,  # rows of the weight
    K,  # columns
    supers,  # superblocks
    BITS: tl.constexpr,  # 2, 3, 4 or 8
    GROUP: tl.constexpr,  # 32, 64 or 128; -1 without group scales
    MIDRISE: tl.constexpr,  # the grid lies half a step above the multiples of the scale
    HAS_FLAT_SCALES: tl.constexpr,
    HAS_ROW_SCALES: tl.constexpr,
):
    """Grid (row blocks of the chunk, superblocks). Write one tile of the chunk, without its outliers."""
    block, sb = first_block + tl.program_id(0), tl.program_id(1)
    WORDS: tl.constexpr = words_of(BITS)
    rn = tl.arange(0, 64)
    rk = tl.arange(0, 2 * WORDS)
    a, b, c, d = load_planes(tile_words(word_ptr, block, supers, sb, 0, BITS, 64, 1), BITS)
    if GROUP != -1:
        pairs = tile_scale_pairs(scale_ptr, block, supers, sb, 0, GROUP, 64, 1)
    row = tl.load(order_ptr + block * 64 + rn)
    first_col = sb * 256
    out = w_ptr + (row - first_row).to(tl.int64)[:, None] * K + first_col + rk[None, :]
    factor = tl.full((64,), 1.0, tl.float32)
    if HAS_FLAT_SCALES:
        factor *= tl.load(flat_scale_ptr + block * 64 + rn)
    if HAS_ROW_SCALES:
        factor *= tl.load(row_scale_ptr + block * 64 + rn)
    for f in tl.static_range(128 // WORDS):
        scale = factor
        if GROUP != -1:
            scale *= load_scale(pairs, f * 2 * WORDS // GROUP)
        low = integer_field(a, b, c, d, f, 0, BITS).to(tl.float32)
        high = integer_field(a, b, c, d, f, 1, BITS).to(tl.float32)
        if MIDRISE:
            low += 0.5
            high += 0.5
        low *= scale[:, None]
        high *= scale[:, None]
        value = tl.reshape(tl.join(low, high), (64, 2 * WORDS)).to(w_ptr.dtype.element_ty)
        live = (row < N)[:, None] & (first_col + f * 2 * WORDS + rk < K)[None, :]
        tl.store(out + f * 2 * WORDS, value, mask=live)


@triton.jit
def slice_rows(entry_ptr, slice_ptr, order_ptr, row_scale_ptr, s, first_row, HAS_ROW_SCALES: tl.constexpr):
    """Return, for slice s, pointers to the first entries of its rows [1, 16], its slots, chunk rows and row scales."""
    lane = tl.arange(0, 16)[None, :]
    begin = tl.load(slice_ptr + s)
    row = (tl.load(order_ptr + s * 16 + lane) - first_row).to(tl.int64)
    factor = tl.full((1, 16), 1.0, tl.float32)
    if HAS_ROW_SCALES:
        factor = tl.load(row_scale_ptr + s * 16 + lane)
    return entry_ptr + begin.to(tl.int64) * 16 + lane, tl.load(slice_ptr + s + 1) - begin, row, factor


@triton.jit(do_not_specialize=("first_slice", "first_row", "K"))
def scatter_outliers(
    entry_ptr,  # int32 [slots, 16]
    slice_ptr,  # int32 [padded rows / 16 + 1]: first slot of each slice
    order_ptr,  # int32 [padded rows]: the row of W that each tile row holds
    row_scale_ptr,  # float32 [padded rows]; None unless HAS_ROW_SCALES
    w_ptr,  # [chunk rows, K], contiguous
    first_slice,  # first slice of the chunk
    first_row,  # first row of the chunk
    K,  # columns
    HAS_ROW_SCALES: tl.constexpr,
    SLOTS: tl.constexpr,  # slots that a program handles at once
):
    """Grid (slices of the chunk, programs of a slice). Add the outliers of 16 rows to the chunk.

    A row's entries are sorted by column, and at most three share a column (`entries.coordinates`): the first of them
    adds all three.
    """
    at, count, row, factor = slice_rows(
        entry_ptr, slice_ptr, order_ptr, row_scale_ptr, first_slice + tl.program_id(0), first_row, HAS_ROW_SCALES
    )
    for start in range(tl.program_id(1) * SLOTS, count, tl.num_programs(1) * SLOTS):
        slot = start + tl.arange(0, SLOTS)[:, None]
        entry = tl.load(at + slot * 16, mask=slot < count, other=0)
        before = tl.load(at + (slot - 1) * 16, mask=(slot > 0) & (slot < count), other=0)
        col = entry & 0xFFFF
        real = (entry & -65536) != 0
        first = real & ((slot == 0) | ((before & 0xFFFF) != col) | ((before & -65536) == 0))
        value = (entry & -65536).to(tl.float32, bitcast=True)
        for ahead in tl.static_range(1, 3):
            other = tl.load(at + (slot + ahead) * 16, mask=slot + ahead < count, other=0)
            value += tl.where((other & 0xFFFF) == col, (other & -65536).to(tl.float32, bitcast=True), 0.0)
        out = w_ptr + row * K + col
        base = tl.load(out, mask=first, other=0.0).to(tl.float32)
        tl.store(out, (base + value * factor).to(w_ptr.dtype.element_ty), mask=first)


def launch_dequantize(weight: KernelWeight, w: torch.Tensor, first_block: int, blocks: int) -> None:
    """Write the dense rows of the row blocks from `first_block` on. Allocates nothing.

    Args:
        weight: see `KernelWeight`.
        w: [rows of the chunk, cols], contiguous, bfloat16 or float16 (float32 in tests).
        first_block: first row block of the chunk; the chunk begins and ends with whole ROW_ALIGN rows.
        blocks: row blocks in the chunk.
    """
    first_row = first_block * ROW_BLOCK
    row_scaled = weight.row_scales is not None
    dequantize_tiles[(blocks, weight.superblocks)](
        weight.words,
        weight.scale_pairs,
        weight.flat_scales,
        weight.row_scales,
        weight.order,
        w,
        first_block,
        first_row,
        weight.rows,
        weight.cols,
        weight.superblocks,
        BITS=weight.bits,
        GROUP=weight.group_size,
        MIDRISE=weight.midrise,
        HAS_FLAT_SCALES=weight.flat_scales is not None,
        HAS_ROW_SCALES=row_scaled,
        num_warps=4,
        **COMPILER,
    )
    if weight.entries is not None:
        first_slice = first_block * (ROW_BLOCK // SLICE_ROWS)
        grid = (blocks * (ROW_BLOCK // SLICE_ROWS), SLICE_PROGRAMS)
        slices = (weight.entries, weight.slice_ptr, weight.order, weight.row_scales)
        constants = {"HAS_ROW_SCALES": row_scaled, "SLOTS": SLICE_SLOTS}
        scatter_outliers[grid](*slices, w, first_slice, first_row, weight.cols, **constants, num_warps=4, **COMPILER)


def chunk_blocks(weight: KernelWeight, dtype: torch.dtype) -> int:
    """Return the row blocks of a chunk: as many as fit CHUNK_BYTES, at least those that `order` permutes together."""
    return max(1, CHUNK_BYTES // (ROW_ALIGN * weight.cols * dtype.itemsize)) * (ROW_ALIGN // ROW_BLOCK)


def dequantize(weight: KernelWeight, dtype: torch.dtype) -> torch.Tensor:
    """Return the whole dense weight [rows, cols], each element rounded once to `dtype`; for inspection and tests.

    Elements where the value of an outlier is added to a code not worth zero, as on a mid-rise grid, are rounded twice.
    """
    w = torch.empty(weight.rows, weight.cols, dtype=dtype, device=weight.words.device)
    with torch.cuda.device_of(w):
        launch_dequantize(weight, w, 0, weight.padded_rows // ROW_BLOCK)
    return w


def prefill_matmul(x: torch.Tensor, weight: KernelWeight) -> torch.Tensor:
    """Return y [m, rows] = x [m, cols] W^T, by dense chunks and the library's matmul."""
    y = torch.empty(x.shape[0], weight.rows, dtype=x.dtype, device=x.device)
    step, blocks = chunk_blocks(weight, x.dtype), weight.padded_rows // ROW_BLOCK
    scratch = torch.empty(min(step * ROW_BLOCK, weight.rows), weight.cols, dtype=x.dtype, device=x.device)
    for first in range(0, blocks, step):
        begin, end = first * ROW_BLOCK, min((first + step) * ROW_BLOCK, weight.rows)
        chunk = scratch[: end - begin]
        launch_dequantize(weight, chunk, first, min(step, blocks - first))
        torch.mm(x, chunk.t(), out=y[:, begin:end])
    return y
