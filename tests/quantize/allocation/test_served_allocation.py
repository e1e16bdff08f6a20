"""Bits in memory: counted as they are held, met by a run, and spent better than by an entropy code's steps."""

import math
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from vllm_latq.errors import ConfigError, NumericalError
from vllm_latq.format.reader import CheckpointReader
from vllm_latq.format.scheme import SUPPORTED_BITS
from vllm_latq.format.served_size import USUAL_OUTLIER_BITS, served_bits, served_overhead, slot_words
from vllm_latq.format.verify import verify
from vllm_latq.quantize.allocation.served_allocation import (
    _COARSEST,
    _FINEST,
    _PRICE,
    _TRIED,
    ServedCurve,
    _fit,
    _squared,
    _Targets,
    allocate_served,
    check_target_bits,
    served_curves,
    served_lattices,
)
from vllm_latq.quantize.allocation.stored_allocation import RateCurve
from vllm_latq.quantize.certificate.certificate import verify_certificate
from vllm_latq.quantize.evaluation.evaluate import evaluate
from vllm_latq.quantize.lattice.factor import Factor, factorize
from vllm_latq.quantize.methods.latq import InputLattice, OutputLattice, Share, feedback_noise, latq
from vllm_latq.quantize.pipeline import quantize_checkpoint
from vllm_latq.quantize.recipe import Recipe
from vllm_latq.serving.merging import decode, merge

TARGET = 3.6
# Attention alone: what is served as one matrix is there.
FEW = {"num_samples": 32, "seq_len": 128, "ignore": ("lm_head", "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")}
SERVED = Recipe("latq", target_bits=TARGET, count="served", **FEW)


def without_feedback(exact: torch.Tensor) -> _Targets:
    return _Targets(exact, torch.zeros_like(exact))


def factor(size: int) -> Factor:
    """Return the factor of correlated inputs or outputs."""
    x = torch.randn(2 * size, size, generator=torch.Generator().manual_seed(size)).double()
    return factorize(x.T @ x / len(x), damping=0.1)


def cost(exact: torch.Tensor, width: int, rows: torch.Tensor, cols: torch.Tensor) -> torch.Tensor:
    """By rounding, in units of the squared model's step / 12; float64 scalar."""
    steps = torch.exp2((rows[:, None] + cols).to(torch.float64) / 8)
    # The last point of the grid is 2^(width - 1) - 1/2, and 3/4 of a step beyond it is still within reach.
    overflow = (exact.double().abs() > steps * (2 ** (width - 1) + 0.25)).sum()
    return steps.square().sum() + _PRICE * USUAL_OUTLIER_BITS[width] * overflow


@pytest.mark.parametrize("width", [2, 3, 4])
def test_no_row_has_a_better_step(width: int) -> None:
    exact = torch.randn(12, 40) * torch.logspace(-1, 2, 12)[:, None] * torch.logspace(-1, 1, 40)
    rows, cols, overflow = _fit(without_feedback(exact), 0.0, width)
    found = cost(exact, width, rows, cols)
    beyond = found - torch.exp2((rows[:, None] + cols).to(torch.float64) / 4).sum()
    assert float(beyond) == pytest.approx(_PRICE * USUAL_OUTLIER_BITS[width] * int(overflow.sum()))
    for row in range(12):
        for step in range(_FINEST, _COARSEST + 1):
            moved = rows.clone()
            moved[row] = step
            assert found <= cost(exact, width, moved, cols) * (1 + 1e-12)
    # And both sides together are better than one step for all.
    alone = min(cost(exact, width, torch.full((12,), step), torch.zeros(40)) for step in range(_FINEST, _COARSEST + 1))
    assert found < 0.9 * alone


def test_rows_and_columns_of_zeros_can_take_what_feedback_adds() -> None:
    exact, noise = torch.randn(64, 32).mul(3), torch.randn(64, 32).mul(1.4)
    exact[:20], exact[:, 5:11] = 0, 0
    rows, cols, overflow = _fit(_Targets(exact, noise), 0.0, 3)
    steps = torch.exp2((rows[:, None] + cols) / 8)
    fed_back = noise * (_squared(rows).mean() * _squared(cols).mean() / 12).sqrt()
    assert ((fed_back[:20].abs() > 4.5 * steps[:20]).float().mean(1) < 0.1).all()
    assert ((fed_back[:, 5:11].abs() > 4.5 * steps[:, 5:11]).float().mean(0) < 0.1).all()
    # Without it they take the finest steps that there are, and it would be more than those take.
    rows, cols, _ = _fit(without_feedback(exact), 0.0, 3)
    assert (rows[:20] == _FINEST).all()
    assert overflow[:20].sum() < (noise[:20].abs() > 4.5 * torch.exp2((rows[:20, None] + cols) / 8)).sum() / 4


