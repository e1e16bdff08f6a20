"""The certificate of a checkpoint: its report's numbers against those recomputed from the original model.

What a certificate proves, if recipe, model and calibration text are what they are said to be: the stored weights have
the errors, losses and worst cases that the report claims, on the lattices (order, damping, and for latq the model's
step) that this recipe leads to; all other tensors, and config.json, are the model's. It does not prove that the weights
are the ones nearest plane rounds to, and does not look at the tokenizer. With sweeps, or a beam on a grid that ends,
any weights are within the bound, and it only says how far they have left the cells.

Invariant: nothing of the report enters what it is compared with, and only the recipe is taken on trust.
"""

import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import torch

from vllm_latq.errors import CheckpointError, ConfigError, LatqError
from vllm_latq.format.files import read_json
from vllm_latq.format.reader import REPORT_FILE, CheckpointReader
from vllm_latq.format.report import NUMBERS, LayerReport, finite_number
from vllm_latq.format.scheme import LayerScheme
from vllm_latq.format.validate import weight_from_tensors
from vllm_latq.format.verify import KV_SCALES
from vllm_latq.quantize.calibration.fisher import Stages, ignore_stages
from vllm_latq.quantize.calibration.text import BUNDLED
from vllm_latq.quantize.calibration.windows import Samples, calibration_samples
from vllm_latq.quantize.certificate.recompute import layer_by_layer, whole_model
from vllm_latq.quantize.lattice.trellis_plane import LIMIT
from vllm_latq.quantize.methods.record import totals
from vllm_latq.quantize.methods.rounding import round_matrix
from vllm_latq.quantize.model.decoder import Decoder
from vllm_latq.quantize.model.loading import compute_dtype, torch_device
from vllm_latq.quantize.model.meta_model import model_config
from vllm_latq.quantize.model.parts import model_parts
from vllm_latq.quantize.model.selection import quantized_linears, rounded_matrices
from vllm_latq.quantize.recipe import GROUP, Recipe

# Relative. On one machine the numbers agree to the last digits; another device adds up activations in another order,
# and in bfloat16 where the model is: errors then move by parts of a percent.
TOLERANCE = 0.01
_RECOMPUTED = tuple(name for name in NUMBERS if name != "seconds")
# Reports of earlier versions lack them.
_NOT_ALWAYS_CLAIMED = ("served_bits", "served_bits_per_weight")
# The loss of a layer of zeros is zero up to rounding, which no relative tolerance compares.
_NOTHING = 1e-12
_HINT = "Report or weights were changed, or model, calibration text or version are not the ones of this checkpoint."


def verify_certificate(
    checkpoint: str | Path,
    model: str | Path,
    calibration: str | None = None,
    *,
    tolerance: float = TOLERANCE,
    device: str | None = None,
    stages: Stages = ignore_stages,
) -> Iterator[LatqError]:
    """Every claim of the report that does not hold; run `checkpoint.verify` first, which checks the files.

    Args:
        checkpoint: directory of a quantized checkpoint.
        model: directory of the model it was made from.
        calibration: the text it was calibrated on, as given to `quantize_checkpoint`; None for the bundled text.
        tolerance: relative, between a claimed and a recomputed number.
        device: torch device; None takes CUDA where there is one.
        stages: gives the progress of each stage.

    Raises:
        LatqError: model, checkpoint or calibration data cannot be used at all.
    """
    if not 0 < tolerance < 1:
        raise ConfigError("tolerance", "a number between 0 and 1", repr(tolerance))
    reader = CheckpointReader(checkpoint)
    recipe = Recipe.from_dict(reader.config.recipe)
    decoder = Decoder(model, torch_device(device), compute_dtype(recipe.dtype))
    claimed = reader.report().get("calibration")
    if calibration is None and isinstance(claimed, dict) and claimed.get("name") == BUNDLED:
        calibration = BUNDLED
    if calibration is None:
        raise ConfigError("calibration", "the calibration text of the checkpoint", "none", "Errors are measured on it.")
    samples = calibration_samples(decoder, recipe, calibration)
    certificate = _Certificate(reader, decoder, recipe, tolerance, stages)
    certificate.require_same_linears()
    yield from certificate.foreign_parts()
    yield from certificate.calibration(samples)
    yield from certificate.layers(samples)


