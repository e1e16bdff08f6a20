"""Launch kernels with sizes that change while serving, on an sm_80 that is not there; count what Triton compiles.

Prints a line for each kernel: its name and its number of specializations. `test_launch.py` starts it.
"""

import dataclasses
from collections import defaultdict
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from triton import knobs

from helpers.dry_launch import empty, on_gpu, pretend_driver, without_memory
from helpers.trellis_weights import operands_of, random_trellis_weight
from vllm_latq.kernels.configs import GATHER_ROWS, SIMT, TRELLIS, decode_config
from vllm_latq.kernels.decode.dispatch import trellis_scratch
from vllm_latq.kernels.decode.launch import Scratch
from vllm_latq.kernels.decode.prefill import launch_dequantize
from vllm_latq.kernels.decode.simt import launch_simt
from vllm_latq.kernels.decode.ssqr import launch_ssqr
from vllm_latq.kernels.decode.trellis import launch_trellis
from vllm_latq.kernels.dev.audit import HUFFMAN
from vllm_latq.kernels.entropy.chunks import Cut
from vllm_latq.kernels.entropy.huffman import launch_huffman
from vllm_latq.kernels.experts.grouped import grouped_matmul
from vllm_latq.kernels.experts.routing import batch_size, route
from vllm_latq.kernels.experts.rows import activate, combine, gather
from vllm_latq.kernels.layout.trellis import pool_trellis

compiled: defaultdict[str, set[str]] = defaultdict(set)


def note(*, src: Any, metadata: dict[str, Any], **_: Any) -> None:
    """Remember a compiled kernel."""
    compiled[src.fn.__name__].add(metadata["hash"])
    assert metadata["enable_fp_fusion"]


def ints(*shape: int) -> torch.Tensor:
    """Return a fake int32 tensor."""
    return empty(torch.int32, *shape)


knobs.compilation.listener = note
pretend_driver()
weights = [on_gpu(100, 256), on_gpu(256, 4096), on_gpu(64, 512)]
shorter = on_gpu(128, 8192)
coded = [on_gpu(100, 512, coded=True), on_gpu(256, 4096, coded=True)]
trellises = []
for rows, cols in ((100, 512), (256, 4096)):
    weight = operands_of([random_trellis_weight(rows, cols, (4,))])
    pooled = dataclasses.replace(pool_trellis([weight] * 8), processors=108)
    trellises.append((without_memory(weight), without_memory(pooled)))
with FakeTensorMode():
    for m in (1, 2, 3, 4, 9, 16):
        for weight, parts in zip(weights, (1, 16, 2), strict=True):
            config, bf16 = decode_config(m, 2), torch.bfloat16
            x, y = empty(bf16, m, weight.cols), empty(bf16, m, weight.rows)
            partials = empty(torch.float32, 1) if parts > 1 else None
            transposed = empty(bf16, weight.cols, config.max_rows) if m > GATHER_ROWS else None
            launch_ssqr(x, weight, y, config, Scratch(parts, 1, partials, transposed))
            if weight.cols == 4096 and m <= 4:
                ranges = 8 >> (m - 1).bit_length()
                launch_ssqr(x, weight, y, config, Scratch(1, ranges, None, transposed))
                launch_ssqr(x, shorter, y, config, Scratch(1, ranges, None, transposed))
            if m in (3, 4):
                launch_simt(x, weight, y, SIMT, Scratch(parts, 1, partials))
    for weight in weights + coded:
        for first in (0, 2):
            launch_dequantize(weight, empty(torch.bfloat16, 128, weight.cols), first, 2)
    for weight in weights[1:]:
        tensors = {name: t for name, t in vars(weight).items() if isinstance(t, torch.Tensor)}
        stacks = {name: empty(t.dtype, 8, *t.shape) for name, t in tensors.items()}
        stack = dataclasses.replace(weight, processors=108, **stacks)
        for tokens in (1, 2, 3, 9, 32, 64, 90):  # batches of 1, 8, 8, 8, 16, 32 and 64 rows
            ids = ints(tokens, 2)
            routing = route(ids, batch_size(*ids.shape, 8, [stack]), [stack])
            x = empty(torch.bfloat16, tokens, stack.cols)
            y = grouped_matmul(gather(x, routing), stack, routing)
            for activation in ("silu", "relu2_no_mul"):
                activate(y, activation, routing)
            combine(y, empty(torch.float32, tokens, 2), routing)
    for weight, experts in trellises:
        for m in (1, 3, 4, 7):
            x, y = empty(torch.bfloat16, m, weight.cols), empty(torch.bfloat16, m, weight.rows)
            launch_trellis(x, weight, y, TRELLIS.stages, trellis_scratch(x, weight, 8 if m <= 4 else 16, 2))
        for tokens in (1, 2, 9, 20):  # batches of 1, 4, 4 and 8 rows
            ids = ints(tokens, 2)
            routing = route(ids, batch_size(*ids.shape, 8, [experts]), [experts])
            grouped_matmul(gather(empty(torch.bfloat16, tokens, experts.cols), routing), experts, routing)
    for rows, cols in ((1, 1), (160, 4096), (17, 100)):
        starts, used, z = empty(torch.int64, 16), ints(16), ints(rows, cols)
        cut = Cut(rows, cols, rows, cols)
        launch_huffman(ints(cols), ints(1 << 15), (-rows, rows), starts, used, z, cut, HUFFMAN)
for name, kernels in compiled.items():
    print(name, len(kernels))