def test_a_bit_is_worth_what_it_is_to_an_entropy_code() -> None:
    # Loss s^2 / 12, and a bit for each octave: the slope at s = 1.
    assert pytest.approx(_PRICE, rel=1e-6) == (4.0**1e-4 - 4.0**-1e-4) / 2e-4


def test_fitted_exponents_are_steps_times_what_was_fitted() -> None:
    weight = torch.randn(48, 32)
    inputs = InputLattice(factor(32), torch.randint(-9, 9, (32,)).to(torch.int8), 1.5)
    outputs = OutputLattice([factor(48)], torch.randint(-9, 9, (48,)).to(torch.int8), -2.25)
    share = Share(2.0**-3, 3.5, 3)
    moved, fitted = served_lattices({"a": weight}, inputs, {"a": outputs}, share)
    exact = weight * outputs.weights.sqrt().float()[:, None] * inputs.weights.sqrt().float()
    noise = feedback_noise(outputs.factors[0].spread, inputs.factor.spread)
    rows, cols, _ = _fit(_Targets(exact, noise), -3.0, 3)
    for before, after, eighths in ((inputs, moved, cols), (outputs, fitted["a"], rows)):
        steps = [side.exponents.to(torch.float64) / 8 - side.level for side in (before, after)]
        torch.testing.assert_close(steps[1], steps[0] + eighths.to(torch.float64) / 8)


def test_a_sample_of_rows_stands_for_all() -> None:
    weight = torch.randn(2304, 64, generator=torch.Generator().manual_seed(0))
    inputs, outputs = (
        InputLattice(factor(64), torch.zeros(64, dtype=torch.int8), 0.0),
        OutputLattice([factor(2304)], torch.zeros(2304, dtype=torch.int8), 0.0),
    )
    curve = served_curves({"a": weight}, inputs, {"a": outputs}, 2.0)["a"][3].bits
    least = served_overhead(2304, 64, 3) / weight.numel()
    octave, bits = next(point for point in curve.points if point[1] < least + 2)
    noise = feedback_noise(outputs.spread, inputs.factor.spread)
    *_, overflow = _fit(_Targets(weight, noise), octave, 3)
    outliers = USUAL_OUTLIER_BITS[3] * slot_words(overflow) / weight.numel()
    assert bits - least == pytest.approx(outliers, rel=0.05)
    assert outliers > 1.1 * USUAL_OUTLIER_BITS[3] * int(overflow.sum()) / weight.numel()


def served(shift: float) -> dict[int, ServedCurve]:
    """A linear whose codes overflow from some step on, sooner where they are narrow."""
    curves = {}
    for width in SUPPORTED_BITS:
        octaves = [float(octave) for octave in range(-10, 11)]
        bits = [width + 0.1 + min(32.0, 2.0 ** (shift - octave - width)) for octave in octaves]
        loss = [math.log2(1000.0)] * len(octaves)
        of_bits, of_loss = (RateCurve(1000, tuple(zip(octaves, part, strict=True))) for part in (bits, loss))
        curves[width] = ServedCurve(of_bits, of_loss, width + 0.1)
    return curves


def test_shares_average_to_the_target_and_what_is_served_together_gets_one_width() -> None:
    inputs = [{"q": served(3.0), "k": served(2.0)}, {"a": served(0.0)}, {"b": served(6.0)}, {"c": served(2.0)}]
    apart = allocate_served(inputs, {}, 4.0)
    assert sum(share.bits for share in apart.values()) / 5 == pytest.approx(4.0)
    assert len({share.step for share in apart.values()}) == 1
    assert apart["q"].width == apart["k"].width
    assert apart["b"].width > apart["a"].width
    alike = allocate_served(inputs, {"a": "experts", "b": "experts"}, 4.0)
    assert alike["a"].width == alike["b"].width
    assert sum(share.bits for share in alike.values()) / 5 == pytest.approx(4.0)
    # The only width that is affordable leaves much of the target: it goes into finer steps.
    assert allocate_served([{"q": served(3.0)}], {}, 3.9)["q"].bits == pytest.approx(3.9)
    with pytest.raises(NumericalError, match=r"target_bits, served: expected at least 2\.1"):
        allocate_served(inputs, {}, 2.0)


