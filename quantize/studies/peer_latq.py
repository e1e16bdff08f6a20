"""Quantize with this package in a process of its own, as its peers are: see `peers`.

python peer_latq.py JOB.json        JOB: `peers.Job` as JSON; options: `recipe`, and `calibration`, the text that
                                    the job's tokens were drawn from
"""

import json
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from vllm_latq.quantize.pipeline import quantize_checkpoint
from vllm_latq.quantize.recipe import Recipe


def main(path: str) -> None:
    """Quantize with this package as the JSON file `path` says."""
    job = json.loads(Path(path).read_text())
    torch.set_num_threads(job["threads"])
    begun: list[tuple[float, float]] = []

    def listen(event: Mapping[str, Any]) -> None:
        # The model is open and the text tokenized, as with the peers when their clock starts.
        if event["event"] == "start":
            begun.append((time.perf_counter(), time.process_time()))

    recipe = Recipe.from_dict(job["options"]["recipe"])
    calibration = job["options"]["calibration"]
    quantize_checkpoint(recipe, job["model"], job["output"], calibration=calibration, device="cpu", on_event=listen)
    (started, busy) = begun[0]
    seconds = {"quantize": time.perf_counter() - started, "quantize_cpu": time.process_time() - busy}
    Path(job["seconds"]).write_text(json.dumps(seconds))


if __name__ == "__main__":
    main(sys.argv[1])
