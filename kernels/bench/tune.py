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
from typing import Any, TypeVar

import torch
import triton
from triton.errors import TritonError

from vllm_latq.kernels.bench.cases import (
    BITS,
    GROUP_SIZE,
    KEPT_RATE,
    Case,
    Layer,
    activations,
    gate,
    layer_of,
    relative_error,
    rotating,
)
from vllm_latq.kernels.bench.compile_pool import CompilePool
from vllm_latq.kernels.bench.timing import Timer, cache_bytes
from vllm_latq.kernels.configs import REGIMES, SIMT, TRELLIS, DecodeConfig, TrellisConfig, decode_config
from vllm_latq.kernels.decode.dispatch import ssqr_matmul, trellis_matmul
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
TRELLIS_CHOICES: dict[str, tuple[Any, ...]] = {
    "programs_per_processor": (2, 3, 4, 5, 6, 8),
    "least_units": (1, 2, 4, 8),
    "stages": (2, 3, 4, 5),
}
TunedLayer = tuple[Case, Layer[Any], Sequence[Any]]
Config = TypeVar("Config", DecodeConfig, TrellisConfig)


def _print(line: str) -> None:
    print(line, flush=True)


def multiply(x: torch.Tensor, weight: Any, config: DecodeConfig | TrellisConfig) -> torch.Tensor:
    """Return the product that a configuration launches."""
    if isinstance(config, TrellisConfig):
        return trellis_matmul(x, weight, config)
    return ssqr_matmul(x, weight, config)


def choices(config: DecodeConfig | TrellisConfig) -> Iterator[tuple[str, tuple[Any, ...]]]:
    """Yield the fields that matter to the kernel of `config`, and their values."""
    if isinstance(config, TrellisConfig):
        yield from TRELLIS_CHOICES.items()
        return
    for name, values in CHOICES.items():
        if config.kernel == "simt" and name in TENSOR_CORE_ONLY:
            continue
        if name == "gathers" and config.max_rows > REGIMES[0]:
            continue
        yield name, values


def neighbours(config: Config) -> Iterator[Config]:
    """Yield the valid configurations that differ from `config` in one field."""
    for name, values in choices(config):
        for value in values:
            if value != getattr(config, name):
                yield replace(config, **{name: value})


def descend(start: Config, costs: Callable[[Sequence[Config]], Sequence[float]]) -> tuple[Config, float]:
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

    def run(self, start: Config, rows: Sequence[int]) -> tuple[Config, str]:
        """Descend from `start` with these numbers of activation rows; return the best and a remark on its times."""
        known: dict[Config, float] = {}
        best, lowest = descend(start, partial(self._costs, rows, known))
        at = " and ".join(map(str, rows))
        return best, f"{lowest:.1f} us at {at} rows, from {known[start]:.1f}; {len(known)} tried"

    def _costs(self, rows: Sequence[int], known: dict[Config, float], configs: Sequence[Config]) -> list[float]:
        """Return the time of each configuration, microseconds; time those that `known` lacks and add them to it."""
        new = [config for config in configs if config not in known]
        self.compilers.compile(
            partial(multiply, activations(m, case.cols, layer.dense.device), layer.weight, config)
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


def rows_to_tune(start: DecodeConfig | TrellisConfig) -> tuple[int, ...]:
    """Return the numbers of activation rows that decide a table entry: one row gathers x for outliers, 8 read x^T."""
    if isinstance(start, TrellisConfig):
        return (1, 8)
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
    """Print the best table entry of each regime, ready for `configs.py`; after the entry of 8 rows, the SIMT kernel's
    and that of trellis codes.

    Put the new entry before the entries for smaller groups, which the search does not run: some configurations would
    be wrong for them on sm_100 (NOTES.md). Each improvement is printed at once, so an interrupted search is not lost.
    """
    layers = tuned_layers(device, "tensor_core", 0.01)
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else str(device)
    write(f"# {name}, torch {torch.__version__}: geometric mean over {SHAPES}, {BITS} bits")
    arch = layers[0][1].weight.arch
    starts = [replace(decode_config(most, 4, arch), min_group=GROUP_SIZE) for most in regimes]
    search = Search(layers, timer, compilers, write)
    for start in (*starts, *((SIMT,) if 8 in regimes else ())):
        best, remark = search.run(start, rows_to_tune(start))
        best = replace(best, source=f"bench --tune, {name}, Triton {triton.__version__}")
        write(f"{best!r},  # {remark}")
    if 8 in regimes:
        trellis = Search(tuned_layers(device, "trellis", KEPT_RATE), timer, compilers, write)
        write("{!r}  # {}".format(*trellis.run(TRELLIS, rows_to_tune(TRELLIS))))


def tuned_layers(device: torch.device, path: str, rate: float) -> list[TunedLayer]:
    """Return random layers of every shape and width, with a rate of outliers."""
    layers: list[TunedLayer] = []
    for features, cols in SHAPES:
        for bits in BITS:
            case = Case(features, cols, bits, rate, 1, path)
            layer = layer_of(case, device)
            layers.append((case, layer, rotating(layer.weight, cache_bytes(device))))
    return layers


def mean_time(
    config: DecodeConfig | TrellisConfig,
    rows: Sequence[int],
    layers: Sequence[TunedLayer],
    timer: Timer,
) -> float:
    """Return the geometric mean of microseconds; infinity if the configuration does not run or its product is wrong."""
    times = []
    for (case, layer, weights), m in product(layers, rows):
        x = activations(m, case.cols, layer.dense.device)
        try:
            gate(case, relative_error(multiply(x, layer.weight, config), x, layer.dense))
            times.append(timer([partial(multiply, x, weight, config) for weight in weights]).median)
        except (TritonError, KernelInputError, RuntimeError):
            if layer.dense.is_cuda:
                torch.cuda.synchronize()  # raises if the GPU's context is lost: no later launch would run
            return math.inf
    return math.exp(sum(math.log(time) for time in times) / len(times))
