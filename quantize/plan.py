"""What a recipe will make of a model, from shapes alone: nothing is read but headers, nothing is computed."""

from pathlib import Path
from typing import Any

from vllm_latq.quantize.decoder import Decoder
from vllm_latq.quantize.pipeline import quantized_linears
from vllm_latq.quantize.recipe import Recipe
from vllm_latq.quantize.totals import totals
from vllm_latq.spec import tensor_specs


def plan(recipe: Recipe, source: str | Path) -> dict[str, Any]:
    """Per linear: name, shape, expected stored bits per weight and bytes; their totals; and what is left as it is.

    `unquantized` lists the matrices inside the blocks, and the head, that the recipe ignores or that are no linears.

    Bits are exact for schemes without outliers, at the outlier rate for SSQR, and the target for Huffman coding.
    """
    decoder = Decoder(source, "cpu")
    layers = []
    quantized = quantized_linears(decoder, recipe)
    for name, linear in quantized.items():
        rows, cols = linear.out_features, linear.in_features
        bits = _stored_bits(recipe, rows, cols) / (rows * cols)
        layers.append({"name": name, "shape": [rows, cols], "bits": bits, "bytes": round(bits * rows * cols / 8)})
    summary = {key: value for key, value in totals(layers).items() if key not in ("error", "bound")}
    left = [
        {"name": name, "shape": list(shape)}
        for name, shape in decoder.matrices().items()
        if name.removesuffix(".weight") not in quantized
    ]
    return {"recipe": recipe.to_dict(), "totals": summary, "layers": layers, "unquantized": left}


def _stored_bits(recipe: Recipe, rows: int, cols: int) -> float:
    if recipe.scheme.encoding == "huffman":
        assert recipe.target_bits is not None
        return recipe.target_bits * rows * cols
    bits = 0.0
    for spec in tensor_specs(recipe.scheme, rows, cols).values():
        count = 1.0
        for size in spec.shape:
            count *= recipe.outlier_rate * rows * cols if size is None else size
        bits += 8 * spec.dtype.itemsize * count
    return bits
