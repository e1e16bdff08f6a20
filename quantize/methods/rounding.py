"""Round a matrix to nearest with group scales, a band of rows at a time: embeddings, and layers without calibration."""

from typing import Any

import torch

from vllm_latq.format.encodings.packed import PackedWeight
from vllm_latq.format.scheme import LayerScheme
from vllm_latq.format.tensors import SHAPE, shape_tensor, stored_bits
from vllm_latq.quantize.methods.layer import quantize_layer
from vllm_latq.quantize.recipe import Recipe

# Weights that are rounded at a time: 64 MiB in float32, and as much again for each of a few temporaries.
BAND_WEIGHTS = 1 << 24


def round_matrix(
    weight: torch.Tensor, scheme: LayerScheme, name: str, device: torch.device
) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """Return the stored tensors (suffix -> tensor, on the CPU) of a matrix, and its record for the report.

    Args:
        weight: [r, c], any floating dtype.
        scheme: packed, without outliers.
        name: of the module, for the record and for errors.
        device: where to compute.

    Raises:
        NumericalError: weights that are not finite.
    """
    bits, group_size = scheme.code_layout()
    recipe, (rows, cols) = Recipe("rtn", bits, group_size=group_size), weight.shape
    bands, error, energy = [], 0.0, 0.0
    for band in weight.split(max(1, BAND_WEIGHTS // cols)):
        result = quantize_layer(band.to(device), None, recipe, name)
        assert isinstance(result.weight, PackedWeight)
        bands.append({suffix: tensor.cpu() for suffix, tensor in result.weight.encoded().items()})
        error += float((result.dequantized - band.to(result.dequantized)).double().square().sum())
        energy += float(band.double().square().sum())
    tensors = {suffix: torch.cat([band[suffix] for band in bands]) for suffix in bands[0]}
    tensors[SHAPE] = shape_tensor((rows, cols))
    record = {
        "name": name,
        "shape": [rows, cols],
        "bits": stored_bits(tensors) / (rows * cols),
        "weight_error": error / energy if energy else 0.0,
    }
    return tensors, record
