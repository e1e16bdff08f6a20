"""The linear method: loads every encoding, cuts this rank's part, gives it to the operator.

    checkpoint tensors --CheckpointTensor--> whole shards on the CPU --read_shard, decode, merge--> Merged
        --cut--> this rank's Merged --make_operands--> parameters that the operator reads

This module does not compute which rows a rank owns. It runs vLLM's own weight loader on an `arange`, whose result says
so: merged layers, KV-head replication and vocabulary padding follow vLLM in every release.

Invariant: after `process_weights_after_loading` a layer holds validated weights, or an error has named the problem.
vLLM itself does not notice missing tensors of quantized layers.
"""

import json
from collections.abc import Callable, Hashable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import torch
from torch.nn import Parameter
from vllm.config import get_current_vllm_config
from vllm.model_executor.layers.linear import LinearMethodBase, register_weight_loader_v2_supported_method
from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding
from vllm.model_executor.parameter import BasevLLMParameter, ModelWeightParameter

from vllm_latq.errors import MISSING, OTHER_MODEL, CheckpointError, ConfigError
from vllm_latq.format.encodings.registry import tensor_specs
from vllm_latq.format.scheme import LayerScheme
from vllm_latq.format.tensors import SHAPE
from vllm_latq.integrations.vllm.dummy import dummy_weight
from vllm_latq.serving.linear import linear
from vllm_latq.serving.merging import Merged, Shard, cut, decode, merge, read_shard
from vllm_latq.serving.operands import inlier_bits, make_operands
from vllm_latq.serving.sharding import ZERO_ROW, check_groups

KNOWN_NAMES = {
    "words": "qweight",
    "dense": "qweight",
}  # LoRA takes a layer's device from a parameter with a name it knows
DESCRIPTION = "latq_description"
# Files in these formats have the tensors that another process of vLLM made of a checkpoint.
PROCESSED_FORMATS = ("sharded_state", "runai_streamer_sharded")
ShardId = Hashable  # None, "q"/"k"/"v", the index of a merged matrix, or a tuple of indices


class CheckpointTensor(BasevLLMParameter):
    """Collects one tensor of each checkpoint shard, whole and on the CPU, until all tensors of a layer have arrived.

    Nothing is cut on arrival: the tensors of a linear only make sense together, and they arrive in any order. The
    parameter's own data has one element per shard and counts arrivals, because `reload_weights` processes a layer once
    as many elements have been copied as the layer's parameters have.
    """

    def __new__(cls, shards: int, dtype: torch.dtype) -> "CheckpointTensor":
        """Make the parameter, one element per shard."""
        return super().__new__(cls, data=torch.empty(shards, dtype=dtype))

    def __init__(self, shards: int, dtype: torch.dtype) -> None:
        super().__init__(data=self.data, weight_loader=self.keep)
        self.arrived: dict[Hashable, torch.Tensor] = {}

    @staticmethod
    def keep(param: Any, loaded_weight: torch.Tensor, loaded_shard_id: ShardId = None) -> None:
        """Store a loaded tensor. vLLM calls this as a weight loader and knows the names of the arguments."""
        shards = len(loaded_shard_id) if isinstance(loaded_shard_id, tuple) else 1
        param.store(loaded_shard_id, loaded_weight, param.data.numel() if loaded_shard_id is None else shards)

    def store(self, key: Hashable, tensor: torch.Tensor, shards: int) -> None:
        """Keep a tensor that belongs to `shards` of the shards."""
        # vLLM's own online quantization keeps loaded tensors too, so its iterators do not reuse their memory.
        self.arrived[key] = tensor.detach().to("cpu")
        self.data[:shards].copy_(torch.ones(shards, dtype=self.dtype, device=self.device))


def load_format() -> str:
    """Return how vLLM loads the current model; raises ConfigError for a format that the plugin cannot load."""
    found = str(get_current_vllm_config().load_config.load_format)
    if found in PROCESSED_FORMATS:
        hint = "Serve the quantized checkpoint itself without --load-format: every rank keeps only its part."
        raise ConfigError("--load-format", "a format that reads checkpoints", found, hint)
    return found


