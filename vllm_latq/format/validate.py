"""Every invariant of a stored linear, checked before anything else reads it. FORMAT.md section 4.

`problems` yields one error per violated invariant. Checks that would read out of bounds on a violated earlier one are
not reached.
"""

from collections.abc import Iterator, Mapping

import torch

from vllm_latq.coding.huffman import encoder as huffman
from vllm_latq.coding.packing import WORD_BITS, codes_at, unpack_codes
from vllm_latq.coding.rans.stream import STATE_WORDS
from vllm_latq.coding.rans.model import CLASS_BITS, FREQUENCY_TOTAL, MAX_SYMBOLS, MAX_TABLES
from vllm_latq.errors import REPAIR, CheckpointError
from vllm_latq.format.config import LayerScheme
from vllm_latq.format.csr import CSR
from vllm_latq.format.tensors import SHAPE, tensor_specs


def check(tensors: Mapping[str, torch.Tensor], scheme: LayerScheme, shape: tuple[int, int], where: str) -> None:
    """Raise the first problem of a linear's tensors (suffix -> tensor), if there is one."""
    for problem in problems(tensors, scheme, shape, where):
        raise problem


def declared_shape(tensor: torch.Tensor, where: str) -> tuple[int, int]:
    """The (rows, cols) that a linear's `weight_shape` tensor says; raises CheckpointError if it is not two sizes."""
    if tensor.dtype != torch.int32 or tuple(tensor.shape) != (2,) or int(tensor.min()) < 1:
        values = f" {tensor.tolist()}" if tensor.numel() <= 2 else ""
        raise _error(f"{where}.{SHAPE}", "two positive int32 sizes", f"{tensor.dtype} {tuple(tensor.shape)}{values}")
    return int(tensor[0]), int(tensor[1])


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
    elif scheme.encoding == "rans":
        yield from _rans(tensors, shape, where)
    else:
        yield from _packed(tensors, scheme, shape, where)


def _error(where: str, expected: str, found: str) -> CheckpointError:
    return CheckpointError(where, expected, found, REPAIR)


def _others(wrong: torch.Tensor, *axes: str) -> str:
    """How many of a mask are wrong, and where the first of them is, in terms of its axes."""
    first = torch.unravel_index(wrong.flatten().to(torch.uint8).argmax(), wrong.shape)
    place = ", ".join(f"{axis} {int(index)}" for axis, index in zip(axes, first, strict=True))
    return f"{int(wrong.sum())} others, the first in {place}"


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
    half = 1 << (scheme.bits - 1)
    if (wrong := (scales == 0) | ~torch.isfinite(scales * half)).any():
        expected = f"scales that are not zero, and finite also times {half}"
        yield _error(f"{where}.scales", expected, _others(wrong, "row", "group"))
    used = shape[1] * scheme.bits % WORD_BITS
    if used and (wrong := (qweight[:, -1] & ~((1 << used) - 1)) != 0).any():
        yield _error(f"{where}.qweight", "rows of which the bits after the last code are zero", _others(wrong, "row"))
    if scheme.outliers:
        broken = list(_csr(tensors, shape, where))
        yield from broken
        if not broken:
            yield from _csr_on_grid(tensors, scheme, shape, where)


def _csr(tensors: Mapping[str, torch.Tensor], shape: tuple[int, int], where: str) -> Iterator[CheckpointError]:
    row_ptr = tensors["outlier_row_ptr"]
    col_idx = tensors["outlier_col_idx"].to(torch.int32)
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
    # Compared, not subtracted: a difference of hostile values may overflow.
    falls = row_ptr[1:] < row_ptr[:-1]
    if falls.any():
        row = int(falls.nonzero()[0])
        yield _error(f"{where}.outlier_row_ptr", "offsets that never fall", f"a fall after row {row}")
        return
    if col_idx.numel() and not (int(col_idx.min()) >= 0 and int(col_idx.max()) < shape[1]):
        found = f"{int(col_idx.min())} to {int(col_idx.max())}"
        yield _error(f"{where}.outlier_col_idx", f"columns in [0, {shape[1]})", found)
        return
    starts = torch.zeros(col_idx.numel() + 1, dtype=torch.bool, device=row_ptr.device)
    starts[row_ptr.to(torch.int64)] = True
    wrong = torch.nn.functional.pad((col_idx[1:] <= col_idx[:-1]) & ~starts[1:-1], (1, 0))
    if wrong.any():
        expected = "columns that are above those before them in a row"
        yield _error(f"{where}.outlier_col_idx", expected, _others(wrong, "entry"))
    if (wrong := ~torch.isfinite(values)).any():
        yield _error(f"{where}.outlier_values", "values that are finite", _others(wrong, "entry"))


