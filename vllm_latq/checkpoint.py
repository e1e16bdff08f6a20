"""Reading a checkpoint directory: config.json, safetensors shards with their index, the report. FORMAT.md section 1.

Invariant: nothing outside the directory is opened, nothing is executed, and every tensor that leaves this module for a
quantized linear has passed `validate.check`.
"""

import hashlib
import json
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from vllm_latq import validate
from vllm_latq.config import CheckpointConfig
from vllm_latq.errors import CheckpointError, LatqError
from vllm_latq.spec import SHAPE
from vllm_latq.weights import HuffmanWeight, Weight, decode_checked, weight_from_tensors

INDEX_FILE = "model.safetensors.index.json"
SINGLE_FILE = "model.safetensors"
REPORT_FILE = "latq_report.json"
FINGERPRINT_PREFIX = "sha256:"


class TensorStore:
    """The safetensors files of a Hugging Face model directory, read one tensor at a time.

    Args:
        directory: holds `model.safetensors` or shards with `model.safetensors.index.json`.
    """

    def __init__(self, directory: str | Path) -> None:
        self.directory = Path(directory)
        if not self.directory.is_dir():
            raise CheckpointError(str(directory), "a model directory", "no such directory", "Check the path.")
        self._open: dict[str, Any] = {}

    @cached_property
    def files(self) -> Mapping[str, str]:
        """Tensor name -> file name."""
        index = self.directory / INDEX_FILE
        if not index.exists():
            if not (self.directory / SINGLE_FILE).exists():
                expected = f"{SINGLE_FILE} or {INDEX_FILE}"
                raise CheckpointError(str(self.directory), expected, "neither", "Only safetensors are read.")
            return dict.fromkeys(self._handle(SINGLE_FILE).keys(), SINGLE_FILE)
        weight_map = read_json(index).get("weight_map")
        if not isinstance(weight_map, dict) or not all(isinstance(name, str) for name in weight_map.values()):
            raise CheckpointError(str(index), "an object `weight_map` of file names", "something else")
        present = {file: set(self._handle(file).keys()) for file in sorted(set(weight_map.values()))}
        for name, file in weight_map.items():
            if name not in present[file]:
                raise CheckpointError(str(index), f"tensor {name} in {file}", "no such tensor", "The shard is damaged.")
        return weight_map

    def __contains__(self, name: str) -> bool:
        return name in self.files

    def names(self) -> Iterable[str]:
        return self.files.keys()

    def get(self, name: str) -> torch.Tensor:
        """One tensor on the CPU; raises CheckpointError if it is missing or its file is damaged."""
        if name not in self.files:
            raise CheckpointError(str(self.directory), f"a tensor {name}", "no such tensor", "The model is incomplete.")
        try:
            return self._handle(self.files[name]).get_tensor(name)
        except SafetensorError as error:
            raise self._damaged(self.files[name], error) from None

    def _handle(self, file: str) -> Any:
        if file not in self._open:
            path = self.directory / file
            if Path(file).name != file:
                raise CheckpointError(str(self.directory / INDEX_FILE), "file names without a folder", repr(file))
            if not path.is_file():
                raise CheckpointError(str(path), "a safetensors file", "no such file", "The model is incomplete.")
            try:
                self._open[file] = safe_open(path, framework="pt", device="cpu")
            except SafetensorError as error:
                raise self._damaged(file, error) from None
        return self._open[file]

    def _damaged(self, file: str, error: Exception) -> CheckpointError:
        hint = "The file is truncated or damaged: copy or download it again."
        return CheckpointError(str(self.directory / file), "a valid safetensors file", str(error), hint)


