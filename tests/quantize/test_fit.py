"""Bits that fit a GPU, from shapes alone: the same shapes as a run finds, and bits that use the memory to the end."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from helpers.encoders import random_encoder
from helpers.random_models import RandomModels
from vllm_latq.cli.main import main
from vllm_latq.errors import ConfigError, UnsupportedModelError
from vllm_latq.quantize import fit
from vllm_latq.quantize.plan import plan
from vllm_latq.quantize.recipe import Recipe

RECIPES = {
    "latq": Recipe("latq", bits=3, seq_len=64),
    "embedding": Recipe("latq", bits=3, seq_len=64, embedding_bits=4),
    "gptq": Recipe("gptq", 4, group_size=16, seq_len=64),
}
GIB = fit.GIB


@pytest.fixture(scope="module")
def configuration(mini_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with config.json alone."""
    directory = tmp_path_factory.mktemp("configuration")
    shutil.copy(mini_model / "config.json", directory)
    return directory


@pytest.mark.parametrize("method", RECIPES)
def test_shapes_are_those_of_a_run(method: str, configuration: Path, mini_model: Path) -> None:
    recipe = RECIPES[method]
    shapes, planned = fit.model_shapes(configuration, recipe), plan(recipe, mini_model, "cpu")
    assert shapes.weights == planned["totals"]["weights"]
    assert fit.weight_bytes(shapes, recipe) == pytest.approx(planned["totals"]["bytes"], abs=100)
    total = planned["needs"]["disk"]["checkpoint"]
    assert shapes.unquantized == pytest.approx(total - planned["totals"]["bytes"], abs=100)
    # The embedding of 2048 x 256 is read by the head alone, unless the head has a matrix of its own.
    assert (shapes.unquantized_read < 2 * 2048 * 256) is (method != "gptq")


@pytest.mark.parametrize(
    ("model_type", "changes"),
    [
        ("qwen3_moe", {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 16}),
        ("deepseek_v3", {"n_routed_experts": 8, "num_experts_per_tok": 2, "n_group": 2, "first_k_dense_replace": 1}),
        ("llama", {"tie_word_embeddings": False}),
    ],
)
def test_other_families(model_type: str, changes: dict[str, object], random_model: RandomModels) -> None:
    model, _ = random_model(model_type, f"fit-{model_type}", **changes)
    shapes, planned = fit.model_shapes(model, RECIPES["latq"]), plan(RECIPES["latq"], model, "cpu")
    assert shapes.weights == planned["totals"]["weights"]
    shares = {matrix.read for matrix in shapes.matrices}
    assert shares == ({1.0} if model_type == "llama" else {1.0, 0.25})


def test_biases_of_experts_stay_unquantized(random_model: RandomModels) -> None:
    directory, model = random_model("gpt_oss", "fit-gpt-oss", num_local_experts=4)
    shapes = fit.model_shapes(directory, RECIPES["latq"])
    matrices = [
        parameter
        for name, parameter in model.named_parameters()
        if name.endswith(("experts.gate_up_proj", "experts.down_proj", "_proj.weight", "lm_head.weight"))
    ]
    assert shapes.weights == sum(matrix.numel() for matrix in matrices)
    others = sum(parameter.numel() for parameter in model.parameters()) - shapes.weights
    assert shapes.unquantized == 2 * others


def test_bits_use_the_memory_to_the_end(configuration: Path) -> None:
    recipe = Recipe.of(None, {})
    shapes = fit.model_shapes(configuration, recipe)
    given = fit.load("1.125GiB", 2048, 3, shapes)
    beside = fit.spent(shapes, given)
    assert beside["KV cache"] == 3 * 2048 * 4 * 2 * 2 * 64 * 2
    assert beside["left free"] == given.memory - int(0.9 * given.memory)
    exact = fit.load(
        f"{(sum(beside.values()) - beside['left free'] + 3.5 * shapes.weights / 8) / 0.9 / 1e6}MB", 2048, 3, shapes
    )
    found = fit.fitting(recipe, shapes, exact)
    assert found.bits == pytest.approx(3.5, abs=0.011)
    room = exact.memory - sum(fit.spent(shapes, exact).values())
    assert fit.weight_bytes(shapes, found) <= room < fit.weight_bytes(shapes, replace(found, bits=found.bits + 0.011))
    packed = fit.fitting(Recipe.of("fast", {}), shapes, exact)
    assert packed.bits == 3
    message = r"memory: expected room for 1.25 bits per weight, \d+ kB, beside all else, found 1.07 GB, of which 1"
    with pytest.raises(ConfigError, match=message):
        fit.fitting(recipe, shapes, fit.load("1GiB", 2048, 1, shapes))
    with pytest.raises(ConfigError, match="fit: expected a method that takes the same bits"):
        fit.fitting(Recipe("hptq"), shapes, exact)
    assert fit.fitting(recipe, shapes, fit.load("24GiB", None, None, shapes)).bits == fit.MOST_BITS
    group = fit.fitting(replace(recipe, grid="group"), shapes, fit.load("24GiB", None, None, shapes))
    assert 8.12 < group.bits < 8.13  # codes of 8 bits and their scales