def _csr_on_grid(
    tensors: Mapping[str, torch.Tensor], scheme: LayerScheme, shape: tuple[int, int], where: str
) -> Iterator[CheckpointError]:
    """What must hold of a valid CSR matrix and the inliers below it."""
    assert scheme.bits is not None
    scales, zero = tensors["scales"], 1 << (scheme.bits - 1)
    width = shape[1] // scales.shape[1]
    outliers = CSR(tensors["outlier_row_ptr"], tensors["outlier_col_idx"], tensors["outlier_values"], shape[1])
    for rows, cols, values in outliers.bands():
        if (wrong := codes_at(tensors["qweight"], scheme.bits, rows, cols) != zero).any():
            found = f"another {_place(wrong, rows, cols)}"
            yield _error(f"{where}.qweight", "the code of 0 under each outlier", found)
            return
        # On a mid-tread grid these values are the weights, and finite.
        if scheme.grid == "midrise" and (wrong := _infinite(values, scales[rows, cols // width], scheme)).any():
            expected = "values that are finite also with half a scale added"
            yield _error(f"{where}.outlier_values", expected, f"another {_place(wrong, rows, cols)}")
            return


def _place(wrong: torch.Tensor, rows: torch.Tensor, cols: torch.Tensor) -> str:
    """Where the first outlier that is wrong lies."""
    first = int(wrong.to(torch.uint8).argmax())
    return f"in row {int(rows[first])}, column {int(cols[first])}"


def _infinite(values: torch.Tensor, scales: torch.Tensor, scheme: LayerScheme) -> torch.Tensor:
    """Where outliers of these values make a weight infinite, on scales that are not; bool [n], all [n]."""
    weights = values.to(torch.float32) + 0.5 * scales.to(torch.float32) * (scheme.grid == "midrise")
    return torch.isfinite(scales) & ~torch.isfinite(weights)


def _huffman(tensors: Mapping[str, torch.Tensor], shape: tuple[int, int], where: str) -> Iterator[CheckpointError]:
    scale = tensors["scale"]
    if not torch.isfinite(scale).all() or not (scale > 0).all():
        yield _error(f"{where}.scale", "a finite, positive scale", str(scale.tolist()))
    yield from _stream(tensors, shape, where)
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
    first = int(tensors["first_symbol"])
    if first + lengths.numel() - 2 > torch.iinfo(torch.int32).max:
        found = f"{lengths.numel() - 1} symbols from {first} on"
        yield _error(f"{where}.first_symbol", "symbols that fit int32", found)


def _stream(tensors: Mapping[str, torch.Tensor], shape: tuple[int, int], where: str) -> Iterator[CheckpointError]:
    """What must hold before anything of the declared size is allocated: each weight takes a bit of the stream."""
    stream, chunk_bits = tensors["stream"], tensors["chunk_bits"].to(torch.int64)
    total, room = int(chunk_bits.sum()), WORD_BITS * stream.numel()
    if not room - WORD_BITS < total <= room:
        found = f"chunks of {total} bits together, a stream of {room}"
        yield _error(f"{where}.chunk_bits", "chunks that fill the stream up to its last word", found)
        return
    short = (chunk_bits < torch.from_numpy(huffman.chunks_of(shape).counts()).to(chunk_bits.device)).sum()
    if short:
        yield _error(f"{where}.chunk_bits", "at least one bit for each weight", f"{int(short)} chunks of fewer")
    if room > total and int(stream[-1]) & ((1 << (room - total)) - 1):
        yield _error(f"{where}.stream", "zero bits after the last chunk", "other bits")


def _rans(tensors: Mapping[str, torch.Tensor], shape: tuple[int, int], where: str) -> Iterator[CheckpointError]:
    scale = tensors["scale"]
    if not torch.isfinite(scale).all() or not (scale > 0).all():
        yield _error(f"{where}.scale", "a finite, positive scale", str(scale.tolist()))
        return
    row, column = (tensors[name].to(torch.float64) / 8 for name in ("row_exponents", "column_exponents"))
    largest = float(scale.double() * row.max().exp2() * column.max().exp2().clamp(min=1))
    smallest = float(scale.double() * row.min().exp2() * column.min().exp2().clamp(max=1))
    limits = torch.finfo(torch.float32)
    if not limits.tiny <= smallest <= largest <= limits.max:
        expected = f"a scale that stays a normal number, {limits.tiny:.9g} to {limits.max:.9g}, with every exponent"
        yield _error(f"{where}.scale", expected, f"{smallest:.9g} to {largest:.9g}")
    yield from _rans_tables(tensors, where)
    highest = 0
    for name, size in zip(("row_class", "column_class"), shape, strict=True):
        codes = unpack_codes(tensors[name].unsqueeze(0), CLASS_BITS, WORD_BITS // CLASS_BITS * tensors[name].numel())[0]
        if codes[size:].any():
            yield _error(f"{where}.{name}", "zero bits after the last class", "other bits")
        highest += int(codes[:size].max())
    tables = tensors["table_ranges"].shape[0]
    if highest >= tables:
        expected = f"classes that sum, with those of column_class, to less than {tables}, the number of tables"
        yield _error(f"{where}.row_class", expected, str(highest))
    words, room = tensors["chunk_words"].to(torch.int64), 2 * tensors["stream"].numel()
    if int(words.min()) < STATE_WORDS:
        yield _error(f"{where}.chunk_words", f"at least {STATE_WORDS} words in each chunk", str(int(words.min())))
    total = int(words.sum())
    if not room - 1 <= total <= room:
        found = f"chunks of {total} words together, a stream of {room}"
        yield _error(f"{where}.chunk_words", "chunks that fill the stream up to its last word", found)
    elif total < room and int(tensors["stream"][-1]) >> 16:
        yield _error(f"{where}.stream", "a zero half-word after the last chunk", "other bits")


def _rans_tables(tensors: Mapping[str, torch.Tensor], where: str) -> Iterator[CheckpointError]:
    ranges, entries = tensors["table_ranges"].to(torch.int64), tensors["frequencies"].to(torch.int64)
    if not 1 <= len(ranges) <= MAX_TABLES:
        yield _error(f"{where}.table_ranges", f"1 to {MAX_TABLES} tables", str(len(ranges)))
        return
    first, count = ranges.unbind(1)
    if int(count.min()) < 0 or int(count.max()) > MAX_SYMBOLS:
        found = f"{int(count.min())} to {int(count.max())}"
        yield _error(f"{where}.table_ranges", f"0 to {MAX_SYMBOLS} symbols in each table", found)
        return
    if int((first + count).max()) > 1 << 31:
        yield _error(f"{where}.table_ranges", "symbols that fit int32", f"one of {int((first + count).max()) - 1}")
    if entries.numel() != int((count + 1).sum()):
        expected = f"{int((count + 1).sum())} frequencies, one per symbol and ESCAPE of each table"
        yield _error(f"{where}.frequencies", expected, str(entries.numel()))
        return
    sums = [int(table.sum()) for table in entries.split((count + 1).tolist())]
    for index, total in enumerate(sums):
        if total != FREQUENCY_TOTAL:
            yield _error(f"{where}.frequencies", f"a sum of {FREQUENCY_TOTAL} in table {index}", str(total))
