"""From a trellis weight to the kernels: merged and cut weights, products, reloads in place, and what stays dense."""

import logging
from collections.abc import Callable, Sequence

import pytest
import torch

from helpers.kernel_device import DEVICE
from helpers.trellis import random_trellis
from vllm_latq.errors import CheckpointError
from vllm_latq.kernels.decode.trellis_prefill import dequantize
from vllm_latq.kernels.layout.trellis import ROOM
from vllm_latq.serving.layouts.dense import DenseOperands
from vllm_latq.serving.layouts.trellis import RingOperands
from vllm_latq.serving.linear import linear
from vllm_latq.serving.operands import Operands, check_room, make_operands, stack_operands
from vllm_latq.serving.sharding import ZERO_ROW
from vllm_latq.serving.trellis import MergedTrellis

pytestmark = pytest.mark.kernel

TOLERANCE = 2**-10  # of the largest output: one rounding to float16
COLS = 512  # two parts of the order of columns


def merged(seed: int, *rows: int, cols: int = COLS, rate: int | None = None) -> MergedTrellis:
    rates = (2, 4, 5, 7) if rate is None else (rate,)
    shards = [random_trellis(size, cols, 10 * seed + part, rates, 0.005) for part, size in enumerate(rows)]
    return MergedTrellis.of(shards).to(DEVICE)


def ranges(*bounds: tuple[int, int]) -> torch.Tensor:
    return torch.cat([torch.arange(*part) for part in bounds])


PADDING = torch.full((3,), ZERO_ROW)
WEIGHTS: dict[str, Callable[[], MergedTrellis]] = {
    "qkv": lambda: merged(1, 64, 32, 33, cols=140),
    "rows of each": lambda: merged(2, 96, 160).take(ranges((48, 96), (176, 256)), (0, COLS)),
    "columns": lambda: merged(3, 40).take(ranges((0, 40)), (256, 512)),
    "padded": lambda: merged(4, 20, cols=140).take(torch.cat((ranges((16, 20)), PADDING)), (0, 140)),
    "repeated": lambda: merged(5, 32, 16, cols=140).take(ranges((32, 48), (0, 16), (32, 48)), (0, 140)),
}


def product(x: torch.Tensor, operands: Operands) -> torch.Tensor:
    return linear(x, operands.tensors().values(), operands.constants(), operands.layout, operands.arch)


def assert_product(weight: MergedTrellis, operands: Operands) -> None:
    x = torch.randn(1, 2, weight.shape[1], generator=torch.Generator().manual_seed(0)).half()
    expected = x.double() @ weight.dequantize().cpu().double().t()
    y = product(x.to(DEVICE), operands).cpu()
    assert y.shape == expected.shape
    assert (y - expected).abs().max() <= TOLERANCE * expected.abs().max()


@pytest.mark.parametrize("name", WEIGHTS)
def test_merged_and_cut_weights(name: str) -> None:
    """The device that torch makes tensors on by default, which vLLM sets, does not matter."""
    weight = WEIGHTS[name]()
    with torch.device("meta"):
        operands = make_operands(weight, torch.float16, name)
    assert isinstance(operands, RingOperands)
    assert torch.equal(dequantize(operands.weight, torch.float32), weight.dequantize())
    assert_product(weight, operands)


def test_registration() -> None:
    """Schema, fake implementation and dispatch agree (torch's own checks)."""
    operands = make_operands(merged(0, 16, cols=32), torch.bfloat16, "layer")
    x = torch.randn(2, 32, device=DEVICE).bfloat16()
    torch.library.opcheck(
        torch.ops.latq.linear.default,
        (x, list(operands.tensors().values()), operands.constants(), operands.layout, operands.arch),
        test_utils=("test_schema", "test_faketensor", "test_aot_dispatch_dynamic"),
    )


