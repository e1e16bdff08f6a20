"""Outlier slices: exact round trips, balance, exact splitting, buckets, and refusal of hostile CSR arrays."""

import pytest
import torch

from helpers.kernel_layout import entries_to_coordinates, slices_to_entries
from vllm_latq.kernels.bench.roofline import SLOT_PADDING
from vllm_latq.kernels.errors import KernelInputError
from vllm_latq.kernels.layout.codes import codes_to_stream, padded_rows
from vllm_latq.kernels.layout.entries import coordinates, value_entries
from vllm_latq.kernels.layout.outliers import (
    OutlierCsr,
    bucket,
    check_csr,
    row_order,
    slice_entries,
)
from vllm_latq.kernels.layout.weight import prepare


def csr(mask: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    row_ptr = torch.zeros(mask.shape[0] + 1, dtype=torch.int32)
    row_ptr[1:] = mask.sum(1).cumsum(0)
    return row_ptr, mask.nonzero()[:, 1].to(torch.int32), values


SHAPES = [(1, 1, 1.0), (63, 500, 0.02), (130, 65536, 0.0005), (70, 64, 1.0), (9, 3000, 0.003)]


@pytest.mark.parametrize(("rows", "cols", "density"), SHAPES)
def test_round_trip(rows: int, cols: int, density: float) -> None:
    generator = torch.Generator().manual_seed(3)
    mask = torch.rand(rows, cols, generator=generator) < density
    points = coordinates(*csr(mask, torch.randn(int(mask.sum()), generator=generator).bfloat16()), cols)
    order = row_order(torch.bincount(points.row, minlength=rows), padded_rows(rows))
    back = entries_to_coordinates(slices_to_entries(slice_entries(value_entries(points), order), order))
    for name in ("row", "col", "value"):
        assert torch.equal(getattr(back, name), getattr(points, name))


def test_rows_are_sorted_among_128_and_dealt_out_to_two_blocks() -> None:
    order = row_order(torch.arange(130), 256)
    slices = [list(range(127 - 16 * i, 111 - 16 * i, -1)) for i in range(8)]
    assert order[:128].view(8, 16).tolist() == slices[::2] + slices[1::2]
    assert order[128:130].tolist() == [129, 128]
    assert sorted(order.tolist()) == list(range(256))


def test_padding_stays_small() -> None:
    """At 1% of 4096 columns, sorting keeps padding near 5%; unsorted slices of 16 rows would pad by a quarter."""
    mask = torch.rand(256, 4096, generator=torch.Generator().manual_seed(4)) < 0.01
    points = coordinates(*csr(mask, torch.ones(int(mask.sum())).bfloat16()), 4096)
    order = row_order(torch.bincount(points.row, minlength=256), 256)
    slots = int(slice_entries(value_entries(points), order).slice_ptr[-1])
    assert slots * 16 <= SLOT_PADDING * points.row.numel()


def test_repeated_columns_add_up_and_wide_values_are_split_exactly() -> None:
    row_ptr = torch.tensor([0, 3, 4], dtype=torch.int32)
    points = coordinates(row_ptr, torch.tensor([7, 7, 2, 0]), torch.tensor([1.5, 2.25, 1001.0, -65537.0]), 8)
    dense = torch.zeros(2, 8)
    dense.index_put_((points.row, points.col), points.value.float(), accumulate=True)
    assert dense[0].tolist() == [0, 0, 1001, 0, 0, 0, 0, 3.75]
    assert dense[1, 0] == -65537
    assert points.row.numel() == 5


def test_buckets() -> None:
    assert [bucket(n) for n in (0, 1, 8, 9, 15, 17, 100, 1000)] == [1, 1, 8, 9, 15, 18, 104, 1024]
    sizes = {bucket(n) for n in range(4096, 8192)}
    assert len(sizes) <= 9
    assert all(n <= bucket(n) <= 1.125 * n for n in range(8, 10000))


def test_layers_of_one_shape_share_the_shape_of_their_slices() -> None:
    slots, shapes = set(), set()
    for seed in range(4):
        mask = torch.rand(256, 2048, generator=torch.Generator().manual_seed(seed)) < 0.02
        points = coordinates(*csr(mask, torch.ones(int(mask.sum())).bfloat16()), 2048)
        slices = slice_entries(value_entries(points), row_order(torch.bincount(points.row, minlength=256), 256))
        slots.add(int(slices.slice_ptr[-1]))
        shapes.add(slices.entries.shape)
    assert len(slots) > 1
    assert len(shapes) == 1


def test_empty() -> None:
    points = coordinates(torch.zeros(4, dtype=torch.int32), torch.zeros(0), torch.zeros(0).bfloat16(), 8)
    slices = slice_entries(value_entries(points), torch.arange(128))
    assert slices.entries.shape == (1, 16)
    assert not slices.slice_ptr.any()


def test_outliers_of_other_types_are_refused() -> None:
    codes, scales = codes_to_stream(torch.zeros(2, 8, dtype=torch.uint8), 4), torch.ones(2, 1).bfloat16()
    right = [torch.tensor([0, 1, 2]), torch.tensor([0, 7]), torch.ones(2).bfloat16()]
    prepare(codes, 4, -1, 8, scales, None, OutlierCsr(*right))
    for at, wrong, message in (
        (0, torch.tensor([0.0, 0.6, 2.0]), "row_ptr: expected integers, found torch.float32"),
        (1, torch.tensor([0.0, 6.7]), "col_idx: expected integers, found torch.float32"),
        (0, torch.tensor([0, 1, 2]).to(torch.complex64), "row_ptr: expected integers"),
        (1, torch.tensor([False, True]), "col_idx: expected integers, found torch.bool"),
        (2, torch.ones(2, dtype=torch.complex64), "outlier values: expected bfloat16 or float32"),
        (2, torch.tensor([1, 2]), "outlier values: expected bfloat16 or float32"),
        (2, torch.tensor([1.0, float("inf")]), "outlier values: expected finite"),
        (2, torch.tensor([1.0, float("nan")]), "outlier values: expected finite"),
    ):
        arrays = [wrong if place == at else part for place, part in enumerate(right)]
        with pytest.raises(KernelInputError, match=message):
            prepare(codes, 4, -1, 8, scales, None, OutlierCsr(*arrays))


@pytest.mark.parametrize(
    ("row_ptr", "col_idx", "cols", "message"),
    [
        ([0, 1, 2], [0, 8], 8, "columns in"),
        ([0, 1, 2], [0, -1], 8, "columns in"),
        ([0, 2, 1], [0], 8, "never to fall"),
        ([0, 1, 3], [0, 1], 8, "run from 0"),
        ([1, 1, 2], [0, 1], 8, "run from 0"),
        ([0, 2], [0, 1], 8, "3 entries"),
        ([0, 1, 2], [0, 1], 65537, "at most 65536 columns"),
    ],
)
def test_hostile_csr(row_ptr: list, col_idx: list, cols: int, message: str) -> None:
    with pytest.raises(KernelInputError, match=message):
        check_csr(torch.tensor(row_ptr), torch.tensor(col_idx), torch.ones(len(col_idx)), 2, cols)
    # And by what everybody calls.
    arrays = (torch.tensor(row_ptr), torch.tensor(col_idx), torch.ones(len(col_idx)).bfloat16())
    codes = codes_to_stream(torch.zeros(2, cols, dtype=torch.uint8), 4)
    with pytest.raises(KernelInputError, match=message):
        prepare(codes, 4, -1, cols, torch.ones(2, 1).bfloat16(), None, OutlierCsr(*arrays))
