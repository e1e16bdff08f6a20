"""Where the parts of a decoder-only model, or of an encoder, are: found by its structure and not by its name.

    model ── base ── blocks[0..n-1] ── each: linears, norms, ...
         │       └── everything else: embeddings, final norm, rotary tables
         ├── head (of a language model)
         └── towers (of a multimodal one): what makes embeddings of images or sound

Invariant: an Anatomy is only made of a model whose blocks form one list; whatever does not fit is refused by name, not
guessed at.
"""

import copy
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from transformers import PreTrainedModel

from vllm_latq.errors import UnsupportedModelError


@dataclass(frozen=True)
class Anatomy:
    """Full module names of the parts of a causal language model or of an encoder.

    Attributes:
        base: the language model without its head, or the encoder; "" where that is the whole model.
        blocks: the ModuleList of blocks.
        embedding: the token embedding.
        head: the linear that makes logits; None for an encoder.
        towers: modules beside the language model, of which text makes no use.
    """

    base: str
    blocks: str
    embedding: str
    head: str | None
    towers: tuple[str, ...] = ()

    @classmethod
    def of(cls, model: Any, where: str, encoder: bool = False) -> "Anatomy":
        """Find the parts of a transformers model, of which an `encoder` has no head.

        Raises:
            UnsupportedModelError: names the part not found.
        """
        if model.config.is_encoder_decoder:
            raise UnsupportedModelError(where, "a decoder-only model", "an encoder and a decoder")
        names = {module: name for name, module in model.named_modules()}
        text = model.config.get_text_config()
        multimodal = text is not model.config
        try:
            base = model.get_decoder() if multimodal else model.base_model
            embedding, head, depth = model.get_input_embeddings(), model.get_output_embeddings(), text.num_hidden_layers
        except (AttributeError, NotImplementedError) as error:
            raise UnsupportedModelError(where, "one language model, its embedding and its head", str(error)) from None
        base = _below(head, base)
        if base is None:
            raise UnsupportedModelError(where, "a head on top of a base model", f"{type(model).__name__} in one piece")
        if not isinstance(embedding, nn.Embedding):
            raise UnsupportedModelError(where, "a token embedding (nn.Embedding)", type(embedding).__name__)
        if encoder:
            return cls(names[base], names[_block_list(base, names[base], depth, where)], names[embedding], None)
        if not isinstance(head, nn.Linear):
            raise UnsupportedModelError(where, "a language-model head (nn.Linear)", type(head).__name__)
        towers: tuple[str, ...] = ()
        if multimodal:
            language = [name for name in model.state_dict() if name.startswith((f"{names[base]}.", f"{names[head]}."))]
            towers = outermost(model.state_dict(), language)
        blocks = names[_block_list(base, names[base], depth, where)]
        return cls(names[base], blocks, names[embedding], names[head], towers)

    def in_tower(self, tensor: str) -> bool:
        """Return whether a tensor of the model is in one of the towers."""
        return tensor.startswith(tuple(f"{tower}." for tower in self.towers))


def _below(head: Any, model: Any) -> Any:
    """The model below a head, where `model` has it inside, as Llama 4's does; None if that is not one."""
    if not any(module is head for module in model.modules()):
        return model
    inside = [child for child in model.children() if isinstance(child, PreTrainedModel)]
    return _below(head, inside[0]) if len(inside) == 1 else None


def outermost(names: Iterable[str], others: Iterable[str]) -> tuple[str, ...]:
    """The outermost modules that hold tensors among `names` and none of `others`."""
    shared = {name[:end] for name in others for end in _ends(name)}
    found = (next((name[:end] for end in _ends(name) if name[:end] not in shared), "") for name in names)
    return tuple(dict.fromkeys(module for module in found if module))


def _ends(tensor: str) -> list[int]:
    """Where the name of each module ends that a tensor is in, the outermost first."""
    return [index for index, character in enumerate(tensor) if character == "."]


def parts_outside(module: nn.Module, prefix: str, excluded: tuple[str, ...]) -> Iterator[tuple[str, nn.Module]]:
    """Full name, submodule of everything in `module` that does not lie in one of the modules named `excluded`."""
    for name, part in module.named_modules(prefix=prefix):
        if not any(name == entry or name.startswith(entry + ".") for entry in excluded):
            yield name, part


