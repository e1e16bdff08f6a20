"""From a packed weight to the kernels: products, reloads in place, one opaque operator."""

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch
import torch._dynamo.testing

from helpers.builders import packed_weight
from helpers.kernel_device import ARCH, DEVICE, EMULATED
from vllm_latq.coding.huffman.encoder import encode
from vllm_latq.errors import CheckpointError
from vllm_latq.format.encodings.huffman import HuffmanWeight
from vllm_latq.format.encodings.packed import PackedWeight, pack_integers
from vllm_latq.kernels import configs
from vllm_latq.kernels.bench import cases
from vllm_latq.kernels.bench.cases import Case, layer_of
from vllm_latq.kernels.decode import dispatch
from vllm_latq.kernels.layout.outliers import SMALLEST_CAPACITY, OutlierCsr
from vllm_latq.kernels.layout.weight import KernelWeight, with_spread
from vllm_latq.serving.decode import decode_on_device
from vllm_latq.serving.layouts import tiled
from vllm_latq.serving.layouts.tiled import TiledOperands, has_kernels, unsupported
from vllm_latq.serving.linear import linear
from vllm_latq.serving.operands import make_operands, stack_operands
from vllm_latq.serving.sharding import cat_rows, take

pytestmark = pytest.mark.kernel

needs_torch_compile = pytest.mark.skipif(EMULATED is not None, reason="torch.compile finds no pretended GPU")
CPU = torch.device("cpu")
FLOAT16_TOLERANCE = 2**-10  # of the largest output: one rounding to float16, after float32 sums
BFLOAT16_TOLERANCE = 2**-7  # the interpreter rounds to bfloat16 towards zero


def packed(
    bits: int, group_size: int, rows: int, cols: int, rate: float | None, seed: int = 0, midrise: bool = False
) -> PackedWeight:
    """Random packed weight where kernels run; `rate` None has no outlier arrays, 0 has empty ones."""
    return packed_weight(bits, group_size, rows, cols, rate, seed, midrise).to(DEVICE)


def decoded(rows: int, cols: int, seed: int = 0, bits: int = 2) -> PackedWeight:
    """Make a decoded layer: inliers on row scales, with a row of overflow, which is far beyond 8 bits."""
    generator = torch.Generator().manual_seed(seed)
    integers = torch.randn(rows, cols, generator=generator).round().to(torch.int32)
    integers[-1] = (250 if bits == 8 else 5) + torch.arange(cols, dtype=torch.int32) % 300 // (1 if bits == 8 else 20)
    scales = torch.rand(rows, generator=generator) * 0.1 + 0.01
    return pack_integers(integers, scales, bits=bits).to(DEVICE)


def run(x: torch.Tensor, operands: TiledOperands) -> torch.Tensor:
    return linear(x, operands.tensors().values(), operands.constants(), operands.layout, operands.arch)


def assert_product(weight: PackedWeight, operands: TiledOperands, m: int = 3) -> None:
    x = torch.randn(1, m, weight.cols, generator=torch.Generator().manual_seed(m)).half()
    expected = x.double() @ weight.dequantize().cpu().double().t()
    y = run(x.to(DEVICE), operands).cpu()
    assert y.shape == (1, m, weight.shape[0])
    assert (y - expected).abs().max() <= FLOAT16_TOLERANCE * expected.abs().max()


PADDED = torch.tensor([3, -1, 7, -1], device=DEVICE)
WEIGHTS: dict[str, Callable[[int], PackedWeight]] = {
    "2-bit": lambda seed: packed(2, 64, 70, 320, 0.02, seed),
    "3-bit": lambda seed: packed(3, 128, 129, 256, 0.01, seed),
    "4-bit row": lambda seed: packed(4, -1, 33, 500, 0.03, seed),
    "8-bit plain": lambda seed: packed(8, 32, 64, 96, None, seed),
    "no outlier": lambda seed: packed(4, 128, 64, 256, 0.0, seed),
    "2-bit mid-rise": lambda seed: packed(2, 128, 70, 256, 0.02, seed, midrise=True),
    "one row": lambda seed: packed(3, 32, 1, 64, 1.0, seed),
    "hptq": lambda seed: decoded(40, 300, seed),
    "hptq, 8-bit": lambda seed: decoded(40, 300, seed, bits=8),
    "padded hptq": lambda seed: take(decoded(20, 192, seed), PADDED, (64, 192)),
    "merged": lambda seed: cat_rows([packed(3, 64, rows, 128, 0.02, seed + rows) for rows in (64, 32, 33)]),
    "padded": lambda seed: take(packed(4, 64, 20, 192, 0.05, seed), PADDED, (64, 192)),
}


