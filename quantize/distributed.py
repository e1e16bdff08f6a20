"""One quantization run shared by several processes, as torchrun starts them.

    samples ──split──> each rank's own activations ──> its Hessians ──all-reduce──> the same Hessians everywhere
    linears ──split──> each rank quantizes some    ──gather──> the same weights everywhere, written by rank 0

Invariant: whatever a rank decides on is the same on all ranks, so none waits for a collective that another never
enters; an error on one rank is raised on all, at the next exchange.
"""

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from vllm_latq.errors import CalibrationError
from vllm_latq.quantize.hessian import InputHessian

T = TypeVar("T")


@dataclass(frozen=True)
class World:
    """The processes of a run: this one's rank among `size`. A size of 1 needs no torch.distributed."""

    rank: int = 0
    size: int = 1

    @classmethod
    def join(cls, device: torch.device) -> "World":
        """The world that torchrun's environment describes; gloo where blocks are computed on a CPU, else nccl."""
        if int(os.environ.get("WORLD_SIZE", "1")) == 1:
            return cls()
        if not dist.is_initialized():
            # Collectives on plain objects need a CPU backend, those on Hessians the device's own.
            dist.init_process_group("gloo" if device.type == "cpu" else f"cpu:gloo,{device.type}:nccl")
        return cls(dist.get_rank(), dist.get_world_size())

    @property
    def first(self) -> bool:
        """Whether this rank writes and reports."""
        return self.rank == 0

    def device(self, device: torch.device) -> torch.device:
        """This rank's device: on a machine with several GPUs, one each."""
        if self.size == 1 or device.type == "cpu" or device.index is not None:
            return device
        local = torch.device(device.type, int(os.environ.get("LOCAL_RANK", "0")))
        torch.cuda.set_device(local)
        return local

    def leave(self) -> None:
        """End the process group, if there is one."""
        if self.size > 1 and dist.is_initialized():
            dist.destroy_process_group()

    def split(self, samples: torch.Tensor | None) -> torch.Tensor | None:
        """This rank's samples, of [n, tokens]."""
        if samples is None or self.size == 1:
            return samples
        if len(samples) < self.size:
            hint = "Use more samples, or fewer processes."
            expected = f"at least one for each of {self.size} processes"
            raise CalibrationError("calibration samples", expected, str(len(samples)), hint)
        return samples.tensor_split(self.size)[self.rank]

    def gather(self, make: Callable[[], T]) -> list[T]:
        """What `make` returns on each rank, by rank, on every rank; the first error that one of them met."""
        if self.size == 1:
            return [make()]
        outcome: Any
        try:
            outcome = make()
        # Whatever it is: the other ranks wait for this one.
        except Exception as error:
            outcome = error
        outcomes: list[Any] = [None] * self.size
        dist.all_gather_object(outcomes, outcome)
        for found in outcomes:
            if isinstance(found, Exception):
                raise found
        return outcomes

    def from_first(self, make: Callable[[], T]) -> T:
        """What `make` returns on the first rank, on every rank; it is called there only."""
        return self.gather(lambda: make() if self.first else None)[0]  # type: ignore[return-value]

    def mine(self, work: Sequence[InputHessian]) -> list[InputHessian]:
        """This rank's share of a block's linears: each in turn to the rank with the least to do, biggest first."""
        loads = [0] * self.size
        owner = {}
        # Rounding takes outputs * channels^2; the outputs do not matter for who gets what as much as the channels do.
        for hessian in sorted(work, key=lambda hessian: -_effort(hessian)):
            rank = loads.index(min(loads))
            loads[rank] += _effort(hessian)
            owner[id(hessian)] = rank
        # In the order in which the block reads its inputs, so that an error names the first one that is wrong.
        return [hessian for hessian in work if owner[id(hessian)] == self.rank]

    def reduce(self, hessians: list[InputHessian]) -> list[InputHessian]:
        """Sum the Hessians of all ranks, in place; those of linears that only other ranks' tokens reached are added."""
        if self.size == 1:
            return hessians
        own = {tuple(hessian.linears): hessian for hessian in hessians}
        heads = [(tuple(h.linears), len(h.matrix), h.tokens, h.drift is not None) for h in hessians]
        everyone = self.gather(lambda: heads)
        sizes = {linears: (channels, drift) for rank in everyone for linears, channels, _, drift in rank}
        reduced = []
        for linears, (channels, _) in sizes.items():
            device = hessians[0].matrix.device
            hessian = own.get(linears) or InputHessian(list(linears), torch.zeros(channels, channels, device=device))
            dist.all_reduce(hessian.matrix)
            if hessian.drift is not None:
                dist.all_reduce(hessian.drift.cross)
                dist.all_reduce(hessian.drift.energy)
            tokens = sum(tokens for rank in everyone for other, _, tokens, _ in rank if other == linears)
            reduced.append(replace(hessian, tokens=tokens))
        return reduced


def _effort(hessian: InputHessian) -> int:
    return len(hessian.linears) * max(1, len(hessian.matrix)) ** 2
