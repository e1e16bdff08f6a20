"""Exports to compressed-tensors: logits in transformers, shapes and schemes that vLLM expects, and refusals."""

import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from transformers import AutoConfig, AutoModelForCausalLM

from helpers.checkpoints import CheckpointMaker, CheckpointPair
from helpers.encoders import random_encoder
from helpers.random_models import SMALL, RandomModels
from vllm_latq.cli.main import main
from vllm_latq.errors import CheckpointError, ConfigError, LatqError, UnsupportedModelError
from vllm_latq.format.config import CheckpointConfig
from vllm_latq.format.encodings.registry import tensor_specs
from vllm_latq.format.reader import CheckpointReader
from vllm_latq.format.scheme import LayerScheme
from vllm_latq.models.stored_names import module_names
from vllm_latq.quantize import export
from vllm_latq.quantize.export import export_checkpoint, quantization_config, target_of
from vllm_latq.quantize.pipeline import quantize_checkpoint
from vllm_latq.quantize.recipe import Recipe

IDS = torch.arange(3, 43).reshape(2, 20)
DOWN, QUERY = "model.layers.1.mlp.down_proj", "model.layers.0.self_attn.q_proj"
PACKED = LayerScheme("packed", 4, 64)
# Leaf of the model -> the linear that vLLM merges it into.
MERGED = {"q_proj": "qkv_proj", "k_proj": "qkv_proj", "v_proj": "qkv_proj", "gate_proj": "gate_up_proj"}
MERGED["up_proj"] = "gate_up_proj"
MAPPING = {"qkv_proj": ["q_proj", "k_proj", "v_proj"], "gate_up_proj": ["gate_proj", "up_proj"]}


@pytest.fixture(scope="module")
def several(make_checkpoint: CheckpointMaker) -> CheckpointPair:
    """2, 4 and 8 bits, groups of 32 and 64, whole rows, and a quantized head."""
    overrides = {DOWN: LayerScheme("packed", 2, 32), "lm_head": LayerScheme("packed", 8, -1)}
    return make_checkpoint("several", CheckpointConfig(PACKED, (), overrides))


def logits(directory: Path) -> torch.Tensor:
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.bfloat16)
    with torch.no_grad():
        return model(IDS).logits


def stored(directory: Path) -> dict[str, torch.Tensor]:
    tensors = {}
    for file in directory.glob("*.safetensors"):
        with safe_open(file, framework="pt") as shard:
            tensors |= {name: shard.get_tensor(name) for name in shard.keys()}  # noqa: SIM118 (no mapping)
    return tensors


