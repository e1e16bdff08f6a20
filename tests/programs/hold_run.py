"""Resumes a run in a directory, prints "ready" and keeps the run for some seconds: `hold_run.py OUT SECONDS`."""

import sys
import time

from vllm_latq.quantize.runs.writer import CheckpointWriter

if __name__ == "__main__":
    writer = CheckpointWriter(sys.argv[1], 2, {"recipe": {"bits": 4}, "source": "model"}, resume=True)
    print("ready", flush=True)
    time.sleep(float(sys.argv[2]))
