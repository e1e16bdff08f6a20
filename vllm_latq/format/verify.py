"""Check a checkpoint against every invariant of FORMAT.md, and against its fingerprint."""

import math
from collections.abc import Iterator
from pathlib import Path

import torch

from vllm_latq.errors import CheckpointError, LatqError
from vllm_latq.events import Progress, ignore_progress
from vllm_latq.format import validate
from vllm_latq.format.config import redirections
from vllm_latq.format.files import INDEX_FILE
from vllm_latq.format.reader import REPORT_FILE, CheckpointReader, checkpoint_fingerprint
from vllm_latq.format.tensors import SHAPE
from vllm_latq.format.validate import weight_from_tensors

# Endings of the names of the scales of a KV cache.
KV_SCALES = (".k_scale", ".v_scale")


def verify(directory: str | Path, progress: Progress = ignore_progress) -> Iterator[LatqError]:
    """Yield every problem of a checkpoint: in its config, files, linears, report and fingerprint.

    Args:
        directory: of the checkpoint.
        progress: called with the number of linears that are checked, and of all.
    """
    try:
        reader = CheckpointReader(directory)
        if not reader.shapes:
            hint = "The checkpoint is incomplete: copy or download it again."
            raise CheckpointError(str(directory), "at least one quantized linear", "none", hint)
    except LatqError as error:
        yield error
        return
    yield from _directory_problems(reader)
    for done, module in enumerate(reader.shapes):
        progress(done, len(reader.shapes))
        broken = list(_header_problems(reader, module))
        yield from broken or _value_problems(reader, module)
    progress(len(reader.shapes), len(reader.shapes))
    yield from _verify_report(reader)
    yield from _fingerprint_problems(reader)


def _fingerprint_problems(reader: CheckpointReader) -> Iterator[LatqError]:
    """Yield the problem of the fingerprint, or of a file that it covers."""
    directory, claimed = reader.directory, reader.config.fingerprint
    try:
        fingerprint = checkpoint_fingerprint(reader)
    except LatqError as error:
        yield error
        return
    if not claimed:
        yield CheckpointError(f"{directory}: config.json: fingerprint", fingerprint, "none", "Copy config.json again.")
    elif fingerprint != claimed:
        hint = "A tensor, config.json or another file has changed, was added or is missing: copy the checkpoint again."
        yield CheckpointError(f"{directory}: fingerprint", claimed, fingerprint, hint)


def check_headers(reader: CheckpointReader) -> None:
    """Raise the first problem that a checkpoint's directory, config.json and headers show; no weight is read.

    Loaders call this before their host frameworks open a file. A host would take weights from other files, convert
    tensors of another dtype, or fill a linear that it does not know to be quantized with random weights.
    """
    for found in _directory_problems(reader):
        raise found
    for module in reader.shapes:
        for found in _header_problems(reader, module):
            raise found


def _directory_problems(reader: CheckpointReader) -> Iterator[LatqError]:
    """Yield the problems of config.json and of the list of files, and modules without a shape."""
    for _, key in redirections(reader.document):
        hint = "Remove it: transformers would load other files than the verified ones."
        yield CheckpointError(str(reader.directory / "config.json"), f"no key `{key}` that names files", "one", hint)
    index = reader.store.index
    if index is not None and not isinstance(index.get("metadata"), dict):
        found, hint = repr(index.get("metadata")), "Write `{}` there: transformers reads it."
        yield CheckpointError(str(reader.directory / INDEX_FILE), "an object `metadata`", found, hint)
    for stray in reader.store.strays():
        hint = "Other readers may use it in place of the verified tensors: remove it."
        yield CheckpointError(str(reader.directory), "only the tensors of the index", stray, hint)
    for module in reader.shapeless():
        hint = "The checkpoint is incomplete."
        yield CheckpointError(f"{reader.directory}: {module}", f"a tensor {SHAPE}", "none", hint)
    yield from _kv_scale_problems(reader)


def _kv_scale_problems(reader: CheckpointReader) -> Iterator[LatqError]:
    """Yield the problems of the scales of the KV cache, if config.json says that there are any."""
    if not reader.config.has_kv_scales:
        return
    names, hint = set(reader.store.names()), "The checkpoint is incomplete or damaged: copy it again."
    layers = {name.rpartition(".")[0] for name in names if name.endswith(KV_SCALES)}
    if not layers:
        yield CheckpointError(str(reader.directory), "scales of keys and values (`kv_cache_scheme`)", "none", hint)
    for name in sorted(f"{layer}{leaf}" for layer in layers for leaf in KV_SCALES):
        where, expected = f"{reader.directory}: {name}", "a positive number, float32 [1]"
        if name not in names:
            yield CheckpointError(where, expected, "no such tensor", hint)
            continue
        header = reader.store.header(name)
        if (header.dtype, tuple(header.shape)) != (torch.float32, (1,)):
            yield CheckpointError(where, expected, f"{header.dtype} {tuple(header.shape)}", hint)
        elif not 0 < (scale := float(reader.store.get(name))) < math.inf:
            yield CheckpointError(where, expected, repr(scale), hint)


def _header_problems(reader: CheckpointReader, module: str) -> Iterator[LatqError]:
    """Yield the problems of one quantized linear that the headers of its tensors show."""
    where = f"{reader.directory}: {module}"
    scheme = reader.config.scheme_for(module)
    if scheme is None:
        yield CheckpointError(where, "no quantized tensors for an ignored module", "some", "Fix `ignore`.")
        return
    try:
        yield from validate.header_problems(reader.headers(module), scheme, reader.shapes[module], where)
    except LatqError as error:
        yield error


def _value_problems(reader: CheckpointReader, module: str) -> Iterator[LatqError]:
    """Yield every problem of the values of one quantized linear."""
    where = f"{reader.directory}: {module}"
    scheme, shape = reader.config.scheme_for(module), reader.shapes[module]
    assert scheme is not None, "ignored modules have header problems"
    try:
        tensors = reader.tensors(module)
        problems = list(validate.problems(tensors, scheme, shape, where))
        yield from problems
        if not problems:
            weight_from_tensors(tensors, scheme, shape, where).check_decoding(where)
    except LatqError as error:
        yield error


def _verify_report(reader: CheckpointReader) -> Iterator[LatqError]:
    """Yield the problems of the report."""
    try:
        listed = {layer.name for layer in reader.measured()}
    except LatqError as error:
        yield error
        return
    if missing := sorted(listed - reader.shapes.keys()):
        hint = "The checkpoint is incomplete, or the report belongs to another checkpoint: copy or download it again."
        yield CheckpointError(str(reader.directory), f"the linears of {REPORT_FILE}", f"no {', '.join(missing)}", hint)
