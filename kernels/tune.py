"""Search for launch configurations on the GPU at hand: what `python -m vllm_latq.kernels.bench --tune` prints.

Coordinate descent from the table's entry: one field at a time, kept if it makes the geometric mean over layers and bit
widths faster. Only configurations whose products pass the correctness gate are timed. Serving never tunes: the winner
is pasted into `configs.py`.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import triton
from triton.errors import TritonError

from vllm_latq.kernels.cases import BITS, GROUP_SIZE, Case, Layer, copy_weight, gate, make_layer, relative_error
from vllm_latq.kernels.configs import REGIMES, SIMT, DecodeConfig, decode_config
from vllm_latq.kernels.dispatch import ssqr_matmul
from vllm_latq.kernels.errors import KernelInputError
from vllm_latq.kernels.layout import ROW_ALIGN
from vllm_latq.kernels.timing import Launch, Timing, cache_bytes, copies_beyond_cache

SHAPES = ((4096, 4096), (8192, 8192))
CHOICES: dict[str, tuple[Any, ...]] = {
    "programs_per_processor": (1, 2, 3, 4, 5, 8),  # these two first: they compile nothing
    "min_superblocks": (1, 2, 4, 8),
    "num_warps": (1, 2, 4, 8),
    "block_n": (64, 128),
    "stages": (2, 3, 4, 5),
    "slots": (1, 2, 4, 8, 16),
    "bias_dot": (False, True),
    "paired": (False, True),
}


def _print(line: str) -> None:
    print(line, flush=True)


def neighbours(config: DecodeConfig) -> Iterator[DecodeConfig]:
    """Valid configurations that differ from `config` in one field."""
    for name, values in CHOICES.items():
        for value in values:
            if value != getattr(config, name) and (name != "block_n" or ROW_ALIGN % value == 0):
                yield replace(config, **{name: value})


def descend(start: DecodeConfig, cost: Callable[[DecodeConfig], float]) -> tuple[DecodeConfig, float]:
    """The configuration from which no single change helps, and its cost."""
    best, lowest, improved = start, cost(start), True
    while improved:
        improved = False
        for candidate in neighbours(best):
            found = cost(candidate)
            if found < 0.99 * lowest:  # a hundredth is noise
                best, lowest, improved = candidate, found, True
                break
    return best, lowest


def tune(
    device: torch.device,
    timer: Callable[[Sequence[Launch]], Timing],
    regimes: Sequence[int] = REGIMES,
    write: Callable[[str], None] = _print,
) -> None:
    """Print the best entry of each regime, ready for `configs.py`; with that of 8 rows, the SIMT kernel's.

    It belongs in front of those for smaller groups, with which it has not been run: some would be wrong on sm_100
    (NOTES.md). Each better one is printed when it is found, so a search that is cut short is not lost.
    """
    layers = []
    for rows, cols in SHAPES:
        for bits in BITS:
            case = Case(rows, cols, bits, 0.01, 1, "tensor_core")
            layer = make_layer(case, device)
            copies = copies_beyond_cache(layer.weight.storage_bytes(), cache_bytes(device))
            layers.append((case, layer, [copy_weight(layer.weight) for _ in range(copies)]))
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else str(device)
    write(f"# {name}, torch {torch.__version__}: geometric mean over {SHAPES}, {BITS} bits")
    arch = layers[0][1].weight.arch
    starts = [replace(decode_config(rows, 4, arch), min_group=GROUP_SIZE) for rows in regimes]
    for start in (*starts, *((SIMT,) if 8 in regimes else ())):
        m = 1 if start.max_rows == 8 else start.max_rows
        known: dict[DecodeConfig, float] = {}

        def cost(config: DecodeConfig, m: int = m, known: dict[DecodeConfig, float] = known) -> float:
            if config not in known:
                fastest = min(known.values(), default=math.inf)
                known[config] = mean_time(config, m, layers, timer)
                if known[config] < fastest:
                    write(f"# {known[config]:.1f} us: {config!r}")
            return known[config]

        first = cost(start)
        best, lowest = descend(start, cost)
        best = replace(best, source=f"bench --tune, {name}, Triton {triton.__version__}")
        write(f"{best!r},  # {lowest:.1f} us at {m} rows, from {first:.1f}; {len(known)} tried")


def mean_time(
    config: DecodeConfig,
    m: int,
    layers: Sequence[tuple[Case, Layer, Sequence[Any]]],
    timer: Callable[[Sequence[Launch]], Timing],
) -> float:
    """Geometric mean of microseconds; infinite where the configuration does not compile or fit, or is wrong."""
    times = []
    for case, layer, weights in layers:
        x = torch.randn(m, case.cols, device=layer.dense.device).bfloat16()
        try:
            gate(case, relative_error(ssqr_matmul(x, layer.weight, config), x, layer.dense))
            times.append(timer([partial(ssqr_matmul, x, weight, config) for weight in weights]).median)
        except (TritonError, KernelInputError, RuntimeError):
            if layer.dense.is_cuda:
                torch.cuda.synchronize()  # raises if the GPU's context is lost, and nothing would run any more
            return math.inf
    return math.exp(sum(math.log(time) for time in times) / len(times))
