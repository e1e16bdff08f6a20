"""Every kind of layer of vLLM on 1, 2 and 4 ranks: the loaded shards equal those of an unquantized layer exactly.

No engine and no process group: rank and world size are patched, and an unquantized vLLM layer that loads the
dequantized matrices is the oracle.
"""

from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import vllm.model_executor.layers.linear as vllm_linear_layers
import vllm.model_executor.layers.mamba.mamba_mixer2 as vllm_mamba
import vllm.model_executor.layers.vocab_parallel_embedding as vllm_vocab
import vllm.model_executor.parameter as vllm_parameter
from transformers import FalconConfig, GPTNeoXConfig, Llama4TextConfig, LlamaConfig
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.model_executor.layers.linear import (
    ColumnParallelLinear,
    MergedColumnParallelLinear,
    QKVParallelLinear,
    ReplicatedLinear,
    RowParallelLinear,
)
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead
from vllm.model_executor.models.falcon import FalconModel
from vllm.model_executor.models.llama4 import Llama4ForCausalLM

from helpers.builders import random_weight
from helpers.engine_probe import OLD_VLLM
from helpers.trellis import TRELLIS
from helpers.weight_cache import through_weight_cache
from vllm_latq.errors import CheckpointError, UnsupportedShapeError
from vllm_latq.format.config import CheckpointConfig
from vllm_latq.format.scheme import LayerScheme
from vllm_latq.integrations.vllm.config import LatqConfig
from vllm_latq.integrations.vllm.row_order import stored_order
from vllm_latq.serving.layouts.checkpoint import CheckpointOperands
from vllm_latq.serving.layouts.dense import DenseOperands

HIDDEN = 256
VOCABULARY = 200  # vLLM pads it to 256, so that some rank owns padding
PACKED = LayerScheme("packed", 4, 64, True)
MODEL = LlamaConfig()
SCHEMES = {
    "packed4": PACKED,
    "packed3": LayerScheme("packed", 3, 32, True),
    "packed2-row": LayerScheme("packed", 2, -1, True, grid="midrise"),
    "packed8-plain": LayerScheme("packed", 8, 64, False),
    "huffman": LayerScheme("huffman"),
    "trellis": TRELLIS,
}
Shard = tuple[Any, int, int]  # shard id, rows and columns in the checkpoint


def quantization(scheme: LayerScheme, model: Any = MODEL) -> LatqConfig:
    config = LatqConfig(CheckpointConfig(scheme))
    config.packed_modules_mapping = {"qkv_proj": ["q_proj", "k_proj", "v_proj"], "gate_up": ["gate_proj", "up_proj"]}
    config.maybe_update_config("", model)
    return config


def _linear(cls: type, *sizes: Any, leaf: str = "x", **extra: Any) -> Callable[..., torch.nn.Module]:
    def build(quant: LatqConfig | None) -> torch.nn.Module:
        prefix = f"model.layers.0.{leaf}"
        return cls(*sizes, bias=False, quant_config=quant, prefix=prefix, params_dtype=torch.float32, **extra)

    return build


def _head(quant: LatqConfig | None) -> torch.nn.Module:
    return ParallelLMHead(VOCABULARY, HIDDEN, quant_config=quant, prefix="lm_head", params_dtype=torch.float32)


def _qkv(kv_heads: int, leaf: str = "qkv_proj") -> Callable[..., torch.nn.Module]:
    return _linear(QKVParallelLinear, HIDDEN, 32, 4, kv_heads, leaf=leaf)


def _mamba(quant: LatqConfig | None) -> torch.nn.Module:
    """Gate, x, B, C and dt in one matrix; every rank has the one group of B and C."""
    sizes = {"hidden_size": HIDDEN, "ssm_state_size": 16, "conv_kernel_size": 4, "intermediate_size": 256}
    options = {"use_conv_bias": True, "use_bias": False, "n_groups": 1, "num_heads": 8, "head_dim": 32}
    return vllm_mamba.MambaMixer2(**sizes, **options, quant_config=quant, prefix="model.layers.0.mixer").in_proj