def test_reload_in_place() -> None:
    """Into the tensors of a weight that takes more words, and by the constants that a graph has captured."""
    operands = make_operands(merged(1, 20, 30, cols=140, rate=7), torch.float16, "layer")
    for seed, rate in ((2, 7), (3, 4)):
        second = merged(seed, 20, 30, cols=140, rate=rate)
        again = make_operands(second, torch.float16, "layer", operands.capacity)
        assert (again.constants(), again.arch) == (operands.constants(), operands.arch)
        for name, tensor in operands.tensors().items():
            assert tensor.shape == again.tensors()[name].shape
            tensor.copy_(again.tensors()[name])
        assert_product(second, operands)


def test_reload_of_more_than_fits_is_refused() -> None:
    capacity = make_operands(merged(1, 20, cols=140, rate=4), torch.float16, "layer").capacity
    with pytest.raises(CheckpointError, match=r"layer: expected rates of at most \d+ words, found .* restart"):
        make_operands(merged(1, 20, cols=140, rate=5), torch.float16, "layer", capacity)
    many = MergedTrellis.of([random_trellis(20, 140, rates=(4,), kept=0.5)]).to(DEVICE)
    with pytest.raises(CheckpointError, match=r"layer: expected at most \d+ kept weights, found .* restart"):
        make_operands(many, torch.float16, "layer", capacity)


def test_row_does_not_depend_on_other_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LATQ_BATCH_INVARIANT", "1")
    operands = make_operands(merged(0, 20, cols=140), torch.bfloat16, "layer")
    x = torch.randn(17, 140, generator=torch.Generator().manual_seed(0)).bfloat16().to(DEVICE)
    assert torch.equal(product(x[3:4], operands)[0], product(x, operands)[3])


@pytest.mark.parametrize(
    ("weight", "dtype", "reason"),
    [
        (merged(0, 16, cols=32), torch.float32, "float32 activations"),
        (merged(0, 16).take(ranges((0, 16)), (0, 128)), torch.float16, "columns 0 to 128, which cut a part of 256"),
        (merged(0, 40, cols=32).take(ranges((8, 40)), (0, 32)), torch.float16, "rows that begin within a tile"),
    ],
)
def test_what_the_kernels_do_not_support_is_decoded(
    weight: MergedTrellis, dtype: torch.dtype, reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        operands = make_operands(weight, dtype, "layer")
    assert isinstance(operands, DenseOperands)
    assert torch.equal(operands.dense, weight.dequantize(dtype))
    (warning,) = caplog.messages
    assert warning.startswith(f"layer: the kernels do not support {reason}".replace("float32", "torch.float32"))


def stacked(rates: Sequence[int], capacity: list[int] | None = None) -> tuple[list[MergedTrellis], Operands]:
    """Stacked experts of gate and up, with a rate each."""
    weights = [merged(seed, 32, 16, cols=140, rate=rate) for seed, rate in enumerate(rates)]
    made = [make_operands(weight, torch.float16, "experts", capacity, alone=False) for weight in weights]
    check_room(made, "experts", capacity)
    return weights, stack_operands(made, "experts", capacity)


def of_expert(stack: Operands, expert: int) -> Operands:
    parts = [part[min(expert, len(part) - 1)] for part in stack.tensors().values()]
    return RingOperands.from_lists(parts, stack.constants(), stack.arch)


def test_experts_take_the_memory_of_their_own_rates() -> None:
    """An expert takes no room for the words of another; a reload may distribute them differently."""
    weights, stack = stacked([2, 12, 5])
    alone = [make_operands(weight, torch.float16, "expert").capacity[0] - ROOM for weight in weights]
    assert stack.capacity[0] == sum(alone) + ROOM
    for expert, weight in enumerate(weights):
        assert_product(weight, of_expert(stack, expert))
    others, again = stacked([5, 2, 12], stack.capacity)
    assert again.constants() == stack.constants()
    for name, tensor in stack.tensors().items():
        assert tensor.shape == again.tensors()[name].shape
        tensor.copy_(again.tensors()[name])
    for expert, weight in enumerate(others):
        assert_product(weight, of_expert(stack, expert))
    with pytest.raises(CheckpointError, match=r"experts: expected rates of at most \d+ words, found .* restart"):
        stacked([12, 2, 6], stack.capacity)
