"""Every invariant of a stored linear, checked before anything else reads it. FORMAT.md section 4.

`problems` yields one error per violated invariant. Checks that would read out of bounds on a violated earlier one are
not reached.
"""

from collections.abc import Iterator, Mapping

import torch

from vllm_latq import huffman
from vllm_latq.config import LayerScheme
from vllm_latq.errors import CheckpointError
from vllm_latq.packing import WORD_BITS
from vllm_latq.spec import SHAPE, tensor_specs

_REPAIR = "The checkpoint is damaged: copy or download it again, or quantize again."


def check(tensors: Mapping[str, torch.Tensor], scheme: LayerScheme, shape: tuple[int, int], where: str) -> None:
    """Raise the first problem of a linear's tensors (suffix -> tensor), if there is one."""
    for problem in problems(tensors, scheme, shape, where):
        raise problem


def problems(
    tensors: Mapping[str, torch.Tensor], scheme: LayerScheme, shape: tuple[int, int], where: str
) -> Iterator[CheckpointError]:
    """Every violated invariant of a linear [rows, cols] = `shape` stored under `scheme`."""
    if min(shape) < 1:
        yield _error(f"{where}.{SHAPE}", "two positive sizes", str(shape))
        return
    structural = list(_structure(tensors, scheme, shape, where))
    yield from structural
    if structural:
        return
    stored_shape = tuple(tensors[SHAPE].tolist())
    if stored_shape != tuple(shape):
        yield _error(f"{where}.{SHAPE}", f"the shape of the linear, {tuple(shape)}", str(stored_shape))
    elif scheme.encoding == "huffman":
        yield from _huffman(tensors, shape, where)
    else:
        yield from _packed(tensors, scheme, shape, where)


def _error(where: str, expected: str, found: str) -> CheckpointError:
    return CheckpointError(where, expected, found, _REPAIR)


def _structure(
    tensors: Mapping[str, torch.Tensor], scheme: LayerScheme, shape: tuple[int, int], where: str
) -> Iterator[CheckpointError]:
    specs = tensor_specs(scheme, *shape, where=where)
    for suffix, spec in specs.items():
        if suffix not in tensors:
            yield _error(f"{where}.{suffix}", f"a tensor {spec}", "no such tensor")
        elif found := spec.mismatch(tensors[suffix]):
            yield _error(f"{where}.{suffix}", str(spec), found)
    for suffix in tensors.keys() - specs.keys():
        yield _error(f"{where}.{suffix}", f"only {', '.join(specs)}", "an unknown tensor")


def _packed(
    tensors: Mapping[str, torch.Tensor], scheme: LayerScheme, shape: tuple[int, int], where: str
) -> Iterator[CheckpointError]:
    scales, qweight = tensors["scales"], tensors["qweight"]
    assert scheme.bits is not None
    if not torch.isfinite(scales).all() or not (scales > 0).all():
        bad = int((~(torch.isfinite(scales) & (scales > 0))).sum())
        yield _error(f"{where}.scales", "finite, positive scales", f"{bad} that are not")
    used = shape[1] * scheme.bits % WORD_BITS
    if used and (qweight[:, -1] & ~((1 << used) - 1)).any():
        yield _error(f"{where}.qweight", "zero bits after the last code of a row", "other bits")
    if scheme.outliers:
        yield from _csr(tensors, shape, where)


def _csr(tensors: Mapping[str, torch.Tensor], shape: tuple[int, int], where: str) -> Iterator[CheckpointError]:
    row_ptr = tensors["outlier_row_ptr"].to(torch.int64)
    col_idx = tensors["outlier_col_idx"].to(torch.int64)
    values = tensors["outlier_values"]
    if col_idx.numel() != values.numel():
        found = f"{values.numel()} values for {col_idx.numel()} columns"
        yield _error(f"{where}.outlier_values", "as many values as column indices", found)
        return
    first, last = int(row_ptr[0]), int(row_ptr[-1])
    if first != 0 or last != col_idx.numel():
        found = f"{first} and {last}"
        yield _error(f"{where}.outlier_row_ptr", f"0 first and {col_idx.numel()} last", found)
        return
    if (row_ptr.diff() < 0).any():
        row = int((row_ptr.diff() < 0).nonzero()[0])
        yield _error(f"{where}.outlier_row_ptr", "offsets that never fall", f"a fall after row {row}")
        return
    if col_idx.numel() and not (int(col_idx.min()) >= 0 and int(col_idx.max()) < shape[1]):
        found = f"{int(col_idx.min())} to {int(col_idx.max())}"
        yield _error(f"{where}.outlier_col_idx", f"columns in [0, {shape[1]})", found)
        return
    starts = torch.zeros(col_idx.numel() + 1, dtype=torch.bool, device=row_ptr.device)
    starts[row_ptr] = True
    if ((col_idx.diff() <= 0) & ~starts[1:-1]).any():
        yield _error(f"{where}.outlier_col_idx", "columns that rise within each row", "some that do not")
    if not torch.isfinite(values).all():
        yield _error(f"{where}.outlier_values", "finite values", f"{int((~torch.isfinite(values)).sum())} that are not")


def _huffman(tensors: Mapping[str, torch.Tensor], shape: tuple[int, int], where: str) -> Iterator[CheckpointError]:
    scale = tensors["scale"]
    if not torch.isfinite(scale).all() or not (scale > 0).all():
        yield _error(f"{where}.scale", "a finite, positive scale", str(scale.tolist()))
    lengths = tensors["code_lengths"].to(torch.int64)
    if not 1 <= lengths.numel() <= huffman.MAX_SYMBOLS + 1 or not 1 <= int(lengths.max()) <= huffman.MAX_LENGTH:
        expected = f"1 to {huffman.MAX_SYMBOLS + 1} code lengths of at most {huffman.MAX_LENGTH} bits, one in use"
        found = f"{lengths.numel()} lengths up to {int(lengths.max()) if lengths.numel() else 0}"
        yield _error(f"{where}.code_lengths", expected, found)
        return
    used = lengths[lengths > 0]
    kraft = int((1 << (huffman.MAX_LENGTH - used)).sum())
    if kraft != 1 << huffman.MAX_LENGTH and used.tolist() != [1]:
        found = f"a Kraft sum of {kraft / (1 << huffman.MAX_LENGTH):g}"
        yield _error(f"{where}.code_lengths", "a complete prefix code (Kraft sum 1)", found)
    total, room = int(tensors["chunk_bits"].to(torch.int64).sum()), WORD_BITS * tensors["stream"].numel()
    if not room - WORD_BITS < total <= room:
        found = f"chunks of {total} bits together, a stream of {room}"
        yield _error(f"{where}.chunk_bits", "chunks that fill the stream up to its last word", found)
