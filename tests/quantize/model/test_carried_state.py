"""Models whose blocks hand on more than hidden states: walked forward and backward, and quantized.

In Gemma 3n and Gemma 4 the last blocks read keys and values of earlier ones; in GLM-5 a block is told which tokens the
one before it chose, in Zaya what its router saw.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import CONFIG_MAPPING

from helpers.drawn import one_backward_pass
from helpers.mixtures import into_fused
from helpers.statistics import assert_same_statistics
from helpers.walk import walk, walk_blocks
from vllm_latq.errors import NumericalError, UnsupportedModelError
from vllm_latq.format.reader import CheckpointReader
from vllm_latq.format.verify import verify
from vllm_latq.quantize.calibration.fisher import Backpropagation, collect_statistics
from vllm_latq.quantize.calibration.fisher_files import StatisticsFiles
from vllm_latq.quantize.calibration.recomputed import RecomputedStatistics
from vllm_latq.quantize.calibration.stream import Stream
from vllm_latq.quantize.certificate.certificate import verify_certificate
from vllm_latq.quantize.model.carried_state import HandedOn
from vllm_latq.quantize.model.decoder import Decoder
from vllm_latq.quantize.model.loading import load_model
from vllm_latq.quantize.model.parts import Part, model_parts
from vllm_latq.quantize.model.recorder import Recorder, check_recorded, record
from vllm_latq.quantize.model.selection import never_quantized
from vllm_latq.quantize.pipeline import quantize_checkpoint
from vllm_latq.quantize.plan import streams
from vllm_latq.quantize.recipe import Recipe

SEED = 3
SAMPLES = {"num_samples": 4, "seq_len": 32}
MLP = ("lm_head", "gate_proj", "up_proj", "down_proj")
TOKENS = torch.randint(3, 2048, (6, 20), generator=torch.Generator().manual_seed(1))
BLOCKS = 5
# Three of their blocks attend to what two others computed; every block also gets an embedding of its own.
SHARED = {
    **{"num_hidden_layers": BLOCKS, "num_kv_shared_layers": 3, "hidden_size_per_layer_input": 16},
    **{"vocab_size_per_layer_input": 2048},
    "layer_types": ["sliding_attention", "full_attention", "full_attention", "sliding_attention", "full_attention"],
}
FAMILIES = {
    "gemma4_text": SHARED | {"global_head_dim": 16, "use_double_wide_mlp": True},
    "gemma3n_text": SHARED
    | {
        "intermediate_size": [48] * BLOCKS,
        "activation_sparsity_pattern": [0.0] * BLOCKS,
        "laurel_rank": 16,
        "head_dim": 16,
    },
    "glm_moe_dsa": {
        **{"num_hidden_layers": BLOCKS, "mlp_layer_types": ["dense", "dense", "sparse", "dense", "dense"]},
        **{"indexer_types": ["full", "shared", "full", "shared", "shared"], "index_topk": 5, "index_n_heads": 2},
        **{"num_key_value_heads": 4, "q_lora_rank": 24, "kv_lora_rank": 16, "v_head_dim": 8, "index_head_dim": 16},
        **{"qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "n_routed_experts": 4, "num_experts_per_tok": 2},
    },
    "zaya": {"num_hidden_layers": BLOCKS, "num_experts": 4, "router_hidden_size": 16, "sliding_window": None},
}


def waiting_bytes(handed_on: HandedOn) -> int:
    """Return the bytes of what blocks have handed on, each tensor counted once."""
    return sum({one.data_ptr(): one.nbytes for _, tensors in handed_on._entries() for one in tensors}.values())


zaya = pytest.mark.skipif("zaya" not in CONFIG_MAPPING, reason="a transformers without Zaya")


@pytest.mark.parametrize(
    "family", [pytest.param(family, marks=zaya if family == "zaya" else ()) for family in FAMILIES]
)
def test_walked_forward_and_backward(family: str, random_model: Any, tmp_path: Path) -> None:
    source, model = random_model(family, f"shared-{family}", **FAMILIES[family])
    decoder = Decoder(source, "cpu")
    with torch.no_grad():
        torch.testing.assert_close(walk(decoder, TOKENS, len(TOKENS)), model(TOKENS).logits, rtol=0, atol=0)
    linears = {name: linear for index in range(BLOCKS) for name, linear in decoder.linears(index).items()}
    wanted = {name: linears[name] for name in linears.keys() - set(never_quantized(decoder))}
    assert len(wanted) >= 6 * BLOCKS
    files = StatisticsFiles(tmp_path)
    run = Backpropagation(decoder, TOKENS, wanted, SEED)
    collect_statistics(run, files)
    again = RecomputedStatistics(run)
    for part in blocks_of(decoder):
        with part.weights() as block:
            wanted_here = replace(part, linears={name: one for name, one in part.linears.items() if name in wanted})
            found = {name: layer.to(decoder.device) for name, layer in again.of(wanted_here, block).items()}
        assert_same_statistics(found, files.read(part.index))
    expected = one_backward_pass(model, TOKENS, SEED)
    for index in range(BLOCKS):
        layers = files.read(index)
        # Experts, which transformers has in one tensor, have tests of their own; Zaya calls one of these on zeros, too.
        for name in [name for name in layers if not any(part in name for part in (".experts.", ".qkv_proj."))]:
            layer, (inputs, gradients) = layers[name], expected[name]
            (gram,) = layer.outputs
            for found, tensors, count in ((layer.inputs, inputs, len(inputs)), (gram, gradients, TOKENS.numel())):
                reference = tensors.T @ tensors / count
                assert float((found - reference).norm()) <= 1e-3 * float(reference.norm()), name


def blocks_of(decoder: Decoder) -> list[Part]:
    """Return the blocks of a model, with all their linears."""
    return model_parts(decoder, [name for index in range(len(decoder)) for name in decoder.linears(index)])[:-1]


def test_each_stream_has_its_own(random_model: Any) -> None:
    """The original model's blocks read what its own handed on, those of the quantized one what theirs did."""
    source, model = random_model("gemma4_text", "streams", **FAMILIES["gemma4_text"])
    decoder = Decoder(source, "cpu")
    (original,) = walk_blocks(decoder, TOKENS, len(TOKENS))
    stream = Stream(decoder, TOKENS, "original")
    for part in blocks_of(decoder):
        with part.weights() as block, torch.no_grad():
            stream.inputs(part, block)
            for linear in part.linears.values():
                linear.weight.mul_(0.9)
            stream.advance(part, block)
    assert stream.originals is not None
    assert torch.equal(torch.cat([batch.hidden for batch in stream.originals]), original)
    with torch.no_grad():
        for block in model.model.layers:
            for module in block.modules():
                if isinstance(module, nn.Linear):
                    module.weight.mul_(0.9)
        expected = model(TOKENS).logits
        with decoder.head() as head:
            found = head(torch.cat([batch.hidden for batch in stream.batches]))
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    ("family", "recipe"),
    [
        ("gemma4_text", Recipe("latq", bits=3.5, ignore=MLP, **SAMPLES)),
        ("gemma4_text", Recipe("gptq", 4, group_size=16, target="original", **SAMPLES)),
        ("gemma3n_text", Recipe("ssqr", 3, group_size=16, outlier_rate=0.02, **SAMPLES)),
        ("glm_moe_dsa", Recipe("latq", bits=3.5, ignore=MLP, **SAMPLES)),
        pytest.param("zaya", Recipe("gptq", 4, group_size=8, **SAMPLES), marks=zaya),
    ],
    ids=["gemma4-latq", "gemma4-original", "gemma3n-ssqr", "glm5-latq", "zaya-gptq"],
)
def test_quantized_and_loaded_again(
    family: str, recipe: Recipe, random_model: Any, calibration_text: Path, tmp_path: Path
) -> None:
    source, model = random_model(family, f"shared-{family}", **FAMILIES[family])
    quantize_checkpoint(recipe, source, tmp_path / "out", calibration=str(calibration_text))
    assert list(verify(tmp_path / "out")) == []
    assert list(verify_certificate(tmp_path / "out", source, str(calibration_text))) == []
    assert not any("indexer" in layer for layer in CheckpointReader(tmp_path / "out").shapes)
    into_fused(model, tmp_path / "out")
    loaded, _ = load_model(tmp_path / "out", "cpu")
    with torch.no_grad():
        torch.testing.assert_close(loaded(TOKENS).logits, model(TOKENS).logits, rtol=0, atol=2e-5)


