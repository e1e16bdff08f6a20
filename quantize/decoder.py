"""A decoder-only model, materialised one block at a time.

The model is built on the meta device; only the token embedding, the rotary table and the block at work hold memory.

    tokens -> embed() -> hidden states, block arguments -> block 0 -> block 1 -> ... -> final norm, lm_head

Invariant: outside `block(i)` and `head()` no weight of a block is in memory.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from vllm_latq.errors import NumericalError, UnsupportedModelError
from vllm_latq.store import TensorStore

SUPPORTED_MODEL_TYPES = ("llama", "mistral", "qwen2", "qwen3")
BLOCKS = "model.layers"
HEAD = "lm_head"


@dataclass
class Batch:
    """Hidden states of a few samples between two blocks.

    Attributes:
        hidden: [samples, tokens, hidden_size].
        arguments: keyword arguments of each block's forward (masks, rotary embeddings), by block index.
    """

    hidden: torch.Tensor
    arguments: list[dict[str, Any]]


class Decoder:
    """The quantizer's view of a Hugging Face model directory.

    Args:
        source: model directory with config.json and safetensors.
        device: where blocks are computed.
        dtype: of the computation; None computes in float32 on a CPU and in the model's own dtype elsewhere.

    Raises:
        UnsupportedModelError: an architecture that is not understood, or a model that is quantized already.
    """

    def __init__(self, source: str | Path, device: str | torch.device, dtype: torch.dtype | None = None) -> None:
        self.source = Path(source)
        self.store = TensorStore(source)
        self.config = _load_config(self.source)
        self.device = torch.device(device)
        own = self.config.dtype if isinstance(self.config.dtype, torch.dtype) else torch.bfloat16
        self.dtype = dtype or (torch.float32 if self.device.type == "cpu" else own)
        with torch.device("meta"):
            self.model = AutoModelForCausalLM.from_config(self.config, dtype=self.dtype).eval()
        for parameter in self.model.parameters():
            parameter.requires_grad_(False)
        self.tied = self.model.get_output_embeddings().weight is self.model.get_input_embeddings().weight

    @property
    def base(self) -> Any:
        """The model without its head, whose `layers` are the blocks."""
        return self.model.model

    def __len__(self) -> int:
        return len(self.base.layers)

    def block_name(self, index: int) -> str:
        return f"{BLOCKS}.{index}"

    def linears(self, index: int) -> Mapping[str, nn.Linear]:
        """Full name -> linear of one block, in the block's own order."""
        prefix = self.block_name(index)
        modules = self.base.layers[index].named_modules()
        return {f"{prefix}.{name}": module for name, module in modules if isinstance(module, nn.Linear)}

    @torch.no_grad()
    def embed(self, samples: torch.Tensor, batch_size: int) -> list[Batch]:
        """Embed token ids int64 [n, tokens] and record what the model would pass to each of its blocks."""
        recorders = [_Recorder() for _ in self.base.layers]
        blocks, self.base.layers = self.base.layers, nn.ModuleList(recorders)
        rotary = self.base.rotary_emb
        self.base.rotary_emb = type(rotary)(self.base.config).to(self.device)
        batches = []
        try:
            with (
                self._materialized(self.base.embed_tokens, "model.embed_tokens"),
                self._materialized(self.base.norm, "model.norm"),
            ):
                for tokens in samples.split(batch_size):
                    self.base(tokens.to(self.device), use_cache=False)
                    hidden = recorders[0].hidden.to("cpu")
                    batches.append(Batch(hidden, [recorder.arguments for recorder in recorders]))
        finally:
            self.base.layers, self.base.rotary_emb = blocks, rotary
        return batches

    @contextmanager
    def block(self, index: int) -> Iterator[nn.Module]:
        """The block with its weights in memory, for the time of the context."""
        with self._materialized(self.base.layers[index], self.block_name(index)) as block:
            yield block

    @contextmanager
    def head(self) -> Iterator[nn.Module]:
        """Final norm followed by lm_head, with their weights in memory."""
        with self._materialized(self.base.norm, "model.norm"), self._materialized(self.model.lm_head, HEAD):
            yield nn.Sequential(self.base.norm, self.model.lm_head)

    @torch.no_grad()
    def run(self, index: int, block: nn.Module, batch: Batch) -> torch.Tensor:
        """Output hidden states of a block for a batch, on the CPU."""
        output = block(batch.hidden.to(self.device), **batch.arguments[index])
        return (output[0] if isinstance(output, tuple) else output).to("cpu")

    @contextmanager
    def _materialized(self, module: nn.Module, prefix: str) -> Iterator[nn.Module]:
        tied = prefix == HEAD and self.tied
        module.to_empty(device=self.device)
        try:
            for name, parameter in module.named_parameters():
                full = "model.embed_tokens.weight" if tied else f"{prefix}.{name}"
                stored = self.store.get(full)
                if stored.shape != parameter.shape:
                    expected, found = f"shape {tuple(parameter.shape)}", f"{tuple(stored.shape)}"
                    raise UnsupportedModelError(f"{self.source}: {full}", expected, found, "Is config.json its own?")
                if not torch.isfinite(stored).all():
                    found = f"{int((~torch.isfinite(stored)).sum())} NaN or infinite values"
                    raise NumericalError(f"{self.source}: {full}", "finite weights", found, "The model is damaged.")
                parameter.copy_(stored.to(self.dtype))
            yield module
        finally:
            module.to("meta")


class _Recorder(nn.Module):
    """Stands in for a block: keeps what it is called with and passes the hidden states on."""

    hidden: torch.Tensor
    arguments: dict[str, Any]

    def forward(self, hidden_states: torch.Tensor, **arguments: Any) -> torch.Tensor:
        self.hidden, self.arguments = hidden_states, arguments
        return hidden_states


def _load_config(source: Path) -> Any:
    try:
        config = AutoConfig.from_pretrained(source, trust_remote_code=False)
    except (OSError, ValueError) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise UnsupportedModelError(f"{source}/config.json", "a model configuration", reason) from None
    if config.model_type not in SUPPORTED_MODEL_TYPES:
        expected = f"model_type {', '.join(SUPPORTED_MODEL_TYPES)}"
        hint = "Its decoder blocks are not known to be walked correctly, so it is refused rather than guessed at."
        raise UnsupportedModelError(f"{source}/config.json", expected, repr(config.model_type), hint)
    if getattr(config, "quantization_config", None) is not None:
        hint = "Quantize the original model instead."
        raise UnsupportedModelError(f"{source}/config.json", "an unquantized model", "a quantization_config", hint)
    return config
