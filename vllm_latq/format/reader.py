"""Read a quantized checkpoint: its config, linears, report and fingerprint. FORMAT.md sections 1 to 6.

Invariant: every weight that `CheckpointReader.weight` returns has passed `validate.check`; only `files` opens files.
"""

import hashlib
import json
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping
from fnmatch import fnmatch
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from vllm_latq.errors import CheckpointError
from vllm_latq.format import validate
from vllm_latq.format.config import CheckpointConfig
from vllm_latq.format.encodings.registry import tensor_suffixes
from vllm_latq.format.encodings.weight import Weight
from vllm_latq.format.files import TensorStore, files_beside_weights, read_json, readable, regular_file
from vllm_latq.format.report import LayerReport, layer_reports
from vllm_latq.format.scheme import CONFIG_KEY
from vllm_latq.format.tensors import SHAPE, Header
from vllm_latq.format.validate import weight_from_tensors

REPORT_FILE = "latq_report.json"
# Results of `latq eval`, which may be added to a finished checkpoint.
EVALUATION_FILE = "latq_evaluation.json"
FINGERPRINT_PREFIX = "sha256:"


class CheckpointReader:
    """A quantized checkpoint.

    Args:
        directory: the checkpoint's directory; raises LatqError unless it has a config of this format.

    Attributes:
        document: the content of config.json.
    """

    def __init__(self, directory: str | Path) -> None:
        self.store = TensorStore(directory)
        self.directory = self.store.directory
        where = str(self.directory / "config.json")
        self.document = read_json(self.directory / "config.json")
        quantization = self.document.get("quantization_config")
        if quantization is None:
            hint = "This is an unquantized model: run `latq quantize` on it."
            raise CheckpointError(where, "a `quantization_config`", "none", hint)
        self.config = CheckpointConfig.from_dict(quantization, f"{where}: quantization_config")

    @cached_property
    def shapes(self) -> Mapping[str, tuple[int, int]]:
        """(rows, cols) of each quantized matrix, by name, in stored order.

        Raises:
            CheckpointError: a shape that is malformed, or a matrix that `beside` in config.json names without tensors.
        """
        found = {}
        for name in self.store.names():
            module, _, suffix = name.rpartition(".")
            if suffix == SHAPE:
                found[module] = validate.declared_shape(self.store.get(name), f"{self.directory}: {module}")
        for module in self.config.beside:
            if module not in found:
                expected, hint = f"a tensor {SHAPE}, as `beside` in config.json says", "The checkpoint is incomplete."
                raise CheckpointError(f"{self.directory}: {module}", expected, "none", hint)
        return found

    @property
    def linears(self) -> Mapping[str, tuple[int, int]]:
        """(rows, cols) of each quantized linear of the blocks and of the head, by name, in stored order."""
        return {name: shape for name, shape in self.shapes.items() if name not in self.config.beside}

    @property
    def beside_bytes(self) -> int:
        """Bytes of the quantized matrices beside the linears; a token reads a few rows of an embedding, or nothing."""
        return sum(header.nbytes for name in self.config.beside for header in self.headers(name).values())

    def tensors(self, module: str) -> dict[str, torch.Tensor]:
        """Return suffix -> tensor of one quantized linear, without its bias; the tensors are not validated."""
        return {suffix: self.store.get(f"{module}.{suffix}") for suffix in self._suffixes[module]}

    def headers(self, module: str) -> dict[str, Header]:
        """Return suffix -> header of the tensors of one quantized linear, without its bias."""
        return {suffix: self.store.header(f"{module}.{suffix}") for suffix in self._suffixes[module]}

    def weight(self, module: str) -> Weight:
        """Return the weight of one quantized linear, validated."""
        scheme = self.config.scheme_for(module)
        where = f"{self.directory}: {module}"
        if module not in self.shapes:
            raise CheckpointError(where, "a quantized linear", "no such linear", "`latq inspect` lists them.")
        if scheme is None:
            raise CheckpointError(where, "no quantized tensors for an ignored module", "some", "Fix `ignore`.")
        return weight_from_tensors(self.tensors(module), scheme, self.shapes[module], where)

    def report(self) -> dict[str, Any]:
        """Return the quantizer's report as stored; raise CheckpointError if it is missing or unreadable."""
        return read_json(self.directory / REPORT_FILE)

    def measured(self) -> list[LayerReport]:
        """Return the records of the report; raise CheckpointError if a value has the wrong type."""
        return layer_reports(self.report(), str(self.directory / REPORT_FILE))

    def shapeless(self) -> list[str]:
        """Return the modules that have tensors of a quantized linear, but no shape."""
        marks = tensor_suffixes() - {"scale", "scales"}  # unquantized modules may have scales too
        return [module for module, found in self._suffixes.items() if SHAPE not in found and marks & set(found)]

    @cached_property
    def _suffixes(self) -> Mapping[str, list[str]]:
        """Suffixes of the tensors of each module, by name."""
        suffixes = defaultdict(list)
        for name in self.store.names():
            module, _, suffix = name.rpartition(".")
            if suffix != "bias":
                suffixes[module].append(suffix)
        return suffixes


def tensor_digest(name: str, tensor: torch.Tensor) -> str:
    """Return the tensor's line of the fingerprint: name, dtype, shape, SHA-256 of the bytes."""
    data = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data
    shape = "x".join(str(size) for size in tensor.shape)
    return f"{name} {tensor.dtype} {shape} {hashlib.sha256(data).hexdigest()}"


def file_digest(directory: Path, name: str) -> str:
    """Return the line of the fingerprint for a file of the directory that is neither weights nor config.json."""
    path = regular_file(directory / name, "a file", directory)
    with readable(path), path.open("rb") as file:
        # A name may hold blanks and newlines: escaped, it cannot forge a line.
        return f"file {json.dumps(name)} {hashlib.file_digest(file, 'sha256').hexdigest()}"


def file_digests(directory: Path, left_out: Collection[str] = ()) -> Iterator[str]:
    """Yield the line of the fingerprint for each file that it covers, except weights and config.json.

    Args:
        directory: of the checkpoint.
        left_out: patterns of names of files and folders at the top that do not belong to the checkpoint.
    """
    left_out = ("config.json", REPORT_FILE, EVALUATION_FILE, *left_out)
    for name in files_beside_weights(directory):
        if not any(fnmatch(name.partition("/")[0], pattern) for pattern in left_out):
            yield file_digest(directory, name)


def config_digest(document: Mapping[str, Any], config: CheckpointConfig) -> str:
    """Return the line of the fingerprint for config.json: `document`, whose `quantization_config` is `config`."""
    whole = {**document, CONFIG_KEY: config.reading()}
    return f"config {json.dumps(whole, sort_keys=True, separators=(',', ':'))}"


def fingerprint_of(digests: Iterable[str]) -> str:
    """Return the fingerprint of these lines, given in any order."""
    joined = "\n".join(sorted(digests))
    return FINGERPRINT_PREFIX + hashlib.sha256(joined.encode()).hexdigest()


def checkpoint_fingerprint(reader: CheckpointReader) -> str:
    """Recompute the fingerprint from config, tensors and files, one tensor in memory at a time."""
    store = reader.store
    tensors = (tensor_digest(name, store.get(name)) for name in store.names())
    config = config_digest(reader.document, reader.config)
    return fingerprint_of([config, *tensors, *file_digests(store.directory)])
