"""Search for launch configurations on this machine's GPU: `python -m vllm_latq.kernels.bench --tune`.

The search descends from the table's row. It compiles and times configurations that differ from the best in one field,
those first that the static model expects to be fast, and moves to one with a lower geometric mean over layers and bit
widths. Only configurations whose products pass the correctness gate are timed. Serving never tunes: the rows that the
search found are written into `kernels/tuned.json`, which `configs.py` reads.
"""

import json
import math
import os
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from datetime import date
from functools import partial
from itertools import product
from pathlib import Path
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
from vllm_latq.kernels.bench.compile_pool import CompilePool, available_processes
from vllm_latq.kernels.bench.processor import MULTIPROCESSORS
from vllm_latq.kernels.bench.timing import Timer, cache_bytes
from vllm_latq.kernels.configs import REGIMES, SIMT, TRELLIS, TUNED, DecodeConfig, TrellisConfig, decode_config
from vllm_latq.kernels.decode.dispatch import ssqr_matmul, trellis_matmul
from vllm_latq.kernels.errors import KernelInputError, require
from vllm_latq.kernels.layout.weight import HIP, device_facts

MINUTES = 10.0
NOISE = 0.01  # differences of times below this are noise
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
    "spread": (False, True),
}
TENSOR_CORE_ONLY = ("gathers", "bias_dot", "paired", "spread")
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
        if name in ("gathers", "slots") and config.spread:
            continue
        yield name, values


def neighbours(config: Config) -> Iterator[Config]:
    """Yield the valid configurations that differ from `config` in one field."""
    for name, values in choices(config):
        for value in values:
            if value != getattr(config, name):
                yield replace(config, **{name: value})


def predicted(config: DecodeConfig | TrellisConfig, arch: str = "", bits: int = 3) -> float:
    """Return a number that is lower for configurations that should be faster: it decides the order of a search only.

    More warps on a multiprocessor hide more latency, and fewer features per warp take more instructions per weight.
    The constants fit registers and instructions of compiled kernels of Ampere (NOTES.md, "Residency on Ampere").
    """
    if isinstance(config, TrellisConfig) or config.kernel == "simt":
        return 0.0
    features = config.block_n / config.num_warps
    instructions = 1.24 + 1.1 * config.max_rows / features
    registers = round(75 + features * bits * 3 / 8 + features * config.max_rows / 16)
    shared = config.shared_bytes(bits, GROUP_SIZE)
    processor = MULTIPROCESSORS.get(arch, MULTIPROCESSORS["sm_86"])
    warps = config.num_warps * processor.resident_programs(config.num_warps, min(registers, 255), shared)
    spills = max(1.0, registers / 255)
    return instructions * spills * (1 + 8 / warps) if warps else math.inf


def descend(
    start: Config,
    costs: Callable[[Sequence[Config]], Sequence[float]],
    order: Callable[[Config], float] = predicted,
    batch: int = 8,
) -> tuple[Config, float]:
    """Return a configuration that no single change improves, and its cost.

    Args:
        start: where the search begins.
        costs: returns the cost of each configuration of a batch; infinity for what is not to be taken.
        order: which neighbours are tried first: the lowest.
        batch: configurations whose costs are asked for at once.
    """
    best, (lowest,) = start, costs([start])
    moved = True
    while moved:
        moved = False
        candidates = sorted(neighbours(best), key=order)
        for first in range(0, len(candidates), batch):
            tried = candidates[first : first + batch]
            fastest, candidate = min(zip(costs(tried), tried, strict=True), key=lambda pair: pair[0])
            if fastest < (1 - NOISE) * lowest:
                best, lowest, moved = candidate, fastest, True
                break
    return best, lowest


