"""CSR outliers: every selection equals the same selection of the dense matrix."""

import pytest
import torch

from vllm_latq.format.csr import CSR, column_dtype


def random_csr(rows: int, cols: int, density: float, seed: int = 0) -> tuple[CSR, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    mask = torch.rand(rows, cols, generator=generator) < density
    if rows > 2:
        mask[0], mask[-1] = False, True  # an empty and a full row
    values = torch.randn(rows, cols, generator=generator).to(torch.bfloat16)
    return CSR.from_mask(mask, values), (values * mask).float()


def dense_of(csr: CSR) -> torch.Tensor:
    return csr.add_to(torch.zeros(csr.rows, csr.cols))


@pytest.mark.parametrize("shape", [(1, 1), (1, 33), (5, 63), (64, 500), (3, 0), (0, 4)])
@pytest.mark.parametrize("density", [0.0, 0.1, 1.0])
def test_dense_round_trip(shape: tuple[int, int], density: float) -> None:
    csr, dense = random_csr(*shape, density)
    assert torch.equal(dense_of(csr), dense)
    assert csr.rows == shape[0]


def test_select_rows_in_any_order_with_gaps() -> None:
    csr, dense = random_csr(7, 33, 0.2)
    rows = torch.tensor([6, -1, 0, 3, 3])
    expected = torch.where((rows >= 0)[:, None], dense[rows.clamp(min=0)], 0.0)
    assert torch.equal(dense_of(csr.select_rows(rows)), expected)


@pytest.mark.parametrize(("low", "high"), [(0, 63), (0, 1), (17, 40), (62, 63)])
def test_select_columns_rebases(low: int, high: int) -> None:
    csr, dense = random_csr(9, 63, 0.3)
    assert torch.equal(dense_of(csr.select_columns(low, high)), dense[:, low:high])


def test_cat_stacks_rows() -> None:
    parts = [random_csr(rows, 20, 0.3, seed) for seed, rows in enumerate((1, 4, 6))]
    stacked = CSR.cat([csr for csr, _ in parts])
    assert torch.equal(dense_of(stacked), torch.cat([dense for _, dense in parts]))


def test_column_indices_take_16_bits_where_they_fit() -> None:
    assert column_dtype(1 << 16) == torch.uint16
    assert column_dtype((1 << 16) + 1) == torch.int32
    mask = torch.zeros(2, 70000, dtype=torch.bool)
    mask[1, 69999] = True
    csr = CSR.from_mask(mask, torch.ones(2, 70000))
    assert int(csr.col_idx) == 69999