def unpacked(tensors: dict[str, torch.Tensor], name: str, bits: int) -> torch.Tensor:
    """Return the weight of a linear by the rules of compressed-tensors: bit by bit, and shares no code with ours."""
    _, columns = tensors[f"{name}.weight_shape"].tolist()
    words = tensors[f"{name}.weight_packed"].to(torch.int64) & 0xFFFFFFFF
    stream = ((words[:, :, None] >> torch.arange(32)) & 1).flatten(1)[:, : columns * bits]
    codes = (stream.unflatten(1, (columns, bits)) << torch.arange(bits)).sum(2)
    scales = tensors[f"{name}.weight_scale"].float()
    return (codes - 2 ** (bits - 1)) * scales.repeat_interleave(columns // scales.shape[1], 1)


def test_logits_are_those_of_the_checkpoint(several: CheckpointPair, tmp_path: Path) -> None:
    pytest.importorskip("compressed_tensors")
    export_checkpoint(several.latq, tmp_path / "out")
    got = logits(tmp_path / "out")
    assert got.std() > 0.5
    assert torch.equal(got, logits(several.latq))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out"]
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert "transformers_weights" not in config
    assert (tmp_path / "out" / "tokenizer.json").exists()
    card = (tmp_path / "out" / "README.md").read_text()
    assert "vllm serve out\n" in card
    assert "Humming" in card  # 2 bits


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
def test_weights_follow_from_the_rules_of_the_format(bits: int, mini_model: Path, tmp_path: Path) -> None:
    """3 bits too, which compressed-tensors packs densely only from 0.18 on. Shards stay apart."""
    recipe = Recipe("rtn", bits, group_size=128, scales="signed")
    quantize_checkpoint(recipe, mini_model, tmp_path / "latq")
    export_checkpoint(tmp_path / "latq", tmp_path / "out")
    reader, tensors = CheckpointReader(tmp_path / "latq"), stored(tmp_path / "out")
    for name in reader.shapes:
        assert torch.equal(unpacked(tensors, name, bits), reader.weight(name).dequantize()), name
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    assert index["weight_map"].keys() == tensors.keys()
    assert len(set(index["weight_map"].values())) == len(list((tmp_path / "latq").glob("*.safetensors")))
    assert ("compressed-tensors 0.18" in (tmp_path / "out" / "README.md").read_text()) == (bits == 3)
    assert (tmp_path / "out" / "README.md").read_text().startswith("---\nbase_model: pydoc-mini\n")


def test_experts_are_read_by_transformers(random_model: RandomModels, tmp_path: Path) -> None:
    pytest.importorskip("compressed_tensors")
    sizes = {"hidden_size": 64, "moe_intermediate_size": 32, "intermediate_size": 64}
    source, _ = random_model("qwen3_moe", "exported-experts", num_experts=4, num_experts_per_tok=2, **sizes)
    quantize_checkpoint(Recipe("rtn", 4, group_size=32), source, tmp_path / "latq")
    export_checkpoint(tmp_path / "latq", tmp_path / "out")
    got = logits(tmp_path / "out")
    torch.testing.assert_close(got, logits(tmp_path / "latq"), rtol=0, atol=0)


@pytest.mark.parametrize(("family", "ignored"), [("gpt_oss", False), ("gpt_oss", True), ("granitemoe", False)])
def test_experts_that_transformers_does_not_merge_are_refused(
    family: str, ignored: bool, random_model: RandomModels, tmp_path: Path
) -> None:
    """A checkpoint has these experts one by one even where they are not quantized."""
    sizes = {"num_hidden_layers": 1, "num_local_experts": 4, "num_experts_per_tok": 2, "intermediate_size": 64}
    source, _ = random_model(family, f"exported-{family}-{ignored}", **sizes)
    left = ("lm_head", "model.layers.0.mlp.experts") if ignored else None
    quantize_checkpoint(Recipe("rtn", 4, group_size=32, ignore=left), source, tmp_path / "latq")
    with pytest.raises(UnsupportedModelError, match=r"experts: .*transformers merges.*found 4 single experts"):
        export_checkpoint(tmp_path / "latq", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_linears_that_transformers_renames_are_read(random_model: RandomModels, tmp_path: Path) -> None:
    """Hy-V4's `linear_gate` is `gate_proj` in transformers."""
    pytest.importorskip("compressed_tensors")
    latent = dict.fromkeys(("qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim", "index_head_dim"), 16)
    latent |= {"q_lora_rank": 32, "kv_lora_rank": 32, "index_topk": 8, "index_n_heads": 2, "num_key_value_heads": 4}
    sizes = {"num_hidden_layers": 1, "intermediate_size": 64, "mlp_layer_types": ["dense"], "hc_mult": 2}
    source, _ = random_model("hy_v4", "exported-renamed", **latent, **sizes)
    quantize_checkpoint(Recipe("rtn", 4, group_size=32), source, tmp_path / "latq")
    export_checkpoint(tmp_path / "latq", tmp_path / "out")
    model, info = AutoModelForCausalLM.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    packed = stored(tmp_path / "out")["model.layers.0.mlp.linear_gate.weight_packed"]
    assert torch.equal(model.get_submodule("model.layers.0.mlp.gate_proj").weight_packed, packed)


def test_joined_linears_are_refused() -> None:
    config = AutoConfig.for_model("minimax_m3_vl_text", **SMALL, moe_layer_freq=[0, 0], dense_intermediate_size=64)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    gate = "model.layers.0.mlp.gate_proj"
    with pytest.raises(UnsupportedModelError, match=r"here: model\.layers\.0\.mlp\.gate_proj: .*joins with others"):
        module_names(model, [gate, gate.replace("gate", "up")], "here")


def test_vllm_finds_the_scheme_of_every_linear(several: CheckpointPair) -> None:
    config_of = pytest.importorskip(
        "vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors"
    ).CompressedTensorsConfig
    reader = CheckpointReader(several.latq)
    schemes = {name: reader.config.scheme_for(name) for name in reader.shapes}
    schemes["model.layers.7.mlp.experts.0.down_proj"] = PACKED  # vLLM asks for the first expert
    config = config_of.from_config(quantization_config(schemes))
    config.packed_modules_mapping = MAPPING
    for name, scheme in schemes.items():
        module, _, leaf = name.rpartition(".")
        merged = f"{module}.{MERGED.get(leaf, leaf)}".removeprefix(".")
        for prefix in ("", "language_model."):
            found = config.get_scheme_dict(torch.nn.Linear(1, 1), prefix + merged)["weights"]
            assert (found.num_bits, found.group_size or -1) == scheme.code_layout()
    assert config.get_scheme_dict(torch.nn.Linear(1, 1), "vision_tower.layers.0.mlp.down_proj") is None


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
def test_vllm_allocates_what_is_stored(bits: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The CPU build has no kernel for 2, 3 and 8 bits: the parameters are allocated without a kernel."""
    module = pytest.importorskip(
        "vllm.model_executor.layers.quantization.compressed_tensors.schemes.compressed_tensors_wNa16"
    )
    kernel = type("NoKernel", (), {"__init__": lambda *_, **__: None})
    monkeypatch.setattr(module, "choose_mp_linear_kernel", lambda _: kernel)
    monkeypatch.setattr(module, "marlin_repeat_scales_on_all_ranks", lambda *_: False)
    monkeypatch.setattr("vllm.model_executor.parameter.get_tensor_model_parallel_rank", lambda: 0)
    monkeypatch.setattr("vllm.model_executor.parameter.get_tensor_model_parallel_world_size", lambda: 1)
    layer, rows, columns = torch.nn.Module(), 6, 160
    scheme = module.CompressedTensorsWNA16("group", bits, 32)
    scheme.create_weights(layer, rows, columns, [rows], columns, torch.bfloat16, lambda *_: None)
    ours = tensor_specs(LayerScheme("packed", bits, 32), rows, columns)
    assert layer.weight_packed.shape == ours["qweight"].shape
    assert layer.weight_scale.shape == ours["scales"].shape
    assert layer.weight_shape.dtype == torch.int64


@pytest.mark.parametrize(
    ("scheme", "found"),
    [
        (LayerScheme("packed", 4, 64, True), "found outliers"),
        (LayerScheme("packed", 4, 64, grid="midrise"), "found midrise"),
        (LayerScheme("trellis"), "found encoding trellis"),
        (LayerScheme("huffman"), "found encoding huffman"),
        (LayerScheme("packed", 4, 16), r"group size 32, 64, 128, or -1, .* found 16"),
    ],
)
def test_what_the_format_lacks_is_refused(
    scheme: LayerScheme, found: str, make_checkpoint: CheckpointMaker, tmp_path: Path
) -> None:
    name = f"refused-{scheme.encoding}-{scheme.group_size}-{scheme.outliers}-{scheme.grid}"
    pair = make_checkpoint(name, CheckpointConfig(PACKED, ("lm_head",), {DOWN: scheme}))
    with pytest.raises(ConfigError, match=f"{re.escape(DOWN)}: expected .*{found}.*Quantize the model again"):
        export_checkpoint(pair.latq, tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


def test_different_bits_of_merged_linears_are_refused(make_checkpoint: CheckpointMaker, tmp_path: Path) -> None:
    config = CheckpointConfig(PACKED, ("lm_head",), {QUERY: replace(PACKED, bits=8)})
    pair = make_checkpoint("refused-merged", config)
    with pytest.raises(ConfigError, match="vLLM makes one matrix of both"):
        export_checkpoint(pair.latq, tmp_path / "out")


def test_what_is_stored_beside_linears_is_refused(
    make_checkpoint: CheckpointMaker, mini_model: Path, tmp_path: Path
) -> None:
    beside = {"model.embed_tokens": replace(PACKED, bits=8)}
    pair = make_checkpoint("refused-embedding", CheckpointConfig(PACKED, (), beside=beside))
    with pytest.raises(ConfigError, match=r"embed_tokens: .*found an embedding.*without --embedding-bits"):
        export_checkpoint(pair.latq, tmp_path / "out")
    recipe = Recipe("rtn", 4, num_samples=4, seq_len=32, kv_cache_scheme="fp8")
    quantize_checkpoint(recipe, mini_model, tmp_path / "latq")
    with pytest.raises(ConfigError, match=r"scales of a KV cache.*without --kv-cache-scheme"):
        export_checkpoint(tmp_path / "latq", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_directory_in_use_is_refused(several: CheckpointPair, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "file").touch()
    with pytest.raises(CheckpointError, match="one that holds files"):
        export_checkpoint(several.latq, tmp_path / "out")
    (tmp_path / "new.partial").mkdir()
    with pytest.raises(CheckpointError, match=r"new\.partial"):
        export_checkpoint(several.latq, tmp_path / "new")
    with pytest.raises(CheckpointError, match="unquantized"):
        export_checkpoint(several.dense, tmp_path / "dense")


def test_encoder_is_refused(calibration_text: Path, tmp_path: Path) -> None:
    random_encoder(tmp_path / "source", "bert", calibration_text)
    quantize_checkpoint(Recipe("rtn", 4, group_size=32), tmp_path / "source", tmp_path / "latq")
    with pytest.raises(UnsupportedModelError, match="found an encoder"):
        export_checkpoint(tmp_path / "latq", tmp_path / "out")


def test_failed_export_leaves_nothing(several: CheckpointPair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any, **__: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(export, "copy_companions", full)
    with pytest.raises(LatqError, match="no space left"):
        export_checkpoint(several.latq, tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


def test_command(several: CheckpointPair, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out"
    assert main(["export", str(several.latq), "--to", "compressed-tensors", "-o", str(out)]) == 0
    assert capsys.readouterr().out == f"{out}\n"
    assert (out / "config.json").exists()
    assert main(["export", str(several.latq), "--to", "compressed-tensors", "-o", str(out)]) == 1
    assert "expected a new or empty directory" in capsys.readouterr().err


def matches(target: str) -> Callable[[str], bool]:
    return lambda name: bool(re.match(target.removeprefix("re:"), name))


def test_target_names_its_linears_only() -> None:
    inside = matches(target_of(["model.layers.1.mlp.experts.0.up_proj", "model.layers.11.mlp.up_proj", "lm_head"]))
    for name in ("lm_head", "model.language_model.layers.11.mlp.up_proj", "language_model.model.layers.11.mlp.up_proj"):
        assert inside(name)
    assert inside("model.layers.1.mlp.experts.27.up_proj")
    assert matches(target_of(["h.3.mlp.dense"]))("transformer.h.3.mlp.dense")
    for name in ("model.layers.1.mlp.up_proj", "model.layers.111.mlp.up_proj", "layers.11.mlp.up_proj.x"):
        assert not inside(name)
    assert not inside("model.visual.layers.11.mlp.up_proj")
