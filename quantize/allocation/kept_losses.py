"""The losses of a model's units on disk: a resumed run allocates the same bits without two passes over the model.

Invariant: the file is written atomically and never modified; a modified file is rejected, and so is another model's.
"""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from vllm_latq.errors import CheckpointError
from vllm_latq.format.files import readable
from vllm_latq.format.reader import fingerprint_of, tensor_digest
from vllm_latq.quantize.machine.durable_files import named_failures, rename_durably
from vllm_latq.quantize.methods.latq import UnitLosses

FILE = "losses.safetensors"
_HINT = "Remove it and continue with --resume: it is made again."


def write_losses(path: Path, losses: Mapping[str, UnitLosses], source: Sequence[str]) -> None:
    """Write the losses of a model's linears.

    Args:
        path: of the file.
        losses: linear -> what its units cost, in the order of the model.
        source: digest of the tensors of each part of the model.
    """
    tensors: dict[str, torch.Tensor] = {}
    for name, layer in losses.items():
        tensors |= {f"{name}.worth": layer.worth.contiguous(), f"{name}.sizes": layer.sizes.contiguous()}
    layers = {name: (layer.weights, layer.fixed_bits, layer.outlying) for name, layer in losses.items()}
    noted = json.dumps({"layers": layers, "source": list(source)})
    with named_failures(path.parent):
        path.parent.mkdir(parents=True, exist_ok=True)
        save_file(
            tensors, path.with_suffix(".tmp"), metadata={"noted": noted, "fingerprint": _fingerprint(noted, tensors)}
        )
        rename_durably(path.with_suffix(".tmp"), path)


def read_losses(path: Path) -> tuple[dict[str, UnitLosses], list[str]]:
    """Return what `write_losses` wrote, the losses and the digests; CheckpointError if the file is damaged."""
    with readable(path, _HINT), safe_open(path, framework="pt", device="cpu") as file:
        metadata = file.metadata() or {}
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - not a mapping
    noted = metadata.get("noted", "")
    if metadata.get("fingerprint") != _fingerprint(noted, tensors):
        raise CheckpointError(str(path), "the losses of a model as they were written", "others", _HINT)
    found = json.loads(noted)
    losses = {
        name: UnitLosses(tensors[f"{name}.worth"], tensors[f"{name}.sizes"], *numbers)
        for name, numbers in found["layers"].items()
    }
    return losses, found["source"]


def _fingerprint(noted: str, tensors: Mapping[str, torch.Tensor]) -> str:
    return fingerprint_of([noted, *(tensor_digest(name, tensor) for name, tensor in tensors.items())])
