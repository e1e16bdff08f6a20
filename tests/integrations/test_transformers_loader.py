"""`AutoModelForCausalLM.from_pretrained` on a checkpoint gives exactly the logits of the dequantized model."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from helpers.checkpoints import edit_json, list_twice
from vllm_latq.errors import CheckpointError, ConfigError
from vllm_latq.integrations.transformers import LatqLinear

IDS = torch.arange(3, 43).reshape(2, 20)
UP = "model.layers.1.mlp.up_proj"


def logits(directory: Path, **options: object) -> torch.Tensor:
    model = AutoModelForCausalLM.from_pretrained(directory, **options)
    with torch.no_grad():
        return model(IDS).logits


@pytest.mark.parametrize("name", ["ssqr", "hptq", "mixed"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_logits_equal_the_dequantized_model(name: str, dtype: torch.dtype, request: pytest.FixtureRequest) -> None:
    pair = request.getfixturevalue(f"{name}_pair")
    got, expected = logits(pair.latq, dtype=dtype), logits(pair.dense, dtype=dtype)
    assert expected.std() > 0.5
    torch.testing.assert_close(got, expected, rtol=0, atol=0)


@pytest.mark.parametrize(
    "imports",
    [
        *("vllm_latq, transformers.modeling_utils", "transformers.modeling_utils, vllm_latq"),
        "vllm_latq, transformers.quantizers.auto",
        "vllm_latq, transformers.integrations.finegrained_fp8, transformers.modeling_utils",
    ],
)
def test_registered_in_any_order_of_imports(imports: str) -> None:
    code = f"import {imports}; assert 'latq' in transformers.quantizers.auto.AUTO_QUANTIZER_MAPPING"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_without_the_import_transformers_names_it(ssqr_checkpoint: Path) -> None:
    """Without an error, the model would have random weights."""
    load = f"transformers.AutoModelForCausalLM.from_pretrained({str(ssqr_checkpoint)!r})"
    plain = subprocess.run([sys.executable, "-c", f"import transformers; {load}"], capture_output=True, text=True)
    assert plain.returncode == 1
    assert "ValueError" in plain.stderr.splitlines()[-1]
    assert "run `import vllm_latq` before transformers loads it" in plain.stderr.splitlines()[-1]
    model = AutoModelForCausalLM.from_pretrained(ssqr_checkpoint)  # this process has imported it
    assert isinstance(model.get_submodule(UP), LatqLinear)
    assert not hasattr(model.config, "transformers_weights")


def test_layers_dequantize_exactly(biased_pair: tuple[Path, Path]) -> None:
    model = AutoModelForCausalLM.from_pretrained(biased_pair[0], dtype=torch.float32)
    with torch.no_grad():
        got = model.dequantize()(IDS).logits
    torch.testing.assert_close(got, logits(biased_pair[1], dtype=torch.float32), rtol=0, atol=0)


@pytest.mark.parametrize("name", ["ssqr", "hptq"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_cast_leaves_the_stored_weight_unchanged(name: str, dtype: torch.dtype, request: pytest.FixtureRequest) -> None:
    model = AutoModelForCausalLM.from_pretrained(request.getfixturevalue(f"{name}_pair")[0])
    layer = model.model.layers[1].mlp.down_proj
    before = layer.dense_weight(torch.float32)
    layer.to(dtype)
    torch.testing.assert_close(layer.dense_weight(torch.float32), before, rtol=0, atol=0)
    assert layer(torch.ones(2, layer.in_features, dtype=dtype)).dtype == dtype


def test_cast_converts_a_dense_weight(biased_pair: tuple[Path, Path]) -> None:
    """The stored trellis is gone then, and a product with another dtype would convert the weight each time."""
    layer = AutoModelForCausalLM.from_pretrained(biased_pair[0], dtype=torch.float32).model.layers[1].mlp.down_proj
    before = layer.dense_weight(torch.float32)
    layer.to(torch.bfloat16)
    assert layer.dense.dtype == torch.bfloat16
    assert torch.equal(layer.dense_weight(torch.float32), before.bfloat16().float())
    assert layer(torch.ones(2, layer.in_features, dtype=torch.bfloat16)).dtype == torch.bfloat16


def test_default_dtype_comes_from_the_config(ssqr_pair: tuple[Path, Path]) -> None:
    model = AutoModelForCausalLM.from_pretrained(ssqr_pair[0])
    assert model.dtype == torch.bfloat16
    assert model.model.layers[0].mlp.up_proj.scales.dtype == torch.bfloat16


def test_quantized_linears_stay_packed(mixed_pair: tuple[Path, Path]) -> None:
    model = AutoModelForCausalLM.from_pretrained(mixed_pair[0])
    quantized = [name for name, module in model.named_modules() if isinstance(module, LatqLinear)]
    assert len(quantized) == 4 * 7 + 2
    assert {"lm_head", "model.embed_tokens"} < set(quantized)
    assert not any(isinstance(module, torch.nn.Linear) for module in model.modules())


def test_tied_head_stays_dense(ssqr_pair: tuple[Path, Path]) -> None:
    model = AutoModelForCausalLM.from_pretrained(ssqr_pair[0])
    assert model.lm_head.weight is model.model.embed_tokens.weight


@pytest.mark.parametrize("name", ["ssqr", "hptq"])
def test_dequantize(name: str, request: pytest.FixtureRequest) -> None:
    pair = request.getfixturevalue(f"{name}_pair")
    model = AutoModelForCausalLM.from_pretrained(pair.latq, dtype=torch.float32).dequantize()
    assert not any(isinstance(module, LatqLinear) for module in model.modules())
    with torch.no_grad():
        torch.testing.assert_close(model(IDS).logits, logits(pair.dense, dtype=torch.float32), rtol=0, atol=0)


def test_generate(ssqr_pair: tuple[Path, Path]) -> None:
    both = [AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32) for path in ssqr_pair]
    first, second = (model.generate(IDS[:1], max_new_tokens=8, do_sample=False) for model in both)
    assert first.shape == (1, 28)
    assert torch.equal(first, second)


def damaged(source: Path, target: Path, change: str) -> Path:
    """Return a copy of a checkpoint without the tensor of that name, or damaged in the way that `change` names."""
    shutil.copytree(source, target)
    file = target / "model.safetensors"
    tensors = load_file(file)
    tensors.pop(change, None)
    if change == "not finite":
        tensors[f"{UP}.scales"][3, 1] = torch.nan
    save_file(tensors, file, metadata={"format": "pt"})
    if change == "twice":
        list_twice(file)
    if change == "unknown key":
        edit_json(target / "config.json", lambda config: config["quantization_config"].update(zero_points=True))
    if change == "large vocabulary":
        edit_json(target / "config.json", lambda config: config.update(vocab_size=1 << 40))
    if change == "own head":
        edit_json(target / "config.json", lambda config: config.update(tie_word_embeddings=False))
    return target


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (f"{UP}.scales", CheckpointError, r"layers\.1\.mlp\.up_proj\.scales: .*found no such tensor"),
        ("model.embed_tokens.weight", CheckpointError, r"^model\.embed_tokens\.weight: expected .* found none\."),
        ("model.layers.1.input_layernorm.weight", CheckpointError, r"^model\.layers\.1\.input_layernorm\.weight: "),
        ("own head", CheckpointError, r"^lm_head\.weight: expected a tensor in the checkpoint, found none"),
        ("not finite", CheckpointError, r"layers\.1\.mlp\.up_proj\.scales: expected scales .* row 3, group 1"),
        ("large vocabulary", CheckpointError, r"^model\.embed_tokens\.weight: expected shape \(1099511627776, 256\)"),
        ("twice", CheckpointError, r"model\.safetensors: expected a header with each key once"),
        ("unknown key", ConfigError, "unknown zero_points"),
    ],
)
def test_bad_checkpoints_are_refused(
    change: str, error: type, message: str, ssqr_pair: tuple[Path, Path], tmp_path: Path
) -> None:
    with pytest.raises(error, match=message):
        AutoModelForCausalLM.from_pretrained(damaged(ssqr_pair[0], tmp_path / "bad", change))


def test_saving_is_refused(ssqr_pair: tuple[Path, Path], tmp_path: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(ssqr_pair[0])
    with pytest.raises(ValueError, match="not serializable"):
        model.save_pretrained(tmp_path / "copy")
