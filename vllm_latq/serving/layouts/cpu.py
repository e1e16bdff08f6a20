"""The layouts `cpu` and `cpu_trellis`: weights in the order of our C++ products, and the products.

    PackedWeight --pack, once at load--> words, scales, entries of outliers --product--> y
    MergedTrellis --pack, once at load--> words of rings, kept weights --product--> y

A product reads as many bytes as the weight is stored in. It takes activations as integers of 15 or 16 bits with a scale
for each 128 columns, and adds exactly within these; the result of a token does not depend on the other tokens.

With many tokens, a product is bound by arithmetic, and a library multiplies dense matrices faster. So codes are
dequantized, some rows at a time: exactly, in float32, then rounded once to bfloat16 if the CPU multiplies bfloat16 and
so does the layer. Else the product is in float32. `invariant` operands never take this way.

Invariant: `pack(w, capacity)` has the same shapes for all weights of one scheme and shape, as a reload needs.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch.nn.functional import linear, pad

from vllm_latq.coding.packing import unpack_codes
from vllm_latq.errors import RESTART_TO_RELOAD, CheckpointError
from vllm_latq.format.encodings.packed import PackedWeight
from vllm_latq.format.scheme import WHOLE_ROW
from vllm_latq.kernels.cpu import library, packed
from vllm_latq.kernels.cpu import trellis as rings
from vllm_latq.kernels.cpu.packed import PackedTensors
from vllm_latq.kernels.cpu.trellis import RingTensors
from vllm_latq.serving.layouts.checkpoint import outlier_capacity
from vllm_latq.serving.layouts.trellis import block_tensors, uneven
from vllm_latq.serving.trellis import MergedTrellis

OUTLIER_BITS = 32
DTYPES = (torch.bfloat16, torch.float16)  # of activations; float32 would lose more than half of its bits
# Up to so many tokens our product of codes is faster than dequantize + matmul. Measured on an EPYC of Zen 4, where our
# product of a trellis is nearly as fast even at 512 tokens.
FEW_TOKENS = 128
DENSE_WEIGHTS = 1 << 20  # dequantized at a time, in a product: they fit a cache


def supports(weight: PackedWeight, dtype: torch.dtype) -> bool:
    """Return whether the product multiplies a weight on its device by activations of `dtype`."""
    if weight.qweight.device.type != "cpu" or not weight.qweight.numel() or not is_fast(dtype):
        return False
    return weight.scales is None or weight.group_size == WHOLE_ROW or weight.group_size % packed.GROUP_STEP == 0


def is_fast(dtype: torch.dtype) -> bool:
    """Return whether this CPU has the product of packed codes, for activations of `dtype`."""
    return dtype in DTYPES and packed.is_available()


def supports_trellis(weight: MergedTrellis, dtype: torch.dtype) -> bool:
    """Return whether the product multiplies a weight on its device by activations of `dtype`."""
    on_cpu = weight.device.type == "cpu" and min(weight.shape) > 0
    return on_cpu and dtype in DTYPES and uneven(weight) is None and rings.is_available()


@dataclass(frozen=True)
class CpuOperands:
    """A weight [rows, cols] in the layout `cpu`; or, to be registered, the weights of several experts.

    The weights of several experts are one object, whose tensors have a leading dimension; `product` takes one weight.

    Attributes:
        weight: the tensors.
        invariant: whether the product of a row must not depend on the other rows.
    """

    layout: ClassVar[str] = "cpu"
    arch: ClassVar[str] = ""

    weight: PackedTensors
    invariant: bool

    @classmethod
    def from_lists(
        cls, tensors: Sequence[torch.Tensor | None], constants: Sequence[int], arch: str = ""
    ) -> "CpuOperands":
        """Unpack the values of `tensors()`, and `constants()`, which the operator is given."""
        fields: list[Any] = [*tensors, *constants]
        return cls(PackedTensors(*fields[:-1]), fields[-1])

    def tensors(self) -> dict[str, torch.Tensor | None]:
        """Return the tensors to register, by name."""
        return {name: getattr(self.weight, name) for name in packed.TENSORS}

    def constants(self) -> list[int]:
        """Return what is the same for every weight of a scheme and shape; the first is the number of rows."""
        return [*(int(getattr(self.weight, name)) for name in packed.CONSTANTS), int(self.invariant)]

    @classmethod
    def pack(cls, weight: PackedWeight, where: str, capacity: int | None, invariant: bool = False) -> "CpuOperands":
        """Reorder a weight on the CPU that `supports` accepts.

        Args:
            weight: on the CPU.
            where: layer name for errors.
            capacity: entries of outliers to allocate; None leaves a sixteenth of headroom for reloaded weights.
            invariant: whether the product of a row must not depend on the other rows.

        Raises:
            CheckpointError: the outliers take more entries than `capacity`.
        """
        step = max(1, packed.BAND_WEIGHTS // (packed.TILE * weight.cols)) * packed.TILE
        codes = (unpack_codes(band, weight.bits, weight.cols) for band in weight.qweight.split(step))
        words = torch.cat([packed.pack_codes(band.to(torch.uint8), weight.bits) for band in codes])
        begins = entries = None
        if weight.outliers is not None:
            csr = weight.outliers
            begins, entries = packed.pack_outliers(csr.row_ptr, csr.col_idx, csr.values, weight.cols)
            entries = _with_room(entries, capacity or outlier_capacity(len(entries)), "outliers", where)
        whole = weight.scales is None or weight.group_size == WHOLE_ROW
        made = PackedTensors(
            words=words,
            scales=None if weight.scales is None else packed.pack_scales(weight.scales),
            row_scales=weight.row_scales,
            entry_begins=begins,
            entries=entries,
            rows=weight.shape[0],
            cols=weight.cols,
            bits=weight.bits,
            group=weight.cols if whole else weight.group_size,
            midrise=weight.midrise,
        )
        return cls(made, invariant)

    @property
    def capacity(self) -> int | None:
        """Entries of outliers that the tensors have room for; None for a weight without outliers."""
        return None if self.weight.entries is None else self.weight.entries.shape[-1]

    def product(self, x: torch.Tensor) -> torch.Tensor:
        """Return x [.., cols] times the transposed weight, [.., rows], dtype of x."""
        tokens = _numbers(x)
        own = self.invariant or tokens.shape[0] <= FEW_TOKENS
        y = packed.multiply(tokens, self.weight) if own else _by_bands(tokens, self.weight)
        return y.to(x.dtype).view(*x.shape[:-1], self.weight.rows)


@dataclass(frozen=True)
class CpuTrellisOperands:
    """A weight [rows, cols] in the layout `cpu_trellis`; or, to be registered, the weights of several experts.

    The weights of several experts are one object, whose tensors have a leading dimension; `product` takes one weight.
    The product of a row of x never depends on the other rows.

    Attributes:
        weight: the tensors.
        invariant: whether batch-invariant operands were requested.
    """

    layout: ClassVar[str] = "cpu_trellis"
    arch: ClassVar[str] = ""

    weight: RingTensors
    invariant: bool

    @classmethod
    def from_lists(
        cls, tensors: Sequence[torch.Tensor | None], constants: Sequence[int], arch: str = ""
    ) -> "CpuTrellisOperands":
        """Unpack the values of `tensors()`, and `constants()`, which the operator is given."""
        fields: list[Any] = [*tensors, *constants]
        return cls(RingTensors(*fields[:-1]), fields[-1])

    def tensors(self) -> dict[str, torch.Tensor | None]:
        """Return the tensors to register, by name."""
        return {name: getattr(self.weight, name) for name in rings.TENSORS}

    def constants(self) -> list[int]:
        """Return what is the same for every weight of a shape; the first is the number of rows."""
        return [self.weight.rows, self.weight.cols, int(self.invariant)]

    @classmethod
    def pack(
        cls, weight: MergedTrellis, where: str, capacity: Sequence[int] | None, invariant: bool = False
    ) -> "CpuTrellisOperands":
        """Reorder a weight on the CPU that `supports_trellis` accepts.

        Args:
            weight: on the CPU.
            where: layer name for errors.
            capacity: words and kept weights to allocate; None leaves a sixteenth of headroom for kept weights.
            invariant: whether the product of a row must not depend on the other rows.

        Raises:
            CheckpointError: the weight takes more words, or has more kept weights, than `capacity`.
        """
        first, (low, high) = weight.shards[0], weight.columns
        columns = first.column_exponents[low:high], first.order[low:high] - low
        made = rings.prepare_trellis(block_tensors(weight), *columns)
        words, kept = capacity or (len(made.words), outlier_capacity(len(made.kept_values)))
        made = made._replace(
            words=_with_room(made.words, words, "words of rates", where),
            kept_places=_with_room(made.kept_places, kept, "kept weights", where),
            kept_values=_with_room(made.kept_values, kept, "kept weights", where),
        )
        return cls(made, invariant)

    @property
    def capacity(self) -> Any:
        """Words and kept weights that the tensors have room for, as a list, which JSON can hold."""
        return [self.weight.words.shape[-1], self.weight.kept_values.shape[-1]]

    def product(self, x: torch.Tensor) -> torch.Tensor:
        """Return x [.., cols] times the transposed weight, [.., rows], dtype of x."""
        y = rings.multiply(_numbers(x), self.weight)
        return y.to(x.dtype).view(*x.shape[:-1], self.weight.rows)


def _numbers(x: torch.Tensor) -> torch.Tensor:
    """Return x as [n, cols] of a dtype that the products read: of its own, or float32."""
    return x.reshape(-1, x.shape[-1]).to(x.dtype if x.dtype in library.KINDS else torch.float32)


def _with_room(tensor: torch.Tensor, capacity: int, what: str, where: str) -> torch.Tensor:
    """Lengthen a tensor with zeros to `capacity`; raise CheckpointError if it is longer."""
    if len(tensor) > capacity:
        raise CheckpointError(where, f"at most {capacity} {what}", str(len(tensor)), RESTART_TO_RELOAD)
    return pad(tensor, (0, capacity - len(tensor)))


def _by_bands(tokens: torch.Tensor, weight: PackedTensors) -> torch.Tensor:
    """Multiply tokens [n, cols] by the transposed weight, dequantized a band of rows at a time: [n, rows]."""
    abilities = torch.cpu.get_capabilities()
    in_bfloat = abilities.get("avx512_bf16") or abilities.get("amx_bf16")
    dtype = tokens.dtype if in_bfloat and tokens.dtype == torch.bfloat16 else torch.float32
    y, x = torch.empty(len(tokens), weight.rows, dtype=tokens.dtype), tokens.to(dtype)
    step = max(1, DENSE_WEIGHTS // (packed.TILE * weight.cols)) * packed.TILE
    for first in range(0, weight.rows, step):
        count = min(step, weight.rows - first)
        y[:, first : first + count] = linear(x, packed.dense_rows(weight, first, count, dtype))
    return y
