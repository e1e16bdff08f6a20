"""Decoding of Huffman streams on any device, all chunks at once. FORMAT.md section 3.3.

A GPU runs the Triton kernel of `kernels/huffman.py`; elsewhere torch operations do the same:

    step s:   chunk 0   chunk 1   chunk 2  ...     one lookup each: the next 15 bits -> (symbol, code length)
              position  position  position         advance each by its own code length

Invariant: nothing is read outside the stream, whatever it contains; a chunk that does not end where its length says is
refused.
"""

import torch

from vllm_latq.errors import CheckpointError
from vllm_latq.huffman import ESCAPE_BITS, MAX_LENGTH, HuffmanStream, chunk_shape, grid_shape
from vllm_latq.kernel_path import decode_on_device, has_kernels

_LENGTH_BITS = 4  # MAX_LENGTH fits
_WORD_BITS = 32


def decode_stream(stream: HuffmanStream, where: str, device: torch.device | str = "cpu") -> torch.Tensor:
    """The integers of a validated stream.

    Args:
        stream: what to decode.
        where: tensor name for errors.
        device: on which to decode; the result stays there.

    Returns:
        int32 [rows, cols].

    Raises:
        CheckpointError: the stream contradicts its chunk lengths.
    """
    if has_kernels(torch.device(device)):
        return decode_on_device(stream, where, torch.device(device))
    chunk_rows, chunk_cols = chunk_shape(stream.shape[1])
    row_blocks, col_blocks = grid_shape(stream.shape)
    ends = stream.chunk_bits.to(device).to(torch.int64).reshape(-1).cumsum(0)
    start = torch.nn.functional.pad(ends, (1, 0))[:-1]
    symbols = torch.zeros((chunk_rows * chunk_cols, start.numel()), dtype=torch.int32, device=device)
    reached = _decode_chunks(stream, start, chunk_counts(stream.shape, device), symbols)
    if not torch.equal(reached, ends):
        chunk = int((reached != ends).nonzero()[0])
        expected = f"chunk {chunk} to end at bit {int(ends[chunk])}"
        hint = "The checkpoint is damaged: copy or download it again, or quantize again."
        raise CheckpointError(where, expected, f"bit {int(reached[chunk])}", hint)
    blocks = symbols.t().reshape(row_blocks, col_blocks, chunk_rows, chunk_cols)
    tiled = blocks.permute(0, 2, 1, 3).reshape(row_blocks * chunk_rows, col_blocks * chunk_cols)
    return tiled[: stream.shape[0], : stream.shape[1]].contiguous()


def chunk_counts(shape: tuple[int, int], device: torch.device | str) -> torch.Tensor:
    """Weights in each chunk, int64 [chunks]: fewer in the last ones of rows and columns."""
    sizes = []
    for total, block, number in zip(shape, chunk_shape(shape[1]), grid_shape(shape), strict=True):
        starts = torch.arange(number, device=device) * block
        sizes.append((total - starts).clamp(max=block))
    return (sizes[0].unsqueeze(1) * sizes[1].unsqueeze(0)).reshape(-1)


def _decode_chunks(stream: HuffmanStream, start: torch.Tensor, counts: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    """Decode every chunk from its start bit into a column of `out`, int32 [largest chunk, chunks].

    Returns:
        The bit that each chunk has reached after its counts[t] weights, int64 [chunks]; what `out` has below them in
        column t is meaningless.
    """
    first, escape = stream.table.first_symbol, stream.table.escape
    windows, last_bit = _windows(stream.stream.to(start.device))
    table = _lookup(stream).to(start.device)
    may_escape = int(stream.table.lengths[escape]) > 0
    stops = set(counts.unique().tolist())
    position, reached = start.clone(), start.clone()
    word, bit, window, entry = (torch.empty_like(start) for _ in range(4))
    for step in range(max(stops)):
        _peek(windows, position, word, bit, window)
        window.bitwise_right_shift_(64 - MAX_LENGTH).bitwise_and_((1 << MAX_LENGTH) - 1)
        torch.index_select(table, 0, window, out=entry)
        torch.bitwise_right_shift(entry, _LENGTH_BITS, out=out[step])
        position.add_(entry.bitwise_and_((1 << _LENGTH_BITS) - 1)).clamp_(max=last_bit)
        if may_escape and (escaped := out[step] == escape).any():
            _peek(windows, position, word, bit, window)
            raw = window.bitwise_right_shift_(64 - ESCAPE_BITS) - first
            out[step] = torch.where(escaped, raw.to(torch.int32), out[step])
            position.add_(escaped, alpha=ESCAPE_BITS).clamp_(max=last_bit)
        if step + 1 in stops:
            reached = torch.where(counts == step + 1, position, reached)
    out.add_(first)
    return reached


def _windows(stream: torch.Tensor) -> tuple[torch.Tensor, int]:
    """For each word, itself and the next one as one int64 (the stream's 64 bits from there), and a bit past the end."""
    words = torch.nn.functional.pad(stream.to(torch.int64) & 0xFFFFFFFF, (0, 3))
    return (words[:-1] << _WORD_BITS) | words[1:], _WORD_BITS * (stream.numel() + 1)


def _lookup(stream: HuffmanStream) -> torch.Tensor:
    """The next MAX_LENGTH bits -> symbol index and code length in one int64."""
    index, length = stream.table.lookup()
    return torch.from_numpy((index.astype("int64") << _LENGTH_BITS) | length)


def _peek(
    windows: torch.Tensor, position: torch.Tensor, word: torch.Tensor, bit: torch.Tensor, window: torch.Tensor
) -> None:
    """Write the stream's bits from each position on, left-aligned, into `window`; `word` and `bit` are scratch."""
    torch.bitwise_right_shift(position, 5, out=word)
    torch.bitwise_and(position, _WORD_BITS - 1, out=bit)
    torch.index_select(windows, 0, word, out=window)
    window.bitwise_left_shift_(bit)
