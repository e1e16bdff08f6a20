"""The whole way from a model to a checkpoint: every method, and every kind of bad input."""

import hashlib
import json
import shutil
import warnings
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from vllm_latq.errors import (
    CalibrationError,
    CheckpointError,
    ConfigError,
    NumericalError,
    UnsupportedModelError,
    UnsupportedShapeError,
)
from vllm_latq.format.reader import CheckpointReader
from vllm_latq.format.verify import verify
from vllm_latq.quantize.certificate.certificate import verify_certificate
from vllm_latq.quantize.model.decoder import Decoder
from vllm_latq.quantize.model.selection import unreached
from vllm_latq.quantize.pipeline import quantize_checkpoint
from vllm_latq.quantize.plan import plan
from vllm_latq.quantize.recipe import Recipe
from vllm_latq.quantize.runs import writer

FEW = {"num_samples": 16, "seq_len": 128}
RECIPES = {
    "rtn": Recipe("rtn", 4, **FEW),
    "gptq": Recipe("gptq", 3, group_size=64, **FEW),
    "ssqr": Recipe("ssqr", 2, outlier_rate=0.02, order="min-pivot", **FEW),
    "hptq": Recipe("hptq", bits=3.125, **FEW),
    "hrtn": Recipe("hrtn", bits=3.125, **FEW),
}

# With a head, and for speed little else.
LEFT = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj")
HEADS = [
    Recipe("gptq", 4, ignore=LEFT, group_size=16, num_samples=16, seq_len=64),
    Recipe("latq", bits=4, ignore=LEFT, num_samples=8, seq_len=64),
]


