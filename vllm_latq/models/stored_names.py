"""The names of a model's tensors in its checkpoint, where they differ from those in the model.

transformers renames and merges tensors when it loads some families (`embed_out` -> `lm_head`, one tensor per expert ->
one per layer). Its own rules are run on the names in the files, so what is written carries the names that were read,
and other readers of such checkpoints, vLLM among them, find what they look for.
"""

import re
from collections.abc import Collection
from typing import Any

from torch import nn
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import Concatenate, Transpose, WeightConverter, WeightRenaming, rename_source_key

from vllm_latq.errors import UnsupportedModelError
from vllm_latq.models.experts import FUSED, fused_experts, matrices_shape, split_experts

# Model tensor -> rule -> stored tensors; the rule is "" for a tensor that is stored as it is, under whatever name.
_Sources = dict[str, dict[str, list[str]]]


def stored_names(
    model: Any, stored: Collection[str], where: str, quantized: Collection[str] | None = None
) -> dict[str, str]:
    """Name of each tensor of the model -> its name in the checkpoint; its own where the checkpoint has none.

    Args:
        model: a transformers model on the meta device. Its fused experts are replaced by `Experts`, whose tensors are
            named one by one, if any of them is quantized, or is stored as transformers would not merge it.
        stored: names of all tensors in the checkpoint.
        where: the checkpoint, for errors.
        quantized: those of `stored` that must be linears of their own; None for all of experts.

    Raises:
        UnsupportedModelError: experts to be replaced that are not stored one by one.
    """
    sources = _sources(model, stored)
    linears_of = {
        name: [leaf for leaves in parts.values() for leaf in leaves] for name, parts in fused_experts(model).items()
    }
    counts = {name: matrices_shape(model.get_submodule(name), "down_proj")[0] for name in linears_of}
    merged = {name: _merged(name, sources) for name in counts}
    single = {name: _single(name, count, linears_of[name], sources) for name, count in counts.items()}
    linears = {tensor for rules in merged.values() for tensors in rules for tensor in tensors}
    if quantized is None or linears.intersection(quantized) or any(any(rules) for rules in single.values()):
        for name, count in counts.items():
            experts = split_experts(model.get_submodule(name), name)
            found = single[name] if any(single[name]) else merged[name]
            doubled = any("" in sources.get(f"{name}.{leaf}", {}) for leaf in FUSED)
            if doubled or [len(tensors) for tensors in found] != [count] * len(linears_of[name]):
                own = [rules for tensor, rules in sources.items() if tensor.startswith(f"{name}.")]
                held = [at for rules in own for tensors in rules.values() for at in tensors]
                matrices = ", ".join(leaf.removesuffix("_proj") for leaf in linears_of[name])
                expected = f"{matrices} of {count} experts, each stored once: one by one, or a layer's together"
                hint = "Is the checkpoint complete, and its config.json its own?"
                raise UnsupportedModelError(f"{where}: {name}", expected, f"{len(held)} tensors {held[:3]}", hint)
            model.set_submodule(name, experts)
            for leaf, tensors in zip(linears_of[name], found, strict=True):
                sources |= {f"{name}.{expert}.{leaf}.weight": {"": [at]} for expert, at in enumerate(tensors)}
    names = {}
    for name in model.state_dict():
        rules = sources.get(name, {"": [name]})
        # What is merged by another rule has no linear of its own, and is left to transformers.
        names[name] = rules[""][0] if list(rules) == [""] and len(rules[""]) == 1 else name
    return names


def fused_tensors(model: Any, stored: Collection[str]) -> dict[str, dict[str, str]]:
    """Fused experts of a model that the checkpoint holds fused, too: module -> its tensor -> the stored one.

    Args:
        model: a transformers model on the meta device.
        stored: names of all tensors in the checkpoint; one may hold the matrices of its experts transposed.
    """
    modules, found = fused_experts(model), {}
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
        rules = {leaf: sources.get(f"{name}.{leaf}", {}) for leaf in parts}
        tensors = {
            leaf: [tensor for rule in {"", *transposes} for tensor in own.get(rule, [])] for leaf, own in rules.items()
        }
        if all(len(names) == 1 for names in tensors.values()):
            found[name] = {leaf: names[0] for leaf, names in tensors.items()}
    return found


