"""The layout `int4`, on CPUs: codes in the order of torch's 4-bit product, and the product.

    PackedWeight --pack, once at load--> codes in the order of torch's kernel --product--> y
    y[.., i] = row_scales[i] * (sum_j x[.., j] * (scales[i, g] * (code[i, j] - 8) + offsets[i, g])
                                + sum_j x[.., j] * outliers[i, j])        g = j // group

Codes of 2 and 3 bits are kept in 4 bits, moved so that 8 stands for zero: a product reads half a byte per weight and
dequantizes nothing. A code of 8 bits is kept as two of 4 bits, 16 * high + low, and x is repeated to match. Outliers
are added row by row in float32: as a sparse matrix times one token, or as bags of an embedding for more tokens. The
inner product is rounded to bfloat16 before outliers and row scales are applied, and y is rounded after. An infinite x
gives NaN where the high and low part, or a code and the outlier in its place, differ in sign.

A product with many tokens is bound by arithmetic, and dense matrices multiply faster than torch's 4-bit kernel. So the
same bytes are dequantized, some rows at a time: exactly, in float32, then rounded once to bfloat16 where the CPU
multiplies bfloat16. Elsewhere the product is in float32.

The two products, and the two sums of outliers, round differently. So with `invariant` tokens of any number take
torch's 4-bit product and the embedding's sums, which add up the columns of each token in one order.

Invariant: `pack(w, capacity)` has the same shapes for all weights of one scheme and shape, as a reload needs.
"""

import warnings
from dataclasses import dataclass
from functools import cache
from typing import Any, ClassVar

import torch
from torch.nn import functional

from vllm_latq.coding.packing import unpack_codes
from vllm_latq.format.encodings.packed import PackedWeight
from vllm_latq.format.scheme import WHOLE_ROW
from vllm_latq.serving.layouts.checkpoint import CheckpointOperands
from vllm_latq.serving.layouts.listed import ListedOperands

BITS = 4
WIDTHS = (4, 8)  # of codes, as they are kept
OUTLIER_BITS = 64
INTERLEAVED = {"AVX2": 32, "AVX512": 64}  # rows in one block: a byte holds codes of its first and of its second half
ROWS = 64  # whole blocks of either size
GROUPS = (256, 128, 64, 32)  # columns with one scale, all sizes that torch's kernel takes
ZERO = 8  # the code that torch's kernel takes for zero
PACKED_WEIGHTS = 1 << 24  # reordered at a time, at load: bounds the temporaries to 100 to 200 MB
DENSE_WEIGHTS = 1 << 20  # dequantized at a time, in a product: they fit a cache
FEW_TOKENS = 80  # up to this many tokens int4 matmul beats dequantize + matmul


def is_fast(dtype: torch.dtype) -> bool:
    """Return whether torch has a 4-bit kernel on this CPU for `dtype` activations that is faster than dequantizing."""
    aten = torch.ops.aten
    known = hasattr(aten, "_convert_weight_to_int4pack_for_cpu") and hasattr(aten, "_weight_int4pack_mm_for_cpu")
    # torch also has kernels for other dtypes and other CPUs, which are slower.
    return known and dtype == torch.bfloat16 and torch.backends.cpu.get_cpu_capability() in INTERLEAVED


def supports(weight: PackedWeight, dtype: torch.dtype) -> bool:
    """Return whether torch's product multiplies a weight on its device by activations of `dtype`."""
    on_cpu = weight.qweight.device.type == "cpu" and weight.qweight.numel() > 0
    return on_cpu and is_fast(dtype) and bool(_groups(weight))


