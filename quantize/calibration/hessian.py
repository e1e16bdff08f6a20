"""Hessians X^T X of a block's linears, accumulated while the block runs: one per shared input.

Experts may hold the rows of X in place of X^T X, which are the smaller ones while an expert has seen few tokens.

Invariant: linears that are called with the same tensor (q/k/v, gate/up) share one accumulator. In latent attention the
up-projections read a different tensor.
"""

from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from weakref import ref

import torch
import torch.distributed as dist
from torch import nn

from vllm_latq.quantize.lattice.grams import SharedInput, add_gram
from vllm_latq.quantize.lattice.targets import Drift
from vllm_latq.quantize.machine.distributed import World


@dataclass
class InputHessian:
    """X^T X of one input.

    Attributes:
        shared: the linears that read this input.
        matrix: float32 [c, c], the sum over all tokens seen; on the meta device where `rows` stand for it, or another
            process holds it.
        tokens: number of tokens seen.
        drift: how far this input is from the original model's; None where the original model is not run.
        note: what the records of these linears say about the input; empty if nothing.
        rows: rows of X, [n, c] each and fewer than c in all, in place of the matrix; None where the matrix is held.
        stands_in: X^T X of other tokens, and by how much it counts beside the rows.
    """

    shared: SharedInput
    matrix: torch.Tensor
    tokens: int = 0
    drift: Drift | None = None
    note: str = ""
    rows: list[torch.Tensor] | None = None
    stands_in: tuple[torch.Tensor, float] | None = None

    def gram(self) -> torch.Tensor:
        """Return X^T X with what stands in for missing tokens, float32 [c, c]."""
        if self.rows is None:
            return self.matrix
        device = self.stands_in[0].device if self.stands_in else self.rows[0].device
        gram = torch.zeros_like(self.matrix, device=device)
        for rows in self.rows:
            _add(gram, rows)
        return gram if self.stands_in is None else gram.add_(self.stands_in[0], alpha=self.stands_in[1])

    def add(self, inputs: torch.Tensor, original: torch.Tensor | None = None) -> None:
        """Accumulate inputs [..., c], and the original model's inputs for the same tokens."""
        rows = _rows(inputs)
        self.tokens += rows.shape[0]
        if self.rows is not None:
            self.rows.append(inputs.detach().reshape(rows.shape))
            if self.tokens >= rows.shape[1]:
                self.matrix, self.rows = self.gram(), None
        else:
            _add(self.matrix, inputs)
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
        in_rows: names of linears whose Hessians hold rows while those are fewer than the channels.
        hessians: in the order in which the block first reads their inputs.
    """

    in_rows: Collection[str] = ()
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
                self._by_linear[name] = shared or self._new(inputs, name in self.in_rows)
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

    def _new(self, inputs: torch.Tensor, in_rows: bool) -> InputHessian:
        size, device = inputs.shape[-1], torch.device("meta") if in_rows else inputs.device
        matrix = torch.zeros(size, size, dtype=torch.float32, device=device)
        hessian = InputHessian(SharedInput(()), matrix, rows=[] if in_rows else None)
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


def _add(gram: torch.Tensor, inputs: torch.Tensor) -> None:
    """Add inputs [..., c] to their gram, float32 [c, c]."""
    rows = _rows(inputs)
    with _faster_products(inputs.dtype):
        add_gram(gram, rows)


def _rows(inputs: torch.Tensor) -> torch.Tensor:
    """[..., c] -> float32 [n, c]."""
    return inputs.detach().reshape(-1, inputs.shape[-1]).to(torch.float32)


def reduce_hessians(
    world: World, hessians: list[InputHessian], owners: Mapping[str, int] | None = None
) -> list[InputHessian]:
    """Sum Hessians over all ranks, in place; inputs that only other ranks' tokens reached are added.

    Args:
        world: the ranks.
        hessians: of this rank's tokens.
        owners: linear -> the one rank that needs its Hessian. An input whose linears have no owner, or several, is
            summed on all ranks.
    """
    if world.size == 1:
        return hessians
    own, reduced = {hessian.shared: hessian for hessian in hessians}, []
    ranks = world.gather(lambda: {shared: _Head.of(hessian) for shared, hessian in own.items()})
    for shared, first in {shared: head for rank in ranks for shared, head in rank.items()}.items():
        hessian = own.get(shared)
        drift = None if hessian is None else hessian.drift
        for part in drift.sums if drift else ():
            dist.all_reduce(part)
        heads = [rank[shared] if shared in rank else replace(first, tokens=0) for rank in ranks]
        found = _summed(world, shared, hessian, heads, owners or {})
        reduced.append(replace(found, drift=drift, note=hessian.note if hessian else ""))
    return reduced


@dataclass(frozen=True)
class _Head:
    """Description of a rank's Hessian.

    Attributes:
        tokens, channels: numbers of both.
        rows: dtype of the rows that stand for the matrix; None for a matrix.
    """

    tokens: int
    channels: int
    rows: torch.dtype | None

    @classmethod
    def of(cls, hessian: InputHessian) -> "_Head":
        """Return the description of a Hessian."""
        return cls(hessian.tokens, len(hessian.matrix), hessian.rows[0].dtype if hessian.rows else None)


def _summed(
    world: World, shared: SharedInput, own: InputHessian | None, heads: list[_Head], owners: Mapping[str, int]
) -> InputHessian:
    """Return the sum of the Hessians of one input, whose tensors the owner alone gets if it has one."""
    tokens, channels = sum(head.tokens for head in heads), heads[0].channels
    dtype = heads[0].rows
    named = {owners.get(name) for name in shared.names}
    owner = named.pop() if len(named) == 1 else None
    in_rows = dtype is not None and tokens < channels and all(head.rows == dtype for head in heads)
    if in_rows:
        tensor = torch.zeros(tokens, channels, dtype=dtype, device=world.device)
        if own is not None:
            assert own.rows
            start = sum(head.tokens for head in heads[: world.rank])
            torch.cat(own.rows, out=tensor[start : start + own.tokens])
    else:
        empty = torch.zeros(channels, channels, dtype=torch.float32, device=world.device)
        tensor = empty if own is None else own.gram()
    world.add_up(tensor, owner)
    matrix = torch.empty(channels, channels, dtype=torch.float32, device="meta")
    if owner not in (None, world.rank):
        return InputHessian(shared, matrix, tokens)
    return InputHessian(shared, matrix, tokens, rows=[tensor]) if in_rows else InputHessian(shared, tensor, tokens)
