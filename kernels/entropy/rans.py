"""rANS decoding of integer weights with a table per class of rows and columns, one lane per chunk, at load.

The stream is cut into chunks of about 4096 weights that decode alone (their word counts are stored), so a layer has as
many independent lanes as chunks. A lane keeps a 32-bit state x >= 2**16 and reads 16-bit words, the low half of an
int32 first. The table of weight (i, j) is row_class[i] + column_class[j]:

    slots int64 [tables, 4096]: integer << 32 | escape << 25 | frequency << 12 | slot - first slot of the symbol
    entry = slots[table, x % 4096];  x = frequency * (x // 4096) + the entry's low 12 bits;  below 2**16: append a word
    ESCAPE: the integer is two times the low 16 bits of x, each replaced by the next word

Every stream and table address is masked, so a corrupt stream gives wrong final states, which are refused, and never a
stray read.
"""

import torch
import triton
import triton.language as tl

from vllm_latq.kernels.configs import COMPILER
from vllm_latq.kernels.entropy.chunks import LANES, chunk_part, chunk_shape, chunk_starts
from vllm_latq.kernels.errors import require

CHUNK_WEIGHTS = 4096
SLOTS = 4096
STATE_LOW = 1 << 16
MAX_TABLES = 31
# Layers of every shape share one compiled kernel.
SIZES = ("words", "tables", "chunks", "col_blocks", "rows", "cols", "chunk_rows", "chunk_cols")


@triton.jit
def half_word(stream_ptr, at, words, live):
    """uint32: the 16-bit word at each position of the stream, 0 behind its end."""
    word = tl.load(stream_ptr + (at >> 1), mask=live & (at < 2 * words), other=0).to(tl.uint32, bitcast=True)
    return (word >> ((at & 1) * 16).to(tl.uint32)) & 0xFFFF


@triton.jit(do_not_specialize=SIZES)
def rans_chunks(
    stream_ptr, slot_ptr, row_class_ptr, column_class_ptr, start_ptr, used_ptr, state_ptr, z_ptr, words, tables, chunks,
    col_blocks, rows, cols, chunk_rows, chunk_cols, LANES: tl.constexpr,
):  # fmt: skip
    """Grid (ceil(chunks / LANES),). Writes z int32 [rows, cols], words used and final states, int32 [chunks] each.

    start_ptr: int64 [chunks], first 16-bit word of each chunk. Classes: int32 [rows] and [cols].
    """
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
        slot = table * 4096 + (state & 4095).to(tl.int32)
        entry = tl.load(slot_ptr + slot, mask=more & (table < tables), other=0)
        value = (entry >> 32).to(tl.int32)
        low = entry.to(tl.int32)
        state = ((low >> 12) & 8191).to(tl.uint32) * (state >> 12) + (low & 4095).to(tl.uint32)
        short = more & (state < 65536)
        state = tl.where(short, (state << 16) | half_word(stream_ptr, at, words, short), state)
        at += tl.where(short, 1, 0).to(tl.int64)
        escaped = more & (((low >> 25) & 1) == 1)
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


