"""Models quantized by compressed-tensors, as Kimi K2.5 is published: read as that package decompresses them."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from compressed_tensors.compressors import NaiveQuantizationCompressor, PackedQuantizationCompressor
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForMultimodalLM

from helpers.originals import change, check_quantized_alike, publish
from helpers.random_models import SMALL
from vllm_latq.coding.packing import pack_codes
from vllm_latq.errors import CheckpointError, LatqError, UnsupportedModelError
from vllm_latq.format.files import TensorStore
from vllm_latq.format.reader import CheckpointReader
from vllm_latq.quantize.export import export_checkpoint
from vllm_latq.quantize.model.decoder import Decoder
from vllm_latq.quantize.model.loading import load_model
from vllm_latq.quantize.model.originals.store import OriginalStore
from vllm_latq.quantize.pipeline import quantize_checkpoint
from vllm_latq.quantize.recipe import Recipe

INT4 = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 16, "symmetric": True, "actorder": None}
LATENT = {
    **{"q_lora_rank": 24, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8},
    **{"n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1},
    "num_key_value_heads": 4,
}


def _packed(module: str, tensor: torch.Tensor, weights: dict[str, Any]) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """Return what compressed-tensors stores for a matrix [m, n], and what it decompresses that to."""
    scheme = QuantizationScheme(targets=["Linear"], weights=QuantizationArgs(**weights))
    (rows, columns), bits = tensor.shape, weights["num_bits"]
    groups = columns // weights["group_size"] if weights["strategy"] == "group" else 1
    state = {"weight": tensor, "weight_scale": 0.01 + 0.1 * torch.rand(rows, groups).to(tensor.dtype)}
    if not weights["symmetric"]:
        low, high = -(1 << bits - 1), 1 << bits - 1
        state["weight_zero_point"] = torch.randint(low, high, (rows, groups), dtype=torch.int8)
    if weights["actorder"] == "group":
        order = torch.randperm(columns)
        state["weight_g_idx"] = (order // weights["group_size"]).int()
    stored = PackedQuantizationCompressor.compress(state, scheme)
    plain = PackedQuantizationCompressor.decompress(stored, scheme)["weight"]
    return {f"{module}.{part}": value for part, value in stored.items()}, plain


def _quantization(**groups: tuple[list[str], dict[str, Any]]) -> dict[str, Any]:
    entries = {name: {"targets": targets, "weights": weights} for name, (targets, weights) in groups.items()}
    return {"quant_method": "compressed-tensors", "format": "pack-quantized", "config_groups": entries}


@pytest.fixture
def kimi(mini_model: Path, tmp_path: Path) -> Path:
    """A Kimi K2.5 with the names of the published one: its tower's q, k and v are one tensor."""
    config = AutoConfig.for_model(
        "kimi_k25",
        text_config={"model_type": "deepseek_v3"} | SMALL | LATENT,
        vision_config={"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 4},
        projection_hidden_size=32,
        tie_word_embeddings=False,
    )
    torch.manual_seed(0)
    model = AutoModelForMultimodalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    model.save_pretrained(tmp_path / "kimi")
    for file in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(mini_model / file, tmp_path / "kimi")
    # transformers' way back renames the language model's layers, too.
    tensors = load_file(tmp_path / "kimi/model.safetensors")
    tensors = {name.replace("_model.model.blocks.", "_model.model.layers."): tensor for name, tensor in tensors.items()}
    save_file(tensors, tmp_path / "kimi/model.safetensors", metadata={"format": "pt"})
    return tmp_path / "kimi"


def test_quantized_as_what_they_stand_for(kimi: Path, calibration_text: Path, tmp_path: Path) -> None:
    def pack(name: str, tensor: torch.Tensor) -> tuple[dict[str, torch.Tensor], torch.Tensor] | None:
        return _packed(name.removesuffix(".weight"), tensor, INT4) if ".experts." in name else None

    source = tmp_path / "int4"
    twin = publish(kimi, source, pack, _quantization(group_0=(["Linear"], INT4)))
    change(
        source, lambda _, config: config["text_config"].update(quantization_config=config.pop("quantization_config"))
    )
    recipe = Recipe("gptq", 4, group_size=8, num_samples=4, seq_len=32)
    check_quantized_alike(source, twin, recipe, calibration_text)
    expert = "language_model.model.layers.1.mlp.experts.3.down_proj"
    assert expert in CheckpointReader(source / "out").shapes
    assert "wqkv" in " ".join(TensorStore(source / "out").names())
    load_model(source / "out", "cpu")


def test_a_tensor_of_the_language_model_is_missed(kimi: Path) -> None:
    change(kimi, lambda tensors, _: tensors.pop("language_model.model.layers.1.self_attn.o_proj.weight"))
    with pytest.raises(CheckpointError, match=r"layers\.1\.self_attn\.o_proj\.weight, found no such tensor"):
        Decoder(kimi, "cpu")


def _single(tmp_path: Path, stored: dict[str, torch.Tensor], quantization: dict[str, Any]) -> OriginalStore:
    """Return the store of a directory with these tensors."""
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": quantization}))
    save_file({name: tensor.contiguous() for name, tensor in stored.items()}, tmp_path / "model.safetensors")
    return OriginalStore(tmp_path)


@pytest.mark.parametrize("bits", range(1, 9))
@pytest.mark.parametrize("kind", ["group", "channel", "zero points", "by activation", "both"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_as_compressed_tensors_decompresses_them(bits: int, kind: str, dtype: torch.dtype, tmp_path: Path) -> None:
    weights = INT4 | {"num_bits": bits, "group_size": 11}
    weights["symmetric"] = kind not in ("zero points", "both")
    weights["actorder"] = "group" if kind in ("by activation", "both") else None
    if kind == "channel":
        weights |= {"strategy": "channel", "group_size": None}
    torch.manual_seed(bits)
    stored, plain = _packed("a.b", torch.randn(7, 33).to(dtype), weights)
    store = _single(tmp_path, stored | {"norm": torch.ones(3)}, _quantization(all=(["Linear"], weights)))
    assert sorted(store.names()) == ["a.b.weight", "norm"]
    assert store.shape("a.b.weight") == (7, 33)
    found = store.get("a.b.weight")
    assert found.dtype == plain.dtype == dtype
    assert torch.equal(found, plain)
    assert torch.equal(store.part("a.b.weight", (slice(2, 5), 1)), plain[2:5, 1])


@pytest.mark.parametrize("bits", [3, 5, 6, 7])
@pytest.mark.parametrize("columns", [33, 96])
@pytest.mark.parametrize("symmetric", [True, False])
def test_integers_across_words(bits: int, columns: int, symmetric: bool, tmp_path: Path) -> None:
    """Version 0.18 of compressed-tensors and newer ones pack so; rows of 33 have as many words in the older layout."""
    weights = INT4 | {"num_bits": bits, "strategy": "channel", "group_size": None, "symmetric": symmetric}
    torch.manual_seed(bits)
    codes, zeros = torch.randint(1 << bits, (13, columns)), torch.full((13, 1), 1 << bits - 1)
    scales = torch.rand(13, 1)
    stored = {"a.weight_packed": pack_codes(codes, bits), "a.weight_scale": scales}
    stored["a.weight_shape"] = torch.tensor([13, columns])
    if not symmetric:
        zeros = torch.randint(1 << bits, (13, 1))
        stored["a.weight_zero_point"] = pack_codes(zeros.T, bits).T
    store = _single(tmp_path, stored, _quantization(all=(["Linear"], weights)))
    assert torch.equal(store.get("a.weight"), (codes - zeros) * scales)


def test_own_export_of_3_bits_is_read(mini_model: Path, tmp_path: Path) -> None:
    quantize_checkpoint(Recipe("rtn", 3, group_size=128), mini_model, tmp_path / "latq")
    export_checkpoint(tmp_path / "latq", tmp_path / "out")
    reader, store = CheckpointReader(tmp_path / "latq"), OriginalStore(tmp_path / "out")
    for name in reader.shapes:
        weight = reader.weight(name)
        assert torch.equal(store.get(f"{name}.weight"), weight.dequantize().to(weight.scales.dtype)), name


FLOAT8: dict[str, Any] = {"num_bits": 8, "type": "float", "strategy": "channel", "symmetric": True}
# Strategy, other keys, shape of the scales.
STRATEGIES: list[tuple[str, dict[str, Any], tuple[int, ...]]] = [
    ("tensor", {}, (1,)),
    ("channel", {}, (300, 1)),
    ("group", {"group_size": 16}, (300, 4)),
    ("block", {"block_structure": [20, 16]}, (15, 4)),
    ("block", {"block_structure": [150, 32]}, (2, 2)),
]


@pytest.mark.parametrize(("strategy", "keys", "shape"), STRATEGIES, ids=[str(shape) for *_, shape in STRATEGIES])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_8_bit_floats(
    strategy: str, keys: dict[str, Any], shape: tuple[int, ...], dtype: torch.dtype, tmp_path: Path
) -> None:
    weights = FLOAT8 | {"strategy": strategy} | keys
    codes, scales = torch.randn(300, 64).to(torch.float8_e4m3fn), (0.01 + torch.rand(shape)).to(dtype)
    scheme = QuantizationScheme(targets=["Linear"], weights=QuantizationArgs(**weights))
    plain = NaiveQuantizationCompressor.decompress({"weight": codes, "weight_scale": scales}, scheme)["weight"]
    stored = {"a.weight": codes, "a.weight_scale": scales, "a.input_scale": torch.ones(1), "norm.weight": torch.ones(3)}
    quantization = _quantization(x=(["Linear"], weights)) | {"format": "float-quantized"}
    store = _single(tmp_path, stored, quantization)
    assert sorted(store.names()) == ["a.weight", "norm.weight"]
    assert torch.equal(store.get("a.weight"), plain.bfloat16())
    change(tmp_path, lambda tensors, _: tensors.update({"a.weight_scale": torch.ones(3, 2)}))
    with pytest.raises(UnsupportedModelError, match=r"a\.weight_scale: expected scales, shape .*found shape \(3, 2\)"):
        OriginalStore(tmp_path).names()


def test_modules_of_both_formats(tmp_path: Path) -> None:
    stored, plain = _packed("experts.0.up", torch.randn(4, 32), INT4)
    codes, scales = torch.randn(4, 32).to(torch.float8_e4m3fn), torch.rand(4, 1)
    stored |= {"attention.weight": codes, "attention.weight_scale": scales}
    groups = _quantization(int4=(["re:.*experts.*"], INT4), float8=(["Linear"], FLOAT8))
    store = _single(tmp_path, stored, groups | {"format": "mixed-precision"})
    assert torch.equal(store.get("experts.0.up.weight"), plain)
    assert torch.equal(store.get("attention.weight"), (codes.float() * scales).bfloat16())
    change(tmp_path, lambda _, config: config["quantization_config"]["config_groups"].pop("float8"))
    with pytest.raises(UnsupportedModelError, match="expected one scheme for attention, found 0"):
        OriginalStore(tmp_path).names()


def test_no_order_of_columns_was_chosen(tmp_path: Path) -> None:
    """compressed-tensors writes groups of -1 then."""
    stored, plain = _packed("a", torch.randn(4, 32), INT4)
    store = _single(tmp_path, stored | {"a.weight_g_idx": -torch.ones(32).int()}, _quantization(x=(["Linear"], INT4)))
    assert torch.equal(store.get("a.weight"), plain)


def test_a_scheme_that_names_a_module_comes_first(tmp_path: Path) -> None:
    int8 = INT4 | {"num_bits": 8}
    stored: dict[str, torch.Tensor] = {}
    plain = {}
    for module, weights in (("a", INT4), ("b.exact", int8), ("b.down_proj", int8)):
        parts, plain[module] = _packed(module, torch.randn(4, 32), weights)
        stored |= parts
    groups = _quantization(four=(["Linear"], INT4), eight=(["re:.*down_proj$", "b.exact"], int8))
    store = _single(tmp_path, stored, groups)
    for module, matrix in plain.items():
        assert torch.equal(store.get(f"{module}.weight"), matrix)
    again = groups["config_groups"] | {"also": {"targets": ["b.exact"], "weights": INT4}}
    with pytest.raises(UnsupportedModelError, match=r"config_groups: expected one scheme for b\.exact, found 2"):
        _single(tmp_path, stored, groups | {"config_groups": again}).names()


def _edit(part: str, change: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[Any, Any], None]:
    return lambda tensors, _: tensors.update({f"a.{part}": change(tensors[f"a.{part}"]).contiguous()})


def _pop(part: str) -> Callable[[Any, Any], None]:
    return lambda tensors, _: tensors.pop(f"a.{part}")


def _group(**changes: Any) -> Callable[[Any, Any], None]:
    return lambda _, config: config["quantization_config"]["config_groups"]["x"]["weights"].update(changes)


def _config(**changes: Any) -> Callable[[Any, Any], None]:
    return lambda _, config: config["quantization_config"].update(changes)


REFUSED: list[tuple[Callable[[Any, Any], Any], str]] = [
    (_pop("weight_scale"), "a tensor a.weight_scale beside it, found none"),
    (_pop("weight_shape"), "a tensor a.weight_shape beside it"),
    (_pop("weight_zero_point"), "a tensor a.weight_zero_point beside it"),
    (_pop("weight_g_idx"), "a tensor a.weight_g_idx beside it"),
    (_edit("weight_packed", lambda it: it[None]), "weight_packed: expected int32 words in a mat"),
    (_edit("weight_packed", lambda it: it.short()), "weight_packed: expected int32 words"),
    (
        _edit("weight_packed", lambda it: it[:, :3]),
        r"weight_packed: expected 4 words per row, for 32 columns .*found shape \(12, 3\)",
    ),
    (_edit("weight_scale", lambda it: it[:8]), "weight_scale: expected floats in 12 rows"),
    (_edit("weight_scale", lambda it: it.int()), "weight_scale: expected floats in 12 rows"),
    (_edit("weight_scale", lambda it: it[:, :1]), "weight_packed: expected 2 words per row"),
    (_edit("weight_scale", lambda it: it[:, :, None]), r"found shape \(12, 2, 1\)"),
    (_edit("weight_scale", lambda it: it * torch.nan), "a.weight_scale: expected finite scales, found 24"),
    (_edit("weight_shape", lambda it: it + 1), r"weight_shape: expected \[12, 32\], .*\[13, 33\]"),
    (_edit("weight_shape", lambda it: it[:1]), "weight_shape: expected two integers"),
    (_edit("weight_zero_point", lambda it: it.T[:1]), r"zero_point: .*words, shape \(2, 2\)"),
    (_edit("weight_zero_point", lambda it: it[:1]), r"words, shape \(2, 2\), found shape \(1, 2"),
    (_edit("weight_g_idx", lambda it: it[:31]), "weight_g_idx: expected 32 integers"),
    (_edit("weight_g_idx", lambda it: 0 * it), "weight_g_idx: expected each of 2 groups 16 times"),
    (_edit("weight_g_idx", lambda it: it + 1), "weight_g_idx: expected each of 2 groups 16 times"),
    (
        lambda tensors, _: tensors.update({"a.weight": torch.ones(12, 32)}),
        "a.weight: expected each tensor stored once, found also a.weight_packed",
    ),
    (_group(strategy="channel", group_size=None, actorder=None), "weight_scale: expected one scale per row"),
    (_group(symmetric=True), "no zero points in a symmetric scheme"),
    (_group(num_bits=9), "config_groups.x.weights: expected integers of 1 to 8 bits"),
    (_group(type="float"), "config_groups.x.weights: expected integers"),
    (_group(strategy="tensor"), "config_groups.x.weights: .*by group or channel"),
    (_group(strategy=["group"]), "config_groups.x.weights: .*by group or channel"),
    (_group(group_size=-1), "config_groups.x.weights: .*by group or channel"),
    (_group(type="float", num_bits=8), "8-bit floats, with their block sizes"),
    (_group(strategy="block", block_structure=[0, 2]), "8-bit floats, with their block sizes"),
    (_group(strategy="block", block_structure=[2]), "8-bit floats, with their block sizes"),
    (_config(config_groups={}), "config_groups: expected groups of modules"),
    (_config(config_groups={"x": {"targets": "Linear"}}), "config_groups.x: expected targets"),
    (
        _config(config_groups={"x": {"targets": ["Embedding"], "weights": INT4}}),
        "expected one scheme for a, found 0",
    ),
    (
        _config(config_groups={"x": {"targets": ["re:("], "weights": INT4}}),
        r"config_groups: expected patterns of names, found 're:\('",
    ),
    (_config(transform_config={"config_groups": {"R1": {}}}), "transform_config: expected none"),
    (_config(sparsity_config={"format": "sparse-24"}), "sparsity_config: expected none, or"),
]


@pytest.mark.parametrize(("edit", "message"), REFUSED, ids=[message for _, message in REFUSED])
def test_refused(edit: Callable[[Any, Any], Any], message: str, tmp_path: Path) -> None:
    weights = INT4 | {"symmetric": False, "actorder": "group"}
    stored, _ = _packed("a", torch.randn(12, 32), weights)
    _single(tmp_path, stored, _quantization(x=(["Linear"], weights)))
    change(tmp_path, edit)
    with pytest.raises(LatqError, match=message):
        OriginalStore(tmp_path).get("a.weight")


def test_other_formats_are_refused(random_model: Any, tmp_path: Path) -> None:
    plain, _ = random_model("llama")
    quantization = _quantization(x=(["Linear"], INT4)) | {"format": "nvfp4-pack-quantized"}
    publish(plain, tmp_path / "other", lambda *_: None, quantization)
    message = "mixed-precision, found compressed-tensors nvfp4-pack-quantized"
    with pytest.raises(UnsupportedModelError, match=message):
        Decoder(tmp_path / "other", "cpu")
