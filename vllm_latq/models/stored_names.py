"""The names of a model's tensors in its checkpoint, where they differ from the names in the model.

transformers renames and merges tensors when it loads some families (`embed_out` -> `lm_head`, one tensor per expert ->
one per layer). This module runs transformers' own rules on the names in the files. A quantized checkpoint then carries
the names of the original, and other readers of such checkpoints, vLLM among them, find the names they look for.
"""

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import nn
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import Concatenate, Transpose, WeightConverter, WeightRenaming, rename_source_key

from vllm_latq.errors import UnsupportedModelError
from vllm_latq.models.experts import BIAS, EXPERT, FUSED, fused_experts, is_interleaved, matrices_shape, split_experts
from vllm_latq.models.joined import JoinedLinears


@dataclass(frozen=True)
class _Source:
    """The stored tensors from which transformers makes one tensor of the model.

    Attributes:
        plain: tensors that are taken as they are, whatever their names; more than one if several names map to one.
        converted: pattern of transformers' conversion rule -> tensors that match it, patterns in the rules' order.
    """

    plain: list[str] = field(default_factory=list)
    converted: dict[str, list[str]] = field(default_factory=dict)

    @property
    def single(self) -> str | None:
        """The stored tensor that is the model's tensor; None if there is no such tensor, or more than one."""
        return self.plain[0] if len(self.plain) == 1 and not self.converted else None

    @property
    def tensors(self) -> list[str]:
        """The stored tensors, plain ones first."""
        return [*self.plain, *(tensor for tensors in self.converted.values() for tensor in tensors)]


_NOTHING = _Source()


@dataclass(frozen=True)
class _ExpertLayer:
    """Experts of one layer that the model holds in fused tensors, and the stored matrices of its experts.

    Attributes:
        name: of the module that holds the fused tensors.
        count: number of experts.
        linears: names of an expert's linears.
        merged: for each linear the stored matrices that transformers merges, in the order of the experts.
        split: for each linear the stored matrices that have the names of `Experts`, in the order of the experts.
    """

    name: str
    count: int
    linears: list[str]
    merged: list[list[str]]
    split: list[list[str]]

    @property
    def matrices(self) -> list[list[str]]:
        """For each linear the stored matrices, in the order of the experts."""
        return self.split if any(self.split) else self.merged


def stored_names(
    model: Any, stored: Collection[str], where: str, quantized: Collection[str] | None = None
) -> dict[str, str]:
    """Map the name of each tensor of the model to its name in the checkpoint, or to itself if the checkpoint has none.

    Args:
        model: a transformers model on the meta device. Its fused experts are replaced by `Experts`, whose tensors are
            named one by one, if any expert is quantized, or is stored as transformers would not merge it. Linears that
            transformers concatenates are replaced by `JoinedLinears`.
        stored: names of all tensors in the checkpoint.
        where: the checkpoint, for errors.
        quantized: names of `stored` that must be linears of their own; None for all experts.

    Raises:
        UnsupportedModelError: experts to be replaced are not stored one by one.
    """
    sources = _sources(model, stored)
    layers = _expert_layers(model, sources)
    mergeable = {tensor for layer in layers for tensors in layer.merged for tensor in tensors}
    if quantized is None or mergeable.intersection(quantized) or any(any(layer.split) for layer in layers):
        for layer in layers:
            experts = split_experts(model.get_submodule(layer.name), layer.name)
            _check_stored_once(layer, sources, where)
            model.set_submodule(layer.name, experts)
            for linear, tensors in zip(layer.linears, layer.matrices, strict=True):
                for expert, tensor in enumerate(tensors):
                    sources[f"{layer.name}.{expert}.{linear}.weight"] = _Source([tensor])
                    bias = f"{tensor.removesuffix('.weight')}.bias"
                    sources[f"{layer.name}.{expert}.{linear}.bias"] = _Source([bias])
    for name, parts in _joined_linears(model, sources).items():
        model.set_submodule(name, JoinedLinears(model.get_submodule(name), list(parts)))
        sources |= {f"{name}.{leaf}.weight": _Source([tensor]) for leaf, tensor in parts.items()}
    # A tensor that transformers makes by another rule has no linear of its own, and keeps its name.
    return {name: sources.get(name, _NOTHING).single or name for name in model.state_dict()}


