"""Outliers by row tile and superblock: exact against CSR, no place twice in a list, and one shape for one size."""

from itertools import pairwise

import pytest
import torch

from vllm_latq.kernels.layout.codes import padded_rows
from vllm_latq.kernels.layout.entries import coordinates
from vllm_latq.kernels.layout.outliers import row_order
from vllm_latq.kernels.layout.spread import LEVELS, SpreadEntries, spread_entries

BITS = ("c0", "r3", "c1", "c2", "c3", "r0", "r1", "r2", "r4", "r5", "r6", "c4", "c5", "c6", "c7")  # of a place


def random_csr(rows: int, cols: int, density: float, seed: int = 3) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    mask = torch.rand(rows, cols, generator=generator) < density
    mask[:, 300:600] = False  # whole superblocks without entries
    row_ptr = torch.zeros(rows + 1, dtype=torch.int32)
    row_ptr[1:] = mask.sum(1).cumsum(0)
    return row_ptr, mask.nonzero()[:, 1].to(torch.int32), torch.randn(int(mask.sum()), generator=generator).bfloat16()


def dense_of(made: SpreadEntries, order: torch.Tensor, cols: int, levels: int) -> torch.Tensor:
    """Return the matrix of the lists, float64 [padded rows, superblocks * 256], in checkpoint order."""
    supers = -(-cols // 256)
    dense = torch.zeros(order.numel(), supers * 256, dtype=torch.float64)
    pointers, words = made.list_ptr.tolist(), made.entries.tolist()
    assert pointers[0] == 0
    for number, (begin, end) in enumerate(pairwise(pointers)):
        places = [word & 0xFFFF for word in words[begin:end]]
        assert len(set(places)) == len(places)
        for word, place in zip(words[begin:end], places, strict=True):
            bit = {name: place >> at & 1 for at, name in enumerate(BITS)}
            row, col = (sum(bit[f"{kind}{i}"] << i for i in range(n)) for kind, n in (("r", 7), ("c", 8)))
            assert (row // 16, col // 128) == (number % 8, number // 8 % 2)
            block, at = divmod(number // (16 * levels), supers)
            value = torch.tensor([word & -65536], dtype=torch.int32).view(torch.float32)
            dense[order[128 * block + row], 256 * at + col] += float(value)
    assert not any(words[pointers[-1] :])
    return dense


@pytest.mark.parametrize(("rows", "cols", "density"), [(1, 1, 1.0), (63, 700, 0.02), (300, 1000, 0.01), (9, 3000, 0.0)])
def test_round_trip(rows: int, cols: int, density: float) -> None:
    row_ptr, col, values = random_csr(rows, cols, density)
    points = coordinates(row_ptr, col, values, cols)
    order = row_order(torch.bincount(points.row, minlength=rows), padded_rows(rows))
    dense = dense_of(spread_entries(points, order, cols, 1), order, cols, 1)
    expected = torch.zeros_like(dense)
    expected[points.row, points.col] = values.double()
    assert torch.equal(dense, expected)


def test_parts_of_wide_values_are_in_lists_of_their_own() -> None:
    row_ptr, col = torch.tensor([0, 2, 4], dtype=torch.int32), torch.tensor([2, 7, 0, 299])
    points = coordinates(row_ptr, col, torch.tensor([1001.0, 3.0, -65537.0, 8391681.0]), 300)
    assert points.row.numel() == 8
    order = torch.arange(128)
    dense = dense_of(spread_entries(points, order, 300, LEVELS), order, 300, LEVELS)
    assert dense.sum(1)[:2].tolist() == [1004, 8391681 - 65537]
    assert dense[1, 299] == 8391681


def test_layers_of_one_shape_share_shapes() -> None:
    made = []
    for seed in range(4):
        points = coordinates(*random_csr(256, 2048, 0.02, seed), 2048)
        made.append(spread_entries(points, torch.arange(256), 2048, 1))
    assert len({int(one.list_ptr[-1]) for one in made}) > 1
    assert len({(one.entries.shape, one.list_ptr.shape) for one in made}) == 1
