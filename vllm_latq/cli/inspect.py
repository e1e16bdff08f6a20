"""The command `latq inspect`: a checkpoint in ten lines and a table of its blocks, or all its linears.

Invariant: sizes are counted from the stored tensors; errors come from the checkpoint's report.
"""

import argparse
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vllm_latq import console
from vllm_latq.cli.parser import FOLDERS, complete

if TYPE_CHECKING:
    from vllm_latq.events import Progress

_FROM_REPORT = (
    "served_bits",
    "error",
    "relative_error",
    "bound",
    "expected_error",
    "bound_holds",
    "damping",
    "seconds",
    "loss",
    "note",
)
Layer = Mapping[str, Any]
# Bits in files and in memory that differ by less are shown as one number.
SAME_BITS = 0.05


def add_command(commands: Any) -> None:
    """Add `inspect` to the subparsers of `latq`."""
    command = commands.add_parser(
        "inspect", help="summarize a checkpoint by block, or a running quantization (OUT.partial)"
    )
    command.set_defaults(run=run)
    directory = command.add_argument("checkpoint", metavar="CKPT", help="checkpoint directory, or OUT.partial")
    complete(directory, FOLDERS)
    command.add_argument("--layers", action="store_true", help="list all linears instead of the blocks")
    command.add_argument("--json", action="store_true", help="print JSON")


def run(options: argparse.Namespace) -> int:
    """Run the command and return its exit status."""
    with console.ProgressDisplay(waiting="reading the checkpoint") as display:
        from vllm_latq.events import stage_progress
        from vllm_latq.quantize.runs.progress import is_partial

        if is_partial(options.checkpoint):
            facts, layers, found = _partial(options.checkpoint)
        else:
            found = inspect_checkpoint(options.checkpoint, stage_progress(display, "reading"))
            facts, layers = _facts(options.checkpoint, found), found["layers"]
    if options.json:
        console.print_json(found)
        return 0
    console.print_facts(facts)
    if layers:
        print()
        (_print_layers if options.layers else _print_blocks)(layers)
    return 0


def inspect_checkpoint(directory: str | Path, progress: "Progress | None" = None) -> dict[str, Any]:
    """Return a summary of a checkpoint that can be written as JSON.

    Args:
        directory: of the checkpoint.
        progress: called with the number of linears that are read, and of all.

    Returns:
        bits_per_weight, bytes, weights: of all quantized linears. They count everything stored.
        served_bits_per_weight: in memory while served; None if a layer has no such number.
        error, loss, loss_bound: sums over the layers; None if a layer has no such number.
        checkpoint_bytes: size of all files with weights.
        recipe, fingerprint, model: from the checkpoint's config; `model` is the first of its architectures.
        calibration, seconds, device, torch, vllm_latq: from its report.
        evaluation: the last run of `latq eval`, or None.
        beside: name and shape of each quantized matrix that is no linear of a block and no head: embeddings, and
            layers that predict further tokens. `beside_bytes` are theirs.
        layers: for each linear, name, shape, encoding, bits (stored per weight) and outlier_density; and from the
            report served_bits, error, relative_error, bound, expected_error, bound_holds, damping, seconds, loss and
            note, each None if the report does not have it.

    Raises:
        LatqError: the checkpoint is damaged.
    """
    from vllm_latq.format.evaluation import evaluation_runs, kept_runs
    from vllm_latq.format.reader import CheckpointReader
    from vllm_latq.format.report import LayerReport, summed

    reader = CheckpointReader(directory)
    report = reader.report()
    evaluation_runs(directory)  # refuses what `kept_runs` returns as it is
    measured = {record.name: record for record in reader.measured()}
    records = [measured.get(name, LayerReport(name)) for name in reader.linears]
    layers, total_bits, sizes = [], 0, [rows * cols for rows, cols in reader.linears.values()]
    for record, (name, (rows, cols)) in zip(records, reader.linears.items(), strict=True):
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
        if progress is not None:
            progress(len(layers), len(records))
    served, total_weights = summed(records, "served_bits", sizes), sum(sizes)
    architectures = reader.document.get("architectures")
    return {
        "bits_per_weight": total_bits / max(total_weights, 1),
        "served_bits_per_weight": None if served is None else served / max(total_weights, 1),
        "bytes": total_bits // 8,
        "weights": total_weights,
        **{key: summed(records, key) for key in ("error", "loss", "loss_bound")},
        "checkpoint_bytes": sum(path.stat().st_size for path in reader.directory.glob("*.safetensors")),
        "recipe": dict(reader.config.recipe),
        "fingerprint": reader.config.fingerprint,
        "model": architectures[0] if isinstance(architectures, list) and architectures else None,
        **{key: report.get(key) for key in ("calibration", "seconds", "device", "torch", "vllm_latq")},
        "evaluation": next(reversed(kept_runs(directory)), None),
        "beside": [{"name": name, "shape": list(reader.shapes[name])} for name in reader.config.beside],
        "beside_bytes": reader.beside_bytes,
        "layers": layers,
    }


