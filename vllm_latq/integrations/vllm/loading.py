"""Checks around vLLM's loading: a tensor reaches every parameter once, and a reload happens as a whole or not at all.

vLLM itself serves a quantized model with parameters that no tensor reached. A failed `reload_weights` leaves the model
with some layers of the new weights and some of the old ones, and with state that spoils the next reload.

    initialize_model --> CheckedLoad, as the model's `load_weights`: each tensor once, every parameter reached
    process_weights_after_loading --> a line about the model in the log
    Worker.reload_weights --> Backup: if the reload fails on any rank, all ranks have the old weights again

Invariant: after a load, or a reload, the model has all weights of one checkpoint, or an error has named the problem.
"""

import functools
import logging
import math
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from vllm.distributed import get_pp_group, get_tp_group
from vllm.logger import init_logger
from vllm.model_executor.layers.linear import LinearBase
from vllm.model_executor.model_loader import base_loader
from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info

from vllm_latq.errors import REPAIR, CheckpointError, ConfigError
from vllm_latq.integrations.vllm.config import LatqConfig
from vllm_latq.integrations.vllm.linear import CheckpointTensor, LatqLinearMethod
from vllm_latq.integrations.vllm.moe import INTERLEAVED, LatqMoEMethod
from vllm_latq.integrations.vllm.summary import summary

logger = logging.getLogger(__name__)

# Attributes of vLLM's ModelConfig that say where weights are; `reload_weights` sets them before it reads any.
SOURCE = ("model", "model_weights", "revision")
# Scales that an attention layer may have, and no checkpoint has: vLLM then takes the scale of keys, and 1.
OPTIONAL = (".q_scale", ".prob_scale")
# Every attention layer has the whole KV cache as an attribute; it is no weight.
NO_WEIGHTS = ("kv_cache",)


@functools.cache
def install() -> None:
    """Check every model of a quantized checkpoint that vLLM makes from now on."""
    initialize = base_loader.initialize_model

    @functools.wraps(initialize)
    def initialize_model(*, vllm_config: Any, **options: Any) -> Any:
        model: Any = initialize(vllm_config=vllm_config, **options)
        described = options.get("model_config") or vllm_config.model_config
        if not isinstance(vllm_config.quant_config, LatqConfig):
            return model
        drafts, quantized = described.runner_type == "draft", vllm_config.quant_config
        speculation = vllm_config.speculative_config
        if drafts and speculation and described.model == speculation.target_model_config.model:
            # Layers that predict further tokens get the embedding of the model whose checkpoint they are in.
            quantized.install_heads(model)
            model.load_weights = functools.partial(_load_others, model.load_weights, quantized.embeddings)
            _check_shares(vllm_config, quantized.embeddings)
        elif described is vllm_config.model_config:  # otherwise a draft such as EAGLE's, with a checkpoint of its own
            quantized.install_heads(model)
            quantized.install_embeddings(model)
        # A draft changes no answer, and may get its embedding and head from the model that it drafts for.
        if not drafts:
            _install_reload()
            model.load_weights = CheckedLoad(model)
        return model

    finish = base_loader.process_weights_after_loading

    @functools.wraps(finish)
    def process_weights_after_loading(model: Any, model_config: Any, *args: Any, **options: Any) -> None:
        finish(model, model_config, *args, **options)
        if isinstance(getattr(model, "load_weights", None), CheckedLoad):
            _log(summary(model, model_config))

    base_loader.initialize_model = initialize_model
    base_loader.process_weights_after_loading = process_weights_after_loading


@functools.cache
def _install_reload() -> None:
    # Importing this takes seconds, and only a process that has made a model has done so already.
    from vllm.v1.worker import gpu_worker

    worker_class: Any = gpu_worker.Worker
    reload_weights = worker_class.reload_weights

    @functools.wraps(reload_weights)
    def reload_or_restore(worker: Any, *args: Any, **kwargs: Any) -> None:
        model = worker.model_runner.get_model()
        load = getattr(model, "load_weights", None)
        if not isinstance(load, CheckedLoad):
            return reload_weights(worker, *args, **kwargs)
        backup, failure = None, None
        load.is_whole_reload = True
        try:
            backup = Backup(model, worker.vllm_config.model_config)
            reload_weights(worker, *args, **kwargs)
        except Exception as error:
            failure = error
        finally:
            load.is_whole_reload = False
        if not _any_rank(failure is not None):
            return None
        if backup is not None:
            backup.restore()
        logger.error("reload_weights failed; the weights from before it are served")
        expected, found = "weights that every rank can load", "an error of another rank"
        raise failure or CheckpointError("reload_weights", expected, found, "The log of that rank names the problem.")

    worker_class.reload_weights = reload_or_restore