def check_mergeable(model: Any, stored: Collection[str], quantized: Collection[str], where: str) -> None:
    """Raise UnsupportedModelError unless transformers' own rules merge all experts that are stored one by one.

    transformers has no rule for single experts of models that are published with a layer's experts in one tensor, such
    as gpt-oss. It would leave such experts at random values.

    Args:
        model: a transformers model on the meta device.
        stored: names of all tensors in the checkpoint, with `NAME.weight` for each quantized linear.
        quantized: names of `stored` that stand for quantized linears.
        where: the checkpoint, for errors.
    """
    for layer in _expert_layers(model, _sources(model, stored)):
        fused = model.get_submodule(layer.name)
        biased = any(leaf.endswith(BIAS) for leaf, _ in fused.named_parameters())
        merged = {tensor for tensors in layer.merged for tensor in tensors}
        if any(layer.split) or (not merged.isdisjoint(quantized) and (biased or is_interleaved(fused))):
            expected = "experts that transformers merges by its own rules, as Mixtral's"
            found = f"{layer.count} single experts, which it would leave at random values"
            raise UnsupportedModelError(f"{where}: {layer.name}", expected, found, "Serve it with the plugin.")


def module_names(model: Any, linears: Collection[str], where: str) -> dict[str, str]:
    """Map quantized linears to their names in the model, where the checkpoint has other names for them.

    Experts that transformers merges have no names there, and are left out.

    Args:
        model: a transformers model on the meta device.
        linears: their names in the checkpoint.
        where: the checkpoint, for errors.

    Raises:
        UnsupportedModelError: a linear that transformers joins with others.
    """
    weights, expected = {f"{name}.weight": name for name in linears}, model.state_dict()
    sources = {name: source for name, source in _sources(model, weights).items() if name in expected}
    modules = {source.single: name.removesuffix(".weight") for name, source in sources.items()}
    for weight, linear in weights.items():
        if weight not in modules and not EXPERT.match(linear):
            found = "a linear that transformers joins with others, or does not have"
            hint = "Serve it with the plugin."
            raise UnsupportedModelError(f"{where}: {linear}", "linears that transformers loads one by one", found, hint)
    return {linear: modules[weight] for weight, linear in weights.items() if modules.get(weight, linear) != linear}


def _joined_linears(model: Any, sources: Mapping[str, _Source]) -> dict[str, dict[str, str]]:
    """Map each linear without a bias that is stored as several, of equal size, to these: leaf of a name -> tensor."""
    joins = _joins(model)
    linears = {name for name, module in model.named_modules() if isinstance(module, nn.Linear) and module.bias is None}
    found = {}
    for name in sorted(linears):
        source = sources.get(f"{name}.weight", _NOTHING)
        if tuple(source.converted) in joins and len(source.tensors) == len(source.converted):
            found[name] = {tensor.split(".")[-2]: tensor for tensor in source.tensors}
    return found


def _joins(model: Any, dim: int = 0) -> set[tuple[str, ...]]:
    """Return the patterns of each rule by which transformers concatenates tensors in a dimension: 0 for rows."""
    return {
        tuple(rule.source_patterns)
        for rule in get_model_conversion_mapping(model)
        if isinstance(rule, WeightConverter)
        and [(type(step), vars(step).get("dim")) for step in rule.operations] == [(Concatenate, dim)]
    }


def _single_experts(conversions: Sequence[Any]) -> list[WeightRenaming]:
    """Return rules for single experts of families whose stacks are stored a level above them.

    transformers has a rule for the stack alone: `.moe.down_proj.weight` -> `.mlp.experts.down_proj`.
    """
    found = []
    for rule in conversions:
        if isinstance(rule, WeightRenaming) and rule.target_patterns[0].endswith(".experts.down_proj"):
            above = re.fullmatch(r"\\\.(\w+)\\\.down_proj\\\.weight\$", rule.source_patterns[0])
            if above:
                found.append(
                    WeightRenaming(rf"\.{above[1]}\.experts\.", rule.target_patterns[0].removesuffix("down_proj"))
                )
    return found