@pytest.mark.parametrize("name", WEIGHTS)
def test_equals_the_dense_product_and_reloads_in_place(name: str) -> None:
    """The second weight is copied into the first weight's tensors, as a reload does it."""
    first, second = WEIGHTS[name](0), WEIGHTS[name](1)
    operands = TiledOperands.pack(first, name)
    assert operands.arch == ARCH
    assert_product(first, operands)
    again = TiledOperands.pack(second, name, operands.capacity)
    assert (again.constants(), again.arch) == (operands.constants(), operands.arch)
    copy_tensors(again, operands)
    assert_product(second, operands)


def copy_tensors(source: TiledOperands, target: TiledOperands) -> None:
    """Copy as a reload does."""
    tensors = source.tensors()
    for name, tensor in target.tensors().items():
        assert (tensor is None) == (tensors[name] is None)
        if tensor is not None:
            assert tensor.shape == tensors[name].shape
            tensor.copy_(tensors[name])


def test_layers_of_one_shape_share_tensor_shapes() -> None:
    """Their outliers differ in number, and need more slots than SMALLEST_CAPACITY."""
    slots, shapes = set(), set()
    for seed in range(6):
        operands = TiledOperands.pack(packed(3, 64, 256, 1024, 0.018, seed), "layer")
        slots.add(int(operands.weight.slice_ptr[-1]))
        shapes.add(tuple(None if tensor is None else tuple(tensor.shape) for tensor in operands.tensors().values()))
    assert len(slots) > 1
    assert min(slots) > SMALLEST_CAPACITY
    assert len(shapes) == 1


def test_reload_with_more_outliers_than_fit_is_refused() -> None:
    capacity = TiledOperands.pack(packed(4, 64, 64, 128, 0.01), "layer").capacity
    with pytest.raises(CheckpointError, match=r"layer: expected outliers for at most \d+ slots of 16 rows, found"):
        TiledOperands.pack(packed(4, 64, 64, 128, 0.3), "layer", capacity)


def test_reload_with_far_more_outliers_is_refused_before_they_take_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    capacity = TiledOperands.pack(decoded(40, 60), "layer").capacity
    many = pack_integers(torch.full((100, 60), 110, dtype=torch.int32), torch.ones(100), bits=2).to(DEVICE)
    monkeypatch.setattr(tiled, "prepare", lambda *_, **__: pytest.fail("prepared"))
    with pytest.raises(
        CheckpointError, match=r"expected outliers for at most \d+ slots of 16 rows, found 6000 of them"
    ):
        TiledOperands.pack(many, "layer", capacity)


