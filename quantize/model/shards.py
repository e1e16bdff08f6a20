"""What a shard of the checkpoint holds: tensors of quantized linears, read back, and tensors that stay as they are."""

from collections.abc import Collection, Mapping
from contextlib import AbstractContextManager
from pathlib import Path

import torch
from safetensors import safe_open
from torch import nn

from vllm_latq.errors import CheckpointError
from vllm_latq.format.coded import weight_from_tensors
from vllm_latq.format.config import LayerScheme
from vllm_latq.format.files import readable, regular_file
from vllm_latq.format.reader import tensor_digest
from vllm_latq.format.tensors import TensorSpec, tensor_specs
from vllm_latq.quantize.model.decoder import Decoder

_DAMAGED = "Remove it with its records-*.json and go on with --resume: the block is then quantized again."


def shard_linears(decoder: Decoder, quantized: Collection[str], shard: int) -> dict[str, nn.Linear]:
    """Name in the checkpoint -> linear of a shard, in its own order: a block's, or for the last shard the head.

    Args:
        decoder: the model.
        quantized: names of the linears that are asked for, of any shard.
        shard: index of the block, or their number.
    """
    linears = decoder.linears(shard) if shard < len(decoder) else decoder.head_linears
    return {name: linear for name, linear in linears.items() if name in quantized}


def all_shard_linears(decoder: Decoder, quantized: Collection[str]) -> list[dict[str, nn.Linear]]:
    """`shard_linears` of every shard. A shard needs activations if any from it on has linears."""
    return [shard_linears(decoder, quantized, shard) for shard in range(len(decoder) + 1)]


def shard_weights(decoder: Decoder, shard: int) -> AbstractContextManager[nn.Module]:
    """A shard's block, or what turns its hidden states into logits, with its weights in memory."""
    return decoder.block(shard) if shard < len(decoder) else decoder.head()


def stored_tensors(
    path: Path, specs: Mapping[str, Mapping[str, TensorSpec]], digests: Collection[str]
) -> dict[str, torch.Tensor]:
    """The tensors of quantized linears (name -> suffix -> spec) in a shard of an interrupted run.

    Args:
        path: of the shard.
        specs: what is asked for.
        digests: `tensor_digest` of every tensor that was written to it.

    Raises:
        CheckpointError: the shard is not what was written.
    """
    with readable(path, _DAMAGED), safe_open(regular_file(path), framework="pt", device="cpu") as shard:
        tensors = {name: shard.get_tensor(name) for name in shard.keys()}  # noqa: SIM118 - not a mapping
    if {tensor_digest(name, tensor) for name, tensor in tensors.items()} != set(digests):
        raise CheckpointError(str(path), "the tensors that were written", "others: the file was damaged", _DAMAGED)
    return {
        f"{module}.{suffix}": tensors[f"{module}.{suffix}"] for module, suffixes in specs.items() for suffix in suffixes
    }


def dense_weight(
    stored: Mapping[str, torch.Tensor], scheme: LayerScheme, module: str, linear: nn.Linear
) -> torch.Tensor:
    """The weight of a quantized linear among `stored`, in the dtype of `linear`."""
    shape = (linear.out_features, linear.in_features)
    tensors = {suffix: stored[f"{module}.{suffix}"] for suffix in tensor_specs(scheme, *shape, where=module)}
    return weight_from_tensors(tensors, scheme, shape, module).dequantize().to(linear.weight.dtype)


def untouched_names(decoder: Decoder, shard: int, linears: Collection[str]) -> list[str]:
    """Names of the tensors of a shard that stay as they are: those of a block, or for the last shard those of none.

    Args:
        decoder: the model.
        shard: index of the block, or their number.
        linears: names of the linears that are quantized.
    """
    if shard < len(decoder):
        chosen = decoder.stored_tensors(shard)
    else:
        blocks: set[str] = set().union(*(decoder.stored_tensors(index) for index in range(len(decoder))))
        chosen = set(decoder.store.names()) - blocks
    chosen -= {f"{name}.weight" for name in linears}
    if decoder.tied:
        # A tied head is stored once, as the embedding.
        chosen -= {f"{name}.weight" for name in decoder.head_linears}
    return sorted(chosen)


def untouched_tensors(decoder: Decoder, shard: int, linears: Collection[str]) -> dict[str, torch.Tensor]:
    """The tensors of `untouched_names`; NumericalError for one of the model's own that is not finite."""
    own = {part for name in decoder.stored.values() for part in decoder.store.stored(name)}
    names = untouched_names(decoder, shard, linears)
    return {name: decoder.read(name) if name in own else decoder.store.get(name) for name in names}
