"""Prefill: tile words -> a dense chunk of W in bf16 or fp16, for the library's matmul.

One launch per chunk. A program writes a tile: every code times its scale, rounded once. Then it adds the outliers of
its tile, which no other program touches, so no order of programs is needed.

A chunk is a whole weight, or one of several equal pieces of a weight of more than CHUNK_BYTES, so that the matmul has
enough output tiles for all multiprocessors.
"""

import torch
import triton
import triton.language as tl

from vllm_latq.kernels.configs import COMPILER
from vllm_latq.kernels.device.fields import field_segment, segment_count, words_of
from vllm_latq.kernels.device.outlier_tile import longest_slice
from vllm_latq.kernels.device.tiles import load_planes, load_scale, plane, tile_scale_pairs, tile_words
from vllm_latq.kernels.layout.codes import ROW_ALIGN, ROW_BLOCK
from vllm_latq.kernels.layout.weight import KernelWeight

# The most dense weights at a time: a whole layer of a model of 8 billion weights. Chunks of 32 MB gave the matmul too
# few output tiles for the multiprocessors of an H200 (NOTES.md, Prefill).
CHUNK_BYTES = 256 << 20
SLOTS = 2  # outliers of a row that a program handles at once


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
    entry_ptr,  # int32 [slots, 16]; None unless HAS_OUTLIERS
    slice_ptr,  # int32 [padded rows / 16 + 1]: first slot of each slice; None unless HAS_OUTLIERS
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
    HAS_OUTLIERS: tl.constexpr,
    SLOTS: tl.constexpr,  # outliers of a row that are added at once
):
    """Grid (superblocks, row blocks of the chunk). Write one tile of the chunk.

    The superblocks of a row block run side by side, because they share the sectors of its entries.
    """
    sb, block = tl.program_id(0), first_block + tl.program_id(1)
    WORDS: tl.constexpr = words_of(BITS)
    rn = tl.arange(0, 64)
    rk = tl.arange(0, 2 * WORDS)
    a, b, c, d = load_planes(tile_words(word_ptr, block, supers, sb, 0, BITS, 64, 1), BITS)
    if GROUP != -1:
        pairs = tile_scale_pairs(scale_ptr, block, supers, sb, 0, GROUP, 64, 1)
    row = tl.load(order_ptr + block * 64 + rn)
    first_col = sb * 256
    out = w_ptr + (row - first_row).to(tl.int64)[:, None] * K + first_col + rk[None, :]
    row_scale = tl.full((64,), 1.0, tl.float32)
    if HAS_ROW_SCALES:
        row_scale = tl.load(row_scale_ptr + block * 64 + rn)
    factor = row_scale
    if HAS_FLAT_SCALES:
        factor *= tl.load(flat_scale_ptr + block * 64 + rn)
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
    if HAS_OUTLIERS:
        tl.debug_barrier()  # the tile's elements are written before any of them is read again
        add_outliers(entry_ptr, slice_ptr, w_ptr, block, row - first_row, row_scale, first_col, K, SLOTS)


@triton.jit
def first_slots(entry, count, longest, column):
    """Return the first slot of each row whose entry has this column or a higher one, by binary search.

    Args:
        entry: pointers to the rows' first entries; entries are sorted by column, and zeros follow a row's last one.
        count: slots of the rows' slices.
        longest: slots of the longest of them.
        column: of each row.
    """
    slot = tl.zeros(count.shape, tl.int32)
    size = longest
    while size > 0:
        probe = slot + (size - 1) // 2
        there = probe < count
        word = tl.load(entry + probe * 16, mask=there, other=0)
        # Zero means no entry, except at slot 0, where it can be a zero in column 0.
        before = there & ((word & 0xFFFF) < column) & ((word != 0) | (probe == 0))
        slot = tl.where(before, probe + 1, slot)
        size //= 2
    return slot


