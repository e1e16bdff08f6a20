"""Bounds of the decoding speed: memory bandwidth of a GPU over the bytes that a token reads.

A token reads the quantized weights, of routed experts as many as it is sent to, and all other tensors except embeddings
and what belongs to images or sound, nor quantized layers that predict further tokens. The KV cache is not counted.
"""

import math
import re
from collections.abc import Iterable, Mapping
from typing import Any

from vllm_latq.cli.report_cells import Linear
from vllm_latq.format.reader import CheckpointReader
from vllm_latq.models.experts import CHOSEN_EXPERTS, EXPERT
from vllm_latq.quantize.gpus import GIB, GPU_UTILIZATION, GPUS

SHOWN = ("L4", "RTX 4090", "RTX 5090", "A100 80 GB SXM", "H100 SXM", "H200", "B200")
# A small model's steps take the time of launching kernels, not of reading weights.
FASTEST = 10_000
EMBEDDING = "embed|wte|wpe"
HEAD = re.compile("lm_head|embed_out")
TOWER = "vision|visual|audio|image|tower"


def decode_speeds(linears: Iterable[Linear], reader: CheckpointReader) -> list[dict[str, Any]]:
    """Return, for some GPUs, `name`, `gib`, and the tokens per second of one sequence that bandwidth allows at most.

    `quantized` is the speed of the checkpoint and `original` of the model in 16 bits, None where weights do not fit.
    """
    linears, store = list(linears), reader.store
    share = _read_share(linears, reader.document)
    quantized = {linear.name for linear in linears}
    shapes, beside = reader.shapes, reader.config.beside
    others = {
        name: math.prod(store.shape(name))
        for name in store.names()
        if name.rpartition(".")[0] not in quantized.union(beside)
    }
    head = any(HEAD.search(name) for name in [*quantized, *others])
    unread = re.compile(f"{TOWER}|{EMBEDDING}" if head else TOWER)
    read = sum(size for name, size in others.items() if not unread.search(name))
    held = 2 * sum(others.values())
    latq = held + sum(linear.served_bits * linear.weights for linear in linears) / 8 + reader.beside_bytes
    plain = held + 2 * sum(linear.weights for linear in linears) + 2 * sum(math.prod(shapes[name]) for name in beside)
    latq_read = 2 * read + sum(linear.served_bits * linear.weights * share[linear.name] for linear in linears) / 8
    plain_read = 2 * read + 2 * sum(linear.weights * share[linear.name] for linear in linears)
    return [
        {
            "name": gpu.name,
            "gib": gpu.gib,
            "quantized": _speed(gpu, latq, latq_read),
            "original": _speed(gpu, plain, plain_read),
        }
        for gpu in GPUS
        if gpu.name in SHOWN
    ]


def _speed(gpu: Any, held: float, read: float) -> str | None:
    """Return the tokens per second, with two digits; None if the weights do not fit."""
    if held > GPU_UTILIZATION * gpu.gib * GIB or not read:
        return None
    speed = 1e9 * gpu.bandwidth / read
    if speed > FASTEST:
        return f"over {FASTEST:,}"
    return f"{round(speed, 1 - math.floor(math.log10(speed))):,.0f}"


def _read_share(linears: Iterable[Linear], config: Mapping[str, Any]) -> dict[str, float]:
    """Return the part of each linear that a token reads: 1, or for an expert the share of experts that are chosen."""
    text = config.get("text_config")
    sources = [config, text] if isinstance(text, Mapping) else [config]
    counts = [source.get(key) for source in sources for key in CHOSEN_EXPERTS]
    chosen = next((count for count in counts if type(count) is int and count > 0), None)
    layers = {linear.name: EXPERT.match(linear.name) for linear in linears}
    experts: dict[str, set[str]] = {}
    for name, match in layers.items():
        if match:
            experts.setdefault(match[1], set()).add(name[: match.end()])
    shares = {}
    for name, match in layers.items():
        count = len(experts[match[1]]) if match else 0
        shares[name] = min(1.0, chosen / count) if chosen and count else 1.0
    return shares
