"""What launches make Triton compile: the real launchers, on tensors without memory of a GPU that is not there.

They run in a subprocess as far as the compiled kernel, the way a launch on an sm_80 would specialize its arguments.
"""

import os
import subprocess
import sys
from dataclasses import replace
from itertools import product

import pytest
import torch

from vllm_latq.kernels.bench.cases import SHAPES
from vllm_latq.kernels.configs import TABLE, decode_config, split_k
from vllm_latq.kernels.decode.dispatch import padded_columns
from vllm_latq.kernels.decode.launch import Scratch
from vllm_latq.kernels.decode.ssqr import launch_arguments

SCRIPT = """
import dataclasses
from collections import defaultdict
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from triton import knobs
from helpers.dry_launch import empty, on_gpu, pretend_driver
from vllm_latq.kernels.configs import GATHER_ROWS, SIMT, decode_config
from vllm_latq.kernels.decode.prefill import launch_dequantize
from vllm_latq.kernels.experts.grouped import grouped_matmul
from vllm_latq.kernels.dev.audit import HUFFMAN, RANS
from vllm_latq.kernels.entropy.chunks import Cut
from vllm_latq.kernels.entropy.huffman import launch_huffman
from vllm_latq.kernels.entropy.rans import launch_rans
from vllm_latq.kernels.experts.routing import batch_size, route
from vllm_latq.kernels.experts.rows import activate, combine, gather
from vllm_latq.kernels.decode.launch import Scratch
from vllm_latq.kernels.decode.simt import launch_simt
from vllm_latq.kernels.decode.ssqr import launch_ssqr

compiled = defaultdict(set)

def note(*, src, metadata, **_):
    compiled[src.fn.__name__].add(metadata["hash"])
    assert metadata["enable_fp_fusion"]

knobs.compilation.listener = note
pretend_driver()
weights = [on_gpu(100, 256), on_gpu(256, 4096), on_gpu(64, 512)]
shorter = on_gpu(128, 8192)
coded = [on_gpu(100, 512, coded=True), on_gpu(256, 4096, coded=True)]
with FakeTensorMode():
    for m in (1, 2, 3, 4, 9, 16):
        for weight, parts in zip(weights, (1, 16, 2)):
            config, bf16 = decode_config(m, 2), torch.bfloat16
            x, y = empty(bf16, m, weight.cols), empty(bf16, m, weight.rows)
            partials = empty(torch.float32, 1) if parts > 1 else None
            transposed = empty(bf16, weight.cols, config.max_rows) if m > GATHER_ROWS else None
            launch_ssqr(x, weight, y, config, Scratch(parts, 1, partials, transposed))
            if weight.cols == 4096 and m <= 4:
                ranges = 8 >> (m - 1).bit_length()
                launch_ssqr(x, weight, y, config, Scratch(1, ranges, None, transposed))
                launch_ssqr(x, shorter, y, config, Scratch(1, ranges, None, transposed))
            if m in (3, 4):
                launch_simt(x, weight, y, SIMT, Scratch(parts, 1, partials))
    for weight in weights + coded:
        for first in (0, 2):
            launch_dequantize(weight, empty(torch.bfloat16, 128, weight.cols), first, 2)
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
        cut = Cut(rows, cols, rows, cols)
        launch_huffman(ints(cols), ints(1 << 15), (-rows, rows), starts, used, z, cut, HUFFMAN)
        slots = empty(torch.int64, rows, 4096)
        launch_rans(ints(cols), slots, (ints(rows), ints(cols)), starts, (used, used), z, cut, RANS)
for name, kernels in compiled.items():
    print(name, len(kernels))
"""