@triton.jit
def add_outliers(entry_ptr, slice_ptr, w_ptr, block, row, row_scale, first_col, K, SLOTS: tl.constexpr):
    """Add the outliers of a row block in 256 columns to the chunk.

    A row's entries are sorted by column, and at most three share a column (`entries.coordinates`): the first of them
    adds all three.

    Args:
        entry_ptr, slice_ptr, w_ptr, K, SLOTS: as for `dequantize_tiles`.
        block: the row block.
        row: int32 [64], the chunk row of each of its rows.
        row_scale: float32 [64], by which outliers are multiplied.
        first_col: the first of the 256 columns.
    """
    rn = tl.arange(0, 64)[:, None]
    begin = tl.load(slice_ptr + block * 4 + rn // 16)
    count = tl.load(slice_ptr + block * 4 + rn // 16 + 1) - begin
    entry = entry_ptr + begin.to(tl.int64) * 16 + rn % 16
    # Both ends of each row's entries, found side by side.
    column = first_col + 256 * tl.arange(0, 2)[None, :] + tl.zeros((64, 1), tl.int32)
    slots = first_slots(entry, count + tl.zeros((64, 2), tl.int32), longest_slice(slice_ptr, block, 64), column)
    first, end = tl.split(slots)
    for start in range(0, tl.max(end - first), SLOTS):
        slot = first[:, None] + start + tl.arange(0, SLOTS)[None, :]
        at = entry + slot * 16
        live = slot < end[:, None]
        word = tl.load(at, mask=live, other=0)
        before = tl.load(at - 16, mask=live & (slot > first[:, None]), other=0)
        col = word & 0xFFFF
        leads = ((word & -65536) != 0) & ((slot == first[:, None]) | ((before & 0xFFFF) != col))
        value = (word & -65536).to(tl.float32, bitcast=True)
        for ahead in tl.static_range(1, 3):
            other = tl.load(at + ahead * 16, mask=slot + ahead < end[:, None], other=0)
            value += tl.where((other & 0xFFFF) == col, (other & -65536).to(tl.float32, bitcast=True), 0.0)
        out = w_ptr + row.to(tl.int64)[:, None] * K + col
        base = tl.load(out, mask=leads, other=0.0).to(tl.float32)
        tl.store(out, (base + value * row_scale[:, None]).to(w_ptr.dtype.element_ty), mask=leads)


def launch_dequantize(weight: KernelWeight, w: torch.Tensor, first_block: int, blocks: int) -> None:
    """Write the dense rows of the row blocks from `first_block` on. Allocates nothing.

    Args:
        weight: see `KernelWeight`.
        w: [rows of the chunk, cols], contiguous, bfloat16 or float16 (float32 in tests).
        first_block: first row block of the chunk; the chunk begins and ends with whole ROW_ALIGN rows.
        blocks: row blocks in the chunk.
    """
    dequantize_tiles[(weight.superblocks, blocks)](
        weight.words,
        weight.scale_pairs,
        weight.flat_scales,
        weight.row_scales,
        weight.order,
        weight.entries,
        weight.slice_ptr,
        w,
        first_block,
        first_block * ROW_BLOCK,
        weight.rows,
        weight.cols,
        weight.superblocks,
        BITS=weight.bits,
        GROUP=weight.group_size,
        MIDRISE=weight.midrise,
        HAS_FLAT_SCALES=weight.flat_scales is not None,
        HAS_ROW_SCALES=weight.row_scales is not None,
        HAS_OUTLIERS=weight.entries is not None,
        SLOTS=SLOTS,
        num_warps=4,
        **COMPILER,
    )


def equal_pieces(total: int, most: int) -> int:
    """Return the size of the fewest pieces of `total` that have at most `most` each, but at least one."""
    return -(-total // -(-total // max(1, most)))


def chunk_blocks(weight: KernelWeight, dtype: torch.dtype) -> int:
    """Return the row blocks of a chunk: those of the weight, or of its fewest equal pieces that fit CHUNK_BYTES.

    A chunk has at least the row blocks that `order` permutes together.
    """
    most = CHUNK_BYTES // (ROW_ALIGN * weight.cols * dtype.itemsize)
    return equal_pieces(weight.padded_rows // ROW_ALIGN, most) * (ROW_ALIGN // ROW_BLOCK)


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
