"""The encoding `rans`: integers on scales of rows and columns, rANS coded by classes. FORMAT.md section 3.4."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Self

import torch

from vllm_latq.coding.packing import WORD_BITS, packed_words, unpack_codes
from vllm_latq.coding.rans import decoder, encoder
from vllm_latq.coding.rans.model import CLASS_BITS, FREQUENCY_TOTAL, MAX_SYMBOLS, MAX_TABLES
from vllm_latq.coding.rans.stream import STATE_WORDS, STREAM_TENSORS, STREAM_WORD_BITS, RansStream, chunks_of
from vllm_latq.errors import CheckpointError
from vllm_latq.format.encodings.coded import CodedWeight
from vllm_latq.format.problems import problem
from vllm_latq.format.scheme import LayerScheme, grid_name
from vllm_latq.format.tensors import TensorSpec


@dataclass(frozen=True)
class RansWeight(CodedWeight):
    """W[i, j] = scale * 2^(row_exponents[i] / 8) * (z[i, j] + h) * 2^(column_exponents[j] / 8) with entropy-coded z.

    Attributes:
        scale: float32 [1].
        row_exponents: int8 [rows], eighths of an octave.
        column_exponents: int8 [cols], eighths of an octave.
        stream: the encoded integers.
        midrise: whether h is 1/2 instead of 0.
    """

    full_scheme = LayerScheme("rans")
    column_scaled = True

    scale: torch.Tensor
    row_exponents: torch.Tensor
    column_exponents: torch.Tensor
    stream: RansStream
    midrise: bool = False

    @property
    def scheme(self) -> LayerScheme:
        """The scheme under which the weight is stored."""
        return LayerScheme("rans", grid=grid_name(self.midrise))

    @property
    def row_scales(self) -> torch.Tensor:
        """The scale times the factor of each row, rounded to float32, [rows] on the CPU."""
        return self.scale.cpu() * octave_eighths(self.row_exponents)

    @property
    def column_scales(self) -> torch.Tensor:
        """The factor of each column, float32 [cols] on the CPU."""
        return octave_eighths(self.column_exponents)

    def decode_stream(self, where: str) -> torch.Tensor:
        """Decode the stream on the CPU: int32 [rows, cols]; `where` names it in errors."""
        return decoder.decode_stream(self.stream, where)

    def value_range(self, where: str) -> tuple[int, int]:
        """Return the smallest and the largest integer of the stream, decoded a part at a time."""
        return decoder.value_range(self.stream, where)

    def encoded(self) -> dict[str, torch.Tensor]:
        """Return suffix -> tensor of every stored tensor except the shape."""
        exponents = {"row_exponents": self.row_exponents, "column_exponents": self.column_exponents}
        return {"scale": self.scale, **exponents, **self.stream.tensors()}

    @classmethod
    def from_integers(
        cls,
        z: torch.Tensor,
        scale: torch.Tensor,
        row_exponents: torch.Tensor,
        column_exponents: torch.Tensor,
        midrise: bool = False,
    ) -> Self:
        """Encode z, int32 [rows, cols], on scale float32 [1] and exponents int8 [rows] and [cols]."""
        return cls(scale.cpu(), row_exponents.cpu(), column_exponents.cpu(), encoder.encode(z), midrise)

    @classmethod
    def from_tensors(cls, tensors: Mapping[str, torch.Tensor], scheme: LayerScheme, shape: tuple[int, int]) -> Self:
        """Wrap validated tensors (suffix -> tensor) without decoding them."""
        stream = RansStream(**{name: tensors[name].cpu() for name in STREAM_TENSORS}, shape=shape)
        exponents = (tensors["row_exponents"].cpu(), tensors["column_exponents"].cpu())
        return cls(tensors["scale"].cpu(), *exponents, stream, scheme.midrise)

    @staticmethod
    def specs(scheme: LayerScheme, rows: int, cols: int, where: str) -> dict[str, TensorSpec]:
        """Return suffix -> spec of every stored tensor except the shape."""
        return {
            "scale": TensorSpec(torch.float32, (1,)),
            "row_exponents": TensorSpec(torch.int8, (rows,)),
            "column_exponents": TensorSpec(torch.int8, (cols,)),
            "row_class": TensorSpec(torch.int32, (packed_words(rows, CLASS_BITS),)),
            "column_class": TensorSpec(torch.int32, (packed_words(cols, CLASS_BITS),)),
            "table_ranges": TensorSpec(torch.int32, (None, 2)),
            "frequencies": TensorSpec(torch.uint16, (None,)),
            "chunk_words": TensorSpec(torch.uint16, chunks_of((rows, cols)).grid),
            "stream": TensorSpec(torch.int32, (None,)),
        }

    @staticmethod
    def problems(
        tensors: Mapping[str, torch.Tensor], scheme: LayerScheme, shape: tuple[int, int], where: str
    ) -> Iterator[CheckpointError]:
        """Yield one error per violated invariant of tensors whose dtypes and shapes match `specs`."""
        scale = tensors["scale"]
        if not torch.isfinite(scale).all() or not (scale > 0).all():
            yield problem(f"{where}.scale", "a finite, positive scale", str(scale.tolist()))
            return
        yield from _scale_problems(tensors, where)
        yield from _table_problems(tensors, where)
        yield from _class_problems(tensors, shape, where)
        yield from _stream_problems(tensors, where)


def octave_eighths(exponents: torch.Tensor) -> torch.Tensor:
    """Return 2^(e / 8) for int8 [n], [n] on the CPU: the power in float64, rounded to float32, on any machine."""
    powers = torch.tensor([2.0 ** (exponent / 8) for exponent in range(-128, 128)], dtype=torch.float64, device="cpu")
    return powers.to(torch.float32)[exponents.cpu().to(torch.int64) + 128]


def _scale_problems(tensors: Mapping[str, torch.Tensor], where: str) -> Iterator[CheckpointError]:
    """Check that the scale times the powers of rows and columns stays a normal number."""
    scale = tensors["scale"]
    row, column = (tensors[name].to(torch.float64) / 8 for name in ("row_exponents", "column_exponents"))
    largest = float(scale.double() * row.max().exp2() * column.max().exp2().clamp(min=1))
    smallest = float(scale.double() * row.min().exp2() * column.min().exp2().clamp(max=1))
    limits = torch.finfo(torch.float32)
    if not limits.tiny <= smallest <= largest <= limits.max:
        expected = f"a scale that stays a normal number, {limits.tiny:.9g} to {limits.max:.9g}, with every exponent"
        yield problem(f"{where}.scale", expected, f"{smallest:.9g} to {largest:.9g}")


def _table_problems(tensors: Mapping[str, torch.Tensor], where: str) -> Iterator[CheckpointError]:
    """Check the ranges and frequencies of the tables."""
    ranges, entries = tensors["table_ranges"].to(torch.int64), tensors["frequencies"].to(torch.int64)
    if not 1 <= len(ranges) <= MAX_TABLES:
        yield problem(f"{where}.table_ranges", f"1 to {MAX_TABLES} tables", str(len(ranges)))
        return
    first, count = ranges.unbind(1)
    if int(count.min()) < 0 or int(count.max()) > MAX_SYMBOLS:
        found = f"{int(count.min())} to {int(count.max())}"
        yield problem(f"{where}.table_ranges", f"0 to {MAX_SYMBOLS} symbols in each table", found)
        return
    if int((first + count).max()) > 1 << 31:
        yield problem(f"{where}.table_ranges", "symbols that fit int32", f"symbol {int((first + count).max()) - 1}")
    if entries.numel() != int((count + 1).sum()):
        expected = f"{int((count + 1).sum())} frequencies, one per symbol and ESCAPE of each table"
        yield problem(f"{where}.frequencies", expected, str(entries.numel()))
        return
    sums = [int(table.sum()) for table in entries.split((count + 1).tolist())]
    for index, total in enumerate(sums):
        if total != FREQUENCY_TOTAL:
            yield problem(f"{where}.frequencies", f"a sum of {FREQUENCY_TOTAL} in table {index}", str(total))


def _class_problems(
    tensors: Mapping[str, torch.Tensor], shape: tuple[int, int], where: str
) -> Iterator[CheckpointError]:
    """Check that every sum of a row's and a column's class has a table."""
    highest, tables = 0, tensors["table_ranges"].shape[0]
    for name, size in zip(("row_class", "column_class"), shape, strict=True):
        codes = unpack_codes(tensors[name].unsqueeze(0), CLASS_BITS, WORD_BITS // CLASS_BITS * tensors[name].numel())[0]
        if codes[size:].any():
            yield problem(f"{where}.{name}", "zero bits after the last class", "other bits")
        highest += int(codes[:size].max())
    if highest >= tables:
        expected = f"classes whose sum with any class of column_class is below {tables}, the number of tables"
        yield problem(f"{where}.row_class", expected, str(highest))


def _stream_problems(tensors: Mapping[str, torch.Tensor], where: str) -> Iterator[CheckpointError]:
    """Check that the chunks fill the stream."""
    words, room = tensors["chunk_words"].to(torch.int64), WORD_BITS // STREAM_WORD_BITS * tensors["stream"].numel()
    if int(words.min()) < STATE_WORDS:
        yield problem(f"{where}.chunk_words", f"at least {STATE_WORDS} words in each chunk", str(int(words.min())))
    total = int(words.sum())
    if not room - 1 <= total <= room:
        found = f"chunks of {total} words together, a stream of {room}"
        yield problem(f"{where}.chunk_words", "chunks that fill the stream up to its last word", found)
    elif total < room and int(tensors["stream"][-1]) >> STREAM_WORD_BITS:
        yield problem(f"{where}.stream", f"{STREAM_WORD_BITS} zero bits after the last chunk", "other bits")
