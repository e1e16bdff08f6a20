"""The losses of a model's linears on disk: a resumed run allocates the same bits without passes over the model."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from vllm_latq.quantize.machine.sealed_files import read_sealed, write_sealed

FILE = "losses.safetensors"


class KeptLosses(NamedTuple):
    """The losses of a model's linears, as an interrupted run kept them.

    Attributes:
        layers: linear -> its numbers and names, in the order of the model.
        tensors: name -> tensor.
        source: digest of the tensors of each part of the model.
    """

    layers: Mapping[str, Any]
    tensors: Mapping[str, torch.Tensor]
    source: Sequence[str]


def write_kept(path: Path, kept: KeptLosses) -> None:
    """Write what a resumed run needs to allocate the same bits."""
    write_sealed(path, {"layers": kept.layers, "source": list(kept.source)}, kept.tensors)


def read_kept(path: Path) -> KeptLosses:
    """Return what `write_kept` wrote; CheckpointError if the file is damaged."""
    hint = "Remove it and continue with --resume: it is made again."
    noted, tensors = read_sealed(path, "the losses of a model", hint)
    return KeptLosses(noted["layers"], tensors, noted["source"])