@pytest.fixture(scope="module")
def checkpoints(two_blocks: Path, calibration_text: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    directory = tmp_path_factory.mktemp("methods")
    for name, recipe in RECIPES.items():
        quantize_checkpoint(recipe, two_blocks, directory / name, calibration=str(calibration_text))
    return {name: directory / name for name in RECIPES}


@pytest.mark.parametrize("method", RECIPES)
def test_checkpoint_is_valid_and_complete(method: str, checkpoints: dict[str, Path], two_blocks: Path) -> None:
    assert list(verify(checkpoints[method])) == []
    reader = CheckpointReader(checkpoints[method])
    original = load_file(two_blocks / "model.safetensors")
    assert Recipe.from_dict(reader.config.recipe) == RECIPES[method]
    for name, tensor in original.items():
        module = name.removesuffix(".weight")
        if module in reader.shapes:
            assert reader.shapes[module] == tuple(tensor.shape)
        elif name != "lm_head.weight":
            assert torch.equal(reader.store.get(name), tensor)
    assert len(reader.shapes) == 2 * 7


@pytest.mark.parametrize("method", RECIPES)
def test_report_states_errors_and_bounds(method: str, checkpoints: dict[str, Path], calibration_text: Path) -> None:
    report = CheckpointReader(checkpoints[method]).report()
    digest = hashlib.sha256(calibration_text.read_bytes()).hexdigest()
    assert report["calibration"] == {"name": "calibration.txt", "sha256": digest, "samples": 16, "seq_len": 128}
    for layer in report["layers"]:
        assert layer["error"] > 0
        assert 0 < layer["relative_error"] < 1
        if method in ("ssqr", "hptq"):
            assert layer["bound_holds"] is True
            assert layer["error"] <= layer["bound"]
    if method in ("hptq", "hrtn"):
        # the scale of a search ends where every layer meets its target
        assert all(RECIPES[method].bits - 0.02 < layer["bits"] <= 3.125 for layer in report["layers"])  # type: ignore[operator]
    if method == "ssqr":
        assert all(0.01 < layer["outlier_density"] <= 0.02 for layer in report["layers"])


def test_first_layers_error_is_that_of_its_activations(
    checkpoints: dict[str, Path], mini_model: Path, calibration_text: Path
) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from vllm_latq.quantize.calibration.windows import load_samples

    samples = load_samples(AutoTokenizer.from_pretrained(mini_model), str(calibration_text), 16, 128).tokens
    model = AutoModelForCausalLM.from_pretrained(mini_model, dtype=torch.float32)
    seen: list[torch.Tensor] = []
    linear = model.model.layers[0].self_attn.q_proj
    linear.register_forward_pre_hook(lambda _, arguments: seen.append(arguments[0]))
    with torch.no_grad():
        model(samples)
    inputs = seen[0].reshape(-1, 256).double()
    reader = CheckpointReader(checkpoints["gptq"])
    moved = reader.weight("model.layers.0.self_attn.q_proj").dequantize().double() - linear.weight.detach().double()
    (layer,) = (layer for layer in reader.report()["layers"] if layer["name"] == "model.layers.0.self_attn.q_proj")
    assert layer["error"] == pytest.approx(float((inputs @ moved.T).square().sum()), rel=1e-3)


def test_dry_run_predicts_the_size(checkpoints: dict[str, Path], two_blocks: Path) -> None:
    for method, recipe in RECIPES.items():
        planned = plan(recipe, two_blocks)
        report = CheckpointReader(checkpoints[method]).report()
        tolerance = 0 if method in ("rtn", "gptq") else 0.02
        measured = report["totals"]["bits_per_weight"]
        assert planned["totals"]["bits_per_weight"] == pytest.approx(measured, rel=tolerance, abs=1e-12)
        assert [layer["name"] for layer in planned["layers"]] == [layer["name"] for layer in report["layers"]]


@pytest.mark.parametrize("recipe", HEADS)
def test_the_head_can_be_quantized(recipe: Recipe, random_model: Any, calibration_text: Path, tmp_path: Path) -> None:
    """One of its own, or one that is the embedding, which then stays: to the same bits."""
    tied, _ = random_model("qwen3", "tied", hidden_size=64, tie_word_embeddings=True)
    source = Path(shutil.copytree(tied, tmp_path / "untied"))
    config = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps({**config, "tie_word_embeddings": False}))
    tensors = load_file(source / "model.safetensors")
    embedding = tensors["model.embed_tokens.weight"]
    save_file(tensors | {"lm_head.weight": embedding.clone()}, source / "model.safetensors")
    quantize_checkpoint(recipe, source, tmp_path / "own", calibration=str(calibration_text))
    quantize_checkpoint(recipe, tied, tmp_path / "tied", calibration=str(calibration_text))
    assert list(verify(tmp_path / "tied")) == []
    assert list(verify_certificate(tmp_path / "tied", tied, str(calibration_text))) == []
    assert not json.loads((tmp_path / "tied" / "config.json").read_text())["tie_word_embeddings"]
    reader = CheckpointReader(tmp_path / "tied")
    assert torch.equal(reader.store.get("model.embed_tokens.weight"), embedding)
    head = reader.weight("lm_head").dequantize()
    assert torch.equal(head, CheckpointReader(tmp_path / "own").weight("lm_head").dequantize())
    assert 0 < (head - embedding.float()).norm() / embedding.float().norm() < 0.2
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "tied", dtype=torch.float32)
    assert torch.equal(loaded.lm_head.dense_weight(torch.float32), head)
    assert torch.equal(loaded.model.embed_tokens.weight, embedding.float())


@pytest.mark.parametrize("left_alone", [0, 3])
def test_a_block_left_alone(left_alone: int, random_model: Any, calibration_text: Path, tmp_path: Path) -> None:
    """Activations pass through a block without quantized linears, if any follow; in a certificate, too."""
    source, _ = random_model("llama", "left-alone", num_hidden_layers=4)
    block = f"model.layers.{left_alone}."
    names = Decoder(source, "cpu").linears(left_alone)
    few = {"group_size": 16, "num_samples": 8, "seq_len": 32}
    recipe = Recipe("gptq", 4, ignore=("lm_head", *names), target="original", **few)
    report = quantize_checkpoint(recipe, source, tmp_path / "out", calibration=str(calibration_text))
    assert len(report["layers"]) == 3 * len(names)
    assert not any(layer["name"].startswith(block) for layer in report["layers"])
    assert list(verify_certificate(tmp_path / "out", source, str(calibration_text))) == []


