"""Huffman decoding of integer weights, one lane per chunk, at load.

The stream is cut into chunks that decode alone (their bit counts are stored), so a layer has as many independent lanes
as chunks. A lane looks MAX_LENGTH bits ahead in the stream and reads symbol and length from a table:

    bit k of the stream is bit 31 - k % 32 of word k // 32
    table int32 [2**MAX_LENGTH]: symbol index << 4 | code length
    index n is ESCAPE: the next ESCAPE_BITS bits are the integer

Every stream address is masked, so a corrupt stream gives wrong bit counts, which are refused, and never a stray read.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from vllm_latq.kernels.configs import COMPILER
from vllm_latq.kernels.entropy.chunks import LANES, Cut, check_chunks, chunk_part, chunk_starts
from vllm_latq.kernels.errors import require

WORD_BITS = 32
# Layers of every shape share one compiled kernel.
SIZES = ("words", "chunks", "col_blocks", "rows", "cols", "chunk_rows", "chunk_cols", "first_symbol", "escape")


@dataclass(frozen=True)
class HuffmanCode:
    """Constants of the stream's format, which the caller passes (FORMAT.md section 3.3).

    Attributes:
        max_length: bits of the longest code; below 16.
        max_symbols: most symbols of a table, without ESCAPE.
        escape_bits: bits of the integer that follows an ESCAPE; at most 32.
    """

    max_length: int
    max_symbols: int
    escape_bits: int


@triton.jit
def window(stream_ptr, bit, words, live):
    """Return the stream's next 64 - bit % 32 bits from `bit` on, at the top of a uint64."""
    at = bit >> 5
    first = tl.load(stream_ptr + at, mask=live & (at < words), other=0).to(tl.uint32, bitcast=True)
    second = tl.load(stream_ptr + at + 1, mask=live & (at + 1 < words), other=0).to(tl.uint32, bitcast=True)
    return ((first.to(tl.uint64) << 32) | second.to(tl.uint64)) << (bit & 31).to(tl.uint64)


@triton.jit(do_not_specialize=SIZES)
def huffman_chunks(
    stream_ptr,  # int32 [words]
    table_ptr,  # int32 [2**MAX_LENGTH], from `lookup_table`
    start_ptr,  # int64 [chunks]: first bit of each chunk
    used_ptr,  # int32 [chunks]: gets the bits that each chunk used
    z_ptr,  # int32 [rows, cols]: gets the integers
    words,
    chunks,
    col_blocks,  # chunks side by side
    rows,
    cols,
    chunk_rows,
    chunk_cols,
    first_symbol,  # integer that symbol 0 stands for
    escape,  # index of ESCAPE
    LANES: tl.constexpr,  # chunks of a program
    MAX_LENGTH: tl.constexpr,
    ESCAPE_BITS: tl.constexpr,
):
    """Grid (ceil(chunks / LANES),). Decode one chunk per lane."""
    chunk = tl.program_id(0) * LANES + tl.arange(0, LANES)
    live = chunk < chunks
    row, col, width, count = chunk_part(chunk, live, col_blocks, rows, cols, chunk_rows, chunk_cols)
    start = tl.load(start_ptr + chunk, mask=live, other=0)
    bit = start
    out = z_ptr + row.to(tl.int64) * cols + col
    along = tl.zeros((LANES,), tl.int32)
    for i in range(0, tl.max(count, 0)):
        more = i < count
        at = (window(stream_ptr, bit, words, more) >> (64 - MAX_LENGTH)).to(tl.int32)
        entry = tl.load(table_ptr + at, mask=more, other=0)
        index = entry >> 4
        bit += (entry & 15).to(tl.int64)
        escaped = more & (index == escape) & (entry & 15 > 0)
        raw = (window(stream_ptr, bit, words, escaped) >> (64 - ESCAPE_BITS)).to(tl.uint32).to(tl.int32, bitcast=True)
        bit += tl.where(escaped, ESCAPE_BITS, 0).to(tl.int64)
        tl.store(out + along, tl.where(escaped, raw, first_symbol + index), mask=more)
        along += 1
        wrap = along == width
        along = tl.where(wrap, 0, along)
        out += tl.where(wrap, cols, 0)
    tl.store(used_ptr + chunk, (bit - start).to(tl.int32), mask=live)


