"""The benchmark, on a GPU: `python -m vllm_latq.kernels.bench [--quick] [--experts] [--spread] [--tune] [--once]`.

Every product is compared with float64 before it is timed; one that is wrong is printed as FAILED, has no time, and
makes the command fail. bf16 matmul, a plain device copy (the roofline), a kernel that only reads as many bytes, and the
peers that are installed run in the same process. All rows are printed as they come, those that lose to bf16 included,
and written to JSON every second or so; a run cut short keeps what it has.
"""

import argparse
import json
import math
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict
from itertools import groupby
from pathlib import Path
from typing import Any

import torch
import triton

from vllm_latq.kernels.bench import peers
from vllm_latq.kernels.bench.cases import BITS, GROUP_SIZE, Case, activations, all_cases, layer_of, product
from vllm_latq.kernels.bench.compile_pool import CompilePool, available_processes
from vllm_latq.kernels.bench.measure import Bench, Result
from vllm_latq.kernels.bench.measure_experts import ExpertBench, expert_cases
from vllm_latq.kernels.bench.timing import cache_bytes, copy_gb_per_s, require_gpu, time_graph
from vllm_latq.kernels.bench.tune import MINUTES, tune
from vllm_latq.kernels.configs import REGIMES, TUNED
from vllm_latq.kernels.errors import KernelInputError

WRITE_SECONDS = 1  # between drafts of the results: of hundreds of rows one takes longer to write than a row to measure
QUICK: dict[str, Any] = {
    "shapes": ((8192, 8192), (4096, 4096), (24576, 4096)), "bits": (3, 4, 2), "rates": (0.01, 0.0),
    "rows": (1, 8, 16, 64, 128, 512),
}  # fmt: skip


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
    """Return what the results depend on: device, versions, commit and settings."""
    commit = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, cwd=Path(__file__).parent)
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else str(device)
    return {
        "device": name, "torch": torch.__version__, "triton": triton.__version__,
        "commit": commit.stdout.strip() or "unknown", "group_size": GROUP_SIZE, "activations": "bfloat16",
        "copy_gb_per_s": copy_rate,
    } | peers.versions()  # fmt: skip


