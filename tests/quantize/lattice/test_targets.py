"""Corrected targets: the algebra against least squares, and Qronos as the oracle of where the two coincide."""

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from vllm_latq.errors import ConfigError, NumericalError
from vllm_latq.format.reader import CheckpointReader
from vllm_latq.quantize.calibration.hessian import HessianCollector, recording
from vllm_latq.quantize.lattice.choices import ORDERS
from vllm_latq.quantize.lattice.factor import factorize
from vllm_latq.quantize.lattice.nearest_plane import nearest_plane
from vllm_latq.quantize.lattice.targets import Drift, corrected_target, output_energy, output_error
from vllm_latq.quantize.methods.layer import quantize_layer
from vllm_latq.quantize.pipeline import quantize_checkpoint
from vllm_latq.quantize.recipe import Recipe

FLOAT64_TOLERANCE = 1e-9
# Drift is accumulated in float32.
FLOAT32_TOLERANCE = 1e-4
STEP = 0.02


def layer(rows: int = 24, cols: int = 40, moved: float = 0.1) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """W [r, c], original inputs X and quantized ones Y [n, c], float64."""
    generator = torch.Generator().manual_seed(rows + cols)
    weight = 0.05 * torch.randn(rows, cols, generator=generator, dtype=torch.float64)
    inputs = torch.randn(3 * cols, cols, generator=generator, dtype=torch.float64)
    inputs = inputs + 0.7 * inputs.roll(1, 1) + inputs[:, :1]
    return weight, inputs, inputs + moved * torch.randn(inputs.shape, generator=generator, dtype=torch.float64)


def drift_of(original: torch.Tensor, inputs: torch.Tensor) -> Drift:
    """In float64, to compare with least squares."""
    return Drift(inputs.T @ (original - inputs), (original - inputs).T @ (original - inputs))


@pytest.mark.parametrize("order", ORDERS)
def test_corrected_target_is_the_ridge_regression(order):
    weight, original, inputs = layer()
    factor = factorize(inputs.T @ inputs, order, damping=0.05)
    target = corrected_target(weight, factor, drift_of(original, inputs))
    # argmin ||Y v - X w||^2 + lambda ||v - w||^2 as one least-squares problem.
    root = factor.ridge**0.5 * torch.eye(weight.shape[1], dtype=torch.float64)
    expected = torch.linalg.lstsq(torch.cat([inputs, root]), torch.cat([original, root]) @ weight.T).solution.T
    torch.testing.assert_close(target, expected, rtol=0, atol=FLOAT64_TOLERANCE)
    half = corrected_target(weight, factor, drift_of(original, inputs), correction=0.5)
    torch.testing.assert_close(half, (weight + expected) / 2, rtol=0, atol=FLOAT64_TOLERANCE)


def test_residual_target_is_the_regression_on_the_missing_outputs():
    weight, original, inputs = layer()
    missed = torch.randn(len(inputs), len(weight), generator=torch.Generator().manual_seed(5), dtype=torch.float64)
    factor, drift = factorize(inputs.T @ inputs, damping=0.05), drift_of(original, inputs)
    drift.add_residual(inputs[:50], missed[:50])
    drift.add_residual(inputs[50:], missed[50:])
    root = factor.ridge**0.5 * torch.eye(weight.shape[1], dtype=torch.float64)
    aim = torch.cat([inputs @ weight.T + missed, root @ weight.T])
    expected = torch.linalg.lstsq(torch.cat([inputs, root]), aim).solution.T
    torch.testing.assert_close(corrected_target(weight, factor, drift), expected, rtol=0, atol=FLOAT64_TOLERANCE)
    quantized = (weight / STEP).round() * STEP
    left = float((inputs @ (quantized - weight).T - missed).square().sum())
    assert output_error(quantized, weight, inputs.T @ inputs, drift) == pytest.approx(left, rel=1e-9)
    wanted = float((inputs @ weight.T + missed).square().sum())
    assert output_energy(weight, inputs.T @ inputs, drift) == pytest.approx(wanted, rel=1e-9)


