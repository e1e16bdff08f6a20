"""The encoding `huffman`: integers on one scale, Huffman coded. FORMAT.md section 3.3."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Self

import numpy as np
import torch

from vllm_latq.coding.huffman import decoder
from vllm_latq.coding.huffman.stream import MAX_LENGTH, MAX_SYMBOLS, HuffmanStream, HuffmanTable, chunks_of
from vllm_latq.coding.packing import WORD_BITS
from vllm_latq.errors import CheckpointError
from vllm_latq.format.encodings.coded import CodedWeight
from vllm_latq.format.problems import problem
from vllm_latq.format.scheme import LayerScheme
from vllm_latq.format.tensors import TensorSpec


@dataclass(frozen=True)
class HuffmanWeight(CodedWeight):
    """W = scale * z with entropy-coded integers z.

    Attributes:
        scale: float32 [1].
        stream: the encoded integers.
    """

    full_scheme = LayerScheme("huffman")
    grids = ("midtread",)

    scale: torch.Tensor
    stream: HuffmanStream

    @property
    def scheme(self) -> LayerScheme:
        """The scheme under which the weight is stored."""
        return self.full_scheme

    @property
    def row_scales(self) -> torch.Tensor:
        """The scale of each row, float32 [rows] on the CPU."""
        return self.scale.cpu().expand(self.shape[0])

    @property
    def column_scales(self) -> None:
        """None: columns have no scales."""

    def decode_stream(self, where: str) -> torch.Tensor:
        """Decode the stream on the CPU: int32 [rows, cols]; `where` names it in errors."""
        return decoder.decode_stream(self.stream, where)

    def value_range(self, where: str) -> tuple[int, int]:
        """Return the smallest and the largest integer of the stream, decoded a part at a time."""
        return decoder.value_range(self.stream, where)

    def encoded(self) -> dict[str, torch.Tensor]:
        """Return suffix -> tensor of every stored tensor except the shape."""
        return {
            "scale": self.scale,
            "first_symbol": torch.tensor([self.stream.table.first_symbol], dtype=torch.int32),
            "code_lengths": torch.from_numpy(self.stream.table.lengths),
            "chunk_bits": self.stream.chunk_bits,
            "stream": self.stream.stream,
        }

    @classmethod
    def from_tensors(cls, tensors: Mapping[str, torch.Tensor], scheme: LayerScheme, shape: tuple[int, int]) -> Self:
        """Wrap validated tensors (suffix -> tensor) without decoding them."""
        lengths = np.ascontiguousarray(tensors["code_lengths"].cpu().numpy())
        table = HuffmanTable(int(tensors["first_symbol"]), lengths)
        return cls(tensors["scale"], HuffmanStream(table, tensors["chunk_bits"], tensors["stream"], shape))

    @staticmethod
    def specs(scheme: LayerScheme, rows: int, cols: int, where: str) -> dict[str, TensorSpec]:
        """Return suffix -> spec of every stored tensor except the shape."""
        return {
            "scale": TensorSpec(torch.float32, (1,)),
            "first_symbol": TensorSpec(torch.int32, (1,)),
            "code_lengths": TensorSpec(torch.uint8, (None,)),
            "chunk_bits": TensorSpec(torch.uint16, chunks_of((rows, cols)).grid),
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
        yield from _stream_problems(tensors, shape, where)
        yield from _table_problems(tensors, where)


def _stream_problems(
    tensors: Mapping[str, torch.Tensor], shape: tuple[int, int], where: str
) -> Iterator[CheckpointError]:
    """Check that each weight takes a bit of the stream, before anything of the declared size is allocated."""
    stream, chunk_bits = tensors["stream"], tensors["chunk_bits"].to(torch.int64)
    total, room = int(chunk_bits.sum()), WORD_BITS * stream.numel()
    if not room - WORD_BITS < total <= room:
        found = f"chunks of {total} bits together, a stream of {room}"
        yield problem(f"{where}.chunk_bits", "chunks that fill the stream up to its last word", found)
        return
    short = (chunk_bits < torch.from_numpy(chunks_of(shape).counts()).to(chunk_bits.device)).sum()
    if short:
        yield problem(f"{where}.chunk_bits", "at least one bit for each weight", f"{int(short)} chunks with fewer")
    if room > total and int(stream[-1]) & ((1 << (room - total)) - 1):
        yield problem(f"{where}.stream", "zero bits after the last chunk", "other bits")


def _table_problems(tensors: Mapping[str, torch.Tensor], where: str) -> Iterator[CheckpointError]:
    """Check that the code lengths make a complete prefix code, of symbols that fit int32."""
    lengths = tensors["code_lengths"].to(torch.int64)
    if not 1 <= lengths.numel() <= MAX_SYMBOLS + 1 or not 1 <= int(lengths.max()) <= MAX_LENGTH:
        expected = f"1 to {MAX_SYMBOLS + 1} code lengths of at most {MAX_LENGTH} bits, at least one of them not zero"
        found = f"{lengths.numel()} lengths up to {int(lengths.max()) if lengths.numel() else 0}"
        yield problem(f"{where}.code_lengths", expected, found)
        return
    used = lengths[lengths > 0]
    kraft = int((1 << (MAX_LENGTH - used)).sum())
    if kraft != 1 << MAX_LENGTH and used.tolist() != [1]:
        found = f"a Kraft sum of {kraft / (1 << MAX_LENGTH):g}"
        yield problem(f"{where}.code_lengths", "a complete prefix code (Kraft sum 1)", found)
    first = int(tensors["first_symbol"])
    if first + lengths.numel() - 2 > torch.iinfo(torch.int32).max:
        found = f"{lengths.numel() - 1} symbols from {first} on"
        yield problem(f"{where}.first_symbol", "symbols that fit int32", found)