@pytest.mark.parametrize("entry", ["mlp.", "re:.*mlp", "model.layers.9.mlp.up_proj", "nosuch"])
def test_ignoring_what_is_not_there(entry: str, mini_model: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="ignore: expected names of linears"):
        quantize_checkpoint(Recipe("rtn", 4, ignore=("lm_head", entry)), mini_model, tmp_path / "out")


def test_names_that_say_too_much(mini_model: Path, tmp_path: Path) -> None:
    """A module beside the model that is called as linears in the blocks are would keep these from being quantized."""
    source = Path(shutil.copytree(mini_model, tmp_path / "source"))
    tensors = load_file(source / "model.safetensors")
    save_file(tensors | {"up_proj.0.weight": torch.ones(4, 4)}, source / "model.safetensors")
    with pytest.raises(UnsupportedModelError, match="expected no linear in the blocks that ends as up_proj"):
        quantize_checkpoint(Recipe("rtn", 4), source, tmp_path / "out")


def test_parts_of_what_vllm_merges_are_named(mini_model: Path) -> None:
    left = r"layers\.0\.self_attn\.q_proj is quantized, .*layers\.0\.self_attn\.k_proj not: vLLM merges them"
    with pytest.warns(UserWarning, match=left):
        plan(Recipe("rtn", ignore=("lm_head", "k_proj")), mini_model)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        plan(Recipe("rtn", ignore=("lm_head", "k_proj", "q_proj", "v_proj", "down_proj")), mini_model)


def test_everything_ignored(mini_model: Path, tmp_path: Path) -> None:
    linears = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj", "lm_head")
    with pytest.raises(ConfigError, match="expected some linear left to quantize"):
        quantize_checkpoint(Recipe("rtn", 4, ignore=linears), mini_model, tmp_path / "out")


