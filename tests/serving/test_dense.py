"""Trellis weights where no kernel decodes them: merging, cutting, and products with the decoded matrix."""

from dataclasses import replace

import pytest
import torch

from helpers.trellis import random_trellis
from vllm_latq.errors import CheckpointError
from vllm_latq.format.encodings import trellis
from vllm_latq.serving.layouts.dense import DenseOperands
from vllm_latq.serving.linear import linear
from vllm_latq.serving.merging import Merged, cut, decode, merge
from vllm_latq.serving.operands import make_operands
from vllm_latq.serving.sharding import ZERO_ROW

pytestmark = pytest.mark.usefixtures("without_products")

CPU = torch.device("cpu")
COLS = 140


def merged(*rows: int) -> tuple[Merged, torch.Tensor]:
    """Return weights of so many rows, merged, and the dense matrix that they stand for."""
    shards = [(f"shard {seed}", random_trellis(size, COLS, seed)) for seed, size in enumerate(rows)]
    dense = torch.cat([weight.dequantize() for _, weight in shards])
    return merge(shards, decode(shards, CPU), CPU), dense


def test_merged_weights_equal_the_stacked_ones() -> None:
    weight, dense = merged(70, 1, 33)
    assert weight.shape == (104, COLS)
    assert torch.equal(weight.dequantize(), dense)
    assert torch.equal(weight.dequantize(torch.bfloat16), dense.bfloat16())


@pytest.mark.parametrize("columns", [(0, COLS), (0, 70), (70, COLS), (3, 20)])
def test_cut_equals_dense_indexing(columns: tuple[int, int]) -> None:
    """Rows of several shards in any order, one of them twice, and padding."""
    weight, dense = merged(70, 33)
    rows = torch.tensor([72, ZERO_ROW, 5, 5, 102, 0, 69])
    expected = dense[rows, slice(*columns)].masked_fill_((rows < 0)[:, None], 0)
    taken = cut(weight, rows, columns, "layer")
    assert torch.equal(taken.dequantize(), expected)
    low = columns[0]
    again = cut(taken, torch.tensor([4, ZERO_ROW, 1]), (2, 9), "layer")
    assert again.shape == (3, 7)
    assert torch.equal(again.dequantize()[0], dense[102, low + 2 : low + 9])
    assert not again.dequantize()[1:].any()


@pytest.mark.parametrize("band", [1, 3000, 1 << 22])
def test_weights_decoded_at_a_time_change_nothing(band: int, monkeypatch: pytest.MonkeyPatch) -> None:
    weight = random_trellis(70, COLS, kept=0.1)
    expected = weight.dequantize()
    monkeypatch.setattr(trellis, "BAND_WEIGHTS", band)
    assert torch.equal(weight.dequantize(), expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_product_equals_the_dense_one(dtype: torch.dtype) -> None:
    weight, dense = merged(33)
    made = make_operands(weight, dtype, "layer")
    assert isinstance(made, DenseOperands)
    x = torch.randn(2, 3, COLS).to(dtype)
    y = linear(x, made.tensors().values(), made.constants(), made.layout, made.arch)
    assert torch.equal(y, torch.nn.functional.linear(x, dense.to(dtype)))
    torch.library.opcheck(
        torch.ops.latq.linear.default,
        (x, list(made.tensors().values()), made.constants(), made.layout, made.arch),
        test_utils=("test_schema", "test_faketensor", "test_aot_dispatch_dynamic"),
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_row_does_not_depend_on_other_rows(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LATQ_BATCH_INVARIANT", "1")
    made = make_operands(merged(33)[0], dtype, "layer")
    x = torch.randn(70, COLS).to(dtype)
    y = made.product(x)
    for row in (0, 1, 41, 69):
        assert torch.equal(made.product(x[row : row + 1])[0], y[row])


@pytest.mark.parametrize(
    ("tensor", "what"), [("column_exponents", "column exponents"), ("column_importance", "column importance")]
)
def test_fused_weights_share_what_belongs_to_their_columns(tensor: str, what: str) -> None:
    first, second = random_trellis(16, COLS, 0), random_trellis(16, COLS, 1)
    changed = getattr(second, tensor).clone()
    changed[3] += 1
    shards = [("q_proj", first), ("k_proj", replace(second, **{tensor: changed}))]
    with pytest.raises(CheckpointError, match=f"k_proj: expected the {what} of q_proj"):
        merge(shards, decode(shards, CPU), CPU)
