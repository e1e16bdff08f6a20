"""The method of a quantized embedding: its rows stay packed, and the rows of a step's tokens are dequantized.

Invariant: a row is the same number for number as that of the dequantized weight, rounded once to the dtype of the
activations. The weight is never dequantized as a whole.
"""

from typing import Any

import torch
from torch.nn import Parameter
from vllm.model_executor.model_loader.reload import record_metadata_for_reloading

from vllm_latq.format.encodings.packed import PackedWeight
from vllm_latq.integrations.vllm.linear import LatqLinearMethod, describe
from vllm_latq.serving.merging import Merged


class LatqEmbeddingMethod(LatqLinearMethod):
    """Weights and lookup of an embedding; arguments as for a linear with one shard."""

    DESCRIBED = ("parameters", "layout")

    def embedding(self, layer: Any, input_: torch.Tensor) -> torch.Tensor:
        """Map token ids int64 [..] of this rank's rows to their embeddings [.., cols], dtype of the activations."""
        ids = input_.reshape(-1)
        rows = PackedWeight(layer.qweight[ids], *self.scheme.code_layout(), self.cols, layer.scales[ids])
        return rows.dequantize(self.dtype).view(*input_.shape, self.cols)

    def apply(self, layer: torch.nn.Module, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """Raise: a quantized embedding is never a head."""
        raise NotImplementedError(f"{self.prefix} is an embedding, which multiplies nothing")

    def _install(self, layer: Any, weight: Merged) -> None:
        assert isinstance(weight, PackedWeight), "an embedding is stored as packed codes"
        assert weight.scales is not None
        self.layout = "rows"
        self.parameters = ["qweight", "scales"]
        vars(layer).pop("weight", None)  # the stand-in
        for suffix in self.suffixes:
            delattr(layer, suffix)
        for name in self.parameters:
            layer.register_parameter(name, Parameter(getattr(weight, name), requires_grad=False))
        describe(layer, self, self.DESCRIBED)
        self._stand_in_for_weight(layer)


def install_method(layer: Any, method: LatqLinearMethod) -> None:
    """Replace the unquantized weight of an embedding or a head that vLLM has made by the tensors of its checkpoint.

    Args:
        layer: VocabParallelEmbedding of vLLM, before anything is loaded.
        method: of the layer from now on.
    """
    dtype = layer.weight.dtype
    del layer.weight
    layer.quant_method = method
    layer.use_fused_embedding = False  # vLLM's kernel for several ranks reads an unquantized weight
    cols, rows = layer.embedding_dim, layer.num_embeddings_per_partition
    method.create_weights(layer, cols, [rows], cols, layer.num_embeddings_padded, params_dtype=dtype)
    record_metadata_for_reloading(layer)  # vLLM has recorded the unquantized weight
