"""The losses of a model's linears on disk: a resumed run allocates the same bits without passes over the model.

Invariant: the file is written atomically and never modified; a modified file is rejected, and so is another model's.
"""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from vllm_latq.errors import CheckpointError
from vllm_latq.format.files import readable
from vllm_latq.format.reader import fingerprint_of, tensor_digest
from vllm_latq.quantize.machine.durable_files import named_failures, rename_durably

FILE = "losses.safetensors"
_HINT = "Remove it and continue with --resume: it is made again."


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
    noted = json.dumps({"layers": kept.layers, "source": list(kept.source)})
    tensors = dict(kept.tensors)
    with named_failures(path.parent):
        path.parent.mkdir(parents=True, exist_ok=True)
        save_file(
            tensors, path.with_suffix(".tmp"), metadata={"noted": noted, "fingerprint": _fingerprint(noted, tensors)}
        )
        rename_durably(path.with_suffix(".tmp"), path)


def read_kept(path: Path) -> KeptLosses:
    """Return what `write_kept` wrote; CheckpointError if the file is damaged."""
    with readable(path, _HINT), safe_open(path, framework="pt", device="cpu") as file:
        metadata = file.metadata() or {}
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - not a mapping
    noted = metadata.get("noted", "")
    if metadata.get("fingerprint") != _fingerprint(noted, tensors):
        raise CheckpointError(str(path), "the losses of a model as they were written", "others", _HINT)
    found = json.loads(noted)
    return KeptLosses(found["layers"], tensors, found["source"])


def _fingerprint(noted: str, tensors: Mapping[str, torch.Tensor]) -> str:
    return fingerprint_of([noted, *(tensor_digest(name, tensor) for name, tensor in tensors.items())])
