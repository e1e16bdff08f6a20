"""Hessians: the sums of the inputs that were seen, to the last digits of float32 whatever the inputs' dtype."""

import pytest
import torch

from vllm_latq.quantize.calibration.hessian import HessianCollector, InputHessian
from vllm_latq.quantize.lattice.grams import SharedInput

# Products of up to about 10 are added in float32.
RELATIVE_TOLERANCE = 1e-5


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("tokens", [333, 600])
def test_gram_is_that_of_the_inputs_in_float32(dtype, tokens):
    """With few rows at a time and with many, which are multiplied for half of the matrix."""
    inputs = torch.randn(3, tokens, 300, generator=torch.Generator().manual_seed(0)).to(dtype)
    hessian = InputHessian(SharedInput(("layer",)), torch.zeros(300, 300))
    before = torch.get_float32_matmul_precision()
    for part in inputs:
        hessian.add(part)
    rows = inputs.flatten(0, 1).double()
    assert hessian.tokens == 3 * tokens
    assert hessian.matrix.dtype == torch.float32
    assert (hessian.matrix.double() - rows.T @ rows).abs().max() < RELATIVE_TOLERANCE * 3 * tokens
    assert torch.get_float32_matmul_precision() == before


def test_later_passes_end_at_the_input_of_the_last_linear():
    """A later pass skips the rest of the block; the sums equal those of whole passes."""
    block = torch.nn.Sequential(torch.nn.Linear(5, 4), torch.nn.ReLU(), torch.nn.Linear(4, 3))
    linears = {"first": block[0], "last": block[2]}
    batches = torch.randn(3, 7, 5, generator=torch.Generator().manual_seed(0))
    finished = []
    block[2].register_forward_hook(lambda *_: finished.append(True))
    collectors = HessianCollector(), HessianCollector()
    for whole, collector in zip((True, False), collectors, strict=True):
        for batch in batches:
            with torch.no_grad(), collector.watching(linears):
                block(batch)
            if not whole:
                collector.stop_early()
    assert len(finished) == len(batches) + 1
    for ended, expected in zip(collectors[1].hessians, collectors[0].hessians, strict=True):
        assert ended.shared == expected.shared
        assert ended.tokens == expected.tokens == 21
        assert torch.equal(ended.matrix, expected.matrix)


def test_an_input_is_shared_whatever_is_called_between():
    """In latent attention another linear stands between the two that read a block's input, and serving merges those."""
    first, between, second, later = (torch.nn.Linear(5, 5) for _ in range(4))
    collector = HessianCollector()
    for _ in range(2):
        with torch.no_grad(), collector.watching({"a": first, "b": between, "c": second, "d": later}):
            x = torch.randn(3, 5)
            between(first(x))
            second(x)
            later(x.add_(1))
    assert [hessian.shared.names for hessian in collector.hessians] == [("a", "c"), ("b",), ("d",)]
    assert [hessian.tokens for hessian in collector.hessians] == [6, 6, 6]


def test_inputs_that_are_one_only_later_are_counted_by_both():
    first, second = torch.nn.Linear(5, 5), torch.nn.Linear(5, 5)
    collector = HessianCollector()
    for same in (False, True):
        with torch.no_grad(), collector.watching({"first": first, "second": second}):
            x = torch.ones(2, 5)
            first(x)
            second(x if same else x + 0)
    assert [hessian.tokens for hessian in collector.hessians] == [4, 4]


def test_passes_stay_whole_where_a_linear_is_not_always_called():
    first, second = torch.nn.Linear(5, 5), torch.nn.Linear(5, 5)
    collector = HessianCollector()
    for both in (False, True):
        with torch.no_grad(), collector.watching({"first": first, "second": second}):
            x = first(torch.ones(2, 5))
            second(x) if both else x
        collector.stop_early()
    assert [hessian.shared.names for hessian in collector.hessians] == [("first",), ("second",)]


def test_passes_stay_whole_where_a_linear_is_called_twice():
    linear = torch.nn.Linear(5, 5)
    collector = HessianCollector()
    for _ in range(2):
        with torch.no_grad(), collector.watching({"shared": linear}):
            linear(linear(torch.ones(2, 5)))
        collector.stop_early()
    assert collector.hessians[0].tokens == 8


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_stand_for_the_matrix_while_they_are_few(dtype):
    """Fewer numbers than the matrix has, the same gram; with what stands in for missing tokens."""
    linear, batches = torch.nn.Linear(5, 5), torch.randn(3, 2, 5, generator=torch.Generator().manual_seed(0)).to(dtype)
    collector = HessianCollector(in_rows=["expert"])
    held = []
    for batch in batches:
        with torch.no_grad(), collector.watching({"expert": linear}):
            linear(batch) if dtype == torch.float32 else linear.bfloat16()(batch)
        (hessian,) = collector.hessians
        held.append(None if hessian.rows is None else sum(map(len, hessian.rows)))
        expected = batches[: len(held)].flatten(0, 1).float()
        torch.testing.assert_close(hessian.gram(), expected.T @ expected, rtol=1e-5, atol=1e-5)
        assert hessian.tokens == len(expected)
        assert hessian.matrix.is_meta == (len(expected) < 5)
    assert held == [2, 4, None]


def test_what_stands_in_counts_beside_rows():
    rows, others = torch.randn(2, 3, 5, generator=torch.Generator().manual_seed(0))
    empty = torch.empty(5, 5, device="meta")
    for known in ([], [rows]):
        hessian = InputHessian(SharedInput(("expert",)), empty, rows=known, stands_in=(others.T @ others, 0.5))
        expected = 0.5 * others.T @ others + (rows.T @ rows if known else 0)
        torch.testing.assert_close(hessian.gram(), expected)
