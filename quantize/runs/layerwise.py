"""Quantize each linear for its own outputs: every method except latq."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass

import torch
from torch import nn

from vllm_latq.errors import NumericalError
from vllm_latq.quantize.calibration.hessian import InputHessian
from vllm_latq.quantize.calibration.stream import Stream
from vllm_latq.quantize.lattice.factor import Factor
from vllm_latq.quantize.methods.layer import layer_factor, quantize_layer
from vllm_latq.quantize.model.parts import Part
from vllm_latq.quantize.model.selection import unreached
from vllm_latq.quantize.runs.run import Quantized, Records, Session


@dataclass(frozen=True)
class LayerwiseQuantizer:
    """Quantizes the linears of one input with the factor of their Hessian."""

    session: Session

    def inputs(self, part: Part, module: nn.Module, stream: Stream, earlier: Records) -> Sequence[InputHessian]:
        """Return the Hessian of each input of the part's linears."""
        return stream.inputs(part, module)

    def effort(self, one: InputHessian) -> int:
        """Return the work of an input: outputs * channels^2, where the channels differ more than the outputs."""
        return len(one.shared) * max(1, len(one.matrix)) ** 2

    def owner(self, one: InputHessian) -> int | None:
        """Return None: every process has every Hessian."""
        return None

    def quantize(self, one: InputHessian, part: Part) -> Quantized:
        """Quantize the linears of one input, and leave the quantized weights in the part."""
        records, tensors = {}, {}
        known = self._factorized(one)
        for name in one.shared.names:
            weight = part.linears[name].weight
            result = quantize_layer(weight, known, self.session.recipe, name, one.drift)
            weight.copy_(result.dequantized)
            stored = result.weight.to_tensors()
            tensors.update({f"{name}.{suffix}": tensor.cpu() for suffix, tensor in stored.items()})
            note = "; ".join(filter(None, (result.record.note, one.note)))
            records[name] = asdict(result.record) | {"note": note}
            self.session.emit({"event": "layer", **records[name]})
        return Quantized(records, tensors)

    def _factorized(self, hessian: InputHessian) -> torch.Tensor | Factor | None:
        """Return the factor of the Hessian; the Hessian alone where it only measures errors; None without one."""
        if not hessian.tokens:
            return None
        where = hessian.shared.leader
        if not torch.isfinite(hessian.matrix).all():
            hint = "The model overflows on this text, or its weights are damaged."
            raise NumericalError(where, "finite calibration activations", "NaN or infinity", hint)
        if not self.session.recipe.needs_calibration:
            return hessian.matrix
        if not hessian.matrix.diagonal().any():
            raise unreached(list(hessian.shared.names), self.session.quantized, "activations")
        return layer_factor(hessian.matrix, self.session.recipe, where)