def test_what_is_no_tensor_is_refused() -> None:
    handed_on = HandedOn(["states"])
    handed_on.mappings["states"]["full"] = torch.zeros(2)  # type: ignore[assignment]
    with pytest.raises(UnsupportedModelError, match=r"states\['full'\].*tensors in a tuple"):
        handed_on.rest()
    handed_on = HandedOn(beside="seen")
    handed_on.take(0, (torch.zeros(2), [1, 2]))
    with pytest.raises(UnsupportedModelError, match=r"seen\[0\]: expected a tensor.*found list"):
        handed_on.rest()


def test_what_is_handed_on_without_a_gradient() -> None:
    """A block may compute it without: nothing goes back through it. Another may return nothing for once."""
    handed_on, states = HandedOn(beside="seen"), torch.ones(2, requires_grad=True)
    handed_on.take(0, (states.detach(), torch.ones(2)))

    def block(weight: float) -> torch.Tensor:
        given = handed_on.arguments(1, {"seen": None}, torch.device("cpu"))["seen"]
        return handed_on.take(1, (states * weight * given, (states * given).detach()))

    for weight in (2.0, 3.0):  # the second time a gradient is known of what it handed on
        handed_on.backward(torch.ones(2), block, weight)
        handed_on.gradients["seen", 1] = [torch.ones(2)]
    assert torch.equal(states.grad, torch.full((2,), 5.0))
    assert waiting_bytes(handed_on) == 16
    handed_on.take(1, (states, None))
    assert handed_on.arguments(2, {"seen": None}, torch.device("cpu")) == {"seen": None}


