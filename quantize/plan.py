"""What a recipe will make of a model, from shapes alone: nothing is read but headers, nothing is computed."""

import math
from pathlib import Path
from typing import Any

from vllm_latq.quantize.allocation.served_allocation import check_target_bits
from vllm_latq.quantize.methods.record import totals
from vllm_latq.quantize.model.decoder import Decoder
from vllm_latq.quantize.model.selection import beside, matrices, quantized_linears
from vllm_latq.quantize.recipe import Recipe

# Of the totals: what only a run can measure.
NOT_PLANNED = ("served_bits_per_weight", "error", "bound", "loss", "loss_bound")


def plan(recipe: Recipe, source: str | Path) -> dict[str, Any]:
    """Per linear: name, shape, expected stored bits per weight and bytes; their totals; and what is left as it is.

    `unquantized` lists the matrices inside the blocks, and the head, that the recipe ignores or that are no linears;
    `beside` the modules beside the language model.

    Bits are exact for schemes without outliers, at the outlier rate for SSQR, and the target for entropy coding: of
    what is in memory where the recipe counts that.
    """
    decoder = Decoder(source, "cpu")
    layers = []
    quantized = quantized_linears(decoder, recipe)
    check_target_bits(quantized.values(), recipe)
    for name, linear in quantized.items():
        rows, cols = linear.out_features, linear.in_features
        bits = recipe.planned_bits(rows, cols) / (rows * cols)
        layers.append({"name": name, "shape": [rows, cols], "bits": bits, "bytes": round(bits * rows * cols / 8)})
    summary = {key: value for key, value in totals(layers).items() if key not in NOT_PLANNED}
    left = [
        {"name": name, "shape": list(shape)}
        for name, shape in matrices(decoder).items()
        if name.removesuffix(".weight") not in quantized
    ]
    others = [
        {"name": name, "matrices": len(shapes), "weights": sum(map(math.prod, shapes))}
        for name, shapes in beside(decoder).items()
    ]
    return {"recipe": recipe.to_dict(), "totals": summary, "layers": layers, "unquantized": left, "beside": others}
