"""The layout `int4`, torch's 4-bit product and the outliers, against float64 products with the dequantized weight."""

import os
import subprocess
import sys
import warnings
from dataclasses import replace
from typing import Any

import pytest
import torch

from helpers.builders import random_weight
from helpers.mixtures import Mixture, routing
from vllm_latq.errors import CheckpointError
from vllm_latq.format.csr import CSR
from vllm_latq.format.encodings.packed import PackedWeight, pack_integers
from vllm_latq.format.scheme import LayerScheme
from vllm_latq.format.served_size import best_bits
from vllm_latq.serving.layouts import int4
from vllm_latq.serving.layouts.checkpoint import CheckpointOperands
from vllm_latq.serving.layouts.int4 import Int4Operands
from vllm_latq.serving.linear import Operands, linear
from vllm_latq.serving.operands import inlier_bits, make_operands

pytestmark = [
    pytest.mark.skipif(
        torch.backends.cpu.get_cpu_capability() not in int4.INTERLEAVED, reason="torch has no quick product here"
    ),
    pytest.mark.usefixtures("without_products"),
]
# Relative to the norm of the products, which are rounded to bfloat16 before the outliers are added, and after.
TOLERANCE = 2**-8


def operands(weight: PackedWeight, capacity: int | None = None) -> Operands:
    return make_operands(weight, torch.bfloat16, "layer", capacity)


def product(x: torch.Tensor, made: Operands) -> torch.Tensor:
    return linear(x, made.tensors().values(), made.constants(), made.layout, made.arch)


def assert_right(weight: PackedWeight, x: torch.Tensor, made: Operands) -> None:
    got, expected = product(x, made), x.double() @ weight.dequantize().double().T
    assert got.dtype == x.dtype
    assert got.shape == expected.shape
    assert (got - expected).norm() <= TOLERANCE * expected.norm()


@pytest.mark.parametrize("tokens", [1, 2, 16, 49])
@pytest.mark.parametrize("rows", [1, 16, 70])
@pytest.mark.parametrize(
    "scheme",
    [
        LayerScheme("packed", bits, group, outliers, grid=grid)
        for bits in (2, 3, 4, 8)
        for group, outliers, grid in (
            *((32, True, "midrise"), (64, True, "midtread"), (96, False, "midtread"), (128, True, "midrise")),
            *((-1, True, "midtread"), (-1, False, "midrise")),
        )
    ],
    ids=lambda scheme: f"{scheme.bits}-{scheme.group_size}-{scheme.grid}-{scheme.outliers}",
)
def test_int4_products_match_float64(scheme: LayerScheme, rows: int, tokens: int) -> None:
    cols = 384  # whole groups of every size
    weight: Any = random_weight(scheme, rows, cols, seed=rows)
    made = operands(weight)
    assert made.layout == Int4Operands.layout
    assert 2 * 49 > int4.FEW_TOKENS >= 2 * 16, "tests both kinds of product"
    x = torch.randn(2, tokens, cols, generator=torch.Generator().manual_seed(tokens)).bfloat16()
    assert_right(weight, x, made)
    assert_right(weight, x[0, :, :].t().contiguous().t(), made)
    assert product(x[:, :0], made).shape == (2, 0, rows)


