"""Weights of `--load-format dummy` cost as much time and memory as trained ones."""

import pytest
import torch

from vllm_latq.format.scheme import LayerScheme
from vllm_latq.format.validate import check
from vllm_latq.integrations.vllm.dummy import dummy_weight
from vllm_latq.serving.trellis import MergedTrellis

ROWS, COLS, RATE = 256, 1024, 0.01


@pytest.mark.parametrize("scheme", [LayerScheme("packed", 3, 128, True), LayerScheme("huffman")])
def test_dummy_outliers_are_spread_like_random_ones(scheme: LayerScheme) -> None:
    """Rows differ in their number of outliers and columns are used evenly, so gathers of x cost as usual."""
    weight = dummy_weight(scheme, ROWS, COLS, {"outlier_rate": RATE})
    outliers = weight.outliers
    assert outliers is not None
    assert outliers.nnz == pytest.approx(RATE * ROWS * COLS, rel=0.1)
    assert bool((outliers.values != 0).all())  # prefill passes zeros over
    expected = RATE * COLS
    assert float(outliers.counts.double().var()) == pytest.approx(expected, rel=0.5)  # Poisson: the mean
    used = outliers.col_idx.to(torch.int64).unique().numel()
    # n balls in COLS bins leave exp(-n / COLS) of them empty.
    assert used == pytest.approx(COLS * (1 - torch.exp(torch.tensor(-RATE * ROWS))).item(), rel=0.05)
    assert weight.dequantize().isfinite().all()


@pytest.mark.parametrize(("bits", "rate"), [(None, 6), (2, 4), (3.6, 7), (9, 12)])
def test_dummy_trellis_has_the_bits_of_the_recipe(bits: float | None, rate: int) -> None:
    weight = dummy_weight(LayerScheme("trellis"), ROWS, COLS, {"bits": bits})
    assert isinstance(weight, MergedTrellis)
    (stored,) = weight.shards
    check(stored.to_tensors(), stored.scheme, (ROWS, COLS), "dummy")
    assert stored.storage_bits() / (ROWS * COLS) == pytest.approx(rate / 2, abs=0.1)
    assert 0 < weight.dequantize(torch.bfloat16).float().std() < 0.1


def test_dummy_outliers_at_extreme_rates() -> None:
    for rate in (1e-9, 0.5, 1.0):
        outliers = dummy_weight(LayerScheme("packed", 4, 64, True), 16, 64, {"outlier_rate": rate}).outliers
        assert outliers is not None
        assert 1 <= outliers.nnz <= 0.6 * 16 * 64
        columns = [outliers.col_idx[start:end].tolist() for start, end in outliers.row_ptr.unfold(0, 2, 1).tolist()]
        assert all(row == sorted(set(row)) for row in columns)
