"""rANS decoding of integer weights with a table per class of rows and columns, one lane per chunk, at load.

The stream is cut into chunks that decode alone (their word counts are stored), so a layer has as many independent lanes
as chunks. A lane keeps a 32-bit state x >= 2**16 and reads 16-bit words, the low half of an int32 first. The table of
weight (i, j) is row_class[i] + column_class[j]; with B = PROBABILITY_BITS:

    slots int64 [tables, 2**B]: integer << 32 | escape << (2 * B + 1) | frequency << B | slot - first slot of the symbol
    entry = slots[table, x % 2**B]
    x = frequency * (x // 2**B) + the entry's low B bits;  below STATE_LOW: append a word
    ESCAPE: the integer is two times the low 16 bits of x, each replaced by the next word

Every stream and table address is masked, so a corrupt stream gives wrong final states, which are refused, and never a
stray read.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from vllm_latq.kernels.configs import COMPILER
from vllm_latq.kernels.entropy.chunks import LANES, Cut, check_chunks, chunk_part, chunk_starts
from vllm_latq.kernels.errors import require

WORDS_PER_INT32 = 2
# Layers of every shape share one compiled kernel.
SIZES = ("words", "tables", "chunks", "col_blocks", "rows", "cols", "chunk_rows", "chunk_cols")


@dataclass(frozen=True)
class RansCode:
    """Constants of the stream's format, which the caller passes (FORMAT.md section 3.4).

    Attributes:
        probability_bits: the frequencies of a table add up to 2**probability_bits, its number of slots.
        max_tables: most tables.
        state_low: lowest state between two steps, in which every chunk begins its encoding and ends its decoding.
    """

    probability_bits: int
    max_tables: int
    state_low: int


@triton.jit
def half_word(stream_ptr, at, words, live):
    """Return the 16-bit word at each position of the stream, uint32; 0 after its end."""
    word = tl.load(stream_ptr + (at >> 1), mask=live & (at < 2 * words), other=0).to(tl.uint32, bitcast=True)
    return (word >> ((at & 1) * 16).to(tl.uint32)) & 0xFFFF


@triton.jit(do_not_specialize=SIZES)
def rans_chunks(
    stream_ptr,  # int32 [words]
    slot_ptr,  # int64 [tables, 2**PROBABILITY_BITS], from `slot_table`
    row_class_ptr,  # int32 [rows]
    column_class_ptr,  # int32 [cols]
    start_ptr,  # int64 [chunks]: first 16-bit word of each chunk
    used_ptr,  # int32 [chunks]: gets the 16-bit words that each chunk used
    state_ptr,  # int32 [chunks]: gets the final states
    z_ptr,  # int32 [rows, cols]: gets the integers
    words,
    tables,
    chunks,
    col_blocks,  # chunks side by side
    rows,
    cols,
    chunk_rows,
    chunk_cols,
    LANES: tl.constexpr,  # chunks of a program
    PROBABILITY_BITS: tl.constexpr,
    STATE_LOW: tl.constexpr,
):
    """Grid (ceil(chunks / LANES),). Decode one chunk per lane."""
    SLOTS: tl.constexpr = 1 << PROBABILITY_BITS
    ESCAPE_SHIFT: tl.constexpr = 2 * PROBABILITY_BITS + 1
    chunk = tl.program_id(0) * LANES + tl.arange(0, LANES)
    live = chunk < chunks
    row, col, width, count = chunk_part(chunk, live, col_blocks, rows, cols, chunk_rows, chunk_cols)
    start = tl.load(start_ptr + chunk, mask=live, other=0)
    state = half_word(stream_ptr, start, words, live) | (half_word(stream_ptr, start + 1, words, live) << 16)
    at = start + 2
    out = z_ptr + row.to(tl.int64) * cols + col
    along = tl.zeros((LANES,), tl.int32)
    for i in range(0, tl.max(count, 0)):
        more = i < count
        table = tl.load(row_class_ptr + row, mask=more, other=0)
        table += tl.load(column_class_ptr + col + along, mask=more, other=0)
        slot = table * SLOTS + (state & (SLOTS - 1)).to(tl.int32)
        entry = tl.load(slot_ptr + slot, mask=more & (table < tables), other=0)
        value = (entry >> 32).to(tl.int32)
        low = entry.to(tl.int32)
        frequency = ((low >> PROBABILITY_BITS) & (2 * SLOTS - 1)).to(tl.uint32)
        state = frequency * (state >> PROBABILITY_BITS) + (low & (SLOTS - 1)).to(tl.uint32)
        short = more & (state < STATE_LOW)
        state = tl.where(short, (state << 16) | half_word(stream_ptr, at, words, short), state)
        at += tl.where(short, 1, 0).to(tl.int64)
        escaped = more & (((low >> ESCAPE_SHIFT) & 1) == 1)
        upper = state & 0xFFFF
        state = tl.where(escaped, (state - upper) | half_word(stream_ptr, at, words, escaped), state)
        lower = state & 0xFFFF
        state = tl.where(escaped, (state - lower) | half_word(stream_ptr, at + 1, words, escaped), state)
        at += tl.where(escaped, 2, 0).to(tl.int64)
        raw = ((upper << 16) | lower).to(tl.int32, bitcast=True)
        tl.store(out + along, tl.where(escaped, raw, value), mask=more)
        # A lane is finished with its last weight: what its state becomes afterwards must not count.
        tl.store(state_ptr + chunk, state.to(tl.int32, bitcast=True), mask=i + 1 == count)
        along += 1
        wrap = along == width
        along = tl.where(wrap, 0, along)
        row += tl.where(wrap, 1, 0)
        out += tl.where(wrap, cols, 0)
    tl.store(used_ptr + chunk, (at - start).to(tl.int32), mask=live)


def slot_table(table_ranges: torch.Tensor, frequencies: torch.Tensor, code: RansCode) -> torch.Tensor:
    """Return the entry of each slot of each table, int64 [tables, 2**probability_bits]: see the module docstring.

    Args:
        table_ranges: int32 [tables, 2], first symbol and number of symbols.
        frequencies: uint16 [entries], those of each table's symbols and of ESCAPE.
        code: constants of the format.
    """
    device = frequencies.device
    counts = table_ranges[:, 1].to(torch.int64) + 1
    frequency = frequencies.to(torch.int64)
    fit = 0 < counts.numel() <= code.max_tables and int(counts.min()) > 0 and int(counts.sum()) == frequency.numel()
    expected = f"at most {code.max_tables} tables of {frequency.numel()} entries together"
    require(fit, "table_ranges", expected, counts.tolist())
    table = torch.repeat_interleave(torch.arange(counts.numel(), device=device), counts)
    sums = torch.zeros_like(counts).index_add_(0, table, frequency)
    total = 1 << code.probability_bits
    require(bool((sums == total).all()), "frequencies", f"sums of {total}", sums.tolist())
    ends = counts.cumsum(0)
    symbol = torch.arange(frequency.numel(), device=device) - (ends - counts)[table]
    escape = symbol == counts[table] - 1
    integer = table_ranges[:, 0].to(torch.int64)[table] + symbol
    entry = torch.where(escape, 1 << (2 * code.probability_bits + 1), integer << 32)
    entry |= frequency << code.probability_bits
    first = frequency.cumsum(0) - frequency
    owner = torch.repeat_interleave(torch.arange(frequency.numel(), device=device), frequency)
    slots = entry[owner] | (torch.arange(owner.numel(), device=device) - first[owner])
    return slots.view(-1, total)


def launch_rans(
    stream: torch.Tensor,
    slots: torch.Tensor,
    classes: tuple[torch.Tensor, torch.Tensor],
    starts: torch.Tensor,
    ends: tuple[torch.Tensor, torch.Tensor],
    z: torch.Tensor,
    cut: Cut,
    code: RansCode,
) -> None:
    """Run the kernel. Allocates nothing; arguments as for `rans_chunks`, `ends` is (used, states)."""
    chunks = starts.numel()
    # Triton launches on the current device, which need not be the tensors'.
    with torch.cuda.device_of(stream):
        rans_chunks[(-(-chunks // LANES),)](
            stream,
            slots,
            *classes,
            starts,
            *ends,
            z,
            stream.numel(),
            slots.shape[0],
            chunks,
            *cut.launch_arguments,
            **rans_constants(code),
            num_warps=1,
            **COMPILER,
        )


def rans_constants(code: RansCode) -> dict[str, int]:
    """Return the compile-time arguments of `rans_chunks`, by name."""
    return {"LANES": LANES, "PROBABILITY_BITS": code.probability_bits, "STATE_LOW": code.state_low}


def decode_rans(
    stream: torch.Tensor,
    chunk_words: torch.Tensor,
    classes: tuple[torch.Tensor, torch.Tensor],
    table_ranges: torch.Tensor,
    frequencies: torch.Tensor,
    cut: Cut,
    code: RansCode,
) -> torch.Tensor:
    """Decode an entropy-coded layer on the stream's device. Synchronises: for load time only.

    Args:
        stream: int32 [words].
        chunk_words: uint16 [row blocks, column blocks], 16-bit words per chunk.
        classes: of rows and of columns, integers [rows] and [cols].
        table_ranges: int32 [tables, 2], first symbol and number of symbols.
        frequencies: uint16 [entries], those of each table's symbols and of ESCAPE.
        cut: the matrix and its chunks.
        code: constants of the format.

    Returns:
        int32 [rows, cols].

    Raises:
        KernelInputError: shapes that do not belong together, or a chunk that does not end in the state it began with.
    """
    slots = slot_table(table_ranges, frequencies, code)
    check_classes(classes, slots.shape[0])
    starts, words = chunk_starts(chunk_words, "chunk_words", stream, WORDS_PER_INT32, cut)
    used, states = (torch.empty(words.numel(), dtype=torch.int32, device=stream.device) for _ in range(2))
    z = torch.empty(cut.rows, cut.cols, dtype=torch.int32, device=stream.device)
    rows, columns = (part.to(torch.int32) for part in classes)
    launch_rans(stream, slots, (rows, columns), starts, (used, states), z, cut, code)
    check_chunks((used != words) | (states != code.state_low), "after its words in the state it began with")
    return z


def check_classes(classes: tuple[torch.Tensor, torch.Tensor], tables: int) -> None:
    """Refuse classes of rows and columns whose sums are not all numbers of tables. Synchronises the device."""
    lowest = min(int(part.min()) for part in classes)
    highest = sum(int(part.max()) for part in classes)
    expected = f"classes from 0 on, and sums of them below {tables}"
    require(lowest >= 0 and highest < tables, "row_class", expected, f"{lowest} and {highest}")
