"""The Viterbi search of a GPU: the rings of the plain form, and machine code without spills or fused sums."""

import pytest
import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from helpers.kernel_device import DEVICE, EMULATED, INTERPRETED
from helpers.plain_viterbi import plain_rings
from vllm_latq.coding.trellis.code import FACTORS, STEPS
from vllm_latq.kernels.dev.sass import disassemble
from vllm_latq.quantize.lattice.viterbi.gpu import (
    LANES,
    OPTIONS,
    nearest_rings_on_gpu,
    search_constants,
    search_rings,
)
from vllm_latq.quantize.lattice.viterbi.search import REACH


@pytest.mark.kernel
@pytest.mark.skipif(EMULATED is not None, reason="a tile takes minutes in the emulator")
@pytest.mark.parametrize(("rate", "lanes"), [(2, 8192), (9, 32768)])
def test_it_finds_the_ring_that_the_plain_form_finds(rate: int, lanes: int) -> None:
    """In the interpreter with many lanes, because its time goes with the number of operations, whatever their size."""
    targets = torch.randn(1, STEPS, 2, generator=torch.Generator().manual_seed(rate)) / FACTORS[rate]
    targets[:, 64:] = (targets[:, 64:] / 64).round() * 64  # with prices of 1, many costs are equal
    prices = torch.ones_like(targets)
    prices[:, :32] = torch.rand(32, 2, generator=torch.Generator().manual_seed(rate))
    there = (tensor.to(DEVICE) for tensor in (targets, prices))
    found = nearest_rings_on_gpu(*there, rate, REACH, lanes if INTERPRETED else LANES)
    assert found.cpu().equal(plain_rings(targets, prices, rate))


@pytest.mark.compiler
@pytest.mark.parametrize(("arch", "rate"), [(80, 2), (80, 12), (90, 7)])
def test_its_machine_code_neither_spills_nor_fuses(arch: int, rate: int) -> None:
    types = {
        "target_ptr": "*fp32", "price_ptr": "*fp32", "value_ptr": "*fp16", "cost_ptr": "*fp32",
        "back_ptr": "*u8" if rate <= 8 else "*i16", "symbol_ptr": "*i16", "tiles": "i32",
    }  # fmt: skip
    signature = {name: types.get(name, "constexpr") for name in search_rings.arg_names}
    aligned = {(n,): [["tt.divisibility", 16]] for n, name in enumerate(signature) if name.endswith("_ptr")}
    source = ASTSource(search_rings, signature, search_constants(rate, REACH), aligned)
    compiled = triton.compile(source, target=GPUTarget("cuda", arch, 32), options=OPTIONS)
    code = disassemble(compiled.asm["cubin"])
    assert code.spill_bytes() == 0
    assert not [name for _, name, _ in code.instructions if name.startswith("FFMA")]
    # A step of a state is four products, four sums, two conversions, a comparison, a choice and a minimum: 13.
    loop = max((code.instructions[first : last + 1] for first, last in code.loops()), key=products)
    assert len(loop) / (products(loop) / 4) < 19


def products(loop: list[tuple[int, str, str]]) -> int:
    """Count the products of a loop."""
    return sum(name.startswith("FMUL") for _, name, _ in loop)
