"""The checks of a model's `load_weights`, on layers of vLLM without an engine.

`test_plugin_engine.py` tests them, and reloads that fail, with real engines.
"""

from collections.abc import Iterable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import vllm.model_executor.layers.linear as vllm_linear_layers
import vllm.model_executor.parameter as vllm_parameter
from torch import nn
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.model_executor.layers.linear import MergedColumnParallelLinear, ReplicatedLinear
from vllm.model_executor.model_loader.weight_utils import default_weight_loader

from helpers.builders import random_weight
from vllm_latq.errors import CheckpointError, ConfigError
from vllm_latq.format.config import CheckpointConfig
from vllm_latq.format.scheme import LayerScheme
from vllm_latq.integrations.vllm.config import LatqConfig
from vllm_latq.integrations.vllm.loading import CheckedLoad, _check_shares

SIZE = 64
SCHEME = LayerScheme("packed", 4, 32, False)
Stored = dict[str, torch.Tensor]


class Model(nn.Module):
    """A quantized linear, two unquantized ones that vLLM merges, a norm, an embedding and its tied head."""

    def __init__(self) -> None:
        super().__init__()
        quant = LatqConfig(CheckpointConfig(SCHEME, ignore=("gate", "up")))
        quant.packed_modules_mapping = {"gate_up": ["gate", "up"]}
        self.down = ReplicatedLinear(SIZE, SIZE, bias=False, quant_config=quant, prefix="down")
        self.gate_up = MergedColumnParallelLinear(SIZE, [SIZE, SIZE], bias=True, quant_config=quant, prefix="gate_up")
        self.norm = nn.LayerNorm(SIZE)
        self.embedding, self.head = nn.Embedding(SIZE, SIZE), nn.Linear(SIZE, SIZE, bias=False)
        self.head.weight = self.embedding.weight

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        parameters: dict[str, Any] = dict(self.named_parameters())
        for name, tensor in weights:
            layer, leaf = name.split(".")
            shard = {"gate": 0, "up": 1}.get(layer)
            parameter = parameters[name if shard is None else f"gate_up.{leaf}"]
            loader = getattr(parameter, "weight_loader", default_weight_loader)
            loader(parameter, tensor, *(() if shard is None else (shard,)))


@pytest.fixture
def model(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    for module in (vllm_linear_layers, vllm_parameter):
        monkeypatch.setattr(module, "get_tensor_model_parallel_rank", lambda: 0)
        monkeypatch.setattr(module, "get_tensor_model_parallel_world_size", lambda: 1)
    with set_current_vllm_config(VllmConfig()), torch.no_grad():
        yield Model()


@pytest.fixture
def stored() -> Stored:
    names = [f"{layer}.{leaf}" for layer in ("gate", "up", "norm") for leaf in ("weight", "bias")]
    tensors = {name: torch.randn(SIZE, SIZE) for name in (*names, "embedding.weight")}
    tensors |= {name: tensor[0] for name, tensor in tensors.items() if name.endswith("bias") or "norm" in name}
    packed = random_weight(SCHEME, SIZE, SIZE, 0).to_tensors()
    return tensors | {f"down.{suffix}": tensor for suffix, tensor in packed.items()}


def test_complete_checkpoint_is_loaded(model: Model, stored: Stored) -> None:
    CheckedLoad(model)(stored.items())
    assert torch.equal(model.norm.bias, stored["norm.bias"])
    assert torch.equal(model.head.weight, stored["embedding.weight"])


@pytest.mark.parametrize(
    ("lost", "message"),
    [
        ("norm.bias", "norm.bias: expected a tensor in the checkpoint, found none"),
        ("embedding.weight", "embedding.weight: expected a tensor in the checkpoint, found none"),
        ("up.weight", "gate_up.weight: expected tensors for all of its 8192 elements, found tensors of 4096 elements"),
        ("gate.bias", "gate_up.bias: expected tensors for all of its 128 elements, found tensors of 64 elements"),
    ],
)
def test_lost_tensor_is_named(lost: str, message: str, model: Model, stored: Stored) -> None:
    del stored[lost]
    with pytest.raises(CheckpointError, match=message):
        CheckedLoad(model)(stored.items())


def test_reload_without_a_quantized_layer_is_refused(model: Model, stored: Stored) -> None:
    load = CheckedLoad(model)
    load.is_whole_reload = True
    kept = {name: tensor for name, tensor in stored.items() if "down" not in name}
    with pytest.raises(
        CheckpointError, match=r"down\.qweight: .*found none, and none for down\.scales, down\.weight_sha"
    ):
        load(kept.items())


def test_tensor_that_comes_twice_is_refused(model: Model, stored: Stored) -> None:
    twice = [*stored.items(), ("norm.weight", stored["norm.weight"])]
    with pytest.raises(CheckpointError, match=r"norm\.weight: expected one tensor of this name, found another one"):
        CheckedLoad(model)(twice)


def test_update_may_bring_some_of_the_tensors_and_a_reload_may_not(model: Model, stored: Stored) -> None:
    load = CheckedLoad(model)
    load(stored.items())
    model.down.quant_method.process_weights_after_loading(model.down)
    load([("norm.bias", torch.ones(SIZE))])
    assert torch.equal(model.norm.bias, torch.ones(SIZE))
    load.is_whole_reload = True
    with pytest.raises(CheckpointError, match=r"embedding\.weight: .*found none, and none for gate_up\.bias"):
        load([("norm.bias", torch.ones(SIZE))])


def test_pipelines_that_cannot_share_a_quantized_embedding_are_refused() -> None:
    """The layers that predict further tokens are on the last rank, the embedding on the first one."""
    two = SimpleNamespace(parallel_config=SimpleNamespace(pipeline_parallel_size=2))
    _check_shares(two, set())
    with pytest.raises(ConfigError, match="--pipeline-parallel-size: expected 1"):
        _check_shares(two, {"model.embed_tokens"})
