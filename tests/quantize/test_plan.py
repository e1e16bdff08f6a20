"""A run allocates and writes as many bytes as its plan says."""

import runpy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from vllm_latq.errors import ConfigError
from vllm_latq.quantize.allocation.model_lattice import ModelLattice
from vllm_latq.quantize.calibration import gram_sums
from vllm_latq.quantize.calibration.hessian import InputHessian
from vllm_latq.quantize.calibration.recomputed import MOST_ON_DISK
from vllm_latq.quantize.calibration.stream import Stream
from vllm_latq.quantize.model.decoder import Decoder
from vllm_latq.quantize.model.parts import model_parts
from vllm_latq.quantize.model.selection import quantized_linears
from vllm_latq.quantize.pipeline import quantize_checkpoint
from vllm_latq.quantize.plan import READS, plan
from vllm_latq.quantize.recipe import Recipe

FEW = {"num_samples": 4, "seq_len": 32}
GPTQ = Recipe("gptq", 4, group_size=16, **FEW)
LATQ = Recipe("latq", bits=4.0, **FEW)


@pytest.fixture(scope="module")
def source(random_model: Any) -> Path:
    """A model whose head is its embedding."""
    directory, _ = random_model("qwen3", "planned", tie_word_embeddings=True)
    return Path(directory)


@pytest.fixture
def tokens() -> torch.Tensor:
    return torch.randint(3, 2048, (FEW["num_samples"], FEW["seq_len"]))


def needs(recipe: Recipe, source: Path, **options: Any) -> dict[str, dict[str, int]]:
    found: dict[str, dict[str, int]] = plan(recipe, source, "cpu", **options)["needs"]
    return found


def loaded(module: nn.Module) -> int:
    """Return the bytes of a module's tensors that are in memory."""
    tensors = {id(one): one for one in (*module.parameters(), *module.buffers()) if not one.is_meta}
    return sum(one.nbytes for one in tensors.values())


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_weights_in_memory(dtype: str, source: Path) -> None:
    memory = needs(replace(GPTQ, dtype=dtype), source)["memory"]
    decoder = Decoder(source, "cpu", getattr(torch, dtype))
    sizes = []
    for index in range(len(decoder)):
        with decoder.block(index) as block:
            sizes.append(loaded(block))
    assert memory["block"] == max(sizes)
    with decoder.head():
        assert memory["outside"] == loaded(decoder.model)


@pytest.mark.parametrize("target", ["quantized", "original"])
def test_hessians_and_activations(target: str, source: Path, tokens: torch.Tensor) -> None:
    recipe = replace(GPTQ, target=target)
    decoder, placed = Decoder(source, "cpu"), []

    def place(hidden: torch.Tensor) -> torch.Tensor:
        placed.append(hidden.nbytes)
        return hidden

    stream = Stream(decoder, tokens, target, place=place)
    part = model_parts(decoder, decoder.linears(0))[0]
    with part.weights() as block, torch.no_grad():
        hessians = stream.inputs(part, block)
    memory = needs(recipe, source)["memory"]
    assert memory["hessians"] == sum(part.nbytes for hessian in hessians for part in sums(hessian))
    assert memory["gradients"] == 0
    assert memory["activations"] == sum(placed)


def sums(hessian: InputHessian) -> list[torch.Tensor]:
    return [hessian.matrix, *(hessian.drift.sums if hessian.drift else [])]


