"""A quantized weight matrix in memory, in each of the encodings; those that are entropy-coded are defined here.

Invariant: an instance made by `from_tensors` has passed `validate.check`, so nothing that reads it leaves its bounds.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch

from vllm_latq.coding.huffman import decoder as huffman_decode
from vllm_latq.coding.huffman.stream import HuffmanStream, HuffmanTable
from vllm_latq.coding.rans import decoder as rans_decoder
from vllm_latq.coding.rans import encoder as rans_encoder
from vllm_latq.coding.rans import stream as rans
from vllm_latq.coding.rans.stream import RansStream
from vllm_latq.errors import REPAIR, CheckpointError
from vllm_latq.format import validate
from vllm_latq.format.config import LayerScheme
from vllm_latq.format.packed import PackedWeight, pack_integers, shape_tensor
from vllm_latq.format.served_size import served_bits
from vllm_latq.format.tensors import SHAPE, stored_bits

# A weight of an entropy-coded linear is smaller: no product of a scale and an integer overflows float32 or bfloat16.
WEIGHT_LIMIT = 2.0**127


@dataclass(frozen=True)
class HuffmanWeight:
    """W = scale * z with entropy-coded integers.

    Attributes:
        scale: float32 [1].
        stream: the encoded integers.
    """

    scale: torch.Tensor
    stream: HuffmanStream

    @property
    def shape(self) -> tuple[int, int]:
        return self.stream.shape

    @property
    def scheme(self) -> LayerScheme:
        return LayerScheme("huffman")

    @property
    def row_scales(self) -> torch.Tensor:
        """The scale of each row, float32 [rows] on the CPU."""
        return self.scale.cpu().expand(self.shape[0])

    @property
    def column_scales(self) -> None:
        """There are none."""

    @property
    def midrise(self) -> bool:
        """Zero is one of its integers."""
        return False

    def integers(self) -> torch.Tensor:
        """z, int32 [rows, cols] on the CPU."""
        return huffman_decode.decode_stream(self.stream, "stream")

    def dequantize(self, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """W, computed in float32 and rounded once to `dtype`, [rows, cols]."""
        return self.integers().to(torch.float32).mul_(self.scale.cpu()).to(dtype)

    def outlier_density(self) -> float:
        return 0.0

    def to_tensors(self) -> dict[str, torch.Tensor]:
        """Suffix -> tensor, as stored."""
        return {
            SHAPE: shape_tensor(self.shape),
            "scale": self.scale,
            "first_symbol": torch.tensor([self.stream.table.first_symbol], dtype=torch.int32),
            "code_lengths": torch.from_numpy(self.stream.table.lengths),
            "chunk_bits": self.stream.chunk_bits,
            "stream": self.stream.stream,
        }

    def storage_bits(self) -> int:
        return stored_bits(self.to_tensors())

    def served_bits(self) -> int:
        """Bits in memory while it is served, by itself; decodes it."""
        return served_bits(self.integers(), column_scales=False)

    def pack(self, integers: torch.Tensor, bits: int | None = None) -> PackedWeight:
        """Its decoded integers as b-bit inliers and CSR overflow, without loss, on their device.

        Args:
            integers: [rows, cols].
            bits: None picks the fewest bytes.
        """
        return pack_integers(integers, self.row_scales.to(integers.device), bits)

    @classmethod
    def from_tensors(
        cls, tensors: Mapping[str, torch.Tensor], scheme: LayerScheme, shape: tuple[int, int], where: str
    ) -> "HuffmanWeight":
        """Validate and wrap stored tensors (suffix -> tensor); raises CheckpointError. Decodes nothing."""
        validate.check(tensors, scheme, shape, where)
        lengths = np.ascontiguousarray(tensors["code_lengths"].cpu().numpy())
        table = HuffmanTable(int(tensors["first_symbol"]), lengths)
        return cls(tensors["scale"], HuffmanStream(table, tensors["chunk_bits"], tensors["stream"], shape))


@dataclass(frozen=True)
class RansWeight:
    """W[i, j] = scale * 2^(row_exponents[i] / 8) * (z[i, j] + h) * 2^(column_exponents[j] / 8) with entropy-coded z.

    Attributes:
        scale: float32 [1].
        row_exponents: int8 [rows], eighths of an octave.
        column_exponents: int8 [cols], eighths of an octave.
        stream: the encoded integers.
        midrise: whether h is 1/2 instead of 0.
    """

    scale: torch.Tensor
    row_exponents: torch.Tensor
    column_exponents: torch.Tensor
    stream: RansStream
    midrise: bool = False

    @property
    def shape(self) -> tuple[int, int]:
        return self.stream.shape

    @property
    def scheme(self) -> LayerScheme:
        return LayerScheme("rans", grid="midrise" if self.midrise else "midtread")

    @property
    def row_scales(self) -> torch.Tensor:
        """scale * row factor, rounded to float32, [rows] on the CPU."""
        return self.scale.cpu() * octave_eighths(self.row_exponents)

    @property
    def column_scales(self) -> torch.Tensor:
        """Column factors, float32 [cols] on the CPU."""
        return octave_eighths(self.column_exponents)

    def integers(self) -> torch.Tensor:
        """z, int32 [rows, cols] on the CPU; raises CheckpointError if the stream is damaged."""
        return rans_decoder.decode_stream(self.stream, "stream")

    def dequantize(self, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """W, ((z + h) * row_scales) * column_scales in float32, rounded once more to `dtype`, [rows, cols]."""
        weight = self.integers().to(torch.float32).add_(0.5 * self.midrise)
        return weight.mul_(self.row_scales.unsqueeze(1)).mul_(self.column_scales).to(dtype)

    def outlier_density(self) -> float:
        return 0.0

    def to_tensors(self) -> dict[str, torch.Tensor]:
        """Suffix -> tensor, as stored."""
        exponents = {"row_exponents": self.row_exponents, "column_exponents": self.column_exponents}
        return {SHAPE: shape_tensor(self.shape), "scale": self.scale, **exponents, **self.stream.tensors()}

    def storage_bits(self) -> int:
        return stored_bits(self.to_tensors())

    def served_bits(self) -> int:
        """Bits in memory while it is served, by itself; decodes it."""
        return served_bits(self.integers())

    def pack(self, integers: torch.Tensor, bits: int | None = None) -> PackedWeight:
        """Its decoded integers as b-bit inliers and CSR overflow, without loss, on their device.

        Args:
            integers: [rows, cols].
            bits: None picks the fewest bytes.
        """
        scales = self.row_scales.to(integers.device), self.column_scales.to(integers.device)
        return pack_integers(integers, scales[0], bits, scales[1], self.midrise)

    @classmethod
    def from_integers(
        cls,
        z: torch.Tensor,
        scale: torch.Tensor,
        row_exponents: torch.Tensor,
        column_exponents: torch.Tensor,
        midrise: bool = False,
    ) -> "RansWeight":
        """Encode int32 [rows, cols] on scale float32 [1] and exponents int8 [rows] and [cols]."""
        return cls(scale.cpu(), row_exponents.cpu(), column_exponents.cpu(), rans_encoder.encode(z), midrise)

    @classmethod
    def from_tensors(
        cls, tensors: Mapping[str, torch.Tensor], scheme: LayerScheme, shape: tuple[int, int], where: str
    ) -> "RansWeight":
        """Validate and wrap stored tensors (suffix -> tensor); raises CheckpointError. Decodes nothing."""
        validate.check(tensors, scheme, shape, where)
        parts = {name: tensors[name].cpu() for name in rans.STREAM_TENSORS}
        exponents = (tensors["row_exponents"].cpu(), tensors["column_exponents"].cpu())
        return cls(tensors["scale"].cpu(), *exponents, RansStream(**parts, shape=shape), scheme.grid == "midrise")


def octave_eighths(exponents: torch.Tensor) -> torch.Tensor:
    """2^(e / 8) for int8 [n]: the power in float64, rounded to float32, [n] on the CPU; the same on every machine."""
    powers = torch.tensor([2.0 ** (exponent / 8) for exponent in range(-128, 128)], dtype=torch.float64, device="cpu")
    return powers.to(torch.float32)[exponents.cpu().to(torch.int64) + 128]


Weight = PackedWeight | HuffmanWeight | RansWeight
CodedWeight = HuffmanWeight | RansWeight
_CLASSES: Mapping[str, type[Weight]] = {"packed": PackedWeight, "huffman": HuffmanWeight, "rans": RansWeight}


def weight_from_tensors(
    tensors: Mapping[str, torch.Tensor], scheme: LayerScheme, shape: tuple[int, int], where: str
) -> Weight:
    """Validate and wrap the tensors of one linear, whatever its encoding; raises CheckpointError."""
    return _CLASSES[scheme.encoding].from_tensors(tensors, scheme, shape, where)


def decode_checked(weight: CodedWeight, where: str) -> torch.Tensor:
    """Decode a coded weight on the CPU: int32 [rows, cols].

    Raises:
        CheckpointError: the stream is damaged, or scales and integers are so large that weights may be infinite.
    """
    if isinstance(weight, HuffmanWeight):
        integers = huffman_decode.decode_stream(weight.stream, f"{where}.stream")
    else:
        integers = rans_decoder.decode_stream(weight.stream, f"{where}.stream")
    check_range(weight, integers, where)
    return integers


def check_range(weight: CodedWeight, integers: torch.Tensor, where: str) -> None:
    """Raise CheckpointError if the decoded integers [rows, cols] times the weight's scales may be infinite."""
    columns = 1.0 if weight.column_scales is None else max(1.0, float(weight.column_scales.max()))
    largest = float(weight.row_scales.max()) * columns * max(-int(integers.min()), int(integers.max()) + weight.midrise)
    if largest >= WEIGHT_LIMIT:
        expected = f"a scale of which the largest multiple stays below {WEIGHT_LIMIT:g}"
        raise CheckpointError(f"{where}.scale", expected, f"{largest:g}", REPAIR)
