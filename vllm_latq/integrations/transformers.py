"""transformers' quantizer for `quant_method: latq`, registered when this module is imported.

    checkpoint tensors --buffers of LatqLinear--> validate, decode --> tensors of a layout --latq::linear--> y

Integer weights get the layout `checkpoint`. Trellis weights are decoded once, at load, into the layout `dense`.

Without this quantizer transformers would make random weights and only warn. A key of config.json makes it raise an
error that names the import; `update_attn_implementation` removes the key from the configuration in memory.

Invariant: a model that `from_pretrained` returns holds validated weights, and none that transformers made up; training
and saving through transformers are refused.
"""

import copy
import re
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers.quantizers import HfQuantizer, register_quantization_config, register_quantizer
from transformers.utils.quantization_config import QuantizationConfigMixin

from vllm_latq.errors import REPAIR, CheckpointError
from vllm_latq.format.config import NEEDS_IMPORT, QUANT_METHOD, REDIRECTING_KEYS, CheckpointConfig
from vllm_latq.format.encodings.packed import PackedWeight
from vllm_latq.format.encodings.registry import tensor_specs
from vllm_latq.format.encodings.trellis import TrellisWeight
from vllm_latq.format.encodings.weight import IntegerWeight, Weight
from vllm_latq.format.files import read_json
from vllm_latq.format.reader import CheckpointReader
from vllm_latq.format.scheme import LayerScheme
from vllm_latq.format.tensors import SHAPE
from vllm_latq.format.validate import weight_from_tensors
from vllm_latq.format.verify import KV_SCALES, check_headers
from vllm_latq.models.experts import Experts
from vllm_latq.models.joined import JoinedLinears
from vllm_latq.models.stored_names import split_tensors, stored_names, unmerged
from vllm_latq.serving.decode import decode_on_device
from vllm_latq.serving.layouts.checkpoint import CheckpointOperands
from vllm_latq.serving.layouts.dense import DenseOperands
from vllm_latq.serving.linear import LAYOUTS, linear

# Shape of a tensor that is not in the checkpoint; no stored tensor has three dimensions.
_ABSENT = (0, 0, 0)


