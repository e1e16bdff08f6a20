"""Outlier slices: exact round trips, balance, exact splitting, buckets, and refusal of hostile CSR arrays."""

import pytest
import torch

from helpers.kernel_layout import entries_to_coordinates, entries_to_integers, slices_to_entries, untile_codes
from vllm_latq.kernels.bench.roofline import SLOT_PADDING
from vllm_latq.kernels.errors import KernelInputError
from vllm_latq.kernels.layout import codes as layout
from vllm_latq.kernels.layout.codes import codes_to_stream, padded_rows
from vllm_latq.kernels.layout.entries import (
    beyond_entries,
    coordinates,
    integers,
    value_entries,
)
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


@pytest.mark.parametrize("bits", [2, 3, 4])
@pytest.mark.parametrize(("rows", "cols", "density"), SHAPES)
def test_integers_round_trip(rows: int, cols: int, density: float, bits: int) -> None:
    generator = torch.Generator().manual_seed(4)
    mask = torch.rand(rows, cols, generator=generator) < density
    beyond = (torch.randn(int(mask.sum()), generator=generator).abs() * 3).square().floor()
    half, below = 1 << (bits - 1), torch.rand(len(beyond), generator=generator) < 0.5
    points = integers(*csr(mask, torch.where(below, -half - 1 - beyond, half + beyond)), cols, bits)
    assert len(points.z) == int(mask.sum())
    entries = beyond_entries(points, bits)
    order = row_order(torch.bincount(entries.row, minlength=rows), padded_rows(rows))
    back = slices_to_entries(slice_entries(entries, order), order)
    assert torch.equal(back.row, entries.row)
    assert torch.equal(back.entry, entries.entry)
    back = entries_to_integers(back, bits)
    for name in ("row", "col", "z"):
        assert torch.equal(getattr(back, name), getattr(points, name))


def test_two_outliers_are_an_entry() -> None:
    """Codes of 3 bits hold -4 to 3. An entry: column, next digit or exponent, digit, columns to the next."""
    values = torch.tensor([4.0, -5.0, 30.0, -13.0, 10.0])
    points = integers(torch.tensor([0, 4, 5]), torch.tensor([0, 255, 511, 512, 65535]), values, 1 << 16, 3)
    assert [f"{entry & 0xFFFFFFFF:08X}" for entry in beyond_entries(points, 3).entry.tolist()] == [
        "0000F1FF",  # 1 in column 0, -1 in 255
        "01FF1700",  # 27 in column 511: 7 * 4
        "01FF0F00",  # less 1, alone, because what comes next is far
        "02001E00",  # -9 in column 512: -2 * 4
        "02000F00",  # less 1
        "FFFF0700",  # 7 in the last column of another row
    ]


@pytest.mark.parametrize("bits", [2, 3, 4])
def test_any_integer_takes_few_entries(bits: int) -> None:
    """All that are near, and powers of 2 with their neighbours, as far as float32 has them."""
    far = torch.tensor([2**e + k for e in range(8, 31) for k in (-1, 0, 1)]).float().unique()
    z = torch.cat((torch.arange(1 << (bits - 1), 300), far.long(), torch.tensor([(1 << 31) - 1])))
    z = torch.stack((z, -z - 1), 1).flatten()
    row_ptr = torch.arange(len(z) + 1)
    points = integers(row_ptr, torch.zeros(len(z)), z.double(), 1, bits)
    entries = beyond_entries(points, bits)
    assert torch.bincount(entries.row).max() <= 16
    near = points.z.abs() < 100
    assert torch.bincount(entries.row)[near].max() <= 3
    back = entries_to_integers(entries, bits)
    assert torch.equal(back.z, z)
    assert torch.equal(back.row, points.row)


def test_an_outlier_takes_half_an_entry_where_they_are_near() -> None:
    """At 1% of 4096 columns one in thirteen has none near; at 3% of a normal distribution's 2 bits, none."""
    generator = torch.Generator().manual_seed(5)
    mask = torch.rand(256, 4096, generator=generator) < 0.01
    points = integers(*csr(mask, torch.full((int(mask.sum()),), 2.0)), 4096, 2)
    assert len(beyond_entries(points, 2).entry) < 0.56 * len(points.z)
    mask = torch.rand(256, 4096, generator=generator) < 0.03
    points = integers(*csr(mask, torch.full((int(mask.sum()),), -3.0)), 4096, 2)
    entries = beyond_entries(points, 2)
    assert len(entries.entry) < 0.51 * len(points.z)
    order = row_order(torch.bincount(entries.row, minlength=256), 256)
    assert int(slice_entries(entries, order).slice_ptr[-1]) * 16 <= SLOT_PADDING * len(entries.row)


def test_codes_below_outliers_are_ends_of_the_grid(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever they are in the checkpoint, and in however many chunks the codes are brought into tile order."""
    z = torch.randn(200, 300, generator=torch.Generator().manual_seed(6)).mul(3).round()
    outside, codes = (z < -4) | (z > 3), torch.full((200, 300), 4, dtype=torch.uint8)
    codes = torch.where(outside, codes, z.add(4).clamp(0, 7).to(torch.uint8))
    made = []
    for chunk in (1, 1 << 24):
        monkeypatch.setattr(layout, "_CHUNK_CODES", chunk)
        weight = prepare(codes_to_stream(codes, 3), 3, -1, 300, None, None, OutlierCsr(*csr(outside, z[outside])))
        restored = torch.empty(256, 512, dtype=torch.uint8)
        restored[weight.order.long()] = untile_codes(weight.words, 3)
        made.append(restored[:200, :300])
    assert torch.equal(made[0], z.add(4).clamp(0, 7).to(torch.uint8))
    assert torch.equal(made[0], made[1])


@pytest.mark.parametrize("values", [[3.0], [-4.0], [4.5], [float("nan")], [float("inf")], [-1e30], [2.0**31 + 256]])
def test_what_is_no_outlier_is_refused(values: list[float]) -> None:
    with pytest.raises(KernelInputError, match="outlier values: expected integers"):
        integers(torch.tensor([0, 1]), torch.tensor([5]), torch.tensor(values), 64, 3)


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
    none = integers(torch.zeros(4, dtype=torch.int32), torch.zeros(0), torch.zeros(0), 8, 2)
    for entries in (value_entries(points), beyond_entries(none, 2)):
        slices = slice_entries(entries, torch.arange(128))
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
