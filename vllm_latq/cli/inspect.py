"""Summarize a checkpoint, layer by layer. Sizes are counted from the stored tensors; errors come from its report."""

from pathlib import Path
from typing import Any

from vllm_latq.format.reader import CheckpointReader
from vllm_latq.format.report import LayerReport, summed

_FROM_REPORT = (
    "served_bits",
    "error",
    "relative_error",
    "bound",
    "expected_error",
    "bound_holds",
    "damping",
    "seconds",
    "note",
)


def inspect_checkpoint(directory: str | Path) -> dict[str, Any]:
    """Return a summary of a checkpoint that can be written as JSON.

    Returns:
        bits_per_weight, bytes, weights: of all quantized linears. They count everything stored.
        served_bits_per_weight: in memory while served; None if a layer has no such number.
        error, loss, loss_bound: sums over the layers; None if a layer has no such number.
        recipe, fingerprint: from the checkpoint's config.
        layers: for each linear, name, shape, encoding, bits (stored per weight) and outlier_density; and from the
            report served_bits, error, relative_error, bound, expected_error, bound_holds, damping, seconds and note,
            each None if the report does not have it.

    Raises:
        LatqError: the checkpoint is damaged.
    """
    reader = CheckpointReader(directory)
    measured = {record.name: record for record in reader.measured()}
    records = [measured.get(name, LayerReport(name)) for name in reader.shapes]
    layers, total_bits, sizes = [], 0, [rows * cols for rows, cols in reader.shapes.values()]
    for record, (name, (rows, cols)) in zip(records, reader.shapes.items(), strict=True):
        weight = reader.weight(name)
        facts = weight.describe()
        total_bits += facts.stored_bits
        layers.append(
            {
                "name": name,
                "shape": [rows, cols],
                "encoding": facts.encoding,
                "bits": facts.stored_bits / (rows * cols),
                "outlier_density": weight.outlier_density(),
                **{key: getattr(record, key) for key in _FROM_REPORT},
            }
        )
    served, total_weights = summed(records, "served_bits", sizes), sum(sizes)
    return {
        "bits_per_weight": total_bits / max(total_weights, 1),
        "served_bits_per_weight": None if served is None else served / max(total_weights, 1),
        "bytes": total_bits // 8,
        "weights": total_weights,
        **{key: summed(records, key) for key in ("error", "loss", "loss_bound")},
        "recipe": dict(reader.config.recipe),
        "fingerprint": reader.config.fingerprint,
        "layers": layers,
    }