def test_speed_is_bandwidth_over_what_a_token_reads(configuration: Path) -> None:
    recipe = Recipe("latq", bits=4)
    shapes = fit.model_shapes(configuration, recipe)
    given = fit.load("80GiB", 1024, 1, shapes)
    speeds = {gpu["name"]: gpu for gpu in fit.speeds(shapes, recipe, given)}
    assert "RTX 4090" not in speeds
    read = shapes.weights / 2 + shapes.unquantized_read
    assert speeds["H100 SXM"]["short"] == pytest.approx(3350e9 / read)
    assert speeds["H100 SXM"]["long"] == pytest.approx(3350e9 / (read + 1024 * 2048))


def test_prediction_falls_fourfold_per_bit() -> None:
    assert fit.predicted_loss(0.1, 3.0, 4.0) == pytest.approx(0.025)
    assert fit.predicted_loss(None, 3.0, 4.0) is None


@pytest.mark.parametrize(("text", "size"), [("24GiB", 24 * GIB), (" 80 GB", 80 * 10**9), ("1.5MiB", 3 << 19)])
def test_memory(text: str, size: int) -> None:
    assert fit.parse_memory(text) == size


@pytest.mark.parametrize("text", ["24", "", "GiB", "-1GiB", "0GiB", "24gb", "1e3GB", "infGB"])
def test_bad_memory(text: str) -> None:
    with pytest.raises(ConfigError, match="expected a size with one of the units GiB, GB, MiB, MB, such as 24GiB"):
        fit.parse_memory(text)


def test_encoders_have_no_cache(calibration_text: Path, tmp_path: Path) -> None:
    encoder = tmp_path / "bert"
    random_encoder(encoder, "bert", calibration_text)
    with pytest.raises(UnsupportedModelError, match="expected a language model, found an encoder"):
        fit.model_shapes(encoder, RECIPES["gptq"])


def test_plan_command(configuration: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["plan", str(configuration), "--memory", "24GiB", "--concurrency", "4"]
    assert main([*command, "--json"]) == 0
    planned = json.loads(capsys.readouterr().out)
    assert (planned["bits"], planned["context"], planned["concurrency"]) == (6.0, 2048, 4)
    assert planned["spent"]["KV cache"] == 4 * 2048 * 2048
    assert planned["speeds"][0]["name"] == "L4"
    assert main(command) == 0
    shown = capsys.readouterr().out
    assert "KV cache, 4 x 2,048 tokens" in shown
    assert f"latq quantize {configuration} OUT --fit 24GiB --concurrency 4" in shown
    assert "upper bound by memory bandwidth" in shown


def test_plan_predicts_from_a_report(
    configuration: Path, ssqr_checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    copy = Path(shutil.copytree(ssqr_checkpoint, tmp_path / "copy"))
    command = ["plan", str(configuration), "--memory", "24GiB", "--checkpoint", str(copy)]
    assert main(command) == 1
    assert "--checkpoint: expected a checkpoint of latq, whose report has the loss" in capsys.readouterr().err
    report = json.loads((copy / "latq_report.json").read_text())
    report["totals"] |= {"loss": 0.64, "bits_per_weight": 3.0}
    (copy / "latq_report.json").write_text(json.dumps(report))
    assert main(command) == 0
    assert "predicted KL divergence: about 0.01 nats per token" in capsys.readouterr().out
    for totals, message in (
        ({"loss": "x"}, "totals.loss: expected a finite number"), ("x", "whose report has the loss"),
    ):  # fmt: skip
        (copy / "latq_report.json").write_text(json.dumps(report | {"totals": totals}))
        assert main(command) == 1
        assert message in capsys.readouterr().err


def test_a_command_with_blanks_can_be_pasted(configuration: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", str(configuration), "--memory", "24 GiB"]) == 0
    assert f"latq quantize {configuration} OUT --fit '24 GiB'" in capsys.readouterr().out


def test_size_beyond_all_bounds() -> None:
    with pytest.raises(ConfigError, match="a size with one of the units"):
        fit.parse_memory("1" + 400 * "0" + "GiB")


def test_quantize_chooses_the_bits_that_fit(mini_model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["quantize", str(mini_model), "out", "--dry-run", "--json"]
    assert main([*command, "--fit", "24GiB", "--context", "1000"]) == 0
    captured = capsys.readouterr()
    assert json.loads(captured.out)["recipe"]["bits"] == 6
    assert captured.err == "latq: 6 bits fit 24GiB\n"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--fit", "24GiB", "--bits", "3"], "--fit chooses the bits: leave out --bits."),
        (["--context", "1000"], "--context and --concurrency require --fit."),
        (["--fit", "24"], "--fit: expected a size with one of the units"),
        (["--fit", "1GiB"], "--fit: expected room for 1.25 bits per weight"),
        (["--fit", "24GiB", "--context", "1000000"], "--context: expected at most 2048, the positions of the model"),
        (["--fit", "24GiB", "--concurrency", "0"], "--concurrency: expected at least 1, found 0"),
        (["--fit", "24GiB", "--method", "hptq"], "--fit: expected a method that takes the same bits in files"),
    ],
)
def test_bad_fit_is_one_clear_line(
    options: list[str], message: str, mini_model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["quantize", str(mini_model), "out", *options]) == 1
    assert capsys.readouterr().err.startswith(f"latq: {message}")
