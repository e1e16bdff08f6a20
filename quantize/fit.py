"""The bits per weight with which a model fits a GPU's memory beside vLLM's caches, from config.json alone.

    memory of the GPU
      - what vLLM leaves free          1 - GPU_UTILIZATION of it
      - CUDA, libraries and graphs     RUNTIME_BYTES, an assumption
      - activations of one step        of as many tokens and sequences as vLLM takes by default, see `_activations`
      - KV cache                       of `concurrency` sequences of `context` tokens, see `kv_cache`
      - unquantized weights            embeddings, norms, routers, towers, in 16 bits
      = quantized weights

A token of one sequence reads every quantized weight once, of routed experts those that it is sent to, the unquantized
weights beside embeddings and towers, and the KV cache of the tokens before it. Bandwidth over these bytes bounds the
tokens per second from above.

Not counted: parts of a checkpoint that transformers' model lacks, such as layers that predict further tokens; adapters;
further GPUs.
"""

import math
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from vllm_latq.coding.trellis.code import RATES
from vllm_latq.console import size
from vllm_latq.errors import ConfigError, UnsupportedModelError
from vllm_latq.format.encodings.registry import tensor_specs
from vllm_latq.format.scheme import SUPPORTED_BITS
from vllm_latq.models.experts import CHOSEN_EXPERTS, EXPERT, FUSED, check_fused, fused_experts, matrices_shape
from vllm_latq.quantize.gpus import GIB, GPU_UTILIZATION, GPUS
from vllm_latq.quantize.kv_cache import LayerCache, layer_caches
from vllm_latq.quantize.methods.group_grid import linear_bits
from vllm_latq.quantize.model.anatomy import Anatomy, is_linear
from vllm_latq.quantize.model.loading import config_directory
from vllm_latq.quantize.model.meta_model import is_encoder, load_config, meta_model
from vllm_latq.quantize.model.selection import MAMBA, ROUTERS, SPECIAL, dividing_group, rounded_scheme
from vllm_latq.quantize.plan import planned_bits
from vllm_latq.quantize.recipe import GROUP, HEAD, HUFFMAN_METHODS, UNQUANTIZED, Recipe

UNITS = {"GiB": GIB, "GB": 10**9, "MiB": 1 << 20, "MB": 10**6}
RUNTIME_BYTES = GIB
# Memory of a GPU -> tokens of a step and sequences that `vllm serve` takes by default (vLLM 0.32, engine/arg_utils.py).
STEPS = ((160 * GIB, 16384, 1024), (70 * GIB, 8192, 1024), (0, 2048, 256))
DEFAULT_CONTEXT = 32768
# The lowest rates of the trellis code are a bit per weight, its highest 6; scales and orders come on top.
LEAST_BITS, MOST_BITS = 1.25, RATES[-1] / 2
# More bits than any run had.
_MOST_CHANGE = 64.0
DENSE_BYTES = 2


class Matrix(NamedTuple):
    """A quantized weight: its shape, and the part of it that one token reads."""

    rows: int
    columns: int
    read: float


@dataclass(frozen=True)
class Shapes:
    """The needs of serving a model, apart from the bits of its weights.

    Attributes:
        matrices: quantized weight -> how often the model has it.
        unquantized: bytes of all other weights, the embedding as the recipe stores it.
        unquantized_read: bytes of them that a token reads.
        caches: KV cache of each layer.
        hidden, widest, vocabulary: channels, outputs of the widest linear of a block, tokens.
        longest: positions of the model; None where that is not known.
    """

    matrices: Mapping[Matrix, int]
    unquantized: int
    unquantized_read: int
    caches: tuple[LayerCache, ...]
    hidden: int
    widest: int
    vocabulary: int
    longest: int | None

    @property
    def weights(self) -> int:
        """Number of quantized weights."""
        return sum(count * matrix.rows * matrix.columns for matrix, count in self.matrices.items())


def parse_memory(text: str) -> int:
    """Return the bytes of a size such as "24GiB"; raise ConfigError for anything else."""
    match = re.fullmatch(r"\s*(\d{1,12}(?:\.\d+)?)\s*(GiB|GB|MiB|MB)\s*", text)
    if match is None or not float(match[1]):
        raise ConfigError("memory", f"a size with one of the units {', '.join(UNITS)}, such as 24GiB", repr(text))
    return int(float(match[1]) * UNITS[match[2]])


