"""Read the files of a model directory without trusting them: JSON objects and safetensors tensors.

Invariant: only regular files of the directory are opened (or, in a snapshot of the Hugging Face cache, the blobs that
its links name), nothing is executed, and any fault of a file is raised as a CheckpointError that names the file.
"""

import hashlib
import json
import os
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from vllm_latq.errors import CheckpointError
from vllm_latq.format.tensors import Header

INDEX_FILE = "model.safetensors.index.json"
SINGLE_FILE = "model.safetensors"
# Endings of the files that readers of models take weights from.
WEIGHT_SUFFIXES = (
    *(".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".pkl", ".gguf", ".ggml"),
    *(".h5", ".msgpack", ".npz", ".onnx", ".tensors"),
)
# The files that the fingerprint does not cover, because no reader of a model opens them.
_DOCUMENT_SUFFIXES = (".md", ".png", ".jpg", ".jpeg", ".gif", ".svg", ".webp", ".pdf")
_DOCUMENT_PREFIXES = ("license", "licence", "notice")
# transformers applies the adapter that this file describes to the model in the same directory.
ADAPTER_FILE = "adapter_config.json"
# Parsed JSON takes up to 20 times its size in memory. The index of a model of 10**5 linears has about 60 MB.
MAX_JSON_BYTES = 1 << 27
SAMPLED_PAGES, PAGE = 256, 4096
_DTYPES = {
    "F32": torch.float32,
    "BF16": torch.bfloat16,
    "I32": torch.int32,
    "U16": torch.uint16,
    "I8": torch.int8,
    "U8": torch.uint8,
}
_PERMISSION = "Change its permissions, or run as a user who may read it."
_REPAIR = "The file is truncated or damaged: copy or download it again."


class TensorStore:
    """The safetensors files of a Hugging Face model directory, read one tensor at a time.

    Args:
        directory: contains `model.safetensors`, or shards and `model.safetensors.index.json`.
    """

    def __init__(self, directory: str | Path) -> None:
        self.directory = Path(directory)
        if not self.directory.is_dir():
            found = "a file" if self.directory.is_file() else "no such directory"
            raise CheckpointError(str(directory), "a model directory", found, "Check the path.")
        self._open: dict[str, Any] = {}
        self._headers: dict[str, dict[str, Header]] = {}  # by file and tensor

    @cached_property
    def index(self) -> dict[str, Any] | None:
        """The content of the index; None if there is no index."""
        path = self.directory / INDEX_FILE
        with readable(self.directory):
            return read_json(path) if path.exists() else None

    @cached_property
    def files(self) -> Mapping[str, str]:
        """File name of each tensor, by tensor name."""
        index = self.directory / INDEX_FILE
        if self.index is None:
            with readable(self.directory):
                single = (self.directory / SINGLE_FILE).exists()
            if not single:
                expected = f"{SINGLE_FILE} or {INDEX_FILE}"
                hint = "Only safetensors files are supported: transformers' save_pretrained writes them."
                raise CheckpointError(str(self.directory), expected, "neither", hint)
            self._read_header(SINGLE_FILE)
            return self._checked_names(dict.fromkeys(self._headers[SINGLE_FILE], SINGLE_FILE))
        weight_map = _weight_map(self.index, index)
        for file in sorted(set(weight_map.values())):
            self._read_header(file)
        for name, file in weight_map.items():
            if name not in self._headers[file]:
                raise CheckpointError(str(index), f"tensor {name} in {file}", "no such tensor", "The shard is damaged.")
        return self._checked_names(weight_map)

    def __contains__(self, name: str) -> bool:
        return name in self.files

    def names(self) -> Iterable[str]:
        """Return the names of all tensors."""
        return self.files.keys()

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of one tensor from its file's header; raise CheckpointError if the tensor is missing."""
        return self.header(name).shape

    def header(self, name: str) -> Header:
        """Return dtype and shape of one tensor from its file's header; raise CheckpointError if it is missing."""
        return self._headers[self._file_of(name)][name]

    def get(self, name: str) -> torch.Tensor:
        """Return one tensor on the CPU; raise CheckpointError if it is missing or its file is damaged."""
        file = self._file_of(name)
        try:
            return self._handle(file).get_tensor(name)
        except (SafetensorError, OSError) as error:
            raise CheckpointError(str(self.directory / file), f"a readable {name}", str(error), _REPAIR) from None

    def part(self, name: str, index: tuple[int | slice, ...]) -> torch.Tensor:
        """Return part of one tensor and read nothing else of it; raises the same errors as `get`."""
        file = self._file_of(name)
        with readable(self.directory / file):
            tensor: torch.Tensor = self._handle(file).get_slice(name)[index]
            return tensor

    def strays(self) -> list[str]:
        """List what other readers may read in place of the tensors that this class reads.

        These are tensors in a file of the index that the index does not place there, other files with weights, and an
        adapter.
        """
        named = set(self.files.values())
        tensors = [
            f"{name} in {file}"
            for file, headers in self._headers.items()
            for name in headers
            if self.files.get(name) != file
        ]
        with readable(self.directory):
            return [*tensors, *stray_files(os.listdir(self.directory), named)]

    def sampled_digest(self) -> str:
        """Return the SHA-256 of names, sizes and a few pages of the files: tells most models apart before a run."""
        digest = hashlib.sha256()
        for name in sorted(set(self.files.values())):
            with readable(self.directory / name), (self.directory / name).open("rb") as file:
                size = file.seek(0, os.SEEK_END)
                digest.update(f"{name} {size} ".encode())
                for index in range(SAMPLED_PAGES):
                    file.seek(size * index // SAMPLED_PAGES)
                    digest.update(file.read(PAGE))
        return digest.hexdigest()

    def close(self) -> None:
        """Close the files; a file opens again when it is read."""
        self._open.clear()

    def _file_of(self, name: str) -> str:
        """Return the file of a tensor; raise CheckpointError if the tensor is missing."""
        if name not in self.files:
            raise CheckpointError(str(self.directory), f"a tensor {name}", "no such tensor", "The model is incomplete.")
        return self.files[name]

    def _read_header(self, file: str) -> None:
        """Read the headers of a file's tensors; the file is closed, so that only one is mapped at a time."""
        self._headers[file] = stored_headers(self._path_of(file))

    def _handle(self, file: str) -> Any:
        """Return the open file."""
        if file not in self._open:
            path = self._path_of(file)
            with readable(path):
                self._open[file] = safe_open(path, framework="pt", device="cpu")
        return self._open[file]

    def _path_of(self, file: str) -> Path:
        """Return the path of a regular file named by the index; raise CheckpointError for any other name."""
        if Path(file).name != file:
            hint = "Copy or download the checkpoint again; if it was published like this, do not trust it."
            raise CheckpointError(str(self.directory / INDEX_FILE), "file names without a folder", repr(file), hint)
        return regular_file(self.directory / file)

    def _checked_names(self, files: Mapping[str, str]) -> Mapping[str, str]:
        """Refuse names with blanks or newlines: the fingerprint joins by them, so such a name could forge a line."""
        for name in files:
            if not name.isprintable() or " " in name or not name:
                expected = "tensor names of printable characters without blanks"
                raise CheckpointError(str(self.directory), expected, repr(name), "The checkpoint is damaged.")
        return files


@contextmanager
def readable(path: Path, hint: str = _REPAIR) -> Iterator[None]:
    """Raise any error of a safetensors file or a directory as a CheckpointError that names it and says what to do."""
    try:
        yield
    except PermissionError as error:
        raise CheckpointError(str(path), "permission to read it", str(error), _PERMISSION) from None
    except (SafetensorError, OSError) as error:
        raise CheckpointError(str(path), "a valid safetensors file", str(error), hint) from None


def shard_names(directory: Path) -> set[str]:
    """Return the files that hold the weights of a model directory, whether the files are there or not."""
    path = directory / INDEX_FILE
    return set(_weight_map(read_json(path), path).values()) if path.exists() else {SINGLE_FILE}


def _weight_map(index: Mapping[str, Any], path: Path) -> dict[str, str]:
    """Return name -> file of the tensors in an index; raise CheckpointError if it has no such object."""
    weight_map = index.get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(name, str) for name in weight_map.values()):
        hint = "Copy or download the checkpoint again."
        raise CheckpointError(str(path), "an object `weight_map` of file names", "something else", hint)
    return weight_map


def stray_files(names: Iterable[str], named: Collection[str]) -> list[str]:
    """Return the files among `names` that a reader may take weights from, and that are not `named` by the index."""
    return sorted(name for name in names if name not in named and (is_weights(name) or name == ADAPTER_FILE))


def is_weights(name: str) -> bool:
    """Return whether a file with this name holds weights, or says in which files weights are."""
    return name.lower().endswith(WEIGHT_SUFFIXES) or (name.endswith(".index.json") and name != INDEX_FILE)


def files_beside_weights(directory: Path) -> list[str]:
    """Return the files of a model directory and its folders that readers may open, by relative names in any order.

    The weights and the index at the top, hidden files and documents are left out. A link to a folder counts as a file.
    """
    found = []
    for folder, folders, files in os.walk(directory):
        links = [name for name in folders if (Path(folder) / name).is_symlink()]
        found += [(Path(folder) / name).relative_to(directory).as_posix() for name in (*files, *links)]
    at_top = {name for name in found if "/" not in name and (name == INDEX_FILE or is_weights(name))}
    return [name for name in found if not _is_hidden(name) and not _is_document(name) and name not in at_top]


def _is_hidden(name: str) -> bool:
    """Return whether the name of a file or of a folder around it begins with a dot."""
    return any(part.startswith(".") for part in name.split("/"))


def _is_document(name: str) -> bool:
    """Return whether a file is for people: a model card, an image, a licence."""
    own = name.rpartition("/")[2].lower()
    return own.endswith(_DOCUMENT_SUFFIXES) or own.startswith(_DOCUMENT_PREFIXES)


def stored_headers(path: Path) -> dict[str, Header]:
    """Return name -> dtype and shape of the tensors of a safetensors file.

    Raises:
        CheckpointError: the file is damaged, or its header has a key twice, and parsers disagree on which one counts.
    """
    with readable(path), safe_open(path, framework="pt", device="cpu") as handle, path.open("rb") as file:
        slices = {name: handle.get_slice(name) for name in handle.keys()}  # noqa: SIM118 (no mapping)
        headers = {
            name: Header(_DTYPES.get(part.get_dtype(), part.get_dtype()), tuple(part.get_shape()))
            for name, part in slices.items()
        }
        header = file.read(int.from_bytes(file.read(8), "little"))
    try:
        json.loads(header, object_pairs_hook=_unique_keys)
    except ValueError as error:
        raise CheckpointError(str(path), "a header with each key once", str(error), _REPAIR) from None
    return headers


def read_json(path: Path, hint: str = _REPAIR) -> dict[str, Any]:
    """Return the JSON object in a file; raise CheckpointError with the fault and the hint.

    Duplicate keys and the non-standard numbers NaN and Infinity are refused, because parsers disagree on them.
    """
    file = regular_file(path, "a JSON file")
    try:
        if (size := file.stat().st_size) > MAX_JSON_BYTES:
            raise CheckpointError(str(path), f"at most {MAX_JSON_BYTES} bytes of JSON", str(size), hint)
        text = file.read_text(encoding="utf-8")
        value = json.loads(text, object_pairs_hook=_unique_keys, parse_constant=_refuse_constant)
    except CheckpointError:
        raise
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(str(path), "a readable JSON file", str(error), hint) from None
    if not isinstance(value, dict):
        raise CheckpointError(str(path), "a JSON object", type(value).__name__, hint)
    return value


def regular_file(path: Path, kind: str = "a safetensors file", directory: Path | None = None) -> Path:
    """Return `path` if it is a regular file of `directory`, by default its own; raise CheckpointError otherwise.

    A link may point within the directory or, as in the Hugging Face cache, from `snapshots/COMMIT` to `blobs`.
    """
    try:
        real, home = path.resolve(), (directory or path.parent).resolve()
        found = "no such file" if not real.exists() else "" if real.is_file() else "not a regular file"
    except (OSError, RuntimeError, ValueError) as error:
        hint = _PERMISSION if isinstance(error, PermissionError) else "Copy or download it again."
        raise CheckpointError(str(path), kind, str(error), hint) from None
    blobs = home.parent.parent / "blobs" if home.parent.name == "snapshots" else home
    hint = "It is incomplete: copy or download it again."
    if not found and not real.is_relative_to(home) and real.parent != blobs:
        found, hint = "a link that points outside the directory", "Replace the link with the file."
    if not found and not os.access(real, os.R_OK):
        found, hint = "one without permission to read it", _PERMISSION
    if found:
        raise CheckpointError(str(path), kind, found, hint)
    return path


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return the object of these pairs; raise ValueError for a key that occurs twice."""
    value = dict(pairs)
    if len(value) != len(pairs):
        [(key, times)] = Counter(key for key, _ in pairs).most_common(1)
        raise ValueError(f"the key {key!r} {times} times")
    return value


def _refuse_constant(name: str) -> Any:
    """Raise ValueError for NaN and Infinity."""
    raise ValueError(f"{name}, which is not JSON")