def test_without_drift_the_target_is_the_weight():
    weight, _, inputs = layer()
    factor = factorize(inputs.T @ inputs)
    assert torch.equal(corrected_target(weight, factor, Drift.zeros(40, torch.device("cpu"))), weight)


def test_output_error_equals_the_error_of_the_two_streams():
    weight, original, inputs = layer(rows=1500)
    quantized = (weight / STEP).round() * STEP
    drift, gram = drift_of(original, inputs), inputs.T @ inputs
    missed = inputs @ quantized.T - original @ weight.T
    assert output_error(quantized, weight, gram, drift) == pytest.approx(float(missed.square().sum()), rel=1e-9)
    energy = float((original @ weight.T).square().sum())
    assert output_energy(weight, gram, drift) == pytest.approx(energy, rel=1e-9)
    moved = float((inputs @ (quantized - weight).T).square().sum())
    assert output_error(quantized, weight, gram, None) == pytest.approx(moved, rel=1e-9)


def qronos(weight: torch.Tensor, original: torch.Tensor, inputs: torch.Tensor) -> torch.Tensor:
    """Zhang et al., Algorithm 2 (natural order, no damping): integers [r, c] on the grid STEP * Z."""
    target = original @ weight.T
    rest = inputs[:, 1:] @ weight[:, 1:].T
    first = (inputs[:, 0] @ (target - rest) / inputs[:, 0].square().sum() / STEP).round()
    current = weight.clone()
    current[:, 1:] = torch.linalg.lstsq(inputs[:, 1:], target - torch.outer(inputs[:, 0], STEP * first)).solution.T
    integers = torch.zeros_like(weight)
    integers[:, 0] = first
    lower = torch.linalg.cholesky(torch.linalg.inv(inputs.T @ inputs))
    for t in range(1, weight.shape[1]):
        integers[:, t] = (current[:, t] / STEP).round()
        error = (current[:, t] - STEP * integers[:, t]) / lower[t, t]
        current[:, t + 1 :] -= torch.outer(error, lower[t + 1 :, t])
    return integers.to(torch.int32)


@pytest.mark.parametrize("moved", [0.0, 0.1])
def test_qronos_differs_in_the_first_coordinate_alone(moved):
    # Qronos rounds the first coordinate with the original later weights, nearest plane with the re-optimised ones;
    # from then on both solve the same problems. Rows that agree there agree everywhere.
    weight, original, inputs = layer(rows=400, moved=moved)
    factor = factorize(inputs.T @ inputs, "natural", damping=1e-13)
    target = corrected_target(weight, factor, drift_of(original, inputs))
    ours = nearest_plane(target, factor, torch.tensor(STEP)).z
    theirs = qronos(weight, original, inputs)
    agree = ours[:, 0] == theirs[:, 0]
    assert torch.equal(ours[agree], theirs[agree])
    if moved:
        assert 0.05 < float(agree.float().mean()) < 1
    else:
        assert bool(agree.all())


@pytest.mark.parametrize("method", ["gptq", "ssqr", "hptq"])
def test_record_separates_rounding_error_from_unreachable_error(method):
    weight, original, inputs = layer(64, 96)
    grid = {"bits": 3.5} if method == "hptq" else {"bits": 3, "group_size": 32}
    recipe = Recipe(method, damping=1e-6, target="original", **grid)
    drift = drift_of(original, inputs)
    result = quantize_layer(weight, inputs.T @ inputs, recipe, "q_proj", drift)
    quantized = result.dequantized.double()
    missed = float((inputs @ quantized.T - original @ weight.T).square().sum())
    assert result.record.error == pytest.approx(missed, rel=FLOAT32_TOLERANCE)
    # The part of X W^T outside the columns of Y is orthogonal to whatever rounding does.
    aim = original @ weight.T
    unreachable = float((aim - inputs @ torch.linalg.lstsq(inputs, aim).solution).square().sum())
    assert result.record.rounding_error == pytest.approx(missed - unreachable, rel=1e-2)
    if method != "gptq":
        assert result.record.bound_holds is True
        assert result.record.rounding_error <= result.record.bound
    plain = quantize_layer(weight, inputs.T @ inputs, dataclasses.replace(recipe, target="quantized"))
    assert plain.record.rounding_error == plain.record.error
    assert result.record.error < output_error(plain.dequantized, weight, inputs.T @ inputs, drift)


