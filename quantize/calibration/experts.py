"""Experts that the calibration text hardly reaches.

A linear of an expert with c input channels needs more than c routed tokens for a Hessian of full rank. The rule for one
that gets fewer, n < c: H = H_routed + (c - n) / N * H_all, where H_all is what all N tokens of the layer would give had
they been sent to this expert. It counts c tokens, n of which are its own. Each layer record says so in its note.

Where the loss of the whole model counts, so do the gradients G of its outputs: each of the c - n tokens that stand in
brings the mean of g g^T over all tokens that were routed to any expert of the layer.

Invariant: an expert that enough tokens reach is quantized with its own tokens alone.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from vllm_latq.models.experts import Expert, Experts
from vllm_latq.quantize.calibration.hessian import HessianCollector, InputHessian
from vllm_latq.quantize.lattice.grams import SharedInput


def complete_experts(
    block: nn.Module,
    linears: Mapping[str, nn.Linear],
    hessians: list[InputHessian],
    run: Callable[[], None],
    reduce: Callable[[list[InputHessian]], list[InputHessian]] = list,
    in_rows: bool = False,
) -> list[InputHessian]:
    """Add to the Hessians of experts with fewer tokens than input channels.

    Args:
        block: a decoder block, with its weights in memory.
        linears: name -> linear of everything in it that is quantized.
        hessians: from routed tokens; those to be completed are changed.
        run: passes all calibration tokens through the block.
        reduce: sums Hessians over the processes that share the run; `hessians` are such sums.
        in_rows: whether experts may hold rows in place of matrices, see `InputHessian`.

    Returns:
        The Hessians, with those of experts that no token reached.
    """
    known = {name: hessian for hessian in hessians for name in hessian.shared.names}
    starved = _starved_inputs(block, linears, known)
    if not starved:
        return hessians
    collector = HessianCollector()
    wanted = {name: linears[name] for inputs in starved.values() for shared in inputs for name in shared.names}
    with _fed_everything(block, list(starved), collector, wanted):
        run()
    everything = {name: hessian for hessian in reduce(collector.hessians) for name in hessian.shared.names}
    added = []
    for inputs in starved.values():
        for shared in inputs:
            routed, full = known.get(shared.leader), everything[shared.leader]
            if routed is None:
                empty = full.matrix.to("meta") if in_rows else torch.zeros_like(full.matrix)
                routed = InputHessian(shared, empty, rows=[] if in_rows else None)
                added.append(routed)
            _complete(routed, full)
    return hessians + added


def _starved_inputs(
    block: nn.Module, linears: Mapping[str, nn.Linear], known: Mapping[str, InputHessian]
) -> dict[Expert, list[SharedInput]]:
    """Return the inputs of each expert that fewer tokens reach than they have channels; experts with none are left out.

    Args:
        block: a decoder block.
        linears: name -> linear of everything in it that is quantized.
        known: linear -> the Hessian of its input, from routed tokens.
    """
    names = {linear: name for name, linear in linears.items()}
    starved: dict[Expert, list[SharedInput]] = {}
    for expert in _experts_of(block):
        for group in expert.inputs.values():
            chosen = tuple(names[linear] for linear in group if linear in names)
            if chosen and (chosen[0] not in known or known[chosen[0]].tokens < group[0].in_features):
                starved.setdefault(expert, []).append(SharedInput(chosen))
    return starved


def _experts_of(block: nn.Module) -> Iterator[Expert]:
    """Yield every expert in a block."""
    for layer in block.modules():
        for expert in layer if isinstance(layer, Experts) else ():
            assert isinstance(expert, Expert)
            yield expert


def alike_experts(module: nn.Module, linears: Mapping[str, nn.Linear]) -> dict[str, tuple[str, int]]:
    """Return linear of a routed expert -> the first linear in the same place of its layer's experts, and its expert.

    Args:
        module: a part of a model.
        linears: name -> linear of everything in it that is quantized.
    """
    names: dict[nn.Module, str] = {linear: name for name, linear in linears.items()}
    found: dict[str, tuple[str, int]] = {}
    for layer in (one for one in module.modules() if isinstance(one, Experts)):
        for leaf, _ in layer[0].named_children():
            places = [(names.get(expert.get_submodule(leaf)), number) for number, expert in enumerate(layer)]
            alike = [(name, number) for name, number in places if name is not None]
            found.update({name: (alike[0][0], number) for name, number in alike})
    return found


def complete_gradients(
    experts: Mapping[str, tuple[str, int]],
    grams: dict[str, list[torch.Tensor]],
    routed: Mapping[str, int],
    counted: Mapping[str, int],
) -> None:
    """Add to the gradients of experts with fewer tokens than input channels what their stand-ins bring.

    Args:
        experts: see `alike_experts`.
        grams: name -> diagonal blocks of the sum of g g^T over routed tokens; changed, also for experts that had none.
        routed: name -> tokens that reached it, if any did.
        counted: name -> tokens that its Hessian counts, those that stand in included.
    """
    for alike in alike_names(experts):
        reached = [name for name in alike if name in routed]
        if not reached:
            continue
        tokens = sum(routed[name] for name in reached)
        mean = [sum(parts[1:], parts[0]) / tokens for parts in zip(*(grams[name] for name in reached), strict=True)]
        for name in alike:
            if missing := counted[name] - routed.get(name, 0):
                own = grams.get(name) or [torch.zeros_like(part) for part in mean]
                grams[name] = [one + missing * part for one, part in zip(own, mean, strict=True)]


def alike_names(experts: Mapping[str, tuple[str, int]]) -> list[list[str]]:
    """Return the linears in the same place of all experts of a layer, for each place; see `alike_experts`."""
    alike: dict[str, list[str]] = {}
    for name, (first, _) in experts.items():
        alike.setdefault(first, []).append(name)
    return list(alike.values())


def _complete(routed: InputHessian, full: InputHessian) -> None:
    channels = routed.matrix.shape[0]
    missing = channels - routed.tokens
    if routed.rows is not None:
        routed.stands_in = full.matrix, missing / full.tokens
    elif not routed.matrix.is_meta:  # where another process does not hold it
        routed.matrix.add_(full.matrix, alpha=missing / full.tokens)
    routed.note = (
        f"{routed.tokens} routed tokens for {channels} input channels: "
        f"the layer's {full.tokens} tokens stand in for the missing {missing}"
    )
    routed.tokens = channels


@contextmanager
def _fed_everything(
    block: nn.Module, experts: list[Expert], collector: HessianCollector, linears: Mapping[str, nn.Linear]
) -> Iterator[None]:
    """While the context lasts, each of `experts` also runs on all tokens of its layer, which `collector` watches."""

    def feed(module: Any, arguments: tuple[Any, ...]) -> None:
        mine = [expert for expert in module if expert in chosen]
        with collector.watching(linears):
            for expert in mine:
                expert(module.tokens(*arguments))

    chosen = set(experts)
    layers = [module for module in block.modules() if isinstance(module, Experts)]
    handles = [layer.register_forward_pre_hook(feed) for layer in layers]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
