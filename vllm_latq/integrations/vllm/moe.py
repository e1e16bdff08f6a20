"""The method of routed experts: loads every encoding, cuts this rank's part, runs it through `latq::experts`.

    checkpoint tensors --ExpertTensor--> whole shards of this rank's experts, on the CPU --read_shard, decode, merge-->
        a Merged per expert and matrix --cut--> this rank's channels --make_operands, stack_operands-->
        parameters [experts, ...] that the operator reads

vLLM calls the two matrices of an expert w13, gate (w1) above up (w3), and w2, down. Without a gate, w1 is up, and there
is no w3. This module does not compute which experts a rank owns, nor which of their intermediate channels: vLLM's
expert map, and vLLM's weight loader run on an `arange`, say so.

Invariant: after `process_weights_after_loading` a layer holds validated weights, or an error has named the problem.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.nn import Parameter
from vllm.config import get_current_vllm_config
from vllm.model_executor.layers.fused_moe import FusedMoEMethodBase

from vllm_latq.errors import MISSING, OTHER_MODEL, CheckpointError, UnsupportedModelError
from vllm_latq.format.encodings.registry import tensor_specs
from vllm_latq.format.scheme import LayerScheme
from vllm_latq.format.tensors import SHAPE
from vllm_latq.integrations.vllm.dummy import dummy_weight
from vllm_latq.integrations.vllm.linear import (
    CheckpointTensor,
    ShardId,
    adopt,
    collected,
    complete_adopted,
    describe,
    load_format,
)
from vllm_latq.serving.experts import ACTIVATIONS, ExpertConstants, expert_constants, run_experts
from vllm_latq.serving.merging import Merged, Shard, cut, decode, merge, read_shard
from vllm_latq.serving.operands import Operands, check_room, inlier_bits, make_operands, stack_operands
from vllm_latq.serving.sharding import check_groups

MATRICES = ("w13", "w2")
BIAS = "bias"
# vLLM's name of the activation whose models hold gate and up interleaved, and load all experts from one such tensor.
INTERLEAVED = "swigluoai"
# Limit, alpha and beta of that activation, and the limit of swiglustep: vLLM takes no others.
SWIGLUOAI, SWIGLUSTEP = (7.0, 1.702, 1.0), (7.0,)


def expert_activation(layer: Any) -> tuple[str, tuple[float, ...]]:
    """Return the activation of a layer's experts, one of ACTIVATIONS, and its constants.

    The name is vLLM's own if vLLM clamps in a way that ACTIVATIONS does not have.
    """
    name = layer.activation.value
    limit, alpha, beta = (getattr(layer, f"swiglu_{value}", None) for value in ("limit", "alpha", "beta"))
    if name == INTERLEAVED:
        return "swiglu", SWIGLUOAI
    if name == "swiglustep":
        return name, SWIGLUSTEP
    if name == f"{INTERLEAVED}_uninterleave" and limit is not None:
        return "swiglu", (float(limit), 1.0 if alpha is None else float(alpha), 0.0 if beta is None else float(beta))
    if limit is not None:
        return ("swiglu", (float(limit), 1.0, 0.0)) if name == "silu" else (f"{name} with a limit", ())
    return name, ()


def _check_constants(layer: Any, prefix: str) -> None:
    """Raise UnsupportedModelError if config.json has other constants than vLLM's of gpt-oss's activation."""
    model = get_current_vllm_config().model_config
    if layer.activation.value != INTERLEAVED or model is None:
        return
    for key, served in zip(("swiglu_limit", "swiglu_alpha", "swiglu_beta"), SWIGLUOAI, strict=True):
        found = getattr(model.hf_text_config, key, served)
        if found != served:
            expected = f"{key} {served} in config.json, the only one with which vLLM serves this activation"
            raise UnsupportedModelError(prefix, expected, str(found), "Load the checkpoint with transformers.")


def expert_leaves(layer: Any) -> dict[str, dict[str, str]]:
    """Return vLLM's name of each matrix -> vLLM's name of each of its shards, in order -> the checkpoint's name."""
    first = {"w1": layer.ckpt_gate_proj_name, "w3": layer.ckpt_up_proj_name}
    if not layer.moe_config.is_act_and_mul:
        del first["w3"]
    return dict(zip(MATRICES, (first, {"w2": layer.ckpt_down_proj_name}), strict=True))


class ExpertTensor(CheckpointTensor):
    """Collects one tensor of all shards of a matrix; tensors of experts on other ranks are dropped.

    Args:
        shards: number of shards on this rank.
        dtype: of the tensor.
        experts: numbers of this rank's experts in the checkpoint.
    """

    def __new__(cls, shards: int, dtype: torch.dtype, experts: Sequence[int]) -> "ExpertTensor":
        """Make the parameter, one element per shard."""
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
        """Store a loaded tensor. vLLM calls this as a weight loader and knows the names of the arguments."""
        mine = expert_id in param.experts
        if mine:
            param.store((expert_id, shard_id), loaded_weight, 1)
        return mine if return_success else None


