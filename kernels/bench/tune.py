"""Search for launch configurations on the GPU at hand: what `python -m vllm_latq.kernels.bench --tune` prints.

Descent from the table's entry: of the configurations that differ in one field, the one that makes the geometric mean
over layers and bit widths fastest, and again from there. Those of a round are compiled together. Only configurations
whose products pass the correctness gate are timed. Serving never tunes: the winner is pasted into `configs.py`.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import product
from typing import Any

import torch
import triton
from triton.errors import TritonError

from vllm_latq.kernels.bench.cases import (
    BITS,
    GROUP_SIZE,
    Case,
    Layer,
    activations,
    gate,
    make_layer,
    relative_error,
    rotating,
)
from vllm_latq.kernels.bench.compile_pool import CompilePool
from vllm_latq.kernels.bench.timing import Launch, Timing, cache_bytes
from vllm_latq.kernels.configs import REGIMES, SIMT, DecodeConfig, decode_config
from vllm_latq.kernels.decode.dispatch import ssqr_matmul
from vllm_latq.kernels.errors import KernelInputError

SHAPES = ((4096, 4096), (8192, 8192))
CHOICES: dict[str, tuple[Any, ...]] = {
    "programs_per_processor": (1, 2, 3, 4, 5, 8),  # these two first: they compile nothing
    "min_superblocks": (1, 2, 4, 8),
    "num_warps": (1, 2, 4, 8),
    "block_n": (64, 128),
    "stages": (2, 3, 4, 5),
    "slots": (1, 2, 4, 8, 16),
    "gathers": (8, 16, 32, 64),
    "bias_dot": (False, True),
    "paired": (False, True),
}
TENSOR_CORE_ONLY = ("gathers", "bias_dot", "paired")


def _print(line: str) -> None:
    print(line, flush=True)


def neighbours(config: DecodeConfig) -> Iterator[DecodeConfig]:
    """Valid configurations that differ from `config` in one field."""
    for name, values in CHOICES.items():
        if config.kernel == "simt" and name in TENSOR_CORE_ONLY:
            continue
        if name == "gathers" and config.max_rows > REGIMES[0]:
            continue
        for value in values:
            if value != getattr(config, name):
                yield replace(config, **{name: value})


def descend(
    start: DecodeConfig, costs: Callable[[Sequence[DecodeConfig]], Sequence[float]]
) -> tuple[DecodeConfig, float]:
    """The configuration from which no single change helps, and its cost. `costs`: of the configurations of a round."""
    best, (lowest,) = start, costs([start])
    while True:
        candidates = list(neighbours(best))
        fastest, candidate = min(zip(costs(candidates), candidates, strict=True), key=lambda pair: pair[0])
        if fastest >= 0.99 * lowest:  # a hundredth is noise
            return best, lowest
        best, lowest = candidate, fastest


def tune(
    device: torch.device,
    timer: Callable[[Sequence[Launch]], Timing],
    compilers: CompilePool,
    regimes: Sequence[int] = REGIMES,
    write: Callable[[str], None] = _print,
) -> None:
    """Print the best entry of each regime, ready for `configs.py`; with that of 8 rows, the SIMT kernel's.

    It belongs in front of those for smaller groups, with which it has not been run: some would be wrong on sm_100
    (NOTES.md). Each better one is printed when it is found, so a search that is cut short is not lost.
    """
    layers = []
    for features, cols in SHAPES:
        for bits in BITS:
            case = Case(features, cols, bits, 0.01, 1, "tensor_core")
            layer = make_layer(case, device)
            layers.append((case, layer, rotating(layer.weight, cache_bytes(device))))
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else str(device)
    write(f"# {name}, torch {torch.__version__}: geometric mean over {SHAPES}, {BITS} bits")
    arch = layers[0][1].weight.arch
    starts = [replace(decode_config(most, 4, arch), min_group=GROUP_SIZE) for most in regimes]
    for start in (*starts, *((SIMT,) if 8 in regimes else ())):
        # One row gathers x for its outliers, eight read x^T.
        rows = (start.max_rows,) if start.max_rows > 8 else (1,) if start.kernel == "simt" else (1, 8)
        known: dict[DecodeConfig, float] = {}

        def costs(
            configs: Sequence[DecodeConfig],
            rows: Sequence[int] = rows,
            known: dict[DecodeConfig, float] = known,
        ) -> list[float]:
            new = [config for config in configs if config not in known]
            compilers.compile(
                partial(ssqr_matmul, activations(m, case.cols, device), layer.weight, config)
                for config in new
                for case, layer, _ in layers
                for m in rows
            )
            for config in new:
                fastest = min(known.values(), default=math.inf)
                known[config] = mean_time(config, rows, layers, timer)
                if known[config] < fastest:
                    write(f"# {known[config]:.1f} us: {config!r}")
            return [known[config] for config in configs]

        best, lowest = descend(start, costs)
        best = replace(best, source=f"bench --tune, {name}, Triton {triton.__version__}")
        at = " and ".join(map(str, rows))
        write(f"{best!r},  # {lowest:.1f} us at {at} rows, from {known[start]:.1f}; {len(known)} tried")


def mean_time(
    config: DecodeConfig,
    rows: Sequence[int],
    layers: Sequence[tuple[Case, Layer, Sequence[Any]]],
    timer: Callable[[Sequence[Launch]], Timing],
) -> float:
    """Geometric mean of microseconds; infinite where the configuration does not compile or fit, or is wrong."""
    times = []
    for (case, layer, weights), m in product(layers, rows):
        x = activations(m, case.cols, layer.dense.device)
        try:
            gate(case, relative_error(ssqr_matmul(x, layer.weight, config), x, layer.dense))
            times.append(timer([partial(ssqr_matmul, x, weight, config) for weight in weights]).median)
        except (TritonError, KernelInputError, RuntimeError):
            if layer.dense.is_cuda:
                torch.cuda.synchronize()  # raises if the GPU's context is lost, and nothing would run any more
            return math.inf
    return math.exp(sum(math.log(time) for time in times) / len(times))
