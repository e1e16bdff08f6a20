"""Chunks of an entropy-coded matrix: runs of about as many weights each, decoded alone, one lane per chunk.

    z [rows, cols] --cut into chunk_rows x chunk_cols, row by row of chunks--> chunk t, row-major inside
    stream: int32 words; the chunks follow each other without padding, chunk t has lengths[t] units of it

Invariant: a lane's addresses come from its chunk's number and from stored lengths that add up to the stream's.
"""

import torch
import triton
import triton.language as tl

from vllm_latq.kernels.errors import require

LANES = 32  # of one program: a warp


@triton.jit
def chunk_part(chunk, live, col_blocks, rows, cols, chunk_rows, chunk_cols):
    """First row, first column, columns and weights of each chunk; int32 [LANES] each, no weights where not live."""
    row = (chunk // col_blocks) * chunk_rows
    col = (chunk % col_blocks) * chunk_cols
    width = tl.minimum(chunk_cols, cols - col)
    return row, col, width, tl.where(live, tl.minimum(chunk_rows, rows - row) * width, 0)


def chunk_shape(cols: int, weights: int) -> tuple[int, int]:
    """(chunk_rows, chunk_cols) of chunks of about `weights` weights."""
    return max(1, weights // cols), min(cols, weights)


def chunk_starts(
    lengths: torch.Tensor, name: str, stream: torch.Tensor, per_word: int, shape: tuple[int, int], weights: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Where each chunk starts, and its length, int64 [chunks] each. Synchronises the device.

    Args:
        lengths: uint16 [row blocks, column blocks], units of the stream that each chunk has.
        name: of `lengths`, for errors.
        stream: int32 [words], contiguous.
        per_word: units in a word.
        shape: (rows, cols) of the integers.
        weights: that a chunk has about.

    Raises:
        KernelInputError: lengths that belong to other chunks or another stream, or a stream that is not such a vector.
    """
    plain = stream.dtype == torch.int32 and stream.ndim == 1 and stream.is_contiguous()
    require(plain, "stream", "a contiguous vector of int32", f"{stream.dtype} {tuple(stream.shape)}")
    grid = tuple(-(-size // part) for size, part in zip(shape, chunk_shape(shape[1], weights), strict=True))
    require(lengths.shape == grid, name, f"{grid}", tuple(lengths.shape))
    units = lengths.flatten().to(torch.int64)
    ends = units.cumsum(0)
    words = -(-int(ends[-1]) // per_word)
    require(words == stream.numel(), "stream", f"{words} words", stream.numel())
    return ends - units, units
