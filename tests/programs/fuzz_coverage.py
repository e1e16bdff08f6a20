"""Fuzz the reader with atheris, guided by coverage; options are libFuzzer's: `-runs=20000 CORPUS`.

The input says which file of which tiny checkpoint is damaged, where, and with which bytes. A finding is any exception
except an error of ours, weights that changed without a complaint, memory beyond the limit, or no answer in 20 seconds.
"""

import shutil
import sys
import tempfile
from pathlib import Path

import atheris

with atheris.instrument_imports(include=["vllm_latq"]):
    from helpers.checkpoints import SCHEMES, write_tiny_checkpoint
    from helpers.fuzz_target import check_directory, read_weights

ROOT = Path(tempfile.mkdtemp(prefix="latq-fuzz-"))
SAMPLES = [write_tiny_checkpoint(ROOT / encoding, encoding) for encoding in SCHEMES]
WEIGHTS = [read_weights(sample) for sample in SAMPLES]
LIMITS = ("-rss_limit_mb=2048", "-timeout=20")


def fuzz_one(data: bytes) -> None:
    """Damage a checkpoint as the input says, and read it."""
    provider = atheris.FuzzedDataProvider(data)
    chosen = provider.ConsumeIntInRange(0, len(SAMPLES) - 1)
    copy = ROOT / "copy"
    shutil.rmtree(copy, ignore_errors=True)
    shutil.copytree(SAMPLES[chosen], copy)
    file = provider.PickValueInList(sorted(copy.iterdir()))
    content = bytearray(file.read_bytes())
    for _ in range(provider.ConsumeIntInRange(1, 4)):
        at, cut = provider.ConsumeIntInRange(0, len(content)), provider.ConsumeIntInRange(0, 8)
        content[at : at + cut] = provider.ConsumeBytes(provider.ConsumeIntInRange(0, 8))
    file.write_bytes(content)
    check_directory(copy, WEIGHTS[chosen])


if __name__ == "__main__":
    atheris.Setup([sys.argv[0], *LIMITS, *sys.argv[1:]], fuzz_one)
    atheris.Fuzz()