def fill_computed_buffers(model: Any, name: str, module: nn.Module, device: torch.device) -> None:
    """Give a module's own buffers that are not stored in checkpoints (rotary tables, scales) their values.

    transformers computes them in `_init_weights`, because it builds models on the meta device itself: for the module,
    or for a model that it belongs to. Filled twice over different garbage: a buffer that does not come out the same was
    not computed, and is refused.

    Args:
        model: the transformers model that the module belongs to; its parameters are on the meta device, or marked as
            initialized.
        name: of the module, for errors.
        module: whose buffers are replaced.
        device: where they go.
    """
    names = [leaf for leaf in module._non_persistent_buffers_set if module._buffers.get(leaf) is not None]
    if not names:
        return
    # In a multimodal model each part knows how to initialize its own buffers.
    above = (model.get_submodule(name[:end]) for end in (len(name), *reversed(_ends(name)), 0))
    owners: list[Any] = [part for part in above if isinstance(part, PreTrainedModel)]
    for owner, part in ((owners[0], module), *((owner, owner) for owner in owners)):
        results = []
        for garbage in (0, 1):
            for leaf in names:
                meta = module._buffers[leaf]
                assert meta is not None
                module._buffers[leaf] = torch.full(meta.shape, garbage, dtype=meta.dtype, device=device)
            with torch.no_grad():
                owner._init_weights(part)
            results.append([module.get_buffer(leaf) for leaf in names])
        undefined = [leaf for leaf, *pair in zip(names, *results, strict=True) if not torch.equal(*pair)]
        if not undefined:
            return
    expected = "a buffer that transformers computes when it loads the model"
    raise UnsupportedModelError(f"{name}.{undefined[0]}", expected, "one that it leaves undefined")


def initialized(tensor: Any) -> Any:
    """The tensor, marked so that transformers leaves it alone where `fill_computed_buffers` makes it compute others."""
    tensor._is_hf_initialized = True
    return tensor


def is_linear(module: nn.Module) -> bool:
    """Return whether a module computes x W^T + b: nn.Linear, or a subclass whose own forward gives the same numbers.

    A subclass may compute anything with its matrix, as DeepSeek-V4's grouped projection does. Its forward is therefore
    tried on a small matrix. All products and sums of the trial are exact in bfloat16, so equal means equal.
    """
    if not isinstance(module, nn.Linear) or type(module).forward is nn.Linear.forward:
        return isinstance(module, nn.Linear)
    weight = torch.tensor([[1, -2, 2], [0, 1, -1], [2, 2, 1], [-1, 0, -2], [-2, 1, 0]], dtype=torch.bfloat16)
    bias = None if module.bias is None else torch.tensor([1, -1, 0, 2, -2], dtype=torch.bfloat16)
    inputs = torch.tensor([[[1, 2, -1], [8, -8, 16]], [[-2, 0, 2], [0.125, 0.25, 0.5]]], dtype=torch.bfloat16)
    small = copy.copy(module)
    small._parameters = {"weight": nn.Parameter(weight), "bias": None if bias is None else nn.Parameter(bias)}
    try:
        with torch.no_grad():
            output = small.forward(inputs)
    # Another library's code may raise anything on a matrix of another size: it is not a plain product then.
    except Exception:
        return False
    expected = F.linear(inputs, weight, bias)
    return isinstance(output, torch.Tensor) and output.dtype == expected.dtype and torch.equal(output, expected)


def _block_list(base: nn.Module, prefix: str, depth: int, where: str) -> nn.ModuleList:
    """The outermost ModuleList under `base`, which is named `prefix`, with one entry for each of `depth` layers."""
    found: dict[str, nn.ModuleList] = {}
    for name, module in base.named_modules(prefix=prefix):
        inside = any(name.startswith(outer + ".") for outer in found)
        if isinstance(module, nn.ModuleList) and len(module) == depth and depth and not inside:
            found[name] = module
    if len(found) != 1:
        present = ", ".join(found) or "none"
        raise UnsupportedModelError(where, f"one list of {depth} blocks", present)
    name, blocks = next(iter(found.items()))
    if not any(map(is_linear, blocks.modules())):
        kinds = sorted({type(module).__name__ for module in blocks.modules() if list(module.parameters(recurse=False))})
        raise UnsupportedModelError(f"{where}.{name}", "blocks with linear layers", f"only {', '.join(kinds)}")
    return blocks
