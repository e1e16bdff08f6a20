"""Grams of inputs and output gradients: equal to those of the whole model in one piece."""

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from helpers.drawn import one_backward_pass
from vllm_latq.quantize.calibration.fisher import Backpropagation, collect_statistics
from vllm_latq.quantize.calibration.fisher_files import StatisticsFiles
from vllm_latq.quantize.calibration.windows import load_samples
from vllm_latq.quantize.lattice.grams import LayerStatistics
from vllm_latq.quantize.model.decoder import Decoder

SAMPLES, TOKENS, SEED = 12, 64, 3


@pytest.fixture(scope="module")
def samples(mini_model: Path, calibration_text: Path) -> torch.Tensor:
    return load_samples(AutoTokenizer.from_pretrained(mini_model), str(calibration_text), SAMPLES, TOKENS).tokens


@pytest.fixture(scope="module")
def collected(mini_model: Path, samples: torch.Tensor, tmp_path_factory: pytest.TempPathFactory) -> StatisticsFiles:
    decoder = Decoder(mini_model, "cpu")
    wanted = {name: linear for index in range(len(decoder)) for name, linear in decoder.linears(index).items()}
    files = StatisticsFiles(tmp_path_factory.mktemp("statistics"))
    collect_statistics(Backpropagation(decoder, samples, wanted | decoder.head_linears, SEED), files)
    return files


@pytest.fixture(scope="module")
def expected(mini_model: Path, samples: torch.Tensor) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """Linear -> (inputs, gradients of its outputs), all tokens, by one ordinary backward pass of the whole model."""
    model = AutoModelForCausalLM.from_pretrained(mini_model, dtype=torch.float32)
    return one_backward_pass(model, samples, SEED)


def all_layers(files: StatisticsFiles) -> dict[str, LayerStatistics]:
    return {name: layer for block in range(5) for name, layer in files.read(block).items()}


def test_grams_are_those_of_one_backward_pass(
    collected: StatisticsFiles, expected: dict[str, tuple[torch.Tensor, torch.Tensor]]
) -> None:
    layers = all_layers(collected)
    assert layers.keys() == expected.keys()
    tokens = SAMPLES * TOKENS
    for name, (inputs, gradients) in expected.items():
        assert layers[name].tokens == tokens
        torch.testing.assert_close(layers[name].inputs, inputs.T @ inputs / tokens, rtol=1e-3, atol=1e-5)
        (gram,) = layers[name].outputs
        reference = gradients.T @ gradients / tokens
        assert float((gram - reference).norm()) < 1e-3 * float(reference.norm())


def test_linears_of_one_input_share_it(collected: StatisticsFiles) -> None:
    groups = {name: layer.leader.split(".")[-1] for name, layer in collected.read(0).items()}
    by_leaf = {name.split(".")[-1]: group for name, group in groups.items()}
    assert by_leaf == {
        **dict.fromkeys(("q_proj", "k_proj", "v_proj"), "q_proj"),
        **dict.fromkeys(("gate_proj", "up_proj"), "gate_proj"),
        "o_proj": "o_proj",
        "down_proj": "down_proj",
    }


def test_files_that_are_there_are_left_alone(collected: StatisticsFiles, mini_model: Path, tmp_path: Path) -> None:
    files = StatisticsFiles(tmp_path)
    files.write(3, collected.read(2))
    decoder = Decoder(mini_model, "cpu")
    name = "model.layers.1.mlp.down_proj"
    tokens = torch.arange(40).view(1, 40)
    collect_statistics(Backpropagation(decoder, tokens, {name: decoder.linears(1)[name]}, SEED), files)
    assert files.read(3).keys() == collected.read(2).keys()
    assert list(files.read(1)) == [name]
    assert files.complete([1, 3])
    assert not files.complete([1, 2])


def test_another_seed_draws_other_labels(
    collected: StatisticsFiles, samples: torch.Tensor, mini_model: Path, tmp_path: Path
) -> None:
    decoder, files = Decoder(mini_model, "cpu"), StatisticsFiles(tmp_path)
    name = "model.layers.3.mlp.down_proj"
    for seed, same in ((SEED, True), (SEED + 1, False), (2**63, False)):
        files.path(3).unlink(missing_ok=True)
        collect_statistics(Backpropagation(decoder, samples, {name: decoder.linears(3)[name]}, seed), files)
        found, expected = files.read(3)[name], collected.read(3)[name]
        assert torch.equal(found.inputs, expected.inputs)
        assert torch.allclose(found.outputs[0], expected.outputs[0], rtol=1e-3) is same


def test_the_loss_of_counted_positions_alone(mini_model: Path, samples: torch.Tensor, tmp_path: Path) -> None:
    """Gradients are those of the counted labels, and the mean is over these; inputs are those of all tokens."""
    counted = torch.rand(SAMPLES, TOKENS, generator=torch.Generator().manual_seed(1)) < 0.3
    decoder, files = Decoder(mini_model, "cpu"), StatisticsFiles(tmp_path)
    name = "model.layers.2.self_attn.o_proj"
    wanted = {name: decoder.linears(2)[name]}
    collect_statistics(Backpropagation(decoder, samples, wanted | decoder.head_linears, SEED, counted=counted), files)
    model = AutoModelForCausalLM.from_pretrained(mini_model, dtype=torch.float32)
    passed = one_backward_pass(model, samples, SEED, counted)
    for part, linear in ((2, name), (4, "lm_head")):
        inputs, gradients = passed[linear]
        layer = files.read(part)[linear]
        (gram,) = layer.outputs
        torch.testing.assert_close(layer.inputs, inputs.T @ inputs / counted.numel(), rtol=1e-3, atol=1e-5)
        reference = gradients.T @ gradients / counted.sum()
        assert float((gram - reference).norm()) < 1e-3 * float(reference.norm())
