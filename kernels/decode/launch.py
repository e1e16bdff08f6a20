"""Scratch memory, compiled variant and weight arguments of a launch: the part that both decode kernels share."""

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from vllm_latq.kernels.configs import GATHER_ROWS
from vllm_latq.kernels.layout.fields import SUPERBLOCK
from vllm_latq.kernels.layout.weight import KernelWeight


@dataclass(frozen=True)
class Scratch:
    """How a launch cuts the columns, and the memory it needs for that.

    Attributes:
        parts: split-K factor: so many programs share a row tile, and the last of them adds their sums.
        ranges: ranges of columns that a program multiplies side by side; 1 unless `parts` is 1, divides the
            superblocks, and leaves at least 16 weight rows of the tile.
        partials: float32, at least parts * padded rows * activation rows of a tile; None when `parts` is 1.
        transposed: [cols, config.outlier_rows(m, ranges)], dtype of x, in which the kernel writes x^T for the outliers;
            None without outliers, for GATHER_ROWS rows or fewer, and for the SIMT kernel.
    """

    parts: int = 1
    ranges: int = 1
    partials: torch.Tensor | None = None
    transposed: torch.Tensor | None = None


class Variant(NamedTuple):
    """The properties of a product that a decode kernel is compiled for, apart from its launch configuration.

    A tuple, because every launch makes one: a frozen dataclass takes several times as long.

    Attributes:
        bits, group_size, midrise: of the weight, as in `KernelWeight`.
        m: rows of x; kernels differ for one row, for up to GATHER_ROWS rows, and for more.
        outliers: whether the weight has outlier entries.
        flat_scales, row_scales: whether the weight has them.
        split: whether there are several parts of split-K.
        ranges: ranges of columns, as in `Scratch`.
        whole_superblocks: whether the columns fill their last superblock, so that no load of x needs a mask for them.
        asm: whether the kernel may use NVIDIA inline assembly.
        upcast: whether products take float32 operands: Triton's interpreter multiplies the raw bits of bf16.
    """

    bits: int
    m: int
    group_size: int = 128
    midrise: bool = False
    outliers: bool = True
    flat_scales: bool = False
    row_scales: bool = False
    split: bool = True
    ranges: int = 1
    whole_superblocks: bool = True
    asm: bool = True
    upcast: bool = False

    @property
    def transposed(self) -> bool:
        """True if outliers read x^T; for few rows of x they gather x itself."""
        return self.outliers and self.m > GATHER_ROWS


def variant_of(x: torch.Tensor, weight: KernelWeight, m: int, parts: int, ranges: int = 1) -> Variant:
    """Return the variant for a product of m rows of x."""
    return Variant(
        bits=weight.bits,
        m=m,
        group_size=weight.group_size,
        midrise=weight.midrise,
        outliers=weight.entries is not None,
        flat_scales=weight.flat_scales is not None,
        row_scales=weight.row_scales is not None,
        split=parts > 1,
        ranges=ranges,
        whole_superblocks=weight.cols % SUPERBLOCK == 0,
        asm=x.is_cuda and torch.version.hip is None,
        upcast=not x.is_cuda,
    )


def weight_arguments(weight: KernelWeight) -> dict[str, Any]:
    """Return the arguments that the decode kernels take from a weight, by name."""
    return {
        "word_ptr": weight.words,
        "scale_ptr": weight.scale_pairs,
        "flat_scale_ptr": weight.flat_scales,
        "row_scale_ptr": weight.row_scales,
        "order_ptr": weight.order,
        "entry_ptr": weight.entries,
        "slice_ptr": weight.slice_ptr,
        "ticket_ptr": weight.tickets,
        "N": weight.rows,
        "supers": weight.superblocks,
    }
