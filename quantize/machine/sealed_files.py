"""Tensors on disk for a resumed run, sealed by a fingerprint.

Invariant: a file is written atomically and never modified; a modified file is rejected, and so is one of another name.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from vllm_latq.errors import CheckpointError
from vllm_latq.format.files import readable
from vllm_latq.format.reader import fingerprint_of, tensor_digest
from vllm_latq.quantize.machine.durable_files import named_failures, rename_durably


def write_sealed(path: Path, noted: Any, tensors: Mapping[str, torch.Tensor]) -> None:
    """Write tensors, and a JSON value beside them; the folder is made if it is missing."""
    text, temporary = json.dumps(noted), path.with_suffix(".tmp")
    metadata = {"noted": text, "fingerprint": _fingerprint(path, text, tensors)}
    with named_failures(path.parent):
        path.parent.mkdir(parents=True, exist_ok=True)
        save_file(dict(tensors), temporary, metadata=metadata)
        rename_durably(temporary, path)


def read_sealed(path: Path, expected: str, hint: str, check: bool = True) -> tuple[Any, dict[str, torch.Tensor]]:
    """Return the JSON value and the tensors that `write_sealed` wrote.

    Args:
        path: of the file.
        expected, hint: what the file is, and what to do if it is damaged, for errors.
        check: False for a file that this process has checked before: digests take as long as reading.

    Raises:
        CheckpointError: the file is damaged.
    """
    with readable(path, hint), safe_open(path, framework="pt", device="cpu") as file:
        metadata = file.metadata() or {}
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - not a mapping
    noted = metadata.get("noted", "")
    if check and metadata.get("fingerprint") != _fingerprint(path, noted, tensors):
        raise CheckpointError(str(path), f"{expected} as they were written", "others", hint)
    return json.loads(noted), tensors


def _fingerprint(path: Path, noted: str, tensors: Mapping[str, torch.Tensor]) -> str:
    return fingerprint_of([f"{path.name} {noted}", *(tensor_digest(name, tensor) for name, tensor in tensors.items())])
