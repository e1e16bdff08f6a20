"""The benchmark: `python -m vllm_latq.kernels.bench [--quick] [--tune]`. Correctness first; then time, on a GPU.

Every product is compared with float64 before it is timed; one that is wrong is printed as FAILED, has no time, and
makes the command fail. bf16 matmul, a plain device copy (the roofline) and the peers that are installed run in the same
process. All rows are printed and written to JSON as they come, those that lose to bf16 included; a run cut short
keeps what it has.
"""

import argparse
import json
import math
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Any

import torch
import triton

from vllm_latq.kernels import peers
from vllm_latq.kernels.cases import (
    BITS,
    GROUP_SIZE,
    Case,
    Layer,
    all_cases,
    copy_weight,
    gate,
    make_layer,
    product,
    relative_error,
)
from vllm_latq.kernels.configs import REGIMES
from vllm_latq.kernels.errors import KernelInputError
from vllm_latq.kernels.timing import (
    Launch,
    Timing,
    cache_bytes,
    copies_beyond_cache,
    copy_gb_per_s,
    require_gpu,
    time_graph,
)
from vllm_latq.kernels.tune import tune

RESULTS = Path(__file__).resolve().parent / "results"
QUICK: dict[str, Any] = {
    "shapes": ((8192, 8192), (4096, 4096), (24576, 4096)), "bits": (3, 4, 2), "rates": (0.01, 0.0),
    "rows": (1, 8, 16, 64, 128, 512),
}  # fmt: skip
Timer = Callable[[Sequence[Launch]], Timing]


@dataclass(frozen=True)
class Result:
    """One row. Times in microseconds; bytes are what one product has to read and write at least.

    kernel: a path of `Case`, "bf16", or a peer. error: over the largest output, against float64. roofline: fraction of
    the plain copy's rate. speedup: over bf16 of the same shape and m in this run. timing: None if the error is too big,
    or if it does not run here: `reason` says why.
    """

    case: Case
    kernel: str
    error: float
    bytes: int
    timing: Timing | None
    gb_per_s: float | None = None
    roofline: float | None = None
    speedup: float | None = None
    reason: str = ""