class LatqLinear(nn.Module):
    """A quantized linear: first a container for its stored tensors, after `finish` a user of `latq::linear`.

    Args:
        linear: the linear to replace; its bias is stored unquantized.
        scheme: how the weight is stored.
        name: of the module in the checkpoint.
        shapes: of all stored tensors, by name; some depend on the data.
    """

    def __init__(
        self, linear: nn.Linear, scheme: LayerScheme, name: str, shapes: Mapping[str, tuple[int, ...]]
    ) -> None:
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.scheme, self.name = scheme, name
        self.specs = tensor_specs(scheme, self.out_features, self.in_features, name)
        for suffix, spec in self.specs.items():
            self.register_buffer(suffix, torch.empty(shapes.get(f"{name}.{suffix}", _ABSENT), dtype=spec.dtype))
        self.dtype = linear.weight.dtype
        self.layout = ""  # set by `finish`
        self.bias = None
        if linear.bias is not None:
            self.bias = nn.Parameter(torch.empty(self.out_features, dtype=self.dtype), requires_grad=False)

    @property
    def weight(self) -> torch.Tensor:
        """An empty tensor, marked as initialized: some families initialize the weights of their linears by hand."""
        nothing = torch.empty(0, dtype=self.dtype)
        nothing._is_hf_initialized = True  # type: ignore[attr-defined]
        return nothing

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> "LatqLinear":
        """Apply `fn`, but keep dtypes: `.to(dtype)` sets the compute dtype and must not round the stored weight.

        A dense matrix, which was rounded at load, gets the new dtype.
        """
        keeps = self.layout != DenseOperands.layout
        before = {name: buffer for name, buffer in self._buffers.items() if buffer is not None and keeps}
        super()._apply(fn, recurse)
        for name, buffer in before.items():
            moved = self.get_buffer(name)
            if moved.dtype != buffer.dtype:
                self._buffers[name] = buffer.to(moved.device)
        return self

    def finish(self) -> None:
        """Validate the loaded tensors and replace them by the operator's; raises CheckpointError."""
        device = next(self.buffers()).device
        buffers = {suffix: self.get_buffer(suffix) for suffix in self.specs}
        stored = {suffix: tensor.cpu() for suffix, tensor in buffers.items() if tensor.shape != _ABSENT}
        weight = weight_from_tensors(stored, self.scheme, (self.out_features, self.in_features), self.name)
        for suffix in self.specs:
            delattr(self, suffix)
        operands = self._operands(weight, device)
        self.layout, self.constants = operands.layout, operands.constants()
        self.names = tuple(operands.tensors())
        for name, tensor in operands.tensors().items():
            self.register_buffer(name, None if tensor is None else tensor.to(device))

    def _operands(self, weight: Weight, device: torch.device) -> CheckpointOperands | DenseOperands:
        """Return the operands of a weight."""
        if isinstance(weight, TrellisWeight):
            return DenseOperands.pack(weight.to(device).dequantize(self.dtype))
        assert isinstance(weight, IntegerWeight), "every other encoding has integers"
        return CheckpointOperands.pack(weight.pack(decode_on_device(weight, self.name, device)))

    def dense_weight(self, dtype: torch.dtype) -> torch.Tensor:
        """Return the dequantized weight [out_features, in_features]."""
        operands = LAYOUTS[self.layout].from_lists(self._tensors(), self.constants, "")
        if isinstance(operands, DenseOperands):
            return operands.dense.to(dtype)
        assert isinstance(operands, CheckpointOperands)
        return operands.dense(dtype)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map x [.., in_features] to [.., out_features]."""
        y = linear(x, self._tensors(), self.constants, self.layout, "")
        return y if self.bias is None else y + self.bias

    def extra_repr(self) -> str:
        """Return the arguments that `print(model)` shows."""
        return f"in_features={self.in_features}, out_features={self.out_features}, {self.scheme}"

    def _tensors(self) -> list[torch.Tensor | None]:
        return [getattr(self, name) for name in self.names]


class LatqEmbedding(LatqLinear):
    """A quantized embedding: the rows of the tokens are dequantized.

    Args:
        embedding: the embedding to replace. Its own forward is kept: some families scale what they look up.
        scheme: how the weight is stored.
        name: of the module in the checkpoint.
        shapes: of all stored tensors, by name.
    """

    def __init__(
        self, embedding: nn.Embedding, scheme: LayerScheme, name: str, shapes: Mapping[str, tuple[int, ...]]
    ) -> None:
        dtype = embedding.weight.dtype
        linear = nn.Linear(embedding.embedding_dim, embedding.num_embeddings, bias=False, dtype=dtype)
        super().__init__(linear, scheme, name, shapes)
        self.num_embeddings, self.embedding_dim = embedding.num_embeddings, embedding.embedding_dim
        del embedding.weight
        embedding.weight = self.weight  # no parameter of the model
        self.lookup = embedding

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map token ids [..] to their embeddings [.., embedding_dim]."""
        operands = LAYOUTS[self.layout].from_lists(self._tensors(), self.constants, "")
        assert isinstance(operands, CheckpointOperands)
        assert operands.scales is not None
        ids, places = x.unique(return_inverse=True)
        layout = (*self.scheme.code_layout(), operands.cols)
        # The family's own forward runs on a table of the rows that the tokens need.
        table = copy.copy(self.lookup)
        table.weight = PackedWeight(operands.qweight[ids], *layout, operands.scales[ids]).dequantize(self.dtype)  # type: ignore[assignment]
        table.padding_idx = None
        return table.forward(places)

    def restore(self, dtype: torch.dtype) -> nn.Embedding:
        """Return the embedding that was replaced, with the dequantized weight."""
        self.lookup.weight = nn.Parameter(self.dense_weight(dtype), requires_grad=False)
        return self.lookup


