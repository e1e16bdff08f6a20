"""Canonical Huffman decoding of integer weights, one lane per chunk, at load.

The stream is cut into chunks of about 1024 weights that decode alone (their bit counts are stored), so a layer has as
many independent lanes as chunks. A lane looks 15 bits ahead in the stream and reads symbol and length from a table:

    bit k of the stream is bit 31 - k % 32 of word k // 32
    table int32 [2**15]: symbol index << 4 | code length; index n is ESCAPE: the next 32 bits are the integer

Every stream address is masked, so a corrupt stream gives wrong bit counts, which are refused, and never a stray read.
"""

import torch
import triton
import triton.language as tl

from vllm_latq.kernels.configs import COMPILER
from vllm_latq.kernels.entropy.chunks import LANES, chunk_part, chunk_shape, chunk_starts
from vllm_latq.kernels.errors import KernelInputError, require

MAX_LENGTH, MAX_SYMBOLS = 15, 4096
CHUNK_WEIGHTS = 1024
# Layers of every shape share one compiled kernel.
SIZES = ("words", "chunks", "col_blocks", "rows", "cols", "chunk_rows", "chunk_cols", "first_symbol", "escape")


@triton.jit
def window(stream_ptr, bit, words, live):
    """uint64: the stream's next 64 - bit % 32 bits from `bit` on, at the top."""
    at = bit >> 5
    first = tl.load(stream_ptr + at, mask=live & (at < words), other=0).to(tl.uint32, bitcast=True)
    second = tl.load(stream_ptr + at + 1, mask=live & (at + 1 < words), other=0).to(tl.uint32, bitcast=True)
    return ((first.to(tl.uint64) << 32) | second.to(tl.uint64)) << (bit & 31).to(tl.uint64)


@triton.jit(do_not_specialize=SIZES)
def huffman_chunks(
    stream_ptr, table_ptr, start_ptr, used_ptr, z_ptr, words, chunks, col_blocks, rows, cols, chunk_rows, chunk_cols,
    first_symbol, escape, LANES: tl.constexpr,
):  # fmt: skip
    """Grid (ceil(chunks / LANES),). Writes z int32 [rows, cols] and the bits each chunk used, int32 [chunks].

    start_ptr: int64 [chunks], first bit of each chunk.
    """
    chunk = tl.program_id(0) * LANES + tl.arange(0, LANES)
    live = chunk < chunks
    row, col, width, count = chunk_part(chunk, live, col_blocks, rows, cols, chunk_rows, chunk_cols)
    start = tl.load(start_ptr + chunk, mask=live, other=0)
    bit = start
    out = z_ptr + row.to(tl.int64) * cols + col
    along = tl.zeros((LANES,), tl.int32)
    for i in range(0, tl.max(count, 0)):
        more = i < count
        at = (window(stream_ptr, bit, words, more) >> 49).to(tl.int32)
        entry = tl.load(table_ptr + at, mask=more, other=0)
        index = entry >> 4
        bit += (entry & 15).to(tl.int64)
        escaped = more & (index == escape) & (entry & 15 > 0)
        raw = (window(stream_ptr, bit, words, escaped) >> 32).to(tl.uint32).to(tl.int32, bitcast=True)
        bit += tl.where(escaped, 32, 0).to(tl.int64)
        tl.store(out + along, tl.where(escaped, raw, first_symbol + index), mask=more)
        along += 1
        wrap = along == width
        along = tl.where(wrap, 0, along)
        out += tl.where(wrap, cols, 0)
    tl.store(used_ptr + chunk, (bit - start).to(tl.int32), mask=live)


def lookup_table(code_lengths: torch.Tensor) -> torch.Tensor:
    """int32 [2**15]: symbol index << 4 | length, for each value of the next 15 bits.

    Canonical codes in order (shorter first, then by index) cover the values from 0 up, each a run of 2^(15 - length);
    values that no code covers get 0.
    """
    lengths = code_lengths.to(torch.int64)
    fit = lengths.ndim == 1 and 0 < lengths.numel() <= MAX_SYMBOLS + 1 and int(lengths.max()) <= MAX_LENGTH
    found = f"{tuple(lengths.shape)} up to {int(lengths.max()) if lengths.numel() else 0}"
    require(fit, "code_lengths", f"at most {MAX_SYMBOLS + 1} lengths up to {MAX_LENGTH}", found)
    used = lengths.nonzero()[:, 0]
    index = used[torch.argsort(lengths[used], stable=True)]
    spans = 1 << (MAX_LENGTH - lengths[index])
    total = int(spans.sum())
    require(0 < total <= 1 << MAX_LENGTH, "code_lengths", "the lengths of a prefix code", lengths.tolist()[:8])
    entries = torch.zeros(1 << MAX_LENGTH, dtype=torch.int32, device=code_lengths.device)
    entry = (index << 4 | lengths[index]).to(torch.int32)
    entries[:total] = torch.repeat_interleave(entry, spans, output_size=total)
    return entries


def launch_huffman(
    stream: torch.Tensor,
    table: torch.Tensor,
    starts: torch.Tensor,
    used: torch.Tensor,
    z: torch.Tensor,
    chunk_shape: tuple[int, int],
    first_symbol: int,
    escape: int,
) -> None:
    """Run the kernel. Allocates nothing; arguments as in `huffman_chunks`."""
    rows, cols = z.shape
    chunks = starts.numel()
    # Triton launches on the current device, which need not be the tensors'.
    with torch.cuda.device_of(stream):
        huffman_chunks[(-(-chunks // LANES),)](
            stream, table, starts, used, z, stream.numel(), chunks, -(-cols // chunk_shape[1]), rows, cols,
            *chunk_shape, first_symbol, escape, LANES=LANES, num_warps=1, **COMPILER,
        )  # fmt: skip


def decode_huffman(
    stream: torch.Tensor,
    chunk_bits: torch.Tensor,
    code_lengths: torch.Tensor,
    first_symbol: int,
    rows: int,
    cols: int,
) -> torch.Tensor:
    """Integers of an entropy-coded layer, on the stream's device. Synchronises: for load time only.

    Args:
        stream: int32 [words].
        chunk_bits: uint16 [row blocks, column blocks], bits per chunk.
        code_lengths: uint8 [symbols + 1], the last for ESCAPE; 0 means unused.
        first_symbol: integer that symbol 0 stands for.

    Returns:
        int32 [rows, cols].

    Raises:
        KernelInputError: shapes that do not belong together, or a stream that does not decode to its bit counts.
    """
    starts, bits = chunk_starts(chunk_bits, "chunk_bits", stream, 32, (rows, cols), CHUNK_WEIGHTS)
    used = torch.empty(bits.numel(), dtype=torch.int32, device=stream.device)
    z = torch.empty(rows, cols, dtype=torch.int32, device=stream.device)
    shape, escape = chunk_shape(cols, CHUNK_WEIGHTS), code_lengths.numel() - 1
    launch_huffman(stream, lookup_table(code_lengths), starts, used, z, shape, first_symbol, escape)
    wrong = (used != bits).nonzero()
    if wrong.numel():
        chunk = int(wrong[0])
        expected = f"chunk {chunk} to end at bit {int(starts[chunk] + bits[chunk])}"
        raise KernelInputError("stream", expected, f"bit {int(starts[chunk] + used[chunk])}")
    return z