# Kind -> layer and its checkpoint shards, in an order that is not the merged one.
KINDS: dict[str, tuple[Callable[..., torch.nn.Module], list[Shard]]] = {
    "replicated": (_linear(ReplicatedLinear, HIDDEN, 128), [(None, 128, HIDDEN)]),
    "column": (_linear(ColumnParallelLinear, HIDDEN, 128), [(None, 128, HIDDEN)]),
    "row": (_linear(RowParallelLinear, 512, 96), [(None, 96, 512)]),
    "gate_up": (
        _linear(MergedColumnParallelLinear, HIDDEN, [128, 128], leaf="gate_up"),
        [(1, 128, HIDDEN), (0, 128, HIDDEN)],
    ),
    "gate_up_stored_merged": (_linear(MergedColumnParallelLinear, HIDDEN, [128, 128]), [(None, 256, HIDDEN)]),
    "three_of_which_two_stored_merged": (
        _linear(MergedColumnParallelLinear, HIDDEN, [64, 64, 128]),
        [((0, 1), 128, HIDDEN), (2, 128, HIDDEN)],
    ),
    "gate_up_not_parallel": (
        _linear(MergedColumnParallelLinear, HIDDEN, [128, 128], disable_tp=True),
        [(0, 128, HIDDEN), (1, 128, HIDDEN)],
    ),
    "head": (_head, [(None, VOCABULARY, HIDDEN)]),
    "mamba": (_mamba, [(None, 2 * 256 + 2 * 16 + 8, HIDDEN)]),
}
for kv in (1, 2, 4):
    KINDS[f"qkv_{kv}"] = (_qkv(kv), [("v", 32 * kv, HIDDEN), ("q", 128, HIDDEN), ("k", 32 * kv, HIDDEN)])
    KINDS[f"qkv_{kv}_stored_merged"] = (_qkv(kv), [(None, 32 * (4 + 2 * kv), HIDDEN)])
    KINDS[f"query_key_value_{kv}"] = (_qkv(kv, "query_key_value"), [(None, 32 * (4 + 2 * kv), HIDDEN)])


@pytest.fixture
def rank_of(monkeypatch: pytest.MonkeyPatch) -> Callable[[int, int], None]:
    """Pretend to be one rank of a tensor-parallel group."""

    def pretend(rank: int, size: int) -> None:
        for module in (vllm_linear_layers, vllm_mamba, vllm_parameter, vllm_vocab):
            monkeypatch.setattr(module, "get_tensor_model_parallel_rank", lambda: rank)
            monkeypatch.setattr(module, "get_tensor_model_parallel_world_size", lambda: size)

    return pretend


def build(kind: str, quant: LatqConfig | None) -> torch.nn.Module:
    with set_current_vllm_config(VllmConfig()):
        return KINDS[kind][0](quant)


def load(layer: torch.nn.Module, shard_id: Any, tensors: dict[str, torch.Tensor]) -> None:
    arguments = () if shard_id is None else (shard_id,)
    for suffix, tensor in reversed(tensors.items()):
        parameter = getattr(layer, suffix)
        parameter.weight_loader(parameter, tensor, *arguments)


def dense(layer: torch.nn.Module) -> torch.Tensor:
    method = layer.quant_method
    if method.layout == DenseOperands.layout:
        return layer.qweight
    tensors = [getattr(layer, name) for name in CheckpointOperands.TENSORS]
    return CheckpointOperands.from_lists(tensors, method.constants).dense()


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize("kind", [kind for kind in KINDS if "query_key_value" not in kind])
def test_every_rank_gets_its_shard(kind: str, size: int, scheme: str, rank_of: Callable[[int, int], None]) -> None:
    check_ranks(kind, size, SCHEMES[scheme], rank_of, {"rtol": 0, "atol": 0})


