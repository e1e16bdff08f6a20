"""Results of `latq eval`, kept beside the checkpoint in EVALUATION_FILE. FORMAT.md section 7.

Invariant: a new run is added to those before it. The file is not covered by the fingerprint.
"""

import hashlib
import json
import math
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import vllm_latq
from vllm_latq.format.config import QUANT_METHOD
from vllm_latq.format.evaluation import kept_runs
from vllm_latq.format.files import read_json
from vllm_latq.format.reader import EVALUATION_FILE
from vllm_latq.format.scheme import CONFIG_KEY
from vllm_latq.quantize.machine.durable_files import rename_durably


def is_checkpoint(directory: str | Path) -> bool:
    """Return whether a name is a directory on this machine that holds a checkpoint of this package."""
    config = Path(directory) / "config.json"
    if not config.is_file():
        return False
    quantization = read_json(config).get(CONFIG_KEY)
    return isinstance(quantization, dict) and quantization.get("quant_method") == QUANT_METHOD


def described_text(source: str) -> dict[str, str | None]:
    """Return the name of a text and, if it is a file, the SHA-256 of its bytes."""
    path = Path(source)
    if not path.is_file():
        return {"name": source, "sha256": None}
    with path.open("rb") as file:
        return {"name": path.name, "sha256": hashlib.file_digest(file, "sha256").hexdigest()}


def add_run(checkpoint: str | Path, run: Mapping[str, Any]) -> None:
    """Add a run to those beside a checkpoint, with the date and the version; raises OSError and CheckpointError."""
    path = Path(checkpoint) / EVALUATION_FILE
    stamp = {"date": datetime.now(UTC).isoformat(timespec="seconds"), "vllm_latq": vllm_latq.__version__}
    runs = [*kept_runs(checkpoint), _plain({**stamp, **run})]
    temporary = path.with_name(f"{path.name}.tmp")
    temporary.unlink(missing_ok=True)  # nothing is written through a link
    temporary.write_text(json.dumps({"runs": runs}, indent=2, allow_nan=False) + "\n", encoding="utf-8")
    rename_durably(temporary, path)


def _plain(value: Any) -> Any:
    """Return a value as JSON has it: null for an infinite perplexity, text for objects of lm-eval."""
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value if isinstance(value, str | int | float | None) else str(value)
