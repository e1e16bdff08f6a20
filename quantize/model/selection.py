"""Parts that are never quantized.

Routers of experts, modules that choose or mix tokens or streams, linears with a forward of their own, Mamba-1 mixers,
towers, an encoder's pooler and heads.
"""

import warnings
from collections.abc import Collection, Sequence
from dataclasses import replace

from torch import nn

from vllm_latq.errors import ConfigError, NumericalError, UnsupportedModelError, nearest
from vllm_latq.format.config import CheckpointConfig, covers
from vllm_latq.format.encodings.registry import tensor_specs
from vllm_latq.format.scheme import WHOLE_ROW
from vllm_latq.models.experts import Experts
from vllm_latq.quantize.model.anatomy import is_linear, outermost
from vllm_latq.quantize.model.decoder import Decoder
from vllm_latq.quantize.model.meta_model import POOLER
from vllm_latq.quantize.recipe import Recipe

# Modules beside the experts that weigh them: small, and no other layer can make good a wrong choice of expert.
ROUTERS = ("gate", "router", "shared_expert_gate")
# Endings of the names of further modules, which vLLM keeps unquantized:
#   altup, hyper_connection    mix several streams of hidden states (Gemma 3n, Qwen 4): they are small, and vLLM reads
#                              their weights itself
#   indexer                    chooses the tokens that sparse attention sees (DeepSeek-V3.2, GLM-5): no gradient
#                              reaches it
#   compressor                 averages the keys of several tokens into one (DeepSeek-V4)
SPECIAL = ("altup", "hyper_connection", "indexer", "compressor")
# Modules of a family, by its `model_type`, to which vLLM's model gives no quantization. vLLM would not load a
# checkpoint in which their linears are quantized.
FLOATS_IN_VLLM = {"glm5_next_text": "self_attn"}
# Linears that only the first generation of Mamba mixers has: vLLM has no quantized linears for them.
MAMBA = ("x_proj", "dt_proj")
# Group sizes that the GPU kernels know, the largest first.
GROUP_SIZES = (128, 64, 32)
MERGED = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
Shape = tuple[int, ...]


def merged_with(name: str, linears: Collection[str]) -> list[str]:
    """Linears that most vLLM models merge with a linear into one matrix, which is quantized whole or not at all."""
    module, _, leaf = name.rpartition(".")
    parts = {f"{module}.{part}" for parts in MERGED if leaf in parts for part in parts}
    return sorted(parts & set(linears) - {name})


def unreached(names: Sequence[str], linears: Collection[str], what: str) -> NumericalError:
    """The error for linears to which nothing but zeros comes, with what to ignore for all of them.

    Args:
        names: of them.
        linears: names of all that are quantized.
        what: should have come.
    """
    ignored = []
    for name in names:
        module, experts, _ = name.partition(".experts.")
        # Experts of a layer are quantized all or not at all.
        ignored += [f"{module}.experts"] if experts else [name, *merged_with(name, linears)]
    where, *others = names
    found = f"none but zeros{', and so for ' * bool(others)}{', '.join(others)}"
    hint = "Calibrate on other text, or leave out what does not depend on it: --ignore "
    return NumericalError(where, what, found, hint + " ".join(dict.fromkeys(ignored)))


def never_quantized(decoder: Decoder) -> tuple[str, ...]:
    """Names in the checkpoint of modules that stay as they are, whatever the recipe.

    Routers and the like, linears outside the blocks or with a forward of their own, and all that is beside the language
    model. Those of an encoder, its pooler and heads among them, are without the prefix that a model with a head adds.
    """
    anatomy = decoder.anatomy
    outer = [
        name
        for name, module in decoder.model.named_modules()
        if isinstance(module, nn.Linear)
        and not (is_linear(module) and (name == anatomy.head or name.startswith(f"{anatomy.blocks}.")))
    ]
    if decoder.encoder:
        prefix = f"{decoder.model.base_model_prefix}."
        heads = [name.removesuffix(".weight").removeprefix(prefix) for name in _others(decoder)]
        return tuple(dict.fromkeys((POOLER, *outer, *heads)))
    outer = [decoder.stored_module(name) for name in outer if not anatomy.in_tower(f"{name}.weight")]
    return (*_routers(decoder), *outer, *beside(decoder))


