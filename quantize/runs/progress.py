"""Progress of an interrupted or running quantization, read from its files (`latq inspect OUT.partial`).

Invariant: only finished shards are counted; reading never disturbs the run that writes beside it.
"""

from pathlib import Path
from typing import Any

from vllm_latq.errors import CheckpointError
from vllm_latq.format.files import read_json
from vllm_latq.format.report import finite_number, layer_reports
from vllm_latq.quantize.model.companion_files import SCRATCH, STATE_FILE


def is_partial(directory: str | Path) -> bool:
    """Return whether a directory belongs to a run that has not finished."""
    return (Path(directory) / STATE_FILE).is_file()


def partial_progress(directory: str | Path) -> dict[str, Any]:
    """Describe the content of `OUT.partial`.

    Returns:
        JSON-ready: `shards`, `shards_done`, `bytes` of the finished shards, `statistics` (number of parts with finished
        statistics), `started` (seconds since 1970), `recipe`, and `layers`: the records of the linears done so far, as
        in the report.

    Raises:
        CheckpointError: a file of the run is damaged.
    """
    path = Path(directory)
    state = read_json(path / STATE_FILE)
    if type(state.get("shards")) is not int or not isinstance(state.get("identity"), dict):
        hint = "Remove the directory to start over."
        raise CheckpointError(str(path / STATE_FILE), "`shards` and `identity`", "something else", hint)
    layers, size, done = [], 0.0, sorted(path.glob("records-*.json"))
    for file in done:
        records = read_json(file)
        layers += [vars(record) for record in layer_reports(records, str(file))]
        size += finite_number(records.get("bytes"), f"{file}: bytes") or 0.0
    return {
        "shards": state["shards"],
        "shards_done": len(done),
        "bytes": round(size),
        "statistics": len(list((path / SCRATCH).glob("statistics-*.safetensors"))),
        "started": (path / STATE_FILE).stat().st_mtime,
        "recipe": state["identity"].get("recipe"),
        "layers": layers,
    }