class _Model(nn.Module):
    """Three blocks that return two things, of which the second is passed on as `passed` says."""

    def __init__(self, passed: Any) -> None:
        super().__init__()
        self.passed = passed

    def run(self, recorders: list[Recorder]) -> bool:
        hidden, beside = torch.zeros(1, 4, 8), None
        for index, recorder in enumerate(recorders):
            hidden, beside = recorder(hidden, **self.passed(index, beside))
        return True


class _Block(nn.Module):
    def forward(self, hidden: torch.Tensor, first: Any = None, second: Any = None) -> Any:
        raise NotImplementedError


@pytest.mark.parametrize(
    ("passed", "message"),
    [
        (lambda index, beside: {("first", "second")[index % 2]: beside}, "expected one argument.*found first, second"),
        (lambda _, beside: {"first": beside, "second": beside}, "expected one argument.*found first, second"),
        (lambda _, beside: {"first": {"seen": beside}}, "arguments that do not depend on other blocks, found first"),
    ],
    ids=["alternating", "twice", "inside"],
)
def test_what_cannot_be_carried_on_is_refused(passed: Any, message: str) -> None:
    recorders = record([_Block() for _ in range(3)], 0, _Model(passed).run, "layers")
    assert recorders[0].outputs == 2
    with pytest.raises(UnsupportedModelError, match=message):
        check_recorded(recorders, "layers")


@pytest.mark.parametrize("family", ["gptj", "bloom"])
def test_one_block_that_returns_a_tuple(family: str, random_model: Any) -> None:
    """There is no second block that would show what the first must return."""
    source, model = random_model(family, f"one-{family}", n_layer=1, num_hidden_layers=1)
    with torch.no_grad():
        torch.testing.assert_close(walk(Decoder(source, "cpu"), TOKENS, 3), model(TOKENS).logits, rtol=0, atol=1e-6)


