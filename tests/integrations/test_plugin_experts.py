"""vLLM's routed experts, tensor and expert parallel: the loaded weights equal those of an unquantized layer exactly.

No engine and no process group: rank and world size are patched, and an unquantized vLLM layer that loads the
dequantized matrices by the same names is the oracle.
"""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import vllm.model_executor.layers.fused_moe.config as moe_config
from torch.nn import functional
from vllm.model_executor.layers.fused_moe import UnquantizedFusedMoEMethod

from helpers.engine_probe import OLD_VLLM
from helpers.expert_layers import (
    BIASED,
    EXPERTS,
    HIDDEN,
    HUFFMAN,
    INTERMEDIATE,
    LEAVES,
    PACKED,
    PREFIX,
    TOP_K,
    build,
    checkpoint,
    load,
    quantization,
)
from helpers.trellis import TRELLIS
from helpers.weight_cache import through_weight_cache
from vllm_latq.coding.huffman.encoder import encode
from vllm_latq.console import size as printed
from vllm_latq.errors import CheckpointError
from vllm_latq.format.encodings.huffman import HuffmanWeight
from vllm_latq.format.encodings.packed import PackedWeight
from vllm_latq.format.encodings.weight import Weight
from vllm_latq.format.scheme import LayerScheme
from vllm_latq.integrations.vllm import moe as vllm_moe
from vllm_latq.integrations.vllm.summary import summary
from vllm_latq.serving import operands
from vllm_latq.serving.layouts.checkpoint import CheckpointOperands

SCHEMES = {
    "packed4": PACKED,
    "packed3-row": LayerScheme("packed", 3, -1, True, grid="midrise"),
    "packed8-plain": LayerScheme("packed", 8, 32, False),
    "huffman": HUFFMAN,
    "trellis": TRELLIS,
}
RANKS = [(1, False), (2, False), (4, False), (2, True)]  # how many, and whether they share out experts or channels
# Relative to the largest output: float32 sums in another order.
TOLERANCE = 1e-5


def dense(layer: Any, product: str) -> torch.Tensor:
    """Return the weights of all experts on this rank, [experts, rows, cols]."""
    method = layer.quant_method
    if hasattr(layer, f"{product}_dense"):
        return getattr(layer, f"{product}_dense")
    stacks = [getattr(layer, f"{product}_{name}") for name in CheckpointOperands.TENSORS]
    constants = method.constants.gate_up if product == "w13" else method.constants.down
    experts = ([None if stack is None else stack[e] for stack in stacks] for e in range(len(stacks[0])))
    return torch.stack([CheckpointOperands.from_lists(tensors, constants).dense() for tensors in experts])


def product_of(x: torch.Tensor, w13: torch.Tensor, w2: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor) -> Any:
    """Return the outputs of plain experts; ids below 0 are on other ranks."""
    y = torch.zeros_like(x)
    for token, slot in (ids >= 0).nonzero().tolist():
        first = functional.linear(x[token], w13[ids[token, slot]])
        if w13.shape[1] == w2.shape[2]:  # no gate
            hidden = functional.relu(first).square()
        else:
            gate, up = first.chunk(2)
            hidden = functional.silu(gate) * up
        y[token] += weights[token, slot] * functional.linear(hidden, w2[ids[token, slot]])
    return y


@pytest.mark.parametrize(
    ("scheme", "size", "expert_parallel"),
    [(scheme, *ranks) for scheme in SCHEMES for ranks in RANKS],
)
def test_every_rank_gets_its_experts(
    scheme: str, size: int, expert_parallel: bool, rank_of: Callable[[int], None]
) -> None:
    assert_every_rank_gets_its_part(SCHEMES[scheme], size, expert_parallel, rank_of)