@dataclass
class Bench:
    """Runs cases on a device with a timer, and remembers the bf16 times that speedups refer to."""

    device: torch.device
    timer: Timer
    cache: int
    copy_rate: float
    peer_bits: dict[str, tuple[int, ...]]

    def __post_init__(self) -> None:
        self.bf16: dict[tuple[int, int, int], float] = {}
        self.peers_done: set[tuple[str, int, int, int, int]] = set()
        self.peers: dict[str, peers.Peer] = {}  # of the layer at hand

    def run(self, cases: Iterable[Case]) -> Iterator[Result]:
        """Results in order, baselines before the cases that they are for; cases of one layer share its weight."""
        for _, group in groupby(cases, key=lambda case: case.layer):
            group = list(group)
            self.peers.clear()
            try:
                layer = make_layer(group[0], self.device)
                copies = copies_beyond_cache(layer.weight.storage_bytes(), self.cache)
                weights = [layer.weight, *(copy_weight(layer.weight) for _ in range(copies - 1))]
            except Exception as failure:
                yield from [self._failed(case, case.path, failure) for case in group]
                continue
            for case in group:
                yield from self._baselines(case, layer)
                yield self._attempt(case, case.path, partial(self._ours, case, layer, weights))

    def _attempt(self, case: Case, kernel: str, measure: Callable[[], Result]) -> Result:
        """A measurement that raises is a row that says so: it must not take the others with it."""
        try:
            return measure()
        except Exception as failure:
            return self._failed(case, kernel, failure)

    def _failed(self, case: Case, kernel: str, failure: Exception) -> Result:
        """The row of a failure; raises if that broke the GPU's context, in which nothing would run any more."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        reason = f"{type(failure).__name__}: {failure}".splitlines()[0]
        return Result(case, kernel, float("inf"), 0, None, reason=reason)

    def _activations(self, case: Case) -> torch.Tensor:
        generator = torch.Generator(device=self.device).manual_seed(case.m)
        return torch.randn(case.m, case.cols, generator=generator, device=self.device).bfloat16()

    def _ours(self, case: Case, layer: Layer, weights: list[Any]) -> Result:
        x, ours = self._activations(case), product(case)
        error = relative_error(ours(x, layer.weight), x, layer.dense)
        launches = [partial(ours, x, weight) for weight in weights]
        return self._result(case, case.path, error, layer.weight.storage_bytes(), launches)

    def _baselines(self, case: Case, layer: Layer) -> Iterator[Result]:
        """bf16, and the peers that serve these bits, once for each shape and m."""
        x = self._activations(case)
        key = (case.rows, case.cols, case.m)
        if key not in self.bf16:
            dense = replace(case, bits=16, outlier_rate=0.0)
            result = self._attempt(dense, "bf16", partial(self._bf16, dense, layer, x))
            if result.timing:
                self.bf16[key] = result.timing.median
            yield replace(result, speedup=1.0 if result.timing else None)
        for name, bits in self.peer_bits.items():
            mark = (name, *key, case.bits)
            if case.bits in bits and mark not in self.peers_done:
                self.peers_done.add(mark)
                plain = replace(case, outlier_rate=0.0)
                yield self._attempt(plain, name, partial(self._peer, name, plain, x, layer))

    def _bf16(self, case: Case, layer: Layer, x: torch.Tensor) -> Result:
        dense = layer.dense.bfloat16()
        weights = [dense, *(dense.clone() for _ in range(copies_beyond_cache(dense.nbytes, self.cache) - 1))]
        launches = [partial(torch.nn.functional.linear, x, weight) for weight in weights]
        error = relative_error(launches[0](), x, dense.float())
        return self._result(case, "bf16", error, dense.nbytes, launches)

    def _peer(self, name: str, case: Case, x: torch.Tensor, layer: Layer) -> Result:
        if name not in self.peers:
            self.peers[name] = peers.make(name, layer.dense, case.bits, GROUP_SIZE, self.cache)
        peer = self.peers[name]
        error = relative_error(peer.products[0](x), x, peer.reference)
        launches = [partial(theirs, x) for theirs in peer.products]
        return self._result(case, name, error, peer.bytes, launches, peer.tolerance)

    def _result(
        self, case: Case, kernel: str, error: float, weight_bytes: int, launches: Sequence[Launch],
        tolerance: float | None = None,
    ) -> Result:  # fmt: skip
        size = weight_bytes + 2 * case.m * (case.rows + case.cols)
        try:
            gate(case, error, tolerance)
        except KernelInputError:
            return Result(case, kernel, error, size, None)
        timing = self.timer(launches)
        rate = size / timing.median / 1e3
        bf16 = self.bf16.get((case.rows, case.cols, case.m))
        speedup = bf16 / timing.median if bf16 else None
        return Result(case, kernel, error, size, timing, rate, rate / self.copy_rate, speedup)


def table_row(result: Result) -> str:
    """One line of the printed Markdown table."""
    case, timing = result.case, result.timing
    head = f"| {case.rows}x{case.cols} | {case.bits} | {100 * case.outlier_rate:g}% | {case.m} | {result.kernel} "
    if result.reason:
        return head + f"| not measured: {result.reason.replace('|', '/')} | | | |"
    if timing is None:
        return head + f"| FAILED: relative error {result.error:.1e} | | | |"
    speedup = "" if result.speedup is None else f"{result.speedup:.2f}"
    return head + f"| {timing.median:.1f} | {result.gb_per_s:.0f} | {100 * (result.roofline or 0):.0f}% | {speedup} |"


HEADER = """| layer | bits | outliers | rows | kernel | microseconds | GB/s | of copy | speedup over bf16 |
|---|---|---|---|---|---|---|---|---|"""


def environment(device: torch.device, copy_rate: float) -> dict[str, Any]:
    """What a result depends on."""
    commit = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, cwd=RESULTS.parent)
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else str(device)
    return {
        "device": name, "torch": torch.__version__, "triton": triton.__version__,
        "commit": commit.stdout.strip() or "unknown", "group_size": GROUP_SIZE, "activations": "bfloat16",
        "copy_gb_per_s": copy_rate,
    }  # fmt: skip


def write_json(path: Path, facts: dict[str, Any], results: Sequence[Result]) -> None:
    """`facts`, and one object per row, as written by `Result`; the file is whole at any time."""
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_suffix(".draft")
    draft.write_text(json.dumps(facts | {"results": [asdict(result) for result in results]}, indent=1) + "\n")
    draft.replace(path)


def report(bench: Bench, cases: Iterable[Case], facts: dict[str, Any], path: Path, minutes: float = math.inf) -> int:
    """Run, print every row as it comes, write the JSON; the number of our products that were wrong or did not run.

    Args:
        minutes: after which no other row is begun.
    """
    print(HEADER, flush=True)
    results, complete, deadline = [], True, time.monotonic() + 60 * minutes
    for result in bench.run(cases):
        results.append(result)
        print(table_row(result), flush=True)
        write_json(path, facts | {"complete": False}, results)
        if time.monotonic() > deadline:
            complete = False
            print(f"stopped after {minutes:g} minutes")
            break
    write_json(path, facts | {"complete": complete}, results)
    wrong = sum(result.timing is None and result.kernel not in bench.peer_bits for result in results)
    print(f"\n{len(results)} rows, {wrong} wrong; written to {path}")
    return wrong


def main(arguments: Sequence[str] | None = None) -> None:
    """Command line; exits with 1 if a product was wrong, with 2 on a machine without a GPU."""
    parser = argparse.ArgumentParser(prog="python -m vllm_latq.kernels.bench", description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="three shapes, five numbers of rows: a first look")
    parser.add_argument("--bits", nargs="+", type=int, choices=BITS, help="these widths only")
    parser.add_argument(
        "--tune",
        nargs="*",
        type=int,
        choices=REGIMES,
        help="search launch configurations for tiles of so many rows (default: each) and print them instead",
    )
    parser.add_argument("--minutes", type=float, default=math.inf, help="begin no other row after so many")
    parser.add_argument("--out", type=Path, help="JSON file (default: results/ beside this file)")
    options = parser.parse_args(arguments)
    try:
        device = require_gpu()
    except KernelInputError as error:
        sys.exit(f"{error}")
    if options.tune is not None:
        tune(device, time_graph, options.tune or REGIMES)
        return
    rate = copy_gb_per_s(device)
    facts = environment(device, rate)
    print(f"{facts['device']}, torch {facts['torch']}, triton {facts['triton']}; plain copy {rate:.0f} GB/s\n")
    name = facts["device"].replace(" ", "-").lower()
    name += "-quick" if options.quick else ""
    name += f"-{'-'.join(map(str, options.bits))}bits" if options.bits else ""
    path = options.out or RESULTS / f"{name}.json"
    bench = Bench(device, time_graph, cache_bytes(device), rate, peers.installed())
    choice = (QUICK if options.quick else {}) | ({"bits": tuple(options.bits)} if options.bits else {})
    sys.exit(min(1, report(bench, all_cases(**choice), facts, path, options.minutes)))


if __name__ == "__main__":
    main()
