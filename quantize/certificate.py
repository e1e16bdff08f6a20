"""The certificate of a checkpoint: its report's errors and bounds, recomputed from the original model.

The calibration text takes the same way as in pipeline.py, with the checkpoint's weights in place of a quantizer: the
Hessian of each input, its factor, and from them the errors and the worst case of the weights that are stored.

Invariant: nothing of the report enters what it is compared with; only the recipe is taken on trust.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from vllm_latq.checkpoint import REPORT_FILE, CheckpointReader
from vllm_latq.errors import CheckpointError, ConfigError, LatqError
from vllm_latq.quantize.decoder import Decoder
from vllm_latq.quantize.hessian import InputHessian
from vllm_latq.quantize.lattice import Factor
from vllm_latq.quantize.loading import default_device
from vllm_latq.quantize.methods import BOUND_SLACK, layer_factor
from vllm_latq.quantize.pipeline import calibration_samples, quantized_linears
from vllm_latq.quantize.recipe import Recipe
from vllm_latq.quantize.stream import Stream
from vllm_latq.quantize.target import corrected_target, measure_errors
from vllm_latq.report import LayerReport
from vllm_latq.weights import HuffmanWeight, PackedWeight, Weight

# Relative. On one machine the numbers agree to the last digits; another device adds up activations in another order,
# and in bfloat16 where the model is: errors then move by parts of a percent.
TOLERANCE = 0.01


def verify_certificate(
    checkpoint: str | Path,
    model: str | Path,
    calibration: str | None,
    *,
    tolerance: float = TOLERANCE,
    device: str | None = None,
) -> Iterator[LatqError]:
    """Every claim of the report that does not hold; run `checkpoint.verify` first, which checks the files.

    Args:
        checkpoint: directory of a quantized checkpoint.
        model: directory of the model it was made from.
        calibration: the text it was calibrated on, as given to `quantize_checkpoint`.
        tolerance: relative, between a claimed and a recomputed number.
        device: torch device; None takes CUDA where there is one.

    Raises:
        LatqError: model, checkpoint or calibration data cannot be used at all.
    """
    if not 0 < tolerance < 1:
        raise ConfigError("tolerance", "a number between 0 and 1", repr(tolerance))
    reader = CheckpointReader(checkpoint)
    recipe = Recipe.from_dict(reader.config.recipe)
    if recipe.method == "latq" or recipe.budget is not None:
        expected, found = "layers that were quantized block after block, each on its own", "whole-model allocation"
        raise ConfigError(f"{checkpoint}: recipe", expected, found, "Its report cannot be recomputed yet.")
    decoder = Decoder(model, device or default_device())
    if calibration is None:
        raise ConfigError("calibration", "the calibration text of the checkpoint", "none", "Errors are measured on it.")
    samples = calibration_samples(decoder, recipe, calibration)
    assert samples is not None
    certificate = _Certificate(reader, decoder, recipe, tolerance)
    yield from certificate.foreign_tensors()
    yield from certificate.calibration(samples)
    yield from certificate.blocks(samples)


@dataclass(frozen=True)
class _Certificate:
    reader: CheckpointReader
    decoder: Decoder
    recipe: Recipe
    tolerance: float

    def foreign_tensors(self) -> Iterator[LatqError]:
        """Linears that are not those of the model, and unquantized tensors that are not the model's."""
        wanted = {
            name: (linear.out_features, linear.in_features)
            for name, linear in quantized_linears(self.decoder, self.recipe).items()
        }
        if wanted != dict(self.reader.shapes):
            differing = sorted(set(wanted.items()) ^ set(self.reader.shapes.items()))
            found = f"a difference at {differing[0][0]}"
            raise CheckpointError(
                str(self.reader.directory), "the model's linears", found, "Is it made from this model?"
            )
        theirs = set(self.reader.store.names())
        for name in self.decoder.store.names():
            if name in theirs and not torch.equal(self.reader.store.get(name), self.decoder.store.get(name)):
                yield CheckpointError(f"{self.reader.directory}: {name}", "the model's own tensor", "another one")

    def calibration(self, samples: torch.Tensor) -> Iterator[LatqError]:
        """Whether as much calibration text was there."""
        claimed = self.reader.report().get("calibration")
        found = {"samples": samples.shape[0], "seq_len": samples.shape[1]}
        if claimed != found:
            where = f"{self.reader.directory / REPORT_FILE}: calibration"
            yield CheckpointError(where, f"{found}, what the text gives", repr(claimed), "Use the same text.")

    def blocks(self, samples: torch.Tensor) -> Iterator[LatqError]:
        """The claims of each linear, in the order of the model."""
        stream = Stream(self.decoder, samples, original=self.recipe.target == "original")
        claims = {claim.name: claim for claim in self.reader.measured()}
        for shard in range(len(self.decoder) + 1):
            head = shard == len(self.decoder)
            linears = self.decoder.linears(shard) if not head else {self.decoder.head_name: self.decoder.head_linear}
            linears = {name: linear for name, linear in linears.items() if name in self.reader.shapes}
            if head and not linears:
                return
            with self.decoder.head() if head else self.decoder.block(shard) as block, torch.no_grad():
                for hessian in stream.inputs(shard, block, linears):
                    yield from self._input(hessian, linears, claims)
                if not head:
                    stream.advance(shard, block)

    def _input(
        self, hessian: InputHessian, linears: Mapping[str, nn.Linear], claims: Mapping[str, LayerReport]
    ) -> Iterator[LatqError]:
        """The claims of the linears of one input; their weights are replaced by the stored ones."""
        known = None
        if self.recipe.needs_calibration:
            known = layer_factor(hessian.matrix, self.recipe, hessian.linears[0])
        for name in hessian.linears:
            stored = self.reader.weight(name)
            quantized = stored.dequantize().to(hessian.matrix.device)
            if name not in claims:
                yield CheckpointError(str(self.reader.directory / REPORT_FILE), f"a record of {name}", "none")
            else:
                found = self._recompute(linears[name].weight.float(), stored, quantized, hessian, known)
                yield from self._compare(claims[name], found)
            linears[name].weight.copy_(quantized)

    def _recompute(
        self,
        weight: torch.Tensor,
        stored: Weight,
        quantized: torch.Tensor,
        hessian: InputHessian,
        factor: Factor | None,
    ) -> dict[str, float | None]:
        target = weight
        if hessian.drift is not None and factor is not None:
            target = corrected_target(weight, factor, hessian.drift, self.recipe.correction)
        gram = hessian.matrix if factor is None else factor.undamped
        errors = measure_errors(quantized, weight, target, gram, hessian.drift, hessian.linears[0])
        return {
            "bits": stored.storage_bits() / quantized.numel(),
            "outlier_density": stored.outlier_density(),
            "error": errors.total,
            "relative_error": errors.relative,
            "rounding_error": errors.rounding,
            "bound": None if factor is None else worst_case(stored, factor, self.recipe.rounding == "stochastic"),
            "damping": None if factor is None else factor.damping,
        }

    def _compare(self, claim: LayerReport, found: Mapping[str, float | None]) -> Iterator[LatqError]:
        where = f"{self.reader.directory / REPORT_FILE}: {claim.name}"
        for key, value in found.items():
            claimed = getattr(claim, key)
            if (claimed is None) != (value is None) or not _near(claimed, value, self.tolerance):
                hint = (
                    "Report or weights were changed, or model or calibration text are not the ones of this checkpoint."
                )
                within = f"{_text(value)} within {self.tolerance:g}"
                yield CheckpointError(f"{where}.{key}", f"the recomputed {within}", _text(claimed), hint)
        error, bound = found["rounding_error"], found["bound"]
        if claim.bound_holds and not (error is not None and bound is not None and error <= bound * (1 + BOUND_SLACK)):
            hint = "The guarantee that the report claims does not hold for these weights."
            yield CheckpointError(f"{where}.bound_holds", f"a rounding error below {_text(bound)}", _text(error), hint)
        if claim.bound_holds is False:
            yield CheckpointError(f"{where}.bound_holds", "true or null", "false", "Its quantizer broke its guarantee.")


