"""Timing on a GPU: launches captured in CUDA graphs, over copies of the data that together exceed the L2 cache.

Invariant: every launch of a replay reads another copy, and a copy comes round again only after ROTATION times the L2
cache has been read, so nothing is timed from the cache.
"""

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
import triton
import triton.language as tl

from vllm_latq.kernels.errors import require

ROTATION = 3
LAUNCHES = 64  # in one graph, at least: the start of a replay and the resolution of events weigh little
REPLAYS = 20
WARM_SECONDS = 0.03  # of replays before those that count: an idle GPU lowers its clocks, and compiling takes seconds
COPY_BYTES = 1 << 30
READ_WORDS = 2048  # by a program of four warps: of nine ways to read 4 to 940 MB on an H200 the fastest, or within 1%

Launch = Callable[[], object]


@dataclass(frozen=True)
class Timing:
    """Microseconds of one launch: the median over replays, and the 10th and 90th percentile."""

    median: float
    low: float
    high: float


Timer = Callable[[Sequence[Launch]], Timing]


def require_gpu() -> torch.device:
    """Return the current GPU; raise KernelInputError on a machine without one."""
    hint = "Without one, the modules `roofline` and `audit` of this package predict times and count instructions."
    require(torch.cuda.is_available(), "benchmark", "a CUDA GPU", "none", hint)
    return torch.device("cuda", torch.cuda.current_device())


def copies_beyond_cache(bytes_per_launch: int, cache_bytes: int) -> int:
    """Return how many copies of the data, at least two, exceed ROTATION times the cache."""
    return max(2, -(-ROTATION * cache_bytes // max(bytes_per_launch, 1)))


def cache_bytes(device: torch.device) -> int:
    """Return the size of the L2 cache in bytes."""
    return torch.cuda.get_device_properties(device).L2_cache_size


def time_graph(launches: Sequence[Launch]) -> Timing:
    """Time launches, one per copy of the data, from a CUDA graph that repeats all of them."""
    rounds = -(-LAUNCHES // len(launches))
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for launch in launches:  # compiles, and lets libraries allocate what they keep
            launch()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(rounds):
            for launch in launches:
                launch()
    started = time.monotonic()
    while time.monotonic() - started < WARM_SECONDS:
        graph.replay()
        torch.cuda.synchronize()
    events = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(REPLAYS)]
    for begin, end in events:
        begin.record()
        graph.replay()
        end.record()
    torch.cuda.synchronize()
    per_launch = [1e3 * begin.elapsed_time(end) / (rounds * len(launches)) for begin, end in events]
    return summary(per_launch)


def summary(microseconds: Sequence[float]) -> Timing:
    """Return the median and percentiles of two or more measurements."""
    tenths = statistics.quantiles(microseconds, n=10, method="inclusive")
    return Timing(statistics.median(microseconds), tenths[0], tenths[-1])


def copy_gb_per_s(device: torch.device) -> float:
    """Return GB/s, read and written together, of a kernel that copies: the roofline of everything bound by memory.

    `copy_` is not used: as a node of a CUDA graph `copy_` reaches 2.7 TB/s on an H200, a kernel 4.3.
    """
    source = torch.zeros(COPY_BYTES // 4, dtype=torch.float32, device=device)
    target = torch.empty_like(source)
    return 2 * COPY_BYTES / time_graph([lambda: torch.neg(source, out=target)]).median / 1e3


@triton.jit
def read_words(words_ptr, out_ptr, BLOCK: tl.constexpr):
    """Read BLOCK int32 a program and do next to nothing else: their sum is written if it is one number."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    total = tl.sum(tl.load(words_ptr + at, eviction_policy="evict_first"), 0)
    if total == -1234567:
        tl.store(out_ptr, total)


def reads(size: int, cache: int, device: torch.device) -> list[Launch]:
    """Return launches that read `size` bytes, rounded up to whole programs, each from another copy.

    Their time is the floor of a kernel that reads as many bytes. The rate of the plain copy is too high a bar for a few
    megabytes: it is measured over a gigabyte, and the first bytes arrive only after a microsecond or more.
    """
    words = triton.cdiv(size, READ_WORDS * 4) * READ_WORDS
    copies = copies_beyond_cache(size, cache)
    source = torch.arange(words * copies, dtype=torch.int32, device=device)
    out = torch.zeros(1, dtype=torch.int32, device=device)

    def read(part: torch.Tensor) -> torch.Tensor:
        read_words[words // READ_WORDS,](part, out, BLOCK=READ_WORDS)
        return out

    return [partial(read, part) for part in source.split(words)]