@register_quantization_config(QUANT_METHOD)
class LatqQuantizationConfig(QuantizationConfigMixin):
    """A checkpoint's `quantization_config` as transformers wants it; FORMAT.md section 2 lists its keys.

    Args:
        values: the JSON object; raises ConfigError for keys and values that this version of the format does not know.
    """

    def __init__(self, **values: Any) -> None:
        self.quant_method = QUANT_METHOD  # type: ignore[assignment]
        self.checkpoint = CheckpointConfig.from_dict(values, "config.json: quantization_config")

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON object."""
        return self.checkpoint.to_dict()


@register_quantizer(QUANT_METHOD)
class LatqQuantizer(HfQuantizer):
    """Replaces the quantized linears of a model before loading; turns the loaded tensors into weights afterwards."""

    quantization_config: LatqQuantizationConfig
    requires_calibration = True
    unfused = False
    joined: Collection[str] = ()
    checkpoint: CheckpointReader | None = None

    def is_serializable(self) -> bool:
        """Say that transformers cannot save a loaded model."""
        return False

    @property
    def is_trainable(self) -> bool:
        """Say that a loaded model cannot be trained."""
        return False

    def update_attn_implementation(self, config: Any) -> Any:
        """Let transformers load the checkpoint: config.json has a key that makes it refuse without this quantizer."""
        for key in REDIRECTING_KEYS:
            if getattr(config, key, None) == NEEDS_IMPORT:
                delattr(config, key)
        return config

    def update_tp_plan(self, config: Any) -> Any:
        """Check a checkpoint in a local directory before transformers reads its index; no earlier hook knows it."""
        config = self.update_attn_implementation(config)  # which transformers before 5.18 does not call
        directory = Path(config.name_or_path)
        if (directory / "config.json").is_file():
            stored = read_json(directory / "config.json").get("quantization_config")
            # A config class, unlike AutoConfig, keeps the name of the original model, which may be another directory.
            fingerprint = self.quantization_config.checkpoint.fingerprint
            if isinstance(stored, dict) and stored.get("fingerprint", "") == fingerprint:
                self._check(directory)
        return config

    def _check(self, directory: Path) -> CheckpointReader:
        """Return the checkpoint in a directory after checking its headers; raise LatqError if they are wrong."""
        if self.checkpoint is None or self.checkpoint.directory != directory:
            self.checkpoint = CheckpointReader(directory)
            check_headers(self.checkpoint)
        return self.checkpoint

    def _process_model_before_weight_loading(self, model: Any, checkpoint_files: Any = None, **_: Any) -> None:
        tied = getattr(model.config.get_text_config(), "tie_word_embeddings", False)
        tied_head = model.get_output_embeddings() if tied else None
        store = self._check(Path(checkpoint_files[0]).parent).store if checkpoint_files else None
        shapes = {} if store is None else {name: store.shape(name) for name in store.names()}
        stored = _stored_linears(model, shapes, checkpoint_files)
        if self.quantization_config.checkpoint.has_kv_scales:
            # transformers' cache has no scales.
            known = model._keys_to_ignore_on_load_unexpected or ()
            model._keys_to_ignore_on_load_unexpected = {*known, *(rf"\{ending}$" for ending in KV_SCALES)}
        self.unfused = any(isinstance(module, Experts) for module in model.modules())
        split = split_tensors(model)
        joined = {name: module for name, module in model.named_modules() if isinstance(module, JoinedLinears)}
        self.joined = [f"{name}.{leaf}" for name, module in joined.items() for leaf, _ in module.named_children()]
        for name, module in list(model.named_modules()):
            where = stored.get(f"{name}.weight", f"{name}.weight").removesuffix(".weight")
            checkpoint = self.quantization_config.checkpoint
            scheme = None if checkpoint.is_ignored(name) or module is tied_head else checkpoint.scheme_for(where)
            if isinstance(module, nn.Embedding) and where in checkpoint.beside:
                with torch.device("meta"):
                    embedding = LatqEmbedding(module, checkpoint.beside[where], where, shapes)
                model.set_submodule(name, embedding)
            if not isinstance(module, nn.Linear):
                continue
            if f"{name}.weight" in split and f"{where}.{SHAPE}" not in shapes:
                continue  # of a tower, whose linears are stored as one
            if scheme is None:
                if f"{where}.{SHAPE}" in shapes:
                    # transformers would fill the linear with random weights.
                    expected = "no quantized tensors for an ignored module or a tied head"
                    raise CheckpointError(where, expected, "some", "Fix `ignore` or `tie_word_embeddings`.")
                continue
            with torch.device("meta"):
                linear = LatqLinear(module, scheme, where, shapes)
            model.set_submodule(name, linear)
        self.shapes = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}

    def update_weight_conversions(self, weight_conversions: list[Any], *_: Any) -> list[Any]:
        """Return transformers' rules for names, except rules that would merge what is linears of their own."""
        return unmerged(weight_conversions, self.joined) if self.unfused or self.joined else weight_conversions

    def _process_model_after_weight_loading(self, model: Any, **_: Any) -> Any:
        _refuse_missing(model)
        for name, parameter in model.named_parameters():
            # transformers takes a parameter of another shape than config.json says, if a quantizer loads the model.
            if tuple(parameter.shape) != self.shapes.get(name, tuple(parameter.shape)):
                expected, found = f"shape {self.shapes[name]}, by config.json", f"shape {tuple(parameter.shape)}"
                raise CheckpointError(name, expected, found, "config.json belongs to another model: copy it again.")
        for module in model.modules():
            if isinstance(module, LatqLinear):
                module.finish()
        return model

    def _dequantize(self, model: Any, dtype: torch.dtype | str | None = None) -> Any:
        dtype = getattr(torch, dtype) if isinstance(dtype, str) else dtype or torch.bfloat16
        for name, module in list(model.named_modules()):
            if isinstance(module, LatqEmbedding):
                model.set_submodule(name, module.restore(dtype))
            elif isinstance(module, LatqLinear):
                with torch.device("meta"):
                    linear = nn.Linear(module.in_features, module.out_features, bias=module.bias is not None)
                linear.weight = nn.Parameter(module.dense_weight(dtype), requires_grad=False)
                linear.register_parameter("bias", module.bias)
                model.set_submodule(name, linear)
        return model