@pytest.mark.parametrize("mkl", [False, True])
def test_one_token_with_and_without_mkl(mkl: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    weight: Any = random_weight(LayerScheme("packed", 3, 64, True), 70, 192, seed=1)
    monkeypatch.setattr(torch.backends.mkl, "is_available", lambda: mkl)
    x = torch.randn(1, 192).bfloat16()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert_right(weight, x, operands(weight))


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
def test_integers_on_one_scale_of_each_row(bits: int) -> None:
    """Decoded weights with overflow: row scales are not rounded to bfloat16."""
    weight: Any = random_weight(LayerScheme("huffman"), 48, 160, seed=1)
    packed = weight.pack(bits=bits)
    assert packed.scales is None
    assert bits == 8 or packed.outliers.nnz > 0
    x = torch.randn(5, 160).bfloat16()
    assert_right(packed, x, operands(packed))


def test_decoded_integers_get_the_width_that_takes_the_least_memory() -> None:
    cpu, narrow = torch.device("cpu"), torch.randint(-2, 2, (40, 64), dtype=torch.int32)
    assert inlier_bits([[narrow]], cpu, torch.float32) == 2
    assert inlier_bits([[narrow[:, :40]]], cpu, torch.bfloat16) == 2, "40 columns are dequantized"
    assert inlier_bits([[narrow]], torch.device("cuda"), torch.bfloat16) == 2
    assert inlier_bits([[narrow]], cpu, torch.bfloat16) == 4, "2 bits would be kept in 4"
    narrow.view(-1)[::10] = 9  # an outlier costs 32 bits on GPUs, and 64 here
    assert best_bits([narrow]) == 2
    assert inlier_bits([[narrow, narrow]], cpu, torch.bfloat16) == 8
    assert inlier_bits([[narrow]], cpu, torch.float32) == 2, "an outlier costs 48 bits where products dequantize"


@pytest.mark.parametrize("bits", [3, 8])
def test_bands_of_rows(bits: int, monkeypatch: pytest.MonkeyPatch) -> None:
    weight: Any = random_weight(LayerScheme("packed", bits, 32, False), 3 * int4.ROWS + 7, 64, seed=1)
    whole = operands(weight).words
    monkeypatch.setattr(int4, "PACKED_WEIGHTS", 1)
    assert int4._band(1, 64) == int4.ROWS
    assert torch.equal(operands(weight).words, whole)


@pytest.mark.parametrize("abilities", [{"avx512_bf16": True}, {"amx_bf16": True}, {}])
@pytest.mark.parametrize("bits", [3, 8])
def test_many_tokens(bits: int, abilities: dict[str, bool], monkeypatch: pytest.MonkeyPatch) -> None:
    """The dequantized weight is exact, and the product is as exact as the dtype allows."""
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: abilities)
    monkeypatch.setattr(int4, "DENSE_WEIGHTS", 1)  # bands of 64 rows
    weight: Any = random_weight(LayerScheme("packed", bits, 32, True, grid="midrise"), 2 * int4.ROWS + 7, 96, seed=1)
    weight.scales[::2] *= -1
    made = operands(weight)
    expected = weight.dequantize()
    assert torch.equal(product(torch.eye(96).repeat(2, 1).bfloat16(), made)[:96].t(), expected.bfloat16())
    x = torch.randn(128, 96).bfloat16()
    exact = x.double() @ expected.double().t()
    tolerance = TOLERANCE if abilities else TOLERANCE / 2
    assert (product(x, made) - exact).norm() <= tolerance * exact.norm()