def check_ranks(
    kind: str,
    size: int,
    scheme: LayerScheme,
    rank_of: Callable[[int, int], None],
    tolerance: dict[str, float],
    model: Any = MODEL,
    arrange: Callable[[Any, torch.Tensor], torch.Tensor] = lambda shard_id, weight: weight,
) -> None:
    """Load a layer on each rank beside an unquantized one: equal weights, and products within the tolerance.

    `arrange` is what the model of vLLM does to the weight of a shard before it gives it to the unquantized one.
    """
    for rank in range(size):
        rank_of(rank, size)
        layer, oracle = build(kind, quantization(scheme, model)), build(kind, None)
        for seed, (shard_id, rows, cols) in enumerate(KINDS[kind][1]):
            weight = random_weight(scheme, rows, cols, seed)
            load(layer, shard_id, weight.to_tensors())
            load(oracle, shard_id, {"weight": arrange(shard_id, weight.dequantize())})
        layer.quant_method.process_weights_after_loading(layer)
        assert kind == "head" or not hasattr(layer, "weight")
        torch.testing.assert_close(dense(layer), oracle.weight.data, rtol=0, atol=0)
        x = torch.randn(3, layer.quant_method.cols, generator=torch.Generator().manual_seed(0))
        expected = torch.nn.functional.linear(x, oracle.weight.data)
        torch.testing.assert_close(layer.quant_method.apply(layer, x), expected, **tolerance)


@pytest.mark.parametrize("size", [1, 2, 4])
def test_rotary_rows_of_llama4(size: int, rank_of: Callable[[int, int], None]) -> None:
    """vLLM rotates the halves of a head; the checkpoint has the two rows of a pair side by side."""
    model = Llama4TextConfig(num_attention_heads=4, num_key_value_heads=2, head_dim=32)

    def arrange(shard_id: Any, weight: torch.Tensor) -> torch.Tensor:
        name = f"model.layers.0.self_attn.{shard_id}_proj.weight"
        return Llama4ForCausalLM.permute_qk_weight_for_rotary(SimpleNamespace(config=model), name, weight)[1]

    rows = torch.arange(64.0).unsqueeze(1)
    assert not torch.equal(arrange("k", rows), rows)
    check_ranks("qkv_2", size, PACKED, rank_of, {"rtol": 0, "atol": 0}, model, arrange)


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("kv_heads", [1, 2, 4])
def test_interleaved_heads_of_falcon(kv_heads: int, size: int, rank_of: Callable[[int, int], None]) -> None:
    """Falcon stores the queries of each key head, followed by its key and value."""
    options = {"new_decoder_architecture": kv_heads == 2, "multi_query": kv_heads == 1, "num_kv_heads": kv_heads}
    model = FalconConfig(num_attention_heads=4, **options)

    def arrange(_: Any, weight: torch.Tensor) -> torch.Tensor:
        parameter = torch.nn.Parameter(torch.empty_like(weight), requires_grad=False)
        parameter.output_dim = 0
        own = torch.nn.Module()
        own.config, own.query_key_value = model, parameter
        FalconModel.load_weights(own, [("query_key_value", weight)])
        return parameter.data

    assert kv_heads < 4 or torch.equal(
        stored_order(GPTNeoXConfig(num_attention_heads=4), "0.attention.query_key_value", 384),
        stored_order(model, "0.query_key_value", 384),
    ), "GPT-NeoX stores them as a Falcon without shared heads does"
    check_ranks(f"query_key_value_{kv_heads}", size, PACKED, rank_of, {"rtol": 0, "atol": 0}, model, arrange)


def _load_all(layer: torch.nn.Module, kind: str, scheme: LayerScheme, skip: Sequence[tuple[Any, str]] = ()) -> None:
    for seed, (shard_id, rows, cols) in enumerate(KINDS[kind][1]):
        tensors = random_weight(scheme, rows, cols, seed).to_tensors()
        load(layer, shard_id, {name: tensor for name, tensor in tensors.items() if (shard_id, name) not in skip})


