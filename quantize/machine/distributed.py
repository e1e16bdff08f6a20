"""One quantization run shared by several processes, as torchrun starts them.

    samples ──split──> each rank's own activations ──> its sums of Hessians, gradients ──sum──> the same everywhere
    inputs  ──mine───> each rank quantizes some    ──gather──> the same weights everywhere, written by rank 0

Invariant: whatever a rank decides on is the same on all ranks, so none waits for a collective that another never
enters. An error of what is gathered is raised on all; elsewhere, as in a forward pass, it ends one rank, and torchrun
the others. A rank that hangs ends the ranks that wait for it: they wait PATIENCE_SECONDS, or as many seconds as the
environment variable LATQ_RANK_TIMEOUT says.
"""

import io
import os
import pickle
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from vllm_latq.errors import CalibrationError, ConfigError, RankError, summary

T = TypeVar("T")
Key = TypeVar("Key", bound=Hashable)
_CPU = torch.device("cpu")
# One rank may quantize a large linear while the others have nothing left to do.
PATIENCE_SECONDS = 1800.0
TIMEOUT_VARIABLE = "LATQ_RANK_TIMEOUT"


@dataclass(frozen=True)
class World:
    """The processes of a run. A size of 1 needs no torch.distributed.

    Attributes:
        rank: of this one, among `size`.
        device: where this one computes.
    """

    rank: int = 0
    size: int = 1
    device: torch.device = _CPU

    @classmethod
    def join(cls, device: torch.device) -> "World":
        """The world that torchrun's environment describes, one GPU for each process of a machine with several; gloo
        where blocks are computed on a CPU, else nccl."""
        if world_size() == 1:
            return cls(device=device)
        if device.type != "cpu" and device.index is None:
            device = torch.device(device.type, int(os.environ.get("LOCAL_RANK", "0")))
            torch.cuda.set_device(device)
        if not dist.is_initialized():
            # Collectives on plain objects need a CPU backend, those on Hessians the device's own.
            backend = "gloo" if device.type == "cpu" else f"cpu:gloo,{device.type}:nccl"
            with _waiting():
                dist.init_process_group(backend, timeout=timedelta(seconds=_patience()))
        return cls(dist.get_rank(), dist.get_world_size(), device)

    @property
    def first(self) -> bool:
        """Return whether this rank writes and reports."""
        return self.rank == 0

    def leave(self) -> None:
        """End the process group, if there is one."""
        if self.size > 1 and dist.is_initialized():
            dist.destroy_process_group()

    def split(self, samples: torch.Tensor) -> torch.Tensor:
        """This rank's samples, of [n, ...]; CalibrationError if there are fewer than ranks."""
        if len(samples) < self.size:
            hint = "Use more samples, or fewer processes."
            expected = f"at least one for each of {self.size} processes"
            raise CalibrationError("calibration samples", expected, str(len(samples)), hint)
        return samples.tensor_split(self.size)[self.rank]

    def gather(self, make: Callable[[], T]) -> list[T]:
        """Return on every rank the results of `make` on each rank, by rank; raise the first error of any."""
        if self.size == 1:
            return [make()]
        files: list[Any] = [None] * self.size
        own = _attempt(make)
        with _waiting():
            dist.all_gather_object(files, own)
        return [_outcome(file) for file in files]

    def from_first(self, make: Callable[[], T]) -> T:
        """Call `make` on the first rank only; return its result, or raise its error, on every rank."""
        if self.size == 1:
            return make()
        files = [_attempt(make) if self.first else None]
        with _waiting():
            dist.broadcast_object_list(files)
        assert files[0] is not None
        return _outcome(files[0])

    def mine(
        self, work: Sequence[T], effort: Callable[[T], int], owner: Callable[[T], int | None] = lambda _: None
    ) -> list[T]:
        """This rank's share of some work.

        A piece goes to its owner; the others, biggest first, each in turn to the rank with the least to do.
        """
        efforts = [effort(piece) for piece in work]
        owners = [owner(piece) for piece in work]
        loads = [0] * self.size
        for index in sorted(range(len(work)), key=lambda index: (owners[index] is None, -efforts[index])):
            rank = owners[index]
            owners[index] = rank = loads.index(min(loads)) if rank is None else rank
            loads[rank] += efforts[index]
        # In the order of the work, so that an error names the first piece that is wrong.
        return [piece for piece, owner in zip(work, owners, strict=True) if owner == self.rank]

    def sum(self, tensors: Mapping[Key, torch.Tensor]) -> dict[Key, torch.Tensor]:
        """Sums over all ranks, in the same order on each, of what any rank has; this one's tensors become the sums."""
        if self.size == 1:
            return dict(tensors)
        heads = self.gather(lambda: {key: (tensor.shape, tensor.dtype) for key, tensor in tensors.items()})
        sums = {}
        for key, (shape, dtype) in {key: head for rank in heads for key, head in rank.items()}.items():
            sums[key] = tensors[key] if key in tensors else torch.zeros(shape, dtype=dtype, device=self.device)
            self.add_up(sums[key])
        return sums

    def add_up(self, tensor: torch.Tensor, owner: int | None = None) -> None:
        """Turn a tensor that every rank has into the sum over all ranks: on its owner alone, or on all without one.

        It is worthless on all other ranks.
        """
        if self.size > 1:
            with _waiting():
                dist.all_reduce(tensor) if owner is None else dist.reduce(tensor, owner)


def world_size() -> int:
    """How many processes torchrun says there are."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def _patience() -> float:
    """Return the seconds that a rank waits for the others; ConfigError unless the environment gives a number."""
    given = os.environ.get(TIMEOUT_VARIABLE, str(PATIENCE_SECONDS))
    try:
        seconds = float(given)
    except ValueError:
        seconds = 0.0
    # torch counts milliseconds in 64 bits; a year is patience enough.
    if not 0 < seconds <= 365 * 24 * 3600:
        raise ConfigError(TIMEOUT_VARIABLE, "a number of seconds above 0 and at most a year", repr(given))
    return seconds


@contextmanager
def _waiting() -> Iterator[None]:
    """Turn torch's error in a wait for other ranks into a RankError."""
    try:
        yield
    except RuntimeError as error:
        rank = os.environ.get("RANK", "0")
        expected = f"an answer of all {world_size()} processes within {_patience():g} seconds"
        hint = f"Another process hangs or has ended: look at its output. {TIMEOUT_VARIABLE} sets the seconds to wait."
        hint += " Finished blocks are kept: continue with --resume."
        raise RankError(f"process {rank}", expected, summary(error), hint) from error


def _attempt(make: Callable[[], Any]) -> bytes:
    """Write the result or error of `make` to a file: unlike a pickle, it may hold tensors of any dtype (uint16)."""
    outcome: Any
    try:
        outcome = make()
    # Whatever it is: the other ranks wait for this one.
    except Exception as error:
        outcome = error
        try:
            pickle.loads(pickle.dumps(error))
        except Exception:
            outcome = RuntimeError(repr(error))
    file = io.BytesIO()
    torch.save(outcome, file)
    return file.getvalue()


def _outcome(file: bytes) -> Any:
    outcome = torch.load(io.BytesIO(file), weights_only=False)
    if isinstance(outcome, Exception):
        raise outcome
    return outcome


ALONE = World()
