"""The way to torch's 4-bit product on a CPU: what of a packed weight it takes, its layout `int4`, and the product.

    PackedWeight --int4_arguments, once at load--> codes in the order of torch's kernel --int4_product--> y
    y[.., i] = row_scales[i] * (sum_j x[.., j] * (scales[i, g] * (code[i, j] - 8) + offsets[i, g])
                                + sum_j x[.., j] * outliers[i, j])        g = j // group

Codes of 2 and 3 bits are kept in 4, moved so that 8 stands for zero: a weight is read at half a byte each, and never
dequantized. Those of 8 bits are two of 4 side by side, 16 * high + low, and so is x. Outliers are added row by row in
float32, a sparse matrix times one token, bags of an embedding for more. The inner product is rounded to bfloat16 before
outliers and factors of rows, y after; an infinite x gives NaN where high and low part, or a code and the outlier in its
place, differ in sign.

A product with many tokens is bound by arithmetic, of which torch's has less to offer than that of dense matrices. So
the same bytes become a weight again, some rows at a time: exact in float32, and rounded once, to bfloat16, where the
CPU multiplies that; elsewhere the product is of float32.

Invariant: `int4_arguments(w, capacity)` has the same shapes for all weights of one scheme and shape, as a reload needs.
"""

import warnings
from collections.abc import Sequence
from functools import cache
from typing import Any, NamedTuple

import torch
from torch.nn import functional

from vllm_latq.coding.packing import unpack_codes
from vllm_latq.format.encodings.packed import PackedWeight
from vllm_latq.format.scheme import WHOLE_ROW
from vllm_latq.serving.layouts.checkpoint import dense_arguments

BITS = 4
WIDTHS = (4, 8)  # of codes as they are kept
OUTLIER_BITS = 64
INTERLEAVED = {"AVX2": 32, "AVX512": 64}  # rows in one block: a byte holds codes of its first and of its second half
ROWS = 64  # whole blocks of either
GROUPS = (256, 128, 64, 32)  # columns with one scale, of which torch's kernel takes any
ZERO = 8  # the code that it takes for zero
PACKED_WEIGHTS = 1 << 24  # at a time, at load: bounds the temporaries to a hundred MB or two
DENSE_WEIGHTS = 1 << 20  # at a time, in a product: they stay in a cache
FEW_TOKENS = 80  # of which a product with the codes takes less time than with a dense matrix, made first


def is_fast(dtype: torch.dtype) -> bool:
    """Whether torch has kernels on this CPU for activations of `dtype`, which take less time than to dequantize."""
    aten = torch.ops.aten
    known = hasattr(aten, "_convert_weight_to_int4pack_for_cpu") and hasattr(aten, "_weight_int4pack_mm_for_cpu")
    # It knows products of other dtypes, too, and on other CPUs, which take longer.
    return known and dtype == torch.bfloat16 and torch.backends.cpu.get_cpu_capability() in INTERLEAVED


def takes(weight: PackedWeight, dtype: torch.dtype) -> bool:
    """Whether torch's product multiplies a weight on its device by activations of `dtype`."""
    on_cpu = weight.qweight.device.type == "cpu" and weight.qweight.numel() > 0
    return on_cpu and is_fast(dtype) and _group(weight) is not None