@dataclass
class Search:
    """Times configurations with random layers, and remembers the time of each.

    Attributes:
        layers: cases, their layers, and copies of their weights that together exceed the cache.
        compilers: compile the launches of a batch before the first is timed.
        write: receives a line for each configuration that is faster than all before it.
        pace: most seconds that a configuration has taken, compiled and timed: so many are begun as should end in time.
    """

    layers: Sequence[TunedLayer]
    timer: Timer
    compilers: CompilePool
    write: Callable[[str], None]
    pace: float = field(default=0.0, init=False)

    def run(self, start: Config, rows: Sequence[int], deadline: float = math.inf) -> tuple[Config, float, str]:
        """Descend from `start` with these numbers of activation rows, until `deadline` of `time.monotonic` at most.

        Returns:
            The best configuration, its microseconds, and a remark on the times.
        """
        known: dict[Config, float] = {}
        order = partial(predicted, arch=getattr(self.layers[0][1].weight, "arch", ""))
        costs = partial(self._costs, rows, known, deadline)
        best, lowest = descend(start, costs, order, available_processes())
        at = " and ".join(map(str, rows))
        timed = f"{len(known)} tried" + (", out of time" if self._fit(deadline) < 1 else "")
        return best, lowest, f"{lowest:.1f} us at {at} rows, from {known.get(start, math.inf):.1f}; {timed}"

    def _fit(self, deadline: float) -> float:
        """Return how many configurations should end by a deadline."""
        left = deadline - time.monotonic()
        return 0 if left <= 0 else left / self.pace if self.pace else math.inf

    def _costs(
        self, rows: Sequence[int], known: dict[Config, float], deadline: float, configs: Sequence[Config]
    ) -> list[float]:
        """Return the time of each configuration, microseconds; time those that `known` lacks and add them to it.

        Where no time is left for the last of them, they get infinity.
        """
        new = [config for config in configs if config not in known and self._runs(config)]
        new = new[: int(min(len(new), self._fit(deadline)))]
        if new:
            begun = time.monotonic()
            self._time(rows, known, new)
            self.pace = max(self.pace, (time.monotonic() - begun) / len(new))
        return [known.get(config, math.inf) for config in configs]

    def _runs(self, config: DecodeConfig | TrellisConfig) -> bool:
        """Return whether the layers have what the kernel of a configuration reads."""
        return not getattr(config, "spread", False) or self.layers[0][1].weight.spread is not None

    def _time(self, rows: Sequence[int], known: dict[Config, float], configs: Sequence[Config]) -> None:
        self.compilers.compile(
            partial(multiply, activations(m, case.cols, layer.dense.device), layer.weight, config)
            for config in configs
            for case, layer, _ in self.layers
            for m in rows
        )
        for config in configs:
            fastest = min(known.values(), default=math.inf)
            known[config] = mean_time(config, rows, self.layers, self.timer)
            if known[config] < fastest:
                self.write(f"# {known[config]:.1f} us: {config!r}")


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
    minutes: float = MINUTES,
    path: Path = TUNED,
) -> None:
    """Search the best row of each regime, print it, and write it into the file of timed rows at once.

    For 8 rows the SIMT kernel is timed beside it, and its row is written where it is faster at one row of x. The
    configuration of trellis codes is printed: the table has one for all GPUs.

    The rows serve groups of GROUP_SIZE and more: some configurations would be wrong for smaller groups on sm_100
    (NOTES.md). Each search gets an equal share of the time that is left, so a search that ends early leaves time to the
    others.
    """
    writable = os.access(path if path.exists() else path.parent, os.W_OK)
    require(writable, "bench --tune", f"a file that can be written at {path}", "none", "Name another with --out.")
    ends = time.monotonic() + 60 * minutes
    spread = device_facts(device)[1] != HIP  # the kernel that spreads outliers has inline assembly of NVIDIA's
    layers = tuned_layers(device, "spread" if spread else "tensor_core", 0.01)
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else str(device)
    write(f"# {name}, torch {torch.__version__}: geometric mean over {SHAPES}, {BITS} bits")
    arch = layers[0][1].weight.arch
    source = f"bench --tune, {name}, torch {torch.__version__}, Triton {triton.__version__}, {date.today()}"
    search = Search(layers, timer, compilers, write)
    left = len(regimes) + 2 * (8 in regimes)  # searches: eight rows have that of the SIMT kernel and of trellis codes

    def found(search: Search, start: Config) -> tuple[Config, float]:
        nonlocal left
        now = time.monotonic()
        best, lowest, remark = search.run(start, rows_to_tune(start), now + (ends - now) / left)
        left -= 1
        write(f"{best!r},  # {remark}")
        return best, lowest

    for most in regimes:
        begun = decode_config(most, 4, arch, tensor_core=True)
        best, lowest = found(search, replace(begun, min_group=GROUP_SIZE, source=source))
        if math.isinf(lowest):
            continue
        rows = [best]
        if most == 8:
            simt, alone = found(search, replace(SIMT, max_rows=1, min_group=GROUP_SIZE, source=source))
            beside = mean_time(best, rows_to_tune(simt), layers, timer)
            write(f"# one row: {alone:.1f} us by the SIMT kernel, {beside:.1f} us by tensor cores")
            rows = [simt, *rows] if alone < (1 - NOISE) * beside else rows
        record(path, arch, (1, 8) if most == 8 else (most,), rows)
    if 8 in regimes:
        found(Search(tuned_layers(device, "trellis", KEPT_RATE), timer, compilers, write), TRELLIS)
    write(f"# written to {path}")


def record(path: Path, arch: str, regimes: Sequence[int], rows: Sequence[DecodeConfig]) -> None:
    """Write the rows of these regimes in place of those that the file of timed rows has for them."""
    found: dict[str, list[dict[str, Any]]] = json.loads(path.read_text()) if path.exists() else {}
    others = [row for row in found.get(arch, ()) if row["max_rows"] not in regimes]
    found[arch] = sorted([*others, *map(asdict, rows)], key=lambda row: row["max_rows"])
    lines = (
        f" {json.dumps(arch)}: [\n  " + ",\n  ".join(map(json.dumps, found[arch])) + "\n ]" for arch in sorted(found)
    )
    path.write_text("{\n" + ",\n".join(lines) + "\n}\n")


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
