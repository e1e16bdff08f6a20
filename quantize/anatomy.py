"""Where the parts of a decoder-only model, or of an encoder, are: found by its structure and not by its name.

    model ── base ── blocks[0..n-1] ── each: linears, norms, ...
         │       └── everything else: embeddings, final norm, rotary tables
         └── head (of a language model)

Invariant: an Anatomy is only made of a model whose blocks form one list and hand nothing but hidden states from one to
the next; whatever does not fit is refused by name, not guessed at.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from vllm_latq.errors import UnsupportedModelError


@dataclass(frozen=True)
class Anatomy:
    """Full module names of the parts of a causal language model or of an encoder.

    Attributes:
        base: the model without its head; "" where the model has none.
        blocks: the ModuleList of blocks.
        embedding: the token embedding.
        head: the linear that makes logits; None for an encoder.
    """

    base: str
    blocks: str
    embedding: str
    head: str | None

    @classmethod
    def of(cls, model: Any, where: str, encoder: bool = False) -> "Anatomy":
        """Find the parts of a transformers model, of which an `encoder` has no head.

        Raises:
            UnsupportedModelError: names the part not found.
        """
        if model.config.is_encoder_decoder:
            raise UnsupportedModelError(where, "a decoder-only model", "an encoder and a decoder")
        names = {module: name for name, module in model.named_modules()}
        base, embedding, head = model.base_model, model.get_input_embeddings(), model.get_output_embeddings()
        if base is model and not encoder:
            raise UnsupportedModelError(where, "a head on top of a base model", f"{type(model).__name__} in one piece")
        if not isinstance(embedding, nn.Embedding):
            raise UnsupportedModelError(where, "a token embedding (nn.Embedding)", type(embedding).__name__)
        if encoder:
            return cls(names[base], names[_block_list(model, where)], names[embedding], None)
        if not isinstance(head, nn.Linear):
            raise UnsupportedModelError(where, "a language-model head (nn.Linear)", type(head).__name__)
        return cls(names[base], names[_block_list(model, where)], names[embedding], names[head])


def parts_outside(module: nn.Module, prefix: str, excluded: tuple[str, ...]) -> Iterator[tuple[str, nn.Module]]:
    """Full name, submodule of everything in `module` that does not lie in one of the modules named `excluded`."""
    for name, part in module.named_modules(prefix=prefix):
        if not any(name == entry or name.startswith(entry + ".") for entry in excluded):
            yield name, part


def fill_computed_buffers(model: Any, name: str, module: nn.Module, device: torch.device) -> None:
    """Give a module's own buffers that are not stored in checkpoints (rotary tables, scales) their values.

    transformers computes them in `_init_weights`, because it builds models on the meta device itself. Filled twice over
    different garbage: a buffer that does not come out the same was not computed, and is refused.

    Args:
        model: the transformers model that the module belongs to; its parameters are on the meta device or are kept.
        name: of the module, for errors.
        module: whose buffers are replaced.
        device: where they go.
    """
    names = [leaf for leaf in module._non_persistent_buffers_set if module._buffers.get(leaf) is not None]
    if not names:
        return
    results = []
    for garbage in (0, 1):
        for leaf in names:
            meta = module._buffers[leaf]
            assert meta is not None
            module._buffers[leaf] = torch.full(meta.shape, garbage, dtype=meta.dtype, device=device)
        with torch.no_grad():
            model._init_weights(module)
        results.append([module._buffers[leaf] for leaf in names])
    for leaf, first, second in zip(names, *results, strict=True):
        assert first is not None
        assert second is not None
        if not torch.equal(first, second):
            expected = "a buffer that transformers computes when it loads the model"
            raise UnsupportedModelError(f"{name}.{leaf}", expected, "one that it leaves undefined")


def _block_list(model: Any, where: str) -> nn.ModuleList:
    """The outermost ModuleList under `base` with one entry per hidden layer."""
    depth = model.config.get_text_config().num_hidden_layers
    found: dict[str, nn.ModuleList] = {}
    base = model.base_model
    for name, module in base.named_modules(prefix="" if base is model else model.base_model_prefix):
        inside = any(name.startswith(outer + ".") for outer in found)
        if isinstance(module, nn.ModuleList) and len(module) == depth and depth and not inside:
            found[name] = module
    if len(found) != 1:
        present = ", ".join(found) or "none"
        raise UnsupportedModelError(where, f"one list of {depth} blocks", present)
    name, blocks = next(iter(found.items()))
    if not any(isinstance(module, nn.Linear) for module in blocks.modules()):
        kinds = sorted({type(module).__name__ for module in blocks.modules() if list(module.parameters(recurse=False))})
        raise UnsupportedModelError(f"{where}.{name}", "blocks with linear layers", f"only {', '.join(kinds)}")
    return blocks