@pytest.fixture
def spreading(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[list[int]]:
    """A file of timed rows in which 8 rows take the kernel that spreads outliers; the rows of x of its launches."""
    launched: list[int] = []

    def launch(x: torch.Tensor, *rest: object) -> None:
        launched.append(len(x))
        spread(x, *rest)

    spread = dispatch.launch_spread
    monkeypatch.setattr(dispatch, "launch_spread", launch)
    path = tmp_path / "tuned.json"
    path.write_text(json.dumps({ARCH: [asdict(replace(configs.decode_config(8, 3, ARCH), spread=True))]}))
    monkeypatch.setattr(configs, "TUNED", path)
    caches = configs.table_of, configs.decode_config
    for cache in caches:
        cache.cache_clear()
    yield launched
    for cache in caches:
        cache.cache_clear()


def test_a_row_of_the_table_chooses_the_kernel_that_spreads_outliers(spreading: list[int]) -> None:
    """It serves bf16 and few rows of x, after a reload in place too; float16 and more rows keep the other kernel."""
    first, second = (packed(3, 128, 129, 512, 0.02, seed) for seed in (0, 1))
    operands = TiledOperands.pack(first, "layer")
    assert operands.weight.spread is not None
    copy_tensors(TiledOperands.pack(second, "layer", operands.capacity), operands)
    for m, dtype in ((3, torch.bfloat16), (9, torch.bfloat16), (3, torch.float16)):
        x = torch.randn(m, 512, generator=torch.Generator().manual_seed(m)).to(dtype)
        expected = x.double() @ second.dequantize().cpu().double().t()
        y = run(x.to(DEVICE), operands).cpu()
        assert (y - expected).abs().max() <= BFLOAT16_TOLERANCE * expected.abs().max()
    assert spreading == [3]
    assert TiledOperands.pack(packed(3, 128, 64, 256, None), "layer").weight.spread is None


@pytest.mark.parametrize("rate", [0.001, 0.02])
def test_the_benchmark_times_the_kernel_that_serving_launches(
    rate: float, spreading: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Room for outliers decides how the kernel is compiled: both give a weight the same, where a row asks for it."""
    rows, cols, bits = 256, 512, 3
    masks = []

    def laid_out(weight: KernelWeight, outliers: OutlierCsr, room: int) -> KernelWeight:
        row = torch.arange(rows).repeat_interleave(outliers.row_ptr.diff().cpu())
        masks.append(
            torch.zeros(rows, cols, dtype=torch.bool).index_put((row, outliers.col_idx.cpu()), torch.tensor(True))
        )
        return with_spread(weight, outliers, room)

    monkeypatch.setattr(cases, "with_spread", laid_out)
    timed = layer_of(Case(rows, cols, bits, rate, 3, "tensor_core"), DEVICE)
    weight = PackedWeight.from_integers(
        torch.zeros(rows, cols, dtype=torch.int32), torch.ones(rows, 4).bfloat16(), bits, 128, *masks, timed.dense.cpu()
    )
    served = TiledOperands.pack(weight.to(DEVICE), "layer").weight
    assert timed.weight.spread.shape == served.spread.shape
    assert timed.weight.spread.numel() > masks[0].sum()


def stacked(rates: Sequence[float], capacity: int | None = None) -> tuple[list[PackedWeight], TiledOperands]:
    """Stacked experts, with a rate of outliers each."""
    weights = [packed(4, 64, 64, 128, rate, seed) for seed, rate in enumerate(rates)]
    made = [make_operands(weight, torch.float16, "experts", capacity, alone=False) for weight in weights]
    return weights, stack_operands(made, "experts", capacity)


def of_expert(stack: TiledOperands, expert: int) -> TiledOperands:
    parts = [
        None if part is None else part[0 if name == "entries" else expert].contiguous()
        for name, part in stack.tensors().items()
    ]
    return TiledOperands.from_lists(parts, stack.constants(), stack.arch)


def test_experts_take_the_memory_of_their_own_outliers() -> None:
    """An expert takes no room for the outliers of another; a reload may distribute the outliers differently."""
    weights, stack = stacked([0.02, 0.9, 0.0, 0.05])
    alone = [TiledOperands.pack(weight, "expert").capacity for weight in weights]
    assert stack.capacity == stack.weight.entries.shape[1] <= 1.25 * sum(alone) < 0.5 * len(alone) * max(alone)
    for expert, weight in enumerate(weights):
        assert_product(weight, of_expert(stack, expert))
    others, again = stacked([0.9, 0.0, 0.05, 0.02], stack.capacity)
    assert again.constants() == stack.constants()
    copy_tensors(again, stack)
    for expert, weight in enumerate(others):
        assert_product(weight, of_expert(stack, expert))


def test_stack_without_any_outlier() -> None:
    weights, stack = stacked([0.0, 0.0])
    for expert, weight in enumerate(weights):
        assert_product(weight, of_expert(stack, expert))


@pytest.mark.parametrize("rates", [(0.1, 0.1, 0.1), (0.0, 0.0, 1.0)])
def test_experts_with_more_outliers_than_fit_are_refused(rates: Sequence[float]) -> None:
    """The limit holds for all experts together, and for one alone."""
    _, stack = stacked([0.1, 0.01, 0.1])
    with pytest.raises(CheckpointError, match=rf"experts: expected outliers for at most {stack.capacity} slots of 16"):
        stacked(rates, stack.capacity)


@needs_torch_compile
@pytest.mark.parametrize("name", ["3-bit", "8-bit plain", "decoded"])
def test_registration(name: str) -> None:
    """Schema, fake implementation and dispatch agree (torch's own checks)."""
    weight = decoded(40, 60) if name == "decoded" else WEIGHTS[name](0)
    operands = TiledOperands.pack(weight, name)
    x = torch.randn(2, weight.cols, device=DEVICE).bfloat16()
    torch.library.opcheck(
        torch.ops.latq.linear.default,
        (x, list(operands.tensors().values()), operands.constants(), operands.layout, operands.arch),
        test_utils=("test_schema", "test_faketensor", "test_aot_dispatch_dynamic"),
    )


@needs_torch_compile
def test_one_opaque_operator_under_compile() -> None:
    """Layers of one shape with different numbers of outliers share one graph, without a break."""
    torch._dynamo.reset()
    counter = torch._dynamo.testing.CompileCounter()

    def forward(x: torch.Tensor, tensors: dict, constants: list[int], arch: str) -> torch.Tensor:
        return linear(x, tensors.values(), constants, TiledOperands.layout, arch) + 1

    compiled = torch.compile(forward, backend=counter, fullgraph=True)
    x = torch.randn(2, 128, device=DEVICE).bfloat16()
    numbers = set()
    for seed in range(3):
        weight = packed(4, 64, 64, 128, 0.02, seed)
        numbers.add(weight.outliers.nnz)
        operands = TiledOperands.pack(weight, "layer", capacity=64)
        arguments = (operands.tensors(), operands.constants(), operands.arch)
        torch.testing.assert_close(compiled(x, *arguments), forward(x, *arguments), rtol=0, atol=0)
    assert len(numbers) > 1
    assert counter.frame_count == 1


@pytest.mark.parametrize(
    ("weight", "dtype", "reason"),
    [
        (packed(4, 64, 4, 128, None), torch.float32, "float32 activations"),
        (packed(4, 48, 4, 96, None), torch.bfloat16, "a group size of 48"),
        (packed(2, -1, 1, 70_000, 0.001), torch.bfloat16, "outliers in 70000 columns"),
    ],
)
def test_unsupported_weights_and_activations(weight: PackedWeight, dtype: torch.dtype, reason: str) -> None:
    assert reason in unsupported(weight, dtype)
    assert unsupported(packed(4, 64, 4, 128, None), torch.float16) is None


@pytest.mark.interpreter
def test_streams_are_decoded_by_the_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    integers = (torch.randn(9, 33, generator=torch.Generator().manual_seed(0)) * 3).round().to(torch.int32)
    weight = HuffmanWeight(torch.ones(1), encode(integers))
    assert has_kernels(CPU)
    with monkeypatch.context() as patch:
        patch.delattr("vllm_latq.coding.huffman.decoder.decode_stream")
        assert torch.equal(decode_on_device(weight, "layer", CPU), integers)
        weight.stream.stream.zero_()
        with pytest.raises(CheckpointError, match=r"layer\.stream: expected every .* chunk 0 to end elsewhere"):
            decode_on_device(weight, "layer", CPU)
    monkeypatch.delenv("TRITON_INTERPRET")
    assert not has_kernels(CPU)
    weight = HuffmanWeight(torch.ones(1), encode(integers))
    assert torch.equal(decode_on_device(weight, "layer", CPU), integers)
