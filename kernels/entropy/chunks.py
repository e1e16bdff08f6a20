"""Chunks of an entropy-coded matrix: runs of about as many weights each, decoded alone, one lane per chunk.

    z [rows, cols] --cut into chunk_rows x chunk_cols, row by row of chunks--> chunk t, row-major inside
    stream: int32 words; the chunks follow each other without padding, chunk t has lengths[t] units of it

Invariant: a lane's addresses come from its chunk's number and from stored lengths that add up to the stream's.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from vllm_latq.kernels.errors import KernelInputError, require

LANES = 32  # of one program: a warp


@triton.jit
def chunk_part(chunk, live, col_blocks, rows, cols, chunk_rows, chunk_cols):
    """Return first row, first column, columns and weights of each chunk, int32 [LANES]; no weights where not live."""
    row = (chunk // col_blocks) * chunk_rows
    col = (chunk % col_blocks) * chunk_cols
    width = tl.minimum(chunk_cols, cols - col)
    return row, col, width, tl.where(live, tl.minimum(chunk_rows, rows - row) * width, 0)


@dataclass(frozen=True)
class Cut:
    """How a matrix is cut into chunks; defined by the stream's format, and passed by the caller.

    Attributes:
        rows, cols: of the matrix.
        chunk_rows, chunk_cols: of a whole chunk.
    """

    rows: int
    cols: int
    chunk_rows: int
    chunk_cols: int

    @property
    def grid(self) -> tuple[int, int]:
        """Row blocks and column blocks of the matrix."""
        return -(-self.rows // self.chunk_rows), -(-self.cols // self.chunk_cols)

    @property
    def launch_arguments(self) -> tuple[int, ...]:
        """The kernels' arguments col_blocks, rows, cols, chunk_rows and chunk_cols."""
        return self.grid[1], self.rows, self.cols, self.chunk_rows, self.chunk_cols


def chunk_starts(
    lengths: torch.Tensor, name: str, stream: torch.Tensor, per_word: int, cut: Cut
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return where each chunk starts, and its length, int64 [chunks] each. Synchronises the device.

    Args:
        lengths: uint16 [row blocks, column blocks], units of the stream that each chunk has.
        name: of `lengths`, for errors.
        stream: int32 [words], contiguous.
        per_word: units in a word.
        cut: the chunks of the matrix.

    Raises:
        KernelInputError: lengths that belong to other chunks or another stream, or a stream that is not such a vector.
    """
    plain = stream.dtype == torch.int32 and stream.ndim == 1 and stream.is_contiguous()
    require(plain, "stream", "a contiguous vector of int32", f"{stream.dtype} {tuple(stream.shape)}")
    require(lengths.shape == cut.grid, name, f"{cut.grid}", tuple(lengths.shape))
    units = lengths.flatten().to(torch.int64)
    ends = units.cumsum(0)
    words = -(-int(ends[-1]) // per_word)
    require(words == stream.numel(), "stream", f"{words} words", stream.numel())
    return ends - units, units


def check_chunks(wrong: torch.Tensor, expected: str) -> None:
    """Refuse a stream whose chunks do not end as they must. Synchronises the device.

    Args:
        wrong: bool [chunks].
        expected: how a chunk must end, for the error.
    """
    chunks = wrong.nonzero()
    if chunks.numel():
        raise KernelInputError("stream", f"every chunk to end {expected}", f"chunk {int(chunks[0])} to end elsewhere")
