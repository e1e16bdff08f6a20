"""Canonical Huffman decoding of integer weights, one lane per chunk, at load.

The stream is cut into chunks of about 1024 weights that decode alone (their bit counts are stored), so a layer has as
many independent lanes as chunks. A lane looks 15 bits ahead in the stream and reads symbol and length from one table:

    bit k of the stream is bit 31 - k % 32 of word k // 32
    table int32 [2**15]: symbol index << 4 | code length, index n is ESCAPE: the next 32 bits are the integer itself

Every stream address is masked, so a corrupt stream gives wrong bit counts, which are refused, and never a stray read.
"""

import torch
import triton
import triton.language as tl

from vllm_latq.kernels.errors import require

MAX_LENGTH = 15
CHUNK_WEIGHTS = 1024
LANES = 32


@triton.jit
def window(stream_ptr, bit, words, live):
    """uint64: the stream's next 64 - bit % 32 bits from `bit` on, at the top."""
    at = bit >> 5
    first = tl.load(stream_ptr + at, mask=live & (at < words), other=0).to(tl.uint32, bitcast=True)
    second = tl.load(stream_ptr + at + 1, mask=live & (at + 1 < words), other=0).to(tl.uint32, bitcast=True)
    return ((first.to(tl.uint64) << 32) | second.to(tl.uint64)) << (bit & 31).to(tl.uint64)


@triton.jit
def huffman_chunks(
    stream_ptr, table_ptr, start_ptr, used_ptr, z_ptr, words, chunks, col_blocks, rows, cols, chunk_rows, chunk_cols,
    first_symbol, escape, LANES: tl.constexpr,
):  # fmt: skip
    """Grid (ceil(chunks / LANES),). Writes z int32 [rows, cols] and the bits each chunk used, int32 [chunks].

    start_ptr: int64 [chunks], first bit of each chunk.
    """
    chunk = tl.program_id(0) * LANES + tl.arange(0, LANES)
    live = chunk < chunks
    row = (chunk // col_blocks) * chunk_rows
    col = (chunk % col_blocks) * chunk_cols
    width = tl.minimum(chunk_cols, cols - col)
    count = tl.where(live, tl.minimum(chunk_rows, rows - row) * width, 0)
    start = tl.load(start_ptr + chunk, mask=live, other=0)
    bit = start
    out = z_ptr + row.to(tl.int64) * cols + col
    along = tl.zeros((LANES,), tl.int32)
    for i in range(0, tl.max(count, 0)):
        more = i < count
        entry = tl.load(table_ptr + (window(stream_ptr, bit, words, more) >> 49).to(tl.int32), mask=more, other=0)
        index = entry >> 4
        bit += (entry & 15).to(tl.int64)
        escaped = more & (index == escape)
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
    require(lengths.numel() <= 4097 and int(lengths.max()) <= MAX_LENGTH, "code_lengths",
            f"at most 4097 lengths up to {MAX_LENGTH}", f"{lengths.numel()} up to {int(lengths.max())}")  # fmt: skip
    used = lengths.nonzero()[:, 0]
    index = used[torch.argsort(lengths[used], stable=True)]
    spans = 1 << (MAX_LENGTH - lengths[index])
    total = int(spans.sum())
    require(0 < total <= 1 << MAX_LENGTH, "code_lengths", "the lengths of a prefix code", code_lengths.tolist()[:8])
    entries = torch.zeros(1 << MAX_LENGTH, dtype=torch.int32, device=code_lengths.device)
    entries[:total] = torch.repeat_interleave((index << 4 | lengths[index]).to(torch.int32), spans, output_size=total)
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
    huffman_chunks[(-(-chunks // LANES),)](
        stream, table, starts, used, z, stream.numel(), chunks, -(-cols // chunk_shape[1]), rows, cols, chunk_shape[0],
        chunk_shape[1], first_symbol, escape, LANES=LANES, num_warps=1,
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
    chunk_rows, chunk_cols = max(1, CHUNK_WEIGHTS // cols), min(cols, CHUNK_WEIGHTS)
    grid = (-(-rows // chunk_rows), -(-cols // chunk_cols))
    require(chunk_bits.shape == grid, "chunk_bits", f"{grid}", tuple(chunk_bits.shape))
    bits = chunk_bits.flatten().to(torch.int64)
    ends = bits.cumsum(0)
    require(-(-int(ends[-1]) // 32) == stream.numel(), "stream", f"{-(-int(ends[-1]) // 32)} words", stream.numel())
    used = torch.empty(bits.numel(), dtype=torch.int32, device=stream.device)
    z = torch.empty(rows, cols, dtype=torch.int32, device=stream.device)
    table = lookup_table(code_lengths)
    launch_huffman(
        stream, table, ends - bits, used, z, (chunk_rows, chunk_cols), first_symbol, code_lengths.numel() - 1
    )
    wrong = (used != bits).nonzero()
    require(not wrong.numel(), "stream", "every chunk to use its stored number of bits",
            f"chunk {int(wrong[0]) if wrong.numel() else 0} off", "The checkpoint is corrupt.")  # fmt: skip
    return z
