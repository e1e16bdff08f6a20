"""The encoding `huffman`: integers on one scale, Huffman coded. FORMAT.md section 3.3."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Self

import numpy as np
import torch

from vllm_latq.coding.huffman.decoder import decode_stream, value_range
from vllm_latq.coding.huffman.stream import MAX_LENGTH, MAX_SYMBOLS, HuffmanStream, HuffmanTable, chunks_of
from vllm_latq.coding.packing import WORD_BITS
from vllm_latq.errors import CheckpointError, ConfigError
from vllm_latq.format.encodings.packed import PackedWeight, pack_integers
from vllm_latq.format.encodings.weight import Decoder, IntegerWeight
from vllm_latq.format.problems import problem
from vllm_latq.format.scheme import CONFIG_KEY, LayerScheme
from vllm_latq.format.tensors import TensorSpec

# A weight of an entropy-coded linear stays below this limit.
WEIGHT_LIMIT = 2.0**127


@dataclass(frozen=True)
class HuffmanWeight(IntegerWeight):
    """W = scale * z with entropy-coded integers z.

    Attributes:
        scale: float32 [1].
        stream: the encoded integers.
    """

    coded = True
    full_scheme = LayerScheme("huffman")

    scale: torch.Tensor
    stream: HuffmanStream

    @property
    def scheme(self) -> LayerScheme:
        """The scheme under which the weight is stored."""
        return self.full_scheme

    @classmethod
    def check_scheme(cls, scheme: LayerScheme) -> None:
        """Raise ConfigError for bits, a group size, outliers or a mid-rise grid, which the encoding does not have."""
        if scheme != cls.full_scheme:
            found = ", ".join(f"{key}={value!r}" for key, value in scheme.to_dict().items())
            raise ConfigError(CONFIG_KEY, "no bits, group_size, outliers or grid with encoding 'huffman'", found)

    @property
    def shape(self) -> tuple[int, int]:
        """(rows, cols)."""
        return self.stream.shape

    def integers(self) -> torch.Tensor:
        """Return z, int32 [rows, cols] on the CPU; raise CheckpointError if the stream is damaged."""
        return decode_stream(self.stream, "stream")

    def decode(self, where: str, decoder: Decoder | None = None) -> torch.Tensor:
        """Decode the integers and check that no weight is infinite; see `IntegerWeight.decode`."""
        integers = (decoder or decode_stream)(self.stream, f"{where}.stream")
        self._check_reach(int(integers.min()), int(integers.max()), where)
        return integers

    def check_decoding(self, where: str) -> None:
        """Decode a part of the weight at a time and check that no weight is infinite; see `Weight.check_decoding`."""
        self._check_reach(*value_range(self.stream, f"{where}.stream"), where)

    def _check_reach(self, lowest: int, highest: int, where: str) -> None:
        """Raise CheckpointError if integers of this range make a weight infinite."""
        largest = float(self.scale) * max(-lowest, highest)
        if largest >= WEIGHT_LIMIT:
            expected = f"a scale whose largest multiple stays below {WEIGHT_LIMIT:g}"
            raise problem(f"{where}.scale", expected, f"{largest:g}")

    def dequantize(self, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """Return W, z * scale in float32, rounded once more to `dtype`, [rows, cols]."""
        return self.integers().to(torch.float32).mul_(self.scale.cpu()).to(dtype)

    def pack(self, integers: torch.Tensor | None = None, bits: int | None = None) -> PackedWeight:
        """Return the decoded integers as b-bit inliers and CSR outliers; see `IntegerWeight.pack`."""
        z = self.integers() if integers is None else integers
        return pack_integers(z, self.scale.to(z.device).expand(self.shape[0]), bits)

    def served_bits(self) -> int:
        """Return the bits in memory while the weight is served by itself; decodes it."""
        return self.pack().served_bits()

    def outlier_counts(self) -> torch.Tensor:
        """Return zeros, int64 [rows]: no outliers are stored."""
        return torch.zeros(self.shape[0], dtype=torch.int64)

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
