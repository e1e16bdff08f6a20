"""Sums over the records of a model's quantized linears."""

from typing import Any


def totals(layers: list[dict[str, Any]]) -> dict[str, Any]:
    """Sums over the quantized linears: weights, stored bits per weight, bytes, summed error, loss and bounds."""
    weights = sum(layer["shape"][0] * layer["shape"][1] for layer in layers)
    bits = sum(layer["bits"] * layer["shape"][0] * layer["shape"][1] for layer in layers)

    def total(key: str) -> float | None:
        values = [layer[key] for layer in layers if layer.get(key) is not None]
        return sum(values) if len(values) == len(layers) else None

    return {
        "weights": weights,
        "bits_per_weight": bits / weights,
        "bytes": round(bits / 8),
        "error": total("error"),
        "bound": total("bound"),
        "loss": total("loss"),
        "loss_bound": total("loss_bound"),
    }