@pytest.mark.parametrize("widest", [4096, 48])
def test_statistics_of_the_whole_model(
    widest: int, source: Path, tokens: torch.Tensor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With gradients of all outputs together, and in several diagonal blocks."""
    monkeypatch.setattr(gram_sums, "LARGEST_BLOCK", widest)
    recipe, decoder, placed = replace(LATQ, ignore=()), Decoder(source, "cpu"), []

    def place(hidden: torch.Tensor) -> torch.Tensor:
        placed.append(hidden.nbytes)
        return hidden

    model = ModelLattice(decoder, quantized_linears(decoder, recipe), recipe, tmp_path / "statistics")
    model.collect(tokens, place)
    planned = needs(recipe, source, offload="disk")
    files = sorted((tmp_path / "statistics").iterdir())
    assert len(files) == len(decoder) + 1
    assert planned["disk"]["statistics"] == sum(map(tensor_bytes, files))
    assert planned["memory"]["hessians"] + planned["memory"]["gradients"] == max(map(tensor_bytes, files))
    assert "activations" not in planned["memory"]
    assert planned["disk"]["activations"] == sum(placed)


@pytest.mark.parametrize("options", [{}, {"kv_cache_scheme": "fp8"}, {"target": "original", "kv_cache_scheme": "fp8"}])
def test_activations_where_statistics_are_made_again(
    options: dict[str, Any], source: Path, tokens: torch.Tensor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Gradients wait while the text passes through the quantized blocks."""
    monkeypatch.setattr("vllm_latq.quantize.calibration.recomputed.MOST_ON_DISK", 0)
    recipe, decoder, placed = replace(LATQ, **options), Decoder(source, "cpu"), []

    def place(hidden: torch.Tensor) -> torch.Tensor:
        placed.append(hidden.nbytes)
        return hidden

    model = ModelLattice(decoder, quantized_linears(decoder, recipe), recipe, tmp_path / "statistics")
    model.collect(tokens, place)
    if recipe.passes_text:
        Stream(decoder, tokens, recipe.target, place=place)
    assert needs(recipe, source)["memory"]["activations"] == sum(placed)


def test_bytes_that_are_read(random_model: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tensors of the model, however often, within a third of the plan."""
    source, _ = random_model("qwen3", "planned-reads", tie_word_embeddings=True, num_hidden_layers=8)
    kept = needs(LATQ, source)
    assert kept["reads"]["statistics"] == 3 * kept["disk"]["statistics"] > 0
    monkeypatch.setattr("vllm_latq.quantize.calibration.recomputed.MOST_ON_DISK", 0)
    read, fetch = [], Decoder.fetch

    def counted(decoder: Decoder, stored: str) -> torch.Tensor:
        tensor = fetch(decoder, stored)
        read.append(tensor.nbytes)
        return tensor

    monkeypatch.setattr(Decoder, "fetch", counted)
    ignored = ("lm_head", *(f"{name}_proj" for name in ("q", "k", "v", "gate", "up", "down")))
    recipe = replace(LATQ, ignore=ignored)
    quantize_checkpoint(recipe, source, tmp_path / "out", device="cpu")
    planned = needs(recipe, source)
    assert planned["reads"]["model"] == pytest.approx(sum(read), rel=1 / 3)
    assert planned["reads"]["statistics"] == planned["disk"]["statistics"] == 0
    memory = planned["memory"]
    assert memory["peak"] < sum(memory.values()) - memory["peak"]


def test_formulas_of_large_mixtures(random_model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The page about them counts what a plan counts."""
    most_own = gram_sums.MOST_OWN
    monkeypatch.setattr(gram_sums, "MOST_OWN", 0)
    page = runpy.run_path(str(Path(__file__).parents[2] / "docs" / "scripts" / "mixtures.py"))
    source, _ = random_model("qwen3_moe", "planned-mixture", num_experts=4, num_experts_per_tok=2)
    mixture = page["Mixture"]("", hidden=32, intermediate=48, experts=4, chosen=2, sparse=2, blocks=2)
    ignored = ("lm_head", *(f"{name}_proj" for name in "qkvo"))
    found = needs(replace(LATQ, ignore=ignored, dtype="bfloat16"), source)
    assert found["memory"]["hessians"] == mixture.hessians
    assert found["memory"]["gradients"] == mixture.gradients
    assert found["disk"]["statistics"] == mixture.statistics
    assert found["memory"]["activations"] == mixture.activations(FEW["num_samples"] * FEW["seq_len"])
    assert page["PASSES"] == READS
    for model in page["MODELS"]:
        assert model.statistics > MOST_ON_DISK
        assert model.experts * model.gradients > most_own


def tensor_bytes(path: Path) -> int:
    """Return the bytes of a safetensors file apart from its header, whose length its first 8 bytes hold."""
    with path.open("rb") as file:
        header = int.from_bytes(file.read(8), "little")
    return path.stat().st_size - 8 - header


@pytest.mark.parametrize("ignore", [("lm_head",), ()], ids=["head-as-it-is", "head-quantized"])
def test_checkpoint(ignore: tuple[str, ...], source: Path, tmp_path: Path) -> None:
    recipe = Recipe("rtn", 4, group_size=16, ignore=ignore, **FEW)
    quantize_checkpoint(recipe, source, tmp_path / "out", device="cpu")
    tensors = [one for path in (tmp_path / "out").glob("*.safetensors") for one in load_file(path).values()]
    found = needs(recipe, source)
    assert found["disk"] == {"statistics": 0, "checkpoint": sum(one.nbytes for one in tensors)}
    assert found["memory"]["hessians"] == found["memory"]["activations"] == 0
    measured = needs(recipe, source, calibrated=True)["memory"]
    assert measured["hessians"] > 0 < measured["activations"]


def test_windows_longer_than_the_model(source: Path) -> None:
    with pytest.raises(ConfigError, match="seq_len: expected at most"):
        needs(replace(GPTQ, seq_len=1 << 20), source)


@pytest.mark.parametrize(("bits", "message"), [(2.1, "expected at least 3"), (12, "expected at most 9")])
def test_bits_that_no_widths_take(bits: float, message: str, source: Path, tmp_path: Path) -> None:
    """The plan refuses them as the run does, which has not read a text yet."""
    recipe = replace(LATQ, bits=bits, grid="group", group_size=16)
    with pytest.raises(ConfigError, match=message):
        plan(recipe, source, "cpu")
    with pytest.raises(ConfigError, match=message):
        quantize_checkpoint(recipe, source, tmp_path / "out", calibration="no-such-text", device="cpu")