@pytest.mark.parametrize(
    ("scheme", "size", "expert_parallel"), [("packed4", 2, False), ("huffman", 2, True), ("trellis", 2, False)]
)
def test_every_rank_gets_its_experts_without_a_gate(
    scheme: str, size: int, expert_parallel: bool, rank_of: Callable[[int], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM runs them on GPUs only: its platform is patched."""
    gpu = SimpleNamespace(is_cuda_alike=lambda: True, is_xpu=lambda: False)
    monkeypatch.setattr(moe_config, "current_platform", gpu)
    options = {"activation": "relu2_no_mul", "ckpt_names": ("up_proj", "down_proj", None)}
    assert_every_rank_gets_its_part(SCHEMES[scheme], size, expert_parallel, rank_of, **options)
    layer = build(quantization(SCHEMES[scheme]), size, expert_parallel, **options)
    layer.quant_method.dummy = True
    layer.quant_method.process_weights_after_loading(layer)
    assert dense(layer, "w13").shape[1] == INTERMEDIATE // (1 if expert_parallel else size)


def assert_every_rank_gets_its_part(
    scheme: LayerScheme, size: int, expert_parallel: bool, rank_of: Callable[[int], None], **options: Any
) -> None:
    """The oracle always has a gate."""
    gated = not options
    weights, plain = checkpoint(scheme), {}
    for name, weight in weights.items():
        plain[f"{name}.weight"] = weight.dequantize()
    x = torch.randn(7, HIDDEN, generator=torch.Generator().manual_seed(0))
    ids = torch.stack([torch.randperm(EXPERTS)[:TOP_K] for _ in range(7)]).int()
    router = torch.rand(7, TOP_K)
    total = torch.zeros_like(x)
    for rank in range(size):
        rank_of(rank)
        layer, oracle = (
            build(quantization(scheme), size, expert_parallel, **options),
            build(None, size, expert_parallel),
        )
        load(layer, {name: weight for name, weight in weights.items() if gated or "gate" not in name})
        list(oracle.load_weights(plain.items()))
        layer.quant_method.process_weights_after_loading(layer)
        assert len(oracle.w13_weight) == ((2 - rank) if expert_parallel else EXPERTS)
        w13 = oracle.w13_weight.data if gated else oracle.w13_weight.data.chunk(2, 1)[1]
        torch.testing.assert_close(dense(layer, "w13"), w13, rtol=0, atol=0)
        torch.testing.assert_close(dense(layer, "w2"), oracle.w2_weight.data, rtol=0, atol=0)
        local = ids if oracle.expert_map is None else oracle.expert_map[ids.long()]
        expected = product_of(x, w13, oracle.w2_weight.data, router, local)
        got = layer.quant_method.apply(layer, x, router, ids, None, None)
        assert (got - expected).abs().max() <= TOLERANCE * expected.abs().max()
        total += got
    everything = [[plain[f"{e}.{leaf}.weight"] for e in range(EXPERTS)] for leaf in LEAVES]
    gate, up, down = (torch.stack(matrices) for matrices in everything)
    expected = product_of(x, torch.cat([gate, up], 1) if gated else up, down, router, ids)
    assert (total - expected).abs().max() <= TOLERANCE * expected.abs().max()


# Models whose activation is clamped -> arguments of vLLM's layer, limit, alpha and beta.
CLAMPED: dict[str, tuple[dict[str, Any], float, float, float]] = {
    "DeepSeek-V4, GLM-5.3-Flash, Hy-V4": ({"swiglu_limit": 2.0}, 2.0, 1.0, 0.0),
    "MiniMax-M3": (
        {"activation": "swigluoai_uninterleave", "swiglu_limit": 3.0, "swiglu_alpha": 1.5, "swiglu_beta": 0.5},
        *(3.0, 1.5, 0.5),
    ),
    "gpt-oss": ({"activation": "swigluoai", "has_bias": True}, 7.0, 1.702, 1.0),
    "Step-3.5": ({"activation": "swiglustep"}, 7.0, 1.0, 0.0),
}


@pytest.mark.parametrize("model", CLAMPED)
@pytest.mark.parametrize(("size", "expert_parallel"), [(1, False), (2, False), (2, True)])
def test_clamped_experts(model: str, size: int, expert_parallel: bool, rank_of: Callable[[int], None]) -> None:
    """Against plain floats. Most of these models' attention runs on GPUs only, but the experts run everywhere."""
    options, limit, alpha, beta = CLAMPED[model]
    weights, biases = checkpoint(PACKED), {}
    generator = torch.Generator().manual_seed(3)
    for name, weight in weights.items():
        biases[name] = torch.randn(weight.shape[0], generator=generator) * ("has_bias" in options)
    x = 20 * torch.randn(7, HIDDEN, generator=generator)
    router, ids = torch.rand(7, TOP_K, generator=generator), torch.tensor([[0, 1], [2, 0], [1, 2], [0, 2]] * 2)[:7]
    total, expected, clamped = torch.zeros(7, HIDDEN), torch.zeros(7, HIDDEN), 0
    for rank in range(size):
        rank_of(rank)
        layer = build(quantization(PACKED), size, expert_parallel, **options)
        load(layer, weights)
        if "has_bias" in options:
            assert list(layer.load_weights((f"{name}.bias", bias) for name, bias in biases.items()))
        layer.quant_method.process_weights_after_loading(layer)
        total += layer.quant_method.apply(layer, x, router, ids.int(), None, None)
    for token, slot in torch.cartesian_prod(torch.arange(7), torch.arange(TOP_K)).tolist():
        names = [f"{ids[token, slot]}.{leaf}" for leaf in LEAVES]
        gate, up = (weights[name].dequantize() @ x[token] + biases[name] for name in names[:2])
        clamped += int((up.abs() > limit).sum())
        if model == "Step-3.5":
            gate = (gate * torch.sigmoid(gate)).clamp(max=limit)
        else:
            gate = gate.clamp(max=limit)
            gate = gate * torch.sigmoid(alpha * gate)
        hidden = gate * (up.clamp(-limit, limit) + beta)
        expected[token] += router[token, slot] * (weights[names[2]].dequantize() @ hidden + biases[names[2]])
    assert clamped > 100
    assert (total - expected).abs().max() <= TOLERANCE * expected.abs().max()


def test_dummy_biases(rank_of: Callable[[int], None]) -> None:
    rank_of(1)
    layer = build(quantization(PACKED), 2, **BIASED)
    layer.quant_method.dummy = True
    layer.quant_method.process_weights_after_loading(layer)
    assert [layer.w13_bias.shape, layer.w2_bias.shape] == [(EXPERTS, INTERMEDIATE), (EXPERTS, HIDDEN)]
    assert not layer.w13_bias.any()


def test_reload_reuses_the_memory_of_the_first_load(
    rank_of: Callable[[int], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the tensors of the kernels, in which the outliers of all experts share one buffer."""
    monkeypatch.setattr("vllm_latq.serving.operands.has_kernels", lambda device: True)
    rank_of(0)
    few, many = checkpoint(PACKED), {}
    for name, weight in few.items():
        assert isinstance(weight, PackedWeight)
        integers, scales = torch.zeros(weight.shape, dtype=torch.int32), weight.scales
        mask = torch.rand(weight.shape, generator=torch.Generator().manual_seed(0)) < 0.5
        many[name] = PackedWeight.from_integers(integers, scales, 4, 32, mask, torch.ones(weight.shape))

    def loaded(weights: dict[str, Weight], before: Any = None) -> Any:
        layer = build(quantization(PACKED))
        layer.quant_method.dtype = torch.float16
        if before is not None:
            layer.quant_method.bits, layer.quant_method.capacity = before.bits, dict(before.capacity)
        load(layer, weights)
        layer.quant_method.process_weights_after_loading(layer)
        return layer

    first = loaded(few)
    # The first expert's outliers become the last one's.
    turned = {f"{EXPERTS - 1 - int(name[0])}{name[1:]}": weight for name, weight in few.items()}
    again = loaded(turned, first.quant_method)
    for product in ("w13", "w2"):
        entries = [getattr(layer, f"{product}_entries") for layer in (first, again)]
        assert entries[0].shape == entries[1].shape == (1, first.quant_method.capacity[product], 16)
        assert not torch.equal(*entries)
    made: list[Any] = []
    monkeypatch.setattr(
        vllm_moe, "make_operands", lambda *a, **k: made.append(operands.make_operands(*a, **k)) or made[-1]
    )
    with pytest.raises(
        CheckpointError, match=r"expected outliers for at most \d+ slots of 16 rows, found \d+ in 1 exp"
    ):
        loaded(many, first.quant_method)
    assert len(made) == 1


def test_router_weighs_inputs(rank_of: Callable[[int], None]) -> None:
    """Llama 4's router does so, which chooses one expert for each token."""
    rank_of(0)
    layer, weights = build(quantization(PACKED), apply_router_weight_on_input=True, top_k=1), checkpoint(PACKED)
    load(layer, weights)
    layer.quant_method.process_weights_after_loading(layer)
    x, router, ids = torch.randn(7, HIDDEN), torch.rand(7, 1), torch.randint(EXPERTS, (7, 1), dtype=torch.int32)
    gate, up, down = (torch.stack([weights[f"{e}.{leaf}"].dequantize() for e in range(EXPERTS)]) for leaf in LEAVES)
    expected = product_of(x * router, torch.cat([gate, up], 1), down, torch.ones(7, 1), ids)
    got = layer.quant_method.apply(layer, x, router, ids, None, None)
    assert (got - expected).abs().max() <= TOLERANCE * expected.abs().max()


def test_decoded_experts_share_one_width(rank_of: Callable[[int], None]) -> None:
    """Experts whose best widths differ are stacked with one width."""
    rank_of(0)
    layer, weights = build(quantization(HUFFMAN)), checkpoint(HUFFMAN)
    for leaf in LEAVES:
        wide = weights[f"2.{leaf}"]
        weights[f"2.{leaf}"] = HuffmanWeight(wide.scale, encode(wide.integers() * 9))
    load(layer, weights)
    layer.quant_method.process_weights_after_loading(layer)
    for leaf, matrix in zip(LEAVES, (*dense(layer, "w13")[2].chunk(2), dense(layer, "w2")[2]), strict=True):
        torch.testing.assert_close(matrix, weights[f"2.{leaf}"].dequantize(), rtol=0, atol=0)


@pytest.mark.parametrize(("size", "expert_parallel"), RANKS)
def test_summary_counts_the_experts_of_a_rank_that_a_token_takes(
    size: int, expert_parallel: bool, rank_of: Callable[[int], None]
) -> None:
    """8 bits and a scale of 16 bits for each 32 weights, for 2 of 3 experts on a rank."""
    rank_of(0)
    layer = build(quantization(SCHEMES["packed8-plain"]), size, expert_parallel)
    load(layer, checkpoint(SCHEMES["packed8-plain"]))
    layer.quant_method.process_weights_after_loading(layer)
    config = SimpleNamespace(hf_config=SimpleNamespace(get_text_config=SimpleNamespace))
    line = summary(torch.nn.ModuleList([layer]), config)
    stored = sum(tensor.nbytes for tensor in layer.parameters())
    counted = (
        f"latq: 2 matrices at 8.50 bits in memory (2 by dequantize + matmul); a token reads {printed(2 * stored / 3)}"
    )
    assert line == counted
    experts = len(layer.quant_method.experts) / EXPERTS if expert_parallel else 1 / size
    assert stored == pytest.approx(8.5 / 8 * experts * EXPERTS * 3 * INTERMEDIATE * HIDDEN)


@pytest.mark.parametrize("scheme", [HUFFMAN, TRELLIS], ids=["huffman", "trellis"])
def test_dummy_experts(scheme: LayerScheme, rank_of: Callable[[int], None]) -> None:
    rank_of(1)
    layer = build(quantization(scheme), 2)
    layer.quant_method.dummy = True
    layer.quant_method.process_weights_after_loading(layer)
    assert dense(layer, "w13").shape == (EXPERTS, INTERMEDIATE, HIDDEN)
    assert dense(layer, "w2").shape == (EXPERTS, HIDDEN, INTERMEDIATE // 2)


@pytest.mark.skipif(OLD_VLLM, reason="vLLM 0.25 has no weight cache")
@pytest.mark.parametrize("scheme", [HUFFMAN, TRELLIS], ids=["huffman", "trellis"])
def test_experts_from_the_weight_cache(scheme: LayerScheme, rank_of: Callable[[int], None]) -> None:
    rank_of(0)
    layer = build(quantization(scheme))
    load(layer, checkpoint(scheme))
    layer.quant_method.process_weights_after_loading(layer)
    with torch.device("meta"):
        cached = build(quantization(scheme))
    through_weight_cache(layer, cached)
    assert not [name for name, parameter in cached.named_parameters() if parameter.is_meta]
    call = torch.randn(7, HIDDEN), torch.rand(7, 1), torch.randint(EXPERTS, (7, 1), dtype=torch.int32)
    expected = layer.quant_method.apply(layer, *call)
    torch.testing.assert_close(cached.quant_method.apply(cached, *call), expected, rtol=0, atol=0)


@pytest.mark.parametrize("scheme", [HUFFMAN, TRELLIS], ids=["huffman", "trellis"])
def test_dequantized_experts_of_a_rank(scheme: LayerScheme, rank_of: Callable[[int], None]) -> None:
    rank_of(1)
    layer, weights = build(quantization(scheme), 2, expert_parallel=True), checkpoint(scheme)
    load(layer, weights)
    gate, up, down = (weights[f"{EXPERTS - 1}.{leaf}"].dequantize().unsqueeze(0) for leaf in LEAVES)
    w13, w2 = layer.quant_method.dequantize_weight(layer)
    torch.testing.assert_close(w13, torch.cat([gate, up], 1), rtol=0, atol=0)
    torch.testing.assert_close(w2, down, rtol=0, atol=0)


def test_ignored_experts_are_left_to_vllm(rank_of: Callable[[int], None]) -> None:
    rank_of(0)
    names = tuple(f"{PREFIX}.{expert}.{leaf}" for expert in range(EXPERTS) for leaf in LEAVES)
    for ignore in (("experts",), names):
        assert isinstance(build(quantization(PACKED, ignore=ignore)).quant_method, UnquantizedFusedMoEMethod)


def test_gate_and_up_may_differ_from_down(rank_of: Callable[[int], None]) -> None:
    rank_of(0)
    overrides = {f"{PREFIX}.{expert}.down_proj": TRELLIS for expert in range(EXPERTS)}
    layer, weights = build(quantization(PACKED, overrides=overrides)), checkpoint(PACKED)
    weights |= {name: weight for name, weight in checkpoint(TRELLIS).items() if name.endswith("down_proj")}
    load(layer, weights)
    layer.quant_method.process_weights_after_loading(layer)
    expected = torch.stack([weights[f"{expert}.down_proj"].dequantize() for expert in range(EXPERTS)])
    torch.testing.assert_close(dense(layer, "w2"), expected, rtol=0, atol=0)
