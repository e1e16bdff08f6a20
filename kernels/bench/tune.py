"""Search for launch configurations on this machine's GPU and print them: `python -m vllm_latq.kernels.bench --tune`.

The search descends from the table's entry. Each round compiles and times all configurations that differ from the best
in one field, and takes the one with the lowest geometric mean over layers and bit widths. Only configurations whose
products pass the correctness gate are timed. Serving never tunes: the winner is pasted into `configs.py`.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
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
from vllm_latq.kernels.bench.timing import Timer, cache_bytes
from vllm_latq.kernels.configs import REGIMES, SIMT, DecodeConfig, decode_config
from vllm_latq.kernels.decode.dispatch import ssqr_matmul
from vllm_latq.kernels.errors import KernelInputError
from vllm_latq.kernels.layout.weight import KernelWeight

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
TunedLayer = tuple[Case, Layer, Sequence[KernelWeight]]


def _print(line: str) -> None:
    print(line, flush=True)


def neighbours(config: DecodeConfig) -> Iterator[DecodeConfig]:
    """Yield the valid configurations that differ from `config` in one field."""
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
    """Return the configuration that no single change improves, and its cost.

    Args:
        costs: returns the cost of each configuration of a round.
    """
    best, (lowest,) = start, costs([start])
    while True:
        candidates = list(neighbours(best))
        fastest, candidate = min(zip(costs(candidates), candidates, strict=True), key=lambda pair: pair[0])
        if fastest >= 0.99 * lowest:  # a hundredth is noise
            return best, lowest
        best, lowest = candidate, fastest


@dataclass
class Search:
    """Times configurations with random layers, and remembers the time of each.

    Attributes:
        layers: cases, their layers, and copies of their weights that together exceed the cache.
        compilers: compile the launches of a round before the first is timed.
        write: receives a line for each configuration that is faster than all before it.
    """

    layers: Sequence[TunedLayer]
    timer: Timer
    compilers: CompilePool
    write: Callable[[str], None]

    def run(self, start: DecodeConfig, rows: Sequence[int]) -> tuple[DecodeConfig, str]:
        """Descend from `start` with these numbers of activation rows; return the best and a remark on its times."""
        known: dict[DecodeConfig, float] = {}
        best, lowest = descend(start, partial(self._costs, rows, known))
        at = " and ".join(map(str, rows))
        return best, f"{lowest:.1f} us at {at} rows, from {known[start]:.1f}; {len(known)} tried"

    def _costs(
        self, rows: Sequence[int], known: dict[DecodeConfig, float], configs: Sequence[DecodeConfig]
    ) -> list[float]:
        """Return the time of each configuration, microseconds; time those that `known` lacks and add them to it."""
        new = [config for config in configs if config not in known]
        self.compilers.compile(
            partial(ssqr_matmul, activations(m, case.cols, layer.dense.device), layer.weight, config)
            for config in new
            for case, layer, _ in self.layers
            for m in rows
        )
        for config in new:
            fastest = min(known.values(), default=math.inf)
            known[config] = mean_time(config, rows, self.layers, self.timer)
            if known[config] < fastest:
                self.write(f"# {known[config]:.1f} us: {config!r}")
        return [known[config] for config in configs]


def rows_to_tune(start: DecodeConfig) -> tuple[int, ...]:
    """Return the numbers of activation rows that decide a table entry: one row gathers x for outliers, 8 read x^T."""
    if start.kernel == "simt":
        return (1,)
    return (start.max_rows,) if start.max_rows > 8 else (1, 8)


def tune(
    device: torch.device,
    timer: Timer,
    compilers: CompilePool,
    regimes: Sequence[int] = REGIMES,
    write: Callable[[str], None] = _print,
) -> None:
    """Print the best table entry of each regime, ready for `configs.py`; after the entry of 8 rows, the SIMT kernel's.

    Put the new entry before the entries for smaller groups, which the search does not run: some configurations would
    be wrong for them on sm_100 (NOTES.md). Each improvement is printed at once, so an interrupted search is not lost.
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
    search = Search(layers, timer, compilers, write)
    for start in (*starts, *((SIMT,) if 8 in regimes else ())):
        best, remark = search.run(start, rows_to_tune(start))
        best = replace(best, source=f"bench --tune, {name}, Triton {triton.__version__}")
        write(f"{best!r},  # {remark}")


def mean_time(
    config: DecodeConfig,
    rows: Sequence[int],
    layers: Sequence[TunedLayer],
    timer: Timer,
) -> float:
    """Return the geometric mean of microseconds; infinity if the configuration does not run or its product is wrong."""
    times = []
    for (case, layer, weights), m in product(layers, rows):
        x = activations(m, case.cols, layer.dense.device)
        try:
            gate(case, relative_error(ssqr_matmul(x, layer.weight, config), x, layer.dense))
            times.append(timer([partial(ssqr_matmul, x, weight, config) for weight in weights]).median)
        except (TritonError, KernelInputError, RuntimeError):
            if layer.dense.is_cuda:
                torch.cuda.synchronize()  # raises if the GPU's context is lost: no later launch would run
            return math.inf
    return math.exp(sum(math.log(time) for time in times) / len(times))
