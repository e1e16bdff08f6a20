"""The layout `trellis`, on GPUs: the rings of a trellis code, which the Triton kernels decode while they multiply.

    MergedTrellis --blocks of rows, prepare_trellis, once at load--> TrellisOperands of the kernels --product--> y

A block is neighbouring rows of one shard. It begins at a tile of 16 rows, and its units are those of the shard, or
parts of them. Rows of zeros are blocks of their own, of rings whose bits are zero. The kernels pad each block to 64
rows.

Invariant: `pack(w, capacity)` has the same shapes for all weights of one shape and cut, so a reload copies into the
tensors that CUDA graphs have captured. Kernels serve every rate: they do not depend on the rates of a weight.
"""

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from typing import Any, ClassVar

import torch

from vllm_latq.coding.trellis.code import RATES, TILE, tile_words
from vllm_latq.coding.trellis.layout import UNIT_COLUMNS, UNIT_ROWS, parts, tile_rates, trellis_words, units
from vllm_latq.errors import RESTART_TO_RELOAD, CheckpointError
from vllm_latq.format.encodings.trellis import TrellisWeight
from vllm_latq.kernels.layout.trellis import ROOM, TrellisOperands, TrellisTensors, pool_trellis, prepare_trellis
from vllm_latq.serving.layouts.checkpoint import outlier_capacity
from vllm_latq.serving.layouts.tiled import unsupported_activations
from vllm_latq.serving.trellis import MergedTrellis

TENSORS = (
    "words", "units", "runs", "tiles", "tile_scales", "row_exponents", "column_exponents", "columns", "kept_places",
    "kept_values", "tickets",
)  # fmt: skip
# Kernels number the columns of x with 16 bits.
MAX_COLUMNS = 1 << 16
# One kernel serves all weights of a model, and of any model that is reloaded.
RATE_MASK = sum(1 << rate for rate in RATES)
Block = tuple[TrellisWeight | None, int, int]  # shard, first row in it, end; None for so many rows of zeros


def uneven(weight: MergedTrellis) -> str | None:
    """Return which rows or columns of a weight are not whole tiles and parts, in the stored order; None if all are."""
    cols, (low, high) = weight.shards[0].shape[1], weight.columns
    width = cols // parts(cols)
    if low % width or high % width:
        return f"columns {low} to {high}, which cut a part of {width} columns"
    if any(first % TILE for _, first, _ in _blocks(weight)):
        return f"rows that begin within a tile of {TILE} rows, or are in another order than the stored one"
    return None


def unsupported(weight: MergedTrellis, dtype: torch.dtype) -> str | None:
    """Return what the kernels do not support about a weight or its activations; None if they can multiply by it."""
    reason = uneven(weight)
    if reason is None and weight.shape[1] > MAX_COLUMNS:
        reason = f"more than {MAX_COLUMNS} columns"
    return reason or unsupported_activations(weight.device, dtype)


def block_tensors(weight: MergedTrellis) -> list[TrellisTensors]:
    """Return the tensors of the blocks of a weight that is not `uneven`, in the order of its rows."""
    return [_block_tensors(block, weight) for block in _blocks(weight)]


@dataclass(frozen=True)
class RingOperands:
    """A weight in the layout `trellis`, or the weights of several experts as one TrellisOperands."""

    layout: ClassVar[str] = "trellis"

    weight: TrellisOperands

    @classmethod
    def pack(
        cls,
        weight: MergedTrellis,
        where: str,
        capacity: Sequence[int] | None = None,
        alone: bool = True,
        invariant: bool = False,
    ) -> "RingOperands":
        """Bring a weight on its device into the form of the kernels.

        Args:
            weight: on the device to run on; the kernels support it.
            where: layer name for errors.
            capacity: of the operands to be replaced. None leaves a sixteenth of headroom for kept weights, and none for
                words, which are nearly all of the weight's memory.
            alone: False for a weight that `stack` will put together with others; `stack` allocates the room then.
            invariant: whether the product of a row must not depend on the other rows.

        Raises:
            CheckpointError: the weight takes more words, or has more kept weights, than `capacity`.
        """
        first, (low, high) = weight.shards[0], weight.columns
        made = prepare_trellis(block_tensors(weight), first.column_exponents[low:high], first.order[low:high] - low)
        made = replace(made, rate_mask=RATE_MASK, invariant=invariant)
        return cls(_with_room(made, where, capacity) if alone else made)

    @classmethod
    def stack(
        cls, operands: Sequence["RingOperands"], where: str, capacity: Sequence[int] | None = None
    ) -> "RingOperands":
        """Put the weights of several experts, of one shape, together; arguments and errors as for `pack`."""
        return cls(_with_room(pool_trellis([made.weight for made in operands]), where, capacity))

    @classmethod
    def from_lists(cls, tensors: Sequence[torch.Tensor | None], constants: Sequence[int], arch: str) -> "RingOperands":
        """Unpack the values of `tensors()`, and `constants()` and `arch`, which the operator is given."""
        rows, cols, processors, *linear_rows, invariant = constants
        fields: dict[str, Any] = dict(zip(TENSORS, tensors, strict=True))
        return cls(
            TrellisOperands(
                rows=rows,
                cols=cols,
                rate_mask=RATE_MASK,
                linear_rows=tuple(linear_rows),
                processors=processors,
                arch=arch,
                invariant=bool(invariant),
                **fields,
            )
        )

    def tensors(self) -> dict[str, torch.Tensor | None]:
        """Return the tensors to register, by name."""
        return {name: getattr(self.weight, name) for name in TENSORS}

    def constants(self) -> list[int]:
        """Return what is the same for every weight of a shape and cut; the first is the number of rows."""
        weight = self.weight
        return [weight.rows, weight.cols, weight.processors, *weight.linear_rows, int(weight.invariant)]

    @property
    def arch(self) -> str:
        """The GPU's architecture; empty on a CPU."""
        return self.weight.arch

    @property
    def capacity(self) -> Any:
        """Words and kept weights that the tensors have room for, as a list, which JSON can hold."""
        return [self.weight.words.numel(), self.weight.kept_places.numel()]

    def product(self, x: torch.Tensor) -> torch.Tensor:
        """Return x [.., cols] times the transposed weight, [.., rows], dtype of x."""
        from vllm_latq.kernels.decode.dispatch import trellis_matmul

        return trellis_matmul(x, self.weight)