def test_what_overflows_at_every_step_is_left_to_damping() -> None:
    found = allocate_served([{"q": served(30.0), "k": served(29.0)}], {}, 2.5)
    assert [(share.width, share.bits) for share in found.values()] == [(2, pytest.approx(2.5))] * 2
    # Not the coarsest that was tried, from which damping would start far too high.
    assert {share.step for share in found.values()} == {2.0 ** (10 - _TRIED[-1])}


def test_a_target_below_the_narrowest_codes_is_refused_by_shapes() -> None:
    linears = [torch.nn.Linear(64, 48, device="meta")] * 2
    check_target_bits(linears, Recipe("latq", target_bits=4.0, count="served"))
    with pytest.raises(ConfigError, match=r"target_bits: expected more than 3\.\d+ served bits per weight"):
        check_target_bits(linears, Recipe("latq", target_bits=3.0, count="served"))


def test_recipes_that_cannot_count_what_is_served() -> None:
    with pytest.raises(ConfigError, match="hptq does not use count"):
        Recipe("hptq", target_bits=4.0, count="served")
    with pytest.raises(ConfigError, match=r"recipe\.without: expected feedback, rate-damping"):
        Recipe("latq", target_bits=4.0, count="served", without=("rows",))
    with pytest.raises(ConfigError, match=r"recipe\.target_bits: expected a finite number above 0 and at most 9"):
        Recipe("latq", target_bits=9.5, count="served")
    with pytest.raises(ConfigError, match=r"recipe\.count: expected one of stored, served"):
        Recipe("latq", target_bits=4.0, count="memory")


def test_where_some_targets_always_overflow_the_fewest_are_taken_and_noted() -> None:
    generator = torch.Generator().manual_seed(7)
    x = torch.randn(24, 96, generator=generator) @ torch.randn(96, 96, generator=generator)  # fewer tokens than inputs
    factor = factorize((x.T @ x).double() / 24, "act", 1e-4)
    identity = factorize(torch.eye(8, dtype=torch.float64), "natural", 1e-4)
    inputs = InputLattice(factor, torch.zeros(96, dtype=torch.int8), 0.0)
    outputs = OutputLattice([identity], torch.zeros(8, dtype=torch.int8), 0.0)
    weight = torch.randn(8, 96, generator=generator)
    least = served_overhead(8, 96, 2) / weight.numel()
    found = latq(weight, inputs, outputs, Share(1.0, least, 2))
    overflow = served_bits(found.rounding.z, 2) / weight.numel() - least
    assert overflow > 0
    assert found.note == f"{least + overflow:.4f} bits per weight, the nearest found to {least:g}"
    assert 2.0**-8 <= float(found.weight.scale) <= 2.0**4
    assert found.rounding.loss <= found.rounding.bound
    assert torch.equal(found.dequantized, found.weight.dequantize())


def changed(model: Path, to: Path, change: Callable[[dict[str, torch.Tensor]], None]) -> Path:
    """A copy of a model with other weights."""
    shutil.copytree(model, to)
    tensors = load_file(to / "model.safetensors")
    change(tensors)
    save_file(tensors, to / "model.safetensors", metadata={"format": "pt"})
    return to


def test_columns_of_zeros_do_not_overflow_by_what_others_feed_back(
    two_blocks: Path, calibration_text: Path, tmp_path: Path
) -> None:
    model = changed(
        two_blocks, tmp_path / "model", lambda some: some["model.layers.0.self_attn.o_proj.weight"][:, :250].zero_()
    )
    ignore = (*FEW["ignore"], "q_proj", "k_proj", "v_proj")
    recipe = Recipe("latq", target_bits=2.45, count="served", num_samples=8, seq_len=64, ignore=ignore)
    report = quantize_checkpoint(recipe, model, tmp_path / "out", calibration=str(calibration_text))
    assert 2.43 < report["totals"]["served_bits_per_weight"] <= 2.45
    # Not by damping without end.
    assert max(layer["damping"] for layer in report["layers"]) < 1


@pytest.mark.parametrize("count", ["stored", "served"])
def test_a_linear_of_zeros_is_quantized(count: str, two_blocks: Path, calibration_text: Path, tmp_path: Path) -> None:
    name = "model.layers.0.self_attn.o_proj"
    model = changed(two_blocks, tmp_path / "model", lambda some: some[f"{name}.weight"].zero_())
    ignore = (*FEW["ignore"], "q_proj", "k_proj", "v_proj")  # their gradients are zero
    recipe = Recipe("latq", target_bits=2.6, count=count, num_samples=8, seq_len=64, ignore=ignore)
    quantize_checkpoint(recipe, model, tmp_path / "out", calibration=str(calibration_text))
    assert list(verify(tmp_path / "out")) == []
    # On a mid-rise grid zeros are half a step.
    weight = CheckpointReader(tmp_path / "out").weight(name).dequantize()
    assert float(weight.abs().max()) < 1e-3