class CheckpointReader:
    """A quantized checkpoint.

    Args:
        directory: of the checkpoint; raises LatqError if it is not one of this format.
    """

    def __init__(self, directory: str | Path) -> None:
        self.store = TensorStore(directory)
        self.directory = self.store.directory
        where = str(self.directory / "config.json")
        quantization = read_json(self.directory / "config.json").get("quantization_config")
        if quantization is None:
            hint = "This is an unquantized model: run `latq quantize` on it."
            raise CheckpointError(where, "a `quantization_config`", "none", hint)
        self.config = CheckpointConfig.from_dict(quantization, f"{where}: quantization_config")

    @cached_property
    def shapes(self) -> Mapping[str, tuple[int, int]]:
        """Quantized linear -> (rows, cols), in stored order."""
        found = {}
        for name in self.store.names():
            module, _, suffix = name.rpartition(".")
            if suffix == SHAPE:
                shape = self.store.get(name)
                if shape.dtype != torch.int32 or shape.shape != (2,) or int(shape.min()) < 1:
                    found_text = f"{shape.dtype} {tuple(shape.shape)}"
                    raise CheckpointError(f"{self.directory}: {name}", "two positive int32 sizes", found_text)
                found[module] = (int(shape[0]), int(shape[1]))
        return found

    def tensors(self, module: str) -> dict[str, torch.Tensor]:
        """Suffix -> tensor of one quantized linear, unvalidated. Its bias is not part of it."""
        return {suffix: self.store.get(f"{module}.{suffix}") for suffix in self._suffixes[module]}

    def weight(self, module: str) -> Weight:
        """One quantized linear, validated."""
        scheme = self.config.scheme_for(module)
        where = f"{self.directory}: {module}"
        if module not in self.shapes:
            raise CheckpointError(where, "a quantized linear", "no such linear")
        if scheme is None:
            raise CheckpointError(where, "no quantized tensors for an ignored module", "some", "Fix `ignore`.")
        return weight_from_tensors(self.tensors(module), scheme, self.shapes[module], where)

    def report(self) -> dict[str, Any]:
        """The report written by the quantizer."""
        return read_json(self.directory / REPORT_FILE)

    @cached_property
    def _suffixes(self) -> Mapping[str, list[str]]:
        suffixes = defaultdict(list)
        for name in self.store.names():
            module, _, suffix = name.rpartition(".")
            if suffix != "bias":
                suffixes[module].append(suffix)
        return suffixes


def verify(directory: str | Path) -> Iterator[LatqError]:
    """Every problem of a checkpoint: its config, each invariant of each linear, its report and its fingerprint."""
    try:
        reader = CheckpointReader(directory)
        shapes = reader.shapes
        if not shapes:
            raise CheckpointError(str(directory), "at least one quantized linear", "none")
    except LatqError as error:
        yield error
        return
    for module, shape in shapes.items():
        yield from _verify_linear(reader, module, shape)
    yield from _verify_report(reader)
    fingerprint = checkpoint_fingerprint(reader.store)
    if fingerprint != reader.config.fingerprint:
        hint = "Some tensor is not the one that was written: copy the checkpoint again."
        yield CheckpointError(f"{directory}: fingerprint", reader.config.fingerprint or "one", fingerprint, hint)


def _verify_linear(reader: CheckpointReader, module: str, shape: tuple[int, int]) -> Iterator[LatqError]:
    where = f"{reader.directory}: {module}"
    scheme = reader.config.scheme_for(module)
    if scheme is None:
        yield CheckpointError(where, "no quantized tensors for an ignored module", "some", "Fix `ignore`.")
        return
    try:
        tensors = reader.tensors(module)
        problems = list(validate.problems(tensors, scheme, shape, where))
        yield from problems
        if not problems and scheme.encoding == "huffman":
            decode_checked(HuffmanWeight.from_tensors(tensors, scheme, shape, where), where)
    except LatqError as error:
        yield error


def _verify_report(reader: CheckpointReader) -> Iterator[LatqError]:
    try:
        listed = {layer["name"] for layer in reader.report()["layers"]}
    except LatqError as error:
        yield error
        return
    except (KeyError, TypeError):
        where = str(reader.directory / REPORT_FILE)
        yield CheckpointError(where, "a list `layers` of objects with `name`", "something else")
        return
    if missing := sorted(listed - reader.shapes.keys()):
        yield CheckpointError(str(reader.directory), f"the linears of {REPORT_FILE}", f"no {', '.join(missing)}")


def tensor_digest(name: str, tensor: torch.Tensor) -> str:
    """One line per tensor of the fingerprint: name, dtype, shape, SHA-256 of the bytes."""
    data = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data
    shape = "x".join(str(size) for size in tensor.shape)
    return f"{name} {tensor.dtype} {shape} {hashlib.sha256(data).hexdigest()}"


def fingerprint_of(digests: Iterable[str]) -> str:
    """The checkpoint's fingerprint from its tensors' digests, in any order."""
    joined = "\n".join(sorted(digests))
    return FINGERPRINT_PREFIX + hashlib.sha256(joined.encode()).hexdigest()


def checkpoint_fingerprint(store: TensorStore) -> str:
    """Recompute the fingerprint from the stored tensors, one tensor in memory at a time."""
    return fingerprint_of(tensor_digest(name, store.get(name)) for name in store.names())


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file; raises CheckpointError saying what is wrong with it."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise CheckpointError(str(path), "a JSON file", "no such file") from None
    except (OSError, UnicodeDecodeError, json.JSONDecodeError, RecursionError) as error:
        raise CheckpointError(str(path), "a readable JSON file", str(error)) from None
    if not isinstance(value, dict):
        raise CheckpointError(str(path), "a JSON object", type(value).__name__)
    return value
