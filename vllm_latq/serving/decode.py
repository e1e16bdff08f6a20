"""Decode entropy-coded weights on the device that serves them: with Triton kernels where they run, else on the CPU."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch

from vllm_latq.coding.huffman import stream as huffman
from vllm_latq.coding.huffman.stream import HuffmanStream
from vllm_latq.errors import REPAIR, CheckpointError
from vllm_latq.format.encodings.weight import IntegerWeight
from vllm_latq.serving.layouts.tiled import has_kernels


def decode_on_device(weight: IntegerWeight, where: str, device: torch.device) -> torch.Tensor | None:
    """Return the integers of a weight, int32 [rows, cols] on `device`; None if it is not entropy coded.

    Raises:
        CheckpointError: the stream is damaged, or scales and integers are so large that weights may be infinite.
    """
    kernel = KERNELS.get(weight.scheme.encoding) if has_kernels(device) else None
    integers = weight.decode(where, None if kernel is None else partial(kernel, device))
    return None if integers is None else integers.to(device)


def _huffman_on_device(device: torch.device, stream: HuffmanStream, where: str) -> torch.Tensor:
    """Decode with the Triton kernel: int32 [rows, cols] on `device`; raises CheckpointError."""
    from vllm_latq.kernels.entropy.huffman import decode_huffman
    from vllm_latq.kernels.errors import KernelInputError

    try:
        return decode_huffman(*huffman_arguments(stream, device))
    except KernelInputError as error:
        raise CheckpointError(where, error.expected, error.found, REPAIR) from error


def huffman_arguments(stream: HuffmanStream, device: torch.device) -> tuple[Any, ...]:
    """Return the arguments of `decode_huffman` for a stream: its tensors on `device`, and constants of the format."""
    from vllm_latq.kernels.entropy.chunks import Cut
    from vllm_latq.kernels.entropy.huffman import HuffmanCode

    tensors = (stream.stream, stream.chunk_bits, torch.from_numpy(stream.table.lengths))
    cut = Cut(*stream.shape, *huffman.chunks_of(stream.shape).shape)
    code = HuffmanCode(huffman.MAX_LENGTH, huffman.MAX_SYMBOLS, huffman.ESCAPE_BITS)
    return *(part.to(device) for part in tensors), stream.table.first_symbol, cut, code


# Kernels by encoding; an encoding without one is decoded on the CPU.
KERNELS: Mapping[str, Callable[[torch.device, Any, str], torch.Tensor]] = {
    "huffman": _huffman_on_device,
}