def _refuse_missing(model: Any) -> None:
    """Raise CheckpointError for a weight that no tensor reached: transformers makes its values up, and only warns.

    Left out are the tensors of quantized linears, which have checks of their own, tensors tied to others, a pooler,
    which few models have trained, and the head of another class than the checkpoint's, which is new on purpose.
    """
    is_own = type(model).__name__ in (model.config.architectures or ())
    part, optional = model if is_own else model.base_model, model._keys_to_ignore_on_load_missing or ()
    linears = {name: module for name, module in part.named_modules() if isinstance(module, LatqLinear)}
    checked = {f"{name}.{suffix}" for name, linear in linears.items() for suffix in linear.specs}
    checked.update(model.all_tied_weights_keys)
    missing = [
        name
        for name, tensor in part.state_dict(keep_vars=True).items()
        # transformers marks what it loaded; accelerate puts what it moves off a GPU on the meta device.
        if not (name in checked or tensor.is_meta or getattr(tensor, "_is_hf_initialized", False))
        if not any(re.search(pattern, name) for pattern in ("pooler", *optional))
    ]
    if missing:
        more = f", and none for {', '.join(missing[1:])}" if missing[1:] else ""
        raise CheckpointError(missing[0], "a tensor in the checkpoint", f"none{more}", REPAIR)


def _stored_linears(model: Any, stored: Collection[str], files: list[str]) -> dict[str, str]:
    """Map each tensor of the model to its name in the checkpoint. Splits experts that are quantized one by one."""
    quantized = [name.removesuffix(SHAPE) + "weight" for name in stored if name.endswith("." + SHAPE)]
    # Without quantized tensors there is nothing to split.
    return stored_names(model, [*stored, *quantized], files[0], quantized) if quantized else {}
