"""What launches make Triton compile: the real launchers, on tensors without memory of a GPU that is not there.

They run in a subprocess as far as the compiled kernel, the way a launch on an sm_80 would specialize its arguments.
"""

import os
import subprocess
import sys
from dataclasses import replace

import pytest
import torch

from vllm_latq.kernels.cases import SHAPES
from vllm_latq.kernels.configs import TABLE, DecodeConfig, decode_config, split_k
from vllm_latq.kernels.dispatch import padded_columns
from vllm_latq.kernels.errors import KernelInputError
from vllm_latq.kernels.ssqr import launch_arguments

SCRIPT = """
import contextlib, dataclasses
from collections import defaultdict
import torch, triton
from torch._subclasses.fake_tensor import FakeTensorMode
from triton.backends.compiler import GPUTarget
from triton.runtime.jit import JITFunction, MockTensor
from vllm_latq.kernels.configs import GATHER_ROWS, SIMT, decode_config
from vllm_latq.kernels.dequantize import launch_dequantize
from vllm_latq.kernels.grouped import activate, combine, gather, grouped_matmul
from vllm_latq.kernels.huffman import launch_huffman
from vllm_latq.kernels.rans import launch_rans
from vllm_latq.kernels.routing import batch_size, route
from vllm_latq.kernels.simt import launch_simt
from vllm_latq.kernels.ssqr import launch_ssqr
from vllm_latq.kernels.weight import prepare

class Driver:
    get_current_device = get_current_stream = lambda self, *_: 0
    get_current_target = lambda self: GPUTarget("cuda", 80, 32)

class Pointer(MockTensor):
    def __init__(self, tensor):
        super().__init__(tensor.dtype)
        self.offset = tensor.storage_offset() * tensor.itemsize

    def data_ptr(self):
        return self.offset

launch, compiled = JITFunction.run, defaultdict(set)

def dry(self, *arguments, grid, warmup, **options):
    arguments = [Pointer(a) if isinstance(a, torch.Tensor) else a for a in arguments]
    kernel = launch(self, *arguments, grid=grid, warmup=True, **options)
    compiled[self.__name__].add(kernel.hash)
    assert kernel.metadata.enable_fp_fusion

triton.runtime.driver.set_active(Driver())
JITFunction.run = dry
torch.cuda.device_of = contextlib.nullcontext

def empty(dtype, *shape):
    return torch.empty(shape, dtype=dtype, device="cuda")

def on_gpu(rows, cols, coded=False):
    csr = torch.arange(rows + 1, dtype=torch.int32), torch.zeros(rows, dtype=torch.int32), torch.full((rows,), 5.0)
    words, scales = torch.zeros(rows, cols // 16, dtype=torch.int32), torch.ones(rows, cols // 128).bfloat16()
    weight = prepare(words, 2, 128, cols, None if coded else scales, None, *csr)
    tensors = {f.name: getattr(weight, f.name) for f in dataclasses.fields(weight)}
    tensors = {name: t for name, t in tensors.items() if isinstance(t, torch.Tensor)}
    with FakeTensorMode():
        return dataclasses.replace(weight, **{name: empty(t.dtype, *t.shape) for name, t in tensors.items()})

weights = [on_gpu(100, 256), on_gpu(256, 4096), on_gpu(64, 512)]
coded = [on_gpu(100, 512, coded=True), on_gpu(256, 4096, coded=True)]
with FakeTensorMode():
    for m in (1, 2, 3, 4, 9, 16):
        for weight, parts in zip(weights, (1, 16, 2)):
            config, bf16 = decode_config(m, 2), torch.bfloat16
            x, y = empty(bf16, m, weight.cols), empty(bf16, m, weight.rows)
            partials = empty(torch.float32, 1) if parts > 1 else None
            transposed = empty(bf16, weight.cols, config.max_rows) if m > GATHER_ROWS else None
            launch_ssqr(x, weight, y, partials, transposed, config, parts)
            if m in (3, 4):
                launch_simt(x, weight, y, partials, SIMT, parts)
    for weight in weights + coded:
        for first in range(2):
            launch_dequantize(weight, empty(torch.bfloat16, 128, weight.cols), first, 1)
    ints = lambda *shape: empty(torch.int32, *shape)
    for weight in weights[1:]:
        tensors = {name: t for name, t in vars(weight).items() if isinstance(t, torch.Tensor)}
        stacks = {name: empty(t.dtype, 8, *t.shape) for name, t in tensors.items()}
        stack = dataclasses.replace(weight, processors=108, **stacks)
        for tokens in (1, 2, 3, 9, 32, 64, 90):  # batches of 1, 8, 8, 8, 16, 32 and 64 rows
            ids = ints(tokens, 2)
            routing = route(ids, batch_size(*ids.shape, 8, [stack]), [stack])
            x, scales = empty(torch.bfloat16, tokens, stack.cols), empty(torch.float32, 8, stack.cols)
            grouped_matmul(gather(x, scales, routing), stack, routing)
            y = grouped_matmul(gather(x, None, routing), stack, routing)
            for activation in ("silu", "relu2_no_mul"):
                activate(y, activation, None, routing)
                activate(y, activation, scales, routing)
            combine(y, empty(torch.float32, tokens, 2), routing)
    for rows, cols in ((1, 1), (160, 4096), (17, 100)):
        starts, used, z = empty(torch.int64, 16), ints(16), ints(rows, cols)
        launch_huffman(ints(cols), ints(1 << 15), starts, used, z, (rows, cols), -rows, rows)
        slots = empty(torch.int64, rows, 4096)
        launch_rans(ints(cols), slots, ints(rows), ints(cols), starts, used, used, z, (rows, cols))
for name, kernels in compiled.items():
    print(name, len(kernels))
"""


