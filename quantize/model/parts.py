"""The parts of a model, each a shard of the checkpoint: its decoder blocks, and the head.

Part        one of them: its linears, its weights in memory, its pass over hidden states, its other tensors
stored_tensors, dense_weight    read back what an interrupted run wrote of one
"""

from collections.abc import Collection, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import safe_open
from torch import nn

from vllm_latq.errors import CheckpointError, ConfigError
from vllm_latq.format.encodings.registry import tensor_specs
from vllm_latq.format.files import readable, regular_file
from vllm_latq.format.reader import tensor_digest
from vllm_latq.format.scheme import LayerScheme
from vllm_latq.format.tensors import TensorSpec
from vllm_latq.format.validate import weight_from_tensors
from vllm_latq.quantize.model.carried_state import Batch
from vllm_latq.quantize.model.decoder import Decoder

_DAMAGED = "Remove it with its records-*.json and continue with --resume: the block is then quantized again."


@dataclass(frozen=True)
class Part:
    """A decoder block, or the head, which turns the hidden states of the last block into logits.

    Attributes:
        decoder: the model.
        index: place among the parts of the model, and number of the shard; the head comes last.
        linears: name in the checkpoint -> linear that is quantized, in the order of the part.
    """

    decoder: Decoder
    index: int
    linears: Mapping[str, nn.Linear]

    @property
    def is_head(self) -> bool:
        """Return whether this part is the head."""
        return self.index == len(self.decoder)

    def weights(self) -> AbstractContextManager[nn.Module]:
        """Return a context that holds the module of this part with its weights in memory."""
        return self.decoder.head() if self.is_head else self.decoder.block(self.index)

    def run(self, module: nn.Module, batch: Batch) -> torch.Tensor:
        """Pass a batch through the module and return its hidden states after it, on the CPU.

        The head leaves hidden states as they are: nothing follows it, so its logits are not kept.
        """
        if not self.is_head:
            return self.decoder.run(self.index, module, batch)
        module(batch.hidden.to(self.decoder.device))
        return batch.hidden

    def untouched_names(self) -> list[str]:
        """Return the names of the stored tensors that stay as they are; the head also owns those of no block."""
        decoder = self.decoder
        if self.is_head:
            blocks: set[str] = set().union(*(decoder.stored_tensors(index) for index in range(len(decoder))))
            chosen = set(decoder.store.names()) - blocks
        else:
            chosen = decoder.stored_tensors(self.index)
        chosen -= {f"{name}.weight" for name in self.linears}
        if decoder.tied:
            # A tied head is stored once, as the embedding.
            chosen -= {f"{name}.weight" for name in decoder.head_linears}
        return sorted(chosen)

    def untouched_tensors(self) -> dict[str, torch.Tensor]:
        """Return the tensors of `untouched_names`; NumericalError if one of the model's own is not finite."""
        decoder = self.decoder
        own = {part for name in decoder.stored.values() for part in decoder.store.stored(name)}
        names = self.untouched_names()
        return {name: decoder.read(name) if name in own else decoder.fetch(name) for name in names}

    def own_tensors(self) -> set[str]:
        """Return the names of the stored tensors of this part's module; of the head also those that embed tokens."""
        return self.decoder.outside_tensors() if self.is_head else self.decoder.stored_tensors(self.index)

    def require_same(self, noted: str, digest: str, where: Path) -> None:
        """Raise ConfigError unless the digest of what this part is made from is the one that an earlier run noted."""
        if digest != noted:
            part = "the head" if self.is_head else self.decoder.block_name(self.index)
            expected, found = (
                "an interrupted run of the same model",
                f"one of another model: other weights up to {part}",
            )
            raise ConfigError(str(where), expected, found, "Resume with the same model, or remove it to start over.")


def model_parts(decoder: Decoder, quantized: Collection[str]) -> list[Part]:
    """Return every part of a model: its blocks in order, then the head.

    Args:
        decoder: the model.
        quantized: names of the linears to quantize, of any part.
    """
    found = [decoder.linears(index) for index in range(len(decoder))] + [decoder.head_linears]
    return [
        Part(decoder, index, {name: linear for name, linear in linears.items() if name in quantized})
        for index, linears in enumerate(found)
    ]


def stored_tensors(
    path: Path, specs: Mapping[str, Mapping[str, TensorSpec]], digests: Collection[str]
) -> dict[str, torch.Tensor]:
    """Return the tensors of quantized linears from a shard of an interrupted run.

    Args:
        path: file of the shard.
        specs: linear -> suffix -> spec of the tensors to return.
        digests: `tensor_digest` of every tensor that was written to the shard.

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
    """Return the dequantized weight of a linear among `stored`, in the dtype of `linear`."""
    shape = (linear.out_features, linear.in_features)
    tensors = {suffix: stored[f"{module}.{suffix}"] for suffix in tensor_specs(scheme, *shape, where=module)}
    return weight_from_tensors(tensors, scheme, shape, module).dequantize().to(linear.weight.dtype)
