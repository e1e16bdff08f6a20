"""The layouts `cpu` and `cpu_trellis`: our C++ products, against float64 products with the dequantized weight."""

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from helpers.builders import random_weight
from helpers.mixtures import Mixture, routing
from helpers.trellis import random_trellis
from vllm_latq.errors import CheckpointError
from vllm_latq.format.csr import CSR
from vllm_latq.format.encodings.octaves import octave_eighths
from vllm_latq.format.encodings.packed import PackedWeight, pack_integers
from vllm_latq.format.scheme import LayerScheme
from vllm_latq.kernels.cpu import library, packed, trellis
from vllm_latq.serving.layouts import cpu
from vllm_latq.serving.layouts.checkpoint import CheckpointOperands
from vllm_latq.serving.layouts.cpu import CpuOperands, CpuTrellisOperands
from vllm_latq.serving.layouts.dense import DenseOperands
from vllm_latq.serving.layouts.int4 import Int4Operands
from vllm_latq.serving.linear import Operands, linear
from vllm_latq.serving.operands import inlier_bits, make_operands
from vllm_latq.serving.trellis import MergedTrellis

HERE = library.instructions()
pytestmark = pytest.mark.skipif(HERE is None, reason="a CPU without AVX2")
# Relative to the norm of the products: x is rounded to 15 bits in each block, y once to its dtype.
TOLERANCE = {torch.bfloat16: 2**-8, torch.float16: 2**-10}
# A CPU with AVX512 runs both.
KINDS = [kind for kind in library.INSTRUCTIONS if kind in (HERE, "avx2")]


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setattr(library, "instructions", lambda: request.param)
    return str(request.param)


def product(x: torch.Tensor, made: Operands) -> torch.Tensor:
    return linear(x, made.tensors().values(), made.constants(), made.layout, made.arch)


def make(weight: Any, dtype: torch.dtype = torch.bfloat16, capacity: Any = None) -> Operands:
    whole = weight if isinstance(weight, PackedWeight) else MergedTrellis.of([weight])
    return make_operands(whole, dtype, "layer", capacity)


def assert_right(weight: Any, x: torch.Tensor, made: Operands) -> None:
    got, expected = product(x, made), x.double() @ weight.dequantize().double().T
    assert got.dtype == x.dtype
    assert got.shape == expected.shape
    assert (got - expected).norm() <= TOLERANCE[x.dtype] * expected.norm()


SCHEMES = [
    LayerScheme("packed", bits, group, outliers, grid=grid)
    for bits in (2, 3, 4, 8)
    for group, outliers, grid in (
        *((32, True, "midrise"), (64, True, "midtread"), (96, False, "midtread"), (128, True, "midrise")),
        *((-1, True, "midtread"), (-1, False, "midrise")),
    )
]


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("rows", [1, 70])
@pytest.mark.parametrize("scheme", SCHEMES, ids=lambda s: f"{s.bits}-{s.group_size}-{s.grid}-{s.outliers}")
def test_products_match_float64(scheme: LayerScheme, rows: int, dtype: torch.dtype, kind: str) -> None:
    cols = 384  # whole groups of every size
    weight: Any = random_weight(scheme, rows, cols, seed=rows)
    made = make(weight, dtype)
    assert made.layout == CpuOperands.layout
    for tokens in (1, 2, 15, 65):
        x = torch.randn(2, tokens, cols, generator=torch.Generator().manual_seed(tokens)).to(dtype)
        assert_right(weight, x, made)  # the last one by dense bands
        assert_right(weight, x[0, :, :].t().contiguous().t(), made)
    assert product(x[:, :0], made).shape == (2, 0, rows)


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("shape", [(16, 16), (50, 384), (100, 144), (256, 400), (7, 1)])
def test_products_with_a_trellis_match_float64(shape: tuple[int, int], dtype: torch.dtype, kind: str) -> None:
    weight = random_trellis(*shape, seed=shape[0])
    made = make(weight, dtype)
    assert made.layout == CpuTrellisOperands.layout
    for tokens in (1, 3, 9, 64):
        x = torch.randn(2, tokens, shape[1], generator=torch.Generator().manual_seed(tokens)).to(dtype)
        assert_right(weight, x, made)
    assert product(x[:, :0], made).shape == (2, 0, shape[0])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16])
