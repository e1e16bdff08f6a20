"""Families of models: walked block by block exactly, quantized, and loaded again with the dequantized weights' logits.

Nothing in the package names these families: their parts are found by structure.
"""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, initialization
from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES
from transformers.models.falcon.modeling_falcon import FalconLinear
from transformers.models.falcon_h1.modeling_falcon_h1 import FalconH1Model, FalconH1PreTrainedModel
from transformers.models.llama.modeling_llama import LlamaAttention
from transformers.models.llama4.modeling_llama4 import Llama4Router

from helpers.random_models import SMALL_V4
from helpers.walk import walk
from vllm_latq.cli.main import main
from vllm_latq.errors import CheckpointError, LatqError, UnsupportedModelError
from vllm_latq.format.reader import CheckpointReader
from vllm_latq.format.verify import verify
from vllm_latq.quantize.certificate.certificate import verify_certificate
from vllm_latq.quantize.model.anatomy import is_linear
from vllm_latq.quantize.model.decoder import Decoder
from vllm_latq.quantize.model.loading import load_model
from vllm_latq.quantize.model.selection import never_quantized
from vllm_latq.quantize.pipeline import quantize_checkpoint
from vllm_latq.quantize.plan import plan
from vllm_latq.quantize.recipe import Recipe

LLAMA_LIKE = (
    *("llama", "mistral", "qwen2", "qwen3", "gemma", "gemma2", "gemma3_text", "granite", "olmo", "olmo2", "olmo3"),
    *("stablelm", "cohere", "cohere2", "helium", "smollm3", "exaone4", "ernie4_5", "seed_oss", "diffllama"),
)
# Fused or differently named linears, blocks that return tuples, positions that are learned or added to the scores.
OTHERS = {
    **{"phi3": ("self_attn.o_proj", "self_attn.qkv_proj", "mlp.gate_up_proj", "mlp.down_proj")},
    **{"phi": ("q_proj", "k_proj", "v_proj", "dense", "fc1", "fc2")},
    **{"glm4": ("q_proj", "k_proj", "v_proj", "o_proj", "gate_up_proj", "down_proj")},
    **{"starcoder2": ("q_proj", "k_proj", "v_proj", "o_proj", "c_fc", "c_proj")},
    **{"nemotron": ("q_proj", "k_proj", "v_proj", "o_proj", "up_proj", "down_proj")},
    **{"gpt_neox": ("query_key_value", "dense", "dense_h_to_4h", "dense_4h_to_h")},
    **{"bloom": ("query_key_value", "dense", "dense_h_to_4h", "dense_4h_to_h")},
    **{"falcon": ("query_key_value", "dense", "dense_h_to_4h", "dense_4h_to_h")},
    **{"persimmon": ("query_key_value", "dense", "dense_h_to_4h", "dense_4h_to_h")},
    **{"mpt": ("Wqkv", "out_proj", "up_proj", "down_proj")},
    **{"gptj": ("k_proj", "v_proj", "q_proj", "out_proj", "fc_in", "fc_out")},
    **{"codegen": ("qkv_proj", "out_proj", "fc_in", "fc_out")},
    **{"opt": ("k_proj", "v_proj", "q_proj", "out_proj", "fc1", "fc2")},
    # A bias that two modules share, and that is stored once.
    **{"bert-generation": ("query", "key", "value", "attention.output.dense", "intermediate.dense", "output.dense")},
    **{"biogpt": ("k_proj", "v_proj", "q_proj", "out_proj", "fc1", "fc2")},
}
LLAMA_LINEARS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
RECIPE = Recipe("gptq", 4, group_size=16, num_samples=4, seq_len=32)
TOKENS = torch.randint(3, 2048, (3, 20), generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("model_type", [*LLAMA_LIKE, *OTHERS])
def test_walk_equals_transformers(model_type: str, random_model: Any) -> None:
    directory, model = random_model(model_type)
    decoder = Decoder(directory, "cpu")
    for batch_size in (2, 3):
        with torch.no_grad():
            expected = torch.cat([model(tokens).logits for tokens in TOKENS.split(batch_size)])
        torch.testing.assert_close(walk(decoder, TOKENS, batch_size), expected, rtol=0, atol=0)
    assert all(parameter.device.type == "meta" for parameter in decoder.model.parameters())


def test_buffers_that_the_model_computes_for_its_blocks(
    random_model: Any, calibration_text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Falcon-H1's multipliers; what is loaded already stays as it is, whatever else the model would initialize."""
    sizes = {"mamba_d_ssm": 64, "mamba_n_heads": 4, "mamba_d_head": 16, "mamba_d_state": 8, "mamba_n_groups": 2}
    source, model = random_model("falcon_h1", ssm_multipliers=[0.5, 0.7, 0.9, 1.1, 1.3], **sizes)
    with torch.no_grad():
        expected = model(TOKENS).logits
    own = FalconH1PreTrainedModel._init_weights
    touched: list[str] = []

    def more(self: Any, module: Any) -> None:
        own(self, module)
        if isinstance(module, FalconH1Model):
            for block in module.layers:
                touched.append("meta" if block.feed_forward.gate_proj.weight.is_meta else "loaded")
                initialization.zeros_(block.feed_forward.gate_proj.weight)

    monkeypatch.setattr(FalconH1PreTrainedModel, "_init_weights", more)
    torch.testing.assert_close(walk(Decoder(source, "cpu"), TOKENS, len(TOKENS)), expected, rtol=0, atol=0)
    assert "loaded" in touched
    quantize_checkpoint(RECIPE, source, tmp_path / "out", calibration=str(calibration_text))
    assert list(verify(tmp_path / "out")) == []
    assert list(verify_certificate(tmp_path / "out", source, str(calibration_text))) == []


@pytest.mark.parametrize("model_type", ["modernbert-decoder", "roberta", "bert"])
def test_head_of_several_layers(model_type: str, random_model: Any) -> None:
    """Between blocks and logits stands more than a norm, beside the base model; none of it is a tower."""
    directory, model = random_model(model_type, is_decoder=True)
    with torch.no_grad():
        expected = model(TOKENS).logits
    torch.testing.assert_close(walk(Decoder(directory, "cpu"), TOKENS, len(TOKENS)), expected, rtol=0, atol=0)


JOINED = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 2,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "layer_types": ["linear_attention", "full_attention"],
}


def test_what_transformers_joins_is_stored_as_it_was(
    random_model: Any, make_dense_twin: Any, calibration_text: Path, tmp_path: Path
) -> None:
    """OLMo-Hybrid's convolutions of q, k and v, which transformers makes one of."""
    source, model = random_model("olmo_hybrid", **JOINED)
    with torch.no_grad():
        expected = model(TOKENS).logits
    torch.testing.assert_close(walk(Decoder(source, "cpu"), TOKENS, len(TOKENS)), expected, rtol=0, atol=0)
    quantize_checkpoint(RECIPE, source, tmp_path / "out", calibration=str(calibration_text))
    assert list(verify(tmp_path / "out")) == []
    assert list(verify_certificate(tmp_path / "out", source, str(calibration_text))) == []
    stored, written = load_file(source / "model.safetensors"), CheckpointReader(tmp_path / "out").store
    convolutions = [name for name in stored if "conv1d" in name]
    assert len(convolutions) == 3
    assert [name for name in written.names() if "conv1d" in name] == convolutions
    assert all(torch.equal(written.get(name), stored[name]) for name in convolutions)
    assert not any("conv" in name for name in never_quantized(Decoder(source, "cpu")))
    dense = make_dense_twin(tmp_path / "out", tmp_path / "dense")
    (loaded, _), (same, _) = (load_model(folder, "cpu") for folder in (tmp_path / "out", dense))
    with torch.no_grad():
        torch.testing.assert_close(loaded(TOKENS).logits, same(TOKENS).logits, rtol=0, atol=0)


def test_a_missing_part_of_what_is_joined_is_named(random_model: Any) -> None:
    source, _ = random_model("olmo_hybrid", "olmo-incomplete", **JOINED)
    tensors = load_file(source / "model.safetensors")
    del tensors["model.layers.0.linear_attn.k_conv1d.weight"]
    save_file(tensors, source / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match=r"expected a tensor model\.layers\.0\.linear_attn\.(k_)?conv1d"):
        Decoder(source, "cpu")


@pytest.mark.parametrize("shape", [(), (16,), (16, 1, 3)])
def test_parts_that_do_not_fit_each_other_are_refused(
    shape: tuple[int, ...], random_model: Any, tmp_path: Path
) -> None:
    source, _ = random_model("olmo_hybrid", **JOINED)
    shutil.copytree(source, tmp_path / "model")
    tensors = load_file(source / "model.safetensors")
    tensors["model.layers.0.linear_attn.k_conv1d.weight"] = torch.zeros(shape)
    save_file(tensors, tmp_path / "model" / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(UnsupportedModelError, match=r"conv1d\.weight: expected shape \[rows, .*found \["):
        Decoder(tmp_path / "model", "cpu")


def test_parts_of_several_dtypes_are_refused(random_model: Any, tmp_path: Path) -> None:
    source, _ = random_model("olmo_hybrid", **JOINED)
    shutil.copytree(source, tmp_path / "model")
    tensors = load_file(source / "model.safetensors")
    part = "model.layers.0.linear_attn.k_conv1d.weight"
    tensors[part] = tensors[part].to(torch.int64)
    save_file(tensors, tmp_path / "model" / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(
        UnsupportedModelError, match=r"k_conv1d\.weight: expected torch\.float32 like .*found torch\.int"
    ):
        quantize_checkpoint(Recipe("rtn", 4, group_size=16), tmp_path / "model", tmp_path / "out")


def test_linears_outside_the_blocks_are_ignored(random_model: Any) -> None:
    """OPT's projections between embeddings and blocks: vLLM would take them for quantized."""
    directory, _ = random_model("opt", "projected", word_embed_proj_dim=16)
    projections = ("model.decoder.project_out", "model.decoder.project_in")
    assert set(never_quantized(Decoder(directory, "cpu"))) == set(projections)


@pytest.mark.parametrize("model_type", ["gemma2", "gemma3_text", "granite", "olmo2", "cohere2", *OTHERS])
def test_quantized_and_loaded_again(
    model_type: str, random_model: Any, make_dense_twin: Any, calibration_text: Path, tmp_path: Path
) -> None:
    directory, _ = random_model(model_type)
    leaves = OTHERS.get(model_type, LLAMA_LINEARS)
    planned = [layer["name"] for layer in plan(RECIPE, directory)["layers"]]
    assert len(planned) == 2 * len(leaves)
    assert all(any(name.endswith(leaf) for leaf in leaves) for name in planned)
    quantize_checkpoint(RECIPE, directory, tmp_path / "out", calibration=str(calibration_text))
    assert list(verify(tmp_path / "out")) == []
    reader = CheckpointReader(tmp_path / "out")
    assert sorted(reader.shapes) == sorted(planned)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32)
    dense = AutoModelForCausalLM.from_pretrained(make_dense_twin(tmp_path / "out", tmp_path / "dense"))
    with torch.no_grad():
        got, expected = loaded(TOKENS).logits, dense(TOKENS).logits
    assert expected.std() > 0.01
    torch.testing.assert_close(got, expected, rtol=0, atol=0)


def test_head_under_another_name(random_model: Any, make_dense_twin: Any, tmp_path: Path) -> None:
    """transformers calls GPT-NeoX's `embed_out` `lm_head`: either name ignores it, and it can be quantized."""
    directory, _ = random_model("gpt_neox")
    names = {
        ignore: [layer["name"] for layer in plan(Recipe("rtn", 4, group_size=16, ignore=ignore), directory)["layers"]]
        for ignore in (("lm_head",), ("embed_out",), ("dense",))
    }
    assert names["lm_head",] == names["embed_out",]
    assert "embed_out" in names["dense",]
    quantize_checkpoint(Recipe("rtn", 4, group_size=16, ignore=("dense",)), directory, tmp_path / "out")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32)
    dense = AutoModelForCausalLM.from_pretrained(make_dense_twin(tmp_path / "out", tmp_path / "dense"))
    with torch.no_grad():
        torch.testing.assert_close(loaded(TOKENS).logits, dense(TOKENS).logits, rtol=0, atol=0)


def test_mixers_of_mamba_1_stay_as_they_are(random_model: Any, tmp_path: Path) -> None:
    """vLLM has no quantized linears for them; what stands beside them in a hybrid model is quantized."""
    sizes = {"attn_layer_period": 2, "attn_layer_offset": 1, "expert_layer_period": 9, "expert_layer_offset": 8}
    mamba = {"mamba_d_state": 8, "mamba_d_conv": 4, "mamba_expand": 2, "mamba_dt_rank": 8, "use_mamba_kernels": False}
    source, _ = random_model("jamba", num_experts=2, **sizes, **mamba)
    quantize_checkpoint(Recipe("rtn", 4, group_size=-1), source, tmp_path / "out")
    names = CheckpointReader(tmp_path / "out").shapes.keys()
    assert any(".self_attn." in name for name in names)
    assert any(".layers.0.feed_forward." in name for name in names)
    assert not any(".mamba." in name for name in names)
    whole, _ = random_model("mamba", state_size=8, time_step_rank=8)
    with pytest.raises(LatqError, match="expected"):
        quantize_checkpoint(Recipe("rtn", 4, group_size=-1), whole, tmp_path / "mamba")


@pytest.mark.skipif("deepseek_v4" not in CONFIG_MAPPING_NAMES, reason="this transformers does not know DeepSeek-V4")
def test_linears_for_other_purposes_stay_as_they_are(
    random_model: Any, make_dense_twin: Any, calibration_text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """DeepSeek-V4: the grouped projection, compressors, indexers, hash tables and mixers of streams."""
    source, model = random_model("deepseek_v4", **SMALL_V4)
    with torch.no_grad():
        expected = model(TOKENS).logits
    torch.testing.assert_close(walk(Decoder(source, "cpu"), TOKENS, len(TOKENS)), expected, rtol=0, atol=0)
    options = ["--method", "gptq", "--group-size", "8", "--num-samples", "4", "--seq-len", "32"]
    arguments = ["quantize", str(source), str(tmp_path / "out"), *options, "--calibration", str(calibration_text)]
    assert main([*arguments, "--dry-run"]) == 0
    left = [line for line in capsys.readouterr().out.splitlines() if line.startswith("unquantized: ")]
    special = ("wo_a", "compressor.wkv", "indexer.wq_b", "hc_attn_fn", "hc_head.hc_fn", "gate.tid2eid")
    assert [part for part in special if not any(part in line for line in left)] == []
    assert main(arguments) == 0
    names = CheckpointReader(tmp_path / "out").shapes.keys()
    attention = {name.rsplit(".", 1)[1] for name in names if ".attn." in name}
    assert attention == {"wq_a", "wq_b", "wkv", "wo_b"}
    assert not any(part in name for name in names for part in ("compressor", "indexer", "gate", "hc_"))
    assert list(verify(tmp_path / "out")) == []
    dense = make_dense_twin(tmp_path / "out", tmp_path / "dense")
    (tmp_path / "short.txt").write_text(calibration_text.read_text()[:2000])
    evaluate = ["eval", "--text", str(tmp_path / "short.txt"), "--seq-len", "64", "--json"]
    found = []
    for folder in (tmp_path / "out", dense):
        capsys.readouterr()
        assert main([*evaluate, str(folder)]) == 0
        found.append(json.loads(capsys.readouterr().out)["perplexity"])
    assert found[0] == pytest.approx(found[1], rel=1e-5)


class Doubled(nn.Linear):
    """A linear that computes more than a product."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 2 * super().forward(x)


def test_a_subclass_with_its_own_forward_stays_as_it_is(
    random_model: Any, make_dense_twin: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = LlamaAttention.__init__

    def doubled(self: Any, **arguments: Any) -> None:
        own(self, **arguments)
        self.o_proj.__class__ = Doubled

    monkeypatch.setattr(LlamaAttention, "__init__", doubled)
    source, _ = random_model("llama", "doubled")
    recipe = Recipe("rtn", 4, group_size=16)
    left = [entry["name"] for entry in plan(recipe, source)["unquantized"]]
    assert [f"model.layers.{index}.self_attn.o_proj.weight" for index in (0, 1)] == left[:2]
    quantize_checkpoint(recipe, source, tmp_path / "out")
    reader = CheckpointReader(tmp_path / "out")
    assert not any("o_proj" in name for name in reader.shapes)
    assert {"model.layers.0.self_attn.o_proj", "model.layers.1.self_attn.o_proj"} <= set(reader.config.ignore)
    dense = make_dense_twin(tmp_path / "out", tmp_path / "dense")
    (loaded, _), (same, _) = (load_model(folder, "cpu") for folder in (tmp_path / "out", dense))
    with torch.no_grad():
        torch.testing.assert_close(loaded(TOKENS).logits, same(TOKENS).logits, rtol=0, atol=0)


@pytest.mark.parametrize(
    ("kind", "plain"),
    [(nn.Linear, True), (FalconLinear, True), (Doubled, False), (Llama4Router, False), (nn.Bilinear, False)],
)
def test_a_linear_computes_a_product(kind: Any, plain: bool) -> None:
    """Also of the same class with a forward of its own: transformers' Falcon writes the product out."""
    with torch.device("meta"):
        made = kind(AutoConfig.for_model("llama4_text")) if kind is Llama4Router else None
        made = made or (kind(6, 7, 8) if kind is nn.Bilinear else kind(6, 7))
    assert is_linear(made) == plain


REFUSED = [
    ("gpt2", {}, r"transformer\.h: expected blocks with linear layers, found .*Conv1D"),
    ("t5", {}, "expected a causal language model"),
    ("qwen2_5_omni", {}, r"config\.json: expected a causal language model|expected one language model"),
    ("chameleon", {}, "expected"),
    ("llava", {"architectures": 5}, "expected a tensor|expected a model configuration"),
    ("llama", {"num_attention_heads": "many"}, "expected a model configuration"),
]


@pytest.mark.parametrize(("model_type", "changes", "message"), REFUSED)
def test_what_is_not_understood_is_named(
    model_type: str, changes: dict[str, Any], message: str, tmp_path: Path
) -> None:
    AutoConfig.for_model(model_type).save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | changes))
    save_file({"x": torch.zeros(1)}, tmp_path / "model.safetensors")
    with pytest.raises(LatqError, match=message):
        Decoder(tmp_path, "cpu")
