"""The compiled kernels, run by the real launchers in the PTX emulator, against float64.

The emulator refuses accesses out of bounds, races and asynchronous copies that are read too early; tensor cores
truncate as the real ones do. So this covers what Triton's interpreter cannot: inline assembly, layouts, pipelining.
"""

from collections import Counter
from dataclasses import replace
from itertools import pairwise
from random import Random
from typing import Any

import pytest
import torch
from triton.backends.compiler import GPUTarget

from helpers.builders import poisoned
from helpers.kernel_device import emulated_gpu
from helpers.pretend_gpu import DEVICE
from helpers.slow import slow
from vllm_latq.coding.huffman.encoder import encode as huffman_encode
from vllm_latq.kernels.bench import cases
from vllm_latq.kernels.configs import GATHER_ROWS, SIMT, decode_config
from vllm_latq.kernels.decode import prefill as dequantize
from vllm_latq.kernels.decode.dispatch import ssqr_matmul
from vllm_latq.kernels.decode.launch import Scratch, Variant
from vllm_latq.kernels.decode.ssqr import launch_ssqr, ssqr_constants, ssqr_tensor_core
from vllm_latq.kernels.dev.audit import compile_kernel
from vllm_latq.kernels.dev.emulation.launch import emulation
from vllm_latq.kernels.dev.emulation.memory import GlobalMemory, Traffic
from vllm_latq.kernels.dev.emulation.ptx import parse
from vllm_latq.kernels.dev.reference import matmul_reference
from vllm_latq.kernels.entropy.huffman import decode_huffman
from vllm_latq.kernels.experts.grouped import grouped_matmul
from vllm_latq.kernels.experts.routing import batch_size, route
from vllm_latq.kernels.experts.rows import combine, gather
from vllm_latq.kernels.layout.weight import stack_weights
from vllm_latq.serving.decode import huffman_arguments

pytestmark = pytest.mark.compiler

ROUNDING = {torch.bfloat16: 2**-8, torch.float16: 2**-11}  # of the largest output
PREFILL_FACTOR = 2  # the weights are rounded, too


def on(arch: str, layer: Any, processors: int = 1) -> Any:
    return replace(layer.weight, arch=arch, processors=processors)


