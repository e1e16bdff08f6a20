"""Cutting and stacking packed weights changes no value."""

import pytest
import torch

from helpers.builders import packed_weight
from vllm_latq.errors import UnsupportedShapeError
from vllm_latq.format.encodings.packed import pack_integers
from vllm_latq.serving.sharding import ZERO_ROW, cat_rows, take


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
@pytest.mark.parametrize(("cols", "group_size", "columns"), [(63, 9, (9, 54)), (33, -1, (1, 33)), (96, 32, (32, 96))])
def test_take_equals_dense_indexing(bits: int, cols: int, group_size: int, columns: tuple[int, int]) -> None:
    weight = packed_weight(bits, group_size, 7, cols, 0.1, midrise=bits == 2)
    rows = torch.tensor([5, 5, 0, 6])
    taken = take(weight, rows, columns)
    assert taken.shape == (4, columns[1] - columns[0])
    torch.testing.assert_close(taken.dequantize(), weight.dequantize()[rows, slice(*columns)], rtol=0, atol=0)


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
def test_zero_rows_are_zero(bits: int) -> None:
    weight = packed_weight(bits, 11, 3, 33, 0.1, midrise=bits == 2)
    dense = take(weight, torch.tensor([ZERO_ROW, 2, ZERO_ROW]), (0, 33)).dequantize()
    assert not dense[[0, 2]].any()
    torch.testing.assert_close(dense[1], weight.dequantize()[2], rtol=0, atol=0)


def test_taken_tensors_are_copies() -> None:
    weight = packed_weight(4, 32, 3, 32, 0.1)
    taken = take(weight, torch.arange(3), (0, 32))
    assert taken.qweight.data_ptr() != weight.qweight.data_ptr()


def test_cut_group_is_refused() -> None:
    with pytest.raises(UnsupportedShapeError, match="whole groups of 32, found channels 16 to 48"):
        take(packed_weight(4, 32, 2, 64, 0.1), torch.arange(2), (16, 48), "model.layers.0.mlp.down_proj")


def test_cat_rows_equals_dense_cat() -> None:
    parts = [packed_weight(3, 32, rows, 64, 0.1, seed=rows) for rows in (1, 5, 2)]
    expected = torch.cat([part.dequantize() for part in parts])
    torch.testing.assert_close(cat_rows(parts).dequantize(), expected, rtol=0, atol=0)


def test_cat_rows_keeps_row_scales_and_empty_outliers() -> None:
    integers = [torch.tensor([[1, -2, 0]], dtype=torch.int32), torch.tensor([[900, 0, 1]], dtype=torch.int32)]
    parts = [pack_integers(z, torch.tensor([scale]), bits=2) for z, scale in zip(integers, (0.5, 2.0), strict=True)]
    assert parts[0].outliers is not None
    assert parts[0].outliers.nnz == 0
    expected = torch.tensor([[0.5, -1.0, 0.0], [1800.0, 0.0, 2.0]])
    torch.testing.assert_close(cat_rows(parts).dequantize(), expected, rtol=0, atol=0)