def test_activations_of_another_dtype_than_at_load(dtype: torch.dtype, kind: str) -> None:
    """vLLM's latent attention multiplies an identity matrix of float32 by a layer, to get its weight."""
    for weight in (random_weight(SCHEMES[0], 70, 384, seed=1), random_trellis(70, 384)):
        made = make(weight)
        got = product(torch.eye(384, dtype=dtype), made).t()
        assert got.dtype == dtype
        expected = weight.dequantize().to(dtype)
        assert (got - expected).norm() <= 2**-13 * expected.norm()


def test_what_vllm_sets_while_it_loads() -> None:
    """The default dtype is that of the model."""
    x = torch.randn(3, 384).bfloat16()
    for weight in (random_weight(SCHEMES[0], 70, 384, seed=1), random_trellis(70, 384)):
        torch.set_default_dtype(torch.bfloat16)
        try:
            made = make(weight)
        finally:
            torch.set_default_dtype(torch.float32)
        assert_right(weight, x, made)


def test_more_tokens_than_fit_the_scratch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu, "FEW_TOKENS", 1 << 20)
    x = torch.randn(1100, 384).bfloat16()
    for weight in (random_weight(SCHEMES[0], 33, 384, seed=1), random_trellis(33, 384)):
        made = make(weight)
        y = product(x, made)
        assert_right(weight, x, made)
        assert torch.equal(y[511:514], product(x[511:514], made))


def test_columns_beyond_16_bits() -> None:
    cols = 65664
    weight: Any = random_weight(LayerScheme("packed", 4, 128, True), 4, cols, seed=1)
    mask = torch.zeros(4, cols, dtype=torch.bool)
    mask[2, [3, 4095, 4096, 65535, 65540]] = True
    weight = replace(weight, outliers=CSR.from_mask(mask, torch.full((4, cols), 2.0).bfloat16()))
    x = torch.zeros(1, cols).bfloat16()
    x[0, 65540] = 1
    expected = x.double() @ weight.dequantize().double().T
    torch.testing.assert_close(product(x, make(weight)).double(), expected.bfloat16().double(), rtol=0, atol=0)


def test_activations_of_other_columns_are_refused() -> None:
    for weight in (random_weight(SCHEMES[0], 33, 384, seed=1), random_trellis(33, 384)):
        with pytest.raises(ValueError, match="x: expected 384 columns, found 192"):
            product(torch.randn(4, 192).bfloat16(), make(weight))


@pytest.mark.parametrize("rate", range(2, 13))
def test_every_rate(rate: int, kind: str) -> None:
    weight = random_trellis(80, 272, seed=rate, rates=[rate], kept=0)
    x = torch.randn(5, 272).bfloat16()
    assert_right(weight, x, make(weight))