def _log(line: str) -> None:
    """Log a line about the weights of the first rank, on the first rank."""
    ranks = get_tp_group(), get_pp_group()
    if line and all(rank.is_first_rank for rank in ranks):
        size = math.prod(rank.world_size for rank in ranks)
        # Only loggers below `vllm` print at this level.
        init_logger("vllm.latq").info("latq quantization: %s%s", line, f" (rank 0 of {size})" if size > 1 else "")


def _any_rank(failed: bool) -> bool:
    """Return whether the reload failed on any rank that has a part of the same model."""
    flag = torch.tensor(int(failed), dtype=torch.int32, device="cpu")
    for group in (get_tp_group(), get_pp_group()):
        if group.world_size > 1:
            torch.distributed.all_reduce(flag, torch.distributed.ReduceOp.MAX, group=group.cpu_group)
    return bool(flag)


class CheckedLoad:
    """The `load_weights` of a model, with checks.

    Layers check the parameters that collect their quantized tensors, except those of a layer that a reload leaves out.

    Args:
        model: just made, nothing loaded.

    Attributes:
        is_whole_reload: whether the next call reloads all weights. Without it, a call after the first load may bring
            any part of the weights, as vLLM's weight transfer does.
    """

    def __init__(self, model: Any) -> None:
        self.model, self.load, self.is_whole_reload = model, model.load_weights, False
        # vLLM's own quantization makes parameters on the meta device. A tied head has no parameter of its own here.
        self.names = {
            name
            for name, parameter in model.named_parameters()
            if not isinstance(parameter, CheckpointTensor) and not parameter.is_meta
            if not name.endswith(OPTIONAL)
        }
        linears = (f"{name}." for name, module in model.named_modules() if isinstance(module, LinearBase))
        self.linears = tuple(linears)

    def __call__(self, weights: Iterable[tuple[str, torch.Tensor]], *args: Any, **kwargs: Any) -> Any:
        """Load weights; raises CheckpointError for a tensor that comes twice and parameters that no tensor reached."""
        # With LoRA, a layer is the base layer of another one.
        parameters = {name.replace(".base_layer.", "."): found for name, found in self.model.named_parameters()}
        collectors = [found for found in parameters.values() if isinstance(found, CheckpointTensor)]
        is_first = bool(collectors) and not any(found.is_meta for found in collectors)
        with _Writes() as writes:
            loaded = self.load(_without_experts(self.model, _each_once(weights)), *args, **kwargs)
        if is_first or self.is_whole_reload:
            self._check_reached(parameters, writes, set(loaded or ()))
        return loaded

    def _check_reached(self, parameters: dict[str, Any], writes: "_Writes", loaded: set[str]) -> None:
        found = {name: writes.to(parameters[name]) for name in parameters if name in self.names}
        # Some loaders replace the data of a parameter, but report its name.
        missing = sorted(name for name in found if not found[name] and name not in loaded)
        if self.is_whole_reload:
            # vLLM leaves a layer that gets no tensor at all as it was.
            collectors = {name: value for name, value in parameters.items() if isinstance(value, CheckpointTensor)}
            missing += sorted(name for name in collectors if not writes.to(collectors[name]))
        if missing:
            more = f", and none for {', '.join(missing[1:])}" if missing[1:] else ""
            raise CheckpointError(missing[0], "a tensor in the checkpoint", f"none{more}", REPAIR)
        for name in sorted(found):
            size = parameters[name].numel()
            # Other layers have padding that no tensor fills.
            if name.startswith(self.linears) and 0 < found[name] < size:
                elements = f"tensors of {found[name]} elements in all"
                raise CheckpointError(name, f"tensors for all of its {size} elements", elements, REPAIR)


def _load_others(
    load: Callable[..., Any], left_out: Collection[str], weights: Iterable[tuple[str, torch.Tensor]], **options: Any
) -> Any:
    """Load the tensors of all modules but some."""
    return load(((name, tensor) for name, tensor in weights if name.rpartition(".")[0] not in left_out), **options)