def test_group_size_that_does_not_divide(mini_model: Path, tmp_path: Path) -> None:
    with pytest.raises(UnsupportedShapeError, match=r"q_proj: expected input channels divisible by group_size=100"):
        quantize_checkpoint(Recipe("rtn", 4, group_size=100), mini_model, tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


def test_method_with_a_hessian_calibrates_on_the_bundled_text(two_blocks: Path, tmp_path: Path) -> None:
    """The certificate finds it by its name in the report."""
    report = quantize_checkpoint(Recipe("gptq", 4, num_samples=2, seq_len=64), two_blocks, tmp_path / "out")
    assert report["calibration"]["name"] == "bundled"
    assert list(verify_certificate(tmp_path / "out", two_blocks)) == []


def test_methods_without_a_hessian_do_not(mini_model: Path, tmp_path: Path) -> None:
    report = quantize_checkpoint(Recipe("rtn", 4), mini_model, tmp_path / "out")
    assert report["calibration"] is None
    assert {layer["error"] for layer in report["layers"]} == {None}
    assert list(verify(tmp_path / "out")) == []


def test_too_little_text(mini_model: Path, tmp_path: Path) -> None:
    (tmp_path / "short.txt").write_text("import os\n")
    with pytest.raises(CalibrationError, match="at least one window of 128 tokens"):
        quantize_checkpoint(
            Recipe("gptq", 4, **FEW), mini_model, tmp_path / "out", calibration=str(tmp_path / "short.txt")
        )
    assert not (tmp_path / "out.partial").exists()


def test_fewer_tokens_than_channels_warns_with_numbers(
    mini_model: Path, calibration_text: Path, tmp_path: Path
) -> None:
    recipe = Recipe("gptq", 4, num_samples=2, seq_len=64)
    with pytest.warns(UserWarning, match="128 tokens for layers of up to 768 input channels"):
        quantize_checkpoint(recipe, mini_model, tmp_path / "out", calibration=str(calibration_text))


def test_sequences_longer_than_the_model(mini_model: Path, calibration_text: Path, tmp_path: Path) -> None:
    recipe = Recipe("gptq", 4, num_samples=2, seq_len=4096)
    with pytest.raises(ConfigError, match="expected at most 2048"):
        quantize_checkpoint(recipe, mini_model, tmp_path / "out", calibration=str(calibration_text))


def test_overflowing_activations_name_the_layer_and_keep_the_work(
    mini_model: Path, calibration_text: Path, tmp_path: Path
) -> None:
    source = Path(shutil.copytree(mini_model, tmp_path / "source"))
    tensors = load_file(source / "model.safetensors")
    tensors["model.layers.2.input_layernorm.weight"] = torch.full((256,), 3e38, dtype=torch.bfloat16)
    save_file(tensors, source / "model.safetensors")
    with pytest.raises(NumericalError, match=r"model\.layers\.2\.self_attn\.q_proj: expected finite calibration"):
        quantize_checkpoint(RECIPES["gptq"], source, tmp_path / "out", calibration=str(calibration_text))
    assert not (tmp_path / "out").exists()
    assert len(list((tmp_path / "out.partial").glob("*.safetensors"))) == 2


@pytest.mark.parametrize("ending", [None, NumericalError("here", "no error", "one"), KeyboardInterrupt()])
def test_however_a_run_ends_it_unlocks_its_directory(
    ending: BaseException | None, two_blocks: Path, tmp_path: Path
) -> None:
    held, partial = [], str(tmp_path.resolve() / "out.partial")

    def listen(event: dict) -> None:
        held.append(partial in writer._held)
        if ending and event["event"] == "block":
            raise ending

    with pytest.raises(type(ending)) if ending else nullcontext():
        quantize_checkpoint(Recipe("rtn", 4), two_blocks, tmp_path / "out", on_event=listen)
    assert held[0]
    assert partial not in writer._held


@pytest.mark.parametrize(
    ("zero", "method", "reached"),
    [
        ("self_attn.v_proj", "gptq", ["o_proj"]),
        ("self_attn.v_proj", "latq", ["q_proj", "k_proj", "v_proj", "o_proj"]),
        ("input_layernorm", "gptq", ["q_proj", "k_proj", "v_proj"]),
    ],
)
def test_layers_that_nothing_reaches_can_be_left_out_together(
    zero: str, method: str, reached: list[str], two_blocks: Path, calibration_text: Path, tmp_path: Path
) -> None:
    """As behind a pruned v_proj: o_proj sees zeros, and the loss does not depend on q and k."""
    source = Path(shutil.copytree(two_blocks, tmp_path / "source"))
    tensors = load_file(source / "model.safetensors")
    tensors[f"model.layers.1.{zero}.weight"].zero_()
    save_file(tensors, source / "model.safetensors")
    options: dict[str, Any] = {
        "gptq": {"method": "gptq", "bits": 4},
        "latq": {"method": "latq", "bits": 4.0},
    }[method]
    options |= {"num_samples": 4, "seq_len": 32}
    ignored = ("lm_head", "model.layers.0", "gate_proj", "up_proj")
    recipe = Recipe(**options, ignore=ignored)
    with pytest.raises(NumericalError, match="--ignore model") as raised:
        quantize_checkpoint(recipe, source, tmp_path / "out", calibration=str(calibration_text))
    advice = str(raised.value).rpartition("--ignore ")[2].rstrip(".").split()
    assert sorted(advice) == sorted(f"model.layers.1.self_attn.{name}" for name in reached)
    if zero == "self_attn.v_proj":  # else nothing reaches o_proj, either
        recipe = Recipe(**options, ignore=(*ignored, *advice))
        quantize_checkpoint(recipe, source, tmp_path / "left", calibration=str(calibration_text))
        assert (tmp_path / "left").is_dir()


def test_of_experts_all_are_left_out() -> None:
    experts = [f"blocks.0.mlp.experts.{expert}.{leaf}" for expert in range(2) for leaf in ("gate_proj", "down_proj")]
    error = unreached([experts[0], experts[2], "blocks.0.up"], [*experts, "blocks.0.up"], "activations")
    assert error.hint.endswith("--ignore blocks.0.mlp.experts blocks.0.up")


def test_destination_that_exists(mini_model: Path, tmp_path: Path) -> None:
    """Said before data are read, here from a file that is missing."""
    (tmp_path / "file").write_text("x")
    (tmp_path / "out.partial").mkdir()
    (tmp_path / "out.partial" / "records-00001.json").write_text("{}")
    for name, expected in (("", "a new or empty directory"), ("out", "no partial run")):
        with pytest.raises(CheckpointError, match=f"expected {expected}"):
            quantize_checkpoint(RECIPES["gptq"], mini_model, tmp_path / name, calibration=str(tmp_path / "missing"))


def test_a_model_is_not_overwritten(mini_model: Path) -> None:
    with pytest.raises(CheckpointError, match=r"found the model itself\. Choose another directory"):
        quantize_checkpoint(Recipe("rtn", 4), mini_model, mini_model)


@pytest.mark.parametrize("offload", ["cpu", "disk"])
def test_room_on_the_disk_is_asked_for_before_a_run(
    offload: str, two_blocks: Path, calibration_text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run that is refused for one byte too few leaves nothing; with exactly enough it succeeds."""
    recipe = Recipe("gptq", 4, num_samples=4, seq_len=64)
    needs = plan(recipe, two_blocks, offload=offload)["needs"]["disk"]
    free = [sum(needs.values()) - 1]
    usage = type(shutil.disk_usage(tmp_path))
    monkeypatch.setattr("vllm_latq.quantize.pipeline.shutil.disk_usage", lambda _: usage(0, 0, free[0]))

    def run() -> None:
        quantize_checkpoint(recipe, two_blocks, tmp_path / "out", calibration=str(calibration_text), offload=offload)

    with pytest.raises(CheckpointError, match=r"out: expected [\d.]+ MB of free disk space, which this run writes, "):
        run()
    assert not list(tmp_path.iterdir())
    free[0] += 1
    run()
    assert (tmp_path / "out" / "config.json").exists()


def test_files_of_an_interrupted_run_count_as_room(
    two_blocks: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stop(event: dict) -> None:
        if event["event"] == "block":
            raise KeyboardInterrupt

    recipe = Recipe("rtn", 4)
    with pytest.raises(KeyboardInterrupt):
        quantize_checkpoint(recipe, two_blocks, tmp_path / "out", on_event=stop)
    written = sum(path.stat().st_size for path in (tmp_path / "out.partial").rglob("*"))
    assert written > 0
    usage = type(shutil.disk_usage(tmp_path))
    free = sum(plan(recipe, two_blocks)["needs"]["disk"].values()) - written
    monkeypatch.setattr("vllm_latq.quantize.pipeline.shutil.disk_usage", lambda _: usage(0, 0, free))
    quantize_checkpoint(recipe, two_blocks, tmp_path / "out", resume=True)


def test_first_event_lists_the_stages_and_the_last_the_sizes(two_blocks: Path, tmp_path: Path) -> None:
    events: list[dict] = []
    quantize_checkpoint(Recipe("rtn", 4), two_blocks, tmp_path / "out", on_event=events.append)
    assert events[0]["stages"] == [{"stage": "quantizing", "parts": 14, "share": 1.0}]
    assert events[0]["device"] == "cpu"
    done = events[-1]
    assert done["checkpoint_bytes"] == sum(path.stat().st_size for path in (tmp_path / "out").glob("*.safetensors"))
    assert done["model_bytes"] == (two_blocks / "model.safetensors").stat().st_size
    assert (done["model"], done["notes"]) == (str(two_blocks), 0)


def test_what_a_run_needs_is_asked_for_before_it_begins(
    mini_model: Path, calibration_text: Path, tmp_path: Path
) -> None:
    text = str(calibration_text)
    with pytest.raises(ConfigError, match=r"device: expected a device torch can use, found .*CUDA device"):
        quantize_checkpoint(RECIPES["gptq"], mini_model, tmp_path / "out", calibration=text, device="cuda:99")
    source = Path(shutil.copytree(mini_model, tmp_path / "source"))
    (source / "tokenizer.json").write_text('{"model": 1}')
    with pytest.raises(CheckpointError, match="source: expected a tokenizer that transformers can load"):
        quantize_checkpoint(RECIPES["gptq"], source, tmp_path / "out", calibration=text)
    for file in source.glob("tokenizer*"):
        file.unlink()
    with pytest.raises(CheckpointError, match="source: expected a tokenizer, found none"):
        quantize_checkpoint(RECIPES["gptq"], source, tmp_path / "out", calibration=text)
    assert not list(tmp_path.glob("out*"))
