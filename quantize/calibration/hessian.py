"""Hessians X^T X of a block's linears, accumulated while the block runs: one per shared input.

Invariant: linears that are called with the same tensor (q/k/v, gate/up) share one accumulator. In latent attention the
up-projections read a different tensor.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from weakref import ref

import torch
import torch.distributed as dist
from torch import nn

from vllm_latq.quantize.lattice.grams import SharedInput
from vllm_latq.quantize.lattice.targets import Drift
from vllm_latq.quantize.machine.distributed import World


@dataclass
class InputHessian:
    """X^T X of one input.

    Attributes:
        shared: the linears that read this input.
        matrix: float32 [c, c], the sum over all tokens seen.
        tokens: number of tokens seen.
        drift: how far this input is from the original model's; None where the original model is not run.
        note: what the records of these linears say about the input; empty if nothing.
    """

    shared: SharedInput
    matrix: torch.Tensor
    tokens: int = 0
    drift: Drift | None = None
    note: str = ""

    def add(self, inputs: torch.Tensor, original: torch.Tensor | None = None) -> None:
        """Accumulate inputs [..., c], and the original model's inputs for the same tokens."""
        rows = _rows(inputs)
        with _faster_products(inputs.dtype):
            self.matrix.addmm_(rows.T, rows)
        self.tokens += rows.shape[0]
        if original is not None:
            self.drift = self.drift or Drift.zeros(rows.shape[1], rows.device)
            self.drift.add(rows, _rows(original))

    def add_residual(self, inputs: torch.Tensor, missed: torch.Tensor) -> None:
        """Accumulate what the residual stream misses, [..., r], after inputs [..., c] that `add` has seen."""
        assert self.drift is not None
        self.drift.add_residual(_rows(inputs), _rows(missed.to(inputs.device)))


class _AllSeen(Exception):
    """Ends a forward pass."""


@dataclass
class HessianCollector:
    """Accumulates the Hessians of named linears of one block.

    Attributes:
        hessians: in the order in which the block first reads their inputs.
    """

    hessians: list[InputHessian] = field(default_factory=list)
    _by_linear: dict[str, InputHessian] = field(default_factory=dict)
    # By an input's id, which is its own while it lives, and version, which counts changes in place.
    _by_input: dict[tuple[int, int], tuple[ref[torch.Tensor], InputHessian]] = field(default_factory=dict)
    _watched: set[str] = field(default_factory=set)
    _called: list[str] = field(default_factory=list)
    _stop_at: str | None = None

    def of(self, name: str) -> InputHessian:
        """Return the Hessian of a linear that was called."""
        return self._by_linear[name]

    def stop_early(self) -> None:
        """After a first whole pass: let later ones end at the input of the last linear, what follows is not needed.

        Does nothing if that pass did not call each of the linears once.
        """
        if self._called and sorted(self._called) == sorted(self._watched):
            self._stop_at = self._called[-1]

    @contextmanager
    def watching(
        self, linears: Mapping[str, nn.Linear], originals: Mapping[str, torch.Tensor] | None = None
    ) -> Iterator[None]:
        """Accumulate while the context lasts; forward passes of the block go inside.

        Args:
            linears: name -> linear.
            originals: what `recording` saw of the same tokens in the original model; then one pass goes inside.
        """
        originals = originals or {}
        handles = [
            linear.register_forward_pre_hook(self._hook(name, originals.get(name))) for name, linear in linears.items()
        ]
        self._watched, self._called = set(linears), []
        try:
            yield
        except _AllSeen:
            pass
        finally:
            self._by_input = {}
            for handle in handles:
                handle.remove()

    def _hook(self, name: str, original: torch.Tensor | None) -> Callable[[nn.Module, tuple[torch.Tensor, ...]], None]:
        def see(_module: nn.Module, arguments: tuple[torch.Tensor, ...]) -> None:
            inputs = arguments[0]
            key = id(inputs), inputs._version
            known, hessian = self._by_input.get(key, (None, None))
            shared = hessian if known is not None and known() is inputs else None
            if name not in self._by_linear:
                self._by_linear[name] = shared or self._new(inputs)
                own = self._by_linear[name]
                own.shared = SharedInput((*own.shared.names, name))
            own = self._by_linear[name]
            if shared is not own:
                own.add(inputs, original)
            if shared is None:
                self._by_input[key] = ref(inputs), own
            self._called.append(name)
            if name == self._stop_at:
                raise _AllSeen

        return see

    def _new(self, inputs: torch.Tensor) -> InputHessian:
        size = inputs.shape[-1]
        hessian = InputHessian(SharedInput(()), torch.zeros(size, size, dtype=torch.float32, device=inputs.device))
        self.hessians.append(hessian)
        return hessian


@contextmanager
def recording(linears: Mapping[str, nn.Linear]) -> Iterator[dict[str, torch.Tensor]]:
    """Linear -> the input it was last called with, filled while the context lasts."""
    seen: dict[str, torch.Tensor] = {}

    def hook(name: str) -> Callable[[nn.Module, tuple[torch.Tensor, ...]], None]:
        return lambda _module, arguments: seen.update({name: arguments[0]})

    handles = [linear.register_forward_pre_hook(hook(name)) for name, linear in linears.items()]
    try:
        yield seen
    finally:
        for handle in handles:
            handle.remove()


@contextmanager
def _faster_products(dtype: torch.dtype) -> Iterator[None]:
    """Lets a float32 matmul round its factors to bfloat16, where they are bfloat16 numbers: sums stay float32."""
    if dtype != torch.bfloat16:
        yield
        return
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("medium")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


def _rows(inputs: torch.Tensor) -> torch.Tensor:
    """[..., c] -> float32 [n, c]."""
    return inputs.detach().reshape(-1, inputs.shape[-1]).to(torch.float32)


def reduce_hessians(world: World, hessians: list[InputHessian]) -> list[InputHessian]:
    """Sum Hessians over all ranks, in place; inputs that only other ranks' tokens reached are added."""
    if world.size == 1:
        return hessians
    own = {hessian.shared: hessian for hessian in hessians}
    matrices = world.sum({shared: hessian.matrix for shared, hessian in own.items()})
    counts = world.gather(lambda: {shared: hessian.tokens for shared, hessian in own.items()})
    reduced = []
    for shared, matrix in matrices.items():
        hessian = own.get(shared) or InputHessian(shared, matrix)
        if hessian.drift is not None:
            for part in hessian.drift.sums:
                dist.all_reduce(part)
        reduced.append(replace(hessian, tokens=sum(rank.get(shared, 0) for rank in counts)))
    return reduced