def check_words(made: Sequence[RingOperands], where: str, capacity: Sequence[int]) -> None:
    """Refuse weights to be stacked that together have more words than fit."""
    _check_words(sum(part.weight.words.numel() - ROOM for part in made) + ROOM, where, capacity[0])


def _check_words(words: int, where: str, most: int) -> None:
    if words > most:
        raise CheckpointError(where, f"rates of at most {most} words", str(words), RESTART_TO_RELOAD)


def _with_room(made: TrellisOperands, where: str, capacity: Sequence[int] | None) -> TrellisOperands:
    """Lengthen words and kept weights to a capacity; arguments and errors as for `RingOperands.pack`."""
    words, kept = made.words.numel(), made.kept_places.numel()
    most_words, most_kept = capacity or (words, outlier_capacity(kept))
    _check_words(words, where, most_words)
    if kept > most_kept:
        raise CheckpointError(where, f"at most {most_kept} kept weights", str(kept), RESTART_TO_RELOAD)
    pad = torch.nn.functional.pad
    return replace(
        made,
        words=pad(made.words, (0, most_words - words)),
        kept_places=pad(made.kept_places, (0, most_kept - kept)),
        kept_values=pad(made.kept_values, (0, most_kept - kept)),
    )


def _blocks(weight: MergedTrellis) -> Iterator[Block]:
    """Yield the blocks that the rows of a weight consist of; one that begins within a unit ends with the unit."""
    rows = weight.rows.clamp(min=-1)
    starts = [0, *accumulate(shard.shape[0] for shard in weight.shards)]
    step, following = rows.diff(), rows[1:]
    goes_on = (step == 1) & ~torch.isin(following, torch.tensor(starts, device="cpu")) | (step == 0) & (following < 0)
    bounds = [0, *((~goes_on).nonzero()[:, 0] + 1).tolist(), len(rows)]
    for begin, end in pairwise(bounds):
        row = int(rows[begin])
        if row < 0:
            yield None, 0, end - begin
            continue
        shard = bisect_right(starts, row) - 1
        first = row - starts[shard]
        last = first + end - begin
        unit_end = min(-(-first // UNIT_ROWS) * UNIT_ROWS, last)
        for part in pairwise(sorted({first, unit_end, last})):
            yield weight.shards[shard], *part


def _block_tensors(block: Block, weight: MergedTrellis) -> TrellisTensors:
    """Return the tensors of a block, with the columns of the rank."""
    shard, first, last = block
    low, high = weight.columns
    if shard is None:
        return _zeros(last, high - low, weight.device)
    cols = shard.shape[1]
    sizes = tile_rates(shard.rates, *shard.shape) * tile_words(1)
    ends = sizes.flatten().cumsum(0).view(sizes.shape)
    tile_rows = slice(first // TILE, -(-last // TILE))
    bounds = torch.stack(((ends - sizes)[tile_rows, low // TILE], ends[tile_rows, -(-high // TILE) - 1]), 1)
    positions = shard.kept_positions.to(torch.int64)
    row, column = positions // cols - first, positions % cols - low
    kept = (row >= 0) & (row < last - first) & (column >= 0) & (column < high - low)
    unit_rows, unit_columns = units(last, high)
    return TrellisTensors(
        scale=shard.scale,
        row_exponents=shard.row_exponents[first:last],
        rates=shard.rates[first // UNIT_ROWS : unit_rows, low // UNIT_COLUMNS : unit_columns],
        trellis=torch.cat([shard.trellis[begin:end] for begin, end in bounds.tolist()]),
        kept_positions=(row * (high - low) + column)[kept].to(torch.int32),
        kept_values=shard.kept_values[kept],
    )


def _zeros(rows: int, cols: int, device: torch.device) -> TrellisTensors:
    """Return rows of zeros: the window zero has the values zero."""
    rates = torch.full(units(rows, cols), RATES[0], dtype=torch.uint8, device=device)
    return TrellisTensors(
        scale=torch.ones(1, device=device),
        row_exponents=torch.zeros(rows, dtype=torch.int8, device=device),
        rates=rates,
        trellis=torch.zeros(trellis_words(rates, rows, cols), dtype=torch.int32, device=device),
        kept_positions=torch.zeros(0, dtype=torch.int32, device=device),
        kept_values=torch.zeros(0, dtype=torch.bfloat16, device=device),
    )
