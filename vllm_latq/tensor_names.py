"""The names of a model's tensors in its checkpoint, where they differ from those in the model.

transformers renames and merges tensors when it loads some families (`embed_out` -> `lm_head`, one tensor per expert ->
one per layer). Its own rules are run on the names in the files, so what is written carries the names that were read,
and other readers of such checkpoints, vLLM among them, find what they look for.
"""

import re
from collections.abc import Collection, Mapping
from typing import Any

from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key

from vllm_latq.errors import UnsupportedModelError
from vllm_latq.experts import PROJECTIONS, Experts, fused_experts

# Model tensor -> rule -> stored tensors; the rule is "" for a tensor that is stored as it is, under whatever name.
_Sources = dict[str, dict[str, list[str]]]


def stored_names(model: Any, stored: Collection[str], where: str, unfuse: Collection[str]) -> dict[str, str]:
    """Name of each tensor of the model -> its name in the checkpoint; its own where the checkpoint has none.

    Args:
        model: a transformers model on the meta device. Fused experts made of a tensor in `unfuse` are replaced by
            `Experts`, the tensors of which are then named one by one.
        stored: names of all tensors in the checkpoint.
        where: the checkpoint, for errors.
        unfuse: those of `stored` that must be linears of their own.

    Raises:
        UnsupportedModelError: experts that are not stored one by one.
    """
    sources = _sources(model, stored)
    for name in fused_experts(model):
        fused = {leaf: sources.get(f"{name}.{leaf}", {}) for leaf in ("gate_up_proj", "down_proj")}
        made_of = [tensor for rules in fused.values() for tensors in rules.values() for tensor in tensors]
        if not unfuse or set(made_of).intersection(unfuse):
            model.set_submodule(name, Experts(model.get_submodule(name), name))
            sources |= _split(name, len(model.get_submodule(name)), [*fused.values()], where)
    names = {}
    for name in model.state_dict():
        rules = sources.get(name, {"": [name]})
        # What is merged by another rule has no linear of its own, and is left to transformers.
        names[name] = rules[""][0] if list(rules) == [""] and len(rules[""]) == 1 else name
    return names


def unmerged(conversions: list[Any]) -> list[Any]:
    """transformers' rules for a model whose experts have been replaced: rename their matrices, do not merge them."""
    kept = []
    for conversion in conversions:
        targets = conversion.target_patterns if isinstance(conversion, WeightConverter) else []
        leaves = next((leaves for leaf, leaves in _LEAVES.items() if any(t.endswith(leaf) for t in targets)), None)
        if leaves is None:
            kept.append(conversion)
            continue
        for pattern, leaf in zip(conversion.source_patterns, leaves, strict=True):
            own = re.fullmatch(r".*experts\.\*\.(\w+)\.weight\$?", pattern)
            if own and own[1] != leaf:
                kept.append(WeightRenaming(rf"\.experts\.(\d+)\.{own[1]}\.", rf".experts.\1.{leaf}."))
    return kept


_LEAVES = {"experts.gate_up_proj": PROJECTIONS[:2], "experts.down_proj": PROJECTIONS[2:]}


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


def _split(name: str, count: int, fused: list[Mapping[str, list[str]]], where: str) -> _Sources:
    """The sources of fused tensors as one entry per expert and projection."""
    stored = [sorted(names, key=_natural) for rules in fused for rule, names in rules.items() if rule]
    if [len(names) for names in stored] != [count] * len(PROJECTIONS):
        found = "; ".join(names[0] for rules in fused for names in rules.values()) or "none"
        hint = "Checkpoints that store the experts of a layer as one tensor are not supported."
        expected = f"three stored matrices for each of {count} experts"
        raise UnsupportedModelError(f"{where}: {name}", expected, f"those of {found}", hint)
    return {
        f"{name}.{expert}.{leaf}.weight": {"": [tensor]}
        for leaf, names in zip(PROJECTIONS, stored, strict=True)
        for expert, tensor in enumerate(names)
    }


def _natural(name: str) -> list[tuple[int, str]]:
    """Sort key that puts expert 10 after expert 9."""
    return [(int(part), "") if part.isdigit() else (-1, part) for part in name.split(".")]