def test_broken_original_activations_name_the_layer():
    weight, original, inputs = layer()
    original[3, 5] = torch.inf
    recipe = Recipe("hptq", bits=3.5, target="original")
    with pytest.raises(NumericalError, match="up_proj: expected finite drift of the activations"):
        quantize_layer(weight, inputs.T @ inputs, recipe, "up_proj", drift_of(original, inputs))


def test_collector_pairs_the_inputs_of_both_streams():
    block = torch.nn.ModuleDict({name: torch.nn.Linear(6, 4) for name in ("q", "k", "o")})

    def forward(hidden: torch.Tensor) -> None:
        shared = hidden.tanh()
        block["q"](shared), block["k"](shared), block["o"](hidden)

    collector, originals, inputs = HessianCollector(), [], []
    for seed in range(3):
        original, hidden = torch.randn(2, 2, 5, 6, generator=torch.Generator().manual_seed(seed))
        with recording(block) as seen:
            forward(original)
        with collector.watching(block, seen):
            forward(hidden)
        originals.append(original.reshape(-1, 6))
        inputs.append(hidden.reshape(-1, 6))
    shared, alone = collector.hessians
    assert (shared.shared.names, alone.shared.names, alone.tokens) == (("q", "k"), ("o",), 30)
    for found, x, y in (
        (alone, torch.cat(originals), torch.cat(inputs)),
        (shared, torch.cat(originals).tanh(), torch.cat(inputs).tanh()),
    ):
        assert found.drift is not None
        torch.testing.assert_close(found.matrix, y.T @ y)
        torch.testing.assert_close(found.drift.cross, y.T @ (x - y))
        torch.testing.assert_close(found.drift.energy, (x - y).T @ (x - y))


class Killed(Exception):
    """Stands for the process being killed."""


def test_pipeline_follows_both_streams_and_resumes(mini_model: Path, calibration_text: Path, tmp_path: Path) -> None:
    recipe = Recipe("gptq", 2, target="original", num_samples=8, seq_len=128)

    def killer(event: Mapping[str, Any]) -> None:
        if event["event"] == "block" and event["block"] == 1:
            raise Killed

    quantize_checkpoint(recipe, mini_model, tmp_path / "whole", calibration=str(calibration_text))
    with pytest.raises(Killed):
        quantize_checkpoint(recipe, mini_model, tmp_path / "out", calibration=str(calibration_text), on_event=killer)
    quantize_checkpoint(recipe, mini_model, tmp_path / "out", calibration=str(calibration_text), resume=True)
    for shard in (tmp_path / "whole").glob("*.safetensors"):
        assert shard.read_bytes() == (tmp_path / "out" / shard.name).read_bytes()
    assert _missed_output(tmp_path / "whole", mini_model, calibration_text) == pytest.approx(
        {layer["name"]: layer["error"] for layer in CheckpointReader(tmp_path / "whole").report()["layers"]}[PROBED],
        rel=1e-3,
    )


PROBED = "model.layers.3.self_attn.q_proj"


def _missed_output(checkpoint: Path, source: Path, text: Path) -> float:
    """||Y Q^T - X W^T||^2 of one linear, from the two models as transformers runs them."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from vllm_latq.quantize.calibration.windows import load_samples

    samples = load_samples(AutoTokenizer.from_pretrained(source), str(text), 8, 128).tokens
    outputs: list[torch.Tensor] = []
    for path in (source, checkpoint):
        model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
        linear = model.get_submodule(PROBED)
        linear.register_forward_hook(lambda _, __, output: outputs.append(output))
        with torch.no_grad():
            model(samples)
    return float((outputs[0].double() - outputs[1].double()).square().sum())


def test_correction_needs_a_target():
    with pytest.raises(ConfigError, match="Set a target, original or residual"):
        Recipe("gptq", correction=0.5)