def collected(collectors: Mapping[str, CheckpointTensor]) -> dict[ShardId, dict[str, torch.Tensor]]:
    """Return the tensors that have arrived: shard -> collector's name -> tensor. The collectors release them."""
    shards: dict[ShardId, dict[str, torch.Tensor]] = {}
    for suffix, collector in collectors.items():
        for shard_id, tensor in collector.arrived.items():
            shards.setdefault(shard_id, {})[suffix] = tensor
        # vLLM keeps copies of the parameter for reloading, which share this dict.
        collector.arrived.clear()
    return shards


def describe(layer: torch.nn.Module, method: object, names: Sequence[str]) -> None:
    """Keep the named attributes of a layer's method in a buffer of the layer, from which `adopt` restores them.

    vLLM's weight cache gives another process the tensors of a layer, but not the attributes of its method.
    """
    text = json.dumps({name: getattr(method, name) for name in names})
    buffer = torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8)
    layer.register_buffer(DESCRIPTION, buffer, persistent=False)


def adopt(layer: torch.nn.Module, method: object) -> bool:
    """Restore a method from the description of its layer; return False if the layer is not processed yet."""
    buffer = getattr(layer, DESCRIPTION, None)
    if buffer is None:
        return False
    vars(method).update(json.loads(bytes(buffer.tolist())))
    return True


def complete_adopted(layer: torch.nn.Module, names: Sequence[str]) -> None:
    """Give a layer from the weight cache the parameters that the cache cannot: those that are None, and tickets."""
    collectors = [name for name, found in layer.named_parameters(recurse=False) if isinstance(found, CheckpointTensor)]
    for name in collectors:
        delattr(layer, name)
    for name in names:
        if not hasattr(layer, name):
            layer.register_parameter(name, None)
        elif collectors and name.endswith("tickets"):
            # Kernels write to their tickets; the process that made them, or a third one, may do so at the same time.
            fresh = torch.zeros_like(getattr(layer, name))
            layer.register_parameter(name, Parameter(fresh, requires_grad=False))


