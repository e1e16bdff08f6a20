"""Sums over the records of a model's quantized linears."""

from typing import Any


def totals(layers: list[dict[str, Any]]) -> dict[str, Any]:
    """Sums over the quantized linears: weights, stored and served bits per weight, bytes, error, loss and bounds; None
    where a layer lacks it."""
    sizes = [layer["shape"][0] * layer["shape"][1] for layer in layers]
    weights = sum(sizes)
    bits = sum(layer["bits"] * size for layer, size in zip(layers, sizes, strict=True))

    def total(key: str, factors: list[int] | None = None) -> float | None:
        values = [layer[key] for layer in layers if layer.get(key) is not None]
        if len(values) < len(layers):
            return None
        return sum(value * factor for value, factor in zip(values, factors or [1] * len(layers), strict=True))

    served = total("served_bits", sizes)

    return {
        "weights": weights,
        "bits_per_weight": bits / weights,
        "served_bits_per_weight": None if served is None else served / weights,
        "bytes": round(bits / 8),
        "error": total("error"),
        "bound": total("bound"),
        "loss": total("loss"),
        "loss_bound": total("loss_bound"),
    }