def test_sizes_that_change_while_serving_compile_nothing_new() -> None:
    """For one row of x, two, more, and each wider tile; with split-K and without. Layers differ in shape only."""
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    environment["TRITON_DEFAULT_FP_FUSION"] = "0"  # Triton 3.10's default
    command = [sys.executable, "-W", "ignore", "-c", SCRIPT]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    compiled = dict(line.split() for line in done.stdout.splitlines())
    assert {name: int(count) for name, count in compiled.items()} == {
        "ssqr_tensor_core": 4 * 2,
        "route_pairs": 5,
        "gather_rows": 2,
        "activate_rows": 2 * 2,
        "ssqr_grouped": 5 * 2,
        "combine_pairs": 1,
        "ssqr_simt": 2,
        "dequantize_tiles": 2,
        "scatter_outliers": 1,
        "write_beyond": 1,
        "huffman_chunks": 1,
        "rans_chunks": 1,
    }


def test_writers_of_transposed_activations_fit_their_counter(make_layer) -> None:
    """One for each piece of 65536 columns would be 2048, which the counter's 11 bits hold as none."""
    wide = {"cols": 1 << 16, "order": torch.empty(1 << 18, device="meta"), "processors": 1 << 16}
    weight, config = replace(make_layer(3, 64, 256).weight, **wide), decode_config(64, 3)
    x, transposed = (torch.empty(64, 1 << 16, dtype=torch.float16, device="meta") for _ in range(2))
    _, (*_, writers), _ = launch_arguments(x, weight, x, None, transposed.view(1 << 16, 64), config, 1, 64)
    assert writers == 2047


def test_no_copy_where_no_column_is_missing(make_layer) -> None:
    x = torch.randn(2, 512).half()
    assert padded_columns(x, make_layer(3, 64, 512).weight) is x
    assert padded_columns(x[:, :384], make_layer(3, 64, 384).weight).shape == (2, 512)


def test_refuses_tiles_that_do_not_divide_the_padded_rows() -> None:
    """128 rows would otherwise make no tile of 256 at all, and y would stay unwritten."""
    with pytest.raises(KernelInputError, match="64 or 128, which divide the padded rows"):
        DecodeConfig(max_rows=8, block_n=256, num_warps=4, stages=3, bias_dot=True)


@pytest.mark.parametrize("superblocks", [1, 2, 7, 16, 48])
@pytest.mark.parametrize("slots", [1, 84, 660])
def test_no_part_of_split_k_is_empty(superblocks: int, slots: int) -> None:
    for tiles in (1, 32, 192):
        for least in (1, 2, 4):
            parts = split_k(tiles, superblocks, slots, least)
            share = -(-superblocks // parts)
            assert (parts - 1) * share < superblocks <= parts * share
            assert parts == 1 or share >= least


@pytest.mark.parametrize(("arch", "processors"), [("sm_80", 108), ("sm_86", 84), ("sm_90", 132), ("sm_100", 148)])
def test_no_wave_of_a_few_programs(arch: str, processors: int) -> None:
    """Where the tiles run at once, their parts do, too: no second wave that a few programs have to themselves."""
    for config in TABLE[arch]:
        for bits in (2, 3, 4):
            for rows, cols in SHAPES:
                tiles, slots = rows // config.block_n, processors * config.programs(bits, 128)
                parts = config.parts(bits, 128, rows, cols // 256, processors)
                waves = -(-tiles * parts // slots)
                assert waves == 1 or tiles > slots or tiles * parts > 0.85 * waves * slots