def test_records_count_codes_of_the_width_that_is_shared(
    two_blocks: Path, calibration_text: Path, tmp_path: Path
) -> None:
    def scatter(tensors: dict[str, torch.Tensor]) -> None:
        weight = tensors["model.layers.0.self_attn.q_proj.weight"]
        weight[torch.rand(weight.shape, generator=torch.Generator().manual_seed(0)) < 0.02] *= 8

    model = changed(two_blocks, tmp_path / "model", scatter)
    few = {"num_samples": 8, "seq_len": 64, "ignore": FEW["ignore"], "without": ("rate-damping",)}
    recipe = Recipe("latq", target_bits=3.2, count="served", **few)
    quantize_checkpoint(recipe, model, tmp_path / "out", calibration=str(calibration_text))
    reader = CheckpointReader(tmp_path / "out")
    records = {record.name: record.served_bits for record in reader.measured()}
    wider = 0
    for block in range(2):
        linears = [f"model.layers.{block}.self_attn.{part}_proj" for part in "qkv"]
        integers = {name: reader.weight(name).integers() for name in linears}
        possible = {width: [served_bits(z, width) / z.numel() for z in integers.values()] for width in SUPPORTED_BITS}
        assert [pytest.approx(records[name]) for name in linears] in list(possible.values())
        wider += sum(records[name] > served_bits(z) / z.numel() + 1e-9 for name, z in integers.items())
    assert wider > 0
    assert list(verify_certificate(tmp_path / "out", model, str(calibration_text), tolerance=1e-6)) == []


@pytest.fixture(scope="module")
def checkpoint(mini_model: Path, calibration_text: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("served") / "checkpoint"
    quantize_checkpoint(SERVED, mini_model, path, calibration=str(calibration_text))
    return path


def test_a_model_takes_the_memory_it_was_asked_to(checkpoint: Path) -> None:
    assert list(verify(checkpoint)) == []
    report = CheckpointReader(checkpoint).report()
    assert TARGET - 0.02 < report["totals"]["served_bits_per_weight"] <= TARGET
    assert report["totals"]["bits_per_weight"] < TARGET - 0.5
    assert all(layer["bound_holds"] for layer in report["layers"])


def test_merged_as_they_are_served_the_linears_take_no_more(checkpoint: Path) -> None:
    reader = CheckpointReader(checkpoint)
    records = {record.name: record for record in reader.measured()}
    total, weights = 0, 0
    for block in range(4):
        for parts in ("qkv", "o"):
            linears = [f"model.layers.{block}.self_attn.{part}_proj" for part in parts]
            shards = [(name, reader.weight(name)) for name in linears]
            merged = merge(shards, decode(shards, torch.device("cpu")), torch.device("cpu"))
            alone = sum(records[name].served_bits * math.prod(reader.shapes[name]) for name in linears)
            # Column scales and the first row pointer are there once.
            saved = (len(linears) - 1) * 32 * (merged.cols + 1)
            assert merged.served_bits() >= alone - saved - 1
            total, weights = total + merged.served_bits(), weights + merged.shape[0] * merged.cols
    assert total / weights <= TARGET


def test_at_equal_memory_it_loses_less_than_a_model_that_counts_what_is_stored(
    checkpoint: Path, mini_model: Path, calibration_text: Path, evaluation_text: Path, tmp_path: Path
) -> None:
    text = tmp_path / "text.txt"
    text.write_text(evaluation_text.read_text(encoding="utf-8")[:24_000], encoding="utf-8")
    # By stored bits as many as here take more memory, and lose more nevertheless.
    stored = CheckpointReader(checkpoint).report()["totals"]["bits_per_weight"] - 0.3
    report = quantize_checkpoint(
        Recipe("latq", target_bits=stored, **FEW), mini_model, tmp_path / "stored", calibration=str(calibration_text)
    )
    assert report["totals"]["served_bits_per_weight"] > TARGET
    options = {"seq_len": 256, "baseline": str(mini_model), "batch_size": 8, "dtype": "float32"}
    found, other = (evaluate(path, str(text), **options).kl for path in (checkpoint, tmp_path / "stored"))
    assert found < 0.9 * other
