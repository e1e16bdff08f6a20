"""Check a checkpoint against every invariant of FORMAT.md, and against its fingerprint."""

from collections.abc import Iterator
from pathlib import Path

from vllm_latq.errors import CheckpointError, LatqError
from vllm_latq.format import validate
from vllm_latq.format.coded import decode_checked, weight_from_tensors
from vllm_latq.format.packed import PackedWeight
from vllm_latq.format.reader import REPORT_FILE, CheckpointReader, checkpoint_fingerprint
from vllm_latq.format.tensors import SHAPE


def verify(directory: str | Path) -> Iterator[LatqError]:
    """Every problem of a checkpoint: its config, each invariant of each linear, its report and its fingerprint."""
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
        hint = "It may be served in place of what was verified: remove it."
        yield CheckpointError(str(directory), "no tensors but those of the index", stray, hint)
    yield from _verify_report(reader)
    fingerprint = checkpoint_fingerprint(reader)
    claimed = reader.config.fingerprint
    if not claimed:
        yield CheckpointError(f"{directory}: config.json: fingerprint", fingerprint, "none", "Copy config.json again.")
    elif fingerprint != claimed:
        hint = "A tensor or config.json is not the one that was written: copy the checkpoint again."
        yield CheckpointError(f"{directory}: fingerprint", claimed, fingerprint, hint)


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
        if not problems and scheme.encoding != "packed":
            weight = weight_from_tensors(tensors, scheme, shape, where)
            assert not isinstance(weight, PackedWeight)
            decode_checked(weight, where)
    except LatqError as error:
        yield error


def _verify_report(reader: CheckpointReader) -> Iterator[LatqError]:
    try:
        listed = {layer.name for layer in reader.measured()}
    except LatqError as error:
        yield error
        return
    if missing := sorted(listed - reader.shapes.keys()):
        hint = "The checkpoint is incomplete, or the report is another one's: copy or download it again."
        yield CheckpointError(str(reader.directory), f"the linears of {REPORT_FILE}", f"no {', '.join(missing)}", hint)