def test_huffman_shards_share_one_width(rank_of: Callable[[int, int], None]) -> None:
    rank_of(0, 1)
    layer = build("qkv_2", quantization(SCHEMES["huffman"]))
    _load_all(layer, "qkv_2", SCHEMES["huffman"])
    layer.quant_method.process_weights_after_loading(layer)
    assert layer.quant_method.bits in (2, 3, 4, 8)
    assert layer.row_scales.unique().numel() == 3  # q, k and v each keep their own scale
    assert layer.scales is None


@pytest.mark.parametrize("suffix", ["qweight", "scales", "outlier_values", "outlier_row_ptr", "weight_shape"])
def test_error_names_the_missing_tensor_of_a_linear(suffix: str, rank_of: Callable[[int, int], None]) -> None:
    rank_of(0, 1)
    layer = build("qkv_2", quantization(PACKED))
    _load_all(layer, "qkv_2", PACKED, skip=[("k", suffix)])
    with pytest.raises(CheckpointError, match=rf"layers\.0\.k_proj\.{suffix}: .*found no such tensor"):
        layer.quant_method.process_weights_after_loading(layer)


def test_error_names_the_missing_shard(rank_of: Callable[[int, int], None]) -> None:
    rank_of(1, 2)
    layer = build("gate_up", quantization(PACKED))
    load(layer, 0, random_weight(PACKED, 128, HIDDEN, 0).to_tensors())
    with pytest.raises(CheckpointError, match=r"layers\.0\.up_proj: expected tensors weight_shape, qweight"):
        layer.quant_method.process_weights_after_loading(layer)


@pytest.mark.parametrize("kind", ["column", "head"])
def test_error_names_the_layer_without_tensors(kind: str, rank_of: Callable[[int, int], None]) -> None:
    rank_of(0, 1)
    layer = build(kind, quantization(PACKED))
    with pytest.raises(CheckpointError, match="none of them in the checkpoint"):
        layer.quant_method.process_weights_after_loading(layer)


@pytest.mark.parametrize("kind", ["gate_up", "row"])
def test_dequantized_trellis_of_a_rank(kind: str, rank_of: Callable[[int, int], None]) -> None:
    """vLLM's own quantization gets this rank's rows or columns. Dummy weights have the same shape."""
    rank_of(1, 2)
    layer = build(kind, quantization(TRELLIS))
    _load_all(layer, kind, TRELLIS)
    whole = [
        random_weight(TRELLIS, rows, cols, seed).dequantize() for seed, (_, rows, cols) in enumerate(KINDS[kind][1])
    ]
    expected = whole[0][:, 256:] if kind == "row" else torch.cat([weight[64:] for weight in reversed(whole)])
    got = layer.quant_method.dequantize_weight(layer)
    assert torch.equal(got, expected)
    dummy = build(kind, quantization(TRELLIS))
    dummy.quant_method.dummy = True
    dummy.quant_method.process_weights_after_loading(dummy)
    assert dense(dummy).shape == expected.shape


@pytest.mark.parametrize(
    ("suffix", "value", "message"),
    [
        ("rates", 13, "expected rates"),
        ("kept_positions", -1, "expected positions"),
        ("trellis", None, "no such tensor"),
    ],
)
def test_damaged_trellis_of_a_linear_is_refused(
    suffix: str, value: int | None, message: str, rank_of: Callable[[int, int], None]
) -> None:
    rank_of(0, 2)
    layer = build("row", quantization(TRELLIS))
    tensors = random_weight(TRELLIS, 96, 512, 0).to_tensors()
    if value is None:
        del tensors[suffix]
    else:
        tensors[suffix].view(-1)[0] = value
    load(layer, None, tensors)
    with pytest.raises(CheckpointError, match=rf"layers\.0\.x\.{suffix}: .*{message}"):
        layer.quant_method.process_weights_after_loading(layer)


def test_damaged_tensor_of_a_linear_is_refused(rank_of: Callable[[int, int], None]) -> None:
    rank_of(0, 1)
    layer = build("column", quantization(PACKED))
    tensors = random_weight(PACKED, 128, HIDDEN, 0).to_tensors()
    tensors["outlier_col_idx"][0] = HIDDEN
    load(layer, None, tensors)
    with pytest.raises(CheckpointError, match=r"layers\.0\.x\.outlier_col_idx: expected columns in"):
        layer.quant_method.process_weights_after_loading(layer)


