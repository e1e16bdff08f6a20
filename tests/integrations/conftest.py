"""Fixtures of the tests of the plugin."""

from collections.abc import Callable

import pytest
import vllm.model_executor.layers.fused_moe.config as moe_config
import vllm.model_executor.parameter as vllm_parameter


@pytest.fixture
def rank_of(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    def pretend(rank: int) -> None:
        for module in (moe_config, vllm_parameter):
            monkeypatch.setattr(module, "get_tensor_model_parallel_rank", lambda: rank)
        # Asked for by every parameter of vLLM; experts ask the layer's own configuration instead.
        monkeypatch.setattr(vllm_parameter, "get_tensor_model_parallel_world_size", lambda: 1)

    return pretend
