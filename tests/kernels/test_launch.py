"""The kernels that launches make Triton compile: real launchers, and tensors without memory on a missing GPU.

They run in a subprocess as far as the compiled kernel, the way a launch on an sm_80 would specialize its arguments.
"""

import os
import subprocess
import sys
from dataclasses import replace
from itertools import product
from pathlib import Path

import pytest
import torch

from vllm_latq.kernels.bench.cases import SHAPES
from vllm_latq.kernels.configs import TABLE, decode_config, split_k
from vllm_latq.kernels.decode.dispatch import padded_columns
from vllm_latq.kernels.decode.launch import Scratch
from vllm_latq.kernels.decode.ssqr import launch_arguments

PROGRAM = Path(__file__).parents[1] / "programs" / "launch_specializations.py"
# How often each kernel is compiled, and why. Shapes of layers and numbers of tokens must add nothing.
TILES = 4  # one row, two rows (without x^T), 3 to 8 (with x^T), 9 to 16
SPECIALIZATIONS = {
    "ssqr_tensor_core": TILES * 2 + 3,  # with split-K and without; and 8, 4 and 2 ranges of columns
    "route_pairs": 6,  # batches of 1, 4, 8, 16, 32 and 64 rows
    "gather_rows": 1,
    "activate_rows": 2,  # two activations
    "ssqr_grouped": 5 * 2,  # for each of these batches, columns that are cut (4096) or whole (512)
    "combine_pairs": 1,
    "ssqr_simt": 2,  # with and without split-K
    "dequantize_tiles": 2,  # with group scales, and coded
    "huffman_chunks": 1,
    "trellis_activations": 2,  # up to 4 rows, and up to 8
    "trellis_tensor_core": 2,
    "trellis_grouped_activations": 2,
    "trellis_grouped": 2 * 2,  # whole columns (512), or cut ones (4096)
}


@pytest.mark.slow
def test_sizes_that_change_while_serving_compile_nothing_new() -> None:
    """For one row of x, two, more, and each wider tile; with split-K and without. Layers differ in shape only."""
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    environment["TRITON_DEFAULT_FP_FUSION"] = "0"  # Triton 3.10's default
    environment["PYTHONPATH"] = os.pathsep.join(sys.path)
    command = [sys.executable, "-W", "ignore", str(PROGRAM)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    compiled = dict(line.split() for line in done.stdout.splitlines())
    assert {name: int(count) for name, count in compiled.items()} == SPECIALIZATIONS


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


# 384 programs where 336 run at once: by the model of the time 3% faster than 192 whole tiles.
CLOSE = {("sm_86", 24576, 4096, 1)}


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
                    close = (arch, rows, cols, m) in CLOSE
                    assert waves == 1 or tiles > slots or full or close