def worst_case(weight: Weight, factor: Factor, stochastic: bool = False) -> float:
    """The bound of Theorem 5 from the stored scales: 1/4 sum_t D_t s_t^2 over all rows, or without the 1/4.

    Args:
        weight: as stored.
        factor: of the damped Hessian; a Huffman-coded weight is bounded on its reduced basis if it has one.
        stochastic: whether rounding was, with errors of up to a whole step.
    """
    share = 1.0 if stochastic else 0.25
    if isinstance(weight, HuffmanWeight):
        lattice = factor if factor.reduction is None else factor.reduction.factor
        return share * weight.shape[0] * float(weight.scale.double().square() * lattice.diagonal.sum().cpu())
    per_column = torch.zeros_like(factor.diagonal)
    per_column[factor.order] = factor.diagonal
    per_column = per_column.cpu()
    assert isinstance(weight, PackedWeight)
    assert weight.scales is not None
    per_group = per_column.reshape(weight.scales.shape[1], -1).sum(1)
    return share * float((weight.scales.double().square().cpu() @ per_group).sum())


def _near(claimed: float | None, found: float | None, tolerance: float) -> bool:
    return claimed is None or found is None or math.isclose(claimed, found, rel_tol=tolerance, abs_tol=1e-12)


def _text(value: float | None) -> str:
    return "null" if value is None else f"{value:.6g}"
