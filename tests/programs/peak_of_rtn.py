"""Prints how many bytes of memory rounding to nearest takes beyond the libraries: `peak_of_rtn.py MODEL OUT`."""

import resource
import sys

from vllm_latq.quantize.model.decoder import Decoder
from vllm_latq.quantize.pipeline import quantize_checkpoint
from vllm_latq.quantize.recipe import Recipe


def peak() -> int:
    """Return the largest resident set of this process so far, in bytes."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def main(model: str, out: str) -> None:
    """Load the model's skeleton, which imports all libraries, and then quantize."""
    Decoder(model, "cpu")
    before = peak()
    quantize_checkpoint(Recipe("rtn", 4, group_size=64), model, out)
    print(peak() - before)


if __name__ == "__main__":
    main(*sys.argv[1:])