def slot_table(table_ranges: torch.Tensor, frequencies: torch.Tensor) -> torch.Tensor:
    """int64 [tables, 4096]: what each slot of each table stands for.

    Args:
        table_ranges: int32 [tables, 2], first symbol and number of symbols.
        frequencies: uint16 [entries], those of each table's symbols and of ESCAPE.
    """
    device = frequencies.device
    counts = table_ranges[:, 1].to(torch.int64) + 1
    frequency = frequencies.to(torch.int64)
    fit = 0 < counts.numel() <= MAX_TABLES and int(counts.min()) > 0 and int(counts.sum()) == frequency.numel()
    expected = f"at most {MAX_TABLES} tables of {frequency.numel()} entries together"
    require(fit, "table_ranges", expected, counts.tolist())
    table = torch.repeat_interleave(torch.arange(counts.numel(), device=device), counts)
    sums = torch.zeros_like(counts).index_add_(0, table, frequency)
    require(bool((sums == SLOTS).all()), "frequencies", f"sums of {SLOTS}", sums.tolist())
    ends = counts.cumsum(0)
    symbol = torch.arange(frequency.numel(), device=device) - (ends - counts)[table]
    escape = symbol == counts[table] - 1
    entry = torch.where(escape, 1 << 25, (table_ranges[:, 0].to(torch.int64)[table] + symbol) << 32)
    entry |= frequency << 12
    first = frequency.cumsum(0) - frequency
    owner = torch.repeat_interleave(torch.arange(frequency.numel(), device=device), frequency)
    slots = entry[owner] | (torch.arange(owner.numel(), device=device) - first[owner])
    return slots.view(-1, SLOTS)


def launch_rans(
    stream: torch.Tensor,
    slots: torch.Tensor,
    row_class: torch.Tensor,
    column_class: torch.Tensor,
    starts: torch.Tensor,
    used: torch.Tensor,
    states: torch.Tensor,
    z: torch.Tensor,
    chunk_shape: tuple[int, int],
) -> None:
    """Run the kernel. Allocates nothing; arguments as in `rans_chunks`."""
    rows, cols = z.shape
    chunks = starts.numel()
    # Triton launches on the current device, which need not be the tensors'.
    with torch.cuda.device_of(stream):
        rans_chunks[(-(-chunks // LANES),)](
            stream, slots, row_class, column_class, starts, used, states, z, stream.numel(), slots.shape[0], chunks,
            -(-cols // chunk_shape[1]), rows, cols, *chunk_shape, LANES=LANES, num_warps=1, **COMPILER,
        )  # fmt: skip


def decode_rans(
    stream: torch.Tensor,
    chunk_words: torch.Tensor,
    row_class: torch.Tensor,
    column_class: torch.Tensor,
    table_ranges: torch.Tensor,
    frequencies: torch.Tensor,
) -> torch.Tensor:
    """Integers of an entropy-coded layer, on the stream's device. Synchronises: for load time only.

    Args:
        stream: int32 [words].
        chunk_words: uint16 [row blocks, column blocks], 16-bit words per chunk.
        row_class: integers [rows], one class each.
        column_class: integers [cols], one class each.
        table_ranges: int32 [tables, 2], first symbol and number of symbols.
        frequencies: uint16 [entries], those of each table's symbols and of ESCAPE.

    Returns:
        int32 [rows, cols].

    Raises:
        KernelInputError: shapes that do not belong together, or a chunk that does not end in the state it began with.
    """
    rows, cols = row_class.numel(), column_class.numel()
    slots = slot_table(table_ranges, frequencies)
    lowest = min(int(row_class.min()), int(column_class.min()))
    highest = int(row_class.max()) + int(column_class.max())
    expected = f"classes from 0 on, and sums of them below {slots.shape[0]}"
    require(lowest >= 0 and highest < slots.shape[0], "row_class", expected, f"{lowest} and {highest}")
    starts, words = chunk_starts(chunk_words, "chunk_words", stream, 2, (rows, cols), CHUNK_WEIGHTS)
    used, states = (torch.empty(words.numel(), dtype=torch.int32, device=stream.device) for _ in range(2))
    z = torch.empty(rows, cols, dtype=torch.int32, device=stream.device)
    classes = row_class.to(torch.int32), column_class.to(torch.int32)
    launch_rans(stream, slots, *classes, starts, used, states, z, chunk_shape(cols, CHUNK_WEIGHTS))
    wrong = ((used != words) | (states != STATE_LOW)).nonzero()
    require(not wrong.numel(), "stream", "every chunk to end after its words in the state it began with",
            f"chunk {int(wrong[0]) if wrong.numel() else 0} elsewhere")  # fmt: skip
    return z
