"""Comparison of statistics of linears."""

from collections.abc import Mapping

import torch

from vllm_latq.quantize.lattice.grams import LayerStatistics


def assert_same_statistics(found: Mapping[str, LayerStatistics], expected: Mapping[str, LayerStatistics]) -> None:
    """Assert that the statistics of linears are equal, bit by bit."""
    assert found.keys() == expected.keys()
    for name, layer in found.items():
        other = expected[name]
        assert (layer.tokens, layer.leader, layer.note) == (other.tokens, other.leader, other.note)
        assert torch.equal(layer.inputs, other.inputs)
        assert all(map(torch.equal, layer.outputs, other.outputs))
