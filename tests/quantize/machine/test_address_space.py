"""A model larger than the address space that its quantization may take; loading it whole fails there."""

import json
import shutil
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from helpers.programs import run_program
from vllm_latq.format.verify import verify

# 16 blocks of 2.4 M weights in float32, in files of two blocks: 155 MB.
BLOCKS, PER_FILE, HIDDEN, INTERMEDIATE, VOCABULARY = 16, 2, 512, 1024, 2048
SHARE = 0.7


def write_model(directory: Path, tokenizer: Path, blocks: int) -> int:
    """A random Llama, written file by file as large models are; returns its size in bytes."""
    from transformers import AutoConfig

    sizes = {"hidden_size": HIDDEN, "intermediate_size": INTERMEDIATE, "vocab_size": VOCABULARY}
    heads = {"num_attention_heads": 8, "num_key_value_heads": 4, "num_hidden_layers": blocks}
    config = AutoConfig.for_model("llama", **sizes, **heads, tie_word_embeddings=True)
    config.save_pretrained(directory)
    for file in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(tokenizer / file, directory)
    generator = torch.Generator().manual_seed(0)
    shapes = {
        **dict.fromkeys(("self_attn.q_proj", "self_attn.o_proj"), (HIDDEN, HIDDEN)),
        **dict.fromkeys(("self_attn.k_proj", "self_attn.v_proj"), (HIDDEN // 2, HIDDEN)),
        **dict.fromkeys(("mlp.gate_proj", "mlp.up_proj"), (INTERMEDIATE, HIDDEN)),
        "mlp.down_proj": (HIDDEN, INTERMEDIATE),
    }
    files = {"model-0.safetensors": {"model.embed_tokens": (VOCABULARY, HIDDEN), "model.norm": (HIDDEN,)}}
    norms = dict.fromkeys(("input_layernorm", "post_attention_layernorm"), (HIDDEN,))
    for index in range(blocks):
        file = files.setdefault(f"model-{1 + index // PER_FILE}.safetensors", {})
        file.update({f"model.layers.{index}.{name}": shape for name, shape in (shapes | norms).items()})
    weight_map, size = {}, 0
    for name, content in files.items():
        tensors = {
            f"{module}.weight": torch.randn(shape, generator=generator) / shape[-1] ** 0.5
            for module, shape in content.items()
        }
        save_file(tensors, directory / name, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(tensors, name)
        size += sum(4 * tensor.numel() for tensor in tensors.values())
    index_file = directory / "model.safetensors.index.json"
    index_file.write_text(json.dumps({"metadata": {"total_size": size}, "weight_map": weight_map}))
    return size


@pytest.mark.skipif(sys.platform != "linux", reason="limits and /proc are Linux's")
def test_a_model_larger_than_the_address_space(
    mini_model: Path, calibration_text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Beyond what libraries take, the process may map 0.7 times the model's bytes."""
    write_model(tmp_path / "first", mini_model, 1)
    size = write_model(tmp_path / "large", mini_model, BLOCKS)
    # An arena per thread would reserve 64 MB of addresses each. Without a fixed threshold it is chance whether freed
    # tensors stay mapped: the peak was 70 to 137 MB then, and is 87 MB so.
    environment = {"MALLOC_ARENA_MAX": "1", "MALLOC_MMAP_THRESHOLD_": "65536"}
    for name, value in {**environment, "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}.items():
        monkeypatch.setenv(name, value)
    arguments = [tmp_path / "first", tmp_path / "large", tmp_path / "out", calibration_text, int(SHARE * size)]
    done = run_program("quantize_in_small_address_space.py", *arguments, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "Cannot allocate memory" in done.stdout
    assert list(verify(tmp_path / "out")) == []