def beside(decoder: Decoder) -> dict[str, list[Shape]]:
    """Name in the checkpoint of each module beside a language model -> shapes of its matrices.

    The towers of a multimodal model, and what transformers leaves out, such as layers that predict further tokens.
    """
    others = {} if decoder.encoder else _others(decoder)
    return {
        module: [shape for name, shape in others.items() if name.startswith(f"{module}.")]
        for module in outermost(others, decoder.known)
    }


def matrices(decoder: Decoder) -> dict[str, Shape]:
    """Name in the checkpoint -> shape of everything with two or more dimensions, except embeddings and towers."""
    modules = decoder.model.named_modules()
    tables = {f"{name}.weight" for name, module in modules if isinstance(module, nn.Embedding)}
    inside = {
        decoder.stored[name]: tuple(tensor.shape)
        for name, tensor in decoder.model.state_dict().items()
        if tensor.dim() > 1 and name not in tables and not decoder.anatomy.in_tower(name)
    }
    return inside | (_others(decoder) if decoder.encoder else {})


def _others(decoder: Decoder) -> dict[str, Shape]:
    """Name in the checkpoint -> shape of the matrices that are not of the language model, or of the encoder."""
    known, store = decoder.known, decoder.store
    shapes = {name: store.shape(name) for name in store.names() if name not in known}
    return {name: shape for name, shape in shapes.items() if len(shape) > 1}


def _routers(decoder: Decoder) -> tuple[str, ...]:
    """Return names in the checkpoint of the parts of routers, SPECIAL modules, Mamba-1 mixers, and FLOATS_IN_VLLM."""
    modules = list(decoder.model.named_modules())
    floats = FLOATS_IN_VLLM.get(decoder.config.get_text_config().model_type)
    parents = {name.rpartition(".")[0] for name, module in modules if isinstance(module, Experts)}
    routers = [f"{parent}.{leaf}" for parent in sorted(parents) for leaf in ROUTERS]
    others = [name for name, _ in modules if name.endswith(SPECIAL)]
    others += [name for name, module in modules if all(hasattr(module, leaf) for leaf in MAMBA)]
    small = tuple(f"{name}." for name in [*routers, *others])
    found = [
        name.removesuffix(".weight") for name in decoder.stored if name.startswith(small) and name.endswith(".weight")
    ]
    attention = tuple(f"{name}." for name, _ in modules if floats and name.rpartition(".")[2] == floats)
    found += [name for name, module in modules if name.startswith(attention) and is_linear(module)]
    return tuple(dict.fromkeys(decoder.stored_module(name) for name in found))


def quantized_linears(decoder: Decoder, recipe: Recipe) -> dict[str, nn.Linear]:
    """Full name -> (meta) linear of everything that the recipe quantizes; raises if a scheme does not fit a shape."""
    if decoder.encoder and recipe.method == "latq":
        expected = "a language model: method latq looks at its loss on the next token"
        raise UnsupportedModelError(str(decoder.source), expected, "an encoder", "Use --method ssqr, hptq or gptq.")
    if recipe.target != "quantized" and any(isinstance(module, Experts) for module in decoder.model.modules()):
        expected, found = "a model whose linears see the same tokens as the original's", "routed experts"
        raise ConfigError("recipe.target", expected, found, 'Use target "quantized".')
    linears = {name: linear for index in range(len(decoder)) for name, linear in decoder.linears(index).items()}
    linears |= decoder.head_linears
    ignored = ignored_modules(decoder, recipe)
    config = CheckpointConfig(recipe.scheme, ignored)
    chosen = {name: linear for name, linear in linears.items() if not config.is_ignored(name)}
    _check_ignored(recipe.ignored, ignored[len(recipe.ignored) :], linears.keys(), str(decoder.source))
    if not chosen:
        raise ConfigError("recipe.ignore", "some linear left to quantize", "all of them ignored", "Ignore fewer.")
    for name, linear in chosen.items():
        tensor_specs(recipe.scheme, linear.out_features, linear.in_features, where=name)
    _warn_of_parts(chosen, linears)
    return chosen


