"""What a piece of work costs, found by doing it: seconds, and bytes of the tensors that are alive at once.

A linear is rehearsed at half its size for the bytes, which grow with its area, and at its own size for the seconds, or
at LARGEST rows or columns. From there, with s how much longer its sides really are,

    seconds = a s + b s^2 + (floating point operations of its matmuls) / rate      steps of a recursion, elements

where a and b follow from the seconds at two sizes. Invariant: no number in here describes a machine.
"""

import time
import weakref
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from vllm_latq.errors import NumericalError

T = TypeVar("T")
LARGEST = 1024
_MATMUL = 1024


@dataclass(frozen=True)
class Cost:
    """Of a piece of work.

    Attributes:
        seconds: wall time.
        peak: bytes of the tensors that it made and that were alive at once.
        kept: bytes of those that its result holds.
    """

    seconds: float
    peak: float
    kept: float


class LiveBytes(TorchDispatchMode):
    """Counts the bytes of tensors that are made while it is active, and are still alive.

    Attributes:
        now, peak: at this moment, and at most so far.
    """

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = 0
        self._known: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor):
            self._see(result, args)
        elif isinstance(result, tuple | list):
            for one in result:
                if isinstance(one, torch.Tensor):
                    self._see(one, args)
        return result

    def _see(self, made: torch.Tensor, args: tuple[Any, ...]) -> None:
        storage = made.untyped_storage()
        key, size = storage._cdata, storage.nbytes()
        if key in self._known:
            return
        # A view of what was there before is not new.
        if any(isinstance(one, torch.Tensor) and one.untyped_storage()._cdata == key for one in args):
            return
        self._known.add(key)
        self.now += size
        self.peak = max(self.peak, self.now)
        weakref.finalize(storage, self._free, key, size)

    def _free(self, key: int, size: int) -> None:
        self._known.discard(key)
        self.now -= size


def timed(work: Callable[[], T]) -> tuple[T, float]:
    """Its result, and wall seconds."""
    _wait()
    started = time.perf_counter()
    result = work()
    _wait()
    return result, time.perf_counter() - started


def measured(work: Callable[[], T]) -> tuple[T, Cost]:
    """Do some work twice: counted, which also loads what is loaded at the first use, and timed."""
    with LiveBytes() as live:
        result = work()
    kept = live.now
    del result
    result, seconds = timed(work)
    return result, Cost(seconds, live.peak, kept)


class Rehearsal:
    """Costs of work on matrices, as if they were larger than they are.

    Args:
        multiple: what the number of columns stays a multiple of, if it can: of a group of scales.
        device: on which the work is done.
    """

    def __init__(self, multiple: int, device: torch.device) -> None:
        self.multiple, self.device = max(1, multiple), device
        self._rate = 0.0

    def cost(self, work: Callable[[int, int], object], rows: int, cols: int, cubic: bool = False) -> Cost:
        """Of work on a matrix, done on its first rows and columns.

        Args:
            work: takes how many of them.
            rows, cols: of the matrix.
            cubic: the work is a factorisation, the operations of which are not counted: they grow with s^3.
        """
        whole = (rows, cols)
        part, half = self.sizes(rows, cols)
        # Counting operations is slow, and only needed to go beyond what is done.
        counter = FlopCounterMode(display=False)
        counting = counter if part != whole else nullcontext()

        def watched(size: tuple[int, int]) -> tuple[int, int]:
            with counting, LiveBytes() as live:
                result = work(*size)
            peak, kept = live.peak, live.now
            del result
            return peak, kept

        try:
            peak, kept = watched(half)
        except NumericalError:
            # Code tables and offsets weigh more in a small matrix: a target of bits may be out of its reach.
            half = part
            peak, kept = watched(half)
        growth = _area(whole) / _area(half)
        _, seconds = timed(lambda: work(*part))
        if part != whole:
            sides = (_area(whole) / _area(part)) ** 0.5
            if cubic or half == part:
                seconds *= sides**3 if cubic else sides**2
            else:
                _, less = timed(lambda: work(*half))
                ratio = (_area(part) / _area(half)) ** 0.5
                matmuls = counter.get_total_flops() * ratio**3 / self._matmul_rate()
                seconds = _extrapolated(seconds, less, ratio, matmuls, sides)
        return Cost(seconds, peak * growth, kept * growth)

    def sizes(self, rows: int, cols: int) -> tuple[tuple[int, int], tuple[int, int]]:
        """Rows and columns at which `cost` does the work of a matrix: the larger size, and half of it."""
        part = self._shrunk((rows, cols), LARGEST / max(rows, cols))
        return part, self._shrunk(part, 0.5)

    def _shrunk(self, shape: tuple[int, int], share: float) -> tuple[int, int]:
        if share >= 1:
            return shape
        rows, cols = (max(1, round(size * share)) for size in shape)
        if shape[1] % self.multiple == 0:
            cols = max(self.multiple, cols // self.multiple * self.multiple)
        return rows, cols

    def _matmul_rate(self) -> float:
        """Floating point operations per second of a float32 matmul on the device of the work, now."""
        if not self._rate:
            square = torch.ones(_MATMUL, _MATMUL, device=self.device)
            seconds = min(timed(lambda: square @ square)[1] for _ in range(3))
            self._rate = 2 * _MATMUL**3 / seconds
        return self._rate


def _extrapolated(seconds: float, less: float, ratio: float, matmuls: float, sides: float) -> float:
    """Seconds of work on sides `sides` times as long, from those at full and at 1 / ratio of the length."""
    # seconds = a + b + matmuls;  less = a / ratio + b / ratio^2 + matmuls / ratio^3
    matmuls = min(matmuls, seconds)
    rest = seconds - matmuls
    smaller = max(0.0, less - matmuls / ratio**3)
    elements = min(max(0.0, (rest - ratio * smaller) / (1 - 1 / ratio)), rest)
    return (rest - elements) * sides + elements * sides**2 + matmuls * sides**3


def _area(shape: tuple[int, int]) -> int:
    return shape[0] * shape[1]


def _wait() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
