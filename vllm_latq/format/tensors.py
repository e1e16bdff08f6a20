"""The table of tensors that a quantized linear consists of. FORMAT.md section 3 is the same table in prose.

It drives the writer, the validator, the loaders and the tests: a tensor that is not in it does not exist.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from vllm_latq.coding.huffman import encoder as huffman
from vllm_latq.coding.packing import packed_words
from vllm_latq.coding.rans import stream as rans_coder
from vllm_latq.coding.rans.model import CLASS_BITS
from vllm_latq.format.config import WHOLE_ROW, LayerScheme
from vllm_latq.format.csr import column_dtype

SHAPE = "weight_shape"


@dataclass(frozen=True)
class TensorSpec:
    """dtype and shape of a stored tensor; None stands for a size that depends on the data."""

    dtype: torch.dtype
    shape: tuple[int | None, ...]

    def mismatch(self, tensor: torch.Tensor) -> str | None:
        """What a tensor is instead, its dtype and shape; None if it is as it should be."""
        same = len(tensor.shape) == len(self.shape) and all(
            want is None or want == got for want, got in zip(self.shape, tensor.shape, strict=True)
        )
        return None if same and tensor.dtype == self.dtype else f"{tensor.dtype} {tuple(tensor.shape)}"

    def bits(self, data: float = 0.0) -> float:
        """That it takes on disk, with `data` for a size that depends on the data."""
        return 8.0 * self.dtype.itemsize * math.prod(data if size is None else size for size in self.shape)

    def __str__(self) -> str:
        return f"{self.dtype} ({', '.join('*' if size is None else str(size) for size in self.shape)})"


def tensor_specs(scheme: LayerScheme, rows: int, cols: int, where: str = "layer") -> Mapping[str, TensorSpec]:
    """Suffix -> spec of every tensor of a linear [rows, cols] stored under `scheme`."""
    specs = {SHAPE: TensorSpec(torch.int32, (2,))}
    if scheme.encoding == "huffman":
        return specs | {
            "scale": TensorSpec(torch.float32, (1,)),
            "first_symbol": TensorSpec(torch.int32, (1,)),
            "code_lengths": TensorSpec(torch.uint8, (None,)),
            "chunk_bits": TensorSpec(torch.uint16, huffman.chunks_of((rows, cols)).grid),
            "stream": TensorSpec(torch.int32, (None,)),
        }
    if scheme.encoding == "rans":
        return specs | {
            "scale": TensorSpec(torch.float32, (1,)),
            "row_exponents": TensorSpec(torch.int8, (rows,)),
            "column_exponents": TensorSpec(torch.int8, (cols,)),
            "row_class": TensorSpec(torch.int32, (packed_words(rows, CLASS_BITS),)),
            "column_class": TensorSpec(torch.int32, (packed_words(cols, CLASS_BITS),)),
            "table_ranges": TensorSpec(torch.int32, (None, 2)),
            "frequencies": TensorSpec(torch.uint16, (None,)),
            "chunk_words": TensorSpec(torch.uint16, rans_coder.chunks_of((rows, cols)).grid),
            "stream": TensorSpec(torch.int32, (None,)),
        }
    assert scheme.bits is not None
    specs |= {
        "qweight": TensorSpec(torch.int32, (rows, packed_words(cols, scheme.bits))),
        "scales": TensorSpec(torch.bfloat16, (rows, scheme.groups(cols, where))),
    }
    if scheme.outliers:
        specs |= {
            "outlier_row_ptr": TensorSpec(torch.int32, (rows + 1,)),
            "outlier_col_idx": TensorSpec(column_dtype(cols), (None,)),
            "outlier_values": TensorSpec(torch.bfloat16, (None,)),
        }
    return specs


def tensor_suffixes() -> frozenset[str]:
    """Every suffix that a quantized linear can have, whatever its scheme."""
    schemes = (LayerScheme("huffman"), LayerScheme("rans"), LayerScheme("packed", 4, WHOLE_ROW, True))
    return frozenset(suffix for scheme in schemes for suffix in tensor_specs(scheme, 1, 1))


def stored_bits(tensors: Mapping[str, torch.Tensor]) -> int:
    """Bits that a linear's tensors take on disk: everything is counted."""
    return sum(8 * tensor.element_size() * tensor.numel() for tensor in tensors.values())