def write_json(path: Path, facts: dict[str, Any], results: Sequence[Result]) -> None:
    """Write `facts` and one line per result; an interruption leaves the old file or the new one, never half of one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_suffix(".draft")
    rows = ",\n  ".join(json.dumps(_short(asdict(result))) for result in results)
    before, after = json.dumps(facts | {"results": [None]}, indent=1).rsplit("null", 1)
    draft.write_text(f"{before.rstrip()}\n  {rows}{after}\n")
    draft.replace(path)


def _short(value: Any) -> Any:
    """Return a JSON value with floats rounded to five digits, more than a measurement has."""
    if isinstance(value, dict):
        return {key: _short(part) for key, part in value.items()}
    return float(f"{value:.5g}") if isinstance(value, float) else value


def report(bench: Bench, cases: Iterable[Case], facts: dict[str, Any], path: Path, minutes: float = math.inf) -> int:
    """Run the cases, print each row at once and write the JSON; return how many of our products were wrong or failed.

    Args:
        minutes: time after which no new row is started.
    """
    print(HEADER, flush=True)
    results, complete, started = [], False, time.monotonic()
    written = started
    try:
        for result in bench.run(cases):
            results.append(result)
            print(table_row(result), flush=True)
            if time.monotonic() >= written + WRITE_SECONDS:
                write_json(path, facts | {"complete": False}, results)
                written = time.monotonic()
            if time.monotonic() > started + 60 * minutes:
                print(f"stopped after {minutes:g} minutes")
                break
        else:
            complete = True
    finally:
        write_json(path, facts | {"complete": complete}, results)
    wrong = sum(result.timing is None and result.kernel not in bench.peer_bits for result in results)
    print(f"\n{len(results)} rows, {wrong} wrong; written to {path}")
    return wrong


def main(arguments: Sequence[str] | None = None) -> None:
    """Command line; exits with 1 if a product was wrong, or on a machine without a GPU."""
    options = parse(arguments)
    try:
        device = require_gpu()
    except KernelInputError as error:
        sys.exit(f"{error}")
    if options.once:
        launch_once(selection(options)[1], device)
        return
    with CompilePool(options.jobs or available_processes()) as compilers:
        if options.tune is not None:
            minutes = MINUTES if math.isinf(options.minutes) else options.minutes
            tune(device, time_graph, compilers, options.tune or REGIMES, minutes=minutes, path=options.out or TUNED)
            return
        rate = copy_gb_per_s(device)
        facts = environment(device, rate)
        print(f"{facts['device']}, torch {facts['torch']}, triton {facts['triton']}; plain copy {rate:.0f} GB/s\n")
        suffix, cases = selection(options)
        path = options.out or Path(f"{facts['device'].replace(' ', '-').lower()}{suffix}.json")
        kind, others = (ExpertBench, {}) if options.experts else (Bench, peers.installed())
        bench = kind(device, time_graph, cache_bytes(device), rate, others, compilers)
        # A terminated run still writes the rows that it has measured.
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
        sys.exit(min(1, report(bench, cases, facts, path, options.minutes)))


def launch_once(cases: Iterable[Case], device: torch.device) -> None:
    """Launch each product once, in the order in which they are printed, and time nothing."""
    for _, group in groupby(cases, key=lambda case: case.layer):
        layer = None
        for case in group:
            layer = layer or layer_of(case, device)
            product(case)(activations(case.m, case.cols, device), layer.weight)
            print(case, flush=True)


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Parse the command line; exit if options contradict each other."""
    parser = argparse.ArgumentParser(prog="python -m vllm_latq.kernels.bench", description=__doc__.splitlines()[0])
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--quick", action="store_true", help="three shapes, six numbers of rows: a first look")
    what.add_argument("--experts", action="store_true", help="layers of routed experts instead of linears")
    parser.add_argument("--bits", nargs="+", type=int, choices=BITS, help="only these bit widths")
    parser.add_argument(
        "--outliers", nargs="+", type=percentage, metavar="PERCENT", help="only these outlier rates of packed codes"
    )
    parser.add_argument("--rows", nargs="+", type=positive, help="only these numbers of activation rows (or tokens)")
    parser.add_argument(
        "--tune",
        nargs="*",
        type=int,
        choices=REGIMES,
        help="search launch configurations for these tile sizes in rows (default: all), print them and write them into "
        "kernels/tuned.json",
    )
    parser.add_argument("--spread", action="store_true", help="time the other kernel for outliers, too")
    what.add_argument("--once", action="store_true", help="launch each product once and time nothing: for a profiler")
    parser.add_argument(
        "--minutes",
        type=float,
        default=math.inf,
        help=f"start no new row after this many minutes; --tune ends by then (default: never; {MINUTES:g} for --tune)",
    )
    parser.add_argument("--jobs", type=positive, help="compiler processes (default: one per core, at most 16)")
    parser.add_argument("--out", type=Path, help="JSON file (default: named after the GPU, in the working directory; "
                        "kernels/tuned.json for --tune)")  # fmt: skip
    options = parser.parse_args(arguments)
    taken = ("quick", "experts", "once", "spread", "bits", "outliers", "rows")
    useless = [name for name in ("minutes", "jobs", "out") if getattr(options, name) != parser.get_default(name)]
    if options.once and useless:
        parser.error(f"--once times nothing and writes nothing: leave out --{' --'.join(useless)}")
    if options.spread and options.experts:
        parser.error("--spread: experts have no such kernel: leave out --experts")
    if options.tune is not None and (others := [name for name in taken if getattr(options, name)]):
        parser.error(f"--tune chooses its own products: leave out --{' --'.join(others)}")
    return options


def positive(text: str) -> int:
    """A command-line argument of 1 or more."""
    if int(text) < 1:
        raise ValueError
    return int(text)


def percentage(text: str) -> float:
    """A command-line argument from 0 to 100, as a rate."""
    if not 0 <= float(text) <= 100:
        raise ValueError
    return float(text) / 100


def selection(options: argparse.Namespace) -> tuple[str, Iterator[Case]]:
    """Return the suffix of the file name that names the selection, and the selected cases."""
    chosen = {"bits": options.bits, "rates": options.outliers, "rows": options.rows}
    some: dict[str, Any] = {key: tuple(values) for key, values in chosen.items() if values}
    suffix = "-experts" if options.experts else "-quick" if options.quick else ""
    for key, values in some.items():
        shown = [f"{100 * value:g}" if key == "rates" else f"{value}" for value in values]
        suffix += f"-{'-'.join(shown)}{'percent' if key == 'rates' else key}"
    if options.experts:
        return suffix, expert_cases(**some)
    suffix += "-spread" if options.spread else ""
    return suffix, all_cases(**(QUICK if options.quick else {}) | some, spread=options.spread)


if __name__ == "__main__":
    main()
