"""The files of a model that a checkpoint takes over as they are: tokenizer, templates, licences, and others.

Everything is copied except:

    weights     WEIGHTS, with their indices. A folder that holds weights is left out with everything in it; except
                the folders of sentence-transformers for each further step of a model (1_Pooling, 2_Dense), which are
                copied with their safetensors
    settings    SETTINGS, which tell a reader to take other weights or another configuration
    code        CODE: a checkpoint is data
    hidden      files and folders whose names begin with a dot
    own         OWN, which a checkpoint has of its own, or a run while it works

Invariant: only regular files of the model's directory are copied (or, in a snapshot of the Hugging Face cache, the
blobs that its links name). A link that leaves the directory is refused.
"""

import os
import shutil
from collections.abc import Iterable, Iterator
from fnmatch import fnmatch
from pathlib import Path

from vllm_latq.errors import CheckpointError
from vllm_latq.format.files import WEIGHT_SUFFIXES, regular_file
from vllm_latq.format.reader import EVALUATION_FILE, REPORT_FILE
from vllm_latq.quantize.machine.durable_files import sync

# Weights in other formats than this project reads: all that a checkpoint may not hold, and more.
OTHER_WEIGHTS = (
    *(f"*{suffix}" for suffix in WEIGHT_SUFFIXES if suffix != ".safetensors"),
    *("*.pickle", "*.npy", "*.onnx*", "*.tflite", "*.ot", "*.nemo", "*.pdparams", "*.distcp", "*.engine"),
    "*.llamafile",
)
WEIGHTS = ("*.safetensors", "*.index*.json", *OTHER_WEIGHTS)
# transformers loads the base model that an adapter names; params.json belongs to Mistral's own weights, and
# hf_quant_config.json to weights that ModelOpt quantized.
SETTINGS = ("adapter_config.json", "params.json", "hf_quant_config.json")
CODE = ("*.py", "*.pyc", "*.so")
# Files and folders of a run that a finished checkpoint does not have; first its state, its lock and its statistics.
STATE_FILE, LOCK_FILE, SCRATCH = "state.json", ".lock", "scratch"
# Files that a killed run was writing, here or in safetensors, and its activations.
UNFINISHED = ("*.tmp", ".tmp*", "activations-*")
RUN_FILES = (STATE_FILE, LOCK_FILE, SCRATCH, "records-*", *UNFINISHED)
OWN = ("config.json", "README.md", REPORT_FILE, EVALUATION_FILE, *RUN_FILES)
STEP_FOLDERS = "[0-9]_*"
HINT = "Replace the link with what it points to, or remove it: it would be copied into the checkpoint."


def companion_files(source: Path) -> list[Path]:
    """Return the files to copy, relative to a model directory, in the order of their names.

    Raises:
        CheckpointError: a link that leaves the directory or points to a folder, or something that is no regular file.
    """
    return sorted(_companions(source))


def _companions(source: Path) -> Iterator[Path]:
    for place, folders, files in os.walk(source):
        folder, left = Path(place), {".*", *WEIGHTS, *SETTINGS, *CODE}
        if folder == source:
            left.update(OWN)
        elif folder.parent == source and fnmatch(folder.name, STEP_FOLDERS):
            left = {".*", *OTHER_WEIGHTS, *CODE}
        elif any(_matches(name, WEIGHTS) for name in files):
            folders.clear()
            continue
        folders[:] = [name for name in folders if not _matches(name, left)]
        for name in folders:
            if (folder / name).is_symlink():
                raise CheckpointError(str(folder / name), "a folder", "a link to a folder", HINT)
        for name in files:
            if not _matches(name, left):
                yield regular_file(folder / name, "a regular file", source).relative_to(source)


def _matches(name: str, patterns: Iterable[str]) -> bool:
    """Return whether a name, or the name in lower case, matches a pattern."""
    return any(fnmatch(form, pattern) for form in (name, name.lower()) for pattern in patterns)


def copy_companions(source: Path, destination: Path) -> None:
    """Copy the companion files of a model directory into another directory; when this returns they survive a crash.

    Raises:
        CheckpointError: as `companion_files`, or a file that cannot be read.
    """
    for name in companion_files(source):
        copy = destination / name
        copy.parent.mkdir(parents=True, exist_ok=True)
        try:
            original = (source / name).open("rb")
        except OSError as error:
            hint = "Restore the permission to read it, or remove it, and go on with --resume."
            raise CheckpointError(str(source / name), "a readable file", str(error), hint) from error
        with original, copy.open("wb") as target:
            shutil.copyfileobj(original, target)
        sync(copy)