@cache
def _hush() -> None:
    """Torch says once in a process that its sparse matrices may change."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.sparse_csr_tensor([0, 0], [], [], (1, 1), device="cpu")


def int4_arguments(weight: PackedWeight, capacity: int | None) -> tuple[dict[str, torch.Tensor | None], dict[str, int]]:
    """The layout's tensors and constants by name, for a weight that `takes` accepts.

    Args:
        weight: on the CPU.
        capacity: outliers to leave room for.
    """
    _hush()
    rows, group = weight.qweight.shape[0], _group(weight)
    assert group is not None
    padding, parts = -rows % ROWS, 1 if weight.bits <= BITS else 2
    scales = torch.ones(rows, 1) if weight.scales is None else weight.scales
    scales = scales.repeat_interleave(weight.cols // group // scales.shape[1], 1).to(torch.bfloat16)
    # A zero of a mid-rise grid is half a step.
    offsets = scales / 2 if weight.midrise else torch.zeros_like(scales)
    if parts == 2:  # all of these products are numbers of bfloat16
        scales, offsets = torch.cat([16 * scales, scales], 1), torch.cat([offsets, ZERO * scales], 1)
    pairs = torch.stack([scales, offsets], -1)
    outliers, _ = dense_arguments(weight, capacity)
    values = outliers["values"]
    tensors = {
        "words": torch.cat(
            [_words(band, weight) for band in weight.qweight.split(_band(PACKED_WEIGHTS, parts * weight.cols))]
        ),
        "scales_and_offsets": functional.pad(pairs, (0, 0, 0, 0, 0, padding)).transpose(0, 1).contiguous(),
        "row_scales": weight.row_scales,
        "row_ptr": outliers["row_ptr"],
        "col_idx": None if outliers["col_idx"] is None else outliers["col_idx"].to(torch.int32),
        "values": None if values is None else values.to(torch.float32),
    }
    return tensors, {"rows": rows, "group": group, "parts": parts}


def _band(weights: int, cols: int) -> int:
    """Rows treated together, whole blocks of torch's order: of about so many weights."""
    return max(1, weights // (ROWS * cols)) * ROWS


def _words(qweight: torch.Tensor, weight: PackedWeight) -> torch.Tensor:
    """Some rows of the weight in the order of torch's kernel."""
    codes = unpack_codes(qweight, weight.bits, weight.cols).to(torch.int32)
    if weight.bits <= BITS:
        codes += ZERO - (1 << (weight.bits - 1))
    else:
        codes = torch.cat([codes >> BITS, codes & 15], 1)
    codes = functional.pad(codes, (0, 0, 0, -len(codes) % ROWS), value=ZERO)
    return torch.ops.aten._convert_weight_to_int4pack_for_cpu(codes, 1)


def _group(weight: PackedWeight) -> int | None:
    """Columns that can share a scale in torch's kernel; None if it has no such size."""
    whole = weight.scales is None or weight.group_size == WHOLE_ROW
    size = weight.cols if whole else weight.group_size
    return next((group for group in GROUPS if size % group == 0), None)


class Int4Weight(NamedTuple):
    """What `int4_arguments` made, the three tensors of outliers as one."""

    words: torch.Tensor
    scales_and_offsets: torch.Tensor
    row_scales: torch.Tensor | None
    outliers: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None  # row_ptr, col_idx, values
    rows: int
    group: int
    parts: int


def int4_product(
    x: torch.Tensor, tensors: Sequence[torch.Tensor | None], constants: Sequence[int], arch: str
) -> torch.Tensor:
    """x [.., cols] times the transposed weight of `int4_arguments` -> [.., rows], dtype of x."""
    words, scales_and_offsets, row_scales, row_ptr, col_idx, values = tensors
    assert words is not None
    assert scales_and_offsets is not None
    rows, _, parts = constants
    tokens = x.reshape(-1, x.shape[-1]).to(torch.bfloat16).contiguous()
    if not len(tokens):
        return x.new_empty((*x.shape[:-1], rows))
    outliers = None
    if row_ptr is not None and col_idx is not None and values is not None:
        outliers = (row_ptr, col_idx, values)
    weight = Int4Weight(words, scales_and_offsets, row_scales, outliers, *constants)
    multiply = _dense_product if len(tokens) * parts > FEW_TOKENS else _coded_product
    y = multiply(tokens, weight)
    return y.to(x.dtype).contiguous().view(*x.shape[:-1], rows)


def _coded_product(tokens: torch.Tensor, weight: Int4Weight) -> torch.Tensor:
    """The product of few tokens [n, cols]: [n, rows], bfloat16 if the inner product is all, else float32."""
    repeated = tokens if weight.parts == 1 else tokens.repeat(1, weight.parts)
    multiply = torch.ops.aten._weight_int4pack_mm_for_cpu
    y: torch.Tensor = multiply(repeated, weight.words, weight.group, weight.scales_and_offsets)[:, : weight.rows]
    if weight.outliers is not None:
        y = y + _outliers(tokens, *weight.outliers)
    return y if weight.row_scales is None else y * weight.row_scales


def _outliers(tokens: torch.Tensor, row_ptr: torch.Tensor, col_idx: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """Tokens [n, cols] times the transposed CSR matrix: float32 [n, rows]."""
    count = int(row_ptr[-1])
    col_idx, values, table = col_idx[:count], values[:count], tokens.to(torch.float32).t()
    if len(tokens) == 1 and torch.backends.mkl.is_available():
        shape = (len(row_ptr) - 1, len(table))
        matrix = torch.sparse_csr_tensor(row_ptr, col_idx, values, shape, check_invariants=False)
        return torch.mv(matrix, table[:, 0]).unsqueeze(0)
    if len(tokens) == 1:  # a bag of rows of one number takes longer than one of two
        table = table.expand(-1, 2)
    options: dict[str, Any] = {"mode": "sum", "include_last_offset": True}
    sums = functional.embedding_bag(col_idx, table.contiguous(), row_ptr, per_sample_weights=values, **options)
    return sums.t()[: len(tokens)]


def _dense_product(tokens: torch.Tensor, weight: Int4Weight) -> torch.Tensor:
    """The product of many tokens [n, cols]: [n, rows], of the dtype that it multiplies in."""
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
    """The inliers of whole blocks of rows: float32 [rows, cols], without factors of rows."""
    block = INTERLEAVED[torch.backends.cpu.get_cpu_capability()]
    cols = words.shape[1] * 2 // parts
    halves = words.view(-1, parts * cols, block // 2).transpose(1, 2).contiguous()
    codes = torch.cat([halves & 15, halves >> BITS], 1).view(-1, parts, cols)
    codes, zero = (codes[:, 0], ZERO) if parts == 1 else (codes[:, 0] * 16 + codes[:, 1], 16 * ZERO)
    groups = cols // group
    scales, offsets = pairs[-groups:, :, 0].to(torch.float32), pairs[:groups, :, 1].to(torch.float32)
    shifts = (offsets - zero * scales).t().contiguous().unsqueeze(-1)
    # All of it is exact while scales are normal numbers: codes and scales have at most 8 bits, a shift is some halves
    # of a scale. (One addcmul takes four times as long.)
    grouped = codes.to(torch.float32).view(-1, groups, group)
    return grouped.mul_(scales.t().contiguous().unsqueeze(-1)).add_(shifts).view(-1, cols)
