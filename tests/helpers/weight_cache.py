"""Give a layer the tensors that another one has made, as vLLM's weight cache does between processes."""

from typing import Any

from torch import nn


def through_weight_cache(processed: nn.Module, made: nn.Module) -> None:
    """Move the tensors of a processed layer to one that was made on the meta device, and process it."""
    from vllm.config.load import LoadConfig
    from vllm.model_executor.model_loader.weight_cache.daemon import export_entries
    from vllm.model_executor.model_loader.weight_cache.ipc_loader import IpcModelLoader
    from vllm.model_executor.model_loader.weight_cache.protocol import WeightCacheState, check_ipc_quant_support
    from vllm.model_executor.utils import weights_already_processed

    method: Any = made.quant_method
    check_ipc_quant_support(made)
    entries, aliases = export_entries(processed)
    IpcModelLoader(LoadConfig(load_format="ipc_cache"))._apply_entries(made, WeightCacheState(entries, aliases, {}), 0)
    with weights_already_processed():
        method.process_weights_after_loading(made)