def _expert_layers(model: Any, sources: Mapping[str, _Source]) -> list[_ExpertLayer]:
    """Find the fused experts of a model, and their stored matrices."""
    layers = []
    for name, parts in fused_experts(model).items():
        linears = [linear for linears in parts.values() for linear in linears]
        count = matrices_shape(model.get_submodule(name), "down_proj")[0]
        fused = [sources.get(f"{name}.{leaf}", _NOTHING) for leaf in FUSED]
        merged = [sorted(tensors, key=_natural) for source in fused for tensors in source.converted.values()]
        own = [
            [sources.get(f"{name}.{expert}.{linear}.weight", _NOTHING) for expert in range(count)] for linear in linears
        ]
        split = [[source.plain[0] for source in matrices if source.plain] for matrices in own]
        layers.append(_ExpertLayer(name, count, linears, merged, split))
    return layers


def _check_stored_once(layer: _ExpertLayer, sources: Mapping[str, _Source], where: str) -> None:
    """Raise UnsupportedModelError unless each matrix of a layer's experts is stored as one tensor."""
    doubled = any(sources.get(f"{layer.name}.{leaf}", _NOTHING).plain for leaf in FUSED)
    if not doubled and [len(tensors) for tensors in layer.matrices] == [layer.count] * len(layer.linears):
        return
    own = [source for tensor, source in sources.items() if tensor.startswith(f"{layer.name}.")]
    held = [tensor for source in own for tensor in source.tensors]
    matrices = ", ".join(linear.removesuffix("_proj") for linear in layer.linears)
    expected = f"{matrices} of {layer.count} experts, each stored once: one by one, or a layer's together"
    hint = "Check that the checkpoint is complete, and that config.json belongs to it."
    raise UnsupportedModelError(f"{where}: {layer.name}", expected, f"{len(held)} tensors {held[:3]}", hint)


def fused_tensors(model: Any, stored: Collection[str]) -> dict[str, dict[str, str]]:
    """Map each module whose experts the checkpoint also holds fused: module -> its tensor -> the stored tensor.

    Where gate and up are in two stored tensors, as Step-3.5's, they stand in place of the module's one.

    Args:
        model: a transformers model on the meta device.
        stored: names of all tensors in the checkpoint; one may hold the matrices of its experts transposed.
    """
    modules, found = fused_experts(model), {}
    biases = {name for name, _ in model.named_parameters() if name.endswith(BIAS)}
    if not modules:
        return {}
    transposes = {
        pattern
        for rule in get_model_conversion_mapping(model)
        if isinstance(rule, WeightConverter) and all(isinstance(step, Transpose) for step in rule.operations)
        for pattern in rule.source_patterns
    }
    sources = _sources(model, stored)
    for name, parts in modules.items():
        leaves = [*parts, *(f"{leaf}{BIAS}" for leaf in parts if f"{name}.{leaf}{BIAS}" in biases)]
        own = {leaf: sources.get(f"{name}.{leaf}", _NOTHING) for leaf in leaves}
        tensors = {
            leaf: [*source.plain, *(tensor for rule in transposes for tensor in source.converted.get(rule, []))]
            for leaf, source in own.items()
        }
        halves = list(own["gate_up_proj"].converted.items()) if "gate_up_proj" in own else []
        if [len(names) for _, names in halves] == [1, 1] and tuple(rule for rule, _ in halves) in _joins(model, 1):
            del tensors["gate_up_proj"]
            tensors |= {leaf: names for leaf, (_, names) in zip(FUSED["gate_up_proj"], halves, strict=True)}
        if all(len(names) == 1 for names in tensors.values()):
            found[name] = {leaf: names[0] for leaf, names in tensors.items()}
    return found