def lookup_table(code_lengths: torch.Tensor, code: HuffmanCode) -> torch.Tensor:
    """Return symbol index << 4 | length for each value of the next bits, int32 [2**max_length].

    Canonical codes in order (shorter first, then by index) cover the values from 0 up, each a run of
    2^(max_length - length) values; values that no code covers get 0.
    """
    lengths, entries = code_lengths.to(torch.int64), code.max_symbols + 1
    fit = lengths.ndim == 1 and 0 < lengths.numel() <= entries and int(lengths.max()) <= code.max_length
    found = f"{tuple(lengths.shape)} up to {int(lengths.max()) if lengths.numel() else 0}"
    require(fit, "code_lengths", f"at most {entries} lengths up to {code.max_length}", found)
    used = lengths.nonzero()[:, 0]
    index = used[torch.argsort(lengths[used], stable=True)]
    spans = 1 << (code.max_length - lengths[index])
    total = int(spans.sum())
    require(0 < total <= 1 << code.max_length, "code_lengths", "the lengths of a prefix code", lengths.tolist()[:8])
    table = torch.zeros(1 << code.max_length, dtype=torch.int32, device=code_lengths.device)
    entry = (index << 4 | lengths[index]).to(torch.int32)
    table[:total] = torch.repeat_interleave(entry, spans, output_size=total)
    return table


def launch_huffman(
    stream: torch.Tensor,
    table: torch.Tensor,
    symbols: tuple[int, int],
    starts: torch.Tensor,
    used: torch.Tensor,
    z: torch.Tensor,
    cut: Cut,
    code: HuffmanCode,
) -> None:
    """Run the kernel. Allocates nothing; arguments as for `huffman_chunks`, `symbols` is (first_symbol, escape)."""
    chunks = starts.numel()
    # Triton launches on the current device, which need not be the tensors'.
    with torch.cuda.device_of(stream):
        huffman_chunks[(-(-chunks // LANES),)](
            stream,
            table,
            starts,
            used,
            z,
            stream.numel(),
            chunks,
            *cut.launch_arguments,
            *symbols,
            **huffman_constants(code),
            num_warps=1,
            **COMPILER,
        )


def huffman_constants(code: HuffmanCode) -> dict[str, int]:
    """Return the compile-time arguments of `huffman_chunks`, by name."""
    return {"LANES": LANES, "MAX_LENGTH": code.max_length, "ESCAPE_BITS": code.escape_bits}


def decode_huffman(
    stream: torch.Tensor,
    chunk_bits: torch.Tensor,
    code_lengths: torch.Tensor,
    first_symbol: int,
    cut: Cut,
    code: HuffmanCode,
) -> torch.Tensor:
    """Decode an entropy-coded layer on the stream's device. Synchronises: for load time only.

    Args:
        stream: int32 [words].
        chunk_bits: uint16 [row blocks, column blocks], bits per chunk.
        code_lengths: uint8 [symbols + 1], the last for ESCAPE; 0 means unused.
        first_symbol: integer that symbol 0 stands for.
        cut: the matrix and its chunks.
        code: constants of the format.

    Returns:
        int32 [rows, cols].

    Raises:
        KernelInputError: shapes that do not belong together, or a stream that does not decode to its bit counts.
    """
    table = lookup_table(code_lengths, code)
    starts, bits = chunk_starts(chunk_bits, "chunk_bits", stream, WORD_BITS, cut)
    used = torch.empty(bits.numel(), dtype=torch.int32, device=stream.device)
    z = torch.empty(cut.rows, cut.cols, dtype=torch.int32, device=stream.device)
    launch_huffman(stream, table, (first_symbol, code_lengths.numel() - 1), starts, used, z, cut, code)
    check_chunks(used != bits, "after its number of bits")
    return z
