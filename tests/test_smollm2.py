"""The example that converts a GGUF file to a model directory: a small Llama, stored as llama.cpp does, and back."""

import json
import runpy
from pathlib import Path

import gguf
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

SAVE = runpy.run_path(str(Path(__file__).parents[1] / "serving_examples" / "smollm2.py"))["save"]
CONFIG = LlamaConfig(
    vocab_size=2048,
    hidden_size=64,
    intermediate_size=96,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=512,
    tie_word_embeddings=True,
    rope_parameters={"rope_theta": 100_000.0, "rope_type": "default"},
)


@pytest.fixture
def llama() -> LlamaForCausalLM:
    torch.manual_seed(0)
    return LlamaForCausalLM(CONFIG).to(torch.bfloat16)


def halves_interleaved(weight: torch.Tensor, heads: int) -> torch.Tensor:
    """Return the rows of q and k in llama.cpp's order: pairs that are rotated together are neighbours."""
    return weight.reshape(heads, 2, -1, weight.shape[1]).transpose(1, 2).reshape(weight.shape)


@pytest.fixture
def stored(llama: LlamaForCausalLM, mini_model: Path, tmp_path: Path) -> Path:
    """Write the Llama as a GGUF file, in float32, with the bundled model's tokenizer."""
    bpe = json.loads((mini_model / "tokenizer.json").read_text())["model"]
    writer = gguf.GGUFWriter(tmp_path / "model.gguf", "llama")
    writer.add_block_count(CONFIG.num_hidden_layers)
    writer.add_context_length(CONFIG.max_position_embeddings)
    writer.add_embedding_length(CONFIG.hidden_size)
    writer.add_feed_forward_length(CONFIG.intermediate_size)
    writer.add_head_count(CONFIG.num_attention_heads)
    writer.add_head_count_kv(CONFIG.num_key_value_heads)
    writer.add_layer_norm_rms_eps(CONFIG.rms_norm_eps)
    writer.add_rope_freq_base(CONFIG.rope_parameters["rope_theta"])
    writer.add_vocab_size(CONFIG.vocab_size)
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(sorted(bpe["vocab"], key=bpe["vocab"].get))
    writer.add_token_merges([" ".join(pair) for pair in bpe["merges"]])
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, CONFIG.num_hidden_layers)
    heads = {"q_proj": CONFIG.num_attention_heads, "k_proj": CONFIG.num_key_value_heads}
    for name, tensor in llama.model.state_dict(prefix="model.").items():
        count = heads.get(name.split(".")[-2])
        tensor = tensor.float() if count is None else halves_interleaved(tensor.float(), count)
        writer.add_tensor(f"{names.get_name(name.removesuffix('.weight'))}.weight", tensor.numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return tmp_path / "model.gguf"


def test_gguf_round_trip_restores_the_model(
    stored: Path, llama: LlamaForCausalLM, mini_model: Path, tmp_path: Path
) -> None:
    SAVE(stored, tmp_path / "model")
    saved, original = load_file(tmp_path / "model" / "model.safetensors"), llama.model.state_dict(prefix="model.")
    assert saved.keys() == original.keys()
    for name, tensor in saved.items():
        assert tensor.dtype == torch.bfloat16
        assert torch.equal(tensor, original[name]), name
    config = json.loads((tmp_path / "model" / "config.json").read_text())
    assert "quantization_config" not in config
    assert config["rope_parameters"]["rope_theta"] == CONFIG.rope_parameters["rope_theta"]
    ours, theirs = (AutoTokenizer.from_pretrained(path) for path in (tmp_path / "model", mini_model))
    text = "def open(file, mode='r'): files"
    assert ours(text).input_ids == theirs(text).input_ids
    # Digits are taken one by one, and blanks before one stay together.
    assert ours.tokenize("file    2018")[-5:] == ["ĠĠĠĠ", "2", "0", "1", "8"]
