"""The table of traces: what it says of matrices whose D is known."""

import pytest
import torch

from vllm_latq.quantize.lattice import ORDERS
from vllm_latq.quantize.orders import trace_table


def test_orders_do_not_matter_without_correlations():
    (row,) = trace_table([("layer", torch.diag(torch.tensor([1.0, 4.0, 2.0])))], damping=0.3)
    expected = 7.0 + 3 * 0.3 * 7 / 3
    names = (*ORDERS, "reversed", "random", "lll")
    assert set(row) == {"name", *names}
    assert [row[name] for name in names] == pytest.approx([expected] * len(names))


def test_two_correlated_inputs_by_hand():
    # D of the column rounded first is what the other leaves of it: det / (its diagonal).
    hessian = torch.tensor([[5.0, 2.0], [2.0, 1.0]])
    (row,) = trace_table([("layer", hessian)], damping=1e-12, random_orders=0)
    assert row["natural"] == pytest.approx(1.0 / 1.0 + 1.0)
    assert row["reversed"] == pytest.approx(1.0 / 5.0 + 5.0)
    assert row["act"] == row["min-pivot"] == row["natural"]
    assert "random" not in row


def test_correlated_inputs_rank_as_in_the_paper():
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(300, 60, generator=generator) @ torch.randn(60, 60, generator=generator)
    inputs *= torch.linspace(0.2, 2, 60)
    (row,) = trace_table([("layer", inputs.T @ inputs)])
    assert row["lll"] <= row["min-pivot"] < row["act"] < row["random"]
