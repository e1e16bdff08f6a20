"""The layout `checkpoint` against a dense product, its operator, and its padding."""

import pytest
import torch
import torch._dynamo.testing

from helpers.builders import packed_weight
from vllm_latq.format.encodings.packed import PackedWeight, pack_integers
from vllm_latq.kernels.layout.outliers import SMALLEST_CAPACITY
from vllm_latq.serving.layouts import checkpoint
from vllm_latq.serving.layouts.checkpoint import CheckpointOperands, outlier_capacity
from vllm_latq.serving.linear import linear

CASES = [(2, 32, 33, 64), (3, 21, 500, 63), (4, -1, 1, 33), (8, 1, 5, 1), (3, 32, 64, 96)]


def row_scaled_weight() -> PackedWeight:
    generator = torch.Generator().manual_seed(1)
    integers = (torch.randn(65, 63, generator=generator) * 4).round().to(torch.int32)
    return pack_integers(integers, torch.rand(65, generator=generator) + 0.1, bits=3)


def run(operands: CheckpointOperands, x: torch.Tensor) -> torch.Tensor:
    return linear(x, operands.tensors().values(), operands.constants(), operands.layout, operands.arch)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("outliers", [False, True])
@pytest.mark.parametrize("midrise", [False, True])
@pytest.mark.parametrize(("bits", "group_size", "rows", "cols"), CASES)
def test_equals_the_dense_product(
    bits: int, group_size: int, rows: int, cols: int, midrise: bool, outliers: bool, dtype: torch.dtype
) -> None:
    rate = 0.05 if outliers else None
    weight = packed_weight(bits, group_size, rows, cols, rate, midrise=midrise, edges=outliers)
    x = torch.randn(2, 3, cols).to(dtype)
    expected = torch.nn.functional.linear(x, weight.dequantize(dtype))
    torch.testing.assert_close(run(CheckpointOperands.pack(weight), x), expected, rtol=0, atol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_row_scales_scale_outliers_too(dtype: torch.dtype) -> None:
    weight = row_scaled_weight()
    x = torch.randn(4, 63).to(dtype)
    expected = torch.nn.functional.linear(x, weight.dequantize(dtype))
    operands = CheckpointOperands.pack(weight)
    for _ in range(2):  # a product leaves the weight as it is
        torch.testing.assert_close(run(operands, x), expected, rtol=0, atol=0)


@pytest.mark.parametrize("block", [1, 100, 10_000])
def test_block_size_does_not_change_the_weight(block: int, monkeypatch: pytest.MonkeyPatch) -> None:
    weight = packed_weight(3, 21, 37, 63, 0.05)
    monkeypatch.setattr(checkpoint, "CPU_BLOCK_WEIGHTS", block)
    got = CheckpointOperands.pack(weight).dense()
    torch.testing.assert_close(got, weight.dequantize(), rtol=0, atol=0)


def test_empty_batch() -> None:
    weight = packed_weight(4, 32, 8, 64, 0.05)
    assert run(CheckpointOperands.pack(weight), torch.empty(0, 64)).shape == (0, 8)


def test_capacity_has_headroom_and_wastes_at_most_a_quarter() -> None:
    for nnz in range(5000):
        capacity = outlier_capacity(nnz)
        assert capacity >= max(nnz + nnz // 16, SMALLEST_CAPACITY)
        assert capacity == SMALLEST_CAPACITY or capacity - nnz <= capacity / 4
    assert len({outlier_capacity(nnz) for nnz in range(1 << 12, 1 << 13)}) <= 6


def test_padding_does_not_change_the_result() -> None:
    weight = packed_weight(4, 32, 8, 64, 0.05)
    short, long = (CheckpointOperands.pack(weight, room).dense() for room in (weight.outliers.nnz, 10_000))
    torch.testing.assert_close(short, long, rtol=0, atol=0)


@pytest.mark.parametrize(
    "weight", [packed_weight(3, 32, 5, 64, 0.05, midrise=True), row_scaled_weight()], ids=["scales", "rows"]
)
def test_linear_operator_registration(weight: PackedWeight) -> None:
    """Schema, fake implementation and dispatch agree (torch's own checks)."""
    operands = CheckpointOperands.pack(weight)
    torch.library.opcheck(
        torch.ops.latq.linear.default,
        (torch.randn(2, weight.cols), list(operands.tensors().values()), operands.constants(), operands.layout, ""),
        test_utils=("test_schema", "test_faketensor", "test_aot_dispatch_dynamic"),
    )


def test_layers_with_different_outliers_share_a_graph() -> None:
    """Two layers of one shape whose outliers differ in number compile once, without a graph break."""
    torch._dynamo.reset()
    counter = torch._dynamo.testing.CompileCounter()

    def forward(x: torch.Tensor, tensors: dict[str, torch.Tensor | None], constants: list[int]) -> torch.Tensor:
        return linear(x, tensors.values(), constants, CheckpointOperands.layout, "") + 1

    compiled = torch.compile(forward, backend=counter, fullgraph=True)
    x = torch.randn(3, 64)
    numbers = set()
    for seed in range(4):
        torch.manual_seed(seed)
        mask = torch.rand(64, 64) < 0.05
        integers = torch.randint(-8, 8, (64, 64), dtype=torch.int32)
        weight = PackedWeight.from_integers(integers, torch.ones(64, 2).bfloat16(), 4, 32, mask, torch.randn(64, 64))
        numbers.add(weight.outliers.nnz)
        operands = CheckpointOperands.pack(weight, capacity=outlier_capacity(256))
        arguments = (operands.tensors(), operands.constants())
        torch.testing.assert_close(compiled(x, *arguments), forward(x, *arguments), rtol=0, atol=0)
    assert len(numbers) > 1
    assert counter.frame_count == 1