def model_shapes(name: str | Path, recipe: Recipe) -> Shapes:
    """Return the shapes of a model, from its config.json.

    Args:
        name: directory or hub name. Of a hub model config.json alone is downloaded.
        recipe: decides whether head and embedding are quantized.

    Raises:
        UnsupportedModelError: an encoder, a model that is quantized already, or a structure that is not known.
    """
    source = config_directory(name)
    config = load_config(source)
    if is_encoder(config):
        hint = "An encoder has no KV cache: its weights take their bits, and that is all."
        raise UnsupportedModelError(str(name), "a language model", "an encoder", hint)
    model = meta_model(source, config, torch.bfloat16)
    anatomy = Anatomy.of(model, f"{name}: {type(model).__name__}")
    text = config.get_text_config()
    quantized = list(_block_matrices(model, anatomy, text))
    widest = max(matrix.rows for _, matrix in quantized)
    counted = Counter(matrix for _, matrix in quantized)
    head = model.get_submodule(anatomy.head or "")
    tied = head.weight is model.get_input_embeddings().weight
    gone = {parameter for parameter, _ in quantized}
    if HEAD not in recipe.ignored:
        counted[Matrix(head.out_features, head.in_features, 1.0)] += 1
        gone |= set() if tied else {f"{anatomy.head}.weight"}
    left = {parameter: tensor.numel() for parameter, tensor in model.named_parameters() if parameter not in gone}
    tables = {f"{name}.weight" for name, module in model.named_modules() if isinstance(module, nn.Embedding)}
    if tied and HEAD in recipe.ignored:
        tables.discard(f"{anatomy.embedding}.weight")
    unread = sum(count for parameter, count in left.items() if anatomy.in_tower(parameter) or parameter in tables)
    stored = DENSE_BYTES * sum(left.values())
    if recipe.embedding_bits != UNQUANTIZED:
        rows, cols = model.get_input_embeddings().weight.shape
        scheme = rounded_scheme(recipe, cols, recipe.embedding_bits)
        packed = sum(spec.bits() for spec in tensor_specs(scheme, rows, cols).values()) / 8
        stored -= DENSE_BYTES * rows * cols - round(packed)
    return Shapes(
        counted,
        stored,
        DENSE_BYTES * (sum(left.values()) - unread),
        tuple(layer_caches(config, str(name))),
        text.hidden_size,
        widest,
        head.out_features,
        getattr(text, "max_position_embeddings", None),
    )