def dividing_group(channels: Collection[int]) -> int:
    """Return the largest of GROUP_SIZES that divides all numbers of input channels, or the whole row."""
    return next((size for size in GROUP_SIZES if not any(count % size for count in channels)), WHOLE_ROW)


def suited(recipe: Recipe, decoder: Decoder) -> Recipe:
    """Return a recipe with its `free` fields changed where the model needs that.

    `seq_len` becomes the number of positions that the model has, if that is smaller. `group_size` becomes the largest
    of GROUP_SIZES that divides the input channels of every quantized linear, or the whole row. A warning says so.
    """
    longest = decoder.longest
    if "seq_len" in recipe.free and longest is not None and recipe.seq_len > longest:
        warnings.warn(f"seq_len: {longest} instead of {recipe.seq_len}, the positions of the model.", stacklevel=3)
        recipe = replace(recipe, seq_len=longest)
    if "group_size" not in recipe.free or recipe.scheme.group_size is None:
        return recipe
    rows = replace(recipe, group_size=WHOLE_ROW)
    channels = sorted({linear.in_features for linear in quantized_linears(decoder, rows).values()})
    if (size := dividing_group(channels)) == recipe.group_size:
        return recipe
    odd = next(count for count in channels if count % recipe.group_size)
    groups = "one scale for each row" if size == WHOLE_ROW else f"groups of {size}"
    warnings.warn(f"group_size: {groups}, because {recipe.group_size} does not divide {odd} channels.", stacklevel=3)
    return replace(recipe, group_size=size)


def ignored_modules(decoder: Decoder, recipe: Recipe) -> tuple[str, ...]:
    """Return the modules that stay unquantized: those that the recipe names, and those that never are quantized.

    `lm_head` stands for any language model's head.
    """
    head = [name for name in decoder.head_linears if "lm_head" in recipe.ignored and name != "lm_head"]
    return (*recipe.ignored, *head, *never_quantized(decoder))


def _check_ignored(given: tuple[str, ...], kept: tuple[str, ...], linears: Collection[str], source: str) -> None:
    """Refuse to ignore what is not there, and a model of which more would be ignored than is meant.

    Args:
        given: entries of the recipe.
        kept: modules that are not quantized whatever the recipe.
        linears: names of those that could be.
        source: of the model, for errors.
    """
    for entry in given:
        inside = entry.startswith(tuple(f"{module}." for module in kept))
        if entry != "lm_head" and not inside and not any(covers(entry, name) for name in (*linears, *kept)):
            expected = "names of linears, their endings after a dot, or names of modules"
            leaves = {name.rpartition(".")[2] for name in linears}
            hint = f"Take names from `latq quantize --dry-run`.{nearest(entry, [*leaves, *linears, *kept])}"
            raise ConfigError("recipe.ignore", expected, repr(entry), hint)
    for entry in kept:
        found = [name for name in linears if name != entry and covers(entry, name)]
        if found and entry not in given:
            expected = f"no linear in the blocks that ends as {entry}, which is not quantized"
            raise UnsupportedModelError(source, expected, found[0], f"Add {entry} to --ignore if neither should be.")


def _warn_of_parts(chosen: Collection[str], linears: Collection[str]) -> None:
    """Warn of linears that are merged into one matrix and would be quantized in part."""
    for name in chosen:
        if left := [part for part in merged_with(name, linears) if part not in chosen]:
            warnings.warn(
                f"{name} is quantized, {', '.join(left)} not: vLLM merges them in most models, and refuses to then. "
                "Quantize or ignore them alike, unless transformers is to read the checkpoint.",
                stacklevel=3,
            )
            return
