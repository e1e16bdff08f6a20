"""The table of traces: what it says of matrices whose D is known."""

import json
from pathlib import Path

import pytest
import torch

from vllm_latq.quantize.lattice.choices import ORDERS
from vllm_latq.quantize.studies.orders import by_kind, main, trace_table


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
    assert row["lll"] <= row["min-pivot"] * (1 + 1e-12)  # here it finds no better one, but for rounding
    assert row["min-pivot"] < row["act"] < row["random"]


def test_kinds_are_geometric_means_relative_to_act_order():
    rows: list[dict[str, float | str]] = [
        {"name": "a.0.q, a.0.k", "act": 2.0, "natural": 8.0},
        {"name": "a.0.o", "act": 5.0, "natural": 5.0},
        {"name": "a.1.q, a.1.k", "act": 1.0, "natural": 1.0},
    ]
    kinds = by_kind(rows)
    assert list(kinds) == ["q, k", "o"]
    assert kinds["q, k"] == pytest.approx({"act": 1.0, "natural": 2.0})
    assert kinds["o"] == pytest.approx({"act": 1.0, "natural": 1.0})


def test_a_trained_model_ranks_as_in_the_paper(
    mini_model: Path, calibration_text: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    few = ("--num-samples", "16", "--seq-len", "128", "--random", "2")
    main([str(mini_model), "--calibration", str(calibration_text), *few, "--json"])
    kinds = by_kind(json.loads(capsys.readouterr().out))
    assert list(kinds) == ["q_proj, k_proj, v_proj", "o_proj", "gate_proj, up_proj", "down_proj"]
    for ratios in kinds.values():
        assert ratios["min-pivot"] < 1.0 < min(ratios["natural"], ratios["random"])


def test_table_from_the_command_line(
    mini_model: Path, calibration_text: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    main(
        [
            str(mini_model),
            "--calibration",
            str(calibration_text),
            "--num-samples",
            "8",
            "--seq-len",
            "64",
            "--random",
            "0",
        ]
    )
    table = capsys.readouterr().out
    assert "trace of D relative to act-order" in table
    for word in ("gate_proj, up_proj", "min-pivot", "1.000"):
        assert word in table
