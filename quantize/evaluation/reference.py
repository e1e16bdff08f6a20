"""The likeliest next tokens of an original model on disk, so that a large original runs once.

A file holds, for each counted position, TOP_TOKENS token ids and their log-probabilities, the log-probability of the
token that came next, and the probability of all other tokens together: 8 * 256 + 8 bytes.

Invariant: a file appears complete or not at all, and is used only for the windows that it was made of.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file

import vllm_latq
from vllm_latq.errors import CheckpointError
from vllm_latq.format.files import readable
from vllm_latq.quantize.evaluation.predictions import Predictions
from vllm_latq.quantize.evaluation.windows import Windows
from vllm_latq.quantize.machine.durable_files import named_failures

VERSION = "1"
# Column -> dtype, and number of dimensions.
_COLUMNS = {
    "ids": (torch.int32, 2),
    "logprobs": (torch.float32, 2),
    "rest": (torch.float32, 1),
    "targets": (torch.float32, 1),
}
# Probabilities in float32 may be larger than 1 by less than this.
_ROUNDING = 1e-3
_MAKE = "Make it again with `latq eval ORIGINAL --save-reference FILE`."


def save_reference(
    path: Path, predictions: Predictions, model: str, text: Mapping[str, str | None], windows: Windows
) -> None:
    """Write the top predictions of a model, at all counted positions of the windows in order.

    Args:
        path: file to write, of `durable_files.appearing`.
        predictions: as `Predictions.top` returns them.
        model: name of the model.
        text: `name` and `sha256` of the text.
        windows: of the text.

    Raises:
        CheckpointError: the file cannot be written.
    """
    assert predictions.ids is not None
    assert predictions.rest is not None
    columns = {
        "ids": predictions.ids.to(torch.int32),
        "logprobs": predictions.logprobs.float(),
        "rest": predictions.rest.float(),
        "targets": predictions.targets.float(),
    }
    metadata = {
        "latq_reference": VERSION,
        "vllm_latq": vllm_latq.__version__,
        "model": model,
        "text": text["name"] or "",
        "text_sha256": text["sha256"] or "",
        "windows": str(len(windows)),
        "seq_len": str(windows.tokens.shape[1]),
        "digest": windows.digest(),
    }
    tensors = {name: column.cpu().contiguous() for name, column in columns.items()}
    with named_failures(path, "Choose another file, or make room."):
        save_file(tensors, path, metadata=metadata)


def read_reference(
    path: str | Path, text: Mapping[str, str | None], windows: Windows, vocabulary: int
) -> tuple[str, Predictions]:
    """Return the name of the original model and its predictions.

    Args:
        path: a file of `save_reference`.
        text: `name` and `sha256` of the text.
        windows: of the text.
        vocabulary: number of tokens that the model knows.

    Raises:
        CheckpointError: no such file, a damaged one, or one of another text, of other windows or of another tokenizer.
    """
    where = f"reference {path}"
    if not Path(path).is_file():
        raise CheckpointError(where, "a file of `latq eval --save-reference`", "no such file", "Check the path.")
    with readable(Path(path), _MAKE), safe_open(path, framework="pt", device="cpu") as file:
        noted = file.metadata() or {}
        if noted.get("latq_reference") != VERSION:
            raise CheckpointError(where, f"a reference of version {VERSION}", "another file", _MAKE)
        columns: dict[str, Any] = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    if noted.get("text_sha256") != (text["sha256"] or "") or not (text["sha256"] or noted.get("text") == text["name"]):
        raise CheckpointError(where, f"the text of the reference, {noted.get('text')}", str(text["name"]), _MAKE)
    found = {"windows": str(len(windows)), "seq_len": str(windows.tokens.shape[1])}
    if (kept := {name: noted.get(name) for name in found}) != found:
        expected = f"the {kept['windows']} windows of {kept['seq_len']} tokens of the reference"
        hint = "Give --seq-len and --max-windows as they were when the reference was saved."
        raise CheckpointError(where, expected, f"{found['windows']} of {found['seq_len']}", hint)
    if noted.get("digest") != windows.digest():
        hint = "Compare a quantized checkpoint with the model it was made from."
        raise CheckpointError(where, "the tokens of the reference's tokenizer", "other tokens for the same text", hint)
    _check_columns(columns, windows.positions, vocabulary, where)
    predictions = Predictions(columns["targets"].double(), columns["logprobs"], columns["ids"], columns["rest"])
    return noted.get("model", ""), predictions


def _check_columns(columns: Mapping[str, Any], positions: int, vocabulary: int, where: str) -> None:
    """Raise CheckpointError unless the columns are predictions at so many positions, of tokens of the vocabulary."""
    if columns.keys() != _COLUMNS.keys():
        raise CheckpointError(where, f"the columns {', '.join(_COLUMNS)}", ", ".join(columns) or "none", _MAKE)
    for name, column in columns.items():
        dtype, dimensions = _COLUMNS[name]
        if (column.dtype, column.dim()) != (dtype, dimensions) or not column.numel():
            found = f"{column.dtype} {list(column.shape)}"
            raise CheckpointError(where, f"`{name}` of {dtype}, of {dimensions} dimensions, not empty", found, _MAKE)
    if {len(column) for column in columns.values()} != {positions}:
        raise CheckpointError(where, f"{positions} predictions", "another number", _MAKE)
    ids, logprobs = columns["ids"], columns["logprobs"]
    if ids.shape != logprobs.shape or int(ids.min()) < 0 or int(ids.max()) >= vocabulary:
        raise CheckpointError(where, f"token ids below {vocabulary}, with a log-probability each", "others", _MAKE)
    # Comparisons with NaN are false. A token without any probability has -inf.
    likely = all(bool((one <= _ROUNDING).all()) for one in (logprobs, columns["targets"]))
    if not likely or not ((columns["rest"] >= 0) & (columns["rest"] <= 1 + _ROUNDING)).all():
        raise CheckpointError(where, "log-probabilities up to 0, and probabilities `rest` from 0 to 1", "others", _MAKE)
