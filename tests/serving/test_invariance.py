"""With LATQ_BATCH_INVARIANT=1 the result of a row is bitwise the same alone and among other rows, on a CPU."""

from dataclasses import replace
from functools import cache

import pytest
import torch

from helpers.builders import packed_weight, random_weight
from helpers.mixtures import CONSTANTS, HIDDEN, Mixture, routing
from vllm_latq.format.encodings.packed import PackedWeight
from vllm_latq.format.scheme import LayerScheme
from vllm_latq.kernels.cpu import library
from vllm_latq.kernels.experts.activations import ACTIVATIONS
from vllm_latq.serving.experts import activate_rows
from vllm_latq.serving.layouts import int4
from vllm_latq.serving.linear import linear
from vllm_latq.serving.operands import BATCH_INVARIANT, is_batch_invariant, make_operands

OTHERS = (0, 1, 7, 63, 300)
PLACES = (0, 1, 41, 300)  # of the row that is compared
LAYOUTS = {
    "cpu": (torch.bfloat16, 384),
    "cpu, odd columns": (torch.float16, 63),
    "int4": (torch.bfloat16, 384),
    "checkpoint, float32": (torch.float32, 384),
    "checkpoint, float16": (torch.float16, 96),
    "checkpoint, odd columns": (torch.bfloat16, 63),
}
ENCODINGS = {
    **{f"packed {bits}": LayerScheme("packed", bits, -1, True) for bits in (2, 3, 4)},
    "packed 4, midrise": LayerScheme("packed", 4, -1, True, grid="midrise"),
    "packed 8": LayerScheme("packed", 8, -1, True),
    "packed 3, no outliers": LayerScheme("packed", 3, -1, False),
    "huffman": LayerScheme("huffman"),
}


@pytest.fixture(autouse=True)
def _batch_invariant(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LATQ_BATCH_INVARIANT", "1")


@cache
def weight_of(encoding: str, cols: int, rows: int = 70) -> PackedWeight:
    weight = random_weight(ENCODINGS[encoding], rows, cols, seed=1)
    return weight if isinstance(weight, PackedWeight) else weight.pack(weight.integers(), 4)


def assert_rows_alone(run, x: torch.Tensor) -> None:
    """Assert that rows of x, at several places, have the same result among fewer or no other rows."""
    among = {place: run(x[place : place + 1]) for place in PLACES}
    for others in OTHERS:
        for place in PLACES:
            first = max(0, min(place - others // 2, len(x) - 1 - others))
            y = run(x[first : first + 1 + others])
            assert torch.equal(y[place - first], among[place][0]), f"row {place} among {others} others"


@pytest.mark.parametrize("encoding", ENCODINGS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_row_does_not_depend_on_other_rows(layout: str, encoding: str, monkeypatch: pytest.MonkeyPatch) -> None:
    dtype, cols = LAYOUTS[layout]
    if not layout.startswith("cpu"):
        monkeypatch.setattr(library, "instructions", lambda: None)
    made = make_operands(weight_of(encoding, cols), dtype, "layer")
    if torch.backends.cpu.get_cpu_capability() in int4.INTERLEAVED:
        assert made.layout == layout.split(",")[0]
    arguments = (made.tensors().values(), made.constants(), made.layout, made.arch)
    assert_rows_alone(lambda x: linear(x, *arguments), torch.randn(max(PLACES) + 1, cols).to(dtype))
    assert linear(torch.empty(2, 0, cols, dtype=dtype), *arguments).shape == (2, 0, 70)
    x = torch.randn(cols, 5).to(dtype).t()  # columns are not next to each other
    assert torch.equal(linear(x, *arguments), linear(x.contiguous(), *arguments))


@pytest.mark.parametrize("own", [True, False])
def test_large_layer_on_several_threads(own: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Libraries cut large products in other ways."""
    if not own:
        monkeypatch.setattr(library, "instructions", lambda: None)
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        for dtype in (torch.bfloat16, torch.float32):
            made = make_operands(packed_weight(4, 128, 1100, 2048, 0.01), dtype, "layer")
            arguments = (made.tensors().values(), made.constants(), made.layout, made.arch)
            assert_rows_alone(lambda x, arguments=arguments: linear(x, *arguments), torch.randn(301, 2048).to(dtype))
    finally:
        torch.set_num_threads(threads)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("encoding", ["packed 4", "packed 8", "huffman"])
def test_token_of_experts_does_not_depend_on_other_tokens(encoding: str, dtype: torch.dtype) -> None:
    """Other tokens change how many rows an expert gets."""
    scheme = replace(ENCODINGS[encoding], group_size=32) if encoding.startswith("packed") else ENCODINGS[encoding]
    mixture = Mixture(scheme, dtype, "gelu")
    _, weights, ids = routing(max(PLACES) + 1, 2)
    x = torch.cat([torch.randn(len(ids), HIDDEN), torch.arange(len(ids)).unsqueeze(1)], 1)

    def run(rows: torch.Tensor) -> torch.Tensor:
        numbers = rows[:, -1].long()
        return mixture(rows[:, :-1].to(dtype), weights[numbers], ids[numbers])

    assert_rows_alone(run, x)


@pytest.mark.parametrize("columns", [100, 1002, 40_000])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ACTIVATIONS)
def test_activation_of_a_row_does_not_depend_on_other_rows(name: str, dtype: torch.dtype, columns: int) -> None:
    y = torch.randn(40, columns).mul(3).to(dtype)

    def act(rows: torch.Tensor) -> torch.Tensor:
        return ACTIVATIONS[name](rows, *CONSTANTS.get(name, ()))

    threads = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        expected = activate_rows(act, y)
        torch.testing.assert_close(expected, act(y))
        for rows in (0, 1, 2, 33):
            assert torch.equal(activate_rows(act, y[:rows]), expected[:rows])
        assert torch.equal(activate_rows(act, y[17:18]), expected[17:18])
    finally:
        torch.set_num_threads(threads)


@pytest.mark.parametrize("name", BATCH_INVARIANT)
def test_variables_of_the_environment(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LATQ_BATCH_INVARIANT")
    assert not is_batch_invariant(), "the default"
    weight = weight_of("packed 4", 384)
    for value, expected in (("1", True), ("0", False)):
        monkeypatch.setenv(name, value)
        for dtype in (torch.bfloat16, torch.float32):
            assert make_operands(weight, dtype, "layer").constants()[-1] == expected