def activations(m: int, cols: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(m, cols, generator=torch.Generator().manual_seed(m)).to(dtype)


def float32_product(
    layer: Any, x: torch.Tensor, arch: str, parts: int = 1, ranges: int = 1, processors: int = 1, **options: Any
) -> tuple[torch.Tensor, Traffic]:
    """The decode kernel's y in float32, all scratch poisoned, and the launch's traffic. Tickets must end at zero."""
    m, weight = x.shape[0], on(arch, layer, processors)
    config = decode_config(m, weight.bits, arch)
    y = torch.full((m, weight.rows), float("nan"))
    partials = torch.full((parts * weight.padded_rows * config.max_rows,), float("nan"))
    transposed = None
    if weight.entries is not None and m > GATHER_ROWS:
        transposed = torch.full((weight.cols, config.outlier_rows(m, ranges)), float("nan"), dtype=x.dtype)
    with emulation(arch, **options) as traffic:
        launch_ssqr(x, weight, y, config, Scratch(parts, ranges, partials, transposed))
    assert not weight.tickets.any()
    return y, traffic


# Architecture, bits, rows, activations, group size; every combination of the first three with something else varied.
DECODE = [
    ("sm_80", 2, 1, torch.bfloat16, 128),
    ("sm_80", 3, 8, torch.float16, 64),
    ("sm_80", 2, 13, torch.float16, -1),
    ("sm_86", 3, 16, torch.bfloat16, 32),
    ("sm_90", 4, 12, torch.bfloat16, 64),
    ("sm_90", 8, 20, torch.float16, 128),
    ("sm_100", 3, 4, torch.bfloat16, 128),
]
MORE_DECODE = [
    ("sm_80", 4, 5, torch.bfloat16, 32),
    ("sm_80", 8, 3, torch.bfloat16, 128),
    ("sm_80", 3, 30, torch.bfloat16, 128),
    ("sm_80", 4, 64, torch.float16, 128),
    ("sm_90", 2, 7, torch.float16, 128),
    ("sm_90", 3, 1, torch.bfloat16, -1),
    ("sm_90", 3, 32, torch.float16, 32),
    ("sm_90", 2, 64, torch.bfloat16, 128),
    ("sm_100", 4, 16, torch.bfloat16, 32),
    ("sm_100", 2, 29, torch.float16, 128),
    ("sm_100", 3, 64, torch.bfloat16, 32),
    ("sm_120", 4, 14, torch.bfloat16, 128),
    ("sm_120", 2, 64, torch.bfloat16, 64),
]


@pytest.mark.parametrize(("arch", "bits", "m", "dtype", "group_size"), [*DECODE, *slow(MORE_DECODE)])
def test_decode(make_layer, arch: str, bits: int, m: int, dtype: torch.dtype, group_size: int) -> None:
    """Odd shapes, outliers, row scales, split-K, both grids; the table's launch configurations."""
    cols = 384 if m % 2 else 512
    layer = make_layer(
        bits, 131, cols, group_size=group_size, outliers=0.02, row_scales=m % 3 == 0, midrise=m % 4 == 0, full_rows=(7,)
    )
    x = activations(m, cols, dtype)
    config = replace(decode_config(m, bits, arch, group_size), programs_per_processor=4, min_superblocks=1)
    with emulation(arch):
        y = ssqr_matmul(x, on(arch, layer), config)
    expected = matmul_reference(x, layer.dense)
    assert (y - expected).abs().max() <= ROUNDING[dtype] * expected.abs().max()


CODED = {"group_size": -1, "outliers": 0.03, "scales": False, "row_scales": True, "full_rows": (7,)}


@pytest.mark.parametrize(
    ("arch", "bits", "m"),
    [("sm_80", 2, 1), ("sm_86", 4, 12), *slow([("sm_80", 3, 8), ("sm_90", 3, 33), ("sm_100", 2, 40)])],
)
def test_coded_weights(make_layer, arch: str, bits: int, m: int) -> None:
    """Integers for outliers, some of them far, from x and from x^T, and parts that take turns with them."""
    layer = make_layer(bits, 131, 600, **CODED)
    x = activations(m, 600, torch.bfloat16)
    y, _ = float32_product(layer, x, arch, parts=2)
    # Over random signs of x, for each output.
    deviation = matmul_reference(x.double().square(), layer.dense.square()).sqrt()
    assert ((y - matmul_reference(x, layer.dense)).abs() <= 1e-4 * deviation).all()


@pytest.mark.parametrize(
    ("arch", "bits", "m", "ranges"),
    [("sm_80", 3, 1, 8), ("sm_80", 2, 4, 2), *slow([("sm_90", 4, 2, 4), ("sm_100", 3, 3, 2)])],
)
def test_ranges_of_columns(make_layer, arch: str, bits: int, m: int, ranges: int) -> None:
    """Side by side in a tile: their products are added in one program."""
    layer = make_layer(bits, 131, 2048, outliers=0.02, full_rows=(7,), midrise=m == 2)
    x = activations(m, 2048, torch.float16 if m == 4 else torch.bfloat16)
    y, _ = float32_product(layer, x, arch, ranges=ranges)
    deviation = matmul_reference(x.double().square(), layer.dense.square()).sqrt()
    assert ((y - matmul_reference(x, layer.dense)).abs() <= 1e-4 * deviation).all()


@pytest.mark.parametrize(
    ("arch", "m", "parts"), [("sm_80", 9, 1), ("sm_86", 8, 1), *slow([("sm_90", 16, 2), ("sm_90", 33, 2)])]
)
def test_entries_are_prefetched(make_layer, monkeypatch: pytest.MonkeyPatch, arch: str, m: int, parts: int) -> None:
    """From 9 rows on every line of a tile once, by as many threads as have the same row of it."""
    layer, seen = make_layer(3, 200, 2048, group_size=128, outliers=0.02), []

    def watched(self: GlobalMemory, addresses: Any, active: Any, text: str) -> None:
        if active.any():
            seen.extend((self._locate(addresses, 1, active, text)[1] // 128).tolist())

    monkeypatch.setattr(GlobalMemory, "prefetch", watched)
    float32_product(layer, activations(m, 2048, torch.bfloat16), arch, parts)
    config = decode_config(m, 3, arch)
    begins = layer.weight.slice_ptr[:: config.block_n // 16].tolist()  # of tiles, in slots
    tiles = pairwise(begins) if m > 8 else ()
    lines = [line for begin, end in tiles for line in range(begin // 2, -(-end // 2))]
    assert Counter(seen) == Counter(lines * max(1, 32 * config.num_warps // config.block_n))


@pytest.mark.parametrize(("arch", "bits", "rows"), [("sm_80", 3, 131), ("sm_90", 2, 70)])
def test_coded_weights_are_written_exactly(make_layer, arch: str, bits: int, rows: int) -> None:
    """With 70 rows an empty slice lies before one with entries. The emulator refuses what is out of bounds."""
    layer = make_layer(bits, rows, 700, **CODED)
    with emulation(arch):
        w = dequantize.dequantize(on(arch, layer), torch.float32)
    assert torch.allclose(w.double(), layer.dense, rtol=2**-23, atol=0)


@pytest.mark.parametrize(
    ("bits", "m", "dtype"),
    [(3, 2, torch.float16), (4, 7, torch.bfloat16), *slow([(2, 1, torch.bfloat16), (8, 1, torch.bfloat16)])],
)
def test_simt(make_layer, bits: int, m: int, dtype: torch.dtype) -> None:
    coded = {"group_size": -1, "scales": False} if m == 2 else {"group_size": 64}
    layer = make_layer(bits, 70, 320, outliers=0.02, midrise=bits == 3, **coded)
    x = activations(m, 320, dtype)
    with emulation("sm_86"):
        y = ssqr_matmul(x, on("sm_86", layer), replace(SIMT, programs_per_processor=2, min_superblocks=1, slots=1))
    expected = matmul_reference(x, layer.dense)
    assert (y - expected).abs().max() <= ROUNDING[dtype] * expected.abs().max()


@pytest.mark.parametrize(("arch", "bits"), [("sm_80", 3), ("sm_90", 4)])
def test_prefill(make_layer, monkeypatch: pytest.MonkeyPatch, arch: str, bits: int) -> None:
    monkeypatch.setattr(dequantize, "CHUNK_BYTES", 1)  # two row blocks at a time
    layer = make_layer(bits, 130, 320, group_size=64, outliers=0.03, midrise=bits == 4)
    x = activations(129, 320, torch.bfloat16)
    with emulation(arch):
        y = ssqr_matmul(x, on(arch, layer))
    expected = matmul_reference(x, layer.dense)
    assert (y - expected).abs().max() <= PREFILL_FACTOR * ROUNDING[torch.bfloat16] * expected.abs().max()


def test_entropy_decoder() -> None:
    z = (torch.randn(40, 33, generator=torch.Generator().manual_seed(0)) * 2).round().to(torch.int32)
    z[0, :4] = torch.tensor([2**31 - 1, -(2**31), 99999, -77777])
    with emulation("sm_80"):
        assert torch.equal(decode_huffman(*huffman_arguments(huffman_encode(z), z.device)), z)


@pytest.mark.parametrize(
    ("arch", "bits"), [("sm_80", 2), ("sm_90", 4), *slow([("sm_80", 3), ("sm_80", 4), ("sm_90", 2), ("sm_90", 3)])]
)
def test_truncation_does_not_bias_positive_activations(make_layer, arch: str, bits: int) -> None:
    """The floats' bias is a hundred times a weight. Columns of alternating sign keep its sums small.

    Truncation is 1e-6 to 6e-6 of the outputs here; with biases of one sign it would be 0.8e-4 to 3.4e-4. (A mid-rise
    grid has mean zero.)
    """
    layer = make_layer(bits, 64, 1024, outliers=0.0, midrise=True)
    x = activations(2, 1024, torch.bfloat16).abs()
    y, _ = float32_product(layer, x, arch)
    expected = matmul_reference(x, layer.dense)
    error = (y - expected).double()
    assert error.square().mean().sqrt() <= 2e-5 * expected.square().mean().sqrt()


def test_parts_in_any_order(make_layer) -> None:
    """The last program to finish adds the parts, in a fixed order: the same bits whoever is last."""
    layer = make_layer(3, 130, 1024, outliers=0.02)
    x = activations(4, 1024, torch.bfloat16)
    forward, _ = float32_product(layer, x, "sm_80", parts=3)
    backward, _ = float32_product(layer, x, "sm_80", parts=3, order=lambda programs: list(range(programs))[::-1])
    mixed, _ = float32_product(
        layer, x, "sm_80", parts=3, order=lambda programs: [(5 * i + 2) % programs for i in range(programs)]
    )
    assert torch.equal(forward, backward)
    assert torch.equal(forward, mixed)


@pytest.mark.parametrize("m", [12, *slow([64], whole=True)])
def test_activations_are_transposed_whoever_comes_first(make_layer, m: int) -> None:
    """The first programs write x^T, each a share; a program that finds one missing writes all, and waits for nobody."""
    layer = make_layer(3, 130, 1000, group_size=-1, outliers=0.02)
    x = activations(m, 1000, torch.bfloat16)
    forward, moved = float32_product(layer, x, "sm_80", parts=4)
    backward, more = float32_product(layer, x, "sm_80", parts=4, order=lambda programs: list(range(programs))[::-1])
    everybody, _ = float32_product(layer, x, "sm_80", parts=4, processors=8)
    assert torch.equal(forward, backward)
    assert torch.equal(forward, everybody)
    # As many write as one processor runs at once. One after another, all of them but the last miss shares; backwards,
    # the programs that are no writers do, too.
    config = decode_config(m, 3, "sm_80", -1)
    written, writers, programs = 2 * 1000 * config.max_rows // 32, config.programs(3, -1), 2 * 4  # sectors of x^T
    assert 1 < writers < programs
    assert more.store_sectors - moved.store_sectors == (programs - writers) * written


def test_ticket_is_between_barriers() -> None:
    """All of a program's partials before its ticket, all loads of others' after it. Emulated programs never overlap."""
    values = ssqr_constants(decode_config(8, 3, "sm_80"), Variant(3, 8, outliers=False))
    compiled = compile_kernel(ssqr_tensor_core, GPUTarget("cuda", 80, 32), values, num_warps=2)
    code = [i.opcode for i in parse(compiled.asm["ptx"]).instructions]
    ticket = next(at for at, opcode in enumerate(code) if opcode.startswith("atom"))
    assert code[ticket].startswith("atom.global.gpu.acq_rel.add")
    stored = max(at for at in range(ticket) if code[at].startswith("st.global"))
    loaded = min(at for at in range(ticket, len(code)) if code[at].startswith("ld.global.cg"))
    assert "bar.sync" in code[stored:ticket]
    assert "bar.sync" in code[ticket:loaded]


def test_shares_of_transposed_activations_are_counted_between_barriers() -> None:
    """A writer's stores before it counts itself, released; a reader's loads after it looks at the count, acquired."""
    config = decode_config(16, 3, "sm_80")
    values = ssqr_constants(config, Variant(3, 16))
    compiled = compile_kernel(ssqr_tensor_core, GPUTarget("cuda", 80, 32), values, num_warps=config.num_warps)
    code = [i.opcode for i in parse(compiled.asm["ptx"]).instructions]
    counted, looked, _ticket = [at for at, opcode in enumerate(code) if opcode.startswith(("atom", "red"))]
    assert code[counted].startswith(("red.global.gpu.release.add", "atom.global.gpu.release.add"))  # Triton 3.9, before
    assert code[looked].startswith("atom.global.gpu.acquire.add")
    stored = max(at for at in range(counted) if code[at].startswith("st.global"))
    assert "bar.sync" in code[stored:counted]
    # Where a share is missing all of x^T is written again, and then read: the next stores are these.
    stored = min(at for at in range(looked, len(code)) if code[at].startswith("st.global"))
    assert "bar.sync" in code[looked:stored]


@pytest.mark.parametrize(
    ("arch", "m"),
    [("sm_80", 1), ("sm_80", 16), *slow([("sm_80", 8), ("sm_80", 32), ("sm_80", 64), ("sm_90", 32)])],
)
def test_outliers_need_no_barriers(make_layer, arch: str, m: int) -> None:
    """Ten times the outliers: the same number of barriers."""
    x = activations(m, 512, torch.bfloat16)
    few, many = (float32_product(make_layer(3, 64, 512, outliers=rate), x, arch)[1] for rate in (0.01, 0.1))
    assert few.barriers == many.barriers
    assert few.load_sectors < many.load_sectors


@pytest.mark.parametrize(
    ("arch", "bits", "m"),
    [("sm_80", 2, 8), ("sm_80", 3, 1), ("sm_90", 3, 16), *slow([("sm_80", 4, 32), ("sm_86", 4, 64)])],
)
def test_weights_are_read_once_in_whole_sectors_without_bank_conflicts(
    make_layer, arch: str, bits: int, m: int
) -> None:
    layer = make_layer(bits, 128, 1024, outliers=0.0)
    x = activations(m, 1024, torch.bfloat16)
    _, traffic = float32_product(layer, x, arch)
    assert traffic.wavefronts == traffic.ideal_wavefronts
    tiles = 128 // decode_config(m, bits, arch).block_n
    assert traffic.loaded == layer.weight.storage_bytes() + tiles * x.nbytes
    assert 32 * traffic.load_sectors == traffic.loaded


def test_both_orders_of_columns_agree(make_layer) -> None:
    layer = make_layer(4, 64, 512, outliers=0.02)
    x = activations(3, 512, torch.bfloat16)
    base = decode_config(3, 4, "sm_80")
    with emulation("sm_80"):
        outputs = [ssqr_matmul(x, on("sm_80", layer), replace(base, paired=paired)) for paired in (True, False)]
    expected = matmul_reference(x, layer.dense)
    for y in outputs:
        assert (y - expected).abs().max() <= ROUNDING[torch.bfloat16] * expected.abs().max()


# Architecture, bits, tokens, experts of each, columns (1536 are split), rows of a batch, activations, group size.
GROUPED = [
    ("sm_80", 3, 1, 3, 384, None, torch.bfloat16, 128),
    ("sm_80", 2, 24, 2, 1536, 16, torch.bfloat16, -1),
    ("sm_90", 4, 5, 2, 1536, None, torch.bfloat16, 128),
]
MORE_GROUPED = [
    ("sm_80", 4, 2, 2, 512, None, torch.float16, 32),
    ("sm_86", 8, 9, 3, 512, None, torch.float16, 64),
    ("sm_90", 3, 60, 1, 384, 64, torch.bfloat16, 128),
    ("sm_90", 2, 40, 2, 512, 8, torch.float16, 64),
    ("sm_90", 3, 1, 3, 2048, None, torch.bfloat16, -1),
]


@pytest.mark.parametrize(
    ("arch", "bits", "tokens", "k", "cols", "size", "dtype", "group_size"), [*GROUPED, *slow(MORE_GROUPED)]
)
def test_grouped_experts(
    make_layer, monkeypatch: pytest.MonkeyPatch, arch: str, bits: int, tokens: int, k: int, cols: int,
    size: int | None, dtype: torch.dtype, group_size: int,
) -> None:  # fmt: skip
    """Expert 2 is never asked for, some pairs are for experts that are not here, programs run in a random order."""
    experts, x = 5, activations(tokens, cols, dtype)
    options = {"group_size": group_size, "outliers": 0.02 if tokens != 9 else 0.0, "row_scales": tokens in (1, 2, 24)}
    options["scales"] = tokens != 24  # which are coded weights
    layers = [make_layer(bits, 131, cols, seed=seed, midrise=tokens == 5, **options) for seed in range(experts)]
    stack = stack_weights([on(arch, layer, processors=108) for layer in layers])
    generator = torch.Generator().manual_seed(tokens)
    ids = torch.tensor([0, 1, 3, 4, -1, 5])[torch.randint(6, (tokens, k), generator=generator)].int()
    weights = torch.rand(tokens, k, generator=generator)
    size = size or batch_size(tokens, k, experts, [stack])
    monkeypatch.setattr(torch, "empty", poisoned)
    with emulation(arch, order=lambda programs: Random(0).sample(range(programs), programs)):
        routing = route(ids, size, [stack])
        rows = gather(x, routing)
        if tokens > 1:  # the rows of one are views of it
            rows[int(routing.live.sum()) :] = float("nan")
        y = combine(grouped_matmul(rows, stack, routing), weights, routing)
    assert not routing.tickets.any()
    padded, config = 256 * len(routing.expert), decode_config(size, bits, arch, group_size)
    parts, ranges = config.split(size, bits, group_size, padded, stack.superblocks, 108)
    assert (parts > 1, ranges > 1) == (cols == 1536, cols == 2048)
    expected = torch.zeros(tokens, 131, dtype=torch.float64)
    for token, slot in ((ids >= 0) & (ids < experts)).nonzero().tolist():
        expert = int(ids[token, slot])
        product = matmul_reference(x[token : token + 1], layers[expert].dense)[0]
        expected[token] += float(weights[token, slot]) * product
    assert (y - expected).abs().max() <= 2 * ROUNDING[dtype] * expected.abs().max()  # products are rounded, and sums


@pytest.mark.slow
def test_products_mix_no_devices() -> None:
    """From random codes to outputs on a pretended GPU: prepared, padded, multiplied and compared there."""
    with emulated_gpu("sm_90"):
        for case in cases.all_cases(((192, 384),), (3,), (0.0, 0.03), (1, 20, 80, 130)):
            if case.path == "trellis_prefill":
                continue  # the emulator has not all of its instructions on sm_90; test_trellis_emulation.py runs it
            layer = cases.layer_of(case, DEVICE)
            x = torch.randn(case.m, case.cols, device=DEVICE).bfloat16()
            y = cases.product(case)(x, layer.weight)
            assert layer.weight.arch == "sm_90"
            assert y.device == DEVICE
            cases.gate(case, cases.relative_error(y, x, layer.dense))