@cache
def _silence_sparse_csr_warning() -> None:
    """Trigger and hide the warning about sparse CSR tensors, which torch gives once in a process."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.sparse_csr_tensor([0, 0], [], [], (1, 1), device="cpu")


@dataclass(frozen=True)
class Int4Operands(ListedOperands):
    """A weight [rows, cols] in the layout `int4`; or, to be registered, the weights of several experts.

    The weights of several experts are one object, whose tensors have a leading dimension; `product` takes one weight.

    Attributes:
        words: uint8 [padded rows, parts * cols / 2], in the order of torch's kernel.
        scales_and_offsets: bfloat16 [parts * groups, padded rows, 2].
        row_scales: float32 [rows], or None.
        row_ptr: int32 [rows + 1], or None for a weight without outliers.
        col_idx: int32 [capacity], or None.
        values: float32 [capacity], or None.
        rows: output channels.
        group: columns with one scale, one of GROUPS.
        parts: codes of 4 bits for each weight: 1, or 2 for a weight of 8 bits.
        invariant: whether the product of a token must not depend on the other tokens.
    """

    TENSORS = ("words", "scales_and_offsets", "row_scales", "row_ptr", "col_idx", "values")
    CONSTANTS = ("rows", "group", "parts", "invariant")
    layout: ClassVar[str] = "int4"
    arch: ClassVar[str] = ""

    words: torch.Tensor
    scales_and_offsets: torch.Tensor
    row_scales: torch.Tensor | None
    row_ptr: torch.Tensor | None
    col_idx: torch.Tensor | None
    values: torch.Tensor | None
    rows: int
    group: int
    parts: int
    invariant: bool

    @classmethod
    def pack(cls, weight: PackedWeight, capacity: int | None, invariant: bool = False) -> "Int4Operands":
        """Reorder a weight on the CPU that `supports` accepts, with room for `capacity` outliers."""
        _silence_sparse_csr_warning()
        rows, group = weight.qweight.shape[0], _groups(weight)[0]
        padding, parts = -rows % ROWS, 1 if weight.bits <= BITS else 2
        scales = torch.ones(rows, 1) if weight.scales is None else weight.scales
        scales = scales.repeat_interleave(weight.cols // group // scales.shape[1], 1).to(torch.bfloat16)
        # The zero of a mid-rise grid is half a step.
        offsets = scales / 2 if weight.midrise else torch.zeros_like(scales)
        if parts == 2:  # bfloat16 holds all of these products exactly
            scales, offsets = torch.cat([16 * scales, scales], 1), torch.cat([offsets, ZERO * scales], 1)
        pairs = torch.stack([scales, offsets], -1)
        bands = weight.qweight.split(_band(PACKED_WEIGHTS, parts * weight.cols))
        words = torch.cat([_words(band, weight) for band in bands])
        scales_and_offsets = functional.pad(pairs, (0, 0, 0, 0, 0, padding)).transpose(0, 1).contiguous()
        stored = CheckpointOperands.pack(weight, capacity)
        col_idx = None if stored.col_idx is None else stored.col_idx.to(torch.int32)
        values = None if stored.values is None else stored.values.to(torch.float32)
        csr = (stored.row_ptr, col_idx, values)
        return cls(words, scales_and_offsets, weight.row_scales, *csr, rows, group, parts, invariant)

    @property
    def capacity(self) -> int | None:
        """Outliers that the tensors have room for; None for a weight without outliers."""
        return None if self.values is None else self.values.shape[-1]

    @property
    def outliers(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None:
        """row_ptr, col_idx and values; None for a weight without outliers."""
        if self.row_ptr is None or self.col_idx is None or self.values is None:
            return None
        return self.row_ptr, self.col_idx, self.values

    def product(self, x: torch.Tensor) -> torch.Tensor:
        """Return x [.., cols] times the transposed weight, [.., rows], dtype of x."""
        tokens = x.reshape(-1, x.shape[-1]).to(torch.bfloat16).contiguous()
        if not len(tokens):
            return x.new_empty((*x.shape[:-1], self.rows))
        few = self.invariant or len(tokens) * self.parts <= FEW_TOKENS
        y = _coded_product(tokens, self) if few else _dense_product(tokens, self)
        return y.to(x.dtype).contiguous().view(*x.shape[:-1], self.rows)


def _band(weights: int, cols: int) -> int:
    """Return how many rows, in whole blocks of torch's order, hold about `weights` weights."""
    return max(1, weights // (ROWS * cols)) * ROWS


def _words(qweight: torch.Tensor, weight: PackedWeight) -> torch.Tensor:
    """Put some rows of a weight in the order of torch's kernel."""
    codes = unpack_codes(qweight, weight.bits, weight.cols).to(torch.int32)
    if weight.bits <= BITS:
        codes += ZERO - (1 << (weight.bits - 1))
    else:
        codes = torch.cat([codes >> BITS, codes & 15], 1)
    codes = functional.pad(codes, (0, 0, 0, -len(codes) % ROWS), value=ZERO)
    return torch.ops.aten._convert_weight_to_int4pack_for_cpu(codes, 1)


def _groups(weight: PackedWeight) -> list[int]:
    """Return the numbers of columns that can share a scale in torch's kernel, largest first."""
    whole = weight.scales is None or weight.group_size == WHOLE_ROW
    size = weight.cols if whole else weight.group_size
    return [group for group in GROUPS if size % group == 0]


def _coded_product(tokens: torch.Tensor, weight: Int4Operands) -> torch.Tensor:
    """Multiply few tokens [n, cols]: [n, rows], bfloat16 without outliers and row scales, else float32."""
    repeated = tokens if weight.parts == 1 else tokens.repeat(1, weight.parts)
    multiply = torch.ops.aten._weight_int4pack_mm_for_cpu
    y: torch.Tensor = multiply(repeated, weight.words, weight.group, weight.scales_and_offsets)[:, : weight.rows]
    outliers = weight.outliers
    if outliers is not None:
        one = len(tokens) == 1 and not weight.invariant and torch.backends.mkl.is_available()
        y = y + (_outliers_of_one(tokens, *outliers) if one else _outliers(tokens, *outliers))
    return y if weight.row_scales is None else y * weight.row_scales


def _outliers(tokens: torch.Tensor, row_ptr: torch.Tensor, col_idx: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """Multiply tokens [n, cols] by the transposed CSR matrix: float32 [n, rows], each row summed in order."""
    count = int(row_ptr[-1])
    col_idx, values, table = col_idx[:count], values[:count], tokens.to(torch.float32).t()
    if len(tokens) == 1:  # a bag of rows of one number takes longer than a bag of rows of two
        table = table.expand(-1, 2)
    options: dict[str, Any] = {"mode": "sum", "include_last_offset": True}
    sums = functional.embedding_bag(col_idx, table.contiguous(), row_ptr, per_sample_weights=values, **options)
    return sums.t()[: len(tokens)]


def _outliers_of_one(
    tokens: torch.Tensor, row_ptr: torch.Tensor, col_idx: torch.Tensor, values: torch.Tensor
) -> torch.Tensor:
    """Multiply one token [1, cols] by the transposed CSR matrix: float32 [1, rows]. MKL chooses the order of sums."""
    count, shape = int(row_ptr[-1]), (len(row_ptr) - 1, tokens.shape[1])
    matrix = torch.sparse_csr_tensor(row_ptr, col_idx[:count], values[:count], shape, check_invariants=False)
    return torch.mv(matrix, tokens[0].to(torch.float32)).unsqueeze(0)


def _dense_product(tokens: torch.Tensor, weight: Int4Operands) -> torch.Tensor:
    """Multiply many tokens [n, cols]: [n, rows], in the dtype of the multiplication."""
    cols, abilities = tokens.shape[1], torch.cpu.get_capabilities()
    dtype = torch.bfloat16 if abilities.get("avx512_bf16") or abilities.get("amx_bf16") else torch.float32
    tokens = tokens.to(dtype)
    y = torch.empty(len(tokens), weight.rows, dtype=dtype)
    step = _band(DENSE_WEIGHTS, cols)
    for start in range(0, weight.rows, step):
        stop = min(start + step, weight.rows)
        band = slice(start, start + step)
        dense = _dense(weight.words[band], weight.scales_and_offsets[:, band], weight.group, weight.parts)
        dense = dense[: stop - start]
        if weight.outliers is not None:
            row_ptr, col_idx, values = weight.outliers
            ends = row_ptr[start : stop + 1].to(torch.int64)
            row = torch.repeat_interleave(ends.diff())
            entries = slice(int(ends[0]), int(ends[-1]))
            dense.view(-1).index_add_(0, row * cols + col_idx[entries], values[entries])
        if weight.row_scales is not None:
            dense *= weight.row_scales[start:stop].unsqueeze(1)
        y[:, start:stop] = functional.linear(tokens, dense.to(dtype))
    return y


def _dense(words: torch.Tensor, pairs: torch.Tensor, group: int, parts: int) -> torch.Tensor:
    """Dequantize the inliers of whole blocks of rows: float32 [rows, cols], without row scales."""
    block = INTERLEAVED[torch.backends.cpu.get_cpu_capability()]
    cols = words.shape[1] * 2 // parts
    halves = words.view(-1, parts * cols, block // 2).transpose(1, 2).contiguous()
    codes = torch.cat([halves & 15, halves >> BITS], 1).view(-1, parts, cols)
    codes, zero = (codes[:, 0], ZERO) if parts == 1 else (codes[:, 0] * 16 + codes[:, 1], 16 * ZERO)
    groups = cols // group
    scales, offsets = pairs[-groups:, :, 0].to(torch.float32), pairs[:groups, :, 1].to(torch.float32)
    shifts = (offsets - zero * scales).t().contiguous().unsqueeze(-1)
    # All of this is exact while scales are normal numbers: codes and scales have at most 8 bits, a shift is a multiple
    # of half a scale. (One addcmul takes four times as long.)
    grouped = codes.to(torch.float32).view(-1, groups, group)
    return grouped.mul_(scales.t().contiguous().unsqueeze(-1)).add_(shifts).view(-1, cols)
