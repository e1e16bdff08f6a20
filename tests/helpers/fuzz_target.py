"""What every fuzzer asks of the reader: damaged files hold the same weights or are refused by an error of ours."""

from collections.abc import Mapping
from pathlib import Path

import torch
from tiny_checkpoints import SHAPES

from vllm_latq.checkpoint import CheckpointReader, verify
from vllm_latq.config import LayerScheme
from vllm_latq.errors import LatqError
from vllm_latq.inspection import inspect_checkpoint
from vllm_latq.weights import weight_from_tensors

Weights = dict[str, torch.Tensor]


def read_weights(directory: Path) -> Weights:
    reader = CheckpointReader(directory)
    return {name: reader.weight(name).dequantize() for name in SHAPES}


def check_directory(directory: Path, original: Weights) -> bool:
    """Verify and read a damaged checkpoint; True if it was accepted. Any exception that escapes is a finding."""
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


def check_tensors(tensors: Mapping[str, torch.Tensor], scheme: LayerScheme, shape: tuple[int, int]) -> bool:
    """Load the tensors of one linear; True if they were accepted, and then they are what would be written again."""
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