@pytest.mark.parametrize(
    ("kind", "rows", "cols", "size"),
    [
        *(("column", 128, 2 * HIDDEN, 1), ("head", VOCABULARY + 1, HIDDEN, 1), ("column", 64, HIDDEN, 1)),
        *(("column", 136, HIDDEN, 1), ("column", 136, HIDDEN, 2), ("mamba", 600, HIDDEN, 2)),
        *(("row", 1, 512, 2), ("row", 97, 512, 2)),
    ],
)
def test_linears_of_another_model_are_refused(
    kind: str, rows: int, cols: int, size: int, rank_of: Callable[[int, int], None]
) -> None:
    rank_of(0, size)
    layer = build(kind, quantization(PACKED))
    load(layer, None, random_weight(PACKED, rows, cols, 0).to_tensors())
    with pytest.raises(CheckpointError, match="of different models"):
        layer.quant_method.process_weights_after_loading(layer)


def test_cutting_a_group_of_a_linear_is_refused(rank_of: Callable[[int, int], None]) -> None:
    rank_of(0, 4)
    with pytest.raises(UnsupportedShapeError, match=r"layers\.0\.x: expected input channels per rank in whole groups"):
        build("row", quantization(LayerScheme("packed", 4, 256, True)))


@pytest.mark.skipif(OLD_VLLM, reason="vLLM 0.25 has no weight cache")
@pytest.mark.parametrize("scheme", [PACKED, SCHEMES["huffman"], TRELLIS], ids=["packed", "huffman", "trellis"])
@pytest.mark.parametrize("kind", ["gate_up", "head"])
def test_layer_from_the_weight_cache(kind: str, scheme: LayerScheme, rank_of: Callable[[int, int], None]) -> None:
    rank_of(0, 1)
    layer = build(kind, quantization(scheme))
    _load_all(layer, kind, scheme)
    layer.quant_method.process_weights_after_loading(layer)
    with torch.device("meta"):
        cached = build(kind, quantization(scheme))
    through_weight_cache(layer, cached)
    assert not [name for name, parameter in cached.named_parameters() if parameter.is_meta]
    x = torch.randn(3, HIDDEN)
    torch.testing.assert_close(cached.quant_method.apply(cached, x), layer.quant_method.apply(layer, x), rtol=0, atol=0)


def test_requantized_layer_has_the_shape_of_its_weight(rank_of: Callable[[int, int], None]) -> None:
    """vLLM's own method asks for the shape before it loads, and then quantizes the result of `dequantize_weight`."""
    rank_of(0, 1)
    layer, kind = build("gate_up", None), "gate_up"
    for name in list(layer._parameters):
        delattr(layer, name)
    with set_current_vllm_config(VllmConfig()):
        source = quantization(PACKED).get_quant_method(layer, "model.layers.0.gate_up")
        source.create_weights(layer, HIDDEN, [128, 128], HIDDEN, 256, torch.float32)
    _load_all(layer, kind, PACKED)
    weight = source.dequantize_weight(layer)
    assert weight.shape == layer.weight.shape == (256, HIDDEN)
    expected = [random_weight(PACKED, 128, HIDDEN, seed).dequantize() for seed in (1, 0)]
    torch.testing.assert_close(weight, torch.cat(expected), rtol=0, atol=0)


def test_bias_is_added_once(rank_of: Callable[[int, int], None]) -> None:
    rank_of(0, 1)
    layer = build("column", quantization(PACKED))
    _load_all(layer, "column", PACKED)
    layer.quant_method.process_weights_after_loading(layer)
    x, bias = torch.randn(2, HIDDEN), torch.randn(128)
    method = layer.quant_method
    torch.testing.assert_close(method.apply(layer, x, bias), method.apply(layer, x) + bias, rtol=0, atol=0)
