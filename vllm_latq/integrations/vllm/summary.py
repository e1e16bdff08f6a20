"""One line about a model that is about to be served: methods, bits in memory, products, bytes that a token reads."""

import math
from collections import Counter
from typing import Any

import torch
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding

from vllm_latq.console import size
from vllm_latq.format.config import QUANT_METHOD
from vllm_latq.integrations.vllm.embedding import LatqEmbeddingMethod
from vllm_latq.integrations.vllm.linear import LatqLinearMethod
from vllm_latq.integrations.vllm.moe import LatqMoEMethod

LatqMethod = LatqLinearMethod | LatqMoEMethod
# Layout of a weight -> the product that runs.
PRODUCTS = {
    "tiled": "by Triton kernels",
    "trellis": "by Triton kernels",
    "cpu": "by our C++ products",
    "cpu_trellis": "by our C++ products",
    "int4": "by torch's 4-bit matmul",
    "checkpoint": "by dequantize + matmul",
    "dense": "decoded at load, by matmul",
}


def summary(model: torch.nn.Module, model_config: Any) -> str:
    """Return the line: `ssqr: 28 matrices at 3.61 bits in memory (28 by Triton kernels); a token reads 1.2 MB`.

    Bytes are of this rank, for one sequence: everything except embeddings, and of experts those that a token takes. The
    line is empty if vLLM has quantized the weights again.

    Args:
        model: with its weights loaded and processed.
        model_config: vLLM's.
    """
    products, methods = Counter[str](), dict[str, None]()
    weights = stored = 0.0
    for layer in model.modules():
        method = getattr(layer, "quant_method", None)
        if isinstance(method, LatqMethod) and not isinstance(method, LatqEmbeddingMethod):
            methods[str(method.recipe.get("method", QUANT_METHOD))] = None
            products.update(PRODUCTS[layout] for layout in _layouts(method))
            weights += _weights(method)
            stored += _bytes(layer, method)
    if not weights:
        return ""
    counts = ", ".join(f"{count} {product}" for product, count in products.most_common())
    bits = f"{products.total()} matrices at {8 * stored / weights:.2f} bits in memory ({counts})"
    return f"{', '.join(methods)}: {bits}; a token reads {size(_read(model, model_config))}"


def _layouts(method: LatqMethod) -> list[str]:
    """Return the layouts of the matrices of a layer."""
    return [method.layout] if isinstance(method, LatqLinearMethod) else list(method.constants.layouts)


def _weights(method: LatqMethod) -> float:
    """Return the number of weights of a layer, on this rank."""
    if isinstance(method, LatqLinearMethod):
        return method.rows * method.cols
    matrices = (len(method.leaves[matrix]) * math.prod(shape) for matrix, shape in method.shapes.items())
    whole = len(method.experts) * sum(matrices)
    return whole * method.moe.intermediate_size_per_partition / method.moe.intermediate_size


def _bytes(layer: Any, method: LatqMethod) -> int:
    """Return the bytes of the operands of a layer."""
    names = method.parameters
    if isinstance(method, LatqMoEMethod):
        names = [name for matrix in method.parameters.values() for name in matrix]
    return sum(tensor.nbytes for name in names if (tensor := getattr(layer, name)) is not None)


def _read(model: torch.nn.Module, model_config: Any) -> float:
    """Return the bytes of the weights that one token reads."""
    tied = bool(getattr(model_config.hf_config.get_text_config(), "tie_word_embeddings", False))
    seen: dict[int, float] = {}
    for layer in model.modules():
        if isinstance(layer, VocabParallelEmbedding) and not isinstance(layer, ParallelLMHead) and not tied:
            continue
        method = getattr(layer, "quant_method", None)
        share = 1.0
        if isinstance(method, LatqMoEMethod):
            share = min(1.0, method.moe.experts_per_token / method.constants.experts)
        seen |= {id(tensor): share * tensor.nbytes for tensor in layer.parameters(recurse=False)}
    return sum(seen.values())