def _facts(checkpoint: str, found: Mapping[str, Any]) -> dict[str, str]:
    """Return name -> text of the lines of the summary."""
    from vllm_latq.format.reader import FINGERPRINT_PREFIX

    layers = found["layers"]
    stored, served, recipe = found["bits_per_weight"], found["served_bits_per_weight"], found["recipe"]
    others = found["checkpoint_bytes"] - found["bytes"]
    memory = "" if served is None else f"; {served:.3f} in memory while served"
    if served is not None and abs(served - stored) < SAME_BITS:
        memory = ", in files and in memory"
    facts = {
        "checkpoint": checkpoint,
        "model": f"{found['model'] or '-'}, {len(layers)} linears with {found['weights']:,} weights quantized",
        "method": f"{recipe.get('method', '-')}, stored as {', '.join(sorted({one['encoding'] for one in layers}))}",
        "size": f"{console.size(found['bytes'])} in quantized linears, {console.size(max(others, 0))} in all else",
        "beside": _beside(found),
        "bits": f"{stored:.3f} per quantized weight{memory}",
        "error": _errors(layers),
    }
    if not found["beside"]:
        del facts["beside"]
    if found["loss"] is not None:
        limit = "" if found["loss_bound"] is None else f", at most {console.number(found['loss_bound'], 3)}"
        facts["predicted"] = f"KL divergence {console.number(found['loss'], 3)} nats per token{limit}"
    if found["evaluation"] is not None:
        facts["measured"] = _measured(found["evaluation"])
    facts["calibration"] = _calibration(found["calibration"])
    facts["made with"] = _maker(found)
    facts["fingerprint"] = (found["fingerprint"] or "-").removeprefix(FINGERPRINT_PREFIX)
    return facts


def _beside(found: Mapping[str, Any]) -> str:
    """Return the quantized matrices beside the linears in words."""
    if not found["beside"]:
        return "nothing quantized"
    weights = sum(rows * cols for rows, cols in (one["shape"] for one in found["beside"]))
    names = [one["name"] for one in found["beside"]]
    kinds = names[0] if len(names) == 1 else f"{names[0]} and {len(names) - 1} more"
    bits = 8 * found["beside_bytes"] / weights
    return f"{kinds}, {console.size(found['beside_bytes'])} at {bits:.3f} bits; a token reads rows of them, or nothing"


def _errors(layers: Sequence[Layer]) -> str:
    """Return the largest relative error, where it is, and how many bounds hold."""
    worst = max(layers, key=lambda layer: layer["relative_error"] or 0.0, default=None)
    if worst is None or worst["relative_error"] is None:
        return "not measured"
    claims = [layer["bound_holds"] for layer in layers]
    counts = {"holds": claims.count(True), "VIOLATED": claims.count(False), "is not claimed": claims.count(None)}
    bounds = "; ".join(f"bound {verdict} for {count}" for verdict, count in counts.items() if count)
    return f"at most {console.percent(worst['relative_error'])} ({console.short_name(worst['name'])}); {bounds}"


def _measured(run: Mapping[str, Any]) -> str:
    """Return the last run of `latq eval` in words."""
    from vllm_latq.format.evaluation import EvaluationRun

    found = EvaluationRun.from_dict(run, "evaluation")
    baseline = found.baseline_perplexity
    parts = [] if found.kl is None else [f"KL divergence {console.number(found.kl, 3)}"]
    if found.perplexity is not None:
        against = "" if baseline is None else f" (baseline {console.number(baseline, 5)})"
        parts.append(f"perplexity {console.number(found.perplexity, 5)}{against}")
    if found.text:
        parts.append(f"on {found.described}")
    if found.tasks:
        parts.append(f"tasks {', '.join(found.tasks)}")
    return ", ".join(parts) or "-"


def _calibration(found: Any) -> str:
    if not isinstance(found, Mapping):
        return "none"
    name = f" of {found['name']}" if found.get("name") else ""
    return f"{found.get('samples')} windows of {found.get('seq_len')} tokens{name}"