def rounded_weight(made: Operands, monkeypatch: pytest.MonkeyPatch) -> torch.Tensor:
    """Return the weight, rounded to bfloat16, from products with unit vectors in dense bands of one tile."""
    monkeypatch.setattr(cpu, "FEW_TOKENS", 0)
    monkeypatch.setattr(cpu, "DENSE_WEIGHTS", 1)
    monkeypatch.setattr(torch.cpu, "get_capabilities", dict)  # dequantize to float32
    return product(torch.eye(made.constants()[1]).bfloat16(), made).t()


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
@pytest.mark.parametrize("grid", ["midtread", "midrise"])
def test_dense_bands_are_exact(bits: int, grid: str, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    weight: Any = random_weight(LayerScheme("packed", bits, 32, True, grid=grid), 39, 96, seed=1)
    assert torch.equal(rounded_weight(make(weight), monkeypatch), weight.dequantize(torch.bfloat16))
    integers = torch.randint(-9, 9, (39, 75), dtype=torch.int32)
    scaled = pack_integers(integers, torch.linspace(0.5, 3, 39), bits)
    assert torch.equal(rounded_weight(make(scaled), monkeypatch), scaled.dequantize(torch.bfloat16))


def test_scales_of_a_trellis_are_those_of_the_format() -> None:
    exponents = torch.arange(-128, 128).to(torch.int8)
    assert torch.equal(trellis.octave_eighths(exponents), octave_eighths(exponents))


@pytest.mark.parametrize(
    "make_weight", [lambda: random_weight(SCHEMES[0], 70, 384, seed=1), lambda: random_trellis(70, 384)]
)
@pytest.mark.parametrize("threads", [1, 2, 3])
def test_a_token_does_not_depend_on_its_batch(make_weight: Callable[[], Any], threads: int, kind: str) -> None:
    made, x = make(make_weight()), torch.randn(23, 384).bfloat16()
    assert cpu.FEW_TOKENS >= 23
    alone = torch.cat([product(row, made) for row in x.split(1)])
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        for count in (2, 3, 7, 8, 12, 23):
            assert torch.equal(product(x[:count], made), alone[:count])
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize(
    "make_weight", [lambda: random_weight(SCHEMES[7], 32, 384, seed=1), lambda: random_trellis(32, 384)]
)
@pytest.mark.parametrize("tokens", [4, 200])
def test_nan_and_inf_stay_with_their_token(make_weight: Callable[[], Any], tokens: int, kind: str) -> None:
    made, x = make(make_weight()), torch.randn(tokens, 384).bfloat16()
    expected = product(x, made)
    x[1, 5], x[2, 7] = torch.nan, torch.inf
    got = product(x, made)
    assert got[1].isnan().all()
    assert not got[2].isfinite().any()
    assert torch.equal(got[[0, *range(3, tokens)]], expected[[0, *range(3, tokens)]])


@pytest.mark.parametrize(
    "make_weight", [lambda: random_weight(SCHEMES[7], 32, 384, seed=1), lambda: random_trellis(32, 384)]
)
def test_zeros_and_extreme_magnitudes(make_weight: Callable[[], Any], kind: str) -> None:
    weight = make_weight()
    made, x = make(weight), torch.randn(4, 384).bfloat16()
    assert not product(torch.zeros(2, 384).bfloat16(), made).any()
    for scale in (2.0**-60, 2.0**60):
        assert_right(weight, (x * scale).bfloat16(), made)
    x[:, ::128] = 3e4  # one large number in each block
    assert_right(weight, x, made)


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
def test_the_largest_sums_do_not_overflow(bits: int, kind: str) -> None:
    integers = torch.tensor([[-(1 << (bits - 1))], [(1 << (bits - 1)) - 1]], dtype=torch.int32).expand(2, 256)
    weight = PackedWeight.from_integers(integers.contiguous(), torch.ones(2, 2).bfloat16(), bits, 128, midrise=True)
    for sign in (1.0, -1.0):
        assert_right(weight, torch.full((9, 256), sign * 1.99).bfloat16(), make(weight))


def test_integers_beyond_bfloat16_are_several_entries(kind: str) -> None:
    """Decoded weights with overflow: their outliers are integers, and row scales are not rounded to bfloat16."""
    weight: Any = random_weight(LayerScheme("huffman"), 48, 160, seed=1)
    stored = weight.pack(bits=2)
    stored.outliers.values[:5] = torch.tensor([257.0, -65537, 2**24 - 1, 1001, 4095])
    made = make(stored)
    entries: Any = made.tensors()["entry_begins"]
    assert int(entries[-1]) > stored.outliers.nnz
    assert_right(stored, torch.randn(5, 160).bfloat16(), made)


def test_decoded_integers_get_the_width_that_takes_the_least_memory() -> None:
    here, narrow = torch.device("cpu"), torch.randint(-2, 2, (40, 64), dtype=torch.int32)
    assert inlier_bits([[narrow]], here, torch.bfloat16) == 2
    assert inlier_bits([[narrow[:, :40]]], here, torch.float16) == 2
    narrow.view(-1)[::25] = 3  # an outlier costs 32 bits
    assert inlier_bits([[narrow]], here, torch.bfloat16) == 3
    narrow.view(-1)[::25] = 9
    assert inlier_bits([[narrow]], here, torch.bfloat16) == 2


def shapes(made: Operands) -> dict[str, Any]:
    return {name: tensor.shape for name, tensor in made.tensors().items() if tensor is not None}


def test_room_for_reloaded_weights() -> None:
    weight: Any = random_weight(LayerScheme("packed", 4, 32, True), 32, 64, seed=1)
    empty = CSR.from_mask(torch.zeros(32, 64, dtype=torch.bool), torch.zeros(32, 64))
    none, first = replace(weight, outliers=empty), make(weight)
    second = make(none, capacity=first.capacity)
    assert shapes(first) == shapes(second), "a reload copies one over the other"
    entries: Any = second.tensors()["entries"]
    entries.fill_(-1)
    assert_right(none, torch.randn(3, 64).bfloat16(), second)
    with pytest.raises(CheckpointError, match="layer: expected at most 1 outliers"):
        make(weight, capacity=1)


def test_room_for_a_reloaded_trellis() -> None:
    weight = random_trellis(50, 272, seed=1)
    first = make(weight)
    lower = replace(
        random_trellis(50, 272, seed=1, rates=[2]),
        kept_positions=weight.kept_positions[:1],
        kept_values=weight.kept_values[:1],
    )
    second = make(lower, capacity=first.capacity)
    assert shapes(first) == shapes(second)
    assert_right(lower, torch.randn(3, 272).bfloat16(), second)
    with pytest.raises(CheckpointError, match="layer: expected at most 1 words of rates"):
        make(weight, capacity=[1, 99])
    with pytest.raises(CheckpointError, match="layer: expected at most 0 kept weights"):
        make(weight, capacity=[1 << 20, 0])


def test_parts_of_a_merged_trellis(kind: str) -> None:
    """Two linears of one input, and the rows and columns of a tensor-parallel rank."""
    whole = MergedTrellis.of([random_trellis(80, 512, seed=1), random_trellis(48, 512, seed=2)])
    for part in (whole, whole.take(torch.arange(16, 128), (0, 512)), whole.take(torch.arange(128), (256, 512))):
        made = make_operands(part, torch.bfloat16, "layer")
        assert made.layout == CpuTrellisOperands.layout
        assert_right(part, torch.randn(3, part.shape[1]).bfloat16(), made)
    padded = whole.take(torch.cat([torch.arange(64), torch.full((16,), -1)]), (0, 512))
    made = make_operands(padded, torch.bfloat16, "layer")
    assert made.layout == CpuTrellisOperands.layout
    assert_right(padded, torch.randn(3, 512).bfloat16(), made)
    odd = whole.take(torch.arange(5, 128), (0, 512))
    assert make_operands(odd, torch.bfloat16, "layer").layout == DenseOperands.layout


@pytest.mark.parametrize(
    ("scheme", "cols", "dtype"),
    [(LayerScheme("packed", 4, 16, True), 64, torch.bfloat16), (LayerScheme("packed", 4, 32, True), 64, torch.float32)],
)
def test_unsupported_weights_are_dequantized(scheme: LayerScheme, cols: int, dtype: torch.dtype) -> None:
    weight: Any = random_weight(scheme, 32, cols, seed=1)
    assert make(weight, dtype).layout == CheckpointOperands.layout
    assert make(random_trellis(32, 64), torch.float32).layout == DenseOperands.layout


def test_packing_in_bands(monkeypatch: pytest.MonkeyPatch) -> None:
    weight: Any = random_weight(LayerScheme("packed", 3, 32, False), 50, 64, seed=1)
    whole: Any = make(weight).tensors()["words"]
    monkeypatch.setattr(packed, "BAND_WEIGHTS", 1)
    again: Any = make(weight).tensors()["words"]
    assert torch.equal(whole, again)


def test_compiler_sees_one_operator() -> None:
    for weight in (random_weight(SCHEMES[0], 24, 384, seed=1), random_trellis(24, 64)):
        made = make(weight)
        x = torch.randn(2, 3, made.constants()[1]).bfloat16()
        arguments = (x, list(made.tensors().values()), made.constants(), made.layout, made.arch)
        torch.library.opcheck(torch.ops.latq.linear.default, arguments, test_utils=("test_schema", "test_faketensor"))


@pytest.mark.parametrize(
    "scheme", [LayerScheme("packed", 4, 32, True), LayerScheme("huffman"), LayerScheme("trellis")], ids=str
)
def test_experts(scheme: LayerScheme) -> None:
    mixture = Mixture(scheme, torch.bfloat16)
    layout = "cpu_trellis" if scheme.encoding == "trellis" else "cpu"
    assert mixture.constants.layouts == [layout, layout]
    x, weights, ids = routing(7, 2)
    got, expected = mixture(x.bfloat16(), weights, ids), mixture.reference(x, weights, ids)
    assert (got - expected).norm() <= 4 * TOLERANCE[torch.bfloat16] * expected.norm()


AVAILABLE = "from vllm_latq.kernels.cpu import trellis; assert trellis.is_available()"


@pytest.fixture
def no_libraries(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """Begin without compiled libraries, in this process and on disk."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    library._load.cache_clear()
    yield
    library._load.cache_clear()


@pytest.mark.parametrize(
    ("compiler", "said"),
    [("no-such-compiler", "No such file or directory"), ("false", ""), (None, "install one, or name it in CXX")],
)
@pytest.mark.usefixtures("no_libraries")
def test_without_a_compiler(
    compiler: str | None, said: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    if compiler is None:
        monkeypatch.delenv("CXX", raising=False)
        monkeypatch.setenv("PATH", "")
    else:
        monkeypatch.setenv("CXX", compiler)
    weight: Any = random_weight(LayerScheme("packed", 4, 32, True), 32, 64, seed=1)
    assert make(weight).layout in (Int4Operands.layout, CheckpointOperands.layout)
    assert make(random_trellis(32, 64)).layout == DenseOperands.layout
    assert said in caplog.text
    assert caplog.text.count("slower products run instead") == 2


@pytest.mark.usefixtures("no_libraries")
def test_without_a_folder_that_can_be_written(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(file))
    assert trellis.is_available()


@pytest.mark.parametrize("kept", [0, 100])
@pytest.mark.usefixtures("no_libraries")
def test_damaged_library_is_compiled_again(kept: int, tmp_path: Path) -> None:
    subprocess.run([sys.executable, "-c", AVAILABLE], check=True)
    (made,) = (tmp_path / "vllm_latq").iterdir()
    made.write_bytes(bytes(kept))
    subprocess.run([sys.executable, "-c", AVAILABLE], check=True)
    assert made.stat().st_size > 10_000


@pytest.mark.usefixtures("no_libraries")
def test_folder_that_others_can_write_to_is_not_used(tmp_path: Path) -> None:
    folder = tmp_path / "vllm_latq"
    folder.mkdir()
    folder.chmod(0o777)
    assert trellis.is_available()
    assert not list(folder.iterdir())


@pytest.mark.usefixtures("no_libraries")
def test_compiler_with_arguments_and_strange_messages(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    script = tmp_path / "a compiler"
    script.write_text('#!/bin/sh\nprintf "\\377" >&2\nexec "$@"\n')
    script.chmod(0o755)
    monkeypatch.setenv("CXX", f"'{script}' c++")
    assert trellis.is_available()


@pytest.mark.usefixtures("no_libraries")
def test_processes_that_compile_at_once(tmp_path: Path) -> None:
    running = [subprocess.Popen([sys.executable, "-c", AVAILABLE]) for _ in range(2)]
    assert [process.wait() for process in running] == [0, 0]
    assert [path.suffix for path in (tmp_path / "vllm_latq").iterdir()] == [".so"]


def test_cpus_without_avx2(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "DEFAULT")
    monkeypatch.setattr(library, "instructions", library.instructions.__wrapped__)
    weight: Any = random_weight(LayerScheme("packed", 4, 32, True), 32, 64, seed=1)
    assert make(weight).layout == CheckpointOperands.layout


THREADS = """
import os, torch
from helpers.builders import packed_weight
from vllm_latq.serving.operands import make_operands

def threads(): return set(os.listdir("/proc/self/task"))

torch.set_num_threads(3)
alone = threads()
made, x = make_operands(packed_weight(3, 128, 4096, 1024, 0.01), torch.bfloat16, "layer"), torch.randn(1 << 20)
x.exp()
before = threads()
assert made.layout == "cpu" and len(before - alone) == 2, before - alone
made.product(x[: 8 * 1024].view(8, 1024).bfloat16())
assert threads() == before
"""


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="needs Linux")
def test_products_run_on_the_threads_of_torch() -> None:
    """vLLM binds those to cores; a second library of OpenMP would start its own."""
    paths = os.pathsep.join(filter(None, (str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH"))))
    environment = {key: value for key, value in os.environ.items() if key != "OMP_NUM_THREADS"}
    subprocess.run([sys.executable, "-c", THREADS], env=environment | {"PYTHONPATH": paths}, check=True)