def joined_tensors(model: Any, stored: Collection[str]) -> dict[str, list[str]]:
    """Map each tensor that transformers concatenates to the stored tensors it consists of, in order.

    Linears are left out, because in the checkpoint they are linears of their own.

    Args:
        model: a transformers model on the meta device.
        stored: names of all tensors in the checkpoint.
    """
    linears = {f"{name}.weight" for name, module in model.named_modules() if isinstance(module, nn.Linear)}
    joins = _joins(model)
    return {
        name: source.tensors
        for name, source in (_sources(model, stored).items() if joins else ())
        if name not in linears
        and not source.plain
        and tuple(source.converted) in joins
        and all(len(tensors) == 1 for tensors in source.converted.values())
    }


def split_tensors(model: Any) -> set[str]:
    """Return the names of a model's tensors that transformers cuts out of larger stored ones, as q out of qkv."""
    rules = (rule for rule in get_model_conversion_mapping(model) if isinstance(rule, WeightConverter))
    targets = [target for rule in rules if len(rule.target_patterns) > 1 for target in rule.target_patterns]
    return {name for name in model.state_dict() if any(re.search(target, name) for target in targets)}


def unmerged(conversions: list[Any], joined: Collection[str]) -> list[Any]:
    """Return transformers' rules for a model whose experts were replaced: rename their matrices, do not merge them.

    Args:
        conversions: transformers' rules.
        joined: names of linears in `JoinedLinears`, whose parts are renamed and not joined.
    """
    kept = []
    fused = {name.split(".")[-2] for name in joined}
    for conversion in conversions:
        targets = conversion.target_patterns if isinstance(conversion, WeightConverter) else []
        leaves = next((leaves for leaf, leaves in _LEAVES.items() if any(t.endswith(leaf) for t in targets)), None)
        if leaves is None:
            if not any(target.endswith(f"{leaf}.weight") for leaf in fused for target in targets):
                kept.append(conversion)
            continue
        # In a rule that only transposes, one pattern stands for both gate and up, and renames nothing.
        for pattern, leaf in zip(conversion.source_patterns, leaves, strict=False):
            own = re.fullmatch(r".*experts\.\*\.(\w+)\.weight\$?", pattern)
            if own and own[1] != leaf:
                kept.append(WeightRenaming(rf"\.experts\.(\d+)\.{own[1]}\.", rf".experts.\1.{leaf}."))
    for parent, leaf, part in sorted({tuple(name.split(".")[-3:]) for name in joined}):
        kept.append(WeightRenaming(rf"\.{parent}\.{part}\.", f".{parent}.{leaf}.{part}."))
    return kept + _single_experts(conversions)


_LEAVES = {f"experts.{leaf}": linears for leaf, linears in FUSED.items()}


def _sources(model: Any, stored: Collection[str]) -> dict[str, _Source]:
    """Run transformers' rules on the stored names: name of a tensor of the model -> its source."""
    transforms = get_model_conversion_mapping(model)
    renamings = [transform for transform in transforms if isinstance(transform, WeightRenaming)]
    renamings += _single_experts(transforms)
    converters = [transform for transform in transforms if isinstance(transform, WeightConverter)]
    expected = model.state_dict()
    order = [pattern for converter in converters for pattern in converter.source_patterns]
    found: dict[str, _Source] = {}
    for name in stored:
        target, rule = rename_source_key(name, renamings, converters, model.base_model_prefix, expected)
        if target not in expected and name in expected:
            target, rule = name, None
        source = found.setdefault(target, _Source())
        (source.converted.setdefault(rule, []) if rule else source.plain).append(name)
    return {
        target: _Source(
            source.plain, {rule: source.converted[rule] for rule in sorted(source.converted, key=order.index)}
        )
        for target, source in found.items()
    }


def _natural(name: str) -> list[tuple[int, str]]:
    """Return a sort key that puts expert 10 after expert 9."""
    return [(int(part), "") if part.isdigit() else (-1, part) for part in name.split(".")]