class LatqMoEMethod(FusedMoEMethodBase):
    """Weights and forward pass of the routed experts of one layer.

    Args:
        moe: vLLM's description of the layer.
        schemes: how the shards of each of MATRICES are stored, the same for all experts.
        prefix: vLLM's name of the layer.
        recipe: of the checkpoint; sets the outlier rate of dummy weights.
    """

    supports_pre_processed_weights = True
    DESCRIBED = ("parameters", "constants", "bits", "capacity")

    def __init__(self, moe: Any, schemes: Mapping[str, LayerScheme], prefix: str, recipe: Mapping[str, Any]) -> None:
        super().__init__(moe)
        self.schemes, self.prefix, self.recipe = schemes, prefix, recipe
        # Fixed by the first load, so that `reload_weights` can write into the same tensors.
        self.bits: dict[str, int | None] = {}
        self.capacity: dict[str, Any] = {}
        self.parameters: dict[str, tuple[str, ...]] = {}
        self.constants: ExpertConstants

    def maybe_roundup_sizes(
        self, hidden_size: int, intermediate_size_per_partition: int, act_dtype: Any, moe_parallel_config: Any
    ) -> tuple[int, int]:
        """Return the same sizes: vLLM's kernels do not run, so their padding is not needed."""
        return hidden_size, intermediate_size_per_partition

    def get_fused_moe_quant_config(self, layer: torch.nn.Module) -> None:
        """Return None: a configuration is for vLLM's kernels."""

    def create_weights(
        self,
        layer: Any,
        num_experts: int,
        hidden_size: int,
        intermediate_size_per_partition: int,
        params_dtype: torch.dtype,
        **extra_weight_attrs: Any,
    ) -> None:
        """Register a collecting parameter per stored tensor and matrix.

        Raises:
            UnsupportedModelError: see `_check_supported`.
            UnsupportedShapeError: a scale group would be cut.
        """
        self.scales_inputs = bool(layer.apply_router_weight_on_input)
        self._check_supported(layer)
        self.dtype, self.leaves = params_dtype, expert_leaves(layer)
        self.dummy = load_format() == "dummy"
        local = {n: int(layer._map_global_expert_id_to_local_expert_id(n)) for n in range(layer.global_num_experts)}
        self.experts = sorted((n for n in local if local[n] >= 0), key=local.__getitem__)
        if not self.experts:
            hint = "Use fewer processes, or serve without expert parallelism."
            expected = "at least one expert on every rank"
            found = f"{layer.global_num_experts} experts, none on this rank"
            raise UnsupportedModelError(self.prefix, expected, found, hint)
        channels = self.moe.intermediate_size
        self.shapes = {"w13": (channels, hidden_size), "w2": (hidden_size, channels)}
        if self.schemes["w2"].group_size is not None:
            where = f"{self.prefix}.*.{self.leaves['w2']['w2']}"
            check_groups(self.schemes["w2"].group_size, 0, intermediate_size_per_partition, where)
        self.suffixes: dict[str, tuple[str, ...]] = {}
        for matrix, shape in self.shapes.items():
            leaf = next(iter(self.leaves[matrix].values()))
            specs = tensor_specs(self.schemes[matrix], *shape, f"{self.prefix}.*.{leaf}")
            self.suffixes[matrix] = tuple(specs)
            shards = len(self.experts) * len(self.leaves[matrix])
            if self.moe.has_bias:
                layer.register_parameter(f"{matrix}_{BIAS}", ExpertTensor(shards, params_dtype, self.experts))
            for suffix, spec in specs.items():
                layer.register_parameter(f"{matrix}_{suffix}", ExpertTensor(shards, spec.dtype, self.experts))

    def process_weights_after_loading(self, layer: Any) -> None:
        """Turn the collected tensors into the operator's; raises CheckpointError if they are incomplete or invalid."""
        if adopt(layer, self):
            self.constants = ExpertConstants(*self.constants)
            complete_adopted(layer, [name for names in self.parameters.values() for name in names])
            return
        if self.moe.has_bias:
            for matrix in MATRICES:
                self._install_bias(layer, matrix)
        gate_up, down = (self._install(layer, matrix) for matrix in MATRICES)
        self.constants = expert_constants(gate_up, down, layer.global_num_experts, *expert_activation(layer))
        describe(layer, self, self.DESCRIBED)

    def dequantize_weight(self, layer: Any) -> tuple[torch.Tensor, torch.Tensor]:  # type: ignore[override]
        """Return w13 and w2 of this rank, [experts, rows, cols], dtype of the activations, from the collected tensors.

        Raises:
            CheckpointError: the tensors are incomplete or invalid.
            UnsupportedModelError: the experts have biases, which vLLM would lose.
        """
        if self.moe.has_bias:
            hint = "Serve the checkpoint as it is, without --quantization-config."
            raise UnsupportedModelError(self.prefix, "experts without biases to quantize again", "biases", hint)
        w13, w2 = (
            torch.stack([weight.dequantize(self.dtype) for weight in self._loaded_weights(layer, matrix)])
            for matrix in MATRICES
        )
        return w13, w2

    def apply(
        self,
        layer: Any,
        x: torch.Tensor,
        topk_weights: torch.Tensor,
        topk_ids: torch.Tensor,
        shared_experts: Any = None,
        shared_experts_input: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Map x [tokens, hidden] to this rank's share of the sum, [tokens, hidden]; vLLM runs shared experts."""
        ids = topk_ids
        if layer._expert_map is not None:
            ids = layer._expert_map[ids.to(torch.int64)].masked_fill(ids < 0, -1)
        if self.scales_inputs:  # each token has one expert then
            x, topk_weights = x * topk_weights.to(x.dtype), torch.ones_like(topk_weights)
        gate_up, down = ([getattr(layer, name) for name in self.parameters[matrix]] for matrix in MATRICES)
        biases = [getattr(layer, f"{matrix}_{BIAS}") for matrix in MATRICES] if self.moe.has_bias else []
        return run_experts(x, topk_weights, ids, gate_up, down, biases, self.constants)

    def _check_supported(self, layer: Any) -> None:
        """Raise UnsupportedModelError for an activation, a router or an adapter that the operator does not serve."""
        activation, _ = expert_activation(layer)
        _check_constants(layer, self.prefix)
        refused = {
            f"the activation {activation}": activation not in ACTIVATIONS,
            "several experts per token whose inputs the router scales": self.scales_inputs
            and self.moe.experts_per_token > 1,
        }
        if any(refused.values()):
            expected = f"experts that consist of linears, with an activation among {', '.join(ACTIVATIONS)}"
            found = ", ".join(name for name, present in refused.items() if present)
            raise UnsupportedModelError(self.prefix, expected, found, "Leave the experts of this model unquantized.")
        lora = get_current_vllm_config().lora_config
        targets = None if lora is None else getattr(lora, "target_modules", None)
        if lora is not None and (targets is None or {self.prefix, self.prefix.rpartition(".")[2]} & set(targets)):
            found = "LoRA for all modules" if targets is None else f"LoRA for {', '.join(targets)}"
            hint = "Serve without --enable-lora, or name only other modules with --lora-target-modules."
            raise UnsupportedModelError(self.prefix, "no LoRA adapters of quantized experts", found, hint)

    def _install(self, layer: Any, matrix: str) -> Operands:
        """Replace the collecting parameters of a matrix by the operator's."""
        made, capacity = [], self.capacity.get(matrix)
        for weight in self._loaded_weights(layer, matrix):
            made.append(make_operands(weight, self.dtype, self.prefix, capacity, alone=False))
            check_room(made, self.prefix, capacity)
            self.bits[matrix] = weight.bits
        operands = stack_operands(made, self.prefix, capacity)
        self.capacity[matrix] = operands.capacity
        tensors = operands.tensors()
        for suffix in self.suffixes[matrix]:
            delattr(layer, f"{matrix}_{suffix}")
        for name, tensor in tensors.items():
            parameter = None if tensor is None else Parameter(tensor, requires_grad=False)
            layer.register_parameter(f"{matrix}_{name}", parameter)
        self.parameters[matrix] = tuple(f"{matrix}_{name}" for name in tensors)
        return operands

    def _install_bias(self, layer: Any, matrix: str) -> None:
        """Replace the collecting parameter of a matrix's biases by this rank's: [experts, rows].

        The first of the ranks that share out channels adds the bias of w2, and the others add zeros.
        """
        name, (rows, _) = f"{matrix}_{BIAS}", self.shapes[matrix]
        collector = getattr(layer, name)
        arrived, channels = collected({name: collector}), slice(*self._owned_channels(layer))
        if not arrived and self.dummy:
            arrived = {(n, leaf): {name: torch.zeros(rows)} for n in self.experts for leaf in self.leaves[matrix]}
        whole = [[self._bias(matrix, n, leaf, arrived) for leaf in self.leaves[matrix]] for n in self.experts]
        if matrix == "w13":
            kept = torch.stack([torch.cat([bias[channels] for bias in biases]) for biases in whole])
        else:
            kept = torch.stack([bias for (bias,) in whole]) * float(channels.start == 0)
        delattr(layer, name)
        layer.register_parameter(name, Parameter(kept.to(collector.device, self.dtype), requires_grad=False))

    def _bias(
        self, matrix: str, expert: int, shard: str, shards: Mapping[ShardId, Mapping[str, torch.Tensor]]
    ) -> torch.Tensor:
        """Return the bias of one linear of an expert, [rows]; raises CheckpointError if it is missing or no bias."""
        name, (rows, _) = f"{self.prefix}.{expert}.{self.leaves[matrix][shard]}.{BIAS}", self.shapes[matrix]
        if (expert, shard) not in shards:
            raise CheckpointError(name, f"a bias of {rows} numbers", "no such tensor", MISSING)
        bias = shards[expert, shard][f"{matrix}_{BIAS}"]
        if bias.shape != (rows,) or not bias.isfinite().all():
            found = f"{bias.dtype} {tuple(bias.shape)}"
            raise CheckpointError(name, f"{rows} finite numbers", found, OTHER_MODEL)
        return bias

    def _loaded_weights(self, layer: Any, matrix: str) -> Iterator[Merged]:
        """Yield one matrix of each expert of this rank, on the layer's device."""
        collectors = {suffix: getattr(layer, f"{matrix}_{suffix}") for suffix in self.suffixes[matrix]}
        device, shards, channels = collectors[SHAPE].device, collected(collectors), self._owned_channels(layer)
        if shards or not self.dummy:
            weights = self._local_weights(matrix, shards, channels, device)
        else:
            weights = self._dummy_weights(matrix, channels)
        for weight in weights:
            yield weight.to(device)

    def _local_weights(
        self,
        matrix: str,
        shards: Mapping[ShardId, Mapping[str, torch.Tensor]],
        channels: tuple[int, int],
        device: torch.device,
    ) -> Iterator[Merged]:
        """Validate, merge and cut one matrix of each expert of this rank, in vLLM's order."""
        experts = [[self._read_shard(matrix, n, shard, shards) for shard in self.leaves[matrix]] for n in self.experts]
        integers = [decode(read, device) for read in experts]
        bits = self.bits.get(matrix) or inlier_bits(integers, device, self.dtype)
        rows, cols = self.shapes[matrix]
        for number, read, decoded in zip(self.experts, experts, integers, strict=True):
            whole = merge(read, decoded, device, bits)
            columns = channels if matrix == "w2" else (0, cols)
            kept = torch.arange(*((0, rows) if matrix == "w2" else channels), device="cpu")
            source = torch.cat([kept + rows * index for index in range(len(read))])
            yield cut(whole, source, columns, f"{self.prefix}.{number}")

    def _read_shard(
        self, matrix: str, expert: int, shard: str, shards: Mapping[ShardId, Mapping[str, torch.Tensor]]
    ) -> Shard:
        name = f"{self.prefix}.{expert}.{self.leaves[matrix][shard]}"
        if (expert, shard) not in shards:
            expected = f"tensors {', '.join(self.suffixes[matrix])}"
            raise CheckpointError(name, expected, "none of them in the checkpoint", MISSING)
        rows, cols = self.shapes[matrix]
        return name, read_shard(shards[expert, shard], self.schemes[matrix], cols, name, rows)

    def _dummy_weights(self, matrix: str, channels: tuple[int, int]) -> Iterator[Merged]:
        hidden, size = self.shapes["w2"][0], channels[1] - channels[0]
        rows, cols = (hidden, size) if matrix == "w2" else (len(self.leaves[matrix]) * size, hidden)
        weight = dummy_weight(self.schemes[matrix], rows, cols, self.recipe)
        return iter([weight] * len(self.experts))

    def _owned_channels(self, layer: Any) -> tuple[int, int]:
        """Return this rank's range of intermediate channels: vLLM's loader is run on a matrix of channel numbers."""
        found = set()
        for shard, dim in (*((shard, 0) for shard in self.leaves["w13"]), ("w2", 1)):
            # Channel numbers start at 1, because the loader leaves channels that it does not fill, or pads, at 0.
            numbers = torch.arange(1, self.moe.intermediate_size + 1, device="cpu").unsqueeze(1 - dim)
            width = self.moe.intermediate_size_per_partition * (1 if dim else len(self.leaves["w13"]))
            target = torch.zeros((1, 1, width) if dim else (1, width, 1), dtype=torch.int64, device="cpu")
            probe = Parameter(target, requires_grad=False)
            layer.weight_loader(probe, numbers, "w2_weight" if dim else "w13_weight", shard, self.experts[0])
            loaded = probe.data[probe.data > 0]
            found.add((int(loaded.min()) - 1, int(loaded.max())))
        ((low, high),) = found
        return low, high
