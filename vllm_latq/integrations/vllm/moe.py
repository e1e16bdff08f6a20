"""The method of routed experts: loads every encoding, cuts this rank's part, runs it through `latq::experts`.

    checkpoint tensors --ExpertTensor--> whole shards of this rank's experts, on the CPU --read_shard, decode, merge-->
        a PackedWeight per expert and product --take--> this rank's channels --make_operands, stack_operands-->
        parameters [experts, ...] that the operator reads

In vLLM's words, w1 and w3 (gate and up) are one matrix, w13, and w2 (down) is another; without a gate, w1 is up, and
there is no w3. Which experts a rank owns, and which of their intermediate channels, is not computed here: vLLM's expert
map and its weight loader, run on an `arange`, say it.

Invariant: as for linears, a layer holds validated weights after `process_weights_after_loading`, or an error named what
is wrong.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.nn import Parameter
from vllm.config import get_current_vllm_config
from vllm.model_executor.layers.fused_moe import FusedMoEMethodBase

from vllm_latq.errors import MISSING, CheckpointError, UnsupportedModelError
from vllm_latq.format.encodings.packed import PackedWeight
from vllm_latq.format.encodings.registry import tensor_specs
from vllm_latq.format.scheme import LayerScheme
from vllm_latq.format.tensors import SHAPE
from vllm_latq.integrations.vllm.dummy import dummy_weight
from vllm_latq.integrations.vllm.linear import COLUMN_SCALES, CheckpointTensor, ShardId, collected
from vllm_latq.serving.experts import ACTIVATIONS, expert_constants, run_experts
from vllm_latq.serving.merging import Shard, decode, merge, read_shard
from vllm_latq.serving.operands import Operands, check_room, inlier_bits, make_operands, stack_operands
from vllm_latq.serving.sharding import check_groups, take

PRODUCTS = ("w13", "w2")


def expert_leaves(layer: Any) -> dict[str, dict[str, str]]:
    """vLLM's names of the products -> of their shards, in order -> the checkpoint's."""
    first = {"w1": layer.ckpt_gate_proj_name, "w3": layer.ckpt_up_proj_name}
    if not layer.moe_config.is_act_and_mul:
        del first["w3"]
    return dict(zip(PRODUCTS, (first, {"w2": layer.ckpt_down_proj_name}), strict=True))


class ExpertTensor(CheckpointTensor):
    """Collects one tensor of all shards of a product; those of experts on other ranks are let go.

    Args:
        shards: number of them on this rank.
        dtype: of the tensor.
        experts: of this rank, by their numbers in the checkpoint.
    """

    def __new__(cls, shards: int, dtype: torch.dtype, experts: Sequence[int]) -> "ExpertTensor":
        return super().__new__(cls, shards, dtype)  # type: ignore[return-value]

    def __init__(self, shards: int, dtype: torch.dtype, experts: Sequence[int]) -> None:
        super().__init__(shards, dtype)
        self.experts = frozenset(experts)

    @staticmethod
    def keep(  # type: ignore[override]
        param: Any,
        loaded_weight: torch.Tensor,
        weight_name: str,
        shard_id: str,
        expert_id: int,
        return_success: bool = False,
    ) -> bool | None:
        """vLLM's weight loader of experts; the names of its arguments are part of vLLM's interface."""
        mine = expert_id in param.experts
        if mine:
            param.store((expert_id, shard_id), loaded_weight, 1)
        return mine if return_success else None


class LatqMoEMethod(FusedMoEMethodBase):
    """Weights and forward pass of the routed experts of one layer.

    Args:
        moe: vLLM's description of the layer.
        schemes: how the shards of each of PRODUCTS are stored, in all experts alike.
        prefix: vLLM's name of the layer.
        recipe: of the checkpoint; sets the outlier rate of dummy weights.
    """

    def __init__(self, moe: Any, schemes: Mapping[str, LayerScheme], prefix: str, recipe: Mapping[str, Any]) -> None:
        super().__init__(moe)
        self.schemes, self.prefix, self.recipe = schemes, prefix, recipe
        # Fixed by the first load, so that `reload_weights` can write into the same tensors.
        self.bits: dict[str, int] = {}
        self.capacity: dict[str, int | None] = {}
        self.parameters: dict[str, tuple[str, ...]] = {}

    def maybe_roundup_sizes(
        self, hidden_size: int, intermediate_size_per_partition: int, act_dtype: Any, moe_parallel_config: Any
    ) -> tuple[int, int]:
        """The same sizes: none of vLLM's kernels run, so none of their paddings are wanted."""
        return hidden_size, intermediate_size_per_partition

    def get_fused_moe_quant_config(self, layer: torch.nn.Module) -> None:
        """None: it would configure vLLM's kernels."""

    def create_weights(
        self,
        layer: Any,
        num_experts: int,
        hidden_size: int,
        intermediate_size_per_partition: int,
        params_dtype: torch.dtype,
        **extra_weight_attrs: Any,
    ) -> None:
        """Register a collecting parameter per stored tensor and product.

        Raises:
            UnsupportedModelError: experts that are more than gate, up and down, or up and down.
            UnsupportedShapeError: a scale group that would be cut.
        """
        self.weighs_inputs = bool(layer.apply_router_weight_on_input)
        self._check_supported(layer)
        self.dtype, self.leaves = params_dtype, expert_leaves(layer)
        self.dummy = str(get_current_vllm_config().load_config.load_format) == "dummy"
        local = {n: int(layer._map_global_expert_id_to_local_expert_id(n)) for n in range(layer.global_num_experts)}
        self.experts = sorted((n for n in local if local[n] >= 0), key=local.__getitem__)
        if not self.experts:
            hint = "Share them out over fewer processes, or serve without expert parallelism."
            expected, found = "at least one expert on every rank", f"{layer.global_num_experts} experts, none on this"
            raise UnsupportedModelError(self.prefix, expected, found, hint)
        channels = self.moe.intermediate_size
        self.shapes = {"w13": (channels, hidden_size), "w2": (hidden_size, channels)}
        if self.schemes["w2"].group_size is not None:
            where = f"{self.prefix}.*.{self.leaves['w2']['w2']}"
            check_groups(self.schemes["w2"].group_size, 0, intermediate_size_per_partition, where)
        self.suffixes: dict[str, tuple[str, ...]] = {}
        for product, shape in self.shapes.items():
            leaf = next(iter(self.leaves[product].values()))
            specs = tensor_specs(self.schemes[product], *shape, f"{self.prefix}.*.{leaf}")
            self.suffixes[product] = tuple(specs)
            shards = len(self.experts) * len(self.leaves[product])
            for suffix, spec in specs.items():
                layer.register_parameter(f"{product}_{suffix}", ExpertTensor(shards, spec.dtype, self.experts))

    def process_weights_after_loading(self, layer: Any) -> None:
        """Turn the collected tensors into the operator's; raises CheckpointError if they are incomplete or invalid."""
        if not hasattr(layer, f"w13_{SHAPE}"):
            return  # already processed
        channels = self._owned_channels(layer)
        gate_up, down = (self._install(layer, product, channels) for product in PRODUCTS)
        self.constants = expert_constants(gate_up, down, layer.global_num_experts, layer.activation.value)

    def apply(
        self,
        layer: Any,
        x: torch.Tensor,
        topk_weights: torch.Tensor,
        topk_ids: torch.Tensor,
        shared_experts: Any = None,
        shared_experts_input: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """x [tokens, hidden] -> [tokens, hidden], what this rank adds. vLLM runs shared experts and sums over ranks."""
        ids = topk_ids
        if layer._expert_map is not None:
            ids = layer._expert_map[ids.to(torch.int64)].masked_fill(ids < 0, -1)
        if self.weighs_inputs:  # those of the one expert of each token
            x, topk_weights = x * topk_weights.to(x.dtype), torch.ones_like(topk_weights)
        gate_up, down = ([getattr(layer, name) for name in self.parameters[product]] for product in PRODUCTS)
        return run_experts(x, topk_weights, ids, gate_up, down, *self.constants)

    def _check_supported(self, layer: Any) -> None:
        activation = layer.activation.value
        refused = {
            f"the activation {activation}": activation not in ACTIVATIONS,
            "a limit in the activation": getattr(layer, "swiglu_limit", None) is not None,
            "biases": self.moe.has_bias,
            "several experts that the router weighs at their input": self.weighs_inputs
            and self.moe.experts_per_token > 1,
        }
        if any(refused.values()):
            expected = f"experts of linears alone, with an activation among {', '.join(ACTIVATIONS)}"
            found = ", ".join(name for name, present in refused.items() if present)
            raise UnsupportedModelError(self.prefix, expected, found, "Leave the experts of this model unquantized.")

    def _install(self, layer: Any, product: str, channels: tuple[int, int]) -> Operands:
        """Replace the collecting parameters of a product by the operator's."""
        collectors = {suffix: getattr(layer, f"{product}_{suffix}") for suffix in self.suffixes[product]}
        device, shards = collectors[SHAPE].device, collected(collectors)
        if shards or not self.dummy:
            weights = self._local_weights(product, shards, channels, device)
        else:
            weights = self._dummy_weights(product, channels)
        made, scales, capacity = [], [], self.capacity.get(product)
        for weight in weights:
            weight = weight.to(device)
            made.append(make_operands(weight, self.dtype, self.prefix, capacity, alone=False))
            check_room(made, self.prefix, capacity)
            self.bits[product] = weight.bits
            if weight.column_scales is not None:
                scales.append(weight.column_scales)
        operands = stack_operands(made, self.prefix, capacity)
        self.capacity[product] = operands.capacity
        tensors = {COLUMN_SCALES: torch.stack(scales) if scales else None} | operands.tensors
        for suffix in collectors:
            delattr(layer, f"{product}_{suffix}")
        for name, tensor in tensors.items():
            parameter = None if tensor is None else Parameter(tensor, requires_grad=False)
            layer.register_parameter(f"{product}_{name}", parameter)
        self.parameters[product] = tuple(f"{product}_{name}" for name in tensors)
        return operands

    def _local_weights(
        self,
        product: str,
        shards: Mapping[ShardId, Mapping[str, torch.Tensor]],
        channels: tuple[int, int],
        device: torch.device,
    ) -> Iterator[PackedWeight]:
        """One product of each expert of this rank, in vLLM's order: validated, merged, cut."""
        experts = [
            [self._read_shard(product, n, shard, shards) for shard in self.leaves[product]] for n in self.experts
        ]
        integers = [decode(read, device) for read in experts]
        bits = self.bits.get(product) or inlier_bits(integers, device, self.dtype)
        rows, cols = self.shapes[product]
        for number, read, matrices in zip(self.experts, experts, integers, strict=True):
            whole = merge(read, matrices, device, bits)
            columns = channels if product == "w2" else (0, cols)
            kept = torch.arange(*((0, rows) if product == "w2" else channels), device="cpu")
            source = torch.cat([kept + rows * index for index in range(len(read))])
            yield take(whole, source.to(whole.qweight.device), columns, f"{self.prefix}.{number}")

    def _read_shard(
        self, product: str, expert: int, shard: str, shards: Mapping[ShardId, Mapping[str, torch.Tensor]]
    ) -> Shard:
        name = f"{self.prefix}.{expert}.{self.leaves[product][shard]}"
        if (expert, shard) not in shards:
            expected = f"tensors {', '.join(self.suffixes[product])}"
            raise CheckpointError(name, expected, "none of them in the checkpoint", MISSING)
        rows, cols = self.shapes[product]
        return name, read_shard(shards[expert, shard], self.schemes[product], cols, name, rows)

    def _dummy_weights(self, product: str, channels: tuple[int, int]) -> Iterator[PackedWeight]:
        hidden, size = self.shapes["w2"][0], channels[1] - channels[0]
        rows, cols = (hidden, size) if product == "w2" else (len(self.leaves[product]) * size, hidden)
        weight = dummy_weight(self.schemes[product], rows, cols, self.recipe)
        return iter([weight] * len(self.experts))

    def _owned_channels(self, layer: Any) -> tuple[int, int]:
        """The range of intermediate channels on this rank: what vLLM's loader makes of a matrix of their numbers."""
        found = set()
        for shard, dim in (*((shard, 0) for shard in self.leaves["w13"]), ("w2", 1)):
            # One-based, because channels that the loader leaves alone or pads are 0.
            numbers = torch.arange(1, self.moe.intermediate_size + 1, device="cpu").unsqueeze(1 - dim)
            width = self.moe.intermediate_size_per_partition * (1 if dim else len(self.leaves["w13"]))
            target = torch.zeros((1, 1, width) if dim else (1, width, 1), dtype=torch.int64, device="cpu")
            probe = Parameter(target, requires_grad=False)
            layer.weight_loader(probe, numbers, "w2_weight" if dim else "w13_weight", shard, self.experts[0])
            loaded = probe.data[probe.data > 0]
            found.add((int(loaded.min()) - 1, int(loaded.max())))
        ((low, high),) = found
        return low, high