@register_weight_loader_v2_supported_method
class LatqLinearMethod(LinearMethodBase):
    """Weights and forward pass of one linear layer or language-model head.

    Args:
        scheme: how the layer's shards are stored.
        prefix: vLLM's name of the layer.
        shard_names: checkpoint names of the matrices merged into it, in vLLM's order.
        recipe: of the checkpoint; sets the outlier rate of dummy weights.
        order: maps the name and the number of rows of a shard to the stored row for each row of vLLM's model.
    """

    supports_pre_processed_weights = True
    DESCRIBED: tuple[str, ...] = ("parameters", "constants", "layout", "arch", "bits", "capacity")

    def __init__(
        self,
        scheme: LayerScheme,
        prefix: str,
        shard_names: list[str],
        recipe: Mapping[str, Any],
        order: Callable[[str, int], torch.Tensor],
    ) -> None:
        self.scheme, self.prefix, self.shard_names, self.recipe = scheme, prefix, shard_names, recipe
        self.order = order
        # Fixed by the first load, so that `reload_weights` can write into the same tensors.
        self.bits = scheme.bits
        self.capacity: Any = None
        self.weight_stand_in = SimpleNamespace(dtype=None, weight_loader=None)

    def create_weights(
        self,
        layer: Any,
        input_size_per_partition: int,
        output_partition_sizes: list[int],
        input_size: int,
        output_size: int,
        params_dtype: torch.dtype,
        **extra_weight_attrs: Any,
    ) -> None:
        """Register a collecting parameter per stored tensor; raises UnsupportedShapeError for a cut scale group."""
        self.rows, self.cols, self.all_cols = sum(output_partition_sizes), input_size_per_partition, input_size
        self.partition_rows, self.dtype = list(output_partition_sizes), params_dtype
        self.dummy = load_format() == "dummy"
        if self.rows != output_size:
            # vLLM's Mamba sets `layer.weight.weight_loader`, a loader of its own that knows which rows a rank owns.
            layer.weight = self.weight_stand_in
        if self.scheme.group_size is not None:
            check_groups(self.scheme.group_size, 0, self.cols, self.prefix)
        specs = tensor_specs(self.scheme, output_size, input_size, self.prefix)
        self.suffixes = list(specs)
        for suffix, spec in specs.items():
            layer.register_parameter(suffix, CheckpointTensor(len(output_partition_sizes), spec.dtype))
        if getattr(layer, "quant_method", self) is not self:
            # vLLM will quantize the result of `dequantize_weight` again, and asks for its shape beforehand.
            shape = torch.empty(self.rows, self.cols, dtype=params_dtype, device="meta")
            layer.register_parameter("weight", Parameter(shape, requires_grad=False))

    def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
        """Turn the collected tensors into the operator's; raises CheckpointError if they are incomplete or invalid."""
        if adopt(layer, self):
            complete_adopted(layer, self.parameters)
            self._stand_in_for_weight(layer)
            return
        self._install(layer, self._loaded_weight(layer))

    def dequantize_weight(self, layer: torch.nn.Module) -> torch.Tensor:
        """Return this rank's weight [rows, cols], dtype of the activations, from the collected tensors.

        vLLM calls this instead of `process_weights_after_loading`, to quantize the weight again.

        Raises:
            CheckpointError: the tensors are incomplete or invalid.
        """
        return self._loaded_weight(layer).dequantize(self.dtype)

    def apply(self, layer: torch.nn.Module, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """Map x [.., cols] to [.., rows] of this rank, dtype of x."""
        tensors = [getattr(layer, name) for name in self.parameters]
        y = linear(x, tensors, self.constants, self.layout, self.arch)
        return y if bias is None else y + bias

    def _loaded_weight(self, layer: torch.nn.Module) -> Merged:
        """Return this rank's weight, on the layer's device."""
        collectors = {suffix: getattr(layer, suffix) for suffix in self.suffixes}
        shards, device = collected(collectors), collectors[SHAPE].device
        if shards or not self.dummy:
            return self._local_weight(layer, shards, device).to(device)
        return dummy_weight(self.scheme, self.rows, self.cols, self.recipe).to(device)

    def _local_weight(
        self, layer: torch.nn.Module, shards: Mapping[ShardId, dict[str, torch.Tensor]], device: torch.device
    ) -> Merged:
        """Validate the shards, merge them, and cut the rows and columns that this rank owns."""
        source = torch.full((self.rows,), ZERO_ROW, dtype=torch.int64, device="cpu")
        read: list[Shard] = []
        offset = 0
        for shard_id, tensors in shards.items():
            name = self._shard_name(shard_id)
            weight = read_shard(tensors, self.scheme, self.all_cols, name)
            owned = self._owned_rows(layer, shard_id, weight.shape[0])
            stored = self.order(name, weight.shape[0])
            source = torch.where(owned >= 0, stored[owned.clamp(min=0)] + offset, source)
            offset += weight.shape[0]
            read.append((name, weight))
        self._check_complete(layer, source)
        integers = decode(read, device)
        whole = merge(read, integers, device, self.bits or inlier_bits([integers], device, self.dtype))
        return cut(whole, source, self._owned_columns(layer), self.prefix)

    def _owned_rows(self, layer: Any, shard_id: ShardId, checkpoint_rows: int) -> torch.Tensor:
        """Return, for each row of this rank, its row in the checkpoint shard, or ZERO_ROW; int64 [rows]."""
        # Row numbers start at 1, because the loader leaves rows that it does not fill, or pads, at 0.
        numbers = torch.arange(1, checkpoint_rows + 1, device="cpu").unsqueeze(1)
        target = torch.zeros((self.rows, 1), dtype=torch.int64, device="cpu")
        if self.cols != self.all_cols:  # the input is split: every rank has all rows
            if checkpoint_rows != self.rows:
                raise self._other_rows(shard_id, f"{checkpoint_rows} rows")
            return numbers[:, 0] - 1
        loaded = self._load_numbers(layer, numbers, target, shard_id)
        # vLLM's loader drops rows that do not fit. Each row is on some rank, but a head's rows may be spread unevenly.
        if int((loaded > 0).sum()) * layer.tp_size < checkpoint_rows and not isinstance(layer, VocabParallelEmbedding):
            raise self._other_rows(shard_id, f"{checkpoint_rows} rows")
        return loaded[:, 0] - 1

    def _owned_columns(self, layer: torch.nn.Module) -> tuple[int, int]:
        if self.cols == self.all_cols:
            return 0, self.cols
        numbers = torch.arange(self.all_cols, device="cpu").unsqueeze(0)
        target = torch.zeros((1, self.cols), dtype=torch.int64, device="cpu")
        low = int(self._load_numbers(layer, numbers, target, None)[0, 0])
        return low, low + self.cols

    def _load_numbers(self, layer: Any, numbers: torch.Tensor, target: torch.Tensor, shard_id: ShardId) -> torch.Tensor:
        """Run the layer's own weight loader on numbers instead of weights."""
        loader = self.weight_stand_in.weight_loader or getattr(layer, "weight_loader_v2", None) or layer.weight_loader
        probe = ModelWeightParameter(data=target, input_dim=1, output_dim=0, weight_loader=loader)
        probe.tp_rank, probe.tp_size = getattr(layer, "tp_rank", probe.tp_rank), layer.tp_size
        try:
            loader(probe, numbers, *(() if shard_id is None else (shard_id,)))
        except (AssertionError, RuntimeError) as error:
            raise self._other_rows(shard_id, f"{numbers.shape[0]} rows ({error})") from error
        return probe.data

    def _other_rows(self, shard_id: ShardId, found: str) -> CheckpointError:
        where, expected = f"{self._shard_name(shard_id)}.{SHAPE}", "the rows that the model's layer has"
        return CheckpointError(where, expected, found, OTHER_MODEL)

    def _check_complete(self, layer: torch.nn.Module, source: torch.Tensor) -> None:
        if isinstance(layer, VocabParallelEmbedding) and (source >= 0).any():
            return  # the missing rows are padding of the vocabulary
        for index, part in enumerate(source.split(self.partition_rows)):
            if (part < 0).any():
                merged = len(self.shard_names) == len(self.partition_rows)
                name = self.shard_names[index] if merged else self.prefix
                expected = f"tensors {', '.join(self.suffixes)}"
                raise CheckpointError(name, expected, "none of them in the checkpoint", MISSING)

    def _shard_name(self, shard_id: ShardId) -> str:
        """Return the checkpoint name of a shard, or the layer's own name where the checkpoint stores it merged."""
        index = {"q": 0, "k": 1, "v": 2}.get(shard_id) if isinstance(shard_id, str) else shard_id
        known = isinstance(index, int) and index < len(self.shard_names)
        return self.shard_names[index] if known else self.prefix  # type: ignore[call-overload]

    def _install(self, layer: torch.nn.Module, weight: Merged) -> None:
        """Replace the collecting parameters by the operator's."""
        operands = make_operands(weight, self.dtype, self.prefix, self.capacity)
        self.bits, self.capacity = weight.bits, operands.capacity
        self.constants, self.layout, self.arch = operands.constants(), operands.layout, operands.arch
        tensors = {KNOWN_NAMES.get(name, name): tensor for name, tensor in operands.tensors().items()}
        self.parameters = list(tensors)
        vars(layer).pop("weight", None)  # the stand-in
        for suffix in self.suffixes:
            delattr(layer, suffix)
        for name, tensor in tensors.items():
            layer.register_parameter(name, None if tensor is None else Parameter(tensor, requires_grad=False))
        describe(layer, self, self.DESCRIBED)
        self._stand_in_for_weight(layer)

    def _stand_in_for_weight(self, layer: Any) -> None:
        """Give a head a `weight`: LoRA asks it for its dtype and device."""
        if isinstance(layer, VocabParallelEmbedding):
            # NaN equals nothing, not even another head's weight.
            device = getattr(layer, self.parameters[0]).device
            layer.weight = torch.full((1, self.cols), torch.nan, dtype=self.dtype, device=device)
