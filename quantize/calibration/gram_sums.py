"""Sums of the grams of a part's linears, while tokens pass forward and backward through the part.

Experts of a layer are many, and few tokens reach each of them. So they take less room than other linears:

    H   the rows of X stand for X^T X while an expert has seen fewer tokens than it has channels
    G   where those of a part's experts would take more than MOST_OWN bytes, the linears in the same place of all
        experts of a layer share one, the mean over the tokens of all of them. Each has a factor of its own, which makes
        the trace that of its own gradients

Where several processes share a run, each expert may have an owner, which alone holds its H after `reduce`.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

import torch
from torch import nn

from vllm_latq.errors import NumericalError
from vllm_latq.models.experts import EXPERT
from vllm_latq.quantize.calibration.experts import (
    alike_experts,
    alike_names,
    complete_experts,
    complete_gradients,
)
from vllm_latq.quantize.calibration.hessian import HessianCollector, InputHessian, reduce_hessians
from vllm_latq.quantize.lattice.grams import LayerStatistics, add_gram
from vllm_latq.quantize.machine.distributed import World
from vllm_latq.quantize.model.parts import Part
from vllm_latq.quantize.model.selection import merged_with

# Outputs whose gradients are correlated with each other; wider layers get a block-diagonal G. 64 MB per block.
LARGEST_BLOCK = 4096
# Bytes of the G of a part's experts above which they share G. Sharing costs some of the KL, see docs/mixtures.md.
MOST_OWN = 8 * 10**9


@dataclass(frozen=True)
class LayerSums:
    """The statistics of one linear as sums, of which `to` makes the means.

    Attributes:
        name: of the linear.
        hessian: of its input; its owner alone holds the tensors.
        outputs: float32 [b, b] each, diagonal blocks of the sum of g g^T; experts may share these tensors.
        share: by how much `outputs` counts for this linear.
        total: number of positions whose loss is taken.
        owner: the process that holds the Hessian; None if all do.
    """

    name: str
    hessian: InputHessian
    outputs: list[torch.Tensor]
    share: float
    total: int
    owner: int | None = None

    @property
    def leader(self) -> str:
        """Name of the first linear that reads the same input."""
        return self.hessian.shared.leader

    @property
    def channels(self) -> int:
        """Number of input channels."""
        return len(self.hessian.matrix)

    def to(self, device: torch.device) -> LayerStatistics:
        """Return the means on `device`; NumericalError if activations or gradients are not finite."""
        hessian = self.hessian
        inputs = hessian.gram().to(device) / hessian.tokens
        outputs = [
            gram.to(device) / (self.total / self.share) if self.share else gram.to(device) * 0 for gram in self.outputs
        ]
        for what, gram in (("activations", inputs), *(("gradients", gram) for gram in outputs)):
            if not torch.isfinite(gram).all():
                hint = "The model overflows on this text, or its weights are damaged."
                raise NumericalError(self.name, f"finite calibration {what}", "NaN or infinity", hint)
        return LayerStatistics(inputs, outputs, hessian.tokens, hessian.shared.leader, hessian.note)


def gram_bytes(linears: Mapping[str, nn.Linear]) -> tuple[int, int, int]:
    """Return the bytes of a part's grams: of its inputs, of all its outputs, and of outputs where experts may share G.

    Args:
        linears: name -> linear.
    """
    channels = {min([name, *merged_with(name, linears)]): linear.in_features for name, linear in linears.items()}
    outputs = {name: _output_bytes(linear) for name, linear in linears.items()}
    held = outputs
    if sum(size for name, size in outputs.items() if EXPERT.match(name)) > MOST_OWN:
        held = {EXPERT.sub(r"\1.", name): size for name, size in outputs.items()}
    return 4 * sum(size**2 for size in channels.values()), sum(outputs.values()), sum(held.values())


def _output_bytes(linear: nn.Linear) -> int:
    """Return the bytes of the G of a linear."""
    whole, rest = divmod(linear.out_features, LARGEST_BLOCK)
    return 4 * (whole * LARGEST_BLOCK**2 + rest**2)


class GramSums:
    """Sums of the grams of a part's linears while it runs.

    Args:
        part: the part.
        module: its module, with its weights in memory.
        world: whose processes have a part of the sums each, until `reduce`.
        scattered: whether each expert has an owner.

    Attributes:
        inputs: of each input, over the tokens that reach it.
        outputs: linear, the first one of experts that share G -> diagonal blocks, over the same tokens.
        traces: linear of an expert that shares G -> sum of g^T g over the tokens that reach it.
    """

    def __init__(self, part: Part, module: nn.Module, world: World, scattered: bool = False) -> None:
        self.part, self.module, self.world = part, module, world
        self.experts = alike_experts(module, part.linears)
        self.owners = {name: number % world.size for name, (_, number) in self.experts.items() if scattered}
        own = sum(_output_bytes(part.linears[name]) for name in self.experts)
        self.sharing = {name: first for name, (first, _) in self.experts.items() if own > MOST_OWN}
        self.inputs = HessianCollector(in_rows=self.experts.keys())
        self.outputs: dict[str, list[torch.Tensor]] = {}
        self.traces: dict[str, torch.Tensor] = {}

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Add up while the context lasts; passes forward and backward go inside."""
        handles = [linear.register_forward_hook(self._hook(name)) for name, linear in self.part.linears.items()]
        try:
            with self.inputs.watching(self.part.linears):
                yield
        finally:
            for handle in handles:
                handle.remove()

    def reduce(self, positions: int, run: Callable[[], None] | None = None) -> dict[str, LayerSums]:
        """Sum over the processes, and complete experts with fewer tokens than channels.

        Args:
            positions: number of this process's positions whose loss is taken.
            run: passes all its tokens through the part; None for a part without experts.

        Raises:
            NumericalError: a linear that was never called, or without a gradient.
        """
        reduce = partial(reduce_hessians, self.world, owners=self.owners)
        self.inputs.hessians = reduce(self.inputs.hessians)
        parts = {(name, index): part for name, parts in self.outputs.items() for index, part in enumerate(parts)}
        self.outputs = {}
        for (name, _), part in self.world.sum(parts).items():
            self.outputs.setdefault(name, []).append(part)
        total = sum(self.world.gather(lambda: positions))
        routed = self._tokens()
        if run is not None:
            with torch.no_grad():
                self.inputs.hessians = complete_experts(
                    self.module, self.part.linears, self.inputs.hessians, run, reduce, in_rows=True
                )
        if not self.sharing:
            complete_gradients(self.experts, self.outputs, routed, self._tokens())
        return self._checked(self._shares(routed), total)

    def _tokens(self) -> dict[str, int]:
        """Return linear -> number of tokens that its Hessian counts."""
        return {name: hessian.tokens for hessian in self.inputs.hessians for name in hessian.shared.names}

    def _shares(self, routed: Mapping[str, int]) -> dict[str, float]:
        """Return linear of an expert that shares G -> the share of its gradients in those of all experts.

        A token that stands in for a missing one brings the mean over all tokens that were routed to any expert.

        Args:
            routed: linear -> tokens that reached it, if any did.
        """
        counted, shares = self._tokens(), {}
        ranks = self.world.gather(lambda: {name: float(trace) for name, trace in self.traces.items()})
        traces = {name: sum(rank.get(name, 0.0) for rank in ranks) for name in self.sharing}
        for names in alike_names(self.experts) if self.sharing else ():
            everything, tokens = sum(traces[name] for name in names), sum(routed.get(name, 0) for name in names)
            for name in names:
                missing = counted.get(name, 0) - routed.get(name, 0)
                shares[name] = traces[name] / everything + missing / tokens if everything else 0.0
        return shares

    def _checked(self, shares: Mapping[str, float], total: int) -> dict[str, LayerSums]:
        """Return linear -> sums, over `total` positions; experts with their shares."""
        found = {}
        for hessian in self.inputs.hessians:
            for name in hessian.shared.names:
                outputs = self.outputs.get(self.sharing.get(name, name))
                if outputs is None:
                    hint = f"Leave it out, with --ignore {name}"
                    raise NumericalError(name, "a linear that the loss depends on", "no gradient", hint)
                share, owner = shares.get(name, 1.0), self.owners.get(name)
                found[name] = LayerSums(name, hessian, outputs, share, total, owner)
        if missing := sorted(self.part.linears.keys() - found.keys()):
            hint = f"Its block does not call it on this text: leave it out, with --ignore {missing[0]}"
            raise NumericalError(missing[0], "a linear that is called while the model runs", "no call", hint)
        return found

    def _hook(self, name: str) -> Callable[[nn.Module, object, torch.Tensor], None]:
        """Return a forward hook that adds the gradients at the output of a linear to its grams."""
        key = self.sharing.get(name, name)

        def add(gradient: torch.Tensor) -> None:
            rows = gradient.reshape(-1, gradient.shape[-1]).to(torch.float32)
            blocks = rows.split(LARGEST_BLOCK, 1)
            if key not in self.outputs:
                self.outputs[key] = [rows.new_zeros(part.shape[1], part.shape[1]) for part in blocks]
            for gram, part in zip(self.outputs[key], blocks, strict=True):
                add_gram(gram, part)
            if name in self.sharing:
                trace = rows.square().sum(dtype=torch.float64)
                self.traces[name] = self.traces[name] + trace if name in self.traces else trace

        def see(_module: nn.Module, _inputs: object, output: torch.Tensor) -> None:
            if output.requires_grad:  # not of constants, as Zaya has them before the first token
                output.register_hook(add)

        return see
