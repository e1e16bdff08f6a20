"""The one entry point against float64: every number of rows, and memory poisoned and fenced.

Whatever a launcher allocates starts out as NaN inside a fence: a value that is read before it is written, or not
written at all, makes the product NaN; a store outside its tensor damages the fence. x lies in a fence of NaN, too.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch
import triton
import triton.language as tl

from helpers.kernel_device import DEVICE
from helpers.recorded import RecordedKernel, RecordedOperators
from vllm_latq.kernels.configs import FUSED_LAUNCHES, GATHER_ROWS, SIMT, DecodeConfig, decode_config, max_decode_rows
from vllm_latq.kernels.decode import dispatch, ssqr
from vllm_latq.kernels.decode import prefill as dequantize
from vllm_latq.kernels.decode.dispatch import ssqr_matmul
from vllm_latq.kernels.dev.reference import matmul_reference
from vllm_latq.kernels.device.fields import planes_of, words_of
from vllm_latq.kernels.device.tiles import tile_scale_pairs, tile_words
from vllm_latq.kernels.errors import KernelInputError
from vllm_latq.kernels.layout.weight import HIP

pytestmark = pytest.mark.kernel

FENCE = 4096  # elements before and behind; a multiple of every alignment
# Relative to the largest output: one rounding to the type of x; the interpreter truncates to bfloat16.
TOLERANCE = {torch.bfloat16: 2**-7, torch.float16: 2**-11}
PREFILL_FACTOR = 2  # prefill rounds the weights, too
SCHEMES = tuple(product((2, 3, 4, 8), (32, 64, 128, -1)))
DTYPES = (torch.bfloat16, torch.float16)


def fenced(allocate: Callable[..., torch.Tensor], *shape: int, **options: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """A contiguous tensor of NaN, and the larger one, of NaN too, that it lies in the middle of."""
    size = torch.Size(shape).numel()
    whole = allocate(size + 2 * FENCE, **options).fill_(float("nan"))
    return whole[FENCE : FENCE + size].view(shape), whole


def check_fence(whole: torch.Tensor) -> None:
    assert whole[:FENCE].isnan().all()
    assert whole[-FENCE:].isnan().all()


@contextmanager
def poisoned_allocations() -> Iterator[None]:
    """Poison and fence what `torch.empty` makes; check the fences at the end."""
    allocate, made = torch.empty, []

    def allocate_fenced(*shape: int, **options: Any) -> torch.Tensor:
        tensor, whole = fenced(allocate, *shape, **options)
        made.append(whole)
        return tensor

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "empty", allocate_fenced)
        yield
    assert made
    for whole in made:
        check_fence(whole)


def multiply_and_compare(
    layer: Any, m: int, dtype: torch.dtype, config: DecodeConfig | None = None, gap: int = 0
) -> None:
    """gap: columns of NaN behind each row of x, which is a part of a wider matrix then."""
    weight = layer.weight
    wider, whole = fenced(torch.zeros, m, weight.cols + gap, dtype=dtype, device=DEVICE)
    x = wider[:, : weight.cols]
    x.copy_(torch.randn(m, weight.cols, generator=torch.Generator().manual_seed(m)))
    with poisoned_allocations():
        y = ssqr_matmul(x, weight, config)
    expected = matmul_reference(x.cpu(), layer.dense)
    widest = config.max_rows if config else max_decode_rows(weight.bits)
    prefill = m > FUSED_LAUNCHES * widest
    assert y.shape == (m, weight.rows)
    assert y.dtype == dtype
    tolerance = (PREFILL_FACTOR if prefill else 1) * TOLERANCE[dtype]
    # NaN compares false, so it fails too.
    assert (y.cpu() - expected).abs().max() <= tolerance * expected.abs().max()
    assert not weight.tickets.any()
    check_fence(whole)


def test_a_damaged_fence_is_noticed() -> None:
    def write_behind_the_end() -> None:
        with poisoned_allocations():
            torch.empty(3, 4, dtype=torch.bfloat16).as_strided((13,), (1,)).zero_()

    with pytest.raises(AssertionError, match="isnan"):
        write_behind_the_end()


@pytest.mark.parametrize("m", range(1, 71))
def test_every_number_of_rows(make_layer, m: int) -> None:
    """Bits, group sizes, grids, types, shapes and split-K change with m; every pair of bits and group size occurs."""
    bits, group_size = SCHEMES[7 * m % len(SCHEMES)]
    cols = 384 if m % 3 else (321 if group_size == -1 else 512 - 2 * group_size)
    midrise = m % 3 == 0
    layer = make_layer(
        bits, 33 + m % 2, cols, group_size=group_size, outliers=0.02, row_scales=m % 5 == 0, midrise=midrise
    )
    config = None
    if m <= max_decode_rows(bits):
        base = decode_config(m, bits, layer.weight.arch, group_size)
        config = replace(base, programs_per_processor=1 + m % 2, min_superblocks=1)
    multiply_and_compare(layer, m, DTYPES[m // 2 % 2], config, gap=(0, 8, 0, 3)[m % 4])


@pytest.mark.parametrize("m", [1, 2, 4, 7])
def test_few_rows_by_a_kernel_of_more(make_layer, m: int) -> None:
    """As in small groups on AMD."""
    layer = make_layer(3, 70, 512, group_size=32, outliers=0.05)
    config = decode_config(m, 3, HIP, 32)
    assert config.max_rows == 16
    multiply_and_compare(layer, m, torch.float16, replace(config, min_superblocks=1))


@pytest.mark.parametrize(
    ("bits", "group_size", "midrise", "m", "launched"),
    [
        (4, 128, False, 64, [64]),
        (4, 32, False, 64, [64]),
        (4, 32, False, 65, [64, 1]),
        (2, 64, False, 128, [64, 64]),
        (2, 64, False, 129, []),
        (4, 128, True, 65, [64, 1]),
        (4, 128, True, 129, []),
        (8, 32, False, 64, [32, 32]),
        (8, 32, False, 65, []),
    ],
)
def test_launches(make_layer, monkeypatch: pytest.MonkeyPatch, bits, group_size, midrise, m, launched) -> None:
    """At most two fused ones, each with the entry of its rows, width, architecture and groups; else dense weights."""
    weight = replace(make_layer(bits, 64, 128, group_size=group_size, midrise=midrise).weight, arch="sm_86")
    found = []

    def record(x: torch.Tensor, *arguments: Any) -> None:
        found.append((x.shape[0], arguments[2]))

    monkeypatch.setattr(dispatch, "launch_ssqr", record)
    ssqr_matmul(torch.zeros(m, 128, device=DEVICE).bfloat16(), weight)
    assert found == [(rows, decode_config(rows, bits, "sm_86", group_size)) for rows in launched]


@pytest.mark.parametrize("m", [1, 2, 3, 8, 16, 33, 64])
def test_a_kernel_is_all_that_decoding_launches(make_layer, monkeypatch: pytest.MonkeyPatch, m: int) -> None:
    """One launch, in split-K with outliers, odd columns; torch makes memory and views, and reads nothing."""
    weight = replace(make_layer(3, 70, 1000, group_size=-1, outliers=0.02, row_scales=True).weight, processors=8)
    config = replace(decode_config(m, 3, weight.arch), min_superblocks=1)
    x = torch.randn(m, 1000, device=DEVICE).bfloat16()
    kernel = RecordedKernel()
    monkeypatch.setattr(ssqr, "ssqr_tensor_core", kernel)
    with RecordedOperators() as operators:
        ssqr_matmul(x, weight, config)
    (named,) = kernel.launches
    assert (named["SPLIT"], named["TRANSPOSED"]) == (m > 4, m > GATHER_ROWS)
    assert operators.called <= {"aten::empty", "aten::view", "aten::detach", "aten::split"}


ODD: dict[str, dict[str, Any]] = {
    "odd shape": {"rows": 131, "cols": 259, "group_size": -1, "outliers": 0.05},
    "empty outliers": {"rows": 65, "cols": 256, "outliers": 0.0, "empty_outliers": True},
    "no outliers": {"rows": 65, "cols": 256, "outliers": 0.0},
    "full rows": {"rows": 67, "cols": 256, "outliers": 0.0, "full_rows": (0, 1, 66)},
    "all outliers": {"rows": 20, "cols": 64, "group_size": 32, "outliers": 1.0},
    "mid-rise": {"rows": 66, "cols": 384, "outliers": 0.05, "midrise": True},
    "one row": {"rows": 1, "cols": 256, "outliers": 0.1},
    "one weight": {"rows": 1, "cols": 1, "group_size": -1, "outliers": 0.0},
    "one outlier": {"rows": 1, "cols": 1, "group_size": -1, "outliers": 1.0},
}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kernel", ["simt", "low batch", "wide", "prefill"])
@pytest.mark.parametrize("name", ODD)
def test_odd_layers(make_layer, monkeypatch: pytest.MonkeyPatch, name: str, kernel: str, dtype: torch.dtype) -> None:
    """In every kernel, at two parts where the layer has two superblocks; prefill in chunks of two row blocks."""
    layer = make_layer(3, **ODD[name])
    small, wide = (decode_config(rows, 3, layer.weight.arch) for rows in (8, 19))
    m, base = {"simt": (3, SIMT), "low batch": (1, small), "wide": (19, wide), "prefill": (17, small)}[kernel]
    monkeypatch.setattr(dequantize, "CHUNK_BYTES", 1)
    gap = {"simt": 8, "wide": 5}.get(kernel, 0)
    multiply_and_compare(layer, m, dtype, replace(base, programs_per_processor=2, min_superblocks=1), gap)


@pytest.mark.parametrize(
    ("x", "message"),
    [
        (torch.zeros(2, 256), "x: expected bfloat16 or float16, found torch.float32"),
        (torch.zeros(2, 255).half(), "x: expected 256 columns"),
        (torch.zeros((), dtype=torch.float16), "x: expected 256 columns"),
        (torch.zeros(2, 256, device="meta").half(), "x: expected a tensor on .*, found meta"),
    ],
)
def test_activations_that_do_not_fit(make_layer, x: torch.Tensor, message: str) -> None:
    x = x if x.is_meta else x.to(DEVICE)
    with pytest.raises(KernelInputError, match=message):
        ssqr_matmul(x, make_layer(3, 64, 256).weight)


def test_columns_of_activations_that_are_apart(make_layer) -> None:
    weight, x = make_layer(3, 64, 256).weight, torch.randn(256, 3).half().to(DEVICE)
    assert torch.equal(ssqr_matmul(x.T, weight), ssqr_matmul(x.T.contiguous(), weight))


def test_rows_too_far_apart_for_offsets_of_32_bits_are_copied(make_layer, monkeypatch: pytest.MonkeyPatch) -> None:
    launched = []
    monkeypatch.setattr(dispatch, "launch_ssqr", lambda x, *_: launched.append(x.stride(0)))
    weight, config = make_layer(3, 64, 256, outliers=0.0).weight, decode_config(2, 3)
    for stride in (2**30 - 1, 2**30):
        x = torch.empty_strided((2, 256), (stride, 1), dtype=torch.float16, device="meta")
        dispatch.decode_matmul(x, weight, config, torch.empty(2, 64, dtype=torch.float16, device="meta"))
    assert launched == [2**30 - 1, 256]


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")  # of numpy, in the interpreter
def test_rows_of_activations_do_not_touch_each_other(make_layer) -> None:
    """An infinity or a NaN in a row of x spoils that row of y at most, in every kernel."""
    layer = make_layer(4, 70, 512, outliers=0.05)
    for m in (2, 5, 12, 20, 64, 70, 130):
        x = torch.randn(m, 512, generator=torch.Generator().manual_seed(m)).bfloat16()
        expected = ssqr_matmul(x.to(DEVICE), layer.weight)
        x[1, 5], x[1, 300] = float("inf"), float("nan")
        y = ssqr_matmul(x.to(DEVICE), layer.weight)
        assert not y[1].isfinite().all()
        others = [row for row in range(m) if row != 1]
        assert torch.equal(y[others], expected[others])


def test_a_row_that_names_the_simt_kernel_is_launched(make_layer, monkeypatch: pytest.MonkeyPatch) -> None:
    """One row of x takes it; two rows take tensor cores, and so does an invariant weight."""
    layer, launches = make_layer(3, 70, 384, outliers=0.05), []

    def table(rows: int, *key: Any) -> DecodeConfig:
        return replace(SIMT, max_rows=1) if rows == 1 else decode_config(rows, *key)

    def simt(*arguments: Any) -> None:
        launches.append("simt")
        launch_simt(*arguments)

    launch_simt = dispatch.launch_simt
    monkeypatch.setattr(dispatch, "decode_config", table)
    monkeypatch.setattr(dispatch, "launch_simt", simt)
    for m, invariant, expected in ((1, False, ["simt"]), (2, False, []), (1, True, [])):
        launches.clear()
        weight = replace(layer.weight, invariant=invariant)
        multiply_and_compare(replace(layer, weight=weight), m, torch.bfloat16, None)
        assert launches == expected


@triton.jit
def tile_addresses(word_ptr, scale_ptr, out_ptr, tile, supers, sb, share, BITS: tl.constexpr, RANGES: tl.constexpr):
    """Writes how many bytes behind the first word, and the first pair of scales, those of each row of a tile lie."""
    words = tile_words(word_ptr, tile, supers, sb, share, BITS, 128, RANGES).to(tl.int64) - word_ptr.to(tl.int64)
    first = tl.sum(tl.where(tl.arange(0, words.shape[1])[None, :] == 0, words, 0), 1)
    pairs = tile_scale_pairs(scale_ptr, tile, supers, sb, share, 32, 128, RANGES).to(tl.int64) - scale_ptr.to(tl.int64)
    tl.store(out_ptr + tl.arange(0, 128), first)
    tl.store(out_ptr + 128 + tl.arange(0, 128), pairs)


@pytest.mark.interpreter
@pytest.mark.parametrize(("bits", "ranges"), [(2, 1), (3, 1), (4, 1), (8, 1), (3, 4)])
def test_addresses_in_weights_of_more_than_2_to_the_31_words(bits: int, ranges: int) -> None:
    tile, supers, share = 3_000_000 * ranges, 256, 64
    sb = 7 if ranges > 1 else 200
    words = torch.zeros(1, dtype=torch.int32)
    found = torch.zeros(2, 128, dtype=torch.int64)
    tile_addresses[(1,)](words, words, found, tile, supers, sb, share, BITS=bits, RANGES=ranges)
    for lane in range(128):
        row = tile * (128 // ranges) + lane % (128 // ranges)
        block = row // 64 * supers + sb + lane // (128 // ranges) * share
        size = planes_of(bits) * 64 * words_of(bits)
        assert int(found[0, lane]) == 4 * (block * size + row % 64 * words_of(bits))
        assert int(found[1, lane]) == 4 * (block * 4 * 64 + row % 64)
    assert int(found.min()) > 4 * 2**31