def _check_shares(vllm_config: Any, embeddings: Collection[str]) -> None:
    """Raise ConfigError if layers that predict further tokens cannot get the quantized embedding of their model."""
    if embeddings and (stages := vllm_config.parallel_config.pipeline_parallel_size) > 1:
        hint = "Use tensor parallelism, or leave out the speculative decoding."
        expected = "1, where layers of a checkpoint with a quantized embedding predict further tokens"
        raise ConfigError("--pipeline-parallel-size", expected, str(stages), hint)


def _each_once(weights: Iterable[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
    seen = set()
    for name, tensor in weights:
        if name in seen:
            raise CheckpointError(name, "one tensor of this name", "another one in the same checkpoint", REPAIR)
        seen.add(name)
        yield name, tensor


def _without_experts(
    model: torch.nn.Module, weights: Iterable[tuple[str, torch.Tensor]]
) -> Iterator[tuple[str, torch.Tensor]]:
    """Load experts whose model only loads them fused, as vLLM's gpt-oss does; yield all other tensors.

    The model's own loader drops tensors of single experts without a word.
    """
    layers: list[Any] = list(model.modules())
    fused = {
        layer.quant_method.prefix: layer
        for layer in layers
        if isinstance(getattr(layer, "quant_method", None), LatqMoEMethod) and layer.activation.value == INTERLEAVED
    }
    for name, tensor in weights:
        layer = next((layer for prefix, layer in fused.items() if name.startswith(f"{prefix}.")), None)
        if layer is None:
            yield name, tensor
            continue
        for _ in layer.load_weights([(name.removeprefix(f"{layer.quant_method.prefix}."), tensor)]):
            pass


class _Writes(TorchDispatchMode):
    """Counts the elements that operations write, by the storage that they write to."""

    def __init__(self) -> None:
        super().__init__()
        self.elements: Counter[int] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operation, and count what it writes to its first argument."""
        result = func(*args, **(kwargs or {}))
        if func._schema.is_mutable and args and isinstance(args[0], torch.Tensor):
            self.elements[args[0].untyped_storage()._cdata] += args[0].numel()
        return result

    def to(self, tensor: torch.Tensor) -> int:
        """Return the number of elements written to a tensor's storage."""
        return self.elements[tensor.untyped_storage()._cdata]


class Backup:
    """All weights of a model, copied to the CPU, and what a reload changes besides them.

    Args:
        model: not being loaded.
        model_config: vLLM's, which says where weights are.
    """

    def __init__(self, model: torch.nn.Module, model_config: Any) -> None:
        self.model, self.model_config = model, model_config
        self.source = {name: getattr(model_config, name) for name in SOURCE if hasattr(model_config, name)}
        self.attributes: list[tuple[Any, dict[str, Any]]] = []
        tensors: dict[int, torch.Tensor] = {}
        for module in model.modules():
            # Latent attention keeps tensors made of weights as plain attributes.
            own = {name: value for name, value in vars(module).items() if isinstance(value, torch.Tensor)}
            for name in NO_WEIGHTS:
                own.pop(name, None)
            containers = ("_parameters", "_buffers", "_non_persistent_buffers_set")
            self.attributes.append((module, own | {name: vars(module)[name].copy() for name in containers}))
            method = getattr(module, "quant_method", None)
            if isinstance(method, LatqLinearMethod | LatqMoEMethod):
                copied = {name: value.copy() if type(value) is dict else value for name, value in vars(method).items()}
                self.attributes.append((method, copied))
            kept = (*own.values(), *module._parameters.values(), *module._buffers.values())
            tensors |= {id(tensor): tensor for tensor in kept if tensor is not None and not tensor.is_meta}
        self.tensors = [(tensor, tensor.detach().to("cpu", copy=True)) for tensor in tensors.values()]

    def restore(self) -> None:
        """Give the model everything back, in the same memory, and end the reload that vLLM believes to be running."""
        for module in self.model.modules():
            for parameter in module.parameters(recurse=False):
                if isinstance(parameter, CheckpointTensor):
                    parameter.arrived.clear()
            get_layerwise_info(module).reset()
        for owner, attributes in self.attributes:
            vars(owner).update(attributes)
        with torch.inference_mode():  # in which vLLM makes some of the tensors
            for tensor, copy in self.tensors:
                tensor.copy_(copy)
        vars(self.model_config).update(self.source)
