"""Decode entropy-coded weights on the device that serves them: by Triton kernels where they run, else on the CPU."""

import torch

from vllm_latq.coding.huffman.stream import HuffmanStream
from vllm_latq.coding.rans.stream import RansStream
from vllm_latq.errors import REPAIR, CheckpointError
from vllm_latq.format.coded import CodedWeight, HuffmanWeight, check_range, decode_checked
from vllm_latq.serving.layouts.tiled import has_kernels


def decode_on_device(weight: CodedWeight, where: str, device: torch.device) -> torch.Tensor:
    """Return the integers of a coded weight, int32 [rows, cols] on `device`.

    Raises:
        CheckpointError: the stream is damaged, or scales and integers are so large that weights may be infinite.
    """
    if not has_kernels(device):
        return decode_checked(weight, where).to(device)
    if isinstance(weight, HuffmanWeight):
        integers = _huffman_on_device(weight.stream, f"{where}.stream", device)
    else:
        integers = _rans_on_device(weight.stream, f"{where}.stream", device)
    check_range(weight, integers, where)
    return integers


def _huffman_on_device(stream: HuffmanStream, where: str, device: torch.device) -> torch.Tensor:
    """Decode with the Triton kernel: int32 [rows, cols] on `device`; raises CheckpointError."""
    from vllm_latq.kernels.entropy.huffman import decode_huffman
    from vllm_latq.kernels.errors import KernelInputError

    lengths = torch.from_numpy(stream.table.lengths)
    words, chunk_bits, lengths = (part.to(device) for part in (stream.stream, stream.chunk_bits, lengths))
    try:
        return decode_huffman(words, chunk_bits, lengths, stream.table.first_symbol, *stream.shape)
    except KernelInputError as error:
        raise CheckpointError(where, error.expected, error.found, REPAIR) from error


def _rans_on_device(stream: RansStream, where: str, device: torch.device) -> torch.Tensor:
    """Decode with the Triton kernel: int32 [rows, cols] on `device`; raises CheckpointError."""
    from vllm_latq.kernels.entropy.rans import decode_rans
    from vllm_latq.kernels.errors import KernelInputError

    classes = stream.classes()
    parts = (stream.stream, stream.chunk_words, *classes, stream.table_ranges, stream.frequencies)
    try:
        return decode_rans(*(part.to(device) for part in parts))
    except KernelInputError as error:
        raise CheckpointError(where, error.expected, error.found, REPAIR) from error
