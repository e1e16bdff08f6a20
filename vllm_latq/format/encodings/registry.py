"""The encodings of this version of the format, by name. FORMAT.md section 3.

A new encoding is a file beside this one, with a subclass of `Weight`, and a line of `ENCODINGS`.
"""

from collections.abc import Mapping

import torch

from vllm_latq.errors import ConfigError
from vllm_latq.format.encodings.huffman import HuffmanWeight
from vllm_latq.format.encodings.packed import PackedWeight
from vllm_latq.format.encodings.trellis import TrellisWeight
from vllm_latq.format.encodings.weight import Weight
from vllm_latq.format.scheme import CONFIG_KEY, LayerScheme
from vllm_latq.format.tensors import SHAPE, TensorSpec

ENCODINGS: dict[str, type[Weight]] = {
    "packed": PackedWeight,
    "huffman": HuffmanWeight,
    "trellis": TrellisWeight,
}


def encoding_of(scheme: LayerScheme) -> type[Weight]:
    """Return the encoding of a scheme; raise ConfigError if it is unknown or does not allow the scheme's values."""
    if scheme.encoding not in ENCODINGS:
        raise ConfigError(f"{CONFIG_KEY}.encoding", f"one of {', '.join(ENCODINGS)}", repr(scheme.encoding))
    encoding = ENCODINGS[scheme.encoding]
    encoding.check_scheme(scheme)
    return encoding


def tensor_specs(scheme: LayerScheme, rows: int, cols: int, where: str = "layer") -> Mapping[str, TensorSpec]:
    """Return suffix -> spec of every tensor of a linear [rows, cols] stored under `scheme`."""
    return {SHAPE: TensorSpec(torch.int32, (2,)), **encoding_of(scheme).specs(scheme, rows, cols, where)}


def tensor_suffixes() -> frozenset[str]:
    """Return every suffix that a quantized linear can have, under any scheme."""
    schemes = (encoding.full_scheme for encoding in ENCODINGS.values())
    return frozenset(suffix for scheme in schemes for suffix in tensor_specs(scheme, 1, 1))