def test_nothing_waits_in_memory_that_need_not(random_model: Any) -> None:
    """A block's embeddings are no view of those of all; states have no graph; a tied table is there once."""
    source, _ = random_model("gemma4_text", "memory", **FAMILIES["gemma4_text"], tie_word_embeddings=True)
    decoder, placed = Decoder(source, "cpu"), []

    def place(tensor: torch.Tensor) -> torch.Tensor:
        placed.append(tensor.nbytes)
        return tensor

    (batch,) = decoder.embed(TOKENS, len(TOKENS), place)
    assert sum(placed) == batch.hidden.nbytes + BLOCKS * TOKENS.numel() * 16 * 4
    for arguments in batch.arguments:
        part = arguments["per_layer_input"]
        assert part.untyped_storage().nbytes() == part.nbytes
    states = batch.hidden.requires_grad_(True)
    for index in range(2):
        with decoder.block(index) as block:
            batch.handed_on.backward(torch.ones_like(states), decoder.forward, index, block, states, batch)
    (mapping,) = batch.handed_on.mappings.values()
    assert not any(tensor.requires_grad for tensors in mapping.values() for tensor in tensors)
    with decoder.head():
        assert decoder.model.lm_head.weight is decoder.model.get_input_embeddings().weight


@zaya
def test_what_the_next_block_alone_reads_is_dropped_behind_it(random_model: Any) -> None:
    source, _ = random_model("zaya", "shared-zaya", **FAMILIES["zaya"])
    decoder = Decoder(source, "cpu")
    stream = Stream(decoder, TOKENS, "original")
    for part in blocks_of(decoder):
        with part.weights() as block, torch.no_grad():
            stream.inputs(part, block)
            stream.advance(part, block)
        for batch in (*stream.batches, *(stream.originals or ())):
            # One for the next block; of its own the first is at rest.
            assert waiting_bytes(batch.handed_on) == TOKENS.numel() * 16 * 4


def test_it_waits_where_hidden_states_do(random_model: Any) -> None:
    source, _ = random_model("glm_moe_dsa", "shared-glm_moe_dsa", **FAMILIES["glm_moe_dsa"])
    decoder, placed = Decoder(source, "cpu"), []
    (batch,) = decoder.embed(TOKENS, len(TOKENS), lambda tensor: placed.append(tensor.dtype) or tensor.clone())
    for index in range(BLOCKS):
        with decoder.block(index) as block, torch.no_grad():
            batch.hidden = decoder.run(index, block, batch)
    # Two blocks choose tokens, three return what they were given.
    assert placed.count(torch.int32) == 2
    assert waiting_bytes(batch.handed_on) == 2 * TOKENS.numel() * 5 * 4


def test_embeddings_for_each_block_wait_with_several_streams(random_model: Any) -> None:
    """In Gemma 3n the streams come before the samples."""
    source, _ = random_model("gemma3n_text", "shared-gemma3n_text", **FAMILIES["gemma3n_text"])
    placed: list[int] = []
    decoder = Decoder(source, "cpu")
    (batch,) = decoder.embed(TOKENS, len(TOKENS), lambda one: placed.append(one.nbytes) or one)
    assert batch.hidden.shape[:3] == (4, *TOKENS.shape)
    assert streams(decoder.config) == 4
    assert sum(placed) == batch.hidden.nbytes + BLOCKS * TOKENS.numel() * 16 * 4


def test_a_linear_without_gradient_is_named(random_model: Any, tmp_path: Path) -> None:
    source, _ = random_model("glm_moe_dsa", "shared-glm_moe_dsa", **FAMILIES["glm_moe_dsa"])
    decoder, name = Decoder(source, "cpu"), "model.layers.0.self_attn.indexer.wk"
    wanted = {name: decoder.linears(0)[name]}
    with pytest.raises(NumericalError, match=rf"{name}: expected a linear that the loss depends on"):
        collect_statistics(Backpropagation(decoder, TOKENS, wanted, SEED), StatisticsFiles(tmp_path))
