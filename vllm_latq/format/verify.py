"""Check a checkpoint against every invariant of FORMAT.md, and against its fingerprint."""

from collections.abc import Iterator
from pathlib import Path

from vllm_latq.errors import CheckpointError, LatqError
from vllm_latq.format import validate
from vllm_latq.format.reader import REPORT_FILE, CheckpointReader, checkpoint_fingerprint
from vllm_latq.format.tensors import SHAPE
from vllm_latq.format.validate import weight_from_tensors


def verify(directory: str | Path) -> Iterator[LatqError]:
    """Yield every problem of a checkpoint: in its config, linears, report and fingerprint."""
    try:
        reader = CheckpointReader(directory)
        shapes = reader.shapes
        if not shapes:
            hint = "The checkpoint is incomplete: copy or download it again."
            raise CheckpointError(str(directory), "at least one quantized linear", "none", hint)
    except LatqError as error:
        yield error
        return
    for module, shape in shapes.items():
        yield from _verify_linear(reader, module, shape)
    for module in reader.shapeless():
        yield CheckpointError(f"{directory}: {module}", f"a tensor {SHAPE}", "none", "The checkpoint is incomplete.")
    for stray in reader.store.strays():
        hint = "Other readers may use it in place of the verified tensor: remove it."
        yield CheckpointError(str(directory), "only the tensors of the index", stray, hint)
    yield from _verify_report(reader)
    fingerprint = checkpoint_fingerprint(reader)
    claimed = reader.config.fingerprint
    if not claimed:
        yield CheckpointError(f"{directory}: config.json: fingerprint", fingerprint, "none", "Copy config.json again.")
    elif fingerprint != claimed:
        hint = "A tensor or config.json has changed since it was written: copy the checkpoint again."
        yield CheckpointError(f"{directory}: fingerprint", claimed, fingerprint, hint)


def _verify_linear(reader: CheckpointReader, module: str, shape: tuple[int, int]) -> Iterator[LatqError]:
    """Yield every problem of one quantized linear."""
    where = f"{reader.directory}: {module}"
    scheme = reader.config.scheme_for(module)
    if scheme is None:
        yield CheckpointError(where, "no quantized tensors for an ignored module", "some", "Fix `ignore`.")
        return
    try:
        tensors = reader.tensors(module)
        problems = list(validate.problems(tensors, scheme, shape, where))
        yield from problems
        if not problems:
            weight_from_tensors(tensors, scheme, shape, where).decode(where)
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
