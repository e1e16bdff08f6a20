"""Rows of the benchmark: a product is compared with float64, then timed beside bf16 and the peers that are there."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import groupby
from typing import Any

import torch

from vllm_latq.kernels.bench import peers
from vllm_latq.kernels.bench.cases import (
    GROUP_SIZE,
    Case,
    Layer,
    activations,
    gate,
    layer_of,
    product,
    relative_error,
    rotating,
)
from vllm_latq.kernels.bench.compile_pool import CompilePool
from vllm_latq.kernels.bench.timing import Launch, Timer, Timing, copies_beyond_cache, reads
from vllm_latq.kernels.errors import KernelInputError


@dataclass(frozen=True)
class Result:
    """One row. Times in microseconds; bytes are what one product has to read and write at least.

    kernel: a path of `Case`, "bf16", a peer, or "read", which only reads as many bytes as the weight has. error: over
    the largest output, against float64. roofline: fraction of the plain copy's rate. speedup: over bf16 of the same
    shape and m in this run. timing: None if the error is too big, or if it does not run here: `reason` says why.
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


def moved(case: Case, weight_bytes: int) -> int:
    """Bytes that a product has to read and write at least."""
    return weight_bytes + 2 * case.m * (case.rows + case.cols)


@dataclass
class Bench:
    """Runs cases on a device with a timer, and remembers the bf16 times that speedups refer to.

    compilers: compile what the cases of a layer launch before the first is timed; None: each by its first launch.
    """

    device: torch.device
    timer: Timer
    cache: int
    copy_rate: float
    peer_bits: dict[str, tuple[int, ...]]
    compilers: CompilePool | None = None

    def __post_init__(self) -> None:
        self.bf16: dict[tuple[int, int, int], float] = {}
        self.peers_done: set[tuple[str, int, int, int, int]] = set()
        self.read: set[tuple[int, int, int, float, bool, bool]] = set()
        self.peers: dict[str, peers.Peer] = {}  # of the layer at hand

    def run(self, cases: Iterable[Case]) -> Iterator[Result]:
        """Results in order, baselines before the cases that they are for; cases of one layer share its weight."""
        for _, same_layer in groupby(cases, key=lambda case: case.layer):
            group = list(same_layer)
            self.peers.clear()
            try:
                made = self._make(group[0])
            except Exception as failure:
                yield from [self._failed(case, case.path, failure) for case in group]
                continue
            if self.compilers:
                self.compilers.compile(partial(self._launch, case, made) for case in group)
            for case in group:
                yield from self._baselines(case, made)
                yield self._attempt(case, case.path, partial(self._ours, case, made))

    def _make(self, case: Case) -> Any:
        """Make the layer of a case, with copies of its weight that exceed the cache."""
        layer = layer_of(case, self.device)
        return layer, rotating(layer.weight, self.cache)

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

    def _launch(self, case: Case, made: Any) -> torch.Tensor:
        return product(case)(activations(case.m, case.cols, self.device), made[0].weight)

    def _ours(self, case: Case, made: Any) -> Result:
        layer, weights = made
        x, ours = activations(case.m, case.cols, self.device), product(case)
        error = relative_error(ours(x, layer.weight), x, layer.dense)
        launches = [partial(ours, x, weight) for weight in weights]
        return self._result(case, case.path, error, moved(case, layer.weight.storage_bytes()), launches)

    def _baselines(self, case: Case, made: Any) -> Iterator[Result]:
        """bf16, and the peers that serve these bits, once for each shape and m; reading the weight once for each."""
        layer, _ = made
        x = activations(case.m, case.cols, self.device)
        key = (case.rows, case.cols, case.m)
        if key not in self.bf16:
            dense = replace(case, bits=16, outlier_rate=0.0)
            result = self._attempt(dense, "bf16", partial(self._bf16, dense, layer, x))
            if result.timing:
                self.bf16[key] = result.timing.median
            yield replace(result, speedup=1.0 if result.timing else None)
        if case.layer not in self.read:
            self.read.add(case.layer)
            yield self._attempt(case, "read", partial(self._read, case, layer.weight.storage_bytes()))
        for name, bits in self.peer_bits.items():
            mark = (name, *key, case.bits)
            if case.bits in bits and mark not in self.peers_done:
                self.peers_done.add(mark)
                plain = replace(case, outlier_rate=0.0)
                yield self._attempt(plain, name, partial(self._peer, name, plain, x, layer))

    def _read(self, case: Case, size: int) -> Result:
        return self._result(case, "read", 0.0, size, reads(size, self.cache, self.device))

    def _bf16(self, case: Case, layer: Layer[Any], x: torch.Tensor) -> Result:
        dense = layer.dense.bfloat16()
        weights = [dense, *(dense.clone() for _ in range(copies_beyond_cache(dense.nbytes, self.cache) - 1))]
        launches = [partial(torch.nn.functional.linear, x, weight) for weight in weights]
        error = relative_error(launches[0](), x, dense.float())
        return self._result(case, "bf16", error, moved(case, dense.nbytes), launches)

    def _peer(self, name: str, case: Case, x: torch.Tensor, layer: Layer[Any]) -> Result:
        if name not in self.peers:
            self.peers[name] = peers.make(name, layer.dense, case.bits, GROUP_SIZE, self.cache)
        peer = self.peers[name]
        error = relative_error(peer.products[0](x), x, peer.reference)
        launches = [partial(theirs, x) for theirs in peer.products]
        return self._result(case, name, error, moved(case, peer.bytes), launches, peer.tolerance)

    def _result(
        self, case: Case, kernel: str, error: float, size: int, launches: Sequence[Launch],
        tolerance: float | None = None,
    ) -> Result:  # fmt: skip
        try:
            gate(case, error, tolerance)
        except KernelInputError:
            return Result(case, kernel, error, size, None)
        timing = self.timer(launches)
        rate = size / timing.median / 1e3
        bf16 = self.bf16.get((case.rows, case.cols, case.m))
        speedup = bf16 / timing.median if bf16 else None
        return Result(case, kernel, error, size, timing, rate, rate / self.copy_rate, speedup)