def joined_tensors(model: Any, stored: Collection[str]) -> dict[str, list[str]]:
    """Tensors that a model has from several of the checkpoint's, one behind the other: name -> these, in order.

    Linears are none of them, because in the checkpoint they are linears of their own.

    Args:
        model: a transformers model on the meta device.
        stored: names of all tensors in the checkpoint.
    """
    linears = {f"{name}.weight" for name, module in model.named_modules() if isinstance(module, nn.Linear)}
    joins = [
        tuple(rule.source_patterns)
        for rule in get_model_conversion_mapping(model)
        if isinstance(rule, WeightConverter)
        and [(type(step), vars(step).get("dim")) for step in rule.operations] == _JOIN
    ]
    return {
        name: [tensor for tensors in rules.values() for tensor in tensors]
        for name, rules in (_sources(model, stored).items() if joins else ())
        if name not in linears and tuple(rules) in joins and all(len(tensors) == 1 for tensors in rules.values())
    }


_JOIN = [(Concatenate, 0)]


def unmerged(conversions: list[Any]) -> list[Any]:
    """transformers' rules for a model whose experts have been replaced: rename their matrices, do not merge them."""
    kept = []
    for conversion in conversions:
        targets = conversion.target_patterns if isinstance(conversion, WeightConverter) else []
        leaves = next((leaves for leaf, leaves in _LEAVES.items() if any(t.endswith(leaf) for t in targets)), None)
        if leaves is None:
            kept.append(conversion)
            continue
        # Of one that only transposes, one pattern stands for both of gate and up, and renames nothing.
        for pattern, leaf in zip(conversion.source_patterns, leaves, strict=False):
            own = re.fullmatch(r".*experts\.\*\.(\w+)\.weight\$?", pattern)
            if own and own[1] != leaf:
                kept.append(WeightRenaming(rf"\.experts\.(\d+)\.{own[1]}\.", rf".experts.\1.{leaf}."))
    return kept


_LEAVES = {f"experts.{leaf}": linears for leaf, linears in FUSED.items()}


def _sources(model: Any, stored: Collection[str]) -> _Sources:
    transforms = get_model_conversion_mapping(model)
    renamings = [transform for transform in transforms if isinstance(transform, WeightRenaming)]
    converters = [transform for transform in transforms if isinstance(transform, WeightConverter)]
    expected = model.state_dict()
    order = ["", *(pattern for converter in converters for pattern in converter.source_patterns)]
    found: _Sources = {}
    for name in stored:
        target, rule = rename_source_key(name, renamings, converters, model.base_model_prefix, expected)
        if target not in expected and name in expected:
            target, rule = name, None
        found.setdefault(target, {}).setdefault(rule or "", []).append(name)
    return {target: {rule: rules[rule] for rule in sorted(rules, key=order.index)} for target, rules in found.items()}


def _merged(name: str, sources: _Sources) -> list[list[str]]:
    """Stored matrices that transformers merges into a layer's fused experts, by its rules and in the experts' order."""
    fused = [sources.get(f"{name}.{leaf}", {}) for leaf in FUSED]
    return [sorted(names, key=_natural) for rules in fused for rule, names in rules.items() if rule]


def _single(name: str, count: int, linears: list[str], sources: _Sources) -> list[list[str]]:
    """Stored matrices of a layer's experts under the names of `Experts`, by linear and in the experts' order."""
    names = [[f"{name}.{expert}.{leaf}.weight" for expert in range(count)] for leaf in linears]
    return [[sources[tensor][""][0] for tensor in tensors if "" in sources.get(tensor, {})] for tensors in names]


def _natural(name: str) -> list[tuple[int, str]]:
    """Sort key that puts expert 10 after expert 9."""
    return [(int(part), "") if part.isdigit() else (-1, part) for part in name.split(".")]
