"""The property that all fuzzers check: damaged files give the same weights or an error of ours, in bounded memory."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import torch

from helpers.checkpoints import SHAPES
from vllm_latq.cli.inspect import inspect_checkpoint
from vllm_latq.errors import LatqError
from vllm_latq.format.reader import CheckpointReader
from vllm_latq.format.scheme import LayerScheme
from vllm_latq.format.validate import weight_from_tensors
from vllm_latq.format.verify import verify
from vllm_latq.memory import peak_memory

Weights = dict[str, torch.Tensor]
# For reading one checkpoint and importing what that takes. A single matrix of a hostile size would take gigabytes.
MEMORY = 128 << 20


@contextmanager
def bounded_memory(limit: int) -> Iterator[None]:
    """Fail if the process holds `limit` bytes more inside the block than before it."""
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts at what is resident now
    before = peak_memory()
    yield
    grown = peak_memory() - before
    assert grown < limit, f"{grown} bytes, not below {limit}"


def read_weights(directory: Path) -> Weights:
    """Return every quantized matrix of a tiny checkpoint, dequantized."""
    reader = CheckpointReader(directory)
    return {name: reader.weight(name).dequantize() for name in SHAPES}


@bounded_memory(MEMORY)
def check_directory(directory: Path, original: Weights) -> bool:
    """Verify and read a damaged checkpoint; return whether it was accepted. An exception that escapes is a finding."""
    problems = list(verify(directory))
    for problem in problems:
        assert isinstance(problem, LatqError), problem
        assert str(problem).isprintable()
    try:
        weights = read_weights(directory)
        inspect_checkpoint(directory)
    except LatqError:
        assert problems, "refused by the reader, but not by verify"
        return False
    if not problems:
        for name, weight in original.items():
            assert torch.equal(weights[name], weight), name
    return not problems


@bounded_memory(MEMORY)
def check_tensors(tensors: Mapping[str, torch.Tensor], scheme: LayerScheme, shape: tuple[int, int]) -> bool:
    """Load the tensors of one linear; return whether they were accepted, and then would be written the same again."""
    try:
        weight = weight_from_tensors(tensors, scheme, shape, "layer")
        dense = weight.dequantize()
    except LatqError:
        return False
    assert dense.shape == shape
    written = weight.to_tensors()
    assert written.keys() == tensors.keys()
    for suffix, tensor in tensors.items():
        assert torch.equal(written[suffix].cpu(), tensor), suffix
    return True