@pytest.mark.parametrize("bits", [3, 8])
def test_many_tokens_with_row_scales(bits: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Decoded weights have a scale for each row, in every band."""
    monkeypatch.setattr(int4, "DENSE_WEIGHTS", 1)
    rows = 2 * int4.ROWS + 7
    integers = torch.randint(-9, 9, (rows, 96), dtype=torch.int32)
    weight = pack_integers(integers, torch.linspace(0.5, 3, rows), bits)
    dense = product(torch.eye(96).repeat(2, 1).bfloat16(), operands(weight))[:96].t()
    assert torch.equal(dense, weight.dequantize().bfloat16())


def test_order_of_codes_on_cpus_without_avx512() -> None:
    """Their codes interleave other rows. Runs in its own process, because torch chooses its kernels once."""
    if torch.backends.cpu.get_cpu_capability() == "AVX2":
        pytest.skip("every other test runs with this order")
    tests = [f"{__file__}::test_many_tokens", f"{__file__}::test_many_tokens_with_row_scales"]
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *tests]
    ran = subprocess.run(command, env=os.environ | {"ATEN_CPU_CAPABILITY": "avx2"}, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stdout[-3000:]
    assert "8 passed" in ran.stdout


def test_padding_after_last_outlier_is_ignored() -> None:
    weight: Any = random_weight(LayerScheme("packed", 4, 32, True), 32, 64, seed=1)
    empty = CSR.from_mask(torch.zeros(32, 64, dtype=torch.bool), torch.zeros(32, 64))
    none = replace(weight, outliers=empty)
    first, second = operands(weight), operands(none, operands(weight).capacity)
    shapes = [
        {name: tensor.shape for name, tensor in made.tensors().items() if tensor is not None}
        for made in (first, second)
    ]
    assert shapes[0] == shapes[1], "a reload copies one over the other"
    for name in ("col_idx", "values"):
        getattr(second, name).fill_(10**6)
    assert_right(none, torch.randn(3, 64).bfloat16(), second)
    with pytest.raises(CheckpointError, match="layer: expected at most 1 outliers"):
        operands(weight, 1)


@pytest.mark.parametrize(
    ("scheme", "cols", "dtype"),
    [
        (LayerScheme("packed", 4, 16, True), 64, torch.bfloat16),
        (LayerScheme("packed", 4, -1, True), 72, torch.bfloat16),
        (LayerScheme("packed", 4, 32, True), 64, torch.float32),
        (LayerScheme("packed", 4, 32, True), 64, torch.float16),
    ],
)
def test_unsupported_weights_are_dequantized(
    scheme: LayerScheme, cols: int, dtype: torch.dtype, caplog: pytest.LogCaptureFixture
) -> None:
    weight: Any = random_weight(scheme, 32, cols, seed=1)
    assert make_operands(weight, dtype, f"layer {cols} {scheme.group_size}").layout == CheckpointOperands.layout
    said = "needs a multiple of 32 columns with one scale; falling back to dequantize + matmul"
    assert (said in caplog.text) == (dtype == torch.bfloat16)


def test_cpus_without_avx2_dequantize(monkeypatch: pytest.MonkeyPatch) -> None:
    weight: Any = random_weight(LayerScheme("packed", 4, 32, True), 32, 64, seed=1)
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "DEFAULT")
    assert operands(weight).layout == CheckpointOperands.layout


@pytest.mark.parametrize("cols", [512, 65568])
def test_wide_groups_and_columns(cols: int) -> None:
    """One scale per row, negative scales, and more columns than 16 bits can number."""
    weight: Any = random_weight(LayerScheme("packed", 3, -1, True), 17, cols, seed=1)
    weight.scales[::2] *= -1
    made = operands(weight)
    assert made.group == (256 if cols == 512 else 32)
    assert_right(weight, torch.randn(cols).bfloat16(), made)


@pytest.mark.parametrize("tokens", [4, 97])
@pytest.mark.parametrize("bits", [3, 8])
def test_nan_and_inf_stay_with_their_token(bits: int, tokens: int) -> None:
    weight: Any = random_weight(LayerScheme("packed", bits, 32, True), 32, 64, seed=1)
    x = torch.randn(tokens, 64).bfloat16()
    expected = product(x, made := operands(weight))
    x[1, 5], x[2, 7] = torch.nan, torch.inf
    got = product(x, made)
    assert got[1].isnan().all()
    assert torch.equal(got[[0, *range(3, tokens)]], expected[[0, *range(3, tokens)]])


def test_compiler_sees_one_operator() -> None:
    weight: Any = random_weight(LayerScheme("packed", 3, 32, True), 24, 64, seed=1)
    made = operands(weight)
    x = torch.randn(2, 3, 64).bfloat16()
    arguments = (x, list(made.tensors().values()), made.constants(), made.layout, made.arch)
    torch.library.opcheck(torch.ops.latq.linear.default, arguments, test_utils=("test_schema", "test_faketensor"))


@pytest.mark.parametrize("name", ["packed", "huffman"])
def test_int4_experts(name: str) -> None:
    scheme = LayerScheme("packed", 4, 32, True) if name == "packed" else LayerScheme("huffman")
    mixture = Mixture(scheme, torch.bfloat16)
    assert mixture.constants.layouts == ["int4", "int4"]
    x, weights, ids = routing(7, 2)
    got, expected = mixture(x.bfloat16(), weights, ids), mixture.reference(x, weights, ids)
    assert (got - expected).norm() <= 4 * TOLERANCE * expected.norm()