def test_sizes_that_change_while_serving_compile_nothing_new() -> None:
    """For one row of x, two, more, and each wider tile; with split-K and without. Layers differ in shape only."""
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    environment["TRITON_DEFAULT_FP_FUSION"] = "0"  # Triton 3.10's default
    environment["PYTHONPATH"] = os.pathsep.join(sys.path)
    command = [sys.executable, "-W", "ignore", "-c", SCRIPT]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    compiled = dict(line.split() for line in done.stdout.splitlines())
    assert {name: int(count) for name, count in compiled.items()} == {
        "ssqr_tensor_core": 4 * 2 + 3,
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
    scratch = Scratch(transposed=transposed.view(1 << 16, 64))
    _, arguments = launch_arguments(x, weight, x, config, scratch, 64)
    assert arguments["writers"] == 2047


def test_no_copy_where_no_column_is_missing(make_layer) -> None:
    x = torch.randn(2, 512).half()
    assert padded_columns(x, make_layer(3, 64, 512).weight) is x
    assert padded_columns(x[:, :384], make_layer(3, 64, 384).weight).shape == (2, 512)


@pytest.mark.parametrize("superblocks", [1, 2, 5, 7, 10, 16, 20, 48, 56])
@pytest.mark.parametrize(("processors", "programs"), [(1, 1), (84, 1), (132, 5)])
def test_no_part_of_split_k_is_empty(superblocks: int, processors: int, programs: int) -> None:
    for tiles, least, most_ranges in product((1, 32, 192), (1, 2, 4), (1, 2, 8)):
        parts, ranges = split_k(tiles, superblocks, processors, programs, least, most_ranges)
        share = -(-superblocks // (parts * ranges))
        assert (parts * ranges - 1) * share < superblocks <= parts * ranges * share
        assert parts <= -(-superblocks // min(least, superblocks))
        assert share >= min(least, superblocks) or (ranges == 1 and superblocks % least)
        assert ranges <= most_ranges
        assert ranges == 1 or (parts == 1 and superblocks % ranges == 0)


def test_ranges_of_any_number_of_superblocks() -> None:
    """20 in four ranges of five, 10 in two, 56 in eight of seven; not 10 in four, nor 2 in two of fewer than two."""
    assert split_k(80, 20, 132, 3, 2, 8) == (1, 4)
    assert split_k(152, 10, 132, 3, 2, 8) == (1, 2)
    assert split_k(32, 56, 132, 3, 2, 8) == (1, 8)
    assert split_k(32, 2, 132, 3, 2, 8) == (1, 1)


# Microseconds on an H200 of (parts, ranges) of tiles of 128 features, 3 bits, 1% outliers.
TIMES = [
    (1, 8192, 8192, {(1, 2): 17.9, (1, 4): 13.7, (1, 8): 13.8, (4, 1): 14.0, (6, 1): 14.6, (8, 1): 14.3}),
    (1, 24576, 4096, {(1, 1): 22.7, (1, 2): 18.1, (1, 4): 19.8, (1, 8): 20.4, (2, 1): 18.0, (4, 1): 21.3}),
    (1, 4096, 4096, {(1, 2): 10.3, (1, 4): 7.4, (1, 8): 6.2, (4, 1): 7.7, (6, 1): 8.1, (8, 1): 7.4}),
    (1, 4096, 12288, {(1, 4): 14.2, (1, 8): 11.2, (6, 1): 14.0, (8, 1): 11.9, (12, 1): 11.9}),
    (1, 6144, 4096, {(1, 2): 10.5, (1, 4): 8.8, (1, 8): 7.6, (4, 1): 9.1, (6, 1): 8.9, (8, 1): 8.5}),
    (2, 8192, 8192, {(1, 2): 21.4, (1, 4): 16.0, (4, 1): 16.3, (6, 1): 17.3, (8, 1): 16.7}),
    (2, 4096, 12288, {(1, 2): 28.4, (1, 4): 16.8, (6, 1): 16.2, (8, 1): 13.9, (12, 1): 14.2}),
    (2, 6144, 4096, {(1, 2): 12.6, (1, 4): 9.9, (4, 1): 10.4, (6, 1): 10.0, (8, 1): 9.9}),
    (4, 8192, 8192, {(1, 2): 21.3, (4, 1): 17.1, (6, 1): 16.9, (8, 1): 16.5}),
    (4, 24576, 4096, {(1, 2): 20.5, (2, 1): 21.6}),
    (8, 8192, 8192, {(2, 1): 23.3, (3, 1): 20.3, (4, 1): 17.8, (6, 1): 17.5, (8, 1): 16.9}),
    (8, 24576, 4096, {(1, 1): 27.7, (2, 1): 22.2, (4, 1): 27.7, (6, 1): 26.4, (8, 1): 29.1}),
    (8, 4096, 4096, {(3, 1): 11.3, (4, 1): 9.6, (6, 1): 9.7, (8, 1): 8.8}),
    (8, 4096, 12288, {(3, 1): 22.8, (4, 1): 18.7, (6, 1): 16.8, (8, 1): 14.9, (12, 1): 14.9}),
    (8, 6144, 4096, {(2, 1): 14.3, (3, 1): 13.1, (4, 1): 11.1, (6, 1): 10.9, (8, 1): 10.3}),
]


@pytest.mark.parametrize(("m", "rows", "cols", "times"), TIMES)
def test_chooses_what_was_fast(m: int, rows: int, cols: int, times: dict[tuple[int, int], float]) -> None:
    config = replace(TABLE["sm_90"][0], block_n=128, num_warps=4, programs_per_processor=3)  # with every Triton
    assert times[config.split(m, 3, 128, rows, cols // 256, 132)] <= 1.06 * min(times.values())


@pytest.mark.parametrize(("arch", "processors"), [("sm_80", 108), ("sm_86", 84), ("sm_90", 132), ("sm_100", 148)])
def test_no_wave_of_a_few_programs(arch: str, processors: int) -> None:
    """Where the tiles run at once, their parts do, too: no second wave that a few programs have to themselves."""
    for config in TABLE[arch]:
        for bits in (2, 3, 4):
            for rows, cols in SHAPES:
                tiles, slots = rows // config.block_n, processors * config.programs(bits, 128)
                for m in (1, config.max_rows):
                    programs = tiles * max(config.split(m, bits, 128, rows, cols // 256, processors))
                    waves, last = -(-programs // slots), (programs - 1) % slots + 1
                    full = programs > 0.75 * waves * slots or last > 0.75 * processors
                    assert waves == 1 or tiles > slots or full