def _block_matrices(model: Any, anatomy: Anatomy, text: Any) -> Iterator[tuple[str, Matrix]]:
    """Yield parameter, matrix of every weight in the blocks that is quantized; of fused experts, of each of them."""
    prefix = f"{anatomy.blocks}."
    fused = {name: parts for name, parts in fused_experts(model).items() if name.startswith(prefix)}
    for name in fused:
        check_fused(model.get_submodule(name), name)
    lists = {
        name for name, module in model.named_modules() if name.endswith(".experts") and len(list(module.children()))
    }
    parents = {name.rpartition(".")[0] for name in (*fused, *lists)}
    left = [f"{parent}.{leaf}" for parent in parents for leaf in ROUTERS]
    for name, module in model.named_modules():
        if name.endswith(SPECIAL):
            left.append(name)
        elif all(hasattr(module, leaf) for leaf in MAMBA):
            left += [f"{name}.{leaf}" for leaf in MAMBA]
    for name, module in model.named_modules():
        if not name.startswith(prefix) or any(f"{name}.".startswith(f"{entry}.") for entry in left):
            continue
        if isinstance(module, nn.Linear) and is_linear(module):
            routed = EXPERT.match(name)
            count = len(list(model.get_submodule(routed[1]).children())) if routed else 0
            yield f"{name}.weight", Matrix(module.out_features, module.in_features, _share(text, count))
        for leaf in fused.get(name, ()):
            count, rows, columns = matrices_shape(module, leaf)
            for _ in range(count * len(FUSED[leaf])):
                yield f"{name}.{leaf}", Matrix(rows // len(FUSED[leaf]), columns, _share(text, count))


def _share(text: Any, experts: int) -> float:
    """Return the share of the experts of a layer that a token reads; 1 for what is no expert."""
    if not experts:
        return 1.0
    chosen = next((found for name in CHOSEN_EXPERTS if (found := getattr(text, name, None))), experts)
    return min(1.0, (max(chosen) if isinstance(chosen, list) else chosen) / experts)


class Load(NamedTuple):
    """The work of a GPU: sequences at a time, and their length.

    Attributes:
        memory: bytes of the GPU.
        context: tokens of each sequence.
        concurrency: sequences at a time.
    """

    memory: int
    context: int
    concurrency: int


def load(memory: str, context: int | None, concurrency: int | None, shapes: Shapes) -> Load:
    """Return a load with defaults in place of None; raise ConfigError for numbers that make no sense."""
    longest = shapes.longest or DEFAULT_CONTEXT
    found = Load(
        parse_memory(memory),
        min(DEFAULT_CONTEXT, longest) if context is None else context,
        1 if concurrency is None else concurrency,
    )
    for name, value in (("context", found.context), ("concurrency", found.concurrency)):
        if value < 1:
            raise ConfigError(name, "at least 1", str(value))
    if shapes.longest is not None and found.context > shapes.longest:
        raise ConfigError("context", f"at most {shapes.longest}, the positions of the model", str(found.context))
    return found


def spent(shapes: Shapes, given: Load) -> dict[str, int]:
    """Return what takes how many bytes beside the quantized weights, see the top of this file."""
    tokens, sequences = next((tokens, sequences) for least, tokens, sequences in STEPS if given.memory >= least)
    cache = sum(layer.nbytes(given.context, tokens) for layer in shapes.caches)
    return {
        "left free": given.memory - int(GPU_UTILIZATION * given.memory),
        "runtime": RUNTIME_BYTES,
        "activations": _activations(shapes, tokens, sequences),
        "KV cache": given.concurrency * cache,
        "unquantized weights": shapes.unquantized,
    }


def _activations(shapes: Shapes, tokens: int, sequences: int) -> int:
    """Return an estimate of the activations at once: four rows of channels and two of the widest outputs in 16 bits for
    each token, and logits twice in 32 bits for each sequence.
    """
    step = tokens * DENSE_BYTES * (4 * shapes.hidden + 2 * shapes.widest)
    return step + 2 * 4 * min(tokens, sequences) * shapes.vocabulary


def fitted(recipe: Recipe, model: str | Path, memory: str, context: int | None, concurrency: int | None) -> Recipe:
    """Return a recipe with the bits at which a model just fits a GPU, see `fitting`; None takes a default."""
    shapes = model_shapes(model, recipe)
    return fitting(recipe, shapes, load(memory, context, concurrency, shapes))


def weight_bytes(shapes: Shapes, recipe: Recipe) -> float:
    """Return the bytes of the quantized weights under a recipe."""
    return sum(count * planned_bits(recipe, m.rows, m.columns) for m, count in shapes.matrices.items()) / 8


def fitting(recipe: Recipe, shapes: Shapes, given: Load) -> Recipe:
    """Return a recipe with the bits at which the weights just fit.

    Args:
        recipe: what to do, whatever its bits.
        shapes: of the model.
        given: memory and load.

    Raises:
        ConfigError: a method whose bits in memory are not those that it is given, or weights that do not fit.
    """
    if recipe.method in HUFFMAN_METHODS:
        hint = "Choose latq, or give --bits."
        raise ConfigError("fit", "a method that takes the same bits in files and in memory", recipe.method, hint)
    if "group_size" in recipe.free and "group_size" not in recipe.unused:
        recipe = replace(recipe, group_size=dividing_group({matrix.columns for matrix in shapes.matrices}))
    beside = spent(shapes, given)
    room = given.memory - sum(beside.values())
    least = float(min(SUPPORTED_BITS))
    if recipe.method == "latq":
        least, most = _range(recipe, shapes)
        bits = math.floor(800 * room / shapes.weights) / 100
        choices = [replace(recipe, bits=min(bits, most))] if bits >= least else []
    else:
        wide = [replace(recipe, bits=width) for width in sorted(SUPPORTED_BITS, reverse=True)]
        choices = [choice for choice in wide if weight_bytes(shapes, choice) <= room]
    if not choices:
        expected = f"room for {least:g} bits per weight, {size(least * shapes.weights / 8)}, beside all else"
        parts = ", ".join(f"{name} {size(taken)}" for name, taken in beside.items())
        found = f"{size(given.memory)}, of which {size(sum(beside.values()))} are taken: {parts}"
        raise ConfigError("memory", expected, found, "Lower --context or --concurrency, or take a larger GPU.")
    return choices[0]


def _range(recipe: Recipe, shapes: Shapes) -> tuple[float, float]:
    """Return the fewest and the most bits per weight that latq takes."""
    if recipe.grid != GROUP:
        return LEAST_BITS, MOST_BITS
    bits = 0.0
    for matrix, count in shapes.matrices.items():
        bits += count * linear_bits(recipe.scheme, matrix.rows, matrix.columns)
    least = bits / shapes.weights
    return least, least + SUPPORTED_BITS[-1] - SUPPORTED_BITS[0]


def speeds(shapes: Shapes, recipe: Recipe, given: Load) -> list[dict[str, Any]]:
    """Return known GPUs with as much memory, and the tokens per second of one sequence that bandwidth allows at most.

    `short` is the speed after few tokens, `long` with the whole context before.
    """
    bits = {matrix: planned_bits(recipe, matrix.rows, matrix.columns) for matrix in shapes.matrices}
    read = sum(count * matrix.read * bits[matrix] for matrix, count in shapes.matrices.items()) / 8
    read += shapes.unquantized_read
    cache = sum(layer.nbytes(given.context, 1) for layer in shapes.caches)
    return [
        {**gpu._asdict(), "short": 1e9 * gpu.bandwidth / read, "long": 1e9 * gpu.bandwidth / (read + cache)}
        for gpu in GPUS
        if gpu.gib * GIB >= given.memory * 0.99
    ]


def predicted_loss(loss: float | None, had: float | None, bits: float) -> float | None:
    """Return the loss at other bits than a run had: each bit divides it by about four; None where none was measured.

    Args:
        loss, had: loss and bits per weight of a run of latq on the same model, as its report has them.
        bits: per weight.
    """
    return None if loss is None or had is None else loss * 4.0 ** min(had - bits, _MOST_CHANGE)