@dataclass(frozen=True)
class _Certificate:
    reader: CheckpointReader
    decoder: Decoder
    recipe: Recipe
    tolerance: float
    stages: Stages

    def require_same_linears(self) -> None:
        """Raise unless the quantized linears are those that the recipe takes from the model, and stored as it says."""
        quantized = quantized_linears(self.decoder, self.recipe)
        wanted = {name: (linear.out_features, linear.in_features) for name, linear in quantized.items()}
        if wanted != (stored := dict(self.reader.linears)):
            differing = sorted(set(wanted.items()) ^ set(stored.items()))
            found = f"a difference at {differing[0][0]}"
            raise CheckpointError(
                str(self.reader.directory), "the model's linears", found, "Is it made from this model?"
            )
        stores = self.recipe.scheme
        for name in wanted:
            scheme = self.reader.config.scheme_for(name)
            for stored_as in fields(stores):
                key = stored_as.name
                if key == "bits" and self.recipe.grid == GROUP:
                    continue  # they follow from the loss: `whole_model` checks them
                is_stored = getattr(scheme, key, None)
                if is_stored != getattr(stores, key):
                    where = f"{self.reader.directory}: {name}"
                    expected = f"{key} {getattr(stores, key)}, which this recipe of {self.recipe.method} stores"
                    hint = "Was its recipe changed, or is it of an earlier version?"
                    raise CheckpointError(where, expected, str(is_stored), hint)

    def foreign_parts(self) -> Iterator[LatqError]:
        """Where config.json and the unquantized tensors are not the model's own."""
        config = self.reader.directory / "config.json"
        ours = model_config(self.decoder.source, self.decoder.unties(self.reader.linears))
        theirs = read_json(config)
        theirs.pop("quantization_config", None)
        for key in sorted(ours.keys() | theirs.keys()):
            if ours.get(key) != theirs.get(key):
                yield CheckpointError(
                    f"{config}: {key}", f"the model's {ours.get(key)!r}", repr(theirs.get(key)), _HINT
                )
        quantized, rounded = self.reader.linears, self.reader.config.beside
        wanted = rounded_matrices(self.decoder, self.recipe, quantized)
        untouched = {name for part in model_parts(self.decoder, quantized) for name in part.untouched_names()}
        untouched -= {f"{name}.weight" for name in rounded}
        stored = set(self.reader.store.names())
        if self.reader.config.has_kv_scales:
            stored = {name for name in stored if name in untouched or not name.endswith(KV_SCALES)}
        for name in self.reader.shapes:
            stored -= {f"{name}.{suffix}" for suffix in self.reader.weight(name).to_tensors()}
        for name in sorted(untouched ^ stored):
            found = "no such tensor" if name in untouched else "a tensor that the model does not have"
            expected = "the model's own tensor" if name in untouched else "nothing"
            yield CheckpointError(f"{self.reader.directory}: {name}", expected, found, _HINT)
        for name in sorted(untouched & stored):
            if not torch.equal(self.reader.store.get(name), self.decoder.store.get(name)):
                yield CheckpointError(
                    f"{self.reader.directory}: {name}", "the model's own tensor", "another one", _HINT
                )
        for name, scheme in rounded.items():
            expected = "the model's own matrix, rounded to nearest"
            if scheme != wanted.get(name) or not self._is_rounded(name, scheme):
                yield CheckpointError(f"{self.reader.directory}: {name}", expected, "another one", _HINT)
        for name in sorted(wanted.keys() - rounded.keys()):
            yield CheckpointError(
                f"{self.reader.directory}: {name}", "rounded as the recipe says", "unquantized", _HINT
            )

    def _is_rounded(self, name: str, scheme: LayerScheme) -> bool:
        """Return whether a stored matrix is the model's, rounded to nearest, up to the tolerance."""
        tensors, _ = round_matrix(self.decoder.store.get(f"{name}.weight"), scheme, name, self.decoder.device)
        expected = weight_from_tensors(tensors, scheme, self.reader.shapes[name], name).dequantize()
        return float((self.reader.weight(name).dequantize() - expected).norm()) <= self.tolerance * float(
            expected.norm()
        )

    def calibration(self, samples: Samples) -> Iterator[LatqError]:
        """Yield the problem of another calibration text, or of another number of windows; the name may differ."""
        claimed, found = self.reader.report().get("calibration"), samples.to_dict()
        if not isinstance(claimed, dict) or claimed | {"name": samples.name} != found:
            where = f"{self._report}: calibration"
            yield CheckpointError(where, f"{found}, what the text gives", repr(claimed), "Use the same text.")

    def layers(self, samples: Samples) -> Iterator[LatqError]:
        """The claims of each linear, in the order of the model, and their totals."""
        claims = {claim.name: claim for claim in self.reader.measured()}
        everything: list[dict[str, Any]] = []
        progress, linears = self.stages("recomputing"), len(self.reader.linears)
        progress(0, linears)
        for found in self._recomputed(samples):
            progress(len(everything), linears)
            claim = claims.get(found.name)
            if claim is None:
                yield CheckpointError(self._report, f"a record of {found.name}", "none", _HINT)
            else:
                yield from self._compare(claim, found)
            everything.append(asdict(found) | {"shape": self.reader.shapes[found.name]})
        yield from self._totals(totals(everything))

    def _recomputed(self, samples: Samples) -> Iterator[LayerReport]:
        if self.recipe.method == "latq":
            return whole_model(self.reader, self.decoder, self.recipe, samples, self.stages, self.tolerance)
        return layer_by_layer(self.reader, self.decoder, self.recipe, samples.tokens)

    def _compare(self, claim: LayerReport, found: LayerReport) -> Iterator[LatqError]:
        where = f"{self._report}: {claim.name}"
        for key in _RECOMPUTED:
            if key in _NOT_ALWAYS_CLAIMED and getattr(claim, key) is None:
                continue
            yield from self._same(f"{where}.{key}", getattr(claim, key), getattr(found, key))
        if claim.bound_holds and not found.bound_holds:
            expected, value = f"a rounding error below {_text(found.bound)}", _text(found.rounding_error)
            if found.loss_bound is not None and self.recipe.grid == GROUP:
                expected, value = f"a loss below {_text(found.loss_bound)}", _text(found.loss)
            elif found.loss_bound is not None:
                expected, value = f"the term of every tile below {LIMIT:g} times its plan", "a larger one"
            hint = "The guarantee that the report claims does not hold for these weights."
            yield CheckpointError(f"{where}.bound_holds", expected, value, hint)
        if claim.bound_holds is None and found.bound_holds is not None and not self.recipe.bound_ignores_clipping:
            yield CheckpointError(f"{where}.bound_holds", "a claim, as the bound omits nothing", "null", _HINT)
        if claim.bound_holds is False:
            yield CheckpointError(f"{where}.bound_holds", "true or null", "false", "Its quantizer broke its guarantee.")

    def _totals(self, found: dict[str, Any]) -> Iterator[LatqError]:
        claimed = self.reader.report().get("totals")
        if not isinstance(claimed, dict):
            yield CheckpointError(f"{self._report}: totals", "an object", type(claimed).__name__, _HINT)
            return
        for key, value in found.items():
            if key in _NOT_ALWAYS_CLAIMED and claimed.get(key) is None:
                continue
            where = f"{self._report}: totals.{key}"
            yield from self._same(where, finite_number(claimed.get(key), where), value)

    def _same(self, where: str, claimed: float | None, found: float | None) -> Iterator[LatqError]:
        near = claimed == found  # both None
        if claimed is not None and found is not None:
            near = math.isclose(claimed, found, rel_tol=self.tolerance, abs_tol=_NOTHING)
        if not near:
            expected = f"the recomputed {_text(found)} within {self.tolerance:g}"
            yield CheckpointError(where, expected, _text(claimed), _HINT)

    @property
    def _report(self) -> str:
        return str(self.reader.directory / REPORT_FILE)


def _text(value: float | None) -> str:
    return "null" if value is None else f"{value:.6g}"