def _maker(found: Mapping[str, Any]) -> str:
    seconds = found["seconds"]
    took = f", in {console.duration(seconds)}" if isinstance(seconds, float | int) else ""
    return f"vllm-latq {found['vllm_latq']}, torch {found['torch']} on {found['device']}{took}"


def _share(share: float | None) -> str:
    return "-" if share is None else f"{100 * share:.1f}%"


def _print_blocks(layers: Sequence[Layer]) -> None:
    """Print one row for each block, and for each linear outside the blocks."""
    blocks: dict[str, list[Layer]] = {}
    for layer in layers:
        first = console.short_name(layer["name"]).partition(".")[0]
        blocks.setdefault(first if first.isdecimal() else layer["name"], []).append(layer)
    total = _sum(layers, "loss") or _sum(layers, "error")
    key = "loss" if _sum(layers, "loss") else "error"
    rows = []
    for block, members in blocks.items():
        worst = max(members, key=lambda layer: layer["relative_error"] or 0.0)
        leaf = console.short_name(worst["name"]).removeprefix(f"{block}.")
        share = _sum(members, key)
        rows.append(
            {
                "block": block,
                "bits": console.bits(_mean(members, "bits")),
                "served": console.bits(_mean(members, "served_bits")),
                "outliers": _share(_mean(members, "outlier_density")),
                "max error": console.percent(worst["relative_error"]),
                "where": leaf if worst["relative_error"] is not None else "-",
                f"of {key}": _share(None if share is None or not total else share / total),
                "notes": str(sum(bool(layer["note"]) for layer in members)),
            }
        )
    _print_rows(rows)


def _print_layers(layers: Sequence[Layer]) -> None:
    """Print one row for each linear."""
    rows = [
        {
            "linear": console.short_name(layer["name"]),
            "shape": "x".join(map(str, layer["shape"])) if "shape" in layer else "-",
            "bits": console.bits(layer["bits"]),
            "served": console.bits(layer["served_bits"]),
            "outliers": _share(layer["outlier_density"]),
            "error": console.percent(layer["relative_error"]),
            "bound": "-" if layer["bound"] is None else console.claim(layer["bound"], layer["bound_holds"]),
        }
        for layer in layers
    ]
    _print_rows(rows)
    for layer in layers:
        if layer["note"]:
            print(f"{console.short_name(layer['name'])}: {console.printable(layer['note'])}")


def _print_rows(rows: Sequence[dict[str, str]]) -> None:
    """Print a table without the columns that say nothing."""
    same = all(row["served"] == "-" or abs(float(row["served"]) - float(row["bits"])) < SAME_BITS for row in rows)
    left_out = {"served"} if same else set()
    left_out |= {
        name for name in ("outliers", "notes") if all(row.get(name) in ("0.0%", "0", "-", None) for row in rows)
    }
    columns = [name for name in rows[0] if name not in left_out]
    console.print_table("", columns, [[row[name] for name in columns] for row in rows])


def _mean(layers: Sequence[Layer], key: str) -> float | None:
    """Return the mean over the weights of the layers; None if a layer lacks the number."""
    if any(layer[key] is None for layer in layers):
        return None
    sizes = [layer["shape"][0] * layer["shape"][1] if "shape" in layer else 1 for layer in layers]
    return sum(layer[key] * size for layer, size in zip(layers, sizes, strict=True)) / sum(sizes)


def _sum(layers: Sequence[Layer], key: str) -> float | None:
    values = [layer[key] for layer in layers]
    return None if None in values else sum(values)


def _partial(directory: str) -> tuple[dict[str, str], Sequence[Layer], dict[str, Any]]:
    """Return the facts and the records of an unfinished run, and both as JSON."""
    from vllm_latq.quantize.runs.progress import partial_progress

    found = partial_progress(directory)
    recipe = found["recipe"] if isinstance(found["recipe"], Mapping) else {}
    started = datetime.fromtimestamp(found["started"]).isoformat(" ", "seconds")
    facts = {
        "unfinished": f"{directory}, started {started}",
        "method": f"{recipe.get('method', '-')}, {recipe.get('bits', '-')} bits",
        "shards": f"{found['shards_done']} of {found['shards']}, {console.size(found['bytes'])}",
        "statistics": f"{found['statistics']} of {found['shards']} parts",
        "continue": f"latq quantize MODEL {directory.rstrip('/').removesuffix('.partial')} --resume (same options)",
    }
    if not found["statistics"]:
        del facts["statistics"]
    return facts, found["layers"], found
